"""Norms of queries and keys with rotary embedding: one kernel, and PyTorch's RMSNorm before the kernel of rotary.

python -m benchmarks.norm_rotary             4 x 16,384 tokens, 8/4 heads of 64, and 65,536 tokens, 64/4 heads of 128

Queries and keys are slices of one projection. Each is written with and without rotary embedding, as the merged mode of
the layer reads them. The last lines are a layer in merged mode, forward and backward, whose norms are fused or called.
Each part is replayed as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.block_loss import SHAPES, SIZES, measure
from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.heads import HeadNorm
from native_sparse_attention.nn.rotary import Tables, angle_tables, rotated_and_plain
from native_sparse_attention.ops.rotary import norm_rotary

BACKEND = 'triton'
DIM = 512


def fused(x: Tensor, norm: HeadNorm, tables: Tables) -> tuple[Tensor, ...]:
    assert norm.eps is not None
    return norm_rotary(x, norm.weight, 1, 1, tables, eps=norm.eps, backend=BACKEND)


def called(x: Tensor, norm: HeadNorm, tables: Tables) -> tuple[Tensor, ...]:
    return rotated_and_plain(tables, BACKEND, norm(x), 1, 1)


METHODS: dict[str, Callable[[Tensor, HeadNorm, Tables], tuple[Tensor, ...]]] = {'fused': fused, 'called': called}


def make_parts(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Return functions that run a pass, by names that start with the method."""
    batch, seqlen, heads, kv_heads, dim = shape
    sizes = (heads * dim, kv_heads * dim, kv_heads * dim)
    projected = torch.randn(batch, seqlen, sum(sizes), dtype=dtype, device=device)
    slices = [t.unflatten(-1, (-1, dim)).requires_grad_() for t in projected.split(sizes, -1)[:2]]
    norms = [HeadNorm(dim).to(device) for _ in slices]
    freqs = 10000 ** -torch.linspace(0, 1, dim // 2, device=device)
    tables = angle_tables(torch.arange(seqlen, device=device)[None], freqs)
    leaves = [*slices, *(norm.weight for norm in norms)]
    grads = [torch.randn(t.shape, dtype=dtype, device=device) for t in slices for _ in range(2)]

    def forward(method: str) -> list[Tensor]:
        return [out for t, norm in zip(slices, norms, strict=True) for out in METHODS[method](t, norm, tables)]

    def both(method: str) -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(method), leaves, grads)

    passes = {'forward': forward, 'forward and backward': both}
    return {f'{method}, {name}': partial(run, method) for method in METHODS for name, run in passes.items()}


def make_layers(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Return forward and backward of a layer under autocast, by method."""
    batch, seqlen, heads, kv_heads, dim = shape
    layer = SparseAttention(
        *(DIM, dim, heads, 512, SIZES['compress_block_size'], SIZES['compress_stride']),
        *(SIZES['selection_block_size'], 16),
        kv_heads=kv_heads,
        causal=True,
        merge_window=True,
        qk_norm=True,
        backend=BACKEND,
    ).to(device)
    x = torch.randn(batch, seqlen, DIM, device=device, requires_grad=True)
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]

    def run(method: str) -> tuple[Tensor, ...]:
        # A norm with a hook is called.
        norms = [layer.q_norm, layer.k_norm] if method == 'called' else []
        hooks = [norm.register_forward_hook(lambda *_: None) for norm in norms if norm is not None]
        with torch.autocast(device, dtype):
            out = layer(x)
        for hook in hooks:
            hook.remove()
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    return {f'{method}, layer forward and backward': partial(run, method) for method in METHODS}


if __name__ == '__main__':
    print(f'{torch.cuda.get_device_name()}, torch {torch.__version__}')
    print('B, T, HQ, H, D; part: ms, GiB')
    for case in SHAPES:
        parts = make_parts(case, 'cuda', torch.bfloat16) | make_layers(case, 'cuda', torch.bfloat16)
        for part_name, part in parts.items():
            print(f'{case}; {part_name}: ' + '{:.3f}, {:.2f}'.format(*measure(part)), flush=True)
