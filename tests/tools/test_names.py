"""Modules and files that texts name exist: code for other processes, commands, docstrings and pages.

Pyright checks the imports of a file, but not those in its strings.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ('native_sparse_attention', 'benchmarks', 'examples', 'tests', 'trainer')
MODULE = re.compile(rf"(?:\bfrom |\bimport |-m |'-m', ')((?:{'|'.join(FOLDERS)})(?:\.\w+)+)")
FILE = re.compile(r'(?<![\w/])((?:benchmarks|docs|examples|tests|trainer)/[\w/-]+\.(?:py|md)|test_\w+\.py)\b')
TEXTS = [
    *(path for folder in FOLDERS for path in (ROOT / folder).rglob('*.py')),
    *ROOT.glob('*.py'),
    *ROOT.glob('*.md'),
    *(ROOT / 'docs').rglob('*.md'),
    *(ROOT / name for name in ('pyproject.toml', 'Makefile', '.ci/run')),
]
TEST_FILES = {path.name for path in (ROOT / 'tests').rglob('test_*.py')}


def missing_names(text: str) -> list[str]:
    """Return the modules and files that a text names and the repository does not have."""
    modules = [name for name in MODULE.findall(text) if not is_module(name)]
    files = [name for name in FILE.findall(text) if name not in TEST_FILES and not (ROOT / name).is_file()]
    return modules + files


def is_module(name: str) -> bool:
    path = ROOT / name.replace('.', '/')
    return path.is_dir() or path.with_suffix('.py').is_file()


def test_named_modules_and_files_exist() -> None:
    assert len(TEXTS) > 200
    own = Path(__file__)
    missing = {str(path.relative_to(ROOT)): missing_names(path.read_text('utf-8')) for path in TEXTS if path != own}
    assert {path: names for path, names in missing.items() if names} == {}


@pytest.mark.parametrize(
    ('text', 'missing'),
    [
        ('from tests.ops.test_gone import run', ['tests.ops.test_gone']),
        ("[sys.executable, '-m', 'tests.support.gone']", ['tests.support.gone']),
        ('python -m benchmarks.gone', ['benchmarks.gone']),
        ('see test_gone.py and tests/tools/test_names.py', ['test_gone.py']),
        ('[the log](docs/gone.md)', ['docs/gone.md']),
        ('import native_sparse_attention.nn.attention', []),
    ],
)
def test_missing_names_are_found(text: str, missing: list[str]) -> None:
    assert missing_names(text) == missing
