"""Kernel tests run on poisoned memory and, without a GPU, in Triton's interpreter with strict checks."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.support.pairwise import choose_pairs

FOLDER = Path(__file__).parent

if importlib.util.find_spec('triton') is None:
    collect_ignore_glob = ['test_*.py']


def parameters_of(case: pytest.Function) -> dict[str, str]:
    """Return the values of a case by decorator: rows that one decorator lists are values of one parameter."""
    values = dict(case.callspec.params) if hasattr(case, 'callspec') else {}
    parameters = {}
    for mark in case.iter_markers('parametrize'):
        names = mark.args[0]
        names = [name.strip() for name in names.split(',')] if isinstance(names, str) else names
        parameters[' '.join(names)] = repr([values.pop(name) for name in names])
    return parameters | {name: repr(value) for name, value in values.items()}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark `full` what the quick run leaves out here: all but the first case, with each design, of tests marked quick.
    Mark `combination` what the full run leaves out: cases whose pairs of parameters occur in other cases.
    """
    tests: dict[Any, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.path.parent == FOLDER and not item.get_closest_marker('slow'):
            tests[item.path, item.originalname].append(item)
    for cases in tests.values():
        parameters = [parameters_of(case) for case in cases]
        designs = [values.get('kernels') for values in parameters]
        first = {designs.index(design) for design in designs}
        chosen = choose_pairs(parameters, first)
        for position, case in enumerate(cases):
            if position not in first or not case.get_closest_marker('quick'):
                case.add_marker('full')
            if position not in chosen:
                case.add_marker('combination')


@pytest.fixture(autouse=True)
def treacherous_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Poison memory, except in tests marked `plain_memory`; with watched=False accesses outside the tensors are not
    reported.
    """
    from tests.support.harness import poisoned_allocations, strict_interpreter

    plain = request.node.get_closest_marker('plain_memory')
    with ExitStack() as stack:
        if plain is None:
            stack.enter_context(poisoned_allocations())
        if plain is None or plain.kwargs.get('watched', True):
            stack.enter_context(strict_interpreter())
        yield


@pytest.fixture
def described(device: Any, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Record the tensors that attention describes for the tensor memory accelerator, as if there were one."""
    from native_sparse_attention.ops._triton import launch
    from native_sparse_attention.ops._triton.interval import keys
    from native_sparse_attention.ops._triton.interval import op as interval
    from native_sparse_attention.ops.block_selection.triton import select
    from native_sparse_attention.ops.selected_attention.triton import plan as selected

    found = []

    def watch(describe: Any) -> Any:
        def watched(tensor: Tensor, *sizes: int) -> Any:
            result = describe(tensor, *sizes)
            found.extend([tensor] * (result is not None))
            return result

        return watched

    monkeypatch.setattr(launch, 'WITH_TILES', (launch.architecture_of(device),))
    for op in (interval, keys, selected):
        monkeypatch.setattr(op, 'describe_tiles', watch(launch.describe_tiles))
    monkeypatch.setattr(select, 'describe_rows', watch(launch.describe_rows))
    return found
