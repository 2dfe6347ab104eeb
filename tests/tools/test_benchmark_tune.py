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
