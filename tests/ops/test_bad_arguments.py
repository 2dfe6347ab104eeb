"""Bad arguments raise a ValueError of one line with argument, value and rule before anything runs; similar valid ones
are allowed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention import nsa
from native_sparse_attention.ops import (
    chosen_scores,
    compressed_attention,
    select_blocks,
    selected_attention,
    straight_through_scale,
    validate_packing,
    window_attention,
)

OPS: dict[str, Callable[..., Any]] = {
    'window': window_attention,
    'compressed': compressed_attention,
    'selection': select_blocks,
    'scores': chosen_scores,
    'straight through': straight_through_scale,
    'selected': selected_attention,
    'nsa': nsa,
}
ALL = tuple(OPS)
OF_TOKENS = ('window', 'selected', 'nsa')
SELECTIONS = ('selection', 'scores', 'straight through')
OF_BLOCKS = ('compressed', *SELECTIONS)
Changes = dict[str, Any]
# Names of ops, refused arguments, parts of the errors, and valid arguments. Calls have two rows of six tokens.
Case = tuple[tuple[str, ...], Changes, str, Changes]


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


q, k, v = torch.zeros(2, 6, 4, 4), torch.zeros(2, 6, 2, 4), torch.zeros(2, 6, 2, 3)
k_cmp, v_cmp, lse = k[:, :2], v[:, :2], torch.zeros(2, 4, 6)
indices, gates = torch.zeros(2, 6, 2, 2, dtype=torch.int32), torch.zeros(2, 6, 4, 3)
gate, ids, counts, table = gates[..., 0], indices[:, :, 0, 0], indices[..., 0], torch.zeros(1, 4, 6, 6)
mask, read, memory = ids == 0, table == 0, (torch.zeros(2, 1, 4), torch.zeros(2, 1, 3))
nan, inf = float('nan'), float('inf')


def arguments(op: str, rows: int = 2) -> Changes:
    """Return the smallest valid call."""
    sizes = {'compress_block_size': 4, 'compress_stride': 2, 'selection_block_size': 4}
    scored = {'q': q, 'k_cmp': k_cmp, 'lse': lse, **sizes}
    compressed = {'k_cmp': k_cmp, 'v_cmp': v_cmp}
    calls: dict[str, Changes] = {
        'window': {'q': q, 'k': k, 'v': v, 'window_size': (2, 0)},
        'compressed': {'q': q, **compressed, 'block_size': 4, 'stride': 2},
        'selection': {**scored, 'num_selected': 2},
        'scores': {**scored, 'block_indices': indices},
        'straight through': {**scored, 'block_indices': indices, 'num_init': 1, 'num_local': 1},
        'selected': {'q': q, 'k': k, 'v': v, 'block_indices': indices, 'block_size': 4},
        'nsa': {
            'q': q,
            'k': k,
            'v': v,
            **compressed,
            'gates': gates,
            **sizes,
            'num_selected': 2,
            'window_size': (2, 0),
        },
    }
    return {name: value[:rows] if isinstance(value, Tensor) else value for name, value in calls[op].items()}


TENSORS: dict[str, Case] = {
    'sparse q': (ALL, {'q': q.to_sparse()}, 'q is a sparse_coo tensor, but must be a dense one', {'q': q}),
    'sparse v': (OF_TOKENS, {'v': v.to_sparse()}, 'v is a sparse_coo tensor, but must be a dense one', {'v': v}),
    'q of lists': (ALL, {'q': [[0.0]]}, 'q is a list, but must be a tensor', {'q': q}),
    'q of 3 dimensions': (ALL, {'q': q[0]}, r'q has shape \(6, 4, 4\), but must have 4 dimensions', {'q': q[:1].expand_as(q)}),
    'q of integers': (ALL, {'q': q.int()}, 'q has dtype torch.int32, but must be float64, float32, bfloat16 or', {'q': q}),
    'q of 5 heads': (('window', 'compressed'), {'q': q[:, :, [0] * 5]}, 'q has 5 heads, but must have a multiple of the 2 heads', {'q': q[:, :, [0] * 6]}),
    'k of 3 dimensions': (OF_TOKENS, {'k': k[0]}, r'k has shape \(6, 2, 4\), but must have 4 dimensions', {'k': k[:1].expand_as(k)}),
    'k of one row': (OF_TOKENS, {'k': k[:1]}, 'k has batch size 1, but q has 2', {'k': k[:1].expand_as(k)}),
    'k of head size 3': (OF_TOKENS, {'k': k[..., :3]}, 'k has head size 3, but q has 4', {'k': k.mT.contiguous().mT}),
    'k of float64': (OF_TOKENS, {'k': k.double()}, 'k has dtype torch.float64, but q has torch.float32', {'k': k.double().float()}),
    'k elsewhere': (OF_TOKENS, {'k': k.to('meta')}, 'k is on meta, but q is on cpu', {'k': k.to('cpu')}),
    'k of no heads': (OF_TOKENS[:2], {'k': k[:, :, :0]}, 'q has 4 heads, but must have a multiple of the 0 heads of k', {'k': k}),
    'v of 5 tokens': (OF_TOKENS, {'v': v[:, :5]}, r'v has shape \(2, 5, 2, 3\), but must be \(2, 6, 2\) \+ \(DV,\)', {'v': v}),
    'v of another head': (OF_TOKENS, {'v': v[:, :, :1]}, r'v has shape \(2, 6, 1, 3\), but must be \(2, 6, 2\) \+', {'v': v[:, :, :1].expand_as(v)}),
    'v of bfloat16': (OF_TOKENS, {'v': v.bfloat16()}, 'v has dtype torch.bfloat16, but q has torch.float32', {'v': v}),
    'no v': (OF_TOKENS, {'v': None}, 'v is a NoneType, but must be a tensor', {'v': v}),
    'no v_cmp': (('compressed',), {'v_cmp': None}, 'v_cmp is a NoneType, but must be a tensor', {'v_cmp': v_cmp}),
    'q_cmp of lists': (('nsa',), {'q_cmp': [[0.0]]}, 'q_cmp is a list, but must be a tensor', {'q_cmp': q}),
    'v elsewhere': (OF_TOKENS, {'v': v.to('meta')}, 'v is on meta, but q is on cpu', {'v': v}),
    'v of numbers': (OF_TOKENS, {'v': 0.0}, 'v is a float, but must be a tensor', {'v': v}),
    'k_cmp of 5 dimensions': (OF_BLOCKS, {'k_cmp': k_cmp[None]}, r'k_cmp has shape \(1, 2, 2, 2, 4\), but must have 4', {'k_cmp': k_cmp}),
    'k_cmp of one row': (OF_BLOCKS, {'k_cmp': k_cmp[:1]}, 'k_cmp has batch size 1, but q has 2', {'k_cmp': k_cmp[:1].expand_as(k_cmp)}),
    'k_cmp of head size 3': (OF_BLOCKS, {'k_cmp': k_cmp[..., :3]}, 'k_cmp has head size 3, but q has 4', {'k_cmp': k_cmp}),
    'k_cmp of float16': (OF_BLOCKS, {'k_cmp': k_cmp.half()}, 'k_cmp has dtype torch.float16, but q has torch.float32', {'k_cmp': k_cmp}),
    'k_cmp elsewhere': (OF_BLOCKS, {'k_cmp': k_cmp.to('meta')}, 'k_cmp is on meta, but q is on cpu', {'k_cmp': k_cmp}),
    'too few k_cmp': (OF_BLOCKS[1:], {'k_cmp': k[:, :1]}, 'k_cmp has 1 compressed blocks, but seqlen_k = 6 makes 2', {'k_cmp': k[:, :3]}),
    'v_cmp of 1 block': (('compressed', 'nsa'), {'v_cmp': v[:, :1]}, r'v_cmp has shape \(2, 1, 2, 3\), but must be \(2, 2, 2\)', {'v_cmp': v_cmp}),
    'v_cmp of head size 4': (('nsa',), {'v_cmp': k_cmp}, 'v_cmp has head size 4, but v has 3', {'v_cmp': v_cmp}),
    'lse of 5 queries': (SELECTIONS, {'lse': lse[..., :5]}, r'lse has shape \(2, 4, 5\), but must have \(2, 4, 6\)', {'lse': lse}),
    'lse of integers': (SELECTIONS, {'lse': lse.long()}, 'lse has dtype torch.int64, but must be', {'lse': lse.double()}),
    'lse elsewhere': (SELECTIONS, {'lse': lse.to('meta')}, 'lse is on meta, but q is on cpu', {'lse': lse}),
    'no lse': (SELECTIONS, {'lse': None}, 'lse is a NoneType, but must be a tensor', {'lse': lse}),
    'q_cmp of 5 tokens': (('nsa',), {'q_cmp': q[:, :5]}, r'q_cmp has shape \(2, 5, 4, 4\), but must have \(2, 6, 4, 4\)', {'q_cmp': q}),
    'k_window alone': (('nsa',), {'k_window': k}, 'k_window and v_window must be given together', {'k_window': k, 'v_window': v}),
    'k_window of 5 tokens': (('nsa',), {'k_window': k[:, :5], 'v_window': v}, r'k_window has shape \(2, 5, 2, 4\), but must have', {'k_window': k, 'v_window': v}),
    'memory of keys alone': (('compressed', 'nsa'), {'mem_kv': memory[:1]}, 'mem_kv is a tuple, but must be a pair', {'mem_kv': list(memory)}),
    'memory of 2 keys, 1 value': (('compressed', 'nsa'), {'mem_kv': (memory[0].repeat(1, 2, 1), memory[1])}, 'mem_kv holds 2 keys and 1 values, but', {'mem_kv': memory}),
    'memory of 4 heads': (('compressed', 'nsa'), {'mem_kv': tuple(t.repeat(2, 1, 1) for t in memory)}, r'mem_kv\[0\] has shape \(4, 1, 4\), but must have \(2, M, 4\)', {'mem_kv': tuple(t.repeat(1, 2, 1) for t in memory)}),
    'memory of float64': (('compressed', 'nsa'), {'mem_kv': (memory[0], memory[1].double())}, r'mem_kv\[1\] has dtype torch.float64, but q has', {'mem_kv': tuple(t[:, :0] for t in memory)}),
    'memory elsewhere': (('compressed', 'nsa'), {'mem_kv': (memory[0].to('meta'), memory[1])}, r'mem_kv\[0\] is on meta, but q is on cpu', {'mem_kv': memory}),
}  # fmt: skip

PLACES: dict[str, Case] = {
    'an offset of 1.5': (ALL, {'q_offset': 1.5}, 'q_offset is 1.5, but must be an int, an integer tensor or None', {'q_offset': 0}),
    'an offset of True': (ALL, {'q_offset': True}, 'q_offset is True, but must be an int', {'q_offset': -1}),
    'an offset of nan': (ALL, {'q_offset': nan}, 'q_offset is nan, but must be an int', {'q_offset': 0}),
    'offsets of a list': (ALL, {'q_offset': [0, 1]}, r'q_offset is \[0, 1\], but must be an int', {'q_offset': 1}),
    'one offset of two': (OF_TOKENS, {'q_offset': integers(1)}, 'q_offset has 1 entries, but must have 2', {'q_offset': integers(1, -9)}),
    'offsets of floats': (OF_TOKENS, {'q_offset': torch.zeros(2)}, 'q_offset has dtype torch.float32, but must be int32 or int64', {'q_offset': integers(1, 2).long()}),
    'offsets of 2 dimensions': (OF_TOKENS, {'q_offset': ids[:, :1]}, r'q_offset has shape \(2, 1\), but must have 1 dimension', {'q_offset': ids[:, 0]}),
    'offsets elsewhere': (OF_TOKENS, {'q_offset': integers(1, 2).to('meta')}, 'q_offset is on meta, but q is on cpu', {'q_offset': integers(1, 2)}),
    'offsets without a length': (OF_BLOCKS, {'q_offset': integers(0, 0)}, 'seqlen_k is not given, but is needed', {'q_offset': integers(0, 0), 'seqlen_k': 6}),
    'lengths of 3 rows': (ALL, {'seqlens_k': integers(1, 2, 3)}, 'seqlens_k has 3 entries, but must have 2', {'seqlens_k': integers(1, 2)}),
    'a length of 9': (ALL, {'seqlens_k': integers(1, 9)}, r'seqlens_k lies in \[1, 9\], but must lie in \[0, \d\]', {'seqlens_k': integers(1, 6)}),
    'a length of -1': (ALL, {'seqlens_k': integers(-1, 2)}, r'seqlens_k lies in \[-1, 2\], but must lie in \[0, \d\]', {'seqlens_k': integers(0, 2)}),
    'lengths of floats': (ALL, {'seqlens_k': torch.ones(2)}, 'seqlens_k has dtype torch.float32, but must be', {'seqlens_k': integers(1, 1).long()}),
    'lengths elsewhere': (ALL, {'seqlens_k': integers(1, 1).to('meta')}, 'seqlens_k is on meta, but q is on cpu', {'seqlens_k': integers(1, 1)}),
    'lengths as a list': (ALL, {'seqlens_k': [1, 2]}, 'seqlens_k is a list, but must be a tensor', {'seqlens_k': integers(1, 2)}),
    'packed rows': (ALL, {'cu_seqlens': integers(0, 6)}, 'q has batch size 2, but must have 1 where cu_seqlens is given', {}),
    'borders of keys alone': (ALL, {'cu_seqlens_k': integers(0, 6)}, 'cu_seqlens_k is given, but needs cu_seqlens beside it', {}),
    'a seqlen_k of -1': (OF_BLOCKS, {'seqlen_k': -1}, 'seqlen_k is -1, but must be an integer of at least 0', {'seqlen_k': 0}),
    'a seqlen_k of 6.0': (OF_BLOCKS, {'seqlen_k': 6.0}, 'seqlen_k is 6.0, but must be an integer', {'seqlen_k': 6}),
    'a seqlen_k of 20': (OF_BLOCKS, {'seqlen_k': 20}, 'k_cmp has 2 compressed blocks, but seqlen_k = 20 makes 9', {'seqlen_k': 7}),
    'an offset of 6 blocks': (OF_BLOCKS, {'q_offset': 12}, 'k_cmp has 2 compressed blocks, but seqlen_k = 18 makes 8', {'q_offset': 1}),
    'segments of 2 rows': (ALL[1:], {'segment_ids': ids}, 'q has batch size 2, but must have 1 where segment_ids is given', {}),
}  # fmt: skip

# Calls of one row, of sequences of 2 and 4 tokens.
BORDERS = integers(0, 2, 6)
PACKED: dict[str, Case] = {
    'borders of floats': (ALL, {'cu_seqlens': BORDERS.float()}, 'cu_seqlens has dtype torch.float32, but must be int32 or', {'cu_seqlens': BORDERS.long()}),
    'borders as a list': (ALL, {'cu_seqlens': [0, 6]}, 'cu_seqlens is a list, but must be a tensor', {'cu_seqlens': integers(0, 6)}),
    'borders of 2 dimensions': (ALL, {'cu_seqlens': BORDERS[None]}, r'cu_seqlens has shape \(1, 3\), but must have 1 dimension', {}),
    'one border': (ALL, {'cu_seqlens': integers(0)}, 'cu_seqlens has 1 entries, but must have one per sequence and one', {'cu_seqlens': integers(0, 0)}),
    'borders from 1': (ALL, {'cu_seqlens': integers(1, 6)}, 'cu_seqlens starts at 1, but must start at 0', {'cu_seqlens': integers(0, 0, 6)}),
    'borders that fall': (ALL, {'cu_seqlens': integers(0, 5, 4, 6)}, 'cu_seqlens decreases at entry 2, but must not', {'cu_seqlens': integers(0, 4, 4, 6)}),
    'borders past the end': (ALL, {'cu_seqlens': integers(0, 7)}, 'cu_seqlens ends at 7, but there are 6 tokens', {'cu_seqlens': integers(0, 5)}),
    'borders elsewhere': (ALL, {'cu_seqlens': BORDERS.to('meta')}, 'cu_seqlens is on meta, but q is on cpu', {}),
    'lengths of packed rows': (ALL, {'seqlens_k': integers(6)}, 'seqlens_k is given, but cannot be combined with cu_seqlens', {}),
    'borders of one more key sequence': (ALL, {'cu_seqlens_k': integers(0, 1, 2, 6)}, 'cu_seqlens_k has 4 entries, but must have 3', {'cu_seqlens_k': integers(0, 0, 6)}),
    'borders of keys from 1': (ALL, {'cu_seqlens_k': integers(1, 2, 6)}, 'cu_seqlens_k starts at 1, but must start at 0', {'cu_seqlens_k': BORDERS}),
    'borders of keys that fall': (ALL, {'cu_seqlens_k': integers(0, 7, 6)}, 'cu_seqlens_k decreases at entry 2, but must not', {'cu_seqlens_k': BORDERS}),
    'borders past the last key': (OF_TOKENS, {'cu_seqlens_k': integers(0, 2, 7)}, 'cu_seqlens_k ends at 7, but there are 6 tokens', {'cu_seqlens_k': BORDERS}),
    'borders of floats for keys': (ALL, {'cu_seqlens_k': BORDERS.double()}, 'cu_seqlens_k has dtype torch.float64, but must be', {'cu_seqlens_k': BORDERS.long()}),
    'more blocks than k_cmp': (OF_BLOCKS, {'cu_seqlens_k': integers(0, 6, 12)}, 'k_cmp has 2 compressed blocks, but the key lengths make 4', {'cu_seqlens_k': integers(0, 4, 8)}),
    '3 offsets of 2 sequences': (ALL, {'q_offset': integers(0, 0, 0)}, 'q_offset has 3 entries, but must have 2', {'q_offset': integers(0, 0)}),
    'segments and borders': (ALL[1:], {'segment_ids': ids[:1]}, 'cu_seqlens is given, but cannot be combined with segment_ids', {'segment_ids': ids[:1], 'cu_seqlens': None}),
}  # fmt: skip

# Calls of one row, of which runs of equal ids are the sequences.
SEGMENTS: dict[str, Case] = {
    'segments of floats': (ALL, {'segment_ids': ids[:1].float()}, 'segment_ids has dtype torch.float32, but must be int32 or int64', {'segment_ids': ids[:1].long()}),
    'segments as a list': (ALL[1:], {'segment_ids': [0] * 6}, 'segment_ids is a list, but must be a tensor', {'segment_ids': ids[:1]}),
    'segments as a pair': (ALL[1:], {'segment_ids': (ids[:1], ids[:1])}, 'segment_ids is a tuple, but must be a tensor', {}),
    'segments of 5 tokens': (ALL, {'segment_ids': ids[:1, :5]}, r'segment_ids has shape \(1, 5\), but must have \(1, 6\)', {'segment_ids': ids[:1] - 1}),
    'segments of 1 dimension': (ALL, {'segment_ids': ids[0]}, r'segment_ids has shape \(6,\), but must have \(1, 6\)', {}),
    'segments elsewhere': (ALL, {'segment_ids': ids[:1].to('meta')}, 'segment_ids is on meta, but q is on cpu', {}),
    'segments and an offset': (ALL[1:], {'q_offset': 0}, 'q_offset is given, but cannot be combined with segment_ids', {'q_offset': None}),
    'segments and lengths': (ALL[1:], {'seqlens_k': integers(6)}, 'seqlens_k is given, but cannot be combined with segment_ids', {'seqlens_k': None}),
    'segments and borders of keys': (ALL[1:], {'cu_seqlens_k': integers(0, 6)}, 'cu_seqlens_k is given, but cannot be combined with segment_ids', {}),
    'segments of other keys': (('selected', 'nsa'), {'k': k[:1, :5], 'v': v[:1, :5]}, 'k has 5 tokens, but must have 6', {}),
    'segments of 5 keys': (OF_BLOCKS, {'seqlen_k': 5}, 'seqlen_k is 5, but must be T, 6, where segment_ids is given', {'seqlen_k': 6}),
}  # fmt: skip

SETTINGS: dict[str, Case] = {
    'another backend': (ALL, {'backend': 'fast'}, "backend is 'fast', but must be one of 'auto', 'triton', 'flex', 'eager'", {'backend': 'eager'}),
    'scale as text': (ALL, {'scale': 'half'}, "scale is 'half', but must be a finite number or None", {'scale': 1}),
    'scale of no number': (ALL, {'scale': nan}, 'scale is nan, but must be a finite number', {'scale': 0.0}),
    'scale without end': (ALL, {'scale': -inf}, 'scale is -inf, but must be a finite number', {'scale': -0.5}),
    'scale as a tensor': (ALL, {'scale': torch.zeros(3, 4)}, 'scale is a Tensor, but must be a finite number', {'scale': None}),
    'scale of True': (ALL, {'scale': True}, 'scale is True, but must be a finite number', {'scale': 1.0}),
    'scale past float32': (ALL, {'scale': -1e39}, r'scale is -1e\+39, but must be a finite number or None, of up to 1e\+30', {'scale': -1e30}),
    'softcap past float32': (ALL, {'softcap': 1e39}, r'softcap is 1e\+39, but must be a finite number above 0, or None, from', {'softcap': 1e30}),
    'softcap of many digits': (ALL, {'softcap': 10**400}, 'softcap is 10{400}, but must be a finite number above 0, or None, from', {'softcap': 10**30}),
    'softcap next to 0': (ALL, {'softcap': 1e-46}, 'softcap is 1e-46, but must be a finite number above 0, or None, from', {'softcap': 1e-30}),
    'softcap 0': (ALL, {'softcap': 0.0}, 'softcap is 0.0, but must be a finite number above 0', {'softcap': 1e-3}),
    'softcap -1': (ALL, {'softcap': -1}, 'softcap is -1, but must be a finite number above 0', {'softcap': 1}),
    'softcap without end': (ALL, {'softcap': inf}, 'softcap is inf, but must be a finite number above 0', {'softcap': 1e30}),
    'softcap of no number': (ALL, {'softcap': nan}, 'softcap is nan, but must be a finite number', {'softcap': None}),
    'softcap True': (ALL, {'softcap': True}, 'softcap is True, but must be a finite number', {'softcap': 1.0}),
    'blocks of 0 tokens': (('compressed', 'selected'), {'block_size': 0}, 'block_size is 0, but must be an integer of at least 1', {'block_size': 6}),
    'blocks of 4.0 tokens': (('compressed', 'selected'), {'block_size': 4.0}, 'block_size is 4.0, but must be an integer', {'block_size': 5}),
    'a stride of 0': (('compressed',), {'stride': 0}, 'stride is 0, but must be an integer of at least 1', {'stride': 3}),
    'a stride of 5': (('compressed',), {'stride': 5}, 'stride is 5, but must be at most block_size, 4', {'stride': 4}),
    'a compress_stride of 5': ((*SELECTIONS, 'nsa'), {'compress_stride': 5}, 'compress_stride is 5, but must be at most compress_block_size, 4', {'compress_stride': 4}),
    'a compress_block_size of 0': ((*SELECTIONS, 'nsa'), {'compress_block_size': 0}, 'compress_block_size is 0, but must be an integer of at least 1', {'compress_block_size': 6}),
    'selection blocks of 5': ((*SELECTIONS, 'nsa'), {'selection_block_size': 5}, 'selection_block_size is 5, but must be a multiple of compress_stride, 2', {'selection_block_size': 6}),
    'selection blocks of None': ((*SELECTIONS, 'nsa'), {'selection_block_size': None}, 'selection_block_size is None, but must be an integer', {'selection_block_size': 4}),
    'selection blocks of 0': ((*SELECTIONS, 'nsa'), {'selection_block_size': 0}, 'selection_block_size is 0, but must be an integer', {'selection_block_size': 2}),
    '-1 blocks': (('selection', 'nsa'), {'num_selected': -1}, 'num_selected is -1, but must be an integer of at least 0', {'num_selected': 0}),
    '2.0 blocks': (('selection', 'nsa'), {'num_selected': 2.0}, 'num_selected is 2.0, but must be an integer', {'num_selected': 9}),
    'True blocks': (('selection', 'nsa'), {'num_selected': True}, 'num_selected is True, but must be an integer', {'num_selected': 1}),
    '-1 first blocks': ((*SELECTIONS[::2], 'nsa'), {'num_init': -1}, 'num_init is -1, but must be an integer of at least 0', {'num_init': 0}),
    '-1 own blocks': ((*SELECTIONS[::2], 'nsa'), {'num_local': -1}, 'num_local is -1, but must be an integer of at least 0', {'num_local': 0}),
    'windows to the right': (('window', 'nsa'), {'window_size': (3, 1)}, r'window_size is \(3, 1\), but right must be 0 \(or -1\) where causal', {'window_size': (3, 1), 'causal': False}),
    'causal in words': (ALL, {'causal': 'no'}, r"causal is 'no', but must be True or False", {'causal': True}),
    'causal as a number': (ALL, {'causal': 1}, r'causal is 1, but must be True or False', {'causal': True}),
    'share_group in words': (('selection', 'nsa'), {'share_group': 'no'}, r"share_group is 'no', but must be True or False", {'share_group': True}),
    'no use_diff_topk': (('nsa',), {'use_diff_topk': None}, r'use_diff_topk is None, but must be True or False', {'use_diff_topk': True}),
    'a window of -2': (('window', 'nsa'), {'window_size': (-2, 0)}, r'window_size is \(-2, 0\), but must be \(left, right\), integers of at', {'window_size': (-1, -1)}),
    'a window of one side': (('window', 'nsa'), {'window_size': (3,)}, r'window_size is \(3,\), but must be \(left, right\)', {'window_size': [3, 0]}),
    'a window of a number': (('window', 'nsa'), {'window_size': 3}, r'window_size is 3, but must be \(left, right\)', {'window_size': (3, 0)}),
    'a window of 2.5': (('window', 'nsa'), {'window_size': (2.5, 0)}, r'window_size is \(2.5, 0\), but must be', {'window_size': (10**9, 0)}),
}  # fmt: skip

SELECTED: dict[str, Case] = {
    'a selection of floats': (SELECTIONS[1:] + OF_TOKENS[1:], {'block_indices': indices.float()}, 'block_indices has dtype torch.float32, but must be int32 or int64', {'block_indices': indices.long()}),
    'a selection of truths': (SELECTIONS[1:] + OF_TOKENS[1:], {'block_indices': indices == 0}, 'block_indices has dtype torch.bool, but must be int32', {'block_indices': indices - 9}),
    'a selection as a list': (SELECTIONS[1:] + OF_TOKENS[1:], {'block_indices': [0]}, 'block_indices is a list, but must be a tensor', {'block_indices': indices}),
    'a selection of 3 heads': (SELECTIONS[1:] + OF_TOKENS[1:], {'block_indices': indices[:, :, [0] * 3]}, r'block_indices has shape \(2, 6, 3, 2\), but must have \(2, 6, 2 or', {'block_indices': indices[:, :, [0] * 4]}),
    'a selection of 5 queries': (SELECTIONS[1:] + OF_TOKENS[1:], {'block_indices': indices[:, :5]}, r'block_indices has shape \(2, 5, 2, 2\), but must have', {'block_indices': indices[..., :1].expand_as(indices)}),
    'a selection of 3 dimensions': (SELECTIONS[1:] + OF_TOKENS[1:], {'block_indices': counts}, r'block_indices has shape \(2, 6, 2\), but must have', {'block_indices': counts[..., None].expand_as(indices)}),
    'a selection elsewhere': (SELECTIONS[1:] + OF_TOKENS[1:], {'block_indices': indices.to('meta')}, 'block_indices is on meta, but q is on cpu', {}),
    'a scale of 1 block': (('selected',), {'block_scale': torch.ones(2, 6, 2, 1)}, r'block_scale has shape \(2, 6, 2, 1\), but block_indices has \(2, 6, 2, 2\)', {'block_scale': torch.ones(2, 6, 2, 1).expand_as(indices)}),
    'a scale of integers': (('selected',), {'block_scale': indices}, 'block_scale has dtype torch.int32, but must be', {'block_scale': indices.bfloat16()}),
    'a scale elsewhere': (('selected',), {'block_scale': indices.float().to('meta')}, 'block_scale is on meta, but q is on cpu', {'block_scale': indices.float()}),
    'a scale of numbers': (('selected',), {'block_scale': 1.0}, 'block_scale is a float, but must be a tensor', {'block_scale': None}),
    'a count of 1.5': (('selection', *OF_TOKENS[1:]), {'block_counts': 1.5}, 'block_counts is 1.5, but must be an int, an integer tensor or None', {'block_counts': -1}),
    'counts of floats': (('selection', *OF_TOKENS[1:]), {'block_counts': counts.float()}, 'block_counts has dtype torch.float32, but must be int32 or', {'block_counts': counts.long()}),
    'counts of 4 heads': (('selection', *OF_TOKENS[1:]), {'block_counts': counts.repeat(1, 1, 2)}, r'block_counts has shape \(2, 6, 4\), but must have \(2, 6, 2\)', {'block_counts': counts + 9}),
    'counts elsewhere': (('selection', *OF_TOKENS[1:]), {'block_counts': counts.to('meta')}, 'block_counts is on meta, but q is on cpu', {'block_counts': 9}),
    'another n than chosen': (('nsa',), {'block_indices': indices, 'num_selected': 3}, 'num_selected is 3, but must be 2 or None', {'block_indices': indices, 'num_selected': None}),
    'no n': (('nsa',), {'num_selected': None}, 'num_selected is None, but must be given', {'num_selected': None, 'gates': (gate, None, gate)}),
    'gates of 2 branches': (('nsa',), {'gates': gates[..., :2]}, r'gates has shape \(2, 6, 4, 2\), but must have \(2, 6, 4, 3\)', {'gates': gates[..., :1].expand_as(gates)}),
    'gates of integers': (('nsa',), {'gates': gates.int()}, 'gates has dtype torch.int32, but must be a floating dtype', {'gates': gates.bfloat16()}),
    'gates elsewhere': (('nsa',), {'gates': gates.to('meta')}, 'gates is on meta, but', {}),
    '2 gates': (('nsa',), {'gates': (gate, gate)}, 'gates is 2 gates, but must be a tensor or 3 gates', {'gates': (gate, gate, None)}),
    'gates of nothing': (('nsa',), {'gates': (None, None, None)}, 'gates is None for every branch, but must be', {'gates': [None, None, gate]}),
    'a gate of 4 dimensions': (('nsa',), {'gates': (gate, gates, gate)}, r'gates\[1\] has shape \(2, 6, 4, 3\), but must have \(2, 6, 4\)', {'gates': (gate, gate, gate)}),
}  # fmt: skip

ATTENTIONS = ('window', 'compressed', 'selected')
# Attentions take gates on GPUs alone, so valid calls have none.
NO_GATE = {'gate': None}
SINKS = ('window', 'compressed', 'nsa')
FEATURES: dict[str, Case] = {
    'sinks of 3 heads': (SINKS, {'sinks': torch.zeros(3)}, r'sinks has shape \(3,\), but must have \(4,\) or \(4, M\)', {'sinks': torch.zeros(4)}),
    'sinks of 3 dimensions': (SINKS, {'sinks': torch.zeros(4, 1, 1)}, r'sinks has shape \(4, 1, 1\), but must have', {'sinks': torch.zeros(4, 1)}),
    'sinks of integers': (SINKS, {'sinks': torch.zeros(4).int()}, 'sinks has dtype torch.int32, but must be float64, float32', {'sinks': torch.zeros(4).half()}),
    'sinks of a number': (SINKS, {'sinks': 0.0}, 'sinks is a float, but must be a tensor', {'sinks': torch.zeros(4, 0)}),
    'sinks elsewhere': (SINKS, {'sinks': torch.zeros(4, device='meta')}, 'sinks is on meta, but q is on cpu', {'sinks': torch.zeros(4).double()}),
    'compressed sinks of 3 heads': (('nsa',), {'sinks_cmp': torch.zeros(3)}, r'sinks_cmp has shape \(3,\), but must have \(4,\) or', {'sinks_cmp': torch.zeros(4)}),
    'a gate of 5 queries': (ATTENTIONS, {'gate': gate[:, :5]}, r'gate has shape \(2, 5, 4\), but must have \(2, 6, 4\) \(B, T, HQ\)', NO_GATE),
    'a gate of kv heads': (ATTENTIONS, {'gate': gate[:, :, :2]}, r'gate has shape \(2, 6, 2\), but must have \(2, 6, 4\)', NO_GATE),
    'gates of all branches': (ATTENTIONS, {'gate': gates}, r'gate has shape \(2, 6, 4, 3\), but must have \(2, 6, 4\)', NO_GATE),
    'a gate of integers': (ATTENTIONS, {'gate': gate.int()}, 'gate has dtype torch.int32, but must be a floating dtype', NO_GATE),
    'a gate of float64': (ATTENTIONS, {'gate': gate.double()}, 'gate has dtype torch.float64, but its kernels compute in float32', NO_GATE),
    'a gate elsewhere': (ATTENTIONS, {'gate': gate.to('meta')}, 'gate is on meta, but', NO_GATE),
    'a gate of a number': (ATTENTIONS, {'gate': 0.5}, 'gate is a float, but must be a tensor', NO_GATE),
    'a gate and a scale': (('selected',), {'gate': gate, 'block_scale': torch.ones(indices.shape)}, 'gate is given with block_scale, but must be None beside it', {'block_scale': torch.ones(indices.shape)}),
    'a gate by eager': (ATTENTIONS, {'gate': gate, 'backend': 'eager'}, r"backend 'eager' cannot serve this call of \w+: gate is differentiated by the Triton kernels alone", {**NO_GATE, 'backend': 'eager'}),
    'a gate by flex': (ATTENTIONS, {'gate': gate, 'backend': 'flex'}, r"backend 'flex' cannot serve this call of \w+: gate is differentiated by the Triton kernels alone", NO_GATE),
    'a gate on a CPU': (ATTENTIONS, {'gate': gate}, r'no backend can serve this call of \w+: .*eager: gate is differentiated by the Triton kernels alone', NO_GATE),
    'drops all': (('window', 'nsa'), {'dropout_p': 1.0}, r'dropout_p is 1.0, but must be a number in \[0, 1\)', {'dropout_p': 0.999}),
    'drops less than nothing': (('window', 'nsa'), {'dropout_p': -0.1}, 'dropout_p is -0.1, but must be a number in', {'dropout_p': 0}),
    'drops no number': (('window', 'nsa'), {'dropout_p': nan}, 'dropout_p is nan, but must be a number in', {'dropout_p': 1e-30}),
    'drops text': (('window', 'nsa'), {'dropout_p': 'half'}, "dropout_p is 'half', but must be a number in", {'dropout_p': 0.5}),
    'a seed of 0.5': (('window', 'nsa'), {'dropout_seed': 0.5}, 'dropout_seed is 0.5, but must be an int of 64 bits', {'dropout_p': 0.5, 'dropout_seed': -1}),
    'a seed of 65 bits': (('window', 'nsa'), {'dropout_seed': 2**63}, 'dropout_seed is 9223372036854775808, but must be an int of 64 bits', {'dropout_p': 0.5, 'dropout_seed': 2**63 - 1}),
    'a seed of 32 bits': (('window', 'nsa'), {'dropout_seed': integers(1)}, r'dropout_seed has dtype torch.int32 and shape \(1,\), but must be int64', {'dropout_p': 0.5, 'dropout_seed': integers(1).long()}),
    'a seed of no dimension': (('window', 'nsa'), {'dropout_seed': torch.tensor(3)}, r'dropout_seed has dtype torch.int64 and shape \(\), but must be', {'dropout_p': 0.5, 'dropout_seed': torch.tensor([3])}),
    'a seed elsewhere': (('window', 'nsa'), {'dropout_seed': torch.tensor([3], device='meta')}, 'dropout_seed is on meta, but q is on cpu', {'dropout_p': 0.5, 'dropout_seed': None}),
    'segments as text': (('window',), {'segment_ids': 'all'}, 'segment_ids is a str, but must be a tensor or a pair', {'segment_ids': ids}),
    'three segments': (('window',), {'segment_ids': (ids, ids, ids)}, 'segment_ids is a tuple, but must be a tensor or a pair', {'segment_ids': [ids, ids.long()]}),
    'segments of truths': (('window',), {'segment_ids': ids == 0}, 'segment_ids has dtype torch.bool, but must be int32 or int64', {'segment_ids': ids - 1}),
    'segments of 33 bits': (('window',), {'segment_ids': (ids, ids.long() + 2**32)}, r'segment_ids\[1\] has an id of 4294967296, but must have ids below 2 \*\* 31', {'segment_ids': (ids, ids.long() + (2**31 - 1))}),
    'segments of 5 keys': (('window',), {'segment_ids': (ids, ids[:, :5])}, r'segment_ids\[1\] has shape \(2, 5\), but must have \(2, 6\)', {'segment_ids': (ids, ids[:, :1].expand_as(ids))}),
    'segments of one row': (('window',), {'segment_ids': ids[:1]}, r'segment_ids has shape \(1, 6\), but must have \(2, 6\)', {'segment_ids': ids[:1].expand_as(ids)}),
    'one segment for fewer queries': (('window',), {'q': q[:, :5], 'segment_ids': ids[:, :5]}, 'segment_ids is one tensor, but must be a pair where the 5 queries and 6', {'q': q[:, :5], 'segment_ids': (ids[:, :5], ids)}),
    'a mask of integers': (('window',), {'mask': ids}, 'mask has dtype torch.int32, but must be bool', {'mask': mask}),
    'a mask of 5 keys': (('window',), {'mask': mask[:, :5]}, r'mask has shape \(2, 5\), but must have \(2, 6\)', {'mask': ~mask}),
    'a mask of 1 dimension': (('window',), {'mask': mask[0]}, r'mask has shape \(6,\), but must have \(2, 6\)', {'mask': mask[0].expand_as(mask)}),
    'a mask elsewhere': (('window',), {'mask': mask.to('meta')}, 'mask is on meta, but q is on cpu', {'mask': mask, 'segment_ids': ids}),
    'a mask as a list': (('window',), {'mask': [True]}, 'mask is a list, but must be a tensor', {'mask': mask}),
    'a bias of 3 dimensions': (('window',), {'bias': table[0]}, r'bias has shape \(4, 6, 6\), but must have \(2 or 1, 4 or 1, 6, 6\)', {'bias': table}),
    'a bias of 2 heads': (('window',), {'bias': table[:, :2]}, r'bias has shape \(1, 2, 6, 6\), but must have \(2 or 1, 4 or 1,', {'bias': table[:, :1]}),
    'a bias of 3 rows': (('window',), {'bias': table.repeat(3, 1, 1, 1)}, r'bias has shape \(3, 4, 6, 6\), but must have \(2 or 1,', {'bias': table.repeat(2, 1, 1, 1)}),
    'a bias of 5 keys': (('window',), {'bias': table[..., :5]}, r'bias has shape \(1, 4, 6, 5\), but must have', {'bias': table[..., :1].expand_as(table)}),
    'a bias of float16': (('window',), {'bias': table.half()}, 'bias has dtype torch.float16, but must have that of q, torch.float32, or', {'bias': table, 'q': q.half(), 'k': k.half(), 'v': v.half()}),
    'a bias of truths': (('window',), {'bias': read}, 'bias has dtype torch.bool, but must have that of q', {'bias': table.mT}),
    'a bias elsewhere': (('window',), {'bias': table.to('meta')}, 'bias is on meta, but q is on cpu', {'bias': table}),
    'a mask of what is added': (('window',), {'attn_mask': table}, 'attn_mask has dtype torch.float32, but must be bool', {'attn_mask': read}),
    'a mask of queries alone': (('window',), {'attn_mask': read[..., :1]}, r'attn_mask has shape \(1, 4, 6, 1\), but must have', {'attn_mask': read[..., :1].expand_as(read)}),
    'a mask of 2 dimensions': (('window',), {'attn_mask': read[0, 0]}, r'attn_mask has shape \(6, 6\), but must have', {'attn_mask': read[:, :1]}),
    'a mask of queries elsewhere': (('window',), {'attn_mask': read.to('meta')}, 'attn_mask is on meta, but q is on cpu', {'attn_mask': read, 'bias': table}),
}  # fmt: skip

GROUPS: dict[str, tuple[dict[str, Case], int, Changes]] = {
    'tensors': (TENSORS, 2, {}),
    'places': (PLACES, 2, {}),
    'packed': (PACKED, 1, {'cu_seqlens': BORDERS}),
    'segments': (SEGMENTS, 1, {'segment_ids': ids[:1]}),
    'settings': (SETTINGS, 2, {}),
    'chosen': (SELECTED, 2, {}),
    'features': (FEATURES, 2, {}),
}
CALLS = [
    pytest.param(op, rows, beside, *rest, id=f'{op}: {name}')
    for cases, rows, beside in GROUPS.values()
    for name, (ops, *rest) in cases.items()
    for op in ops
]


def test_there_are_many_kinds() -> None:
    assert sum(len(cases) for cases, _, _ in GROUPS.values()) >= 120


@pytest.fixture
def nothing_runs() -> Any:
    """Let every computation fail."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError('runs')

    with pytest.MonkeyPatch.context() as patch:
        for op in ('window_attention', 'compressed_attention', 'selected_attention', 'block_selection'):
            eager = importlib.import_module(f'native_sparse_attention.ops.{op}.eager')
            for name in (op, 'select_blocks', 'chosen_scores', 'straight_through_scale'):
                patch.setattr(eager, name, refuse, raising=False)
        yield


@pytest.mark.parametrize(('op', 'rows', 'beside', 'bad', 'message', 'good'), CALLS)
def test_refused(
    op: str, rows: int, beside: Changes, bad: Changes, message: str, good: Changes, nothing_runs: None
) -> None:
    with pytest.raises(ValueError, match=f'^{message}') as error:
        OPS[op](**arguments(op, rows) | beside | bad)
    assert '\n' not in str(error.value)
    with pytest.raises(AssertionError, match=r'^runs$'):
        OPS[op](**arguments(op, rows) | beside | good)


@pytest.mark.parametrize(('op', 'rows', 'beside', 'bad', 'message', 'good'), CALLS)
def test_taken(op: str, rows: int, beside: Changes, bad: Changes, message: str, good: Changes) -> None:
    results = OPS[op](**arguments(op, rows) | beside | good)
    for result in (results,) if isinstance(results, Tensor) else results:
        assert not result.isnan().any()


@pytest.mark.parametrize(
    ('cu_seqlens', 'cu_seqlens_k', 'message'),
    [
        (integers(1, 6), None, 'cu_seqlens starts at 1, but must start at 0'),
        (integers(0, 4, 3), None, 'cu_seqlens decreases at entry 2, but must not'),
        (integers(0, 7), None, 'cu_seqlens ends at 7, but there are 6 tokens'),
        (integers(0, 6).float(), None, 'cu_seqlens has dtype torch.float32, but must be int32 or int64'),
        (integers(0), None, 'cu_seqlens has 1 entries, but must have one per sequence and one more'),
        ([0, 6], None, 'cu_seqlens is a list, but must be a tensor'),
        (integers(0, 6), integers(0, 3, 6), 'cu_seqlens_k has 3 entries, but cu_seqlens has 2'),
        (integers(0, 6), integers(0, 9), 'cu_seqlens_k ends at 9, but there are 8 tokens'),
        (integers(0, 6), integers(-1, 6), 'cu_seqlens_k starts at -1, but must start at 0'),
    ],
)
def test_content_on_any_device(cu_seqlens: Any, cu_seqlens_k: Any, message: str, device: torch.device) -> None:
    given = [t.to(device) if isinstance(t, Tensor) else t for t in (cu_seqlens, cu_seqlens_k)]
    with pytest.raises(ValueError, match=f'^{message}'):
        validate_packing(6, given[0], cu_seqlens_k=given[1], total_k=8)
    validate_packing(6, integers(0, 0, 6).to(device), cu_seqlens_k=integers(0, 8, 8).to(device), total_k=8)
