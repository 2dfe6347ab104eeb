"""Tables of the benchmarks of features and of two trees."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import compare
from benchmarks.attention import features
from benchmarks.shapes import SHAPES
from native_sparse_attention.ops import window_attention


def row(op: str, forward: float, backward: float, **changes: Any) -> dict[str, Any]:
    times = {'forward_ms': forward, 'backward_ms': backward, 'note': ''}
    return {'suite': 'parts', 'op': op, 'shape': 'tiny', 'backend': 'triton', **times, **changes}


def test_two_trees():
    rows = [
        row('window', 1.0, 2.0, tree='before'),
        row('window', 1.01, 2.5, tree='after'),
        row('selected', 2.0, 4.0, tree='before'),
        row('selected', 1.0, 4.0, tree='after'),
    ]
    text = '\n'.join(compare.make_tables(rows))
    assert '| parts/window | tiny | triton | 1 | 1.01 | 1.01 | 2 | 2.5 | 1.25 |  |' in text
    assert '| parts/selected | tiny | triton | 2 | 1 | 0.5 | 4 | 4 | 1 |  |' in text
    assert 'Slower: parts/window backward of tiny.' in text
    assert 'No pass takes more than 1.02 times as long.' in '\n'.join(compare.make_tables(rows[2:]))


@pytest.mark.full
def test_both_trees_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The workers import the package of their own tree, and the benchmarks of this one."""
    before = tmp_path / 'native_sparse_attention'
    before.mkdir()
    (before / '__init__.py').write_text('raise ImportError("the other tree")')
    flags = ['--cases', 'backends/nsa', '--backends', 'eager', '--shapes', 'tiny', '--rounds', '1']
    flags += ['--device', 'cpu', '--commit', 'abc', '--out', str(tmp_path)]
    monkeypatch.setattr(sys, 'argv', ['compare', str(tmp_path), *flags])
    compare.main()
    rows = {row['tree']: row for row in json.loads((tmp_path / 'cpu' / 'compare.json').read_text())['rows']}
    assert 'ended with code' in rows['before']['note']
    assert rows['after']['forward_ms'] > 0
    assert 'Not measured: backends/nsa of tiny.' in (tmp_path / 'cpu' / 'compare.md').read_text()


def test_dense_against_its_limits():
    rows = [row('dense', 1.3, 4.3), row('dense', 1.0, 2.0, backend='cudnn'), row('dense+sinks', 1.3, 8.6)]
    text = '\n'.join(features.make_tables(rows))
    assert '| forward | 1.3 | 1 | 1.3 | 1.35 | met |' in text
    assert '| backward | 4.3 | 2 | 2.15 | 2.1 | missed |' in text
    assert '| dense+sinks | 1.3 | 8.6 | 1 | 2 |  |' in text


@pytest.mark.parametrize('feature', [name for name in features.FEATURES if name])
def test_a_feature_is_switched_on(feature: str):
    shape = SHAPES['tiny']
    settings = features.make_settings(feature, shape, 'cpu')
    q, k, v = (torch.randn(1, shape.seqlen, heads, 16) for heads in (4, 2, 2))
    k = 20 * k  # so that a soft cap has an effect
    plain, _ = window_attention(q, k, v, window_size=(-1, 0), backend='eager')
    out, _ = window_attention(q, k, v, window_size=(-1, 0), **settings, backend='eager')
    assert not torch.equal(out, plain)
