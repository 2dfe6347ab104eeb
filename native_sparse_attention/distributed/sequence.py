"""A sequence that is divided over the ranks of a group: which rank holds what, and differentiable exchanges of tokens.

Every rank calls every exchange with the same layouts, in the same order. The backward pass runs the inverse exchanges
in the reverse order, provided that the inputs require gradients on all ranks or on none.

A function that begins an exchange returns a function that waits for it. What is computed between the two runs at the
same time. The backward pass begins the inverse exchange where the forward waited, and waits where the forward began, so
there it runs at the same time as the backward pass of the same computation. Every exchange must be waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from native_sparse_attention.core.checks import validate_packing
from native_sparse_attention.core.geometry import num_compressed_blocks

# For each rank ascending ranges of tokens, or of compressed blocks.
Held = tuple[tuple[range, ...], ...]
# Ranges of local tokens of a sender, and of the tokens that the receiver gets.
Moves = list[tuple[range, range]]
Result = Callable[[], Tensor]
# PyTorch 2.13 has other names.
_all_gather: Any = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, 'reduce_scatter_single', None) or dist.reduce_scatter_tensor
run_uncompiled: Any = torch.compiler.disable  # exchanges differ between ranks, and so would graphs


@dataclass(frozen=True, eq=False)
class DividedSequence:
    """The tokens of one row, or of packed sequences, over the ranks of a group.

    Attributes:
        group: process group of the ranks.
        shards: tokens that a rank is given and returns, one range per rank, in the order of the ranks.
        held: tokens for which a rank computes, see `balanced`.
        sequences: tokens of each packed sequence, or of the only one.
        cu_seqlens: borders of packed sequences, int32 `[N + 1]`, or None.
    """

    group: Any
    shards: Held
    held: Held
    sequences: tuple[range, ...]
    cu_seqlens: Tensor | None

    @classmethod
    def agree(cls, group: Any, seqlen: int, cu_seqlens: Tensor | None, described: dict[str, Any]) -> DividedSequence:
        """Return the sequence of which this rank has seqlen tokens.

        described: arguments by name, which the ranks compare. Raises ValueError on all ranks if they differ, if the
        ranks have no tokens, or if cu_seqlens does not fit.
        """
        borders = None if cu_seqlens is None else cu_seqlens.cpu()
        described = {**described, 'cu_seqlens': None if borders is None else borders.tolist()}
        ranks = exchange_objects(group, (seqlen, described))
        first = ranks[0][1]
        for rank, (_, others) in enumerate(ranks):
            for name in {**first, **others}:
                if first.get(name) != others.get(name):
                    raise ValueError(f'{name} is {first.get(name)} on rank 0, but {others.get(name)} on rank {rank}')
        lengths = [length for length, _ in ranks]
        if sum(lengths) == 0:
            raise ValueError('the shards of a sequence have 0 tokens together, but must have at least 1')
        if borders is not None:
            validate_packing(sum(lengths), borders)
        return cls._of(group, lengths, [0, sum(lengths)] if borders is None else borders.tolist(), cu_seqlens)

    @classmethod
    def _of(cls, group: Any, lengths: list[int], borders: list[int], cu_seqlens: Tensor | None) -> DividedSequence:
        shards = tuple((range(start, stop),) for start, stop in pairwise(accumulate(lengths, initial=0)))
        return cls(group, shards, balanced(shards), tuple(map(range, borders[:-1], borders[1:])), cu_seqlens)

    def without_last(self) -> DividedSequence:
        """Return the sequence without its last token."""
        stop = self.total - 1
        lengths = [len(range(shard.start, min(shard.stop, stop))) for (shard,) in self.shards]
        borders = [0, *(min(sequence.stop, stop) for sequence in self.sequences)]
        return self._of(
            self.group, lengths, borders, None if self.cu_seqlens is None else self.cu_seqlens.clamp(max=stop)
        )

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def total(self) -> int:
        return num_tokens(self.shards)

    def spread(self, x: Tensor) -> Tensor:
        """Return the tokens `[B, N, ...]` that this rank holds, of its shard x `[B, T, ...]`."""
        return self.begin_spread(x)()

    def begin_spread(self, x: Tensor) -> Result:
        """Begin `spread`."""
        return begin_fetch(x, self.group, self.shards, self.held)

    def collect(self, x: Tensor) -> Tensor:
        """Return the inverse of `spread`."""
        return fetch(x, self.group, self.held, self.shards)


def balanced(shards: Held) -> Held:
    """Return for each rank the first half of its shard and the second half of the shard that mirrors it.

    Causal attention over the whole past then costs the same on all ranks, if the shards have one length.
    """
    held = []
    for (mine,), (mirrored,) in zip(shards, reversed(shards), strict=True):
        halves = (mine,) if mine == mirrored else (mine[: len(mine) // 2], mirrored[len(mirrored) // 2 :])
        held.append(tuple(sorted((half for half in halves if half), key=lambda half: half.start)))
    return tuple(held)


def num_tokens(held: Held) -> int:
    return sum(map(_length, held))


@lru_cache(maxsize=64)
def owned_blocks(held: Held, sequences: tuple[range, ...], block_size: int, stride: int) -> tuple[Held, Held]:
    """Return for each rank the tokens of the compressed blocks that start in its tokens, and the indices of the blocks.

    The ranges of tokens of a rank may overlap. The blocks of packed sequences follow each other.
    """
    tokens: list[list[range]] = [[] for _ in held]
    blocks: list[list[range]] = [[] for _ in held]
    for rank, parts in enumerate(held):
        for part in parts:
            before = 0  # blocks of earlier sequences
            for sequence in sequences:
                count = num_compressed_blocks(len(sequence), block_size, stride)
                first, stop = (-((sequence.start - at) // stride) for at in (part.start, part.stop))
                owned = range(max(0, first), min(count, stop))
                if owned:
                    start = sequence.start + owned.start * stride
                    tokens[rank].append(range(start, start + (len(owned) - 1) * stride + block_size))
                    blocks[rank].append(range(before + owned.start, before + owned.stop))
                before += count
    return tuple(map(tuple, tokens)), tuple(map(tuple, blocks))


def exchange_objects(group: Any, mine: Any) -> list[Any]:
    """Return what each rank gives. If a rank gives an exception, it raises that, and the others raise ValueError."""
    found: list[Any] = [None] * dist.get_world_size(group)
    is_error = isinstance(mine, Exception)
    dist.all_gather_object(found, (is_error, str(mine) if is_error else mine), group)
    if is_error:
        raise mine
    for rank, (is_error, value) in enumerate(found):
        if is_error:
            raise ValueError(f'rank {rank} of the group raises: {value}')
    return [value for _, value in found]


def fetch(x: Tensor, group: Any, held: Held, wanted: Held) -> Tensor:
    """Return the tokens `[B, N, ...]` that this rank wants, in the order of its ranges, of x `[B, T, ...]`."""
    return begin_fetch(x, group, held, wanted)()


def begin_fetch(x: Tensor, group: Any, held: Held, wanted: Held) -> Result:
    """Begin `fetch`."""
    if held == wanted:
        return lambda: x
    if num_tokens(wanted) == 0:
        return lambda: x[:, :0]
    rank = dist.get_rank(group)
    sent = [_moves(held[rank], parts) for parts in wanted]
    received = [_moves(parts, wanted[rank]) for parts in held]
    back, returned = ([[(to, of) for of, to in moves] for moves in each] for each in (received, sent))
    forward = partial(_exchange, sent=sent, received=received, seqlen=_length(wanted[rank]), group=group)
    backward = partial(_exchange, sent=back, received=returned, seqlen=x.shape[1], group=group)
    return _begin(x, forward, backward)


def gather(tensors: Sequence[Tensor], group: Any, held: Held) -> tuple[Tensor, ...]:
    """Return all tokens `[B, S, H, D]` of each of the tensors `[B, T, H, D]`, whose last sizes may differ.

    Gradients are summed over the ranks, those of half types in float32.
    """
    return begin_gather(tensors, group, held)()


def begin_gather(tensors: Sequence[Tensor], group: Any, held: Held) -> Callable[[], tuple[Tensor, ...]]:
    """Begin `gather`."""
    if num_tokens(held) == 0:
        return lambda: tuple(tensors)
    x, sizes = torch.cat(list(tensors), -1), [t.shape[-1] for t in tensors]
    wait = _begin(x, partial(_gather, group=group, held=held), partial(_scatter, group=group, held=held))
    return lambda: wait().split(sizes, -1)


@dataclass(eq=False)
class _Exchange:
    """An exchange and its inverse, as functions that begin them. running: the one that is not waited for yet."""

    forward: Callable[[Tensor], Result]
    backward: Callable[[Tensor], Result]
    running: Result | None = None

    def finish(self) -> Tensor:
        running, self.running = self.running, None
        assert running is not None
        return running()


def _begin(x: Tensor, forward: Callable[[Tensor], Result], backward: Callable[[Tensor], Result]) -> Result:
    exchange = _Exchange(forward, backward)
    begun = _Begin.apply(x, exchange)
    return lambda: _Wait.apply(begun, exchange)


class _Begin(torch.autograd.Function):
    """Begin an exchange. The result, of no elements, orders the backward pass: it is the input of `_Wait`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.running = exchange.forward(x)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.exchange.finish(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begun: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.exchange.running = ctx.exchange.backward(grad)
        return grad.new_empty(0), None


def _gather(x: Tensor, group: Any, held: Held) -> Result:
    """Begin to gather the tokens of all ranks, of x `[B, T, ...]` of this rank."""
    longest = max(map(_length, held))
    tokens = x.new_empty(longest, x.shape[0], *x.shape[2:])
    tokens[: x.shape[1]] = x.transpose(0, 1)
    every = tokens.new_empty(len(held) * longest, *tokens.shape[1:])
    work = _all_gather(every, tokens, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return torch.cat([every[of.start : of.stop] for of, _ in _places(held)]).transpose(0, 1)

    return finish


def _scatter(grad: Tensor, group: Any, held: Held) -> Result:
    """Begin to sum grad `[B, S, ...]` over the ranks, for the tokens of this rank."""
    longest, seqlen, dtype = max(map(_length, held)), _length(held[dist.get_rank(group)]), grad.dtype
    tokens = grad.transpose(0, 1)
    every = tokens.new_zeros(len(held) * longest, *tokens.shape[1:], dtype=_sum_dtype(dtype))
    for of, to in _places(held):
        every[of.start : of.stop] = tokens[to.start : to.stop]
    mine = every.new_empty(longest, *every.shape[1:])
    work = _reduce_scatter(mine, every, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return mine[:seqlen].to(dtype).transpose(0, 1)

    return finish


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _length(parts: tuple[range, ...]) -> int:
    return sum(map(len, parts))


def _exchange(x: Tensor, sent: list[Moves], received: list[Moves], seqlen: int, group: Any) -> Result:
    """Begin to receive `[B, seqlen, ...]`, the tokens that other ranks send; those of one place are added.

    sent, received: the moves to and from each rank.
    """
    tokens, dtype = x.transpose(0, 1), x.dtype
    parts = [tokens[of.start : of.stop] for moves in sent for of, _ in moves]
    sizes, sizes_sent = ([sum(len(of) for of, _ in moves) for moves in rank] for rank in (received, sent))
    buffer = tokens.new_empty(sum(sizes), *tokens.shape[1:])
    work = dist.all_to_all_single(buffer, torch.cat([tokens[:0], *parts]), sizes, sizes_sent, group, async_op=True)

    def finish() -> Tensor:
        work.wait()  # type: ignore[union-attr]
        return _in_order(buffer, [to for moves in received for _, to in moves], seqlen, dtype).transpose(0, 1)

    return finish


def _in_order(buffer: Tensor, places: list[range], seqlen: int, dtype: torch.dtype) -> Tensor:
    """Return `[seqlen, ...]` with the tokens of the buffer at their places; those of one place are added."""
    placed = zip(places, buffer.split([len(place) for place in places]), strict=True)
    in_order = sorted(placed, key=lambda item: item[0].start)
    is_sum = any(a.stop > b.start for (a, _), (b, _) in pairwise(in_order))
    if not is_sum and len(buffer) == seqlen:  # in one pass over memory
        return torch.cat([part for _, part in in_order]) if in_order else buffer
    out = buffer.new_zeros(seqlen, *buffer.shape[1:], dtype=_sum_dtype(dtype) if is_sum else dtype)
    for to, part in in_order:
        out[to.start : to.stop] += part
    return out.to(dtype)


def _moves(held: tuple[range, ...], wanted: tuple[range, ...]) -> Moves:
    """Return the moves from a rank that holds these tokens to one that wants those."""
    moves, at = [], 0
    for want in wanted:
        local = 0
        for part in held:
            start, stop = max(part.start, want.start), min(part.stop, want.stop)
            if start < stop:
                of, to = local + start - part.start, at + start - want.start
                moves.append((range(of, of + stop - start), range(to, to + stop - start)))
            local += len(part)
        at += len(want)
    return moves


@lru_cache(maxsize=64)
def _places(held: Held) -> Moves:
    """Return the places of all parts among padded tokens of all ranks and in the sequence, in the order of these."""
    longest, moves = max(map(_length, held)), []
    for rank, parts in enumerate(held):
        at = rank * longest
        for part in parts:
            moves.append((range(at, at + len(part)), part))
            at += len(part)
    return sorted((move for move in moves if move[1]), key=lambda move: move[1].start)
