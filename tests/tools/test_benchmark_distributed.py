"""The benchmark of several GPUs: its steps in two processes, errors of one of them, its report, and a model."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import distributed, distributed_report, scaling_model, scaling_steps
from benchmarks.distributed_cases import MODEL_LAYOUTS, SHAPES, TARGETS, make_cases, name_of, to_warm
from benchmarks.runner import Case
from tests.support.processes import run_processes

pytest.importorskip('torch.distributed.fsdp', exc_type=ImportError)
from benchmarks.distributed_steps import Process, measure_step, summary

FLAGS = ['--device', 'cpu', '--shape', 'tiny', '--commit', 'abc']


def tiny(gpus: int, data: str = 'stdlib') -> list[Case]:
    return make_cases(SHAPES['tiny'], 'cpu', gpus, data)


def full(gpus: int) -> list[Case]:
    return make_cases(SHAPES['full'], 'cuda', gpus, 'stdlib')


def run_all(folder: Path, data: str) -> None:
    """Run every case in two processes, and those of one GPU in the first one alone."""
    process, rank = Process(), int(os.environ['RANK'])
    found: list[Case] = []
    for gpus in (2, 1):
        for case in tiny(2, data):
            if case['gpus'] != gpus or rank >= gpus or case.get('profile'):
                continue
            torch.manual_seed(0)
            group = f'{folder}/group-{gpus}'
            call, _ = process.make_call({**case, 'rank': rank, 'group': group})
            times = measure_step(call.forward, [], 'cpu')
            assert 2 <= len(times['times']) <= 5
            found.append({**case, **times, **call.facts()})
    process.leave()
    (folder / f'found-{rank}').write_text(json.dumps(found))


@pytest.mark.full
def test_steps_compute_the_same(tmp_path: Path) -> None:
    text = tmp_path / 'text'
    text.write_bytes(bytes(range(256)) * 20)
    run_processes(run_all, 2, tmp_path, tmp_path, str(text), joins=False)
    first, second = (json.loads((tmp_path / f'found-{rank}').read_text()) for rank in range(2))
    rows = []
    for index, row in enumerate(first):
        ranks = [row] if row['gpus'] == 1 else [row, second[index]]
        assert [rank['op'] for rank in ranks] == [row['op']] * row['gpus']
        rows.append({**row, **distributed.join(ranks)})
    one = {row['op']: row['losses'] for row in rows if row['gpus'] == 1}
    for row in rows:
        limit = 0.2 if row['step'] == 'trainer' else 1e-5  # of more tokens
        assert row['losses'] == pytest.approx(one[row['op']], rel=limit), name_of(row['layout'])
    rows = distributed_report.with_ratios(rows)
    assert [distributed_report.is_equal(row) for row in rows if row['step'] == 'model'] == [True] * 4
    assert len(rows[-1]['token_losses']) == 2 * 95  # all that have a next token


class Fake:
    """A worker without a process. Rank 1 fails in the layer, for which rank 0 would wait forever."""

    def __init__(self, environment: Any) -> None:
        self.alive, self.ended = True, threading.Event()

    def measure(self, case: Case, seconds: float) -> Case:
        assert case['group']
        if case['step'] == 'layer' and case['gpus'] == 2 and not case.get('profile'):
            if case['rank'] == 1:
                return {'note': 'ValueError: a cause'}
            assert self.ended.wait(20)
            return {'note': f'{distributed.ENDED} with code 1'}
        if case.get('profile'):
            late = 500 * case['rank']
            return summary([('ncclDevKernel', 0, 3000), ('matmul', 1000 + late, 4000), ('matmul', 5000, 6000)])
        ms = {1: 10.0, 2: 6.0 - case['rank'], 4: 3.0, 8: 2.0}[case['gpus']]
        found = {'times': [ms, ms, 2 * ms], 'peak_bytes': 2**30 // case['gpus'], 'losses': [1.0]}
        if case['step'] == 'model':
            wrong = 0.1 * ('cp' in case['layout'])
            found |= {'losses': [2.0, 1.0], 'token_losses': {'0:7': 1.0, '1:7': 2.0 + wrong}, 'parameters': 1000}
        return found

    def stop(self) -> None:
        self.alive = False
        self.ended.set()


def run_script(folder: Path, patch: pytest.MonkeyPatch, *flags: str) -> Path:
    patch.setattr(distributed, 'Worker', Fake)
    patch.setattr(sys, 'argv', ['distributed', *FLAGS, *flags, '--out', str(folder)])
    distributed.main()
    (text,) = folder.glob('cpu/*.md')
    return text


def test_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = run_script(tmp_path, monkeypatch)
    assert text.name == 'parallel-2.md'
    table = text.read_text()
    assert '| attention, 96 tokens | cp 2 | 96 | 6 | 16,000 | 1.67 | 1 | 20.0% | 1.5 | 0.5 | 0.5 |  |' in table
    assert '| trainer, rows of 48 tokens | dp 2 | 192 | 6 | 32,000 | 3.33 | 1 | -40.0% | 1.5 | 0.5 | 0.5 |  |' in table
    assert '| tp 2 | 64 | – | – | – | – | – | 1.5 | – | – | ValueError: a cause |' in table
    assert '| attention, 96 tokens | cp 2 | 6 | 3 | 3.5 to 4 | 1.5 to 2 | 1 to 1.5 | 1 |' in table
    assert 'Model of 1,000 parameters' in table
    assert '| fsdp 2 | 2.00000 | 1.00000 | 0.0e+00 | 0.0e+00 | reference |' in table
    assert '| cp 2 | 2.00000 | 1.00000 | 0.0e+00 | 4.5e-02 | not equal |' in table
    assert '| one GPU | 2.00000 | 1.00000 | 0.0e+00 | 0.0e+00 | equal |' in table
    rows = json.loads(text.with_suffix('.json').read_text())['rows']
    assert [row['step'] for row in rows if row.get('note')] == ['layer']  # what follows runs in other processes


@pytest.mark.parametrize('gpus', [4, 8])
def test_script_of_more_gpus(gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = run_script(tmp_path, monkeypatch, '--processes', str(gpus))
    rows = json.loads(text.with_suffix('.json').read_text())['rows']
    measured = [row for row in rows if not row.get('profile')]
    layouts = {name_of(row['layout']) for row in measured if row['step'] == 'model'}
    assert layouts >= {name_of(layout) for layout in MODEL_LAYOUTS[gpus]} | {'fsdp 2', 'one GPU'}
    attention = [(row['tokens'], row['gpus']) for row in measured if row['step'] == 'attention']
    counts = [count for count in (1, 2, 4, 8) if count <= gpus]
    lengths = [tokens for _, tokens in SHAPES['tiny'].sequences[gpus]]
    assert sorted(attention) == sorted(itertools.product(lengths, counts))
    profiled = {(row['tokens'], row['gpus']) for row in rows if row.get('profile') and row['step'] == 'attention'}
    assert profiled >= {pair for pair in attention if pair[1] > 1}


def test_budget_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = run_script(tmp_path, monkeypatch, '--budget', '0')
    rows = json.loads(text.with_suffix('.json').read_text())['rows']
    assert {row['note'] for row in rows} == {'not run: the time was used up'}


def rows_of(gpus: int, tokens: int, *values: tuple[int, float, float]) -> list[Case]:
    """Return rows of attention in a run on several GPUs. values: GPUs, ms and bytes."""
    cases = {
        case['gpus']: case for case in reversed(full(gpus)) if case['step'] == 'attention' if case['tokens'] == tokens
    }
    return [{**cases[count], 'profile': False, 'ms': ms, 'peak_bytes': peak} for count, ms, peak in values]


def test_targets() -> None:
    known = {(case['op'], case['gpus']) for gpus in (2, 4, 8) for case in full(gpus)}
    assert known >= TARGETS.keys()
    for gpus, tokens, values, expected in (
        (2, 2**18, [(1, 19, 10), (2, 10, 6)], '1.8 x one GPU, memory at most 0.6 x: met'),
        (2, 2**18, [(1, 19, 10), (2, 10, 7)], '1.8 x one GPU, memory at most 0.6 x: missed'),
        (2, 2**18, [(1, 19, 10), (2, 11, 6)], '1.8 x one GPU, memory at most 0.6 x: missed'),
        (8, 2**19, [(1, 62, 10), (2, 40, 6), (8, 10, 2)], 'cp 8: at least 6.0 x one GPU: met'),
        (8, 2**19, [(1, 58, 10), (2, 30, 6), (8, 10, 2)], 'cp 8: at least 6.0 x one GPU: missed'),
        (8, 2**19, [(2, 33, 6), (8, 10, 2)], 'cp 8: at least 3.2 x two GPUs: met'),
        (8, 2**19, [(2, 31, 6), (8, 10, 2)], 'cp 8: at least 3.2 x two GPUs: missed'),
        (8, 2**20, [(8, 10, 80e9)], 'cp 8: at most 80 GB per GPU: met'),
        (8, 2**20, [(8, 10, 81e9)], 'cp 8: at most 80 GB per GPU: missed'),
    ):
        assert expected in '\n'.join(distributed_report.make_tables(rows_of(gpus, tokens, *values)))
    alone = rows_of(8, 2**19, (8, 10, 2))
    assert 'at least' not in '\n'.join(distributed_report.make_tables(alone))


def test_kernels_are_compiled_once() -> None:
    def warmed(gpus: int) -> list[tuple[str, str]]:
        warm = to_warm(full(gpus))
        assert all(case['warm'] and not case['profile'] for case in warm)
        return sorted((case['op'].split(',')[0], name_of(case['layout'])) for case in warm)

    models = [('model', layout) for layout in ('cp 2', 'fsdp 2', 'one GPU', 'tp 2')]
    layers, trainer = [('layer', 'one GPU'), ('layer', 'tp 2')], [('trainer', 'one GPU')]
    attention = [('attention', 'cp 2'), *[('attention', 'one GPU')] * 3]
    models_of_4 = [('model', 'cp 2 x fsdp 2'), ('model', 'tp 2 x cp 2')]
    assert warmed(4) == sorted([*attention, *models, *models_of_4, *layers, *trainer])
    # 1,048,576 tokens on two GPUs need wide offsets, and on one they may not fit.
    attention = [*[('attention', 'cp 2')] * 2, *[('attention', 'one GPU')] * 2]
    assert warmed(8) == sorted([*attention, *models, ('model', 'cp 4 x fsdp 2'), ('model', 'tp 2 x cp 4')])


TRUE = scaling_model.Attention(scaling_model.SHAPES['long-128k-h4'], 1e-8, 1e-3, 2e8, 5e4)
TRUE_STEPS = scaling_steps.Steps(0.03, {'fsdp': 1e-8, 'cp': 2e-8, 'tp': 5e-9}, 2e5)


def result_of(gpus: int) -> dict[str, Any]:
    """Return a result of the benchmark with attention that follows TRUE and models that follow TRUE_STEPS."""
    rows = full(gpus)
    for case in rows:
        tokens, gpus = case['tokens'], case['gpus']
        if case.get('profile'):
            case['profiles'] = []
        elif case['graph']:
            case['ms'] = 5.0
        elif case['step'] == 'attention':
            case['ms'] = TRUE.ms(tokens, gpus) if gpus > 1 else TRUE.one_ms(tokens)
            case['peak_bytes'] = TRUE.peak(tokens, gpus)
        elif case['step'] == 'trainer':
            case['ms'] = {1: 10.0, 2: 11.0, 4: 11.5}[gpus]
        elif case['step'] == 'layer':
            case['ms'] = {1: 10.0, 2: 6.0, 4: 8.0}[gpus]  # by the model 4
        elif case['step'] == 'model':
            case['parameters'] = 10**9
            case.update(ms=TRUE_STEPS.ms(case), peak_bytes=TRUE_STEPS.peak(case))
    return {
        'machine': {'gpu': 'NVIDIA H100', 'commit': 'abc', 'date': 'today'},
        'rows': distributed_report.with_ratios(rows),
    }


def make_model(folder: Path, patch: pytest.MonkeyPatch, *results: dict[str, Any]) -> str:
    files = [folder / f'rows-{index}' for index in range(len(results))]
    for file, result in zip(files, results, strict=True):
        file.write_text(json.dumps(result))
    patch.setattr(sys, 'argv', ['scaling_model', *map(str, files), '--out', str(folder)])
    scaling_model.main()
    return (folder / 'h100' / 'scaling.md').read_text()


def test_scaling_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model finds the coefficients of times that follow it, and reports four GPUs that do not."""
    result = result_of(4)
    text = make_model(tmp_path, monkeypatch, result)
    measured = scaling_model.usable([result['rows']])
    fit = scaling_model.fit_attention([row for row in measured if row['step'] == 'attention'])
    for name in ('quadratic', 'linear', 'bandwidth', 'local'):
        assert getattr(fit, name) == pytest.approx(getattr(TRUE, name), rel=1e-4)
    steps = scaling_steps.fit_steps([row for row in measured if row['step'] == 'model'])
    assert steps is not None
    assert [steps.work, steps.local] == pytest.approx([TRUE_STEPS.work, TRUE_STEPS.local])
    assert steps.per_byte == pytest.approx(TRUE_STEPS.per_byte)
    assert '4 GPUs within 15%: 11 of 12 values.' in text
    assert '| layer, 32,768 tokens | tp 4 | ms | 8 | 4 | -50% | outside |' in text
    assert '| trainer, rows of 16,384 tokens | dp 4 | ms | 11.5 | 11.5 | +0% | within |' in text
    assert '| cp 2 x fsdp 2 | ms |' in text
    assert (tmp_path / 'h100' / 'scaling.png').exists()
    far = json.loads((tmp_path / 'h100' / 'scaling.json').read_text())['rows']['model']
    assert all(a['efficiency'] - b['efficiency'] > 0 for a, b in itertools.pairwise(far) if a['tokens'] == b['tokens'])
    with pytest.raises(SystemExit, match='two lengths on one GPU'):
        scaling_model.fit_attention([])


def test_scaling_model_of_several_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Coefficients come from the first result that has a case; more GPUs of all results are compared."""
    of_8 = result_of(8)
    for row in of_8['rows']:
        if row['step'] == 'model' and row['gpus'] == 8:
            row['ms'] *= 1.1 if 'tp' in row['layout'] else 1.3
        if row['gpus'] == 1 and row.get('ms'):
            row['ms'] = None if row['tokens'] == 2**20 else 3 * row['ms']  # the others are in the first results
    text = make_model(tmp_path, monkeypatch, result_of(2), result_of(4), of_8)
    assert 'rows-2: commit abc, date today.' in text
    assert '4 GPUs within 15%: 13 of 14 values.' in text  # the layer, as above
    assert '8 GPUs within 15%: 10 of 12 values.' in text
    lines = [line for line in text.split('\n') if '| ms |' in line and line.startswith('| model')]
    verdicts = {line.split(' | ')[1]: line.split(' | ')[-1] for line in lines}
    assert verdicts == {
        **dict.fromkeys(('fsdp 2', 'cp 2', 'tp 2'), 'fitted |'),
        **dict.fromkeys(('cp 2 x fsdp 2', 'tp 2 x cp 2', 'tp 2 x cp 4'), 'within |'),
        **dict.fromkeys(('fsdp 8', 'cp 4 x fsdp 2'), 'outside |'),
    }


def test_scaling_model_of_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases without a value are left out; nothing is compared with more GPUs."""
    result = result_of(2)
    for row in result['rows']:
        if (row['gpus'], row['tokens']) == (2, 2**17) or row['op'].startswith('layer'):
            row.update(ms=None, tokens_per_s=None, speedup=None, note='stopped after 50 s')
        if row['op'].startswith('model') and row['gpus'] == 1:
            row.update(ms=None, note='stopped after 50 s')
    text = make_model(tmp_path, monkeypatch, result)
    assert 'Bandwidth between 8 GPUs of a node: 200 GB/s (fitted)' in text
    assert '| attention, 262,144 tokens | cp 2 | ms | ' in text
    assert '| fsdp 2 | ms |' in text
    assert 'not predicted' in text
    assert 'GPUs within' not in text
    assert 'layer,' not in text
