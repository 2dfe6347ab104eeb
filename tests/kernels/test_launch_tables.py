"""Every entry of a launch table is used by a problem of the GPU tests; nothing is launched here."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch

from native_sparse_attention import ops
from native_sparse_attention.ops._triton.launch import launch
from tests.gpu.test_rules import BACKEND, Entry, block_sizes_for, every_entry, problems_for, selection_at, take_settings
from tests.support.gpu_problems import choose


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in pkgutil.walk_packages(ops.__path__, f'{ops.__name__}.'):
        module: Any = importlib.import_module(found.name)
        if getattr(module, 'launch', None) is launch:
            monkeypatch.setattr(module, 'launch', lambda *args, **others: None)


@pytest.mark.quick
@pytest.mark.parametrize('entry', every_entry(), ids=str)
@pytest.mark.usefixtures('nothing_runs')
def test_settings_are_taken(entry: Entry, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = take_settings(entry, device, monkeypatch)
    _, itemsize, head_dim = entry.key
    dtype = torch.bfloat16 if itemsize == 2 else torch.float32

    def takes(asked: list[Any]) -> bool:
        return any(sizes == [itemsize, head_dim] for _, *sizes in asked)

    for size in block_sizes_for(entry):
        for problem in problems_for(entry.module, head_dim, dtype, device, size):
            problem.run(BACKEND, problem.draw_grads(torch.Generator(device).manual_seed(1)))
            if takes(asked):
                return
    if 'block_selection' in entry.module:
        choose(BACKEND, *selection_at(head_dim, dtype, 0, device))
    assert takes(asked), f'no problem takes settings from {entry.table}'
