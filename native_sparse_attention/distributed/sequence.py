"""A sequence that is divided over the ranks of a group: which rank holds what, and differentiable exchanges of tokens.

Every rank calls every exchange with the same layouts, in the same order. The backward pass runs the inverse exchanges
in the reverse order, provided that the inputs require gradients on all ranks or on none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from native_sparse_attention.core.autocast import concatenate
from native_sparse_attention.core.checks import validate_packing
from native_sparse_attention.core.geometry import num_compressed_blocks

# For each rank ascending ranges of tokens, or of compressed blocks.
Held = tuple[tuple[range, ...], ...]
# Ranges of local tokens of a sender, and of the tokens that the receiver gets.
Moves = list[tuple[range, range]]
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
        return fetch(x, self.group, self.shards, self.held)

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
    if held == wanted:
        return x
    if num_tokens(wanted) == 0:
        return x[:, :0]
    return _Fetch.apply(x, group, held, wanted)


def gather(tensors: Sequence[Tensor], group: Any, held: Held) -> tuple[Tensor, ...]:
    """Return all tokens `[B, S, H, D]` of each of the tensors `[B, T, H, D]`, whose last sizes may differ.

    Gradients are summed over the ranks, those of half types in float32.
    """
    if num_tokens(held) == 0:
        return tuple(tensors)
    out = _Gather.apply(concatenate(tensors, -1), group, held)
    return out.split([t.shape[-1] for t in tensors], -1)


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, held: Held, wanted: Held) -> Tensor:
        rank = dist.get_rank(group)
        sent = [_moves(held[rank], parts) for parts in wanted]
        received = [_moves(parts, wanted[rank]) for parts in held]
        ctx.group, ctx.shape, ctx.sent, ctx.received = group, x.shape, sent, received
        tokens = x.transpose(0, 1)
        return _exchange(tokens, sent, received, _length(wanted[rank]), group).transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        back, received = ([[(to, of) for of, to in moves] for moves in rank] for rank in (ctx.received, ctx.sent))
        out = _exchange(grad.transpose(0, 1), back, received, ctx.shape[1], ctx.group)
        return out.transpose(0, 1), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, held: Held) -> Tensor:
        ctx.group, ctx.held, ctx.seqlen = group, held, x.shape[1]
        longest = max(map(_length, held))
        tokens = x.new_empty(longest, x.shape[0], *x.shape[2:])
        tokens[: x.shape[1]] = x.transpose(0, 1)
        every = tokens.new_empty(len(held) * longest, *tokens.shape[1:])
        _all_gather(every, tokens, group=group)
        return concatenate([every[of.start : of.stop] for of, _ in _places(held)], 0).transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        longest, dtype = max(map(_length, ctx.held)), _sum_dtype(grad.dtype)
        tokens = grad.transpose(0, 1)
        every = tokens.new_zeros(len(ctx.held) * longest, *tokens.shape[1:], dtype=dtype)
        for of, to in _places(ctx.held):
            every[of.start : of.stop] = tokens[to.start : to.stop]
        mine = every.new_empty(longest, *every.shape[1:])
        _reduce_scatter(mine, every, group=ctx.group)
        return mine[: ctx.seqlen].to(grad.dtype).transpose(0, 1), None, None


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _length(parts: tuple[range, ...]) -> int:
    return sum(map(len, parts))


def _exchange(tokens: Tensor, sent: list[Moves], received: list[Moves], seqlen: int, group: Any) -> Tensor:
    """Return `[seqlen, ...]` with the tokens that other ranks send; those of one place are added.

    sent, received: the moves to and from each rank.
    """
    parts = [tokens[of.start : of.stop] for moves in sent for of, _ in moves]
    sizes, sizes_sent = ([sum(len(of) for of, _ in moves) for moves in rank] for rank in (received, sent))
    buffer = tokens.new_empty(sum(sizes), *tokens.shape[1:])
    dist.all_to_all_single(buffer, concatenate([tokens[:0], *parts], 0), sizes, sizes_sent, group)
    places = [to for moves in received for _, to in moves]
    placed = zip(places, buffer.split([len(place) for place in places]), strict=True)
    in_order = sorted(placed, key=lambda item: item[0].start)
    is_sum = any(a.stop > b.start for (a, _), (b, _) in pairwise(in_order))
    if not is_sum and len(buffer) == seqlen:  # in one pass over memory
        return concatenate([part for _, part in in_order], 0) if in_order else buffer
    out = buffer.new_zeros(seqlen, *tokens.shape[1:], dtype=_sum_dtype(tokens.dtype) if is_sum else tokens.dtype)
    for to, part in in_order:
        out[to.start : to.stop] += part
    return out.to(tokens.dtype)


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
