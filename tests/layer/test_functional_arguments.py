"""Arguments that `nsa` refuses before anything runs, beside similar valid ones; backends of its ops."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import native_sparse_attention
from native_sparse_attention import nsa
from native_sparse_attention.composition import backend_of
from tests.layer.test_functional_features import SETTINGS, refuse
from tests.support.problems import row_integers

PLAIN = {
    'q': (1, 8, 4, 4),
    'k': (1, 8, 2, 4),
    'v': (1, 8, 2, 3),
    'k_cmp': (1, 2, 2, 4),
    'v_cmp': (1, 2, 2, 3),
    'gates': (1, 8, 4, 3),
}


def plain_arguments() -> dict[str, Any]:
    tensors = {name: torch.zeros(shape) for name, shape in PLAIN.items()}
    return {**tensors, **SETTINGS, 'window_size': (3, 0)}


GATE = torch.zeros(1, 8, 4)
Q, K, V = (torch.zeros(PLAIN[name]) for name in 'qkv')
INDICES = torch.zeros(1, 8, 2, 3, dtype=torch.int32)
IDS = torch.zeros(1, 8, dtype=torch.int64)


def old_choose(
    q: Tensor, k_cmp: Tensor, lse: Tensor, compress_block_size: int, compress_stride: int, selection_block_size: int,
    num_selected: int, *, num_local: int, seqlen_k: int, scale: float,
) -> Tensor:  # fmt: skip
    """A selection function that lacks the arguments for which `select_blocks` has defaults."""
    sizes = (compress_block_size, compress_stride, selection_block_size, num_selected, seqlen_k)
    assert all(type(size) is int for size in sizes)
    return INDICES


class OldChoice(torch.nn.Module):
    forward = staticmethod(old_choose)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    'no gate': ({'gates': (None, None, None)}, 'gates is None for every branch'),
    'two gates': ({'gates': (GATE, GATE)}, 'gates is 2 gates, but must be a tensor or 3 gates'),
    'gates as text': ({'gates': 'all'}, 'gates is str, but must be'),
    'a gate as a number': ({'gates': (GATE, 0.5, None)}, r'gates\[1\] is a float, but must be a tensor'),
    'a gate of 4 dimensions': ({'gates': (GATE, GATE[..., None], None)}, r'gates\[1\] has shape \(1, 8, 4, 1\)'),
    'an integer gate': ({'gates': (GATE, GATE, GATE.int())}, r'gates\[2\] has dtype torch.int32'),
    'no n': ({'num_selected': None}, 'num_selected is None, but must be given'),
    'another n': ({'block_indices': INDICES, 'num_selected': 4}, 'num_selected is 4, but must be 3 or None'),
    'a choice of floats': ({'block_indices': INDICES.float()}, 'block_indices has dtype torch.float32'),
    'a choice of 3 heads': ({'block_indices': INDICES[:, :, :1]}, r'block_indices has shape \(1, 8, 1, 3\)'),
    'k_cmp of one head': (
        {'k_cmp': torch.zeros(1, 2, 1, 4), 'v_cmp': torch.zeros(1, 2, 1, 3)}, 'k_cmp has 1 heads, but must have 2, as k'
    ),
    'k_cmp of a head per query head': (
        {'k_cmp': torch.zeros(1, 2, 4, 4), 'v_cmp': torch.zeros(1, 2, 4, 3)}, 'k_cmp has 4 heads, but must have 2, as k'
    ),
    'no k_cmp': ({'k_cmp': None}, 'k_cmp is None, but must be given'),
    'no v_cmp': ({'v_cmp': None}, 'v_cmp is None, but must be given'),
    'no k_cmp to choose by': ({'k_cmp': None, 'gates': (None, GATE, None)}, 'k_cmp is None, but must be given'),
    'no k_cmp to learn by': (
        {'k_cmp': None, 'gates': (None, GATE, None), 'block_indices': INDICES, 'use_diff_topk': True},
        'k_cmp is None, but must be given',
    ),
    'negative softcap': ({'softcap': -1.0}, 'softcap is -1.0, but must be'),
    'softcap 0': ({'softcap': 0.0}, 'softcap is 0.0, but must be'),
    'sinks of 3 heads': ({'sinks': torch.zeros(3)}, r'sinks has shape \(3,\)'),
    'sinks_cmp of 3 heads': ({'sinks_cmp': torch.zeros(3)}, r'sinks_cmp has shape \(3,\)'),
    'integer sinks': ({'sinks': torch.zeros(4, dtype=torch.int64)}, 'sinks has dtype torch.int64'),
    'dropout 1': ({'dropout_p': 1.0}, r'dropout_p is 1.0, but must be'),
    'seed 0.5': ({'dropout_p': 0.5, 'dropout_seed': 0.5}, r'dropout_seed is 0.5, but must be'),
    'counts as text': ({'block_counts': 'two'}, r"block_counts is '?two'?, but must be"),
    'counts of floats': ({'block_counts': torch.zeros(1, 8, 2)}, 'block_counts has dtype torch.float32'),
    'counts of 3 heads': (
        {'block_counts': torch.zeros(1, 8, 3, dtype=torch.int32)},
        r'block_counts has shape \(1, 8, 3\)',
    ),
    'float64 q_cmp': ({'q_cmp': Q.double()}, 'q_cmp has dtype torch.float64, but q has torch.float32'),
    'float64 q_window': ({'q_window': Q.double()}, 'q_window has dtype torch.float64, but q has torch.float32'),
    'float64 k_window': ({'k_window': K.double(), 'v_window': V}, 'k_window has dtype torch.float64, but q has'),
    'float64 v_window': ({'k_window': K, 'v_window': V.double()}, 'v_window has dtype torch.float64, but q has'),
    'q_cmp elsewhere': ({'q_cmp': Q.to('meta')}, 'q_cmp is on meta, but q is on cpu'),
    'q_window elsewhere': ({'q_window': Q.to('meta')}, 'q_window is on meta, but q is on cpu'),
    'k_window elsewhere': ({'k_window': K.to('meta'), 'v_window': V}, 'k_window is on meta, but q is on cpu'),
    'v_window elsewhere': ({'k_window': K, 'v_window': V.to('meta')}, 'v_window is on meta, but q is on cpu'),
    'chosen without num_recent': (
        {'choose': old_choose, 'num_recent': 4}, 'choose has no argument num_recent, but must have it: num_recent is 4'
    ),
    'chosen without counts': (
        {'choose': old_choose, 'block_counts': torch.zeros(1, 8, 2, dtype=torch.int32)},
        'choose has no argument block_counts, but must have it: block_counts is a Tensor',
    ),
    'chosen without arguments': ({'choose': lambda: INDICES}, 'choose has no argument compress_block_size'),
    'chosen by text': ({'choose': 'x'}, "choose is 'x', but must be a function"),
    'segments and borders': (
        {'segment_ids': IDS, 'cu_seqlens': row_integers([0, 8])},
        'cu_seqlens is given, but cannot be combined with segment_ids',
    ),
    'segments and an offset': ({'segment_ids': IDS, 'q_offset': 0}, 'q_offset is given, but cannot be combined with'),
    'segments and lengths': ({'segment_ids': IDS, 'seqlens_k': row_integers([8])}, 'seqlens_k is given, but cannot be'),
    'segments of floats': ({'segment_ids': IDS.float()}, 'segment_ids has dtype torch.float32'),
    'segments of 7 tokens': ({'segment_ids': IDS[:, 1:]}, r'segment_ids has shape \(1, 7\)'),
    'segments of other keys': (
        {'segment_ids': IDS, 'k': torch.zeros(1, 9, 2, 4), 'v': torch.zeros(1, 9, 2, 3)},
        'k has 9 tokens, but must have 8',
    ),
}  # fmt: skip
ALLOWED: dict[str, dict[str, Any]] = {
    'one gate': {'gates': (None, None, GATE)},
    'gates as a list': {'gates': [GATE, None, GATE]},
    'no n for a choice': {'block_indices': INDICES, 'num_selected': None},
    'no n without the branch': {'gates': (GATE, None, GATE), 'num_selected': None},
    'a choice of each head': {'block_indices': INDICES.repeat(1, 1, 2, 1)},
    'no k_cmp': {'k_cmp': None, 'v_cmp': None, 'gates': (None, GATE, GATE), 'block_indices': INDICES},
    'no k_cmp for a window': {'k_cmp': None, 'v_cmp': None, 'gates': (None, None, GATE)},
    'softcap': {'softcap': 1},
    'sinks': {'sinks': torch.zeros(4), 'sinks_cmp': torch.zeros(4, 2)},
    'dropout 0': {'dropout_p': 0, 'dropout_seed': 1},
    'chosen by defaults': {'choose': old_choose},
    'chosen by a module': {'choose': OldChoice()},
    'chosen by any': {'choose': lambda *_, **__: INDICES, 'num_recent': 4},
    'no choice to make': {'choose': lambda: None, 'block_indices': INDICES, 'num_recent': 4},
    'count': {'block_counts': 9},
    'counts': {'block_counts': torch.zeros(1, 8, 2, dtype=torch.int64)},
    'segments': {'segment_ids': IDS},
    'inputs of each branch': {'q_cmp': Q, 'q_window': Q, 'k_window': K, 'v_window': V},
}


@pytest.mark.parametrize('changes', ALLOWED.values(), ids=ALLOWED)
def test_allowed_arguments(changes: dict[str, Any]) -> None:
    assert nsa(**plain_arguments() | changes).isfinite().all()


@pytest.mark.parametrize(('changes', 'message'), REFUSED.values(), ids=REFUSED)
def test_refused_before_anything_runs(changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from native_sparse_attention.ops.compressed_attention import eager as compressed
    from native_sparse_attention.ops.window_attention import eager as window

    monkeypatch.setattr(compressed, 'compressed_attention', refuse)
    monkeypatch.setattr(window, 'window_attention', refuse)
    with pytest.raises(ValueError, match=message) as error:
        nsa(**plain_arguments() | changes)
    assert '\n' not in str(error.value)


def test_a_function_that_selects_may_be_compiled() -> None:
    arguments: Any = plain_arguments() | {'choose': old_choose}
    compiled = torch.compile(nsa, backend='eager', fullgraph=True)
    assert torch.equal(compiled(**arguments), nsa(**arguments))


def test_the_backend_of_every_op_that_runs(device: torch.device) -> None:
    arguments = plain_arguments()
    q, k, v = (arguments[name].to(device) for name in 'qkv')
    gate = GATE.to(device)
    cases: list[tuple[dict[str, Any], set[str]]] = [
        ({}, {'compressed_attention', 'window_attention', 'selected_attention', 'select_blocks'}),
        ({'gates': (None, gate, None)}, {'compressed_attention', 'selected_attention', 'select_blocks'}),
        ({'gates': (None, gate, None), 'block_indices': INDICES}, {'selected_attention'}),
        ({'gates': (gate, None, gate)}, {'compressed_attention', 'window_attention'}),
        ({'gates': (None, gate, None), 'block_indices': INDICES[..., :0]}, set()),
    ]
    for settings, expected in cases:
        for features in ({}, {'softcap': 0.8, 'sinks': gate[0, 0], 'sinks_cmp': gate[0, 0], 'dropout_p': 0.5}):
            choice = backend_of(q, k, v, **settings, **features, backend='triton')
            assert choice.name == 'triton'
            assert set(choice.ops) == expected | {'gated_sum'}


PACKAGE = str(Path(native_sparse_attention.__file__).parent)
CHECKS = ('checks.py', 'modifier_checks.py', 'call.py', 'segments.py')
# Calls of checks that a call may make; those of packed sequences read their borders, too.
CALLS = {
    'separate': ({}, 40),
    'trained': ({'q': Q.clone().requires_grad_()}, 40),
    'differentiable selection': ({'use_diff_topk': True}, 40),
    'merged': ({'merge_window': True, 'gates': torch.zeros(1, 8, 4, 1)}, 40),
    'output gate': ({'merge_window': True, 'gates': torch.zeros(1, 8, 4, 2)}, 40),
    'packed': ({'cu_seqlens': row_integers([0, 3, 8])}, 46),
}


@pytest.mark.parametrize(('changes', 'limit'), CALLS.values(), ids=CALLS)
def test_arguments_are_checked_once(changes: dict[str, Any], limit: int) -> None:
    """Inner calls take checked records, and the backends of all ops are resolved in one go."""
    calls: Counter[tuple[str, str]] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == 'call' and code.co_filename.startswith(PACKAGE):
            calls[Path(code.co_filename).name, code.co_name] += 1

    arguments = plain_arguments() | changes
    nsa(**arguments)
    sys.setprofile(count)
    try:
        nsa(**arguments)
    finally:
        sys.setprofile(None)
    # Predicates, such as whether a tensor is dense, are parts of a check.
    named = {key: key[1].lstrip('_') for key in calls if not key[1].lstrip('_').startswith('is_')}
    checks = {key: calls[key] for key, name in named.items() if key[0] in CHECKS or name.startswith('check')}
    assert 20 < sum(checks.values()) < limit, checks
    assert sum(n for (_, name), n in calls.items() if name in ('choose_backend', 'choose_backends')) == 1
