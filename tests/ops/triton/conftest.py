"""Kernels are tested in memory full of junk and, where there is no GPU, in Triton's interpreter at its strictest."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

if importlib.util.find_spec('triton') is None:
    collect_ignore_glob = ['test_*.py']


@pytest.fixture(autouse=True)
def treacherous_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """For all but the tests marked `plain_memory`."""
    if request.node.get_closest_marker('plain_memory'):
        yield
        return
    from tests.ops.triton.harness import poisoned_allocations, strict_interpreter

    with poisoned_allocations(), strict_interpreter():
        yield
