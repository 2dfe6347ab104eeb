"""Memory and copies of `context_parallel_nsa` beside those of the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.live_bytes import LiveBytes
from tests.support.processes import run_processes

pytest.importorskip('torch.distributed.fsdp', exc_type=ImportError)

from native_sparse_attention.distributed import context_attention, context_parallel_nsa
from native_sparse_attention.distributed.sequence import gather


class Attend(torch.autograd.Function):
    """Save tensors of the sizes that the kernels save in bfloat16: three outputs, and low bits of one of them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        outs = [torch.ones(q.shape) for _ in range(4)]
        ctx.save_for_backward(q, k, v, gates, *outs)
        return torch.full(q.shape, 3.0)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        inputs = ctx.saved_tensors[:4]
        return tuple(torch.full(t.shape, 2.0) for t in inputs)


def attend(q: Tensor, k: Tensor, v: Tensor, k_cmp: Tensor, v_cmp: Tensor, gates: Tensor, **_: Any) -> Tensor:
    return Attend.apply(q, k, v, gates) if q.shape[1] else q  # type: ignore[return-value]


def mean(blocks: Tensor) -> Tensor:
    return blocks.mean(-2)


def count_bytes() -> None:
    sizes = {'q': (64, 64), 'k': (4, 64), 'v': (4, 64), 'gates': (64, 3)}
    tokens = {name: torch.ones(1, 256, *size).requires_grad_() for name, size in sizes.items()}
    dout = torch.ones(tokens['q'].shape)
    settings: dict[str, Any] = {'compress_k': mean, 'compress_v': mean, 'compress_block_size': 32}
    settings |= {'compress_stride': 16, 'selection_block_size': 64, 'num_selected': 2, 'window_size': (31, 0)}
    settings['group'] = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch, LiveBytes(*tokens.values(), dout) as counted:
        patch.setattr(context_attention, 'nsa', attend)
        out = context_parallel_nsa(**tokens, **settings)
        grads = torch.autograd.grad(out, list(tokens.values()), dout)
    assert (out == 3).all()
    assert (grads[0] == 2).all()
    assert (grads[3] == 2).all()
    unit = dout.numel() * dout.element_size()
    # q, out, dout and the four saved tensors are 7 units, and the half of q that is received is another half. Pieces of
    # a KV head and its messages take 0.4, keys, values and gates 0.4. The rest is for messages that gloo frees late.
    assert counted.peak < 8.7 * unit
    # Gradients of q, the output, and the half of dout that is sent: 2.5 units. The rest is of keys and values.
    assert counted.copied < 4 * unit


def gather_unequal_shards() -> None:
    """Shards of 6 tokens and 1, and of 6 and none: gathered keys take the memory of their tokens alone."""
    for length in (1, 0):
        held = ((range(6),), (range(6, 6 + length),))
        tokens = torch.arange(6.0 + length).view(1, -1, 1, 1)
        (keys,) = gather([tokens.split([6, length], 1)[dist.get_rank()]], dist.group.WORLD, held)
        assert keys.flatten().tolist() == list(range(6 + length))
        assert keys.untyped_storage().nbytes() == keys.nbytes


def test_no_padding_is_kept(tmp_path: Path) -> None:
    run_processes(gather_unequal_shards, 2, tmp_path)


def test_few_tensors_exist(tmp_path: Path) -> None:
    run_processes(count_bytes, 2, tmp_path)
