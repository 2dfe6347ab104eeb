"""A sequence that is divided over the ranks of a group: which rank holds what, and differentiable exchanges of tokens.

Every rank calls every exchange with the same layouts, in the same order. The backward pass runs the inverse exchanges
in the reverse order, provided that the inputs require gradients on all ranks or on none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from native_sparse_attention.core.autocast import concatenate, without_autocast
from native_sparse_attention.core.checks import validate_packing
from native_sparse_attention.core.geometry import num_compressed_blocks

# For each rank ascending ranges of tokens, or of compressed blocks.
Held = tuple[tuple[range, ...], ...]
# Ranges of local tokens of a sender, and of the tokens that the receiver gets.
Moves = list[tuple[range, range]]
# Ranks with ranges of their local tokens, and ranks with tensors that are sent to them or received from them.
Places = tuple[tuple[int, range], ...]
Tensors = list[tuple[int, Tensor]]
# PyTorch 2.13 has other names.
all_gather_single: Any = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor
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
    """Return the tokens `[B, N, ...]` that this rank needs, in the order of its ranges, of x `[B, T, ...]`."""
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


class Division(NamedTuple):
    """Exchange between the layout of the tensors `[B, T, ...]` of a call and the tokens for which each rank computes.

    A rank holds the tokens for which it computes, see `DividedSequence.held`. The tensor of a rank has those of its
    part of the layout.

    Attributes:
        group: process group of the ranks.
        rank: this rank.
        taken: (rank, range) for each range of tokens that this rank holds: the rank whose tensor has them, and where.
        lent: (rank, range) for each range of tokens of the tensor of this rank: the rank that holds them, and where
            they are in this tensor.
        is_local: each rank holds the tokens of its own tensor, so nothing is exchanged.
    """

    group: Any
    rank: int
    taken: Places
    lent: Places
    is_local: bool

    @classmethod
    def of(cls, group: Any, layout: Held, held: Held) -> Division:
        """Return the division for a layout. Each range of `held` must lie in one range of the layout."""
        rank = dist.get_rank(group)
        return cls(group, rank, *_divided(layout, held, rank), layout == held)

    def split(self, x: Tensor, kv_heads: int) -> tuple[Tensor, ...]:
        """Return pieces `[B, N, G, ...]` of x `[B, T, HQ, ...]`, one per KV head for each range that this rank holds.

        Pieces of tokens of the own tensor are views of x. A rank that holds no tokens gets one token of 0, so that it
        performs the same operations as the others.
        """
        return _Split.apply(x, self, kv_heads)

    def join(self, out: Tensor, pieces: Sequence[Tensor], head: int) -> Tensor:
        """Write the pieces of one KV head, as `split` returns them, into out `[B, T, HQ, ...]` in place; return out."""
        return _Join.apply(out, self, head, *pieces)

    def parts_of(self, x: Tensor) -> list[Tensor]:
        """Return `[B, N, ...]` for each range that this rank holds: a view of x, or new memory for tokens of others."""
        batch, _, *sizes = x.shape
        return [_cut(x, of) if rank == self.rank else x.new_empty(batch, len(of), *sizes) for rank, of in self.taken]

    def fill_parts(self, parts: Sequence[Tensor], x: Tensor) -> None:
        """Fill the parts of other ranks with tokens of x."""
        if not self.is_local:
            of_parts, of_x = self._of_others(parts, x)
            _exchange(of_x, of_parts, self.group, x)

    def fill_tokens(self, x: Tensor, parts: Sequence[Tensor]) -> None:
        """Fill the tokens of x that other ranks hold with their parts."""
        if not self.is_local:
            of_parts, of_x = self._of_others(parts, x)
            _exchange(of_parts, of_x, self.group, x)

    def _of_others(self, parts: Sequence[Tensor], x: Tensor) -> tuple[Tensors, Tensors]:
        of_parts = [(rank, t) for (rank, _), t in zip(self.taken, parts, strict=False) if rank != self.rank]
        return of_parts, [(rank, _cut(x, of)) for rank, of in self.lent if rank != self.rank]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, division: Division, kv_heads: int) -> tuple[Tensor, ...]:
        ctx.division, ctx.kv_heads, ctx.shape = division, kv_heads, x.shape
        parts = division.parts_of(x)
        division.fill_parts(parts, x)
        parts = parts or [x.new_zeros(x.shape[0], 1, *x.shape[2:])]
        return tuple(piece for part in parts for piece in part.chunk(kv_heads, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        out = grads[0].new_empty(ctx.shape)
        parts = ctx.division.parts_of(out)
        for index, part in enumerate(parts):
            pieces = grads[index * ctx.kv_heads : (index + 1) * ctx.kv_heads]
            with without_autocast(out):
                torch.cat(pieces, 2, out=part)
        ctx.division.fill_tokens(out, parts)
        return out, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, division: Division, head: int, *pieces: Tensor) -> Tensor:
        ctx.division, ctx.head, ctx.shapes = division, head, [t.shape for t in pieces]
        ctx.mark_dirty(out)
        # Each head is written, and its gradient fetched, by itself, so that no copy of all heads exists.
        columns = out.split(pieces[0].shape[2], 2)[head]
        for (rank, of), piece in zip(division.taken, pieces, strict=False):
            if rank == division.rank:
                _cut(columns, of).copy_(piece)
        division.fill_tokens(columns, pieces)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        columns = grad.split(ctx.shapes[0][2], 2)[ctx.head]
        parts = ctx.division.parts_of(columns)
        ctx.division.fill_parts(parts, columns)
        return grad, None, None, *(parts or map(grad.new_zeros, ctx.shapes))


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, held: Held, wanted: Held) -> Tensor:
        rank = dist.get_rank(group)
        sent = [_moves(held[rank], parts) for parts in wanted]
        received = [_moves(parts, wanted[rank]) for parts in held]
        ctx.group, ctx.seqlen, ctx.sent, ctx.received = group, x.shape[1], sent, received
        return _move(x.transpose(0, 1), sent, received, _length(wanted[rank]), group).transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        back, received = ([[(to, of) for of, to in moves] for moves in rank] for rank in (ctx.received, ctx.sent))
        out = _move(grad.transpose(0, 1), back, received, ctx.seqlen, ctx.group)
        return out.transpose(0, 1), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, held: Held) -> Tensor:
        ctx.group, ctx.held, ctx.seqlen = group, held, x.shape[1]
        longest, places = max(map(_length, held)), _places(held)
        tokens = x.transpose(0, 1).contiguous()
        if len(tokens) < longest:
            tokens = concatenate([tokens, tokens.new_empty(longest - len(tokens), *tokens.shape[1:])], 0)
        every = tokens.new_empty(len(held) * longest, *tokens.shape[1:])
        all_gather_single(every, tokens, group=group)
        # A view without the padding of shorter shards would keep its memory for the backward pass.
        if len(every) > num_tokens(held) or any(of != to for of, to in places):
            every = concatenate([every[of.start : of.stop] for of, _ in places], 0)
        return every.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        longest, dtype = max(map(_length, ctx.held)), _sum_dtype(grad.dtype)
        tokens = grad.transpose(0, 1)
        allocate = tokens.new_empty if len(ctx.held) * longest == len(tokens) else tokens.new_zeros
        every = allocate(len(ctx.held) * longest, *tokens.shape[1:], dtype=dtype)
        for of, to in _places(ctx.held):
            every[of.start : of.stop] = tokens[to.start : to.stop]
        mine = every.new_empty(longest, *every.shape[1:])
        _reduce_scatter(mine, every, group=ctx.group)
        return mine[: ctx.seqlen].to(grad.dtype).transpose(0, 1), None, None


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _length(parts: tuple[range, ...]) -> int:
    return sum(map(len, parts))


def _cut(x: Tensor, part: range) -> Tensor:
    return x[:, part.start : part.stop]


def _move(tokens: Tensor, sent: list[Moves], received: list[Moves], seqlen: int, group: Any) -> Tensor:
    """Return `[seqlen, ...]` with the tokens that ranks send; those of one place are added.

    sent, received: the moves to and from each rank.
    """
    sizes = tokens.shape[1:]
    sources = [(rank, tokens[of.start : of.stop]) for rank, moves in enumerate(sent) for of, _ in moves]
    places = [(rank, to) for rank, moves in enumerate(received) for _, to in moves]
    in_order = sorted((to for _, to in places), key=lambda to: to.start)
    if any(a.stop > b.start for a, b in pairwise(in_order)):
        targets = [(rank, tokens.new_empty(len(to), *sizes)) for rank, to in places]
        _exchange(sources, targets, group, tokens)
        out = tokens.new_zeros(seqlen, *sizes, dtype=_sum_dtype(tokens.dtype))
        for (_, to), (_, target) in sorted(zip(places, targets, strict=True), key=lambda pair: pair[0][1].start):
            out[to.start : to.stop] += target
        return out.to(tokens.dtype)
    allocate = tokens.new_empty if sum(map(len, in_order)) == seqlen else tokens.new_zeros
    out = allocate(seqlen, *sizes)
    _exchange(sources, [(rank, out[to.start : to.stop]) for rank, to in places], group, tokens)
    return out


def _exchange(sent: Tensors, received: Tensors, group: Any, like: Tensor) -> None:
    """Fill the tensors that this rank receives with those that ranks send to it, in the same order.

    A single contiguous tensor that is sent to, or received from, another rank needs no message buffer. like: a tensor
    of the same device and dtype.
    """
    rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    mine = ([t for peer, t in tensors if peer == rank] for tensors in (received, sent))
    for target, source in zip(*mine, strict=True):
        target.copy_(source)
    sent, received = ([item for item in tensors if item[0] != rank] for tensors in (sent, received))
    sizes, sizes_sent = (
        [sum(t.numel() for peer, t in tensors if peer == other) for other in ranks] for tensors in (received, sent)
    )
    source, places_sent = _buffer(sent, like)
    for place, t in places_sent:
        place.copy_(t)
    buffer, places = _buffer(received, like)
    dist.all_to_all_single(buffer, source, sizes, sizes_sent, group)
    for place, t in places:
        t.copy_(place)


def _buffer(tensors: Tensors, like: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return a flat message buffer for tensors, in the order of their ranks, and pairs of a slice of it and its tensor.

    A single contiguous tensor is its own buffer. There are no pairs then, because nothing has to be copied.
    """
    in_order = [t for _, t in sorted(tensors, key=lambda item: item[0])]
    if len(in_order) == 1 and in_order[0].is_contiguous():
        return in_order[0].view(-1), []
    buffer = like.new_empty(sum(t.numel() for t in in_order))
    places = buffer.split([t.numel() for t in in_order])
    return buffer, [(place.view(t.shape), t) for place, t in zip(places, in_order, strict=True)]


def _moves(held: tuple[range, ...], wanted: tuple[range, ...]) -> Moves:
    """Return the moves from a rank that holds these tokens to one that needs others."""
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


@lru_cache(maxsize=64)
def _divided(layout: Held, held: Held, rank: int) -> tuple[Places, Places]:
    """Return `taken` and `lent` of a rank, see `Division`."""
    every = [
        (taker, owner, of)
        for taker, parts in enumerate(held)
        for part in parts
        for owner, given in enumerate(layout)
        for of, _ in _moves(given, (part,))
    ]
    taken = tuple((owner, of) for taker, owner, of in every if taker == rank)
    return taken, tuple((taker, of) for taker, owner, of in every if owner == rank)
