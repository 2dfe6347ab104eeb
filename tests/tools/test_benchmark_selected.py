"""The benchmark of the selected branch: report and comparison of outputs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import peers, runner
from benchmarks.attention import __main__ as attention
from benchmarks.attention import selected
from benchmarks.shapes import SHAPES, find_names


def row(case: str, backend: str, forward: float, backward: float | None = None, **rest: Any) -> runner.Case:
    shape = selected.SETTINGS[case].shape
    return {'op': case, 'shape': shape, 'backend': backend, 'forward_ms': forward, 'backward_ms': backward, **rest}


ROWS = [
    row('64k', 'triton', 10.0, 25.0, design='query', forward_workspace=2**20, backward_workspace=2**21, saved=0),
    row('64k', 'cudnn', 120.0, 350.0),
    row('64k', 'copy', 0.5, bytes=2 * 10**9),
    row('64k', 'gather', 12.5, bytes=125 * 10**9),
    row('64k', 'mdy666', 13.0, 30.0),
    row('64k', 'xunhao', 20.0, 20.0),
    row('64k', 'fsa', 1.0, 1.0, wrong=True, note='wrong: a row is off by 1 of its norm'),
    {'op': '64k', 'shape': 'paper-64k-h4', 'backend': 'fla', 'note': 'ValueError: no'},
    row('packed', 'triton', 11.0, 27.5),
]


def cells(table: str, name: str) -> dict[str, str]:
    lines = [[cell.strip() for cell in line.strip('| ').split(' | ')] for line in table.splitlines()]
    (found,) = (line for line in lines if line[0] == name)
    return dict(zip(lines[0], found, strict=True))


def test_targets():
    table = cells(selected.target_table(selected.Found(ROWS)), '64k')
    assert [table[name] for name in ('design', 'forward', 'target forward', 'met forward')] == [
        'query', '10', '13.4', 'yes'
    ]  # fmt: skip
    assert [table[name] for name in ('backward', 'met backward', 'workspace backward')] == ['25', 'no', '2']
    # Packed rows may take 1.2 times as long as the whole one.
    assert cells(selected.target_table(selected.Found(ROWS)), 'packed')['target forward'] == '12'


def test_ratios():
    table = cells(selected.ratio_table(selected.Found(ROWS)), '64k')
    expected = {'dense / ours': '12', 'best / ours': '1.3', 'best is': 'mdy666', 'ours / gather': '0.8'}
    assert {name: table[f'forward: {name}'] for name in expected} == expected
    # Wrong results are never the best. Each pass has its own best.
    assert (table['backward: best is'], table['backward: best / ours']) == ('xunhao', '0.8')
    assert (table['copy GB/s'], table['gather GB/s']) == ('4000', '10000')


def test_verdict():
    assert selected.compare(selected.Found(ROWS)) == (
        '3 of 4 targets are met; not 64k backward by 8.7 %. '
        '1 of 2 passes are no slower than the best public implementation; not 64k backward by 25.0 %. '
        '2 of 2 passes are no slower than dense attention.'
    )
    rows = [
        row('trainer', 'triton', 0.5, forward_kernels_ms=0.3),
        row('trainer', 'mdy666', 0.4, forward_kernels_ms=0.4, backward_kernels_ms=0.6),
    ]
    assert selected.compare(selected.Found(rows)).endswith(' 1 of 1 passes are no slower by their kernels alone.')
    assert '| trainer | trainer | triton | 0.5 | 0.3 | – | – |' in '\n'.join(selected.make_tables(rows))


def test_the_fastest_run():
    rows = [row('64k', 'triton', 2.0, 4.0, spreads={'forward': [1.5, 3.0, 9], 'backward': [3.5, 5.0, 9]})]
    table = cells(selected.row_table(selected.Found(rows)), '64k')
    assert [table[f'fastest {what}'] for what in ('forward', 'backward')] == ['1.5', '3.5']
    assert cells(selected.row_table(selected.Found(ROWS[2:3])), '64k')['fastest forward'] == '–'


def test_packed_line():
    (line,) = selected.packed_lines(selected.Found(ROWS))
    assert line == 'packed over 64k, forward and backward: 1.10 and 1.10; at most 1.2: met.'


def test_long_sequences_relative_to_the_shortest():
    rows = [row('long-128k', 'triton', 20.0, 50.0), row('long-1m', 'triton', 240.0, 400.0)]
    table = cells(selected.long_tables(selected.Found(rows))[1], 'long-1m')
    assert [*table.values()][2::2] == ['1.5', '1']


def test_cases_that_must_be_named():
    assert not [name for name in find_names(selected.SETTINGS, '*') if name.startswith(('tiny', 'short', 'long'))]
    assert not [name for name in find_names(SHAPES, '*') if name.startswith(('tiny', 'short', 'long', 'many'))]
    assert find_names(SHAPES, 'many*') == ['many-64k-h4']
    assert find_names(selected.SETTINGS, '64k,8k,64k') == ['8k', '64k']
    with pytest.raises(SystemExit, match='nothing is named 65k; there are 8k'):
        find_names(selected.SETTINGS, '64k,65k')


@pytest.mark.usefixtures('instant_worker')
def test_peer_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(peers.PEERS, 'fla', replace(peers.PEERS['fla'], file='not/there.py'))
    flags = (
        '--device',
        'cpu',
        '--commit',
        'abc',
        '--cases',
        'selected/tiny',
        '--backends',
        'triton,fla',
        '--out',
        str(tmp_path),
    )
    attention.main([*flags])
    (text,), (data,), (image,) = (list(tmp_path.glob(f'cpu/*{suffix}')) for suffix in ('.md', '.json', '.png'))
    assert 'Not importable, and so not measured: fla-org/flash-linear-attention.' in text.read_text()
    assert image.name in text.read_text()
    assert 'fla' not in {case['backend'] for case in json.loads(data.read_text())['rows']}
    with pytest.raises(ModuleNotFoundError, match='fla-org/flash-linear-attention is not on PYTHONPATH'):
        peers.make_steps('fla', tiny())


def test_modules_are_imported_without_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / 'a_peer'
    folder.mkdir()
    (folder / '__init__.py').write_text('raise ImportError')
    (folder / 'part.py').write_text('answer = 42')
    for name in ('a_peer', 'a_peer.part'):
        # Their modules are removed afterwards.
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    assert peers.import_from(tmp_path, 'a_peer.part').answer == 42


def tiny(case: str = 'tiny') -> peers.Problem:
    return selected.make_problem(selected.SETTINGS[case], 'cpu')


def test_wrong_outputs_are_seen():
    problem = tiny()
    forward, leaves = selected.make_dense(problem)
    assert selected.judge(problem, forward, leaves)['wrong']


@pytest.mark.full
@pytest.mark.parametrize('case', ['tiny', 'tiny-packed'])
def test_forced_design(case: str):
    pytest.importorskip('triton')
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    for backend in ('union', 'triton'):
        call, _ = selected.make_call({'op': case, 'backend': backend, 'device': device})
        facts = call.facts()
        assert facts['error'] < 1e-4
        assert facts['design'] == 'union'
    call, _ = selected.make_call({'op': case, 'backend': 'rows', 'device': device})
    with pytest.raises(ValueError, match="design is 'rows', but must be one of query, union, block, mixed"):
        call.facts()
