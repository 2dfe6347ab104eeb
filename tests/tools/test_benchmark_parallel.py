"""The benchmark of several GPUs: its steps in two processes, errors of one of them, and its report."""

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

from benchmarks import parallel, scaling_model
from benchmarks.runner import Case
from tests.support.processes import run_processes

pytest.importorskip('torch.distributed.fsdp', exc_type=ImportError)
from benchmarks.parallel_steps import Process, measure_step, summary

FLAGS = ['--device', 'cpu', '--shape', 'tiny', '--commit', 'abc']


def tiny(gpus: int, data: str = 'stdlib') -> list[Case]:
    return parallel.make_cases(parallel.SHAPES['tiny'], 'cpu', gpus, data)


def run_all(folder: Path, data: str) -> None:
    """Run a case of each step in two processes, and in the first one alone."""
    process, rank = Process(), int(os.environ['RANK'])
    found: dict[str, list[float]] = {}
    for case in tiny(2, data)[:8]:
        if rank >= case['gpus']:
            continue
        torch.manual_seed(0)
        call, _ = process.make_call({**case, 'rank': rank, 'group': f'{folder}/group'})
        found.setdefault(case['step'], []).append(call.facts()['loss'])
        if case['step'] == 'attention':
            assert len(measure_step(call.forward, [], 'cpu')['times']) == 5
    process.leave()
    (folder / f'found-{rank}').write_text(json.dumps(found))


@pytest.mark.full
def test_steps_compute_the_same(tmp_path: Path) -> None:
    text = tmp_path / 'text'
    text.write_bytes(bytes(range(256)) * 20)
    run_processes(run_all, 2, tmp_path, tmp_path, str(text), joins=False)
    one, other = (json.loads((tmp_path / f'found-{rank}').read_text()) for rank in range(2))
    assert (one['attention'][1] + other['attention'][0]) / 2 == pytest.approx(one['attention'][0], rel=1e-5)
    assert [one['layers'][1], *other['layers']] == pytest.approx([one['layers'][0]] * 2, rel=1e-5)
    assert [*one['trainer'], *other['trainer']] == pytest.approx([5.5] * 3, abs=0.5)


class Fake:
    """A worker without a process. Rank 1 fails in the layers, for which rank 0 would wait forever."""

    def __init__(self, environment: Any) -> None:
        self.alive, self.ended = True, threading.Event()

    def measure(self, case: Case, seconds: float) -> Case:
        assert case['group']
        if case['step'] == 'layers' and case['gpus'] == 2 and not case.get('profile'):
            if case['rank'] == 1:
                return {'note': 'ValueError: a cause'}
            assert self.ended.wait(20)
            return {'note': f'{parallel.ENDED} with code 1'}
        if case.get('profile'):
            return summary([('ncclDevKernel', 0, 3000), ('matmul', 1000, 4000), ('matmul', 5000, 6000)])
        ms = {1: 10.0, 2: 6.0 - case['rank']}[case['gpus']]
        return {'times': [ms, ms, 2 * ms], 'peak_bytes': 2**30 // case['gpus'], 'loss': 1.0}

    def stop(self) -> None:
        self.alive = False
        self.ended.set()


def test_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, 'Worker', Fake)
    monkeypatch.setattr(sys, 'argv', ['parallel', *FLAGS, '--out', str(tmp_path)])
    parallel.main()
    (text,) = tmp_path.glob('cpu/parallel-2.md')
    table = text.read_text()
    assert '| attention, 96 tokens | cp 2 | 96 | 6 | 16,000 | 1.67 | 20.0% | 0.5 | 0.5 |  |' in table
    assert '| trainer, rows of 48 tokens | dp 2 | 192 | 6 | 32,000 | 3.33 | -40.0% | 0.5 | 0.5 |  |' in table
    assert '| tp 2 | 64 | – | – | – | – | – | – | ValueError: a cause |' in table
    assert '| attention, 96 tokens | cp 2 | 1 | 6 | 3 | 4 | 2 | 1 | 1 |' in table
    rows = json.loads(text.with_suffix('.json').read_text())['rows']
    assert [row.get('note') for row in rows[8:]] == [None] * 4  # after the error, in other processes


def test_targets() -> None:
    cases = parallel.make_cases(parallel.SHAPES['full'], 'cuda', 2, 'stdlib')
    of_four = parallel.make_cases(parallel.SHAPES['full'], 'cuda', 4, 'stdlib')
    known = {(case['op'], case['gpus']) for case in (*cases, *of_four)}
    assert known >= parallel.TARGETS.keys()
    one, two = (
        {**case, 'ms': ms, 'peak_bytes': peak} for case, ms, peak in zip(cases, (19, 10), (10, 7), strict=False)
    )
    assert 'at least 1.8 x, memory at most 0.6 x: missed' in '\n'.join(parallel.make_tables([one, two]))
    assert 'at most 0.6 x: met' in '\n'.join(parallel.make_tables([one, {**two, 'peak_bytes': 6}]))
    assert 'at most 0.6 x: missed' in '\n'.join(parallel.make_tables([one, {**two, 'ms': 11, 'peak_bytes': 6}]))


def test_kernels_are_compiled_once() -> None:
    cases = parallel.make_cases(parallel.SHAPES['full'], 'cuda', 4, 'stdlib')
    warm = [(case['op'].split(',')[0], parallel.name_of(case['layout'])) for case in parallel.to_warm(cases)]
    layers = [('layers: 1', 'one GPU'), ('layers: 1', 'tp 2'), ('layers: 4', 'cp 2'), ('layers: 4', 'cp 2 x tp 2')]
    attention = [('attention', 'one GPU')] * 2 + [('attention', 'cp 2')]
    assert sorted(warm) == sorted([*attention, ('trainer', 'one GPU'), *layers])


TRUE = scaling_model.Attention(scaling_model.SHAPES['long-128k-h4'], 1e-8, 1e-3, 2e8, 5e4)


def result_of(gpus: int) -> dict[str, Any]:
    """Return a result of the benchmark with attention that follows the model TRUE."""
    rows = parallel.make_cases(parallel.SHAPES['full'], 'cuda', gpus, 'stdlib')
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
        elif case['step'] == 'layers':
            case['ms'] = {1: 10.0, 2: 6.0, 4: 8.0}[gpus]  # by the model 4
    return {'machine': {'gpu': 'NVIDIA H100'}, 'rows': parallel.with_ratios(rows)}


def make_model(result: dict[str, Any], folder: Path, patch: pytest.MonkeyPatch) -> str:
    (folder / 'rows').write_text(json.dumps(result))
    patch.setattr(sys, 'argv', ['scaling_model', str(folder / 'rows'), '--out', str(folder)])
    scaling_model.main()
    return (folder / 'h100' / 'scaling.md').read_text()


def test_scaling_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model finds the coefficients of times that follow it, and reports four GPUs that do not."""
    result = result_of(4)
    text = make_model(result, tmp_path, monkeypatch)
    fit = scaling_model.fit_attention([row for row in result['rows'] if row['step'] == 'attention' and 'ms' in row])
    for name in ('quadratic', 'linear', 'bandwidth', 'local'):
        assert getattr(fit, name) == pytest.approx(getattr(TRUE, name), rel=1e-4)
    assert 'Four GPUs within 15%: 7 of 8 values.' in text
    assert '| layers: 1, rows of 32,768 tokens | tp 4 | ms | 8 | 4 | -50% | checked |' in text
    assert '| trainer, rows of 16,384 tokens | dp 4 | ms | 11.5 | 11.5 | +0% | checked |' in text
    assert (tmp_path / 'h100' / 'scaling.png').exists()
    far = json.loads((tmp_path / 'h100' / 'scaling.json').read_text())['rows']['model']
    assert all(a['efficiency'] - b['efficiency'] > 0 for a, b in itertools.pairwise(far) if a['tokens'] == b['tokens'])
    with pytest.raises(SystemExit, match='two lengths on one GPU'):
        scaling_model.fit_attention([])


def test_scaling_model_of_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases without a value are left out; nothing is compared with four GPUs."""
    result = result_of(2)
    for row in result['rows']:
        if (row['gpus'], row['tokens']) == (2, 2**17) or row['op'].startswith('layers'):
            row.update(ms=None, tokens_per_s=None, speedup=None, note='stopped after 50 s')
    text = make_model(result, tmp_path, monkeypatch)
    assert 'Bandwidth between 8 GPUs of a node: 200 GB/s (fitted)' in text
    assert '| attention, 262,144 tokens | cp 2 | ms | ' in text
    assert 'Four GPUs' not in text
    assert 'layers' not in text
