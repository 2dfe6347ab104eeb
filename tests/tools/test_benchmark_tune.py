"""benchmarks/tune.py: rows of every table are found, left out and rewritten."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

pytest.importorskip('triton')

from benchmarks import tune
from native_sparse_attention.ops._triton.launch import Settings

TABLES = tune.find_tables()


@pytest.mark.parametrize('table', TABLES)
def test_rows_are_rewritten(table: str) -> None:
    module, name = TABLES[table]
    text = Path(str(module.__file__)).read_text()
    rows = {(2, 64): Settings(1, 2, 3, 4), (8, 256): Settings(5, 6, 7, 8)}
    source: dict[str, object] = {}
    exec(compile(tune.rewrite(text, name, 'sm90', rows), table, 'exec'), source)
    expected = {('sm90', *key): settings for key, settings in rows.items()}
    assert source[name] == getattr(module, name) | expected


def test_a_table_without_a_row_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(device='cpu')
    assert tune.tune('selected_attention.BLOCK_SHORT', 4, 256, options, tune.Pool(0)) is None
    assert capsys.readouterr().out.startswith('selected_attention.BLOCK_SHORT: no launch settings')


@pytest.mark.parametrize('table', TABLES)
def test_every_table_has_a_workload(table: str) -> None:
    assert table.split('.')[0] in tune.OPS


@pytest.mark.parametrize('table', [name for name in TABLES if name.startswith(('block_mass', 'block_divergence'))])
def test_tables_of_the_loss_are_looked_up(table: str) -> None:
    """Its forward, or its backward alone, asks for each of them."""
    phases = tune.make_phases(table, 4, 64, 'cpu')
    assert phases
    assert all(t.isfinite().all() for phase in phases for t in phase())
