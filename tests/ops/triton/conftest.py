"""Kernels are tested in memory full of junk and, where there is no GPU, in Triton's interpreter at its strictest."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

if importlib.util.find_spec('triton') is None:
    collect_ignore_glob = ['test_*.py']


@pytest.fixture(autouse=True)
def treacherous_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """For all but the tests marked `plain_memory`; with watched=False these may even leave the tensors of a launch."""
    from tests.ops.triton.harness import poisoned_allocations, strict_interpreter

    plain = request.node.get_closest_marker('plain_memory')
    with ExitStack() as stack:
        if plain is None:
            stack.enter_context(poisoned_allocations())
        if plain is None or plain.kwargs.get('watched', True):
            stack.enter_context(strict_interpreter())
        yield
