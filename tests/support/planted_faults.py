"""Check that tests notice wrong kernels: one-line faults are planted one at a time, and the tests must fail.

    python -m tests.support.planted_faults [--jobs 2] [--only WORD] [--first N]

A copy of the package and its tests in a temporary directory has the fault; without one the tests must pass there. Exits
with 1 unless 95 % of the faults are caught.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.planting import PACKAGE, ROOT, Fault, copy_package, with_fault

MIN_CAUGHT = 0.95
CRASHED = 70  # exit code of a process whose tests did not end

MEMORY = ('test_compressed_attention.py',)
FEATURED = ('test_window_features.py',)
MAXIMA = ('test_interval_maxima.py',)
INTERVAL = ('test_window_attention.py', 'test_window_attention_guarantees.py', *MEMORY)
SELECTED = ('test_selected_attention.py', 'test_selected_attention_guarantees.py')
ORDER = ('test_selected_attention_order.py',)
UNION, CAPPED = ('test_selected_attention_union.py',), ('test_selected_features.py',)
SELECTION = ('test_select_blocks.py', 'test_select_blocks_guarantees.py')
COLUMNS = ('test_select_blocks_columns.py',)
SELECTION_FEATURES = ('test_selection_features.py',)
SCORES, GATED, PLACED = ('test_chosen_scores.py',), ('test_gated_sum.py',), ('test_varlen.py', *INTERVAL)
FORWARD, BACKWARD = '_triton/interval/forward.py', '_triton/interval/backward.py'
INTERVAL_OP, SUM_OP = '_triton/interval/op.py', 'gated_sum/triton/op.py'
DKV, INTERVAL_KEYS = '_triton/interval/key_gradients.py', '_triton/interval/keys.py'
TILES, PLACEMENT = '_triton/interval/tiles.py', '_triton/varlen.py'
MARKS, DBIAS = '_triton/interval/modifiers.py', '_triton/interval/bias_gradient.py'
SELECTED_FORWARD = 'selected_attention/triton/by_query/forward.py'
SELECTED_BACKWARD = 'selected_attention/triton/by_query/backward.py'
SELECTED_DKV = 'selected_attention/triton/dkv/kernels.py'
UNION_FORWARD = 'selected_attention/triton/by_union/forward.py'
BLOCK_LOOP = 'selected_attention/triton/loops/block_loop.py'
UNION_LOOP, EPILOGUE = 'selected_attention/triton/loops/union_loop.py', 'selected_attention/triton/loops/epilogue.py'
UNION_BACKWARD = 'selected_attention/triton/by_union/backward.py'
BY_BLOCK = 'selected_attention/triton/by_block/forward.py'
BLOCK_TO_QUERY = 'selected_attention/triton/index/block_to_query.py'
BY_BLOCK_BACKWARD = 'selected_attention/triton/by_block/backward.py'
BY_BLOCK_DQ = 'selected_attention/triton/by_block/dq_kernels.py'
SELECTED_DKV_LAUNCH = 'selected_attention/triton/dkv/launch.py'
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
TOPK, MEMBERS = 'block_selection/triton/topk.py', 'block_selection/triton/group_columns.py'
ROTARY, ROTATION = 'rotary/triton/kernels.py', '_triton/rotation.py'
HEAD_NORM, NORMS = 'rotary/triton/norm_kernels.py', ('test_norm_rotary.py',)
SCORES_FORWARD = 'block_selection/triton/scores_forward.py'
SCORES_BACKWARD = 'block_selection/triton/scores_backward.py'
INTERVAL_TILES = ('test_interval_tiles.py',)
SCORES_TILES = 'block_selection/triton/scores_tiles.py'
DECODING, MERGED_DECODING = ('test_decoding.py', 'test_decoding_guarantees.py'), ('test_decoding_merged.py',)
APPEND, STORAGE = 'decoding/triton/append.py', 'decoding/triton/storage.py'
COMPRESSED, CHOOSE = 'decoding/triton/compressed.py', 'decoding/triton/choose.py'
ATTEND, DECODING_OP = 'decoding/triton/attend.py', 'decoding/triton/op.py'
MLP, MLP_DECODING = 'decoding/triton/mlp.py', ('test_decoding_mlp.py',)
DECODING_SETTINGS = 'decoding/triton/settings.py'
AGAIN = ('test_launch_cache.py',)
DECODING_STEP, PREPARED = 'decoding/step.py', 'decoding/triton/launch_cache.py'

FAULTS = [
    # Interval attention
    Fault('window one key too wide', TILES, 'key_limits', 'positions - interval.left', 'positions - interval.left - 1', INTERVAL),
    Fault('own key masked', TILES, 'query_limits', '+ interval.reach -', '+ interval.reach + 1 -', INTERVAL),
    Fault('range ends one tile early', TILES, 'split_range', 'tl.cdiv(last - right, BLOCK)', '(last - right) // BLOCK', INTERVAL),
    Fault('full tiles one key too far', TILES, 'split_range', '- middle,', '- middle + 1,', INTERVAL),
    Fault('last block not visible', TILES, '_count', '+ stride,', '+ stride - 1,', MEMORY),
    Fault('memory masked', TILES, 'query_limits', ', 0,', ', 1,', MEMORY),
    Fault('last queries of a key left out', TILES, 'query_range', 'last_key + interval.left + 1 - offset', 'last_key + interval.left - offset', INTERVAL),
    Fault('scale dropped', FORWARD, 'forward_kernel', 'tl.where(scale == 0, 1e-37, tl.abs(scale) * 1.4426950408889634)', '1.4426950408889634', INTERVAL),
    Fault('scale off by half a percent', FORWARD, 'forward_kernel', 'tl.where(scale == 0, 1e-37, tl.abs(scale) * 1.4426950408889634)', 'tl.abs(scale) * 1.45', INTERVAL),
    Fault('sign of the scale dropped', FORWARD, '_attend', '-products if NEGATIVE else', '', INTERVAL),
    Fault('no rescale of the sum', FORWARD, '_attend', 'total * rescale', 'total', INTERVAL),
    Fault('no rescale of the output', FORWARD, '_attend', 'rescale[:, None]', '1.0', INTERVAL),
    Fault('wrong group', FORWARD, 'forward_kernel', 'first_head // GROUP', 'first_head % tl.cdiv(tl.num_programs(1) * HEADS, GROUP)', INTERVAL),
    Fault('heads of a tile in disorder', TILES, 'open_tile', 'tile_rows % HEADS', 'tile_rows // (BLOCK_M // HEADS)', INTERVAL),
    Fault('positions of the first head for all', TILES, 'open_tile', 'tile_rows // HEADS', 'tile_rows % (BLOCK_M // HEADS)', INTERVAL),
    Fault('tiles by descriptor one key late', TILES, 'load_keys', '+ start,', '+ start + 1,', ('test_interval_tiles.py',)),
    Fault('not a number goes unseen', FORWARD, '_attend', 'tl.sum(tl.where(read, nonfinite_rows[None, :], 0.0), 1)[:, None]', '0.0', INTERVAL),
    Fault('values that a row does not read change its output', FORWARD, 'forward_kernel', '(is_finite_tile(sums[2]) and are_near)', 'are_near', INTERVAL),
    Fault('maxima: however far they are', FORWARD, 'forward_kernel', '(is_finite_tile(sums[2]) and are_near)', 'is_finite_tile(sums[2])', MAXIMA),
    Fault('maxima: fixed in every pass', FORWARD, 'forward_kernel', '_is_near(sums[1])', '((sums[1] >= 0) | (sums[1] < 0))', MAXIMA),
    Fault('maxima: sums that overflow alone', FORWARD, 'forward_kernel', '& (tl.sum(sums[2] - sums[2], 1) == 0)', '', MAXIMA),
    Fault('maxima: fixed in no row', FORWARD, 'forward_kernel', ', FIXED,', ', False,', MAXIMA),
    Fault('maxima: sums that vanish', FORWARD, '_is_near', '(total > 2.0**-20) &', '', MAXIMA),
    Fault('maxima: rows by the sum of their values', FORWARD, 'forward_kernel', 'tl.sum(sums[2] - sums[2], 1) == 0', "tl.abs(tl.sum(sums[2], 1)) < float('inf')", MAXIMA),
    Fault('maxima: a log-sum-exp of the last pass', FORWARD, 'forward_kernel', '_is_near(total) &', '(total < 0) &', MAXIMA),
    Fault('log-sum-exp in bits', FORWARD, 'forward_kernel', ', 0.6931471805599453,', ', 1.0,', INTERVAL),
    Fault('gradient of the log-sum-exp with the wrong sign', BACKWARD, '_add_keys', '(weights, dlse[:, None], dlogits)', '(-weights, dlse[:, None], dlogits)', INTERVAL),
    Fault('gradient of the log-sum-exp missing in k', BACKWARD, 'dq_kernel', 'missing - dlse', 'missing', INTERVAL),
    Fault('delta not corrected', BACKWARD, 'dq_kernel', '(dq - missing[:, None] * mean_k)', 'dq', INTERVAL),
    Fault('delta of k not corrected', BACKWARD, 'dq_kernel', 'delta + missing', 'delta', INTERVAL),
    Fault('first memory key skipped', DKV, '_find_split', 'key_rows < interval.num_memory', '(key_rows < interval.num_memory) & (key_rows > 0)', MEMORY),
    Fault('memory: queries that read the first block taken for its readers', TILES, '_first_query', 'tl.where(key < 0, 0, tl.maximum(key * interval.stride + interval.reach - offset, 0))', 'tl.maximum(key * interval.stride + interval.reach - offset, 0)', MEMORY),
    Fault('memory: gradients stored at those of keys', DKV, 'dkv_kernel', 'if JOINED: stored_rows', 'if not JOINED:\n            stored_rows', MEMORY),
    Fault('memory: keys of a tile begin at 0', DKV, 'dkv_kernel', 'first_key -= interval.num_memory', 'first_key -= 0', MEMORY),
    Fault('dkv: parts and heads change places', DKV, 'dkv_kernel', '(0) // parts', '(0)', INTERVAL),
    Fault('dkv: tiles of queries of another sequence', DKV, '_add_queries', '= query_start +', '=', INTERVAL_TILES),
    Fault('dkv: tiles of queries by descriptor beside dropout', INTERVAL_KEYS, '_describe_queries', 'or kernel_modifiers.seed is not None', '', INTERVAL_TILES),
    Fault('dkv: tiles of queries by descriptor, with care too', DKV, '_add_queries', 'and not CONTAIN_NONFINITE', '', INTERVAL_TILES),
    Fault('queries that are not finite leak', DKV, '_add_queries', 'split_finite(q)', 'q, 0', INTERVAL),
    Fault('keys that are not finite leak', BACKWARD, '_add_keys', 'k, _ = split_finite(k)', '', INTERVAL),
    Fault('keys that a row does not read change its gradient', BACKWARD, 'dq_kernel', 'not is_finite_tile(sums[0] + sums[1])', 'end_tiles < 0', INTERVAL),
    Fault('a head of a group left out', DKV, '_add_heads', '(HEADS)', '(tl.cdiv(HEADS, 2))', INTERVAL),
    Fault('a head of a group left out of a window', DKV, '_add_heads', '(HEADS * (last_tile - first_tile))', '(tl.cdiv(HEADS, 2) * (last_tile - first_tile))', INTERVAL),
    Fault('a window: a tile left out of all heads but the first', DKV, '_add_heads', ', first_tile, index', ', first_tile + 1, index', INTERVAL),
    Fault('memory missing in the keys of a row', DKV, 'dkv_kernel', 'stored_rows + interval.num_memory', 'stored_rows', MEMORY),
    Fault('weights dropped in the gradient of v, not multiplied', DKV, '_add_queries', 'weights * modifiers.keep_factor', 'weights', FEATURED),
    Fault('delta of sinks not corrected', BACKWARD, 'dq_kernel', '-delta *', '-0.0 *', FEATURED),
    Fault('slope of the soft cap missing where delta is corrected', BACKWARD, '_add_keys', 'weights *= slope', 'weights *= 1.0', FEATURED),
    Fault('random numbers of the first part of the batch for all', MARKS, 'row_of_modifiers', 'row + modifiers.first_row', 'row + 0 * modifiers.first_row', FEATURED),
    Fault('a bias of -inf is read', MARKS, 'modify_logits', "!= float('-inf')", '== bias', FEATURED),
    Fault('padding reads padding', MARKS, 'modify_logits', '(segments >= 0) &', '', FEATURED),
    Fault('a sink of another head', MARKS, 'first_sums', '(modifiers.sinks + heads)', '(modifiers.sinks + heads * 0)', FEATURED),
    Fault('heads of other rows left out of the gradient of a bias', DBIAS, 'dbias_kernel', '(rows_of_head)', '(1)', FEATURED),
    Fault('gradient of a bias for keys of other sequences', DBIAS, 'dbias_kernel', '= read &', '=', FEATURED),
    # SequenceLayout
    Fault('tiles of a packed sequence lost', PLACEMENT, 'num_tiles', '+ layout.num_sequences +', '+', PLACED),
    Fault('keys behind the length of a row', PLACEMENT, 'load_num_keys', '(tl.int32)', '(tl.int32) + 1', PLACED),
    Fault('queries one position early', PLACEMENT, 'load_position', 'num_keys - num_queries', 'num_keys - num_queries - 1', PLACED),
    Fault('offset of the first row for all', PLACEMENT, 'load_position', '(layout.q_offsets + sequence)', '(layout.q_offsets + sequence * 0)', PLACED),
    Fault('one block too many', PLACEMENT, 'count_blocks', '+ stride,', '+ stride + 1,', PLACED),
    # Selected attention
    Fault('selected: last key of a block skipped', BLOCK_LOOP, '_load_block', '+ BLOCK_SIZE,', '+ BLOCK_SIZE - 1,', SELECTED),
    Fault('selected: duplicates count twice', BLOCK_LOOP, '_load_block', '(repeats.to(tl.int32), 0) ==', '(repeats.to(tl.int32), 0) >=', SELECTED),
    Fault('selected: a future key is read', BLOCK_LOOP, 'find_keys', '+ 1,', '+ 2,', SELECTED),
    Fault('selected: a repeated index is read again', BLOCK_LOOP, 'load_step', 'first < last first', 'first >= 0\n        first', SELECTED),
    Fault('selected: tail keys of the own block skipped', BLOCK_LOOP, 'find_full_blocks', 'readable % BLOCK_SIZE', '0', SELECTED),
    # Stored gradients of logits
    Fault('stored dlogits: heads not permuted', DLOGITS, 'find_head', '// 16 * 16 + column % 4 // 2 * 8 + column % 16 // 4 * 2 + column % 2', '', STORED),
    Fault('stored dlogits: second row of a thread equals the first', DLOGITS, 'store_dlogits', '[:, None, None, None, None] * 32', '[:, None, None, None, None] * 0', STORED),
    Fault('stored dlogits: chunks of large groups overlap', DLOGITS, 'store_dlogits', '(GROUP // 16) + chunk', '(GROUP // 16)', STORED),
    Fault('stored dlogits: key tiles overlap', DLOGITS, 'store_dlogits', '(rows + first_in_block)', 'rows', STORED),
    Fault('stored dlogits: pairs overlap', DLOGITS, 'store_dlogits', 'pair * csr.num_entries + entry', 'entry + 0', STORED),
    Fault('stored dlogits: tokens of earlier ranges included', DLOGITS_DQ, 'dq_from_dlogits_kernel', '(queries < num_queries) & (query_start + queries >= csr.first_token)', 'queries < num_queries', STORED),
    Fault('stored dlogits: entries of another range', DLOGITS_DQ, 'dq_from_dlogits_kernel', 'tokens - csr.first_token', 'tokens - 0 * csr.first_token', STORED),
    Fault('stored dlogits: too few tiles for packed sequences', DLOGITS_DQ, 'DlogitsQueryGradients.finish', 'layout.num_sequences + 1', '0', STORED),
    Fault('stored dlogits: union of another head', DLOGITS_DQ, 'dq_from_dlogits_kernel', 'kv_head - first_head', 'kv_head', STORED),
    Fault('stored dlogits: non-finite keys not contained', DLOGITS_DQ, '_add_keys', ', _ = split_finite(k)', '= k', STORED),
    Fault('stored dlogits: keys assumed small', DLOGITS_DQ, 'dq_from_dlogits_kernel', 'is_small(union.large, row * csr.kv_heads + kv_head, union.num_chunks)', 'num_blocks >= 0', STORED),
    Fault('stored dlogits: scale missing', DLOGITS_DQ, 'dq_from_dlogits_kernel', 'dq * scale', 'dq', STORED),
    Fault('fp16 values: second factor dropped', FP16_VALUES, 'add_exact_product', '- upper.to(tl.float32)', '* 0.0', FP16),
    Fault('fp16 values: too large values fit', FP16_VALUES, 'convert_kernel', 'tl.where(fits != 0, FITS, IS_SMALL)', 'FITS', FP16),
    Fault('fp16 values: flags of the first sequence', FP16_VALUES, 'find_flags', '// BLOCK_SIZE + sequence', '* 0', FP16),
    Fault('fp16 values: divided by the sum of exact weights', EPILOGUE, 'store_output', 'if surplus is None else total + surplus', '', FP16),
    Fault('fp16 values: low bits of another batch row', EPILOGUE, 'store_output', '+ row *', '+ 0 *', STORED),
    Fault('fp16 values: not recomputed where blocks do not fit', SELECTED_FORWARD, 'forward_kernel', 'tl.min(flags.to(tl.int32), 0) != FITS', 'num_steps < 0', FP16),
    Fault('fp16 values: values that do not fit are read as zeros', BLOCK_UNION, 'union_kernel', '(blocks < num_full) & (flags == FITS)', 'blocks < num_full', FP16),
    Fault('fp16 values: non-finite values not contained', BLOCK_UNION, 'union_kernel', '(tl.min(flags, 0) != 0).to(tl.int32)', '1', FP16),
    Fault('fp16 values: unit left in the log-sum-exp', UNION_FORWARD, '_attend_in_fp16', 'row_max - FIXED_HEADROOM', 'row_max', FP16),
    Fault('fp16 values: overflowing weights kept', UNION_FORWARD, '_attend_in_fp16', '& (surplus - surplus == 0)', '', SELECTED_MAXIMA),
    Fault('fp16 values: vanishing weights kept', UNION_FORWARD, '_attend_in_fp16', '> 2.0**FIXED_HEADROOM', '>= 0.0', SELECTED_MAXIMA),
    Fault('delta: low bits of a rounded output', DELTA, 'delta_kernel', 'add_low_bits(out, low)', 'out.to(tl.float32)', (*STORED, *EXACT)),
    Fault('delta: gradient of the log-sum-exp of an empty row', DELTA, 'delta_kernel', "tl.where(lse == float('-inf'), 0.0, dlse)", 'dlse', (*STORED, *EXACT)),
    Fault('delta: low bits of non-finite outputs', DELTA, 'split_low_bits', 'tl.where(remainder - remainder == 0, remainder, 0.0)', 'remainder', EXACT),
    Fault('loop start: depends on the program', BLOCK_LOOP, 'find_full_blocks', '= readable %', '= tl.program_id(0) %', ORDER),
    Fault('loop start: tiles of a block apart', BLOCK_LOOP, 'load_step', 'selection.first_slot + step', '(selection.first_slot + step)', ORDER),
    Fault('loop start: depends on invalid indices', BLOCK_LOOP, 'find_full_blocks', 'is_full & (blocks >= first_block)', 'blocks >= first_block', ORDER),
    Fault('dfactors: head tiles of another group size', SELECTED_OP, '_differentiate_queries', 'settings.settings_of_group(tables, group, q, v)', 'settings.settings_of(settings.DQ, q, v)', UNION),
    Fault('loop start: no wrap-around', BLOCK_LOOP, 'load_step', 'tl.where(slot < selection.num_slots, slot, slot - selection.num_slots)', 'slot', ORDER),
    Fault('another head by descriptor', TILE_ROWS, 'load_tile', 'head.to(tl.int32),', 'head.to(tl.int32) * 0,', ('test_selected_attention_tiles.py',)),
    Fault('no rescale in selected attention', SELECTED_FORWARD, '_attend', '(weights.to(v.dtype), v, out * rescale[:, None])', '(weights.to(v.dtype), v, out)', SELECTED),
    Fault('gradient of block_scale off', SELECTED_BACKWARD, '_add_keys', '0.0, dlogits * logits)', '0.0, dlogits * logits * factor)', SELECTED),
    Fault('block_scale missing in the gradient of q', SELECTED_BACKWARD, '_add_keys', '(dlogits * factor).to', 'dlogits.to', SELECTED),
    Fault('causal mask dropped in the gradient of k', SELECTED_DKV, '_add_rows', '(keys[:, None] <= positions[None, :])', '(keys[:, None] <= positions[None, :] + 1)', SELECTED),
    Fault('dkv: last entry of a chunk skipped', SELECTED_DKV, 'dkv_kernel', '- first_entry,', '- first_entry - 1,', SELECTED),
    Fault('CSR index: slots between the first candidates skipped', BLOCK_TO_QUERY, '_find_slot', ', step,', ', 1,', CHUNKS),
    Fault('CSR index: chunk of the next slot', BLOCK_TO_QUERY, '_find_slot', 'starts // CHUNK + slots <= index)).to(tl.int32), 0) * step', 'starts // CHUNK + slots <= index + 1)).to(tl.int32), 0) * step', CHUNKS),
    Fault('by block: gradients of the first pairs only', BY_BLOCK_BACKWARD, 'BlockQueryGradients.prepare', '(some), pairs[some.start : some.stop]', '(range(len(some))), pairs[: len(some)]', SELECTED[1:]),
    Fault('by block: one key of the future', BY_BLOCK, '_attend', '(keys[None, :] <= positions[:, None])', '(keys[None, :] <= positions[:, None] + 1)', SELECTED[:1]),
    Fault('by block: last row skipped', BY_BLOCK, 'block_kernel', 'num_entries * GROUP', 'num_entries * GROUP - 1', SELECTED[:1]),
    Fault('by block: unit of a partial result dropped', BY_BLOCK, '_attend', '+ unit,', '+ 1.0,', SELECTED[:1]),
    Fault('by block: unit of a gradient dropped', BY_BLOCK_DQ, '_differentiate', 'inverse[:, None]', '1.0', SELECTED[:1]),
    Fault('by block: unit of a factor dropped', BY_BLOCK_DQ, '_differentiate', 'find_unit(tl.maximum(tl.abs(factor), 5.9604644775390625e-08) * 4096)[1]', '1.0', SELECTED[:1]),
    Fault('by block: unit of a gradient is 0', BY_BLOCK_DQ, '_differentiate', 'tl.maximum(units_of_k * invert_power(inverse), 1.1754943508222875e-38)', 'units_of_k * invert_power(inverse)', SELECTED[1:]),
    Fault('by block: units by keys of the future', BY_BLOCK_DQ, '_differentiate', 'tl.max(tl.where(read, unit[None, :], 0.0), 1)', 'tl.zeros([BLOCK_M], tl.float32) + tl.max(unit, 0)', SELECTED[1:]),
    Fault('by block: units by values of the future', BY_BLOCK, '_attend', 'tl.max(tl.where(read, unit[None, :], 0.0), 1)', 'tl.zeros([BLOCK_M], tl.float32) + tl.max(unit, 0)', SELECTED[1:]),
    Fault('by block: columns of a partial result not restored', BY_BLOCK_DQ, 'sum_kernel', 'sort_columns(partials, dq, HEAD_DIM, BLOCK_D)', 'dq * 1.0', SELECTED[:1]),
    Fault('by block: sums of partial results not rescaled', BY_BLOCK, 'merge_kernel', 'tl.exp2(references - reference[:, None]) *', '', SELECTED[:1]),
    Fault('by block: partial result of another head', BY_BLOCK, 'merge_kernel', 'slot * GROUP', 'slot', SELECTED[:1]),
    Fault('by block: tokens of another range', PARTIALS, 'locate_partials', '(csr.first_token + index_row // REPEATS)', '(index_row // REPEATS)', SELECTED[:1]),
    Fault('by block: delta of another slot', BY_BLOCK_DQ, 'sum_kernel', 'partials.first + partial_offsets', 'partials.first + offsets', SELECTED[:1]),
    Fault('by block: gradient of the log-sum-exp with the wrong sign', BY_BLOCK_DQ, 'sum_kernel', 'delta -= dlse', 'delta += dlse', SELECTED[:1]),
    Fault('by block: scale of dq dropped', BY_BLOCK_DQ, 'sum_kernel', 'dq * scale', 'dq', SELECTED[:1]),
    Fault('by block: entries without a block have partial results', PARTIALS, 'open_chunk', 'tl.store(partials.unit + offsets, tl.zeros(', 'tl.store(partials.unit + offsets, 1.0 + tl.zeros(', SELECTED[:1]),
    Fault('by block: dfactors of entries without a block', PARTIALS, 'open_chunk', 'tl.store(partials.second + offsets, tl.zeros(', 'tl.store(partials.second + offsets, 1.0 + tl.zeros(', SELECTED[:1]),
    Fault('by block: earlier token ranges dropped', SELECTED_DKV_LAUNCH, 'differentiate_keys', 'ACCUMULATE=len(ranges) > 1, sizes=sizes, tile=tile', 'ACCUMULATE=False, sizes=sizes, tile=tile', SELECTED[:1]),
    Fault('fused: unit of partial dq dropped', PARTIALS, 'store_dq', 'values *= invert_power(units)[:, None]', 'values *= 1.0', SELECTED[:1]),
    Fault('fused: unit of a factor dropped', PARTIALS, 'store_dq', 'find_unit(tl.maximum(tl.abs(factor), 5.9604644775390625e-08) * 4096)[1]', '1.0', SELECTED[:1]),
    Fault('fused: units by keys of the future', PARTIALS, 'store_dq', 'tl.max(tl.where(read, unit_of_k[:, None], 0.0), 0)', 'tl.zeros([ROWS], tl.float32) + tl.max(unit_of_k, 0)', SELECTED[1:]),
    Fault('fused: delta missing in gradients of factors', BY_BLOCK_DQ, 'sum_kernel', 'dfactor -= delta *', 'dfactor -= 0.0 *', SELECTED[:1]),
    Fault('fused: keys that are not read in gradients of factors', BY_BLOCK_DQ, '_differentiate', 'weights = tl.where(read, weights, 0.0)', 'weights *= 1.0', SELECTED[1:]),
    Fault('fused: gate applied to dq twice', BY_BLOCK_BACKWARD, 'BlockQueryGradients._add_partials', 'computes_dq != self.fused', 'computes_dq', SELECTED_GATES),
    Fault('merged: factors of some heads by block', BY_BLOCK_BACKWARD, '_add_heads', 'rows.view(*out.shape, group)', 'rows.view(*out.shape, group)[..., :1]', ('test_merged_attention.py',)),
    Fault('CSR index: token of the next entry', BLOCK_TO_QUERY, 'locate_entries', '(entry // (sizes.repeats * sizes.num_selected))', '((entry + 1) // (sizes.repeats * sizes.num_selected))', SELECTED[:1]),
    # Block selection
    Fault('overlap of blocks off', SELECT, '_add_step', 'tl.maximum(start, 0)', 'start', SELECTION),
    Fault('carried part of the next score forgotten', TOPK, 'make_sort_keys', 'score += tl.gather', 'score += 0.0 * tl.gather', SELECTION),
    Fault('a tile begins one block late', SELECT, 'select_kernel', '(BLOCK_J - OVERLAP)', 'BLOCK_J', SELECTION),
    Fault('one step of the running top-k missing', TOPK, '_replace', '(find_largest(num_larger), num_selected)', '(find_largest(num_larger), num_selected - 1)', SELECTION),
    Fault('tiles that some queries see in part go unmasked', SELECT, 'select_kernel', '((first_block + BLOCK_J) * SPREAD > seen)', '((first_block + BLOCK_J) * SPREAD > seen + 1)', SELECTION),
    Fault('ties go to the higher block', TOPK, '_replace', 'tl.min(tl.where(sort_keys == largest, block, 2**30), 1)', 'tl.max(tl.where(sort_keys == largest, block, -1), 1)', SELECTION),
    Fault('of equal blocks the lower one makes room', TOPK, '_replace', 'tl.max(tl.where(topk == smallest, topk_blocks, -(2**30)), 1)', 'tl.min(tl.where(topk == smallest, topk_blocks, 2**30), 1)', SELECTION),
    Fault('a later block may be selected', TOPK, '_force_blocks', 'choosable & (distance >= 0)', 'choosable & (distance >= -1)', SELECTION),
    Fault('tiles with the first local block unforced', TOPK, 'make_sort_keys', 'selection.num_local + 1', 'selection.num_local + 2', SELECTION + COLUMNS),
    Fault('blocks of the window may be selected', SELECT, 'select_kernel', 'offset + queries - selection.num_recent', 'offset + queries', SELECTION),
    Fault('one local block too many', TOPK, '_force_blocks', 'reach < selection.num_local', 'reach <= selection.num_local', SELECTION),
    Fault('compressed blocks seen early', SELECT, 'select_kernel', 'sizes.block_size - 1', 'sizes.block_size - 2', SELECTION),
    Fault('keys of another sequence', SELECT, 'select_kernel', ', key_start +', ',', SELECTION[1:]),
    Fault('keys of a step by descriptor: one row late', SELECT, '_load_step', '(tl.int32)', '(tl.int32) + 1', COLUMNS),
    Fault('the place of keys before a sequence rounded towards 0', SELECT, '_load_step', 'floor_divide(first_key, SPREAD)', 'first_key // SPREAD', SELECTION),
    Fault('infinite weight counts for a block that it does not overlap', SELECT, '_add_step', 'tl.where(beyond > 0, weights, 0.0)', 'weights', COLUMNS),
    Fault('columns: of score 0 full columns are forgotten', TOPK, 'select_largest', '[0] >=', '[0] >', COLUMNS),
    Fault('heads of another query', MEMBERS, '_locate_columns', '// (QUERIES * BLOCK_G) * QUERIES + columns', '', COLUMNS),
    Fault('columns: candidates dropped by a full column forgotten', TOPK, 'select_largest', '2**31 - 1,', '-1,', COLUMNS),
    Fault('columns: one pass, though rows are incomplete', TOPK, 'select_largest', '(is_open.to(tl.int32)) > 0', '(is_open.to(tl.int32)) > 1', COLUMNS),
    Fault('columns: the last block is taken once more', TOPK, 'update_topk', 'block > last', 'block >= last', COLUMNS),
    Fault('columns: equal blocks in disorder', TOPK, '_insert', 'is_larger | (sort_keys > sort_key)', 'sort_keys > sort_key', COLUMNS),
    Fault('columns: more than the count of a row', TOPK, 'select_largest', '(largest < 2**31 - 1) & (count < limit)', '(largest < 2**31 - 1) & (count < limit + 1)', COLUMNS),
    Fault('keys of a step: the last ones forgotten', SELECT, 'spread_keys', ', whole,', ', whole - 1,', COLUMNS),
    # Scores of selected blocks
    Fault('padding of a group counted', SCORES_FORWARD, 'forward_kernel', '(tile_rows < GROUP)', '(tile_rows >= 0)', SCORES),
    Fault('shared tokens off by one', SCORES_TILES, 'share_of', '(start, 0)', '(start, 1)', SCORES),
    Fault('one local block more has no gradient', SCORES_TILES, 'is_forced', 'blocks > own_block', 'blocks >= own_block', SCORES),
    Fault('own block below position 0 rounded up', SCORES_TILES, 'is_forced', 'floor_divide(positions - sizes.num_recent, meta.selection_block)', '(positions - sizes.num_recent) // meta.selection_block', SCORES),
    Fault('gradients of keys by scores of forced blocks', SCORES_BACKWARD, 'partial_kernel', 'is_forced(block, position, sizes', 'is_forced(block + 1, position, sizes', SCORES),
    Fault('gradients of queries by scores of the next slot', SCORES_FORWARD, 'dq_kernel', '= columns //', '= (columns + 1) //', SCORES),
    Fault('gradients of queries by scores of forced blocks', SCORES_FORWARD, 'dq_kernel', 'is_forced(blocks, position, sizes', 'is_forced(blocks + 1, position, sizes', SCORES),
    Fault('entries of this step twice in the gradient of scores', SCORES_BACKWARD, 'partial_kernel', 'first_row + BLOCK_M', 'first_row', SCORES),
    Fault('causal mask off in the gradient of scores', SCORES_BACKWARD, 'partial_kernel', 'sizes.block_size - 1', 'sizes.block_size', SCORES),
    Fault('one block more than the count of a row', SELECT, 'select_kernel', '(counts, 0)', '(counts + 1, 0)', SELECTION_FEATURES),
    Fault('counts of another index head', SELECT, 'select_kernel', '+ rows,', '+ rows - index_head,', SELECTION_FEATURES),
    Fault('scores of logits without their cap', SCORES_TILES, 'weigh', 'cap_logits(products * scale, softcap)', 'products * scale', SELECTION_FEATURES),
    Fault('slope of the soft cap forgotten', SCORES_TILES, 'before_cap', '* cap_slope(products * scale, softcap)', '', SELECTION_FEATURES),
    # Gated sum
    Fault('window gated as selected', GATED_SUM, 'forward_kernel', '+ 2 *', '+', GATED),
    Fault('gradients of gates off by half a percent', GATED_SUM, '_store_dgate', '(dout * branch.to(tl.float32), 1)', '(dout * branch.to(tl.float32), 1) * 0.995', GATED),
    # Gates inside the attentions
    Fault('gates: gradients of q without them', BACKWARD, 'dq_kernel', 'gate[:, None]', '1.0', OF_GATES),
    Fault('gates: their logarithm added', BACKWARD, 'dq_kernel', 'tl.log2(gate)', '(-tl.log2(gate))', OF_GATES),
    Fault('gates: gates below 0 are 1 in gradients of k and v', DKV, '_add_queries', '= tl.where(is_negative[None, :], -weights, weights)', '*= 1.0', OF_GATES),
    Fault('gates: all gates of a tile taken as negative', DKV, '_add_queries', 'tl.where(is_negative, of_negative, lse_log2)', 'of_negative', OF_GATES),
    Fault('gates: another number of a row', DKV, '_load_stats', 'first, third', 'third, first', OF_GATES),
    Fault('gates: gradient of a bias without their sign', DBIAS, 'dbias_kernel', 'sign * weights', 'weights', OF_GATES),
    Fault('gates: gradient of a bias without gates below 0', DBIAS, 'dbias_kernel', '= tl.where(is_negative, of_negative, lse_log2)', '*= 1.0', OF_GATES),
    Fault('gates: gradient of sinks without them', INTERVAL_OP, '_backward', 'if gate is None else delta * gate.transpose(1, 2)', '', OF_GATES),
    Fault('gates: their gradient with the wrong sign', INTERVAL_OP, '_backward', 'dgate = row_stats', 'dgate = -row_stats', OF_GATES),
    Fault('gates: a branch of the sum without a gradient', SUM_OP, '_differentiate', 'dout, dout,', 'dout, None,', OF_GATES),
    Fault('gates: by query and union, missing in dq', EPILOGUE, 'store_gradients', "tl.where(lse == float('-inf'), 0.0, gate)[:, None]", '1.0', SELECTED_GATES),
    Fault('gates: by block, missing in dq', BY_BLOCK_DQ, 'sum_kernel', "tl.where(lse == float('-inf'), 0.0, gate)[:, None]", '1.0', SELECTED_GATES),
    Fault('gates: negative gates count as 1 in dk and dv', SELECTED_DKV, '_add_rows', '= tl.where(gate[None, :] < 0, -weights, weights)', '*= 1.0', SELECTED_GATES),
    Fault('gates: negative gates count as -1 in dk and dv', SELECTED_DKV, '_add_rows', '- tl.log(-gate)', '', SELECTED_GATES),
    Fault('gates: by query and union, gate of an empty row used', EPILOGUE, 'store_gradients', "tl.where(lse == float('-inf'), 0.0, gate)", 'gate', SELECTED_GATES),
    Fault('gates: by block, gate of an empty row used', BY_BLOCK_DQ, 'sum_kernel', "tl.where(lse == float('-inf'), 0.0, gate)", 'gate', SELECTED_GATES),
    Fault('gates: of rows that read nothing', BACKWARD, '_load_per_row', "tl.where(lse == float('-inf'), 0.0, numbers)", 'numbers', OF_GATES),
    Fault('gates: negative gates leave NaN in dk and dv', SELECTED_DKV, 'dkv_kernel', 'not is_finite_tile(dk)', 'num_rows < 0', SELECTED_GATES),
    Fault('gates: dk and dv summed twice', SELECTED_DKV, 'dkv_kernel', ': dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)', ':\n        dk = tl.where(dk == dk, dk, 0.0)', SELECTED_GATES),
    Fault('gates: gate of the first token in dk and dv', SELECTED_DKV, '_add_rows', 'token * strides.gate[1]', '0 * token', SELECTED_GATES),
    Fault('delta: logarithm of the gate added', DELTA, 'delta_kernel', 'lse -= tl.log', 'lse += tl.log', SELECTED_GATES),
    Fault('gates: log-sum-exp not folded', SELECTED_DKV_LAUNCH, 'fold_gate', '- gate.float().log().transpose(1, 2)', '', SELECTED_GATES),
    Fault('gates: sign of the gate gradient of selected attention', SELECTED_OP, '_gate_gradient', 'else delta.transpose(1, 2)', 'else -delta.transpose(1, 2)', SELECTED_GATES),
    # Rotary
    Fault('rotary: gradients rotated forward', ROTARY, 'rotary_kernel', '= -sin', '= sin * 1.0', ('test_rotary.py',)),
    Fault('rotary: pairs rotated the other way', ROTATION, 'rotate', 'cos + even', 'cos - even', ('test_rotary.py',)),
    Fault('rotary: last pair left as it is', ROTARY, 'load_angles', '(angles < NUM_ANGLES)', '(angles < NUM_ANGLES - 1)', ('test_rotary.py',)),
    Fault('rotary: angles of the first row for all', ROTARY, 'load_angles', 'sin_strides[0]', '0', ('test_rotary.py',)),
    Fault('rotary: sums of readers rotated forward', ROTARY, 'sum_kernel', ', -sin', ', sin', ('test_shared_input.py',)),
    Fault('rotary: a reader is left out', ROTARY, 'sum_kernel', '(NUM_ROTATED, NUM_GRADS)', '(NUM_ROTATED, max(NUM_ROTATED, NUM_GRADS - 1))', ('test_shared_input.py',)),
    Fault('rotary: features without rotation are multiplied', ROTATION, 'rotate', 'even * sin, odd)', 'even * sin, odd * cos + even * sin)', ('test_rotary.py',)),
    Fault('head norm: mean over padded features', HEAD_NORM, '_inverse_rms', '/ HEAD_DIM', '/ x.shape[1]', NORMS),
    Fault('head norm: eps dropped', HEAD_NORM, '_inverse_rms', '+ eps', '+ 0.0 * eps', NORMS),
    Fault('head norm: rotated before rounding', HEAD_NORM, 'norm_rotary_kernel', 'normalised.to(x_ptr.dtype.element_ty)', 'normalised * 1.0', NORMS),
    Fault('head norm: rows beyond the last', HEAD_NORM, 'norm_rotary_backward_kernel', 'tl.where(row_mask, _inverse_rms(x, eps, HEAD_DIM), 0.0)', '_inverse_rms(x, eps, HEAD_DIM)', NORMS),
    Fault('head norm: gradient without the weight', HEAD_NORM, 'norm_rotary_backward_kernel', 'grad *= weight[None, :]', 'grad *= 1.0', NORMS),
    Fault('head norm: gradient along the row is left', HEAD_NORM, 'norm_rotary_backward_kernel', '(grad - x *', '(grad - 0.0 * x *', NORMS),
    Fault('head norm: gradients rotated forward', HEAD_NORM, 'norm_rotary_backward_kernel', ', -sin', ', sin', NORMS),
    Fault('head norm: a reader is left out', HEAD_NORM, 'norm_rotary_backward_kernel', '(NUM_ROTATED, NUM_GRADS)', '(NUM_ROTATED, max(NUM_ROTATED, NUM_GRADS - 1))', NORMS),
    Fault('head norm: last tile left out', HEAD_NORM, 'norm_rotary_backward_kernel', 'range(num_tiles)', 'range(max(1, num_tiles - 1))', NORMS),
    # Sharing
    Fault('block union: flag of another tile', BLOCK_UNION, '_load_flag_of_query', 'union.block_t + sequence', 'union.block_t', UNION),
    Fault('block union: repeated indices count twice', BLOCK_UNION, 'union_kernel', '& (before // BLOCK_S != keys // BLOCK_S)', '', UNION),
    Fault('block union: future blocks count', BLOCK_UNION, 'union_kernel', '+ queries,', '+ queries + 8,', UNION),
    Fault('block union: flag stored for its own tile', BLOCK_UNION, 'union_kernel', '+ tl.num_programs(1)', '', UNION),
    Fault('block union: flags restart with each range of tiles', BLOCK_UNION, 'union_kernel', 'index.to(tl.int64) * tl.num_programs(1) + index_head', 'tile', UNION),
    Fault('by union: flags of the first range for all', UNION_LOOP, 'is_skipped', ', union.first_tile +', ',', UNION),
    Fault('block union: a block appears twice', BLOCK_UNION, 'union_kernel', '& (before // SIZE != blocks)', '', UNION),
    Fault('by union: blocks with future keys not masked', BLOCK_UNION, 'union_kernel', 'first_query + 1,', 'first_query + BLOCK_SIZE,', UNION),
    Fault('by union: all queries read all blocks', UNION_LOOP, 'open_step', 'is_selected != 0', 'is_selected >= 0', UNION),
    Fault('by union: large keys not noticed', UNION_LOOP, 'count_steps', 'is_small(union.large, pair, union.num_chunks) and', '', SELECTED[1:]),
    Fault('by union: large queries not noticed', UNION_LOOP, 'count_steps', 'and is_small_query', '', SELECTED[1:]),
    Fault('by union: large output gradients not noticed', UNION_BACKWARD, 'union_dq_kernel', 'and is_small_tile(dout)', '', SELECTED[1:]),
    Fault('by union: large values not noticed', FINITE, 'finite_kernel', '& is_small_tile(v)', '', SELECTED[1:]),
    Fault('by union: products that may be infinite', FINITE, '', '(2.0**59)', '(2.0**126)', ('test_finite.py',)),
    Fault('by union: unselected blocks not masked', UNION_FORWARD, '_attend', "tl.where(is_selected, -reference, float('-inf'))", '-reference', SELECTED[1:]),
    Fault('by union: unselected blocks not masked in dq', UNION_BACKWARD, '_differentiate', "tl.where(is_selected, -lse_log2, float('-inf'))", '-lse_log2', SELECTED[1:]),
    Fault('by union: vanishing weights kept', UNION_FORWARD, '_are_near', 'total > LEAST', 'total >= 0.0', SELECTED_MAXIMA),
    Fault('by union: too large weights kept', UNION_FORWARD, '_are_near', '& (total < MOST)', '', SELECTED_MAXIMA),
    Fault('by union: all rows recomputed', UNION_FORWARD, '_attend_in_input_dtype', '(step < first)', '(step < 0)', SELECTED_MAXIMA),
    Fault('by union: reference from unread keys', UNION_LOOP, 'find_reference', '((bits & 1) != 0) &', '', SELECTED_MAXIMA),
    Fault('by union: reference from any first block', UNION_LOOP, 'find_reference', 'tl.where(first_block == 0, after_first - before_first, 0)', 'after_first - before_first', SELECTED_MAXIMA),
    Fault('by union: reference depends on other queries', UNION_LOOP, 'find_reference', 'if sizes.causal:', 'if True:', SELECTED_MAXIMA),
    Fault('by union: reference from later keys', UNION_LOOP, 'find_reference', '+ 1 -', '+ 9 -', SELECTED_MAXIMA),
    Fault('by union: sign of the scale dropped', UNION_FORWARD, 'union_forward_kernel', 'q, scale = -q,', 'scale =', SELECTED[1:]),
    Fault('CSR index: groups that do not divide a tile', INVERSE_INDEX, 'split_rows', '(rows // GROUP)', '((rows + 1) // GROUP)', SELECTED[:1]),
    Fault('CSR index: too few masked entries', BLOCK_TO_QUERY, 'count_masked_entries', '(keys, 0)', '(keys, 0) - 1', SELECTED[:1]),
    Fault('CSR index: incomplete block not masked', BLOCK_TO_QUERY, 'count_masked_entries', 'tl.where(tl.min(key_mask.to(tl.int32), 0) == 0, num_entries, num_masked)', 'num_masked', SELECTED[:1]),
    Fault('by union: last block skipped', UNION_LOOP, 'load_entry', '= index <', '= index + 1 <', UNION),
    Fault('by union: values of other heads', UNION_LOOP, 'repeat_for_heads', '[:, None], [BLOCK_T, BLOCK_G]', '[None, :], [BLOCK_G, BLOCK_T]', UNION),
    # Soft caps of selected attention
    Fault('soft cap: no slope in the mean key', SELECTED_BACKWARD, '_add_keys', 'weights *= slope', '', CAPPED),
    Fault('soft cap: no slope in the gradient of q', SELECTED_BACKWARD, '_add_keys', 'dlogits *= slope', '', CAPPED),
    Fault('soft cap: unread tile counts', SELECTED_FORWARD, '_attend', 'or softcap is not None', '', CAPPED),
    Fault('soft cap: before the factor', SELECTED_BACKWARD, '_differentiate', 'cap_logits(scaled, softcap)', 'cap_logits(logits, softcap) * factor', CAPPED),
    Fault('soft cap: by union, no slope in dq', UNION_BACKWARD, '_differentiate', 'dlogits *= slope', '', CAPPED),
    Fault('soft cap: by union, no slope in the mean key', UNION_BACKWARD, '_differentiate', 'weights *= slope', '', CAPPED),
    Fault('soft cap: by block, no slope in the gradient of q', BY_BLOCK_DQ, '_differentiate', 'dlogits *= cap_slope(logits_log2, softcap * 1.4426950408889634)', 'dlogits *= 1.0', CAPPED),
    Fault('soft cap: fused, no slope in the gradient of factors', BY_BLOCK_DQ, '_differentiate', ' logits *= cap_slope(logits_log2, softcap * 1.4426950408889634)', ' logits *= 1.0', CAPPED),
    Fault('soft cap: by block, in other units', BY_BLOCK, '_attend', 'softcap * 1.4426950408889634', 'softcap', CAPPED),
    Fault('soft cap: no slope in the gradient of k', SELECTED_DKV, '_add_rows', 'cap_slope(logits_log2, softcap * 1.4426950408889634)', '1.0', CAPPED),
    # Decoding
    Fault('decoding: all tokens at one position', APPEND, '_copy', '(old + token)', 'old', DECODING),
    Fault('decoding: tokens beyond the capacity written', APPEND, '_copy', 'positions, positions < length', 'positions, positions >= 0', DECODING[1:]),
    Fault('decoding: tokens beyond the capacity in the ring', APPEND, '_gather_blocks', 'token < length', 'token >= 0', DECODING[1:]),
    Fault('decoding: places of the ring off by one', APPEND, '_gather_blocks', '(old + token)', '(old + token + 1)', DECODING),
    Fault('decoding: blocks of the next step', APPEND, '_gather_blocks', '(old, sizes.block_size, sizes.stride)', '(old + sizes.stride, sizes.block_size, sizes.stride)', DECODING),
    Fault('decoding: positions in a block of the first head', APPEND, '_gather_blocks', '* sizes.block_size +', '* 0 +', DECODING),
    Fault('decoding: mean of the padding of a block', APPEND, '_gather_blocks', '[BLOCK_D], sizes.block_size,', '[BLOCK_D], (sizes.block_size + variant.block_l - 1) // variant.block_l * variant.block_l,', DECODING),
    Fault('decoding: first new token missing in its block', APPEND, '_gather_blocks', 'x = tl.where((tokens >= old)[:, None]', 'x = tl.where((tokens > old)[:, None]', DECODING),
    Fault('decoding: angles not interpolated', APPEND, 'append_kernel', 'tl.div_rn((old + token).to(tl.float32), angles.factor)', '(old + token).to(tl.float32)', DECODING),
    Fault('decoding: entry of another place of a page', STORAGE, 'locate', '(tokens % pages.size)', '((tokens + 1) % pages.size)', DECODING),
    Fault('decoding: pages beyond the pool', STORAGE, 'locate', '& (page < pages.num_pages)', '', DECODING),
    Fault('decoding: lengths beyond the capacity', STORAGE, 'load_lengths', 'tl.minimum(old + step.num_tokens, lengths.capacity)', 'old + step.num_tokens', DECODING[1:]),
    Fault('decoding: compressed blocks seen early', COMPRESSED, 'compressed_kernel', 'sizes.block_size + 1', 'sizes.block_size + 2', DECODING),
    Fault('decoding: blocks of another selection block attended to twice', COMPRESSED, 'compressed_kernel', 'tl.where(is_own[None, :], weights, 0.0)', 'weights * 1.0', DECODING),
    Fault('decoding: overlap of blocks off', COMPRESSED, '_count_shared', 'tl.maximum(begins, 0)', 'begins', DECODING[1:]),
    Fault('decoding: overlap with the next block off', COMPRESSED, '_count_shared', '- sizes.selection_block_size,', '- sizes.selection_block_size + 1,', DECODING),
    Fault('decoding: every part reads the memory', COMPRESSED, 'compressed_kernel', 'part == 0', 'part >= 0', DECODING),
    Fault('decoding: no rescale of the sum', COMPRESSED, 'compressed_kernel', 'totals * shrink[:, None]', 'totals', DECODING),
    Fault('decoding: last new block not stored', COMPRESSED, '_store_new', '(block < num_keys)', '(block < num_keys - 1)', DECODING),
    Fault('decoding: tiles of a part forgotten', COMPRESSED, 'compressed_kernel', 'tl.cdiv(num_tiles, num_splits)', 'num_tiles // num_splits', DECODING),
    Fault('decoding: a later block may be selected', CHOOSE, 'choose_kernel', '(block <= own_block)', '(block <= own_block + 1)', DECODING[1:]),
    Fault('decoding: blocks of the window may be selected', CHOOSE, 'choose_kernel', 'position - selection.num_recent', 'position', MERGED_DECODING),
    Fault('decoding: carried part of the next score forgotten', CHOOSE, 'choose_kernel', 'next_scores += _add_heads', 'next_scores += 0.0 * _add_heads', DECODING[1:]),
    Fault('decoding: carried part of the chunk before forgotten', CHOOSE, 'choose_kernel', 'first += _add_heads', 'first += 0.0 * _add_heads', DECODING[1:]),
    Fault('decoding: maxima of the first tile for all', CHOOSE, 'choose_kernel', '(TILE // RUN)', '(TILE // RUN) * 0', DECODING[1:]),
    Fault('decoding: sums of other heads', CHOOSE, 'choose_kernel', '+ index_head % REPEATS * share', '', DECODING[1:]),
    Fault('decoding: a head of a group left out', CHOOSE, 'choose_kernel', 'heads < share', '(heads < share) & ((heads > 0) | (share == 1))', DECODING[1:]),
    Fault('decoding: totals of parts not rescaled', CHOOSE, 'choose_kernel', '* tl.exp2(largest - base[:, None])', '', DECODING[1:]),
    Fault('decoding: one local block too many', CHOOSE, 'make_sort_key', 'distance < selection.num_local', 'distance <= selection.num_local', DECODING[1:]),
    Fault('decoding: an initial block missing', CHOOSE, 'make_sort_key', '< selection.num_init,', '< selection.num_init - 1,', DECODING[1:]),
    Fault('decoding: the best of a chunk again', CHOOSE, '_store_topk', 'tl.where(blocks == block, TAKEN, sort_keys)', 'sort_keys + 0', DECODING),
    Fault('decoding: last chunk forgotten', CHOOSE, 'choose_kernel', '< num_merged *', '< (num_merged - 1) *', DECODING),
    Fault('decoding: the first chunks alone are merged', CHOOSE, 'choose_kernel', '+= leader *', '+= 0 *', DECODING),
    Fault('decoding: merged before all are done', CHOOSE, 'choose_kernel', 'num_merged - 1', 'tl.minimum(num_merged - 1, 1)', DECODING),
    Fault('decoding: counts of programs stay', CHOOSE, 'choose_kernel', '(counts_ptr + leader, 0)', '(counts_ptr + leader, num_merged)', DECODING),
    Fault('decoding: window one key too wide', ATTEND, 'attend_kernel', 'tiles_read.window_size + 1', 'tiles_read.window_size', DECODING),
    Fault('decoding: window reads selected blocks again', ATTEND, 'attend_kernel', '(known == 0)', '(known == known)', DECODING),
    Fault('decoding: first key of the window missing in a selected block', ATTEND, 'attend_kernel', 'tokens >= first_in_window', 'tokens > first_in_window', DECODING),
    Fault('decoding: selected branch reads the future', ATTEND, 'attend_kernel', '(tokens <= position)', '(tokens <= position + 1)', DECODING),
    Fault('decoding: window gated as selected', ATTEND, 'combine_kernel', '+ 2 *', '+', DECODING),
    Fault('decoding, merged: window not read', ATTEND, 'attend_kernel', 'in_selected = exists', 'in_selected = exists & is_chosen', MERGED_DECODING),
    Fault('decoding, merged: selected blocks read again', ATTEND, 'attend_kernel', '(known == 0)', '(known == known)', MERGED_DECODING),
    Fault('decoding, merged: gate dropped', ATTEND, 'combine_kernel', 'out += _join(compressed) * gate_compressed', 'out += _join(compressed)', MERGED_DECODING),
    Fault('decoding, merged: parts of two branches', ATTEND, 'combine_kernel', 'share if MERGED else 2 * share', '2 * share', MERGED_DECODING),
    Fault('decoding, merged: new keys not stored', COMPRESSED, '_store_new', '(block < num_keys)', '(block < first_new)', MERGED_DECODING),
    Fault('decoding: parts not rescaled', ATTEND, '_join', 'totals * weights', 'totals', DECODING),
    Fault('decoding: parts of the first head for all', ATTEND, 'combine_kernel', 'head % share', 'head * 0', DECODING),
    Fault('decoding: the longest that a row has been forgotten', ATTEND, 'combine_kernel', 'peak, length', 'length, 0', DECODING[1:]),
    Fault('decoding: last of the blocks that may be complete forgotten', DECODING_OP, 'append', '-(-num_tokens // stride)', 'max(1, num_tokens // stride)', DECODING),
    Fault('decoding: window one block short', DECODING_SETTINGS, 'make_plan', 'selection_block_size + 1', 'selection_block_size', DECODING),
    Fault('decoding, mlp: blocks of the first complete row for all', MLP, '_find_blocks', 'row += tl.sum(is_before.to(tl.int32), 1)', 'row += 0', MLP_DECODING),
    Fault('decoding, mlp: rows before a chunk forgotten', MLP, '_find_blocks', 'complete += tl.sum(new, 0)', 'complete += 0', MLP_DECODING),
    Fault('decoding, mlp: first new block of a row for all', MLP, '_find_blocks', 'ranks - before', 'ranks * 0', MLP_DECODING),
    Fault('decoding, mlp: first head of a block for all', MLP, 'linear_kernel', 'unit + ranks % HEADS', 'unit + ranks * 0', MLP_DECODING),
    Fault('decoding, mlp: last complete block forgotten', MLP, 'linear_kernel', 'ranks < complete)', 'ranks < complete - 1)', MLP_DECODING),
    Fault('decoding, mlp: weights read for no block', MLP, 'linear_kernel', '* BLOCK_R < complete', '* BLOCK_R <= complete', MLP_DECODING),
    Fault('decoding, mlp: weights of the first head for all', MLP, '_multiply', 'unit * weight[1]', '0 * weight[1]', MLP_DECODING),
    Fault('decoding, mlp: bias dropped', MLP, '_multiply', 'total += biases.to(tl.float32)[:, None]', '', MLP_DECODING),
    Fault('decoding, mlp: not a number becomes 0', MLP, '_multiply', 'tl.where(total < 0, 0.0, total)', 'tl.where(total > 0, total, 0.0)', MLP_DECODING),
    Fault('decoding, mlp: last inputs forgotten', MLP, '_multiply', '(0, num_inputs, BLOCK_I)', '(0, num_inputs - BLOCK_I + 1, BLOCK_I)', MLP_DECODING),
    Fault('decoding, mlp: network of the keys for both', MLP, 'linear_kernel', '_pick(is_v, weight_k, weight_v)', '_pick(is_v, weight_k, weight_k)', MLP_DECODING),
    Fault('decoding, mlp: sum for the mean', MLP, '_mean', 'tl.full(mask.shape, BLOCK_SIZE, tl.float32)', 'tl.full(mask.shape, 1, tl.float32)', MLP_DECODING),
    Fault('decoding, mlp: ReLU after the output', DECODING_OP, 'compress', 'means, relu=False', 'means, relu=True', MLP_DECODING),
    Fault('decoding: launches replayed for another alignment', DECODING_STEP, 'look_at', 'address % ALIGNMENT', '0', AGAIN),
    Fault('decoding: launches replayed for other strides', DECODING_STEP, 'look_at', '(t.shape, t.stride(), t.dtype, t.device', '(t.shape, t.dtype, t.device', AGAIN),
    Fault('decoding: launches replayed for another tensor of the cache', DECODING_STEP, 'look_at', ', t.data_ptr()', '', AGAIN),
    Fault('decoding: launches replayed for a copy of an argument', PREPARED, 'LaunchCache.launch', 'and self._stays(first)', '', AGAIN),
    Fault('decoding: tensors given twice not distinguished', PREPARED, 'LaunchCache.give', 'and id(tensor) not in self._given', '', AGAIN),
    Fault('decoding: launches do not hold the workspace', PREPARED, 'LaunchCache._stays', 'self._held.append(tensor)', 'pass', AGAIN),
]  # fmt: skip


def import_libraries() -> None:
    """Import libraries that take seconds, but neither the package nor its tests."""
    os.environ.update(OMP_NUM_THREADS='1', TRITON_INTERPRET='1', CUDA_VISIBLE_DEVICES='')
    for module in ('torch._dynamo', 'triton.runtime.interpreter', 'einops'):
        importlib.import_module(module)


def run_tests(tests: tuple[str, ...], directory: Path) -> tuple[int, str]:
    """Return the exit code of pytest and what it printed. The forked process has the libraries imported."""
    printed = directory / 'printed.txt'
    process = multiprocessing.get_context('fork').Process(target=run_pytest, args=(tests, directory, printed))
    process.start()
    process.join()
    return process.exitcode or 0, printed.read_text()


def run_pytest(tests: tuple[str, ...], directory: Path, printed: Path) -> None:
    with printed.open('w') as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.chdir(directory)
    sys.path[:] = [str(directory), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.split('.')[0] == 'tests']:
        del sys.modules[name]
    code = CRASHED
    try:
        files = [f'tests/kernels/{name}' for name in tests]
        code = pytest.main(['--full', '-x', '-q', '--tb=line', '-p', 'no:cacheprovider', *files])
        for name in ('native_sparse_attention', 'tests.support.harness'):
            found = sys.modules[name].__file__ or ''
            assert found.startswith(str(directory)), found
    except BaseException:
        code = CRASHED
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def is_caught(fault: Fault) -> bool:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).resolve()
        copy_package(directory)
        (directory / PACKAGE / 'ops' / fault.file).write_text(with_fault(fault))
        begin = time.monotonic()
        code, printed = run_tests(fault.tests, directory)
    if code not in (0, 1):
        raise SystemExit(f'{fault.name}: pytest ended with {code}\n{printed}')
    by = next((line for line in printed.splitlines() if line.startswith('FAILED')), '').removeprefix('FAILED ')
    print(f'{"caught" if code else "MISSED"}  {fault.name} ({time.monotonic() - begin:.0f} s)  {by[:120]}', flush=True)
    return code == 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--jobs', type=int, default=2)
    parser.add_argument('--only', default='', help='faults whose name or file has this in it')
    parser.add_argument('--first', type=int, default=1, metavar='N', help='begin at the N-th of them, to resume a run')
    parser.add_argument('--skip-control', action='store_true', help='do not run the tests without a fault first')
    arguments = parser.parse_args()
    faults = [fault for fault in FAULTS if arguments.only in f'{fault.name} {fault.file}']
    faults = faults[max(arguments.first - 1, 0) :]
    for fault in faults:
        with_fault(fault)
    import_libraries()
    if not arguments.skip_control:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name).resolve()
            copy_package(directory)
            code, printed = run_tests(tuple(sorted({test for fault in faults for test in fault.tests})), directory)
        if code != 0:
            raise SystemExit(f'the tests fail without a fault:\n{printed[-4000:]}')
    with ThreadPoolExecutor(arguments.jobs) as pool:
        caught = sum(pool.map(is_caught, faults))
    print(f'{caught} of {len(faults)} caught')
    sys.exit(caught < MIN_CAUGHT * len(faults))


if __name__ == '__main__':
    main()
