"""A planted fault, the place in the package that it names, a copy of the package with it, and a run of tests there."""

from __future__ import annotations

import ast
import importlib
import multiprocessing
import os
import re
import shutil
import sys
import traceback
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path('native_sparse_attention')
CRASHED = 70  # exit code of a process whose tests did not end
COPIED = ('native_sparse_attention', 'tests', 'pyproject.toml')


class Fault(NamedTuple):
    """Replacement of `old` by `new` in `function` of `file` of the ops ('': anywhere). tests: files of tests/kernels.

    `old` is found by its tokens, which occur once in the function: line breaks, indentation and comments do not matter.
    """

    name: str
    file: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...]


def copy_package(directory: Path) -> None:
    for name in COPIED:
        source, target = ROOT / name, directory / name
        if source.is_dir():
            shutil.copytree(source, target)  # bytecode too, which is as old as its source
        else:
            shutil.copy(source, target)


# Names keep their attributes: `tl.load` is one token.
TOKEN = re.compile(r"""#.*|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[\w.]*\w|\*\*=?|//=?|[-+*/%&|^@<>=!]=|->|\S""")


@cache
def tokens_of(text: str) -> list[re.Match[str]]:
    return [token for token in TOKEN.finditer(text) if not token[0].startswith('#')]


def lines_of(text: str, function: str) -> range:
    """Return the line numbers of a function, which may be a method (`Class.method`)."""
    if not function:
        return range(1, text.count('\n') + 2)
    body: list[ast.stmt] = ast.parse(text).body
    *outer, name = function.split('.')
    for part in outer:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == part)
    node = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == name)
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def plant(text: str, fault: Fault) -> str:
    """Return the text of a file with the fault in it. Raise ValueError where its place is not found once."""
    try:
        lines = lines_of(text, fault.function)
    except StopIteration:
        raise ValueError(f'{fault.name}: {fault.file} has no function {fault.function}') from None
    tokens, old = tokens_of(text), [token[0] for token in tokens_of(fault.old)]
    found = [
        (tokens[i].start(), tokens[i + len(old) - 1].end())
        for i in range(len(tokens) - len(old) + 1)
        if [token[0] for token in tokens[i : i + len(old)]] == old
        and text.count('\n', 0, tokens[i].start()) + 1 in lines
    ]
    if len(found) != 1:
        raise ValueError(f'{fault.name}: {fault.function} of {fault.file} has {len(found)} times: {fault.old}')
    start, end = found[0]
    return text[:start] + fault.new + text[end:]


def with_fault(fault: Fault) -> str:
    return plant((ROOT / PACKAGE / 'ops' / fault.file).read_text(), fault)


def import_libraries() -> None:
    """Import libraries that take seconds, but neither the package nor its tests."""
    os.environ.update(OMP_NUM_THREADS='1', TRITON_INTERPRET='1', CUDA_VISIBLE_DEVICES='')
    for module in ('torch._dynamo', 'triton.runtime.interpreter', 'einops'):
        importlib.import_module(module)


def run_tests(tests: tuple[str, ...], directory: Path) -> tuple[int, str]:
    """Return the exit code of pytest and what it printed. The forked process has the libraries imported."""
    printed = directory / 'printed.txt'
    process = multiprocessing.get_context('fork').Process(target=run_pytest, args=(tests, directory, printed))
    process.start()
    process.join()
    return process.exitcode or 0, printed.read_text()


def run_pytest(tests: tuple[str, ...], directory: Path, printed: Path) -> None:
    with printed.open('w') as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.chdir(directory)
    sys.path[:] = [str(directory), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.split('.')[0] == 'tests']:
        del sys.modules[name]
    code = CRASHED
    try:
        files = [f'tests/kernels/{name}' for name in tests]
        code = pytest.main(['--full', '-x', '-q', '--tb=line', '-p', 'no:cacheprovider', *files])
        for name in ('native_sparse_attention', 'tests.support.harness'):
            found = sys.modules[name].__file__ or ''
            assert found.startswith(str(directory)), found
    except BaseException:
        code = CRASHED
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
