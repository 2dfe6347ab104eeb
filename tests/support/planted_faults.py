"""Whether the tests notice when a kernel is wrong: one-line faults are planted, one at a time, and the tests must fail.

    python tests/support/planted_faults.py [--jobs 2] [--only WORD]

A copy of the package and its tests in a temporary directory carries the fault. The tests pass there without one, or
nothing is said. Exits with 1 unless 95 % of the faults are caught.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path('native_sparse_attention')
COPIED = ('native_sparse_attention', 'tests', 'pyproject.toml')
MIN_CAUGHT = 0.95


class Fault(NamedTuple):
    """In `file` of the ops, `old`, which stands there once, becomes `new`. tests: files of tests/kernels."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MEMORY = ('test_compressed_attention.py',)
FEATURED = ('test_window_features.py',)
MAXIMA = ('test_interval_maxima.py',)
INTERVAL = ('test_window_attention.py', 'test_window_attention_guarantees.py', *MEMORY)
SELECTED = ('test_selected_attention.py', 'test_selected_attention_guarantees.py')
ORDER = ('test_selected_attention_order.py',)
UNION, CAPPED = ('test_selected_attention_union.py',), ('test_selected_features.py',)
CHOICE = ('test_select_blocks.py', 'test_select_blocks_guarantees.py')
COLUMNS = ('test_select_blocks_columns.py',)
CHOICE_FEATURES = ('test_choice_features.py',)
SCORES, GATED, PLACED = ('test_chosen_scores.py',), ('test_gated_sum.py',), ('test_varlen.py', *INTERVAL)
FORWARD, BACKWARD = '_triton/interval/forward.py', '_triton/interval/backward.py'
INTERVAL_OP, SUM_OP = '_triton/interval/op.py', 'gated_sum/triton/op.py'
DKV, INTERVAL_KEYS = '_triton/interval/key_gradients.py', '_triton/interval/keys.py'
TILES, PLACEMENT = '_triton/interval/tiles.py', '_triton/varlen.py'
MARKS, DBIAS = '_triton/interval/modifiers.py', '_triton/interval/bias_gradient.py'
SELECTED_FORWARD, SELECTED_BACKWARD = (
    'selected_attention/triton/by_query/forward.py',
    'selected_attention/triton/by_query/backward.py',
)
SELECTED_DKV = 'selected_attention/triton/dkv/kernels.py'
UNION_FORWARD, BLOCK_LOOP = (
    'selected_attention/triton/by_union/forward.py',
    'selected_attention/triton/loops/block_loop.py',
)
UNION_LOOP, EPILOGUE = 'selected_attention/triton/loops/union_loop.py', 'selected_attention/triton/loops/epilogue.py'
UNION_BACKWARD = 'selected_attention/triton/by_union/backward.py'
BY_BLOCK, BLOCK_TO_QUERY = (
    'selected_attention/triton/by_block/forward.py',
    'selected_attention/triton/index/block_to_query.py',
)
BY_BLOCK_BACKWARD, SELECTED_DKV_LAUNCH = (
    'selected_attention/triton/by_block/backward.py',
    'selected_attention/triton/dkv/launch.py',
)
BLOCK_UNION, SELECTED_OP = 'selected_attention/triton/index/block_union.py', 'selected_attention/triton/op.py'
DELTA, DLOGITS = 'selected_attention/triton/dlogits/delta.py', 'selected_attention/triton/dlogits/storage.py'
PARTIALS = 'selected_attention/triton/by_block/partials.py'
DLOGITS_DQ = 'selected_attention/triton/dlogits/dq.py'
FP16_VALUES = 'selected_attention/triton/fp16_values.py'
STORED, EXACT = ('test_selected_attention_dlogits.py',), ('test_selected_attention_delta.py',)
FP16 = ('test_selected_attention_fp16_values.py',)
CHUNKS = ('test_block_to_query.py',)
OF_GATES, SELECTED_GATES = ('test_gates.py',), ('test_selected_attention_gates.py',)
SELECTED_MAXIMA = ('test_selected_attention_maxima.py',)
FINITE, INVERSE_INDEX = '_triton/finite.py', '_triton/inverse_index.py'
TILE_ROWS = '_triton/tiles.py'
SELECT, GATED_SUM = 'block_selection/triton/select.py', 'gated_sum/triton/kernels.py'
RANKS, MEMBERS = 'block_selection/triton/topk.py', 'block_selection/triton/group_columns.py'
ROTARY, ROTATION = 'rotary/triton/kernels.py', '_triton/rotation.py'
SCORES_FORWARD = 'block_selection/triton/scores_forward.py'
SCORES_BACKWARD = 'block_selection/triton/scores_backward.py'
INTERVAL_TILES = ('test_interval_tiles.py',)
SCORES_TILES = 'block_selection/triton/scores_tiles.py'
DECODING = ('test_decoding.py', 'test_decoding_guarantees.py')
APPEND, STORAGE = 'decoding/triton/append.py', 'decoding/triton/storage.py'
COMPRESSED, CHOOSE = 'decoding/triton/compressed.py', 'decoding/triton/choose.py'
ATTEND, DECODING_OP = 'decoding/triton/attend.py', 'decoding/triton/op.py'
DECODING_SETTINGS = 'decoding/triton/settings.py'
AGAIN = ('test_launch_cache.py',)
DECODING_STEP, PREPARED = 'decoding/step.py', 'decoding/triton/launch_cache.py'

FAULTS = [
    # Interval attention
    Fault('window one key too wide', TILES, 'firsts = positions - interval.left', 'firsts = positions - interval.left - 1', INTERVAL),
    Fault('own key masked', TILES, 'keys * interval.stride + interval.reach - offset)', 'keys * interval.stride + interval.reach + 1 - offset)', INTERVAL),
    Fault('range ends one tile early', TILES, 'left_tiles + tl.cdiv(last - right, BLOCK)', 'left_tiles + (last - right) // BLOCK', INTERVAL),
    Fault('full tiles one key too far', TILES, 'right = middle + tl.maximum(full_last - middle, 0) // BLOCK * BLOCK', 'right = middle + tl.maximum(full_last - middle + 1, 0) // BLOCK * BLOCK', INTERVAL),
    Fault('last block not visible', TILES, 'tl.maximum(position - reach + stride, 0) // stride', 'tl.maximum(position - reach + stride - 1, 0) // stride', MEMORY),
    Fault('memory masked', TILES, 'firsts = tl.where(keys < 0, 0, ', 'firsts = tl.where(keys < 0, 1, ', MEMORY),
    Fault('last queries of a key left out', TILES, 'last = tl.minimum(num_queries, last_key + interval.left + 1 - offset)', 'last = tl.minimum(num_queries, last_key + interval.left - offset)', INTERVAL),
    Fault('scale dropped', FORWARD, 'scale_log2 = tl.where(scale == 0, 1e-37, tl.abs(scale) * 1.4426950408889634)', 'scale_log2 = 1.4426950408889634', INTERVAL),
    Fault('scale off by half a percent', FORWARD, 'scale_log2 = tl.where(scale == 0, 1e-37, tl.abs(scale) * 1.4426950408889634)', 'scale_log2 = tl.abs(scale) * 1.45', INTERVAL),
    Fault('sign of the scale dropped', FORWARD, 'products = -products if NEGATIVE else products', 'products = products', INTERVAL),
    Fault('no rescale of the sum', FORWARD, 'total = total * rescale', 'total = total', INTERVAL),
    Fault('no rescale of the output', FORWARD, 'out = out * rescale[:, None]', 'out = out * 1.0', INTERVAL),
    Fault('wrong group', FORWARD, 'kv_head = first_head // GROUP', 'kv_head = first_head % tl.cdiv(tl.num_programs(1) * HEADS, GROUP)', INTERVAL),
    Fault('heads of a tile in disorder', TILES, 'heads = first_head + tile_rows % HEADS', 'heads = first_head + tile_rows // (BLOCK_M // HEADS)', INTERVAL),
    Fault('positions of the first head for all', TILES, 'queries = first_query + tile_rows // HEADS', 'queries = first_query + tile_rows % (BLOCK_M // HEADS)', INTERVAL),
    Fault('tiles by descriptor one key late', TILES, 'row, key_start + num_memory + start, head', 'row, key_start + num_memory + start + 1, head', ('test_interval_tiles.py',)),
    Fault('not a number goes unseen', FORWARD, 'out += tl.sum(tl.where(read, nonfinite_rows[None, :], 0.0), 1)[:, None]', 'out += 0.0', INTERVAL),
    Fault('what a row does not read spoils it', FORWARD, 'if not (is_finite_tile(sums[2]) and are_near):', 'if not are_near:', INTERVAL),
    Fault('maxima: however far they are', FORWARD, 'if not (is_finite_tile(sums[2]) and are_near):', 'if not is_finite_tile(sums[2]):', MAXIMA),
    Fault('maxima: fixed in every pass', FORWARD, 'is_fixed = is_fixed & _is_near(sums[1]) &', 'is_fixed = is_fixed & ((sums[1] >= 0) | (sums[1] < 0)) &', MAXIMA),
    Fault('maxima: sums that overflow alone', FORWARD, '& (tl.sum(sums[2] - sums[2], 1) == 0)', '', MAXIMA),
    Fault('maxima: fixed in no row', FORWARD, 'is_fixed = tl.full([BLOCK_M], FIXED, tl.int1)', 'is_fixed = tl.full([BLOCK_M], False, tl.int1)', MAXIMA),
    Fault('maxima: sums that vanish', FORWARD, '(total > 2.0**-20) & ', '', MAXIMA),
    Fault('maxima: rows by the sum of their values', FORWARD, '(tl.sum(sums[2] - sums[2], 1) == 0)', "(tl.abs(tl.sum(sums[2], 1)) < float('inf'))", MAXIMA),
    Fault('maxima: a log-sum-exp of the last pass', FORWARD, 'is_first = _is_near(total) & FIXED', 'is_first = (total < 0) & FIXED', MAXIMA),
    Fault('log-sum-exp in bits', FORWARD, 'tl.fma(row_max, 0.6931471805599453, tl.log(total))', 'tl.fma(row_max, 1.0, tl.log(total))', INTERVAL),
    Fault('gradient of the log-sum-exp with the wrong sign', BACKWARD, 'tl.fma(weights, dlse[:, None], dlogits)', 'tl.fma(-weights, dlse[:, None], dlogits)', INTERVAL),
    Fault('gradient of the log-sum-exp missing in k', BACKWARD, 'delta + missing - dlse, mask', 'delta + missing, mask', INTERVAL),
    Fault('delta not corrected', BACKWARD, 'dq = (dq - missing[:, None] * mean_k) * scale', 'dq = dq * scale', INTERVAL),
    Fault('delta of k not corrected', BACKWARD, 'delta + missing - dlse, mask', 'delta - dlse, mask', INTERVAL),
    Fault('first memory key skipped', DKV, 'key_mask = key_rows < interval.num_memory', 'key_mask = (key_rows < interval.num_memory) & (key_rows > 0)', MEMORY),
    Fault('memory: queries that read it are those that read the first block', TILES, 'return tl.where(key < 0, 0, tl.maximum(key * interval.stride + interval.reach - offset, 0))', 'return tl.maximum(key * interval.stride + interval.reach - offset, 0)', MEMORY),
    Fault('memory: gradients stand where those of keys do', DKV, 'if JOINED:\n            stored_rows = key_rows', 'if not JOINED:\n            stored_rows = key_rows', MEMORY),
    Fault('memory: keys of a tile begin at 0', DKV, 'first_key -= interval.num_memory', 'first_key -= 0', MEMORY),
    Fault('dkv: parts and heads change places', DKV, 'kv_head = tl.program_id(0) // parts % kv_heads', 'kv_head = tl.program_id(0) % kv_heads', INTERVAL),
    Fault('dkv: tiles of queries of another sequence', DKV, 'first = query_start + start', 'first = start', INTERVAL_TILES),
    Fault('dkv: tiles of queries by descriptor beside dropout', INTERVAL_KEYS, ' or kernel_modifiers.seed is not None:', ':', INTERVAL_TILES),
    Fault('dkv: tiles of queries by descriptor, with care too', DKV, 'dout_tiles is not None and not CONTAIN_NONFINITE', 'dout_tiles is not None', INTERVAL_TILES),
    Fault('queries that are not finite leak', DKV, 'q, _ = split_finite(q)', 'q, _ = q, 0', INTERVAL),
    Fault('keys that are not finite leak', BACKWARD, 'dlogits, 0.0)\n        k, _ = split_finite(k)', 'dlogits, 0.0)', INTERVAL),
    Fault('what a row does not read spoils its gradient', BACKWARD, 'or not is_finite_tile(sums[0] + sums[1])', 'or end_tiles < 0', INTERVAL),
    Fault('a head of a group left out', DKV, 'for in_group in range(HEADS):', 'for in_group in range(tl.cdiv(HEADS, 2)):', INTERVAL),
    Fault('a head of a group left out of a window', DKV, 'range(HEADS * (last_tile - first_tile))', 'range(tl.cdiv(HEADS, 2) * (last_tile - first_tile))', INTERVAL),
    Fault('a window: a tile left out of all heads but the first', DKV, 'index = tl.where(is_last, first_tile, index + 1)', 'index = tl.where(is_last, first_tile + 1, index + 1)', INTERVAL),
    Fault('memory missing in the keys of a row', DKV, 'key_rows = stored_rows + interval.num_memory', 'key_rows = stored_rows', MEMORY),
    Fault('weights dropped in the gradient of v, not multiplied', DKV, 'kept = tl.where(keep, weights * modifiers.keep_factor, 0.0)', 'kept = tl.where(keep, weights, 0.0)', FEATURED),
    Fault('delta of sinks not corrected', BACKWARD, 'missing = -delta * tl.exp2(', 'missing = -0.0 * tl.exp2(', FEATURED),
    Fault('slope of the soft cap missing where delta is corrected', BACKWARD, 'weights *= slope', 'weights *= 1.0', FEATURED),
    Fault('random numbers of the first part of the batch for all', MARKS, 'row + modifiers.first_row', 'row + 0 * modifiers.first_row', FEATURED),
    Fault('a bias of -inf is read', MARKS, "allowed = allowed & (bias != float('-inf'))", 'allowed = allowed & (bias == bias)', FEATURED),
    Fault('padding reads padding', MARKS, 'allowed & (segments >= 0) & ', 'allowed & ', FEATURED),
    Fault('a sink of another head', MARKS, 'tl.load(modifiers.sinks + heads)', 'tl.load(modifiers.sinks + heads * 0)', FEATURED),
    Fault('heads of other rows left out of the gradient of a bias', DBIAS, 'for shared_row in range(rows_of_head)', 'for shared_row in range(1)', FEATURED),
    Fault('gradient of a bias for keys of other sequences', DBIAS, 'reads = read & allowed', 'reads = allowed', FEATURED),
    # SequenceLayout
    Fault('tiles of a packed sequence lost', PLACEMENT, 'return length // tile + layout.num_sequences + 1', 'return length // tile + 1', PLACED),
    Fault('keys behind the length of a row', PLACEMENT, 'tl.load(layout.seqlens_k + sequence).to(tl.int32), 0), num_keys)', 'tl.load(layout.seqlens_k + sequence).to(tl.int32) + 1, 0), num_keys)', PLACED),
    Fault('queries one position early', PLACEMENT, 'offset = num_keys - num_queries', 'offset = num_keys - num_queries - 1', PLACED),
    Fault('offset of the first row for all', PLACEMENT, 'offset = tl.load(layout.q_offsets + sequence)', 'offset = tl.load(layout.q_offsets + sequence * 0)', PLACED),
    Fault('one block too many', PLACEMENT, 'tl.maximum(num_tokens - block_size + stride, 0) // stride', 'tl.maximum(num_tokens - block_size + stride + 1, 0) // stride', PLACED),
    # Selected attention
    Fault('selected: last key of a block skipped', BLOCK_LOOP, 'tl.minimum(first + BLOCK_SIZE, readable)', 'tl.minimum(first + BLOCK_SIZE - 1, readable)', SELECTED),
    Fault('selected: duplicates count twice', BLOCK_LOOP, '(tl.sum(repeats.to(tl.int32), 0) == 0)', '(tl.sum(repeats.to(tl.int32), 0) >= 0)', SELECTED),
    Fault('selected: a future key is read', BLOCK_LOOP, 'readable = tl.minimum(readable, tl.maximum(position + 1, 0))', 'readable = tl.minimum(readable, tl.maximum(position + 2, 0))', SELECTED),
    Fault('selected: a repeated index is read again', BLOCK_LOOP, 'is_read = first < last\n        first += source.key_start', 'is_read = first >= 0\n        first += source.key_start', SELECTED),
    Fault('selected: tail keys of the own block skipped', BLOCK_LOOP, 'readable % BLOCK_SIZE, 0)', '0, 0)', SELECTED),
    # Gradients of logits that are passed on
    Fault('stored dlogits: heads not permuted', DLOGITS, 'column // 16 * 16 + column % 4 // 2 * 8 + column % 16 // 4 * 2 + column % 2', 'column', STORED),
    Fault('stored dlogits: second row of a thread equals the first', DLOGITS, 'tl.arange(0, 2)[:, None, None, None, None] * 32', 'tl.arange(0, 2)[:, None, None, None, None] * 0', STORED),
    Fault('stored dlogits: chunks of large groups overlap', DLOGITS, '(GROUP // 16) + chunk', '(GROUP // 16)', STORED),
    Fault('stored dlogits: key tiles overlap', DLOGITS, '(rows + first_in_block) * 4', 'rows * 4', STORED),
    Fault('stored dlogits: pairs overlap', DLOGITS, '(pair * csr.num_entries + entry)', '(entry + 0)', STORED),
    Fault('stored dlogits: tokens of earlier ranges included', DLOGITS_DQ, '(queries < num_queries) & (query_start + queries >= csr.first_token)', 'queries < num_queries', STORED),
    Fault('stored dlogits: entries of another range', DLOGITS_DQ, '(tokens - csr.first_token) * NUM_SELECTED', '(tokens - 0 * csr.first_token) * NUM_SELECTED', STORED),
    Fault('stored dlogits: too few tiles for packed sequences', DLOGITS_DQ, 'num_tiles += layout.num_sequences + 1', 'num_tiles += 0', STORED),
    Fault('stored dlogits: union of another head', DLOGITS_DQ, 'num_heads + kv_head - first_head', 'num_heads + kv_head', STORED),
    Fault('stored dlogits: non-finite keys not contained', DLOGITS_DQ, 'k, _ = split_finite(k)', 'k = k', STORED),
    Fault('stored dlogits: keys assumed small', DLOGITS_DQ, 'are_small = is_small(union.large, row * csr.kv_heads + kv_head, union.num_chunks)', 'are_small = num_blocks >= 0', STORED),
    Fault('stored dlogits: scale missing', DLOGITS_DQ, '1, dq * scale, row_mask', '1, dq, row_mask', STORED),
    Fault('fp16 values: second factor dropped', FP16_VALUES, '(weights - upper.to(tl.float32)).to(v.dtype)', '(weights * 0.0).to(v.dtype)', FP16),
    Fault('fp16 values: too large values fit', FP16_VALUES, 'tl.where(fits != 0, FITS, IS_SMALL)', 'FITS', FP16),
    Fault('fp16 values: flags of the first sequence', FP16_VALUES, 'first_slot = key_start // BLOCK_SIZE + sequence', 'first_slot = key_start * 0', FP16),
    Fault('fp16 values: divided by the sum of exact weights', EPILOGUE, 'divisor = total if surplus is None else total + surplus', 'divisor = total', FP16),
    Fault('fp16 values: low bits of another batch row', EPILOGUE, 'tensors.low_bits + row * layout.seqlen_q', 'tensors.low_bits + 0 * layout.seqlen_q', STORED),
    Fault('fp16 values: not recomputed where blocks do not fit', SELECTED_FORWARD, 'if tl.min(flags.to(tl.int32), 0) != FITS:', 'if num_steps < 0:', FP16),
    Fault('fp16 values: values that do not fit are read as zeros', BLOCK_UNION, 'tl.where((blocks < num_full) & (flags == FITS), 0, LATE)', 'tl.where(blocks < num_full, 0, LATE)', FP16),
    Fault('fp16 values: non-finite values not contained', BLOCK_UNION, '(tl.min(flags, 0) != 0).to(tl.int32)', '1', FP16),
    Fault('fp16 values: unit left in the log-sum-exp', UNION_FORWARD, 'row_max - FIXED_HEADROOM)\n', 'row_max)\n', FP16),
    Fault('fp16 values: overflowing weights kept', UNION_FORWARD, ' & (surplus - surplus == 0)', '', SELECTED_MAXIMA),
    Fault('fp16 values: vanishing weights kept', UNION_FORWARD, '(total > 2.0**FIXED_HEADROOM)', '(total >= 0.0)', SELECTED_MAXIMA),
    Fault('delta: low bits of a rounded output', DELTA, 'add_low_bits(out, low) * dout', 'out.to(tl.float32) * dout', (*STORED, *EXACT)),
    Fault('delta: gradient of the log-sum-exp of an empty row', DELTA, "tl.where(lse == float('-inf'), 0.0, dlse)", 'dlse', (*STORED, *EXACT)),
    Fault('delta: low bits of non-finite outputs', DELTA, 'tl.where(remainder - remainder == 0, remainder, 0.0)', 'remainder', EXACT),
    Fault('loop start: depends on the program', BLOCK_LOOP, 'turn = readable % CONCURRENT_QUERIES', 'turn = tl.program_id(0) % CONCURRENT_QUERIES', ORDER),
    Fault('loop start: tiles of a block apart', BLOCK_LOOP, 'selection.first_slot + step // SPLIT', '(selection.first_slot + step) // SPLIT', ORDER),
    Fault('loop start: depends on invalid indices', BLOCK_LOOP, 'is_full & (blocks >= first_block)', 'blocks >= first_block', ORDER),
    Fault('dfactors: head tiles of another group size', SELECTED_OP, 'settings.settings_of_group(tables, group, q, v).block_m', 'settings.settings_of(settings.DQ, q, v).block_m', UNION),
    Fault('loop start: no wrap-around', BLOCK_LOOP, 'tl.where(slot < selection.num_slots, slot, slot - selection.num_slots)', 'slot', ORDER),
    Fault('another head by descriptor', TILE_ROWS, 'head.to(tl.int32), 0])', 'head.to(tl.int32) * 0, 0])', ('test_selected_attention_tiles.py',)),
    Fault('no rescale in selected attention', SELECTED_FORWARD, 'add_product(weights.to(v.dtype), v, out * rescale[:, None])', 'add_product(weights.to(v.dtype), v, out)', SELECTED),
    Fault('gradient of block_scale off', SELECTED_BACKWARD, '0.0, dlogits * logits)', '0.0, dlogits * logits * factor)', SELECTED),
    Fault('block_scale missing in the gradient of q', SELECTED_BACKWARD, 'dq = add_product((dlogits * factor).to(k.dtype), k, dq)', 'dq = add_product(dlogits.to(k.dtype), k, dq)', SELECTED),
    Fault('causal mask dropped in the gradient of k', SELECTED_DKV, 'read = read & (keys[:, None] <= positions[None, :])', 'read = read & (keys[:, None] <= positions[None, :] + 1)', SELECTED),
    Fault('dkv: last entry of a chunk skipped', SELECTED_DKV, 'num_entries = tl.minimum(length - first_entry, CHUNK)', 'num_entries = tl.minimum(length - first_entry - 1, CHUNK)', SELECTED),
    Fault('CSR index: slots between the first candidates skipped', BLOCK_TO_QUERY, 'for first in range(1, step, WIDTH)', 'for first in range(1, 1, WIDTH)', CHUNKS),
    Fault('CSR index: chunk of the next slot', BLOCK_TO_QUERY, 'starts // CHUNK + slots <= index)).to(tl.int32), 0) * step', 'starts // CHUNK + slots <= index + 1)).to(tl.int32), 0) * step', CHUNKS),
    Fault('by block: gradients of the first pairs only', BY_BLOCK_BACKWARD, 'csr.of(some), pairs[some.start : some.stop], tokens, computes_dq', 'csr.of(range(len(some))), pairs[: len(some)], tokens, computes_dq', SELECTED[1:]),
    Fault('by block: one key of the future', BY_BLOCK, 'read = read & (keys[None, :] <= positions[:, None])', 'read = read & (keys[None, :] <= positions[:, None] + 1)', SELECTED[:1]),
    Fault('by block: last row skipped', BY_BLOCK, 'num_rows = num_entries * GROUP', 'num_rows = num_entries * GROUP - 1', SELECTED[:1]),
    Fault('by block: unit of a partial result dropped', BY_BLOCK, 'tl.zeros([BLOCK_M], tl.float32) + unit, mask', 'tl.zeros([BLOCK_M], tl.float32) + 1.0, mask', SELECTED[:1]),
    Fault('by block: unit of a gradient dropped', BY_BLOCK_BACKWARD, 'dlogits *= inverse[:, None]', 'dlogits *= 1.0', SELECTED[:1]),
    Fault('by block: unit of a factor dropped', BY_BLOCK_BACKWARD, 'inverse *= find_unit(tl.maximum(tl.abs(factor), 5.9604644775390625e-08) * 4096)[1]', 'inverse *= 1.0', SELECTED[:1]),
    Fault('by block: unit of a gradient is 0', BY_BLOCK_BACKWARD, 'units = tl.maximum(units_of_k * invert_power(inverse), 1.1754943508222875e-38)', 'units = units_of_k * invert_power(inverse)', SELECTED[1:]),
    Fault('by block: units by keys of the future', BY_BLOCK_BACKWARD, 'find_unit(tl.max(tl.where(read, unit[None, :], 0.0), 1) * 4096)', 'find_unit(tl.zeros([BLOCK_M], tl.float32) + tl.max(unit, 0) * 4096)', SELECTED[1:]),
    Fault('by block: units by values of the future', BY_BLOCK, 'find_unit(tl.max(tl.where(read, unit[None, :], 0.0), 1) * keys.shape[0])', 'find_unit(tl.zeros([BLOCK_M], tl.float32) + tl.max(unit, 0) * keys.shape[0])', SELECTED[1:]),
    Fault('by block: columns of a partial result not restored', BY_BLOCK_BACKWARD, 'dq = sort_columns(partials, dq, HEAD_DIM, BLOCK_D)', 'dq = dq * 1.0', SELECTED[:1]),
    Fault('by block: sums of partial results not rescaled', BY_BLOCK, 'tl.sum(tl.exp2(references - reference[:, None]) * totals, 1)', 'tl.sum(totals, 1)', SELECTED[:1]),
    Fault('by block: partial result of another head', BY_BLOCK, 'partial_offsets = offsets + slot * GROUP', 'partial_offsets = offsets + slot', SELECTED[:1]),
    Fault('by block: tokens of another range', PARTIALS, 'token = (csr.first_token + index_row // REPEATS)', 'token = (index_row // REPEATS)', SELECTED[:1]),
    Fault('by block: delta of another slot', BY_BLOCK_BACKWARD, 'term = tl.load(partials.first + partial_offsets', 'term = tl.load(partials.first + offsets', SELECTED[:1]),
    Fault('by block: gradient of the log-sum-exp with the wrong sign', BY_BLOCK_BACKWARD, 'delta -= dlse', 'delta += dlse', SELECTED[:1]),
    Fault('by block: scale of dq dropped', BY_BLOCK_BACKWARD, 'dq_offsets, 1, dq * scale, mask', 'dq_offsets, 1, dq, mask', SELECTED[:1]),
    Fault('by block: entries without a block have partial results', PARTIALS, 'tl.store(partials.unit + offsets, tl.zeros(', 'tl.store(partials.unit + offsets, 1.0 + tl.zeros(', SELECTED[:1]),
    Fault('by block: dfactors of entries without a block', PARTIALS, 'tl.store(partials.second + offsets, tl.zeros(', 'tl.store(partials.second + offsets, 1.0 + tl.zeros(', SELECTED[:1]),
    Fault('by block: earlier token ranges dropped', SELECTED_DKV_LAUNCH, 'ACCUMULATE=len(ranges) > 1,\n                sizes=sizes,\n                tile=tile,\n', 'ACCUMULATE=False,\n                sizes=sizes,\n                tile=tile,\n', SELECTED[:1]),
    Fault('CSR index: token of the next entry', BLOCK_TO_QUERY, '(entry // (sizes.repeats * sizes.num_selected)).to(tl.int32)', '((entry + 1) // (sizes.repeats * sizes.num_selected)).to(tl.int32)', SELECTED[:1]),
    # Choice of blocks
    Fault('overlap of blocks off', SELECT, 'shared = tl.minimum(end, sizes.selection_block_size) - tl.maximum(start, 0)', 'shared = tl.minimum(end, sizes.selection_block_size) - start', CHOICE),
    Fault('what is handed on forgotten', RANKS, 'score += tl.gather(adds_to_next,', 'score += 0.0 * tl.gather(adds_to_next,', CHOICE),
    Fault('a tile begins one block late', SELECT, 'i // NUM_STEPS * (BLOCK_J - OVERLAP) - OVERLAP', 'i // NUM_STEPS * BLOCK_J - OVERLAP', CHOICE),
    Fault('one step of the running choice missing', RANKS, 'tl.minimum(find_largest(num_larger), num_selected)', 'tl.minimum(find_largest(num_larger), num_selected - 1)', CHOICE),
    Fault('tiles that some queries see in part go unmasked', SELECT, '((first_block + BLOCK_J) * SPREAD > seen)', '((first_block + BLOCK_J) * SPREAD > seen + 1)', CHOICE),
    Fault('ties go to the higher block', RANKS, 'best = tl.min(tl.where(sort_keys == largest, block, 2**30), 1)', 'best = tl.max(tl.where(sort_keys == largest, block, -1), 1)', CHOICE),
    Fault('of equal blocks the lower one makes room', RANKS, 'worst = tl.max(tl.where(topk == smallest, topk_blocks, -(2**30)), 1)', 'worst = tl.min(tl.where(topk == smallest, topk_blocks, 2**30), 1)', CHOICE),
    Fault('a block of the future may be chosen', RANKS, 'choosable = choosable & (distance >= 0)', 'choosable = choosable & (distance >= -1)', CHOICE),
    Fault('tiles with the first local block unforced', RANKS, 'tl.min(own_block, 0) - selection.num_local + 1', 'tl.min(own_block, 0) - selection.num_local + 2', CHOICE + COLUMNS),
    Fault('one local block too many', RANKS, 'is_local = reach < selection.num_local', 'is_local = reach <= selection.num_local', CHOICE),
    Fault('compressed blocks seen early', SELECT, 'end = compressed * sizes.stride + sizes.block_size - 1', 'end = compressed * sizes.stride + sizes.block_size - 2', CHOICE),
    Fault('keys of another sequence', SELECT, 'tiles, plane, key_start + step,', 'tiles, plane, step,', CHOICE[1:]),
    Fault('keys of a step by descriptor: one row late', SELECT, 'tiles.load([first.to(tl.int32), 0])', 'tiles.load([first.to(tl.int32) + 1, 0])', COLUMNS),
    Fault('the place of keys before a sequence rounded towards 0', SELECT, 'floor_divide(first_key, SPREAD)', 'first_key // SPREAD', CHOICE),
    Fault('what an infinite weight does not reach', SELECT, 'tl.where(beyond > 0, weights, 0.0)', 'weights', COLUMNS),
    Fault('columns: of score 0 full columns are forgotten', RANKS, 'topk[LEVELS - 1][0] >= 0', 'topk[LEVELS - 1][0] > 0', COLUMNS),
    Fault('heads of another query', MEMBERS, 'query = columns // (QUERIES * BLOCK_G) * QUERIES + columns', 'query = columns', COLUMNS),
    Fault('columns: what a full column dropped is forgotten', RANKS, '2**31 - 1, -1)\n        for', '-1, -1)\n        for', COLUMNS),
    Fault('columns: one pass, whatever is left', RANKS, 'is_incomplete = find_largest(is_open.to(tl.int32)) > 0', 'is_incomplete = find_largest(is_open.to(tl.int32)) > 1', COLUMNS),
    Fault('columns: the last block is taken once more', RANKS, '& (block > last)', '& (block >= last)', COLUMNS),
    Fault('columns: equal blocks in disorder', RANKS, 'is_larger = is_larger | (sort_keys > sort_key)', 'is_larger = sort_keys > sort_key', COLUMNS),
    Fault('columns: more than the count of a row', RANKS, '(largest < 2**31 - 1) & (count < limit)', '(largest < 2**31 - 1) & (count < limit + 1)', COLUMNS),
    Fault('keys of a step: the last ones forgotten', SELECT, 'in_order[:, whole, :rest]', 'in_order[:, whole - 1, :rest]', COLUMNS),
    # Scores of the chosen
    Fault('what pads a group is counted', SCORES_FORWARD, 'seen_by_rows = columns[None, :] & (tile_rows < GROUP)[:, None]', 'seen_by_rows = columns[None, :] & (tile_rows >= 0)[:, None]', SCORES),
    Fault('shared tokens off by one', SCORES_TILES, 'shared = tl.minimum(start + sizes.block_size, SELECTION_BLOCK) - tl.maximum(start, 0)', 'shared = tl.minimum(start + sizes.block_size, SELECTION_BLOCK) - tl.maximum(start, 1)', SCORES),
    Fault('one local block more has no gradient', SCORES_TILES, 'is_local = blocks > own_block - sizes.num_local', 'is_local = blocks >= own_block - sizes.num_local', SCORES),
    Fault('own block below position 0 rounded up', SCORES_TILES, 'floor_divide(positions, SELECTION_BLOCK)', 'positions // SELECTION_BLOCK', SCORES),
    Fault('gradients of keys by scores of forced blocks', SCORES_BACKWARD, 'is_forced(block, position, sizes', 'is_forced(block + 1, position, sizes', SCORES),
    Fault('gradients of queries by scores of the next slot', SCORES_FORWARD, 'slots = columns // NUM_OFFSETS', 'slots = (columns + 1) // NUM_OFFSETS', SCORES),
    Fault('gradients of queries by scores of forced blocks', SCORES_FORWARD, 'is_forced(blocks, position, sizes', 'is_forced(blocks + 1, position, sizes', SCORES),
    Fault('entries of this step twice in the gradient of scores', SCORES_BACKWARD, 'first_row + BLOCK_M, num_rows', 'first_row, num_rows', SCORES),
    Fault('causal mask off in the gradient of scores', SCORES_BACKWARD, 'sizes.block_size - 1 <= position[None, :])', 'sizes.block_size <= position[None, :])', SCORES),
    Fault('one block more than the count of a row', SELECT, 'tl.maximum(counts, 0)', 'tl.maximum(counts + 1, 0)', CHOICE_FEATURES),
    Fault('counts of another index head', SELECT, 'tl.load(counts_ptr + rows,', 'tl.load(counts_ptr + rows - index_head,', CHOICE_FEATURES),
    Fault('scores of logits without their cap', SCORES_TILES, 'tl.fma(cap_logits(products * scale, softcap), 1.4426950408889634, minus_lse)', 'tl.fma(products * scale, 1.4426950408889634, minus_lse)', CHOICE_FEATURES),
    Fault('slope of the soft cap forgotten', SCORES_TILES, 'dlogits * cap_slope(products * scale, softcap)', 'dlogits', CHOICE_FEATURES),
    # Gated sum
    Fault('window gated as selected', GATED_SUM, 'out += _load_gate(gates_ptr + 2 * gates_strides[3], row_mask)', 'out += _load_gate(gates_ptr + gates_strides[3], row_mask)', GATED),
    Fault('gradients of gates off by half a percent', GATED_SUM, 'dgate = tl.sum(dout * branch.to(tl.float32), 1)', 'dgate = tl.sum(dout * branch.to(tl.float32), 1) * 0.995', GATED),
    # Gates that attentions differentiate
    Fault('gates: gradients of q without them', BACKWARD, 'dq *= gate[:, None]', 'dq *= 1.0', OF_GATES),
    Fault('gates: their logarithm added', BACKWARD, 'tl.log2(gate)', '(-tl.log2(gate))', OF_GATES),
    Fault('gates: those below 0 are 1 in gradients of k and v', DKV, 'weights = tl.where(is_negative[None, :], -weights, weights)', 'weights *= 1.0', OF_GATES),
    Fault('gates: those above 0 taken for others beside one below 0', DKV, 'lse_log2 = tl.where(is_negative, of_negative, lse_log2)', 'lse_log2 = of_negative', OF_GATES),
    Fault('gates: another number of a row', DKV, 'first, third = tl.split(even)', 'third, first = tl.split(even)', OF_GATES),
    Fault('gates: gradient of a bias without their sign', DBIAS, 'sign * weights', 'weights', OF_GATES),
    Fault('gates: gradient of a bias without those below 0', DBIAS, 'lse_log2 = tl.where(is_negative, of_negative, lse_log2)', 'lse_log2 *= 1.0', OF_GATES),
    Fault('gates: gradient of sinks without them', INTERVAL_OP, 'delta if gate is None else delta * gate.transpose(1, 2)', 'delta', OF_GATES),
    Fault('gates: their gradient with the wrong sign', INTERVAL_OP, 'dgate = row_stats[:, :, 1].transpose', 'dgate = -row_stats[:, :, 1].transpose', OF_GATES),
    Fault('gates: a branch of the sum without a gradient', SUM_OP, '(None, dout, dout, dout)', '(None, dout, None, dout)', OF_GATES),
    Fault('gates: by query and union, missing in dq', EPILOGUE, "tl.where(lse == float('-inf'), 0.0, gate)[:, None]", '1.0', SELECTED_GATES),
    Fault('gates: by block, missing in dq', BY_BLOCK_BACKWARD, "tl.where(lse == float('-inf'), 0.0, gate)[:, None]", '1.0', SELECTED_GATES),
    Fault('gates: negative gates count as 1 in dk and dv', SELECTED_DKV, 'weights = tl.where(gate[None, :] < 0, -weights, weights)', 'weights *= 1.0', SELECTED_GATES),
    Fault('gates: negative gates count as -1 in dk and dv', SELECTED_DKV, 'ungated - tl.log(-gate)', 'ungated', SELECTED_GATES),
    Fault('gates: by query and union, gate of an empty row used', EPILOGUE, "tl.where(lse == float('-inf'), 0.0, gate)", 'gate', SELECTED_GATES),
    Fault('gates: by block, gate of an empty row used', BY_BLOCK_BACKWARD, "tl.where(lse == float('-inf'), 0.0, gate)", 'gate', SELECTED_GATES),
    Fault('gates: of rows that read nothing', BACKWARD, "tl.where(lse == float('-inf'), 0.0, numbers)", 'numbers', OF_GATES),
    Fault('gates: negative gates leave NaN in dk and dv', SELECTED_DKV, 'if tensors.gates is not None and not is_finite_tile(dk):', 'if tensors.gates is not None and num_rows < 0:', SELECTED_GATES),
    Fault('gates: dk and dv summed twice', SELECTED_DKV, 'dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)\n        dv = tl', 'dk = tl.where(dk == dk, dk, 0.0)\n        dv = tl', SELECTED_GATES),
    Fault('gates: gate of the first token in dk and dv', SELECTED_DKV, 'row * strides.gate[0] + token * strides.gate[1]', 'row * strides.gate[0] + 0 * token', SELECTED_GATES),
    Fault('delta: logarithm of the gate added', DELTA, 'lse -= tl.log(tl.load(gate_ptr', 'lse += tl.log(tl.load(gate_ptr', SELECTED_GATES),
    Fault('gates: log-sum-exp not folded', SELECTED_DKV_LAUNCH, '(lse - gate.float().log().transpose(1, 2), Gates', '(lse, Gates', SELECTED_GATES),
    Fault('gates: sign of the gate gradient of selected attention', SELECTED_OP, 'else delta.transpose(1, 2).to(gate.dtype)', 'else -delta.transpose(1, 2).to(gate.dtype)', SELECTED_GATES),
    # Rotary
    Fault('rotary: gradients turned forward', ROTARY, 'sin = -sin', 'sin = sin * 1.0', ('test_rotary.py',)),
    Fault('rotary: pairs turned the other way', ROTATION, 'odd * cos + even * sin', 'odd * cos - even * sin', ('test_rotary.py',)),
    Fault('rotary: last pair left as it is', ROTARY, '(angles < NUM_ANGLES)', '(angles < NUM_ANGLES - 1)', ('test_rotary.py',)),
    Fault('rotary: angles of the first row for all', ROTARY, 'batch * sin_strides[0]', 'batch * 0', ('test_rotary.py',)),
    Fault('rotary: sums of readers turned forward', ROTARY, 'rotate(total, cos, -sin, is_rotated)', 'rotate(total, cos, sin, is_rotated)', ('test_shared_input.py',)),
    Fault('rotary: a reader is left out', ROTARY, 'tl.static_range(NUM_ROTATED, NUM_GRADS)', 'tl.static_range(NUM_ROTATED, max(NUM_ROTATED, NUM_GRADS - 1))', ('test_shared_input.py',)),
    Fault('rotary: what is not turned is multiplied', ROTATION, 'even * sin, odd)', 'even * sin, odd * cos + even * sin)', ('test_rotary.py',)),
    # Sharing
    Fault('block union: flag of another tile', BLOCK_UNION, 'tile = start // union.block_t + sequence', 'tile = start // union.block_t', UNION),
    Fault('block union: repeated indices count twice', BLOCK_UNION, 'is_block & (before // BLOCK_S != keys // BLOCK_S)', 'is_block', UNION),
    Fault('block union: future blocks count', BLOCK_UNION, 'count_readable_blocks(offset + queries, ', 'count_readable_blocks(offset + queries + 8, ', UNION),
    Fault('block union: flag stored for its own tile', BLOCK_UNION, 'tl.store(flags_ptr + tl.num_programs(1), flag.to(tl.int8))', 'tl.store(flags_ptr, flag.to(tl.int8))', UNION),
    Fault('block union: flags restart with each range of tiles', BLOCK_UNION, 'union.flags + index.to(tl.int64) * tl.num_programs(1) + index_head', 'union.flags + tile', UNION),
    Fault('by union: flags of the first range for all', UNION_LOOP, 'load_flag(union, union.first_tile + tl.program_id(0), ', 'load_flag(union, tl.program_id(0), ', UNION),
    Fault('block union: a block appears twice', BLOCK_UNION, 'is_block & (before // SIZE != blocks)', 'is_block', UNION),
    Fault('by union: blocks with future keys not masked', BLOCK_UNION, 'tl.maximum(offset + first_query + 1, 0) // BLOCK_SIZE', 'tl.maximum(offset + first_query + BLOCK_SIZE, 0) // BLOCK_SIZE', UNION),
    Fault('by union: all queries read all blocks', UNION_LOOP, 'return block, is_selected != 0, first, keys, key_mask', 'return block, is_selected >= 0, first, keys, key_mask', UNION),
    Fault('by union: large keys not noticed', UNION_LOOP, 'is_small(union.large, pair, union.num_chunks) and is_small_query', 'is_small_query', SELECTED[1:]),
    Fault('by union: large queries not noticed', UNION_LOOP, ' and is_small_query', '', SELECTED[1:]),
    Fault('by union: large output gradients not noticed', UNION_BACKWARD, ' and is_small_tile(dout)', '', SELECTED[1:]),
    Fault('by union: large values not noticed', FINITE, 'is_small_tile(k) & is_small_tile(v)', 'is_small_tile(k)', SELECTED[1:]),
    Fault('neighbours: products that may be infinite', FINITE, 'tl.constexpr(2.0**59)', 'tl.constexpr(2.0**126)', ('test_finite.py',)),
    Fault('by union: unselected blocks not masked', UNION_FORWARD, "tl.where(is_selected, -reference, float('-inf')) if BY_ROW", '-reference if BY_ROW', SELECTED[1:]),
    Fault('by union: unselected blocks not masked in dq', UNION_BACKWARD, "tl.where(is_selected, -lse_log2, float('-inf')) if BY_ROW", '-lse_log2 if BY_ROW', SELECTED[1:]),
    Fault('by union: vanishing weights kept', UNION_FORWARD, '(total > LEAST)', '(total >= 0.0)', SELECTED_MAXIMA),
    Fault('by union: too large weights kept', UNION_FORWARD, ' & (total < MOST))', ')', SELECTED_MAXIMA),
    Fault('by union: all rows recomputed', UNION_FORWARD, 'is_fixed & (step < first)', 'is_fixed & (step < 0)', SELECTED_MAXIMA),
    Fault('by union: reference from unread keys', UNION_LOOP, '((bits & 1) != 0) & ', '', SELECTED_MAXIMA),
    Fault('by union: reference from any first block', UNION_LOOP, 'tl.where(first_block == 0, after_first - before_first, 0)', 'after_first - before_first', SELECTED_MAXIMA),
    Fault('by union: reference depends on other queries', UNION_LOOP, '    if sizes.causal:\n        # The own', '    if True:\n        # The own', SELECTED_MAXIMA),
    Fault('by union: reference from later keys', UNION_LOOP, 'position + 1 - 2 * NUM_KEYS + lanes', 'position + 9 - 2 * NUM_KEYS + lanes', SELECTED_MAXIMA),
    Fault('by union: sign of the scale dropped', UNION_FORWARD, 'q, scale = -q, -scale', 'scale = -scale', SELECTED[1:]),
    Fault('CSR index: groups that do not divide a tile', INVERSE_INDEX, '(rows // GROUP).to(tl.int32)', '((rows + 1) // GROUP).to(tl.int32)', SELECTED[:1]),
    Fault('CSR index: too few masked entries', BLOCK_TO_QUERY, '(positions < tl.max(keys, 0))', '(positions < tl.max(keys, 0) - 1)', SELECTED[:1]),
    Fault('CSR index: incomplete block not masked', BLOCK_TO_QUERY, 'return tl.where(tl.min(key_mask.to(tl.int32), 0) == 0, num_entries, num_masked)', 'return num_masked', SELECTED[:1]),
    Fault('by union: last block skipped', UNION_LOOP, 'exists = index < num_blocks', 'exists = index + 1 < num_blocks', UNION),
    Fault('by union: values of other heads', UNION_LOOP, 'tl.broadcast_to(values[:, None], [BLOCK_T, BLOCK_G])', 'tl.broadcast_to(values[None, :], [BLOCK_G, BLOCK_T])', UNION),
    # Soft caps of selected attention
    Fault('soft cap: no slope in the mean key', SELECTED_BACKWARD, '        weights *= slope\n', '', CAPPED),
    Fault('soft cap: no slope in the gradient of q', SELECTED_BACKWARD, '        dlogits *= slope\n', '', CAPPED),
    Fault('soft cap: unread tile counts', SELECTED_FORWARD, 'if MASKED or softcap is not None:', 'if MASKED:', CAPPED),
    Fault('soft cap: before the factor', SELECTED_BACKWARD, 'cap_logits(scaled, softcap)', 'cap_logits(logits, softcap) * factor', CAPPED),
    Fault('soft cap: by union, no slope in dq', UNION_BACKWARD, '        dlogits *= slope\n', '', CAPPED),
    Fault('soft cap: by union, no slope in the mean key', UNION_BACKWARD, '        weights *= slope\n', '', CAPPED),
    Fault('soft cap: by block, no slope in the gradient of q', BY_BLOCK_BACKWARD, 'dlogits *= cap_slope(logits_log2, softcap * 1.4426950408889634)', 'dlogits *= 1.0', CAPPED),
    Fault('soft cap: by block, in other units', BY_BLOCK, 'softcap * 1.4426950408889634', 'softcap', CAPPED),
    Fault('soft cap: no slope in the gradient of k', SELECTED_DKV, 'dlogits *= cap_slope(logits_log2, softcap * 1.4426950408889634)', 'dlogits *= 1.0', CAPPED),
    # Decoding
    Fault('decoding: all tokens at one position', APPEND, 'positions = tl.zeros([1], tl.int32) + (old + token)\n', 'positions = tl.zeros([1], tl.int32) + old\n', DECODING),
    Fault('decoding: what does not fit is written', APPEND, 'fits = locate(positions, positions < length', 'fits = locate(positions, positions >= 0', DECODING[1:]),
    Fault('decoding: what does not fit goes into the ring', APPEND, 'fits = tl.full([1], 1, tl.int1) & (old + token < length)', 'fits = tl.full([1], 1, tl.int1) & (old + token >= 0)', DECODING[1:]),
    Fault('decoding: places of the ring off by one', APPEND, 'slot = ((old + token) % ring.size)', 'slot = ((old + token + 1) % ring.size)', DECODING),
    Fault('decoding: blocks of the next step', APPEND, 'first = count_blocks(old, sizes.block_size, sizes.stride)', 'first = count_blocks(old + sizes.stride, sizes.block_size, sizes.stride)', DECODING),
    Fault('decoding: positions in a block of the first head', APPEND, 'offsets = (head * sizes.block_size + in_block) * SIZE', 'offsets = (head * 0 + in_block) * SIZE', DECODING),
    Fault('decoding: mean of what pads a block', APPEND, 'tl.full([BLOCK_D], sizes.block_size, tl.float32)', 'tl.full([BLOCK_D], (sizes.block_size + BLOCK_L - 1) // BLOCK_L * BLOCK_L, tl.float32)', DECODING),
    Fault('decoding: first new token missing in its block', APPEND, 'x = tl.where((tokens >= old)[:, None]', 'x = tl.where((tokens > old)[:, None]', DECODING),
    Fault('decoding: angles not interpolated', APPEND, 'tl.div_rn((old + token).to(tl.float32), factor)', '(old + token).to(tl.float32)', DECODING),
    Fault('decoding: entry of another place of a page', STORAGE, '(tokens % pages.size)', '((tokens + 1) % pages.size)', DECODING),
    Fault('decoding: pages beyond the pool', STORAGE, 'exists & (page >= 0) & (page < pages.num_pages)', 'exists & (page >= 0)', DECODING),
    Fault('decoding: lengths beyond the capacity', STORAGE, 'tl.minimum(old + step.num_tokens, capacity)', 'old + step.num_tokens', DECODING[1:]),
    Fault('decoding: compressed blocks seen early', COMPRESSED, 'sizes.block_size + 1  # largest', 'sizes.block_size + 2  # largest', DECODING),
    Fault('decoding: blocks of another selection block attended to twice', COMPRESSED, 'weights = tl.where(is_own[None, :], weights, 0.0)', 'weights = weights * 1.0', DECODING),
    Fault('decoding: overlap of blocks off', COMPRESSED, 'shared = tl.minimum(ends, sizes.selection_block_size) - tl.maximum(begins, 0)', 'shared = tl.minimum(ends, sizes.selection_block_size) - begins', DECODING[1:]),
    Fault('decoding: overlap with the next block off', COMPRESSED, 'beyond = tl.maximum(ends - sizes.selection_block_size, 0)', 'beyond = tl.maximum(ends - sizes.selection_block_size + 1, 0)', DECODING),
    Fault('decoding: every part reads the memory', COMPRESSED, 'if part == 0:', 'if part >= 0:', DECODING),
    Fault('decoding: no rescale of the sum', COMPRESSED, 'totals = totals * shrink[:, None] + weights', 'totals = totals + weights', DECODING),
    Fault('decoding: last new block not stored', COMPRESSED, 'is_read = (block < num_keys) &', 'is_read = (block < num_keys - 1) &', DECODING),
    Fault('decoding: tiles of a part forgotten', COMPRESSED, 'of_part = tl.cdiv(num_tiles, num_splits)', 'of_part = num_tiles // num_splits', DECODING),
    Fault('decoding: a block of the future may be chosen', CHOOSE, 'choosable = (block <= own_block)', 'choosable = (block <= own_block + 1)', DECODING[1:]),
    Fault('decoding: what is handed on forgotten', CHOOSE, 'next_scores += _add_heads(next_sums, factors)', 'next_scores += 0.0 * _add_heads(next_sums, factors)', DECODING[1:]),
    Fault('decoding: what the chunk before hands on forgotten', CHOOSE, 'first += _add_heads(next_before,', 'first += 0.0 * _add_heads(next_before,', DECODING[1:]),
    Fault('decoding: maxima of the first tile for all', CHOOSE, 'run[None, :] // (TILE // RUN), mask', 'run[None, :] // (TILE // RUN) * 0, mask', DECODING[1:]),
    Fault('decoding: sums of other heads', CHOOSE, '* GROUP + index_head % REPEATS * share\n', '* GROUP\n', DECODING[1:]),
    Fault('decoding: a head of a group left out', CHOOSE, 'is_head = heads < share\n', 'is_head = (heads < share) & ((heads > 0) | (share == 1))\n', DECODING[1:]),
    Fault('decoding: totals of parts not rescaled', CHOOSE, 'total = tl.sum(total * tl.exp2(largest - base[:, None]), 1)', 'total = tl.sum(total, 1)', DECODING[1:]),
    Fault('decoding: one local block too many', CHOOSE, '(distance < selection.num_local)', '(distance <= selection.num_local)', DECODING[1:]),
    Fault('decoding: an initial block missing', CHOOSE, 'tl.where(block < selection.num_init,', 'tl.where(block < selection.num_init - 1,', DECODING[1:]),
    Fault('decoding: the best of a chunk again', CHOOSE, 'sort_keys = tl.where(blocks == block, TAKEN, sort_keys)', 'sort_keys = sort_keys + 0', DECODING),
    Fault('decoding: last chunk forgotten', CHOOSE, 'is_candidate = candidates < num_merged *', 'is_candidate = candidates < (num_merged - 1) *', DECODING),
    Fault('decoding: the first chunks alone are merged', CHOOSE, 'candidates += leader * selection.num_selected', 'candidates += 0 * selection.num_selected', DECODING),
    Fault('decoding: merged before all are done', CHOOSE, '== num_merged - 1:', '== tl.minimum(num_merged - 1, 1):', DECODING),
    Fault('decoding: counts of programs stay', CHOOSE, 'tl.store(counts_ptr + leader, 0)', 'tl.store(counts_ptr + leader, num_merged)', DECODING),
    Fault('decoding: window one key too wide', ATTEND, 'position - tiles_read.window_size + 1, 0)', 'position - tiles_read.window_size, 0)', DECODING),
    Fault('decoding: window reads chosen blocks again', ATTEND, '(is_chosen | (known == 0))', '(is_chosen | (known == known))', DECODING),
    Fault('decoding: first key of the window missing in a chosen block', ATTEND, 'in_window = tokens >= first_in_window', 'in_window = tokens > first_in_window', DECODING),
    Fault('decoding: selected branch reads the future', ATTEND, 'exists = exists & (tokens <= position)', 'exists = exists & (tokens <= position + 1)', DECODING),
    Fault('decoding: window gated as selected', ATTEND, 'tl.load(gate_ptr + 2 * gates.strides[3])', 'tl.load(gate_ptr + gates.strides[3])', DECODING),
    Fault('decoding: parts not rescaled', ATTEND, 'total = tl.sum(totals * weights, 0)', 'total = tl.sum(totals, 0)', DECODING),
    Fault('decoding: parts of the first head for all', ATTEND, '* 2 * share + head % share', '* 2 * share + head * 0', DECODING),
    Fault('decoding: the longest that a row has been forgotten', ATTEND, 'tl.maximum(peak, length)', 'tl.maximum(length, 0)', DECODING[1:]),
    Fault('decoding: last of the blocks that may be complete forgotten', DECODING_OP, 'num_blocks = -(-num_tokens // stride)', 'num_blocks = max(1, num_tokens // stride)', DECODING),
    Fault('decoding: window one block short', DECODING_SETTINGS, '(window_size + selection_block_size - 2) // selection_block_size + 1', '(window_size + selection_block_size - 2) // selection_block_size', DECODING),
    Fault('decoding: launches made again for another alignment', DECODING_STEP, 't.device, address % ALIGNMENT)', 't.device, 0)', AGAIN),
    Fault('decoding: launches made again for other strides', DECODING_STEP, '(t.shape, t.stride(), t.dtype, t.device', '(t.shape, t.dtype, t.device', AGAIN),
    Fault('decoding: launches made again for another tensor of the cache', DECODING_STEP, 't.dtype, t.data_ptr())', 't.dtype)', AGAIN),
    Fault('decoding: launches made again for a copy of an argument', PREPARED, 'self.is_complete and self._stays(first)', 'self.is_complete', AGAIN),
    Fault('decoding: tensors given twice not told apart', PREPARED, 'self.is_complete and id(tensor) not in self._given', 'self.is_complete', AGAIN),
    Fault('decoding: launches do not hold the workspace', PREPARED, 'self._held.append(tensor)', 'pass', AGAIN),
]  # fmt: skip


def copy_package(directory: Path) -> None:
    for name in COPIED:
        source, target = ROOT / name, directory / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns('__pycache__'))
        else:
            shutil.copy(source, target)


def with_fault(fault: Fault) -> str:
    """The text of the file with the fault in it."""
    text = (ROOT / PACKAGE / 'ops' / fault.file).read_text()
    if text.count(fault.old) != 1:
        raise SystemExit(f'{fault.name}: {fault.file} has {text.count(fault.old)} times: {fault.old}')
    return text.replace(fault.old, fault.new)


def run_tests(tests: tuple[str, ...], directory: Path) -> subprocess.CompletedProcess[str]:
    check = f"import native_sparse_attention as n; assert n.__file__.startswith('{directory}'), n.__file__"
    environment = os.environ | {'PYTHONPATH': str(directory), 'OMP_NUM_THREADS': '1'}
    subprocess.run([sys.executable, '-c', check], cwd=directory, env=environment, check=True)
    files = [f'tests/kernels/{name}' for name in tests]
    command = [sys.executable, '-m', 'pytest', '--full', '-x', '-q', '--tb=line', '-p', 'no:cacheprovider', *files]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)


def is_caught(fault: Fault) -> bool:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).resolve()
        copy_package(directory)
        (directory / PACKAGE / 'ops' / fault.file).write_text(with_fault(fault))
        begin = time.monotonic()
        done = run_tests(fault.tests, directory)
    if done.returncode not in (0, 1):
        raise SystemExit(f'{fault.name}: pytest ended with {done.returncode}\n{done.stdout}{done.stderr}')
    caught = done.returncode == 1
    by = next((line for line in done.stdout.splitlines() if line.startswith('FAILED')), '').removeprefix('FAILED ')
    print(
        f'{"caught" if caught else "MISSED"}  {fault.name} ({time.monotonic() - begin:.0f} s)  {by[:120]}', flush=True
    )
    return caught


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--jobs', type=int, default=2)
    parser.add_argument('--only', default='', help='faults whose name or file has this in it')
    parser.add_argument('--skip-control', action='store_true', help='do not run the tests without a fault first')
    arguments = parser.parse_args()
    faults = [fault for fault in FAULTS if arguments.only in f'{fault.name} {fault.file}']
    for fault in faults:
        with_fault(fault)
    if not arguments.skip_control:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name).resolve()
            copy_package(directory)
            done = run_tests(tuple(sorted({test for fault in faults for test in fault.tests})), directory)
        if done.returncode != 0:
            raise SystemExit(f'the tests fail without a fault:\n{done.stdout[-4000:]}')
    with ThreadPoolExecutor(arguments.jobs) as pool:
        caught = sum(pool.map(is_caught, faults))
    print(f'{caught} of {len(faults)} caught')
    sys.exit(caught < MIN_CAUGHT * len(faults))


if __name__ == '__main__':
    main()
