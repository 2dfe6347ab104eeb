"""Partial results of the block-major kernels: one row per entry of the CSR index and head of its group.

Each program reads one KV block for many queries and stores what the block contributes to each of them. A second kernel
adds up the rows of a query. Float16 rows are scaled by a power of two of their own, the unit.
"""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.inverse_index import find_block
from native_sparse_attention.ops._triton.tiles import add_product, store_rows
from native_sparse_attention.ops.selected_attention.triton.index.block_to_query import find_chunk, load_sequence


class PartialResults(NamedTuple):
    """Partial results `[pairs, T * R * n, G]`, flattened to rows.

    data: `[rows, D or DV]` (`[rows, 0]` in the pass for delta), float16 or float32, in multiples of unit, or None.
    unit: float32 `[rows]` (`find_unit`) or None. first, second, third: float32 `[rows]` or None; each kernel says what
    it stores there. The row of an entry without a block has unit 0 and second 0 (`open_chunk`); the rest is undefined.
    """

    data: Any
    unit: Any
    first: Any
    second: Any
    third: Any = None


def partial_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of partial results for inputs of a dtype: one with more mantissa bits."""
    return torch.float16 if dtype == torch.bfloat16 else torch.float32


def allocate_partials(
    like: Tensor, rows: int, size: int, has_second: bool = True, has_third: bool = False
) -> PartialResults:
    """Allocate partial results of `rows` rows of `size` elements, for inputs like `like`."""
    numbers = (True, True, has_second, has_third)
    return PartialResults(
        like.new_empty(rows, size, dtype=partial_dtype(like.dtype)),
        *(like.new_empty(rows, dtype=torch.float32) if needed else None for needed in numbers),
    )


def allocate_inverse_units(lse: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Allocate one number per query and head where partial results of inputs of a dtype have units, or None."""
    return torch.empty_like(lse) if partial_dtype(dtype) == torch.float16 else None


def bytes_per_row(like: Tensor, size: int) -> int:
    """Return the bytes of one row of partial results."""
    return partial_dtype(like.dtype).itemsize * size + 12


@triton.jit
def open_chunk(index, layout, csr, partials, sizes: tl.constexpr, tile: tl.constexpr):
    """Locate chunk `index` of the CSR index and its whole block, whose keys fit into BLOCK_N.

    Returns the number of entries and the pointer to them, pair, batch row, KV head, the sequence's first key in
    storage, the block's keys and their mask, and the offset from token to position. A chunk of entries without a block
    is reported as empty, after its rows have been marked as absent.
    """
    GROUP: tl.constexpr = sizes.group
    BLOCK_N: tl.constexpr = tile.block_n
    pair, slot, first_entry, begin, length = find_chunk(index, csr, tile.chunk, SCAN=True)
    row = (csr.first_pair + pair) // csr.kv_heads
    sequence, first_key = find_block(slot, row, layout, sizes.block_size)
    key_start, _, num_keys, offset = load_sequence(sequence, layout)
    keys = first_key + tl.arange(0, BLOCK_N)
    key_mask = (keys >= 0) & (keys < tl.minimum(num_keys, first_key + sizes.block_size))
    num_entries = tl.minimum(length - first_entry, tile.chunk)
    entries_ptr = csr.entries + pair.to(tl.int64) * csr.num_entries + begin + first_entry
    if (slot >= csr.num_slots) | (sequence >= layout.num_sequences):
        for first_row in tl.range(0, num_entries * GROUP, 1024):
            rows = first_row + tl.arange(0, 1024)
            mask = rows < num_entries * GROUP
            entry = tl.load(entries_ptr + rows // GROUP, mask=mask, other=0)
            offsets = (pair * csr.num_entries + entry) * GROUP + rows % GROUP
            if partials.unit is not None:
                tl.store(partials.unit + offsets, tl.zeros([1024], tl.float32), mask=mask)
            if partials.second is not None:
                tl.store(partials.second + offsets, tl.zeros([1024], tl.float32), mask=mask)
        num_entries = 0
    kv_head = (csr.first_pair + pair) % csr.kv_heads
    return num_entries, entries_ptr, pair, row.to(tl.int64), kv_head, key_start, keys, key_mask, offset


@triton.jit
def locate_partials(index, csr, num_tokens, sizes: tl.constexpr, BLOCK_M: tl.constexpr):
    """Locate tile `index` of the rows of the result: the heads of num_tokens tokens of every pair.

    Returns the row mask, batch row, token, query head and the first partial result of each row. The partial results of
    one row are GROUP apart.
    """
    GROUP: tl.constexpr = sizes.group
    REPEATS: tl.constexpr = sizes.repeats
    index_rows = num_tokens * REPEATS
    tiles = tl.cdiv(index_rows * GROUP, BLOCK_M)
    pair = (index // tiles).to(tl.int64)
    rows = (index % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    index_row = rows // GROUP
    offsets = (pair * csr.num_entries + index_row * sizes.num_selected) * GROUP + rows % GROUP
    kv_head = (csr.first_pair + pair) % csr.kv_heads
    head = (kv_head * REPEATS + index_row % REPEATS) * GROUP + rows % GROUP
    token = (csr.first_token + index_row // REPEATS).to(tl.int64)
    return rows < index_rows * GROUP, (csr.first_pair + pair) // csr.kv_heads, token, head, offsets


@triton.jit
def find_unit(bound):
    """Return the unit of float16 partial results with values up to about `bound`, and the inverse of the unit.

    Both are powers of two; the unit is 2 ** -100 to 2 ** 125. The largest multiples are 2 ** 12 to 2 ** 13, so values
    from bound * 2 ** -26 on keep all bits of a float16, and values may exceed the bound a few times.
    """
    unit = tl.minimum(tl.maximum(bound * 0.000244140625, 7.888609052210118e-31), 4.253529586511731e37)
    unit = (unit.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return unit, invert_power(unit)


@triton.jit
def invert_power(power):
    """Return 1 / power, for powers of two from 2 ** -126 to 2 ** 126."""
    return (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def store_partials(partials, offsets, values, unit, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store `values [rows, SIZE]`, multiples of `unit`, which is not 0. `sort_columns` restores the column order.

    A thread of an MMA quad holds two neighbouring elements of every 8 columns. Float16 values are stored so that the
    elements of one thread are adjacent, which avoids a layout conversion through shared memory.
    """
    tl.store(partials.unit + offsets, unit, mask=mask)
    if (partials.data.dtype.element_ty == tl.float16) & (SIZE == BLOCK):
        ROWS: tl.constexpr = values.shape[0]
        NUM_PIECES: tl.constexpr = SIZE // 32
        values = tl.reshape(values.to(tl.float16), [ROWS // 16, 2, 8, NUM_PIECES, 4, 4, 2])
        values = tl.reshape(tl.permute(values, [3, 1, 0, 2, 5, 4, 6]), [NUM_PIECES * ROWS, 32])
        offsets = tl.permute(tl.reshape(tl.where(mask, offsets, -1), [1, ROWS // 16, 2, 8]), [0, 2, 1, 3])
        offsets = tl.broadcast_to(offsets, [NUM_PIECES, 2, ROWS // 16, 8])
        pieces = offsets * NUM_PIECES + tl.arange(0, NUM_PIECES)[:, None, None, None]
        pieces = tl.reshape(pieces, [NUM_PIECES * ROWS])
        store_rows(partials.data, pieces, 32, values, pieces >= 0, 32, 32, INT64_OFFSETS=False)
    else:
        store_rows(partials.data, offsets, SIZE, values, mask, SIZE, BLOCK, INT64_OFFSETS=False)


@triton.jit
def store_dq(
    partials,
    offsets,
    dlogits,
    keys,
    inverse,
    factor,
    read,
    mask,
    HAS_FACTORS: tl.constexpr,
    MASKED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the partial dq of a tile of rows, from the gradients of their logits `[keys, rows]` for one whole block.

    keys: k, and the unit of its elements; with MASKED finite k, and the largest element of every key, of which each row
    takes those that it reads. inverse: inverse unit of the gradients of the logits of each row before its factor, or
    None where partial results have no units.
    """
    k, unit_of_k = keys
    ROWS: tl.constexpr = dlogits.shape[1]
    values = tl.zeros([ROWS, BLOCK], tl.float32)
    values = add_product(tl.trans(dlogits.to(k.dtype)), k, values)
    units = tl.full([ROWS], 1.0, tl.float32)
    if inverse is not None:
        if HAS_FACTORS:
            # Bounded, so that the inverse remains finite.
            inverse *= find_unit(tl.maximum(tl.abs(factor), 5.9604644775390625e-08) * 4096)[1]
            inverse = tl.maximum(inverse, 1.1754943508222875e-38)
        if MASKED:
            unit_of_k, _ = find_unit(tl.max(tl.where(read, unit_of_k[:, None], 0.0), 0) * 4096)
        # Neither 0, which marks an absent row, nor more than invert_power takes.
        units = tl.maximum(unit_of_k * invert_power(inverse), 1.1754943508222875e-38)
        units = tl.minimum(units, 8.507059173023462e37)
        values *= invert_power(units)[:, None]
    store_partials(partials, offsets, values, units, mask, SIZE, BLOCK)


@triton.jit
def sort_columns(partials, values, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Restore the column order of sums of rows that `store_partials` stored."""
    if (partials.data.dtype.element_ty == tl.float16) & (SIZE == BLOCK):
        ROWS: tl.constexpr = values.shape[0]
        values = tl.permute(tl.reshape(values, [ROWS, SIZE // 32, 4, 4, 2]), [0, 1, 3, 2, 4])
        values = tl.reshape(values, [ROWS, SIZE])
    return values
