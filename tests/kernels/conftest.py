"""Kernels are tested in memory full of junk and, where there is no GPU, in Triton's interpreter at its strictest."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

if importlib.util.find_spec('triton') is None:
    collect_ignore_glob = ['test_*.py']


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder full, but for the first case, with each design, of those marked quick."""
    seen: set[tuple[Any, ...]] = set()
    for item in items:
        if isinstance(item, pytest.Function) and item.path.parent == Path(__file__).parent:
            design = item.callspec.params.get('kernels') if hasattr(item, 'callspec') else None
            case = (item.path, item.originalname, design)
            if case in seen or not item.get_closest_marker('quick'):
                item.add_marker('full')
            seen.add(case)


@pytest.fixture(autouse=True)
def treacherous_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """For all but the tests marked `plain_memory`; with watched=False these may even leave the tensors of a launch."""
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
    """The tensors that attention has described for the tensor memory accelerator, as if there were one."""
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
