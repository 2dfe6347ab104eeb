"""benchmarks/cold_start.py: measurements of a process, and the tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cold_start


@pytest.mark.parametrize('form', cold_start.FORMS)
def test_a_process(form: str) -> None:
    row = cold_start.measure(form, True, 'cpu')
    assert row['kernels'] == 0
    assert row['first_s'] > 0 < row['second_s']
    assert cold_start.measure(form, False, 'cpu')['build_s'] is None


def test_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(form: str, builds: bool, device: str) -> dict[str, Any]:
        first, build = (25.0, None) if not builds else (1.0, 14.0 if form.startswith('three') else 19.5)
        times = {'kernels': 30, 'build_s': build, 'first_s': first, 'second_s': 0.25}
        return {'form': form, 'builds': builds, **times}

    monkeypatch.setattr(cold_start, 'run', run)
    monkeypatch.setattr(sys, 'argv', ['cold_start', '--device', 'cpu', '--commit', 'abc', '--out', str(tmp_path)])
    cold_start.main()
    text = (tmp_path / 'cpu' / 'cold-start.md').read_text()
    assert '| three branches | one after the other | 30 | – | 25 | 25 | 0.25 |  |' in text
    assert '| three branches | by `build_kernels` | 30 | 14 | 1 | 15 | 0.25 |  |' in text
    assert '- three branches: at most 20 s: met' in text
    assert '- merged: at most 20 s: missed' in text


@pytest.mark.full
def test_a_failed_process_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cold_start.FORMS, 'other', 'other')
    assert 'KeyError' in cold_start.run('other', False, 'cpu')['note']
