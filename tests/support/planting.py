"""A planted fault, the place in the package that it names, and a copy of the package with it."""

from __future__ import annotations

import ast
import re
import shutil
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path('native_sparse_attention')
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
