"""The benchmark of head layouts: its cases, what its report says, and what it compares outputs with."""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import judge, runner
from benchmarks.attention import __main__ as attention
from benchmarks.attention import layouts, suite
from benchmarks.attention.layouts import DEFAULT_SHAPES, DENSE, MERGED, MODES, SEPARATE, TARGETS, UNRELATED
from benchmarks.attention.parts_report import Found
from benchmarks.shapes import SHAPES


def row(shape: str, op: str, backend: str, forward: float, backward: float, **rest: Any) -> runner.Case:
    times = {'forward_ms': forward, 'backward_ms': backward, 'total_ms': forward + backward}
    return {'op': op, 'shape': shape, 'backend': backend, **times, **rest}


def rows_of(shape: str, separate: tuple[float, float], merged: tuple[float, float]) -> list[runner.Case]:
    """Return rows of a shape with 1 ms of dense attention: forward by cuDNN, backward by FlashAttention-2."""
    return [
        row(shape, DENSE, 'cudnn', 1.0, 3.0),
        row(shape, DENSE, 'flash', 2.0, 1.0),
        *(
            row(shape, mode, 'triton', 1 / forward, 1 / backward)
            for mode, (forward, backward) in ((SEPARATE, separate), (MERGED, merged))
        ),
    ]


def verdicts(rows: list[runner.Case], text: str) -> dict[tuple[str, str], str | None]:
    """Return the verdict by mode and figure of the lines whose case contains a text."""
    return {
        (cells[1], cells[2].split(',')[0]): cells[5] for cells in layouts.target_rows(Found(rows)) if text in cells[0]
    }


def make_cases(**options: Any) -> list[runner.Case]:
    defaults = {'shapes': None, 'backends': None, 'device': 'cuda'}
    return attention.make_cases('layouts', argparse.Namespace(**{**defaults, **options}), [*layouts.CASES])[0]


def test_targets():
    # The faster dense attention counts in each pass: 1 ms.
    rows = rows_of('short-4k-h4', (0.44, 1.0), (1.0, 0.84))
    found = verdicts(rows, '4k tokens, 64/4')
    assert found == {
        (MERGED, 'forward'): 'met',
        (MERGED, 'backward'): 'missed by 20.0 %',
        (SEPARATE, 'forward'): 'missed by 20.0 %',
        (SEPARATE, 'backward'): 'met',
    }
    # An output that is wrong counts for nothing.
    rows[3]['wrong'] = True
    assert verdicts(rows, '4k tokens, 64/4')[MERGED, 'forward'] is None
    body = layouts.target_rows(Found(rows))
    assert layouts.count_targets(body) == f'1 of 2 measured figures are met; the table has {len(body)}.'
    assert len(body) == 2 * 2 * len(TARGETS) + 2


def test_break_even():
    dense = [row(shape, DENSE, 'cudnn', 1.0, 1.0) for shape in ('short-4k-h4', 'paper-8k-h4')]

    def found(separate: tuple[float, float], merged: tuple[float, float]) -> list[str | None]:
        gains = {SEPARATE: separate, MERGED: merged}
        rows = [
            row(case['shape'], mode, 'triton', 1 / gain, 1 / gain)
            for mode in MODES
            for case, gain in zip(dense, gains[mode], strict=True)
        ]
        body = {cells[1]: cells for cells in layouts.target_rows(Found([*dense, *rows])) if 'break-even' in cells[2]}
        return [cells for mode in MODES for cells in (body[mode][3], body[mode][5])]

    # Half as fast at 4k and twice as fast at 8k: 1 in the middle, at 4,096 times the root of 2.
    assert found((0.5, 2.0), (1.1, 2.0)) == ['5,793', 'met', '4,096', 'met']
    assert found((0.5, 0.9), (0.5, 2.0)) == [None, 'missed', '5,793', 'missed by 41.4 %']
    # Between 4k and 6k it is not known; without a length of at most 6k neither.
    assert unknown(rows_of('short-4k-h4', (0.5, 0.5), (0.5, 0.5))) == [SEPARATE]
    assert unknown(rows_of('paper-8k-h4', (2.0, 2.0), (2.0, 2.0))) == [*MODES]
    assert suite.cross_one([], 1.0) is None


def unknown(rows: list[runner.Case]) -> list[str]:
    """Return the modes whose break-even has no verdict."""
    return [mode for mode in MODES if verdicts(rows, '64/4')[mode, 'break-even in tokens'] is None]


def test_a_length_has_one_figure():
    rows = [
        *rows_of('heads-8-4x64-4x8k', (0.5, 0.5), (0.5, 0.5)),
        *rows_of('budget-8k', (0.8, 0.8), (2.0, 2.0)),
        *rows_of('budget-16k', (2.0, 2.0), (2.0, 2.0)),
    ]
    for row in rows:
        row['total_ms'] = 1.0 if row['op'] == DENSE else row['forward_ms']
    assert layouts.find_curve(Found(rows), (8, 4, 64), SEPARATE) == {8192: pytest.approx(0.8), 16384: 2.0}
    assert layouts.curve_label(Found(rows[4:]), (8, 4, 64)) == '8/4 heads of 64,\n65,536 tokens a step'


def test_all_tables(tmp_path: Path):
    rows = [case for shape in DEFAULT_SHAPES for case in rows_of(shape, (1.1, 2.0), (1.5, 2.5))]
    rows.append(row('paper-8k-h4', MERGED + UNRELATED, 'triton', 0.5, 0.5))
    for some in (rows, rows[:5], []):
        layouts.plot_speeds(tmp_path / 'image.png', some, 'A title')
        text = '\n\n'.join(layouts.make_tables(some))
    assert (tmp_path / 'image.png').stat().st_size > 10_000
    text = '\n\n'.join(layouts.make_tables(rows))
    assert '| 4 × 8k tokens, 8/4 heads of 64 | separate | forward, at least | 1.1 | 1 | met |' in text
    assert '| paper-8k-h4 | merged-unrelated | triton | 0.5 | 0.5 | 1 | – | – | 2 | 2 | 3 |' in text


def test_cases():
    cases = make_cases()
    # Shapes with targets come first, unrelated tokens last.
    assert [*dict.fromkeys(case['shape'] for case in cases)] == [*DEFAULT_SHAPES]
    related = [case for case in cases if not case['op'].endswith(UNRELATED)]
    assert cases[: len(related)] == related
    assert [(case['op'], case['backend']) for case in cases[:4]] == [
        (DENSE, 'cudnn'), (DENSE, 'flash'), (SEPARATE, 'triton'), (MERGED, 'triton'),
    ]  # fmt: skip
    assert {case['shape'] for case in cases[len(related) :]} == {*layouts.UNRELATED_SHAPES}
    assert {*layouts.UNRELATED_SHAPES, *TARGETS} <= {*DEFAULT_SHAPES} <= SHAPES.keys()
    assert {case['op'] for case in make_cases(backends='eager')} == {*layouts.CASES} - {DENSE}


def test_every_length_is_compiled_first():
    warm = runner.cases_to_warm(make_cases())
    names = [(case['op'], case['shape']) for case in warm]
    # Unrelated tokens run the same kernels.
    assert {*names} == {*product(MODES, DEFAULT_SHAPES)}
    # The shortest of the six head layouts first.
    first = [layouts.layout_of(SHAPES[shape]) for _, shape in names[:6]]
    assert len({*first}) == 6
    assert names[-1][1] == 'paper-64k-h4'


@pytest.mark.parametrize('op', [*layouts.CASES])
def test_outputs_are_compared(op: str):
    backend = 'cudnn' if op == DENSE else 'eager'
    call, leaves = layouts.make_call({'op': op, 'backend': backend, 'shape': 'tiny', 'device': 'cpu'})
    assert call().shape == (1, 96, 4, 16)
    assert all(t.requires_grad for t in leaves)
    assert call.facts()['error'] < 1e-5


def test_other_outputs_are_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(judge, 'merged_row', judge.dense_row)
    call, _ = layouts.make_call({'op': MERGED, 'backend': 'eager', 'shape': 'tiny', 'device': 'cpu'})
    assert call.facts()['wrong']


@pytest.mark.full
@pytest.mark.parametrize('op', MODES)
def test_kernels(op: str):
    pytest.importorskip('native_sparse_attention.ops.selected_attention.triton.op')
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    call, _ = layouts.make_call({'op': op, 'backend': 'triton', 'shape': 'tiny', 'device': device})
    facts = call.facts()
    assert facts['error'] < 1e-4
    assert 'wrong' not in facts


@pytest.mark.usefixtures('instant_worker')
def test_suite_layouts(tmp_path: Path):
    flags = ['--device', 'cpu', '--commit', 'abc', '--out', str(tmp_path)]
    attention.main([*flags, '--cases', 'layouts', '--shapes', 'short-4k-h4,heads-8-4x64-*'])
    (text,) = tmp_path.glob('cpu/layouts.md')
    rows = json.loads(text.with_suffix('.json').read_text())['rows']
    assert len(rows) == 3 * 4 + 2
    assert '(layouts.png)' in text.read_text()
    assert (tmp_path / 'cpu' / 'layouts.png').exists()
