"""PyTorch's own `context_parallel` is refused: sparse attention would read the shard of its rank alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed import init_device_mesh

from native_sparse_attention.transformer import Transformer
from tests.support.processes import run_processes
from tests.support.sharded_models import make_ids, make_model


def call_inside() -> None:
    experimental = pytest.importorskip('torch.distributed.tensor.experimental')
    models: list[Transformer] = [make_model('separate'), make_model('merged'), make_model('dense')]
    mesh, ids = init_device_mesh('cpu', (1,)), make_ids(1)
    for model in models:
        expected = model(ids)
        with (
            experimental.context_parallel(mesh, buffers=[torch.zeros(1, 32)], buffer_seq_dims=[1]),
            pytest.raises(ValueError, match="inside PyTorch's context_parallel, but must not be"),
        ):
            model(ids)
        assert torch.equal(model(ids), expected)


@pytest.mark.full
def test_it_is_refused(tmp_path: Path) -> None:
    run_processes(call_inside, 1, tmp_path)
