"""Backward kernels of selected attention for the gradients of k and v.

The first has one program per KV block and chunk of the queries that selected it. A block with a single chunk is
finished there; chunks of other blocks store partial sums, which the second kernel adds in the order of the chunks.
"""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.inverse_index import find_block, load_entries, split_rows
from native_sparse_attention.ops._triton.softcap import cap_logits, cap_slope
from native_sparse_attention.ops._triton.tiles import add_product, is_finite_tile, load_rows, split_finite, store_rows
from native_sparse_attention.ops._triton.varlen import load_extent
from native_sparse_attention.ops.selected_attention.triton.by_block.partials import PartialResults, find_unit, store_dq
from native_sparse_attention.ops.selected_attention.triton.dlogits.storage import store_dlogits
from native_sparse_attention.ops.selected_attention.triton.index.block_to_query import (
    count_masked_entries,
    find_chunk,
    load_factors,
    load_sequence,
    locate_entries,
)


class PartialSums(NamedTuple):
    """Sums over one chunk each: float32 `[pairs * num_partials, block size, D or DV]`, num_partials per pair."""

    k: Any
    v: Any
    num_partials: int


class Gates(NamedTuple):
    """The gate `[B, T, HQ]`, which dout still lacks, and the log-sum-exp `[B, HQ, T]`, contiguous.

    The lse that a kernel receives beside them is smaller by log(gate), so its weights are gate * p. It is NaN where the
    gate is negative.
    """

    gate: Any
    lse: Any


class DkvTensors(NamedTuple):
    """Tensors of `dkv_kernel`; shapes are as in `BackwardTensors`.

    lse, delta: `[B, HQ, T]`, of equal strides. gates: `Gates`, or None. dk, dv: `[B, S, H, D and DV]`. dlogits: room
    for the gradients of the logits, where dq is computed from them (`store_dlogits`), or None. dq, dq_units: data and
    unit of the `PartialResults` of dq, where this kernel stores them, or None; BLOCK_N holds a whole block then.
    inverse_units: of the gradients of the logits, strides as lse, or None where partial results have no units.
    """

    q: Any
    k: Any
    v: Any
    factors: Any
    lse: Any
    delta: Any
    dout: Any
    gates: Any
    dk: Any
    dv: Any
    dlogits: Any
    dq: Any
    dq_units: Any
    inverse_units: Any


@triton.jit
def dkv_kernel(
    tensors,
    partials,
    strides,
    layout,
    csr,
    scale,
    softcap,
    ACCUMULATE: tl.constexpr,
    sizes: tl.constexpr,
    tile: tl.constexpr,
):
    """Add up to `tile.chunk` entries of a block to dk and dv, or to a partial sum if the block has more entries.

    One program per pair, chunk and tile of the block's keys. tensors, strides: `DkvTensors`, `Strides`. partials:
    `PartialSums`. ACCUMULATE: add to what dk and dv hold.
    """
    GROUP: tl.constexpr = sizes.group
    BLOCK_SIZE: tl.constexpr = sizes.block_size
    HEAD_DIM: tl.constexpr = sizes.head_dim
    VALUE_DIM: tl.constexpr = sizes.value_dim
    CHUNK: tl.constexpr = tile.chunk
    BLOCK_M: tl.constexpr = tile.block_m
    BLOCK_N: tl.constexpr = tile.block_n
    BLOCK_D: tl.constexpr = tile.block_d
    BLOCK_DV: tl.constexpr = tile.block_dv
    tiles = tl.cdiv(BLOCK_SIZE, BLOCK_N)
    # Where gradients of logits are stored, scanning many slots at once slows down the whole kernel a little.
    pair, slot, first_entry, begin, length = find_chunk(
        tl.program_id(0) // tiles, csr, CHUNK, SCAN=tensors.dlogits is None
    )
    if slot >= csr.num_slots:
        return
    # A block without entries has a chunk too, which stores gradients of 0 unless it would add to existing ones.
    if (ACCUMULATE | (first_entry > 0)) & (first_entry >= length):
        return
    row = (csr.first_pair + pair) // csr.kv_heads
    sequence, first_key = find_block(slot, row, layout, BLOCK_SIZE)
    if sequence >= layout.num_sequences:
        return
    key_start, num_stored, num_keys, offset = load_sequence(sequence, layout)
    first_in_block = tl.program_id(0) % tiles * BLOCK_N
    in_block = first_in_block + tl.arange(0, BLOCK_N)
    keys = first_key + in_block
    stored = (keys >= 0) & (keys < num_stored) & (in_block < BLOCK_SIZE)
    key_mask = stored & (keys < num_keys)
    kv_head = ((csr.first_pair + pair) % csr.kv_heads).to(tl.int64)
    row = row.to(tl.int64)
    k_ptr = tensors.k + (row * strides.k[0] + kv_head * strides.k[2])
    v_ptr = tensors.v + (row * strides.v[0] + kv_head * strides.v[2])
    k = load_rows(k_ptr, key_start + keys, strides.k[1], key_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    v = load_rows(v_ptr, key_start + keys, strides.v[1], key_mask, VALUE_DIM, BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    entries_ptr = csr.entries + pair.to(tl.int64) * csr.num_entries + begin + first_entry
    num_entries = tl.minimum(length - first_entry, CHUNK)
    num_masked = count_masked_entries(entries_ptr, num_entries, keys, key_mask, offset, csr, CHUNK, sizes)
    num_rows = num_entries * GROUP
    first_unmasked = tl.cdiv(num_masked * GROUP, BLOCK_M) * BLOCK_M
    q_ptr = tensors.q + row * strides.q[0]
    dout_ptr = tensors.dout + row * strides.dout[0]
    lse_ptr = tensors.lse + row * strides.lse[0]
    delta_ptr = tensors.delta + row * strides.lse[0]
    pointers = (q_ptr, dout_ptr, lse_ptr, delta_ptr)
    block = (entries_ptr, num_rows, pair, row, kv_head, keys, key_mask, offset, first_in_block)
    unit = 1.0  # of the elements of k, for partial dq
    if tensors.dq is not None:
        unit, _ = find_unit(tl.max(tl.max(tl.abs(split_finite(k)[0].to(tl.float32)), 1), 0) * 4096)
    entry = load_entries(entries_ptr, 0, num_rows, GROUP, BLOCK_M)
    for first_row in tl.range(0, tl.minimum(first_unmasked, num_rows), BLOCK_M):
        following = load_entries(entries_ptr, first_row + BLOCK_M, num_rows, GROUP, BLOCK_M)
        dk, dv = _add_rows(
            tensors, strides, pointers, block, k, v, unit, dk, dv, entry, first_row, layout, csr, scale,
            softcap, MASKED=True, SIGNED_GATE=False, sizes=sizes, tile=tile,
        )  # fmt: skip
        entry = following
    for first_row in tl.range(first_unmasked, num_rows, BLOCK_M):
        following = load_entries(entries_ptr, first_row + BLOCK_M, num_rows, GROUP, BLOCK_M)
        dk, dv = _add_rows(
            tensors, strides, pointers, block, k, v, unit, dk, dv, entry, first_row, layout, csr, scale, softcap,
            MASKED=False, SIGNED_GATE=False, sizes=sizes, tile=tile,
        )  # fmt: skip
        entry = following
    if tensors.gates is not None and not is_finite_tile(dk):
        # Gates may be negative: once more, with their signs.
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        for first_row in tl.range(0, num_rows, BLOCK_M, num_stages=1):
            entry = load_entries(entries_ptr, first_row, num_rows, GROUP, BLOCK_M)
            dk, dv = _add_rows(
                tensors, strides, pointers, block, k, v, unit, dk, dv, entry, first_row, layout, csr,
                scale, softcap, MASKED=True, SIGNED_GATE=True, sizes=sizes, tile=tile,
            )  # fmt: skip
    # Keys that no query may read are loaded as 0, and their gradients are 0.
    dk = tl.where(key_mask[:, None], dk * scale, 0.0)
    dv = tl.where(key_mask[:, None], dv, 0.0)
    if length <= CHUNK:
        dk_ptr = tensors.dk + (row * strides.dk[0] + kv_head * strides.dk[2])
        dv_ptr = tensors.dv + (row * strides.dv[0] + kv_head * strides.dv[2])
        if ACCUMULATE:
            dk += load_rows(dk_ptr, key_start + keys, strides.dk[1], stored, HEAD_DIM, BLOCK_D)
            dv += load_rows(dv_ptr, key_start + keys, strides.dv[1], stored, VALUE_DIM, BLOCK_DV)
        store_rows(dk_ptr, key_start + keys, strides.dk[1], dk, stored, HEAD_DIM, BLOCK_D)
        store_rows(dv_ptr, key_start + keys, strides.dv[1], dv, stored, VALUE_DIM, BLOCK_DV)
    else:
        partial_rows = _find_partial(pair, begin, partials, CHUNK) + first_entry // CHUNK
        partial_rows = partial_rows * BLOCK_SIZE + in_block
        store_rows(partials.k, partial_rows, HEAD_DIM, dk, in_block < BLOCK_SIZE, HEAD_DIM, BLOCK_D)
        store_rows(partials.v, partial_rows, VALUE_DIM, dv, in_block < BLOCK_SIZE, VALUE_DIM, BLOCK_DV)


@triton.jit
def _add_rows(
    tensors,
    strides,
    pointers,
    block,
    k,
    v,
    unit,
    dk,
    dv,
    entry,
    first_row,
    layout,
    csr,
    scale,
    softcap,
    MASKED: tl.constexpr,
    SIGNED_GATE: tl.constexpr,
    sizes: tl.constexpr,
    tile: tl.constexpr,
):
    """Add a tile of rows to dk and dv, and store the gradients of their logits or their partial dq where requested.

    pointers: q, dout, lse and delta of the batch row. unit: of the elements of k, for partial dq. Not MASKED: all
    rows read all keys. SIGNED_GATE: gates may be negative.
    """
    GROUP: tl.constexpr = sizes.group
    BLOCK_M: tl.constexpr = tile.block_m
    q_ptr, dout_ptr, lse_ptr, delta_ptr = pointers
    entries_ptr, num_rows, pair, row, kv_head, keys, key_mask, offset, first_in_block = block
    rows = first_row + tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    _, in_group = split_rows(first_row, GROUP, BLOCK_M)
    token, index_head, head = locate_entries(entry, in_group, kv_head, csr, sizes)
    positions = offset + token
    if tile.int64_offsets:
        token, head = token.to(tl.int64), head.to(tl.int64)
    q_offsets = token * strides.q[1] + head * strides.q[2]
    q = load_rows(q_ptr, q_offsets, 1, row_mask, sizes.head_dim, tile.block_d)  # [BLOCK_M, BLOCK_D]
    dout_offsets = token * strides.dout[1] + head * strides.dout[2]
    dout = load_rows(dout_ptr, dout_offsets, 1, row_mask, sizes.value_dim, tile.block_dv)  # [BLOCK_M, BLOCK_DV]
    lse_offsets = head * strides.lse[1] + token * strides.lse[2]
    # Rows outside the mask add nothing: their q and dout are 0.
    lse = tl.load(lse_ptr + lse_offsets, mask=row_mask, other=0.0)
    delta = tl.load(delta_ptr + lse_offsets, mask=row_mask, other=0.0)
    if SIGNED_GATE:
        offsets = (row * csr.kv_heads * sizes.repeats * GROUP + head) * layout.seqlen_q + token
        gate_offsets = row * strides.gate[0] + token * strides.gate[1] + head * strides.gate[2]
        gate = tl.load(tensors.gates.gate + gate_offsets, mask=row_mask, other=0.0).to(tl.float32)
        ungated = tl.load(tensors.gates.lse + offsets, mask=row_mask, other=0.0)
        lse = tl.where(gate < 0, ungated - tl.log(-gate), lse)
    # Where lse is -inf, so are all logits: a finite shift makes their weights 0. Times log2(e) it stays finite.
    shift = tl.maximum(lse, -2.0e38, propagate_nan=tl.PropagateNan.ALL) * -1.4426950408889634
    factor = tl.full([BLOCK_M], 1.0, tl.float32)
    if tensors.factors is not None:
        factor = load_factors(
            tensors.factors, strides.factors, row, token, index_head, entry, row_mask, sizes.num_selected
        )
    scale_log2 = scale * 1.4426950408889634 * factor

    products = tl.dot(k, tl.trans(q), input_precision='ieee')  # [BLOCK_N, BLOCK_M]
    if softcap is None:
        weights = tl.exp2(tl.fma(products, scale_log2[None, :], shift[None, :]))
    else:
        logits_log2 = products * scale_log2[None, :]
        capped_log2 = cap_logits(logits_log2, softcap * 1.4426950408889634)
        weights = tl.exp2(capped_log2 + shift[None, :])
    if SIGNED_GATE:
        weights = tl.where(gate[None, :] < 0, -weights, weights)
    dweights = tl.dot(v, tl.trans(dout), input_precision='ieee')
    read = row_mask
    dlogits = weights * (dweights - delta[None, :])
    if softcap is not None:
        dlogits *= cap_slope(logits_log2, softcap * 1.4426950408889634)
    if MASKED:
        read = key_mask[:, None] & row_mask[None, :]
        if sizes.causal:
            read = read & (keys[:, None] <= positions[None, :])
        weights = tl.where(read, weights, 0.0)
        dlogits = tl.where(read, dlogits, 0.0)
        # A query that is not finite must not reach keys that it does not read.
        q, _ = split_finite(q)
    if tensors.dlogits is not None:
        chunk = first_row // 16
        entry = load_entries(entries_ptr, chunk, num_rows // 16, GROUP // 16, BLOCK_M // 16)
        exists = chunk + tl.arange(0, BLOCK_M // 16) < num_rows // 16
        store_dlogits(tensors.dlogits, dlogits, pair, entry, exists, chunk, first_in_block, csr, sizes)
    if tensors.factors is not None:
        dlogits *= factor[None, :]
    dv = add_product(weights.to(dout.dtype), dout, dv)
    dk = add_product(dlogits.to(q.dtype), q, dk)
    if tensors.dq is not None:
        inverse = None
        if tensors.inverse_units is not None:
            inverse_ptr = tensors.inverse_units + row * strides.lse[0]
            inverse = tl.load(inverse_ptr + lse_offsets, mask=row_mask, other=0.0)
        partials = PartialResults(tensors.dq, tensors.dq_units, None, None, None)
        if MASKED:
            # Keys that some row does not read must be finite.
            k, _ = split_finite(k)
            unit = tl.max(tl.abs(k.to(tl.float32)), 1)  # [BLOCK_N]
        offsets = (pair * csr.num_entries + entry) * GROUP + in_group
        store_dq(
            partials, offsets, dlogits, (k, unit), inverse, factor, read, row_mask, tensors.factors is not None, MASKED,
            sizes.head_dim, tile.block_d,
        )  # fmt: skip
    return dk, dv


@triton.jit
def combine_kernel(
    dk_ptr,
    dv_ptr,
    partials,
    dk_strides,
    dv_strides,
    layout,
    csr,
    ACCUMULATE: tl.constexpr,
    sizes: tl.constexpr,
    tile: tl.constexpr,
):
    """Add up the partial sums of blocks with several chunks. One program per pair, block slot and tile of its keys."""
    BLOCK_SIZE: tl.constexpr = sizes.block_size
    HEAD_DIM: tl.constexpr = sizes.head_dim
    VALUE_DIM: tl.constexpr = sizes.value_dim
    CHUNK: tl.constexpr = tile.chunk
    BLOCK_N: tl.constexpr = tile.block_n
    BLOCK_D: tl.constexpr = tile.block_d
    BLOCK_DV: tl.constexpr = tile.block_dv
    tiles = tl.cdiv(BLOCK_SIZE, BLOCK_N)
    slot = tl.program_id(0) // tiles % csr.num_slots
    pair = tl.program_id(0) // tiles // csr.num_slots
    starts_ptr = csr.starts + pair.to(tl.int64) * (csr.num_slots + 1) + slot
    begin = tl.load(starts_ptr)
    length = tl.load(starts_ptr + 1) - begin
    if length <= CHUNK:
        return
    row = (csr.first_pair + pair) // csr.kv_heads
    sequence, first_key = find_block(slot, row, layout, BLOCK_SIZE)
    if sequence >= layout.num_sequences:
        return
    _, key_start, num_stored = load_extent(layout.cu_seqlens_k, sequence, layout.seqlen_k, layout.num_sequences)
    in_block = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    keys = first_key + in_block
    in_partial = in_block < BLOCK_SIZE
    stored = (keys >= 0) & (keys < num_stored) & in_partial
    row = row.to(tl.int64)
    kv_head = ((csr.first_pair + pair) % csr.kv_heads).to(tl.int64)
    dk_ptr += row * dk_strides[0] + kv_head * dk_strides[2]
    dv_ptr += row * dv_strides[0] + kv_head * dv_strides[2]
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    if ACCUMULATE:
        dk += load_rows(dk_ptr, key_start + keys, dk_strides[1], stored, HEAD_DIM, BLOCK_D)
        dv += load_rows(dv_ptr, key_start + keys, dv_strides[1], stored, VALUE_DIM, BLOCK_DV)
    first_partial = _find_partial(pair, begin, partials, CHUNK)
    # Unrolled, so that several chunks are loaded at once; they are added one after the other.
    for chunk in tl.range(0, tl.cdiv(length, CHUNK), loop_unroll_factor=8):
        rows = (first_partial + chunk) * BLOCK_SIZE + in_block
        dk += load_rows(partials.k, rows, HEAD_DIM, in_partial, HEAD_DIM, BLOCK_D)
        dv += load_rows(partials.v, rows, VALUE_DIM, in_partial, VALUE_DIM, BLOCK_DV)
    store_rows(dk_ptr, key_start + keys, dk_strides[1], dk, stored, HEAD_DIM, BLOCK_D)
    store_rows(dv_ptr, key_start + keys, dv_strides[1], dv, stored, VALUE_DIM, BLOCK_DV)


@triton.jit
def _find_partial(pair, begin, partials, CHUNK: tl.constexpr):
    """Return the first partial sum of a block whose entries start at `begin` and are more than CHUNK.

    A block with x * CHUNK entries, x > 1, has at most floor(2 * x) chunks, so partial sums of blocks do not overlap.
    """
    return pair.to(tl.int64) * partials.num_partials + 2 * begin.to(tl.int64) // CHUNK
