"""The benchmark of training speed: steps of the trainer, of the same model at every length."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import decode, runner, training_speed
from train_enwik8 import PRESETS, Config


def row(model: str, length: int, ms: float) -> runner.Case:
    config = asdict(training_speed.make_config([], model, length, 2**16))
    return {'op': 'step', 'shape': f'{length} tokens', 'backend': model, 'config': config, 'forward_ms': ms}


def test_settings_are_those_of_the_preset():
    config = training_speed.make_config([], 'sparse', 16384, 2**16)
    assert config == Config(**PRESETS['long'])
    for length in training_speed.LENGTHS:
        config = training_speed.make_config(['--dim', '256'], 'dense', length, 2**16)
        assert config.batch * length == 2**16
        assert (config.attention, config.seq_len, config.dim) == ('dense', length, 256)


def test_report():
    rows = [
        row('sparse', 8192, 100.0),
        row('dense', 8192, 80.0),
        row('sparse', 16384, 100.0),
        row('dense', 16384, 200.0),
    ]
    text = '\n'.join(training_speed.make_tables(rows))
    assert '| 8,192 | 8 | 655,360 | 819,200 | 0.8 |' in text
    assert '| 16,384 | 4 | 655,360 | 327,680 | 2 |' in text
    assert 'Sparse is faster from 8,192 tokens on: missed at 8,192 (0.80).' in text
    assert 'faster from 8,192 tokens on: met' in '\n'.join(training_speed.make_tables(rows[2:]))


def test_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Worker:
        """A worker in this process that measures shortly."""

        def __init__(self, environment: Any) -> None:
            self.alive = True

        def measure(self, case: runner.Case, seconds: float) -> runner.Case:
            call, _ = training_speed.make_call(case)
            return {'forward_ms': 1.0, **call.facts()}

        def stop(self) -> None: ...

    monkeypatch.setattr(runner, 'Worker', Worker)
    (tmp_path / 'text').write_bytes(bytes(range(256)) * 20)
    flags = ['--device', 'cpu', '--commit', 'abc', '--data', str(tmp_path / 'text'), '--out', str(tmp_path)]
    flags += ['--lengths', '48,96', '--tokens', '192', '--', '--preset', 'cpu', '--dim', '32']
    monkeypatch.setattr(sys, 'argv', ['training_speed', *flags])
    training_speed.main()
    (text,) = tmp_path.glob('cpu/training.md')
    rows = json.loads(text.with_suffix('.json').read_text())['rows']
    assert [(case['shape'], case['backend']) for case in rows] == [
        ('48 tokens', 'sparse'), ('48 tokens', 'dense'), ('96 tokens', 'sparse'), ('96 tokens', 'dense'),
    ]  # fmt: skip
    assert all(2 < case['loss'] < 8 for case in rows)
    assert [(case['attention'] or '').split(' ')[0] for case in rows] == ['eager', ''] * 2
    assert text.with_suffix('.png').exists()


@pytest.mark.parametrize('flags', [['--attention', 'dense'], ['--seq-len', '64'], ['--batch', '2']])
def test_flags_that_options_decide_are_refused(flags: list[str], monkeypatch: pytest.MonkeyPatch):
    """Here and in the decode benchmark, which both measure sparse and dense models."""
    monkeypatch.setattr('sys.argv', ['training_speed', '--', *flags])
    with pytest.raises(SystemExit, match=rf'^training_speed: {flags[0]} {flags[1]}: must not be given after --; --'):
        training_speed.main()
    if flags[0] == '--attention':
        monkeypatch.setattr('sys.argv', ['decode', '--what', 'generate', '--', *flags])
        with pytest.raises(SystemExit, match=r'^decode: --attention dense: must not be given after --; this script'):
            decode.main()
