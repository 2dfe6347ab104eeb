"""Integer arithmetic of blocks, windows and visibility, on ints or integer tensors.

All rules about which keys a query may read are here: the eager ops, the FlexAttention masks and the cache call these
functions. Letters: l = compress_block_size, d = stride, l' = selection_block_size, t = position of a query in its
sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Integer = TypeVar('Integer', int, Tensor)


def num_compressed_blocks(length: Integer, block_size: int, stride: int) -> Integer:
    """Return C = max(0, (length - l) // d + 1), the compressed blocks that `length` tokens complete."""
    return _clamp_min((length - block_size) // stride + 1, 0)


def num_selection_blocks(length: Integer, block_size: int) -> Integer:
    """Return the selection blocks that `length` tokens touch; the last one may be incomplete."""
    return (length + block_size - 1) // block_size


def max_length_of_compressed(num_compressed: int, block_size: int, stride: int) -> int:
    """Return the largest length with exactly `num_compressed` compressed blocks."""
    return num_compressed * stride + block_size - 1


def compressed_block_end(block: Integer, block_size: int, stride: int) -> Integer:
    """Return the last token of a compressed block; the block is visible from that position on."""
    return block * stride + block_size - 1


def overlapping_blocks(block_size: int, stride: int, selection_block_size: int) -> range:
    """Return the offsets o of the compressed blocks that share tokens with a selection block.

    Selection block j shares tokens with the compressed blocks j * (l' / d) + o, whatever j is, because l' is a multiple
    of d. For l = 32, d = 16, l' = 64 the offsets are -1 ... 3, and these blocks share 16, 32, 32, 32, 16 tokens.
    """
    return range(-((block_size - 1) // stride), selection_block_size // stride)


def shared_tokens(offset: Integer, block_size: int, stride: int, selection_block_size: int) -> Integer:
    """Return the number of tokens that selection block j and compressed block j * (l' / d) + offset share."""
    start = offset * stride
    return _clamp_max(start + block_size, selection_block_size) - _clamp_min(start, 0)


def forced_priority(block: Integer, own_block: Integer, num_init: int, num_local: int, causal: bool) -> Integer:
    """Return the priority of a forced block, larger for blocks that are selected earlier; 0 for a block that is not
    forced.

    The own block comes first, then the initial blocks, then the other local ones, nearer first and left before right.
    """
    distance = own_block - block
    reach = abs(distance)
    is_own = (distance == 0) & (num_local > 0)
    is_local = (reach < num_local) & ((distance >= 0) | (not causal))
    own = is_own * (2 * num_local + num_init + 1)
    initial = _clamp_min(num_init - block, 0) + (block < num_init) * (2 * num_local)
    local = is_local * (2 * num_local - 2 * reach + (distance > 0))
    return _maximum(_maximum(own, initial), local)


def num_forced_blocks(num_init: int, num_local: int, causal: bool) -> int:
    """Return the number of forced blocks per row in a sequence that is long enough for all of them."""
    return num_init + (num_local if causal else max(0, 2 * num_local - 1))


def in_window(key_position: Integer, position: Integer, left: int, right: int) -> Integer:
    """Return whether a query at `position` reads the key at `key_position`; -1 means unbounded on that side."""
    distance = position - key_position
    return ((distance <= left) | (left < 0)) & ((-distance <= right) | (right < 0))


@dataclass(frozen=True)
class QueryLayout:
    """Position of every query, and extent of its sequence's keys.

    position, key_start, key_len: int64 `[B, T]`: the query's position in its sequence, the key-axis index of the
    sequence's first key, and its number of keys. Key p of the sequence has the index `key_start + p`. covered: bool
    `[B, T]`, False for a query that belongs to no sequence (its key_len is 0).
    """

    position: Tensor
    key_start: Tensor
    key_len: Tensor
    covered: Tensor

    def chunk(self, start: int, stop: int) -> QueryLayout:
        return QueryLayout(*(t[:, start:stop] for t in (self.position, self.key_start, self.key_len, self.covered)))

    def key_position(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return, for key indices broadcastable against `[B, T, ...]`, their position in each query's sequence, and
        whether they belong to it.
        """
        extra = (...,) + (None,) * (index.dim() - 2)
        key_position = index - self.key_start[extra]
        return key_position, (key_position >= 0) & (key_position < self.key_len[extra])


class Sequences(NamedTuple):
    """Sequence boundaries and query offsets of a call: the checked arguments that every op takes.

    batch, seqlen_q, seqlen_k: ints B, T, S. q_offset: int, int tensor `[B]` (packed: `[N]`) or None, which aligns the
    ends of queries and keys. seqlens_k: int32 `[B]` or None. cu_seqlens, cu_seqlens_k: int32 `[N + 1]` or None, both or
    neither.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    device: torch.device
    q_offset: int | Tensor | None = None
    seqlens_k: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    @property
    def queries_follow_keys(self) -> bool:
        """Whether adjacent queries have adjacent own keys, also across the boundaries of packed sequences."""
        if self.cu_seqlens is None:
            return True
        return self.cu_seqlens_k is self.cu_seqlens and not isinstance(self.q_offset, Tensor)

    def layout(self, rows: Tensor | None = None) -> QueryLayout:
        """Return the positions of the queries and the extents of their keys, in tokens.

        rows: int64 `[B, R]`, the queries that the layout is of; default all of them.
        """
        return self._layout(*self._token_extents(), rows)

    def compressed_layout(self, block_size: int, stride: int, rows: Tensor | None = None) -> tuple[QueryLayout, Tensor]:
        """Return the layout with `key_start` and `key_len` in compressed blocks, and the tokens `[B, T]` of each
        query's sequence. rows: as in `layout`.
        """
        starts, lengths = self._token_extents()
        blocks = num_compressed_blocks(lengths, block_size, stride)
        block_starts = blocks.cumsum(0) - blocks if self.cu_seqlens is not None else starts
        tokens = self._layout(starts, lengths, rows)
        return self._layout(block_starts, blocks, rows, tokens.position), tokens.key_len

    def _token_extents(self) -> tuple[Tensor, Tensor]:
        """Return first key and number of keys of every sequence: `[N]` if packed, else `[B]`."""
        if self.cu_seqlens_k is not None:
            ends = self.cu_seqlens_k.long()
            return ends[:-1], ends.diff()
        if self.seqlens_k is not None:
            lengths = self.seqlens_k.long()
        else:
            lengths = torch.full((self.batch,), self.seqlen_k, dtype=torch.int64, device=self.device)
        return torch.zeros_like(lengths), lengths

    def _layout(
        self, starts: Tensor, lengths: Tensor, rows: Tensor | None, position: Tensor | None = None
    ) -> QueryLayout:
        index = torch.arange(self.seqlen_q, device=self.device) if rows is None else rows
        if self.cu_seqlens is None:
            if position is None:
                offset = lengths - self.seqlen_q if self.q_offset is None else self.q_offset
                if isinstance(offset, Tensor):
                    offset = offset.long()[:, None]
                position = (index + offset).expand(self.batch, -1)
            shape = (self.batch, index.shape[-1])
            covered = torch.ones(shape, dtype=torch.bool, device=self.device)
            return QueryLayout(position, starts[:, None].expand(shape), lengths[:, None].expand(shape), covered)
        ends, index = self.cu_seqlens.long(), index.flatten()
        # Search in all boundaries, since inductor cannot search in a slice of a tensor.
        sequence = (torch.searchsorted(ends, index, right=True) - 1).clamp(0, len(ends) - 2)
        if position is None:
            offset = lengths - ends.diff() if self.q_offset is None else self.q_offset
            if isinstance(offset, Tensor):
                offset = offset.long()[sequence]
            position = (index - ends[sequence] + offset)[None]
        covered = index < ends[-1]
        return QueryLayout(
            position, starts[sequence][None], torch.where(covered, lengths[sequence], 0)[None], covered[None]
        )


def packed_block_starts(cu_seqlens: Tensor, total: int, block_size: int, stride: int) -> Tensor:
    """Return the first token of every compressed block of packed sequences, one sequence after the other.

    cu_seqlens: int32 `[N + 1]`; total: tokens in the batch. The result is int64 `[total // stride]`, enough for any
    packing, so that its size does not depend on values on the device; entries behind the last block repeat it.
    """
    sequence, block = _packed_blocks(cu_seqlens, total, block_size, stride)
    starts = cu_seqlens.long()[sequence] + block * stride
    return starts.clamp(min=0, max=max(0, total - block_size))


def packed_block_chunks(cu_seqlens: Tensor, total: int, block_size: int, stride: int) -> Tensor:
    """Return the first chunk of every block of `packed_block_starts`, where chunks are disjoint blocks of `stride`
    tokens and block_size is a multiple of stride. Entries behind the last block repeat it.
    """
    sequence, block = _packed_blocks(cu_seqlens, total, block_size, stride)
    chunks = cu_seqlens.long().diff() // stride
    first = (chunks.cumsum(0) - chunks)[sequence] + block
    return first.clamp(min=0, max=max(0, (total - block_size) // stride))


def _packed_blocks(cu_seqlens: Tensor, total: int, block_size: int, stride: int) -> tuple[Tensor, Tensor]:
    """Return the sequence of every compressed block, and its index there: int64 `[total // stride]` each; entries
    behind the last block repeat it.
    """
    blocks = num_compressed_blocks(cu_seqlens.long().diff(), block_size, stride)
    ends = blocks.cumsum(0)
    slot = torch.arange(total // stride, device=cu_seqlens.device)
    slot = torch.minimum(slot, (ends[-1] - 1).clamp(min=0))
    sequence = torch.searchsorted(ends, slot, right=True).clamp(max=len(ends) - 1)
    return sequence, slot - ends[sequence] + blocks[sequence]


def _clamp_min(value: Integer, minimum: int) -> Integer:
    return value.clamp(min=minimum) if isinstance(value, Tensor) else max(value, minimum)


def _clamp_max(value: Integer, maximum: int) -> Integer:
    return value.clamp(max=maximum) if isinstance(value, Tensor) else min(value, maximum)


def _maximum(a: Integer, b: Integer) -> Integer:
    return torch.maximum(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else max(a, b)
