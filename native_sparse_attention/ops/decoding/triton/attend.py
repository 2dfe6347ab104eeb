"""Fourth launch of a step: selected and window attention together, so that shared blocks are read once. Fifth launch:
the gated sum of the branches.
"""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from native_sparse_attention.ops.decoding.triton.compressed import soften, store_partial
from native_sparse_attention.ops.decoding.triton.storage import (
    let_next_launch_begin,
    load_at,
    load_lengths,
    locate,
    wait_for_launch_before,
)


class TilesRead(NamedTuple):
    """window_size: W. num_chosen: tiles with tokens of selected blocks. num_tiles: these and the tiles of the window. A
    compile-time constant.
    """

    window_size: int
    num_chosen: int
    num_tiles: int


@triton.jit
def attend_kernel(
    q,
    cached_k,
    cached_v,
    cached_k_window,
    cached_v_window,
    chosen_ptr,
    lengths,
    out_ptr,
    stats_ptr,
    pages,
    scale,
    of_program,
    step: tl.constexpr,
    sizes: tl.constexpr,
    dims: tl.constexpr,
    selection: tl.constexpr,
    tiles_read: tl.constexpr,
    REPEATS: tl.constexpr,
    MERGED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Attend to the selected blocks, one after the other, then to the window's blocks that are not among them.

    One program per row, token, index head and `of_program` key tiles. q: `[B, T, HQ, D]`; the cache: `[B, S, H, D]` or
    pages; chosen: int32 `[B, T, HI, n]` with HI index heads. Partial results of the selected and the window branch are
    `[B, T, HI, programs, 2, heads]`: out `[..., DV]`, not normalised, and stats `[..., 2]`, the largest logit and the
    sum of the weights. With MERGED all keys belong to one branch, of which results are `[B, T, HI, programs, heads]`.
    """
    share: tl.constexpr = dims.group // REPEATS
    index_heads: tl.constexpr = step.kv_heads * REPEATS
    query, part = tl.program_id(0), tl.program_id(1)
    index_head = query % index_heads
    token = (query // index_heads % step.num_tokens).to(tl.int64)
    row = (query // index_heads // step.num_tokens).to(tl.int64)
    head = (index_head // REPEATS).to(tl.int64)
    old, length = load_lengths(lengths, row, step)
    position = old + token.to(tl.int32)
    wait_for_launch_before(OVERLAPS)

    slots = tl.arange(0, BLOCK_S)
    chosen_ptr += query.to(tl.int64) * selection.num_selected
    chosen = tl.load(chosen_ptr + slots, mask=slots < selection.num_selected, other=-1)

    tile_rows = tl.arange(0, BLOCK_M)
    is_row = tile_rows < share
    heads = (index_head * share + tile_rows).to(tl.int64)
    offsets = row * q.strides[0] + token * q.strides[1] + heads * q.strides[2]
    q = load_at(q.ptr, offsets, is_row, dims.head_dim, dims.block_d)
    first_in_window = tl.maximum(position - tiles_read.window_size + 1, 0)
    first_block = first_in_window // sizes.selection_block_size
    largest_selected = tl.full([BLOCK_M], float('-inf'), tl.float32)
    largest_window = tl.full([BLOCK_M], float('-inf'), tl.float32)
    total_selected = tl.zeros([BLOCK_M], tl.float32)
    total_window = tl.zeros([BLOCK_M], tl.float32)
    BLOCK_DV: tl.constexpr = dims.block_dv
    out_selected = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    out_window = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    first_tile = part * of_program
    scale_log2 = scale * 1.4426950408889634
    for tile in tl.range(first_tile, tl.minimum(first_tile + of_program, tiles_read.num_tiles)):
        # A tile holds either tokens of selected blocks or tokens of the window.
        is_chosen = tile < tiles_read.num_chosen
        in_tiles = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        item = in_tiles // sizes.selection_block_size
        block = tl.load(chosen_ptr + item, mask=is_chosen & (item < selection.num_selected), other=-1)
        tokens = block * sizes.selection_block_size + in_tiles % sizes.selection_block_size
        of_window = first_block * sizes.selection_block_size + in_tiles - tiles_read.num_chosen * BLOCK_N
        exists = tl.where(is_chosen, block >= 0, of_window >= first_in_window)
        tokens = tl.where(is_chosen, tokens, of_window)
        exists = exists & (tokens <= position) & (tokens < length)
        from_k, from_v = _either(is_chosen, cached_k, cached_k_window), _either(is_chosen, cached_v, cached_v_window)
        in_window = tokens >= first_in_window
        if cached_k_window.ptr is None:
            # Tokens of selected blocks are not read again.
            block = tokens // sizes.selection_block_size
            known = tl.max((block[:, None] == chosen[None, :]).to(tl.int32), 1) == 1
            exists = exists & (is_chosen | (known == 0))
        else:
            in_window = in_window & (is_chosen == 0)
        k, exists = _load_tokens(from_k, tokens, exists, row, head, pages, dims.head_dim, dims.block_d)
        v, exists = _load_tokens(from_v, tokens, exists, row, head, pages, dims.value_dim, dims.block_dv)
        if MERGED:
            in_selected = exists
        else:
            in_selected, in_window = exists & is_chosen, exists & in_window
        logits = tl.dot(q, tl.trans(k), input_precision='ieee') * scale_log2  # [BLOCK_M, BLOCK_N]
        largest_selected, total_selected, out_selected = _read(
            logits, v, in_selected, largest_selected, total_selected, out_selected
        )
        if not MERGED:
            largest_window, total_window, out_window = _read(
                logits, v, in_window, largest_window, total_window, out_window
            )

    let_next_launch_begin(OVERLAPS)
    branches: tl.constexpr = 1 if MERGED else 2
    results = ((query.to(tl.int64) * tl.num_programs(1) + part) * branches) * share + tile_rows
    of_selected, of_window = (largest_selected, total_selected), (largest_window, total_window)
    store_partial(out_ptr, stats_ptr, results, of_selected, out_selected, is_row, dims.value_dim, dims.block_dv)
    if not MERGED:
        store_partial(out_ptr, stats_ptr, results + share, of_window, out_window, is_row, dims.value_dim, dims.block_dv)


@triton.jit
def _either(is_first, first, second):
    """Return pointer and strides of one of two tensors; of the first if the second is None."""
    if second.ptr is None:
        ptr, strides = first.ptr, first.strides
    else:
        ptr = tl.where(is_first, first.ptr, second.ptr)
        strides = (
            tl.where(is_first, first.strides[0], second.strides[0]),
            tl.where(is_first, first.strides[1], second.strides[1]),
            tl.where(is_first, first.strides[2], second.strides[2]),
        )
    return ptr, strides


@triton.jit
def _load_tokens(tensor, tokens, exists, row, head, pages, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load tokens of a head of a row, 0 where they do not exist, and return which exist."""
    ptr, strides = tensor
    offsets, exists = locate(tokens, exists, row, pages, strides)
    return load_at(ptr, offsets + head * strides[2], exists, SIZE, BLOCK), exists


@triton.jit
def _read(logits, v, mask, largest, total, out):
    """Add one tile of keys and values to the online softmax of a branch."""
    weights, shrink, largest = soften(tl.where(mask[None, :], logits, float('-inf')), largest)
    out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision='ieee')
    return largest, total * shrink + tl.sum(weights, 1), out


@triton.jit(do_not_specialize=['num_splits', 'num_programs'])
def combine_kernel(
    gates,
    compressed_ptr,
    compressed_stats_ptr,
    parts_ptr,
    parts_stats_ptr,
    out_ptr,
    lengths,
    peaks_ptr,
    num_splits,
    num_programs,
    step: tl.constexpr,
    GROUP: tl.constexpr,
    REPEATS: tl.constexpr,
    MERGED: tl.constexpr,
    OUTPUT_GATE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Combine the partial results of each branch, num_splits of the compressed one and num_programs of the others, and
    add them with their gates. One program per row, token and head.

    gates: `[B, T, HQ, 3]`; with MERGED, where selected blocks and window are one branch without a gate, `[B, T, HQ, 1]`
    or None, and with OUTPUT_GATE `[B, T, HQ, 2]`, whose second gate multiplies the sum. out: `[B, T, HQ, DV]`,
    contiguous. The first program of a row also updates its length and its peak length, which no other program of this
    launch reads.
    """
    share: tl.constexpr = GROUP // REPEATS
    query_heads: tl.constexpr = step.kv_heads * GROUP
    query = tl.program_id(0)
    head = query % query_heads
    token = query // query_heads % step.num_tokens
    row = (query // query_heads // step.num_tokens).to(tl.int64)
    columns = tl.arange(0, BLOCK_DV)
    unit = row * step.kv_heads + head // GROUP
    gate_ptr = gates.ptr
    if gates.ptr is not None:
        gate_ptr = gate_ptr + row * gates.strides[0] + token * gates.strides[1] + head * gates.strides[2]
        gate_compressed = tl.load(gate_ptr).to(tl.float32)
    if OUTPUT_GATE:
        gate_out = tl.load(gate_ptr + gates.strides[3]).to(tl.float32)
    if not MERGED:
        gate_selected = tl.load(gate_ptr + gates.strides[3]).to(tl.float32)
        gate_window = tl.load(gate_ptr + 2 * gates.strides[3]).to(tl.float32)
    wait_for_launch_before(OVERLAPS)
    if gates.ptr is not None:
        first = ((unit * step.num_tokens + token) * GROUP + head % GROUP) * num_splits
        compressed = _load_parts(
            compressed_ptr, compressed_stats_ptr, first, 1, num_splits, BLOCK_S, VALUE_DIM, BLOCK_DV
        )
    stride: tl.constexpr = share if MERGED else 2 * share
    first = (query.to(tl.int64) // share * num_programs) * stride + head % share
    selected = _load_parts(parts_ptr, parts_stats_ptr, first, stride, num_programs, BLOCK_P, VALUE_DIM, BLOCK_DV)
    if MERGED:
        out = _join(selected)
        if gates.ptr is not None:
            out += _join(compressed) * gate_compressed
        if OUTPUT_GATE:
            out *= gate_out
    else:
        first += share
        window = _load_parts(parts_ptr, parts_stats_ptr, first, stride, num_programs, BLOCK_P, VALUE_DIM, BLOCK_DV)
        out = _join(compressed) * gate_compressed + _join(selected) * gate_selected + _join(window) * gate_window
    pointers = out_ptr + query.to(tl.int64) * VALUE_DIM + columns
    tl.store(pointers, out.to(out_ptr.dtype.element_ty), mask=columns < VALUE_DIM)
    if query % (query_heads * step.num_tokens) == 0:
        _, length = load_lengths(lengths, row, step)
        peak = tl.load(peaks_ptr + row)
        tl.store(lengths.ptr + row, length)
        tl.store(peaks_ptr + row, tl.maximum(peak, length))


@triton.jit
def _load_parts(
    out_ptr, stats_ptr, first, stride, num_parts, PARTS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Load the largest logits and sums `[PARTS]` and outputs `[PARTS, BLOCK]` of the partial results."""
    parts = tl.arange(0, PARTS)
    results = first + parts * stride
    largest = tl.load(stats_ptr + 2 * results, mask=parts < num_parts, other=float('-inf'))
    totals = tl.load(stats_ptr + 2 * results + 1, mask=parts < num_parts, other=0.0)
    return largest, totals, load_at(out_ptr, results * SIZE, parts < num_parts, SIZE, BLOCK)


@triton.jit
def _join(parts):
    """Return the output `[BLOCK]` of a branch from its partial results; 0 if it reads nothing."""
    largest, totals, outs = parts
    base = tl.max(largest, 0)
    weights = tl.exp2(largest - tl.where(base == float('-inf'), 0.0, base))
    total = tl.sum(totals * weights, 0)
    out = tl.sum(tl.where((totals != 0)[:, None], outs * weights[:, None], 0.0), 0)
    return tl.where(total == 0, 0.0, out / tl.where(total == 0, 1.0, total))
