"""Autocast to a half type over weights, caches and tensors of the other one, which PyTorch does not concatenate."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention import SparseAttention, nsa, ops
from native_sparse_attention.losses import block_score_loss
from native_sparse_attention.nn.dense import DenseAttention
from native_sparse_attention.ops._triton import support

HALVES = (torch.bfloat16, torch.float16)
LAYERS: dict[str, dict[str, Any]] = {
    'separate': {'use_diff_topk': True, 'qk_norm': True},
    'merged': {'merge_window': True, 'output_gate': True, 'select_before_window': True, 'num_sinks': 1},
    'scores alone': {'merge_window': True, 'compressed_output': False, 'use_diff_topk': True},
    'branches': {'independent_branch_kv': True, 'recompute': True},
    'dense': {'output_gate': True, 'qk_norm': True},
}
BLOCKS: dict[str, Any] = {'compress_block_size': 4, 'compress_stride': 2, 'selection_block_size': 4}
SETTINGS: dict[str, Any] = {'num_selected': 4, 'window_size': (7, 0), **BLOCKS}

every_dtype = pytest.mark.parametrize('dtype', [*HALVES, torch.float32], ids=str)
every_autocast = pytest.mark.parametrize('autocast', HALVES, ids=str)


def make_layer(kind: str) -> SparseAttention | DenseAttention:
    torch.manual_seed(0)
    if kind == 'dense':
        return DenseAttention(16, 4, 4, 2, **LAYERS[kind])
    return SparseAttention(16, 4, 4, 8, 4, 2, 4, 5, 2, causal=True, **LAYERS[kind])


def relative_error(found: Tensor, gold: Tensor) -> float:
    return ((found.float() - gold).norm() / gold.norm()).item()


@pytest.mark.parametrize('kind', LAYERS)
@every_dtype
@every_autocast
def test_weights_of_any_type(autocast: torch.dtype, dtype: torch.dtype, kind: str) -> None:
    gold, x = make_layer(kind), torch.randn(2, 21, 16)
    layer = deepcopy(gold).to(dtype)
    has_loss = kind not in ('dense', 'branches')
    with torch.autocast('cpu', autocast):
        out, *loss = layer(x.to(dtype), return_block_loss=True) if has_loss else (layer(x.to(dtype)),)
    assert out.dtype == autocast
    assert relative_error(out, gold(x)) < 0.03
    torch.stack([out.float().sum(), *loss]).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize('kind', LAYERS)
@every_dtype
@every_autocast
@torch.no_grad()
def test_caches_of_any_type(autocast: torch.dtype, dtype: torch.dtype, kind: str) -> None:
    gold, x = make_layer(kind).eval(), torch.randn(2, 21, 16)
    layer, cache = deepcopy(gold).bfloat16(), gold.init_cache(2, 21, dtype=dtype)
    with torch.autocast('cpu', autocast):
        out = torch.cat([layer(part, cache=cache) for part in x.bfloat16().split([9, 1, 1, 10], 1)], 1)
    assert relative_error(out, gold(x)) < 0.03


def make_tensors(dtype: torch.dtype) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """Return q, k, v and compressed keys, and memory pairs."""
    sizes = ((21, 4), (21, 2), (21, 2), (9, 2))
    memory = (torch.randn(2, 1, 8, dtype=dtype), torch.randn(2, 1, 8, dtype=dtype))
    return [torch.randn(2, *size, 8, dtype=dtype) for size in sizes], memory


def assert_same_under(autocast: torch.dtype, results: Callable[[], list[Tensor]]) -> None:
    expected = results()
    with torch.autocast('cpu', autocast):
        found = results()
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


@every_dtype
@every_autocast
def test_tensors_of_any_type(autocast: torch.dtype, dtype: torch.dtype) -> None:
    (q, k, v, pairs), memory = make_tensors(dtype)
    gates = tuple(torch.rand(2, 21, 4).to(kind) for kind in (dtype, *HALVES))
    cos, sin = torch.rand(2, 1, 21, 3)

    def results() -> list[Tensor]:
        settings: dict[str, Any] = {'mem_kv': memory, **SETTINGS}
        return [
            *(nsa(q, k, v, pairs, pairs, gates, backend=backend, **settings) for backend in ('eager', 'flex')),
            block_score_loss(q, k, q, pairs, seed=0, **BLOCKS),
            *(ops.rotary(q, cos, sin, layout=layout) for layout in ('interleaved', 'half')),
        ]

    assert_same_under(autocast, results)


@pytest.mark.parametrize('num_gates', [1, 2])
@every_dtype
@every_autocast
def test_merged_mode_with_gates_of_any_type(autocast: torch.dtype, dtype: torch.dtype, num_gates: int) -> None:
    (q, k, v, pairs), memory = make_tensors(dtype)
    gates = [torch.rand(2, 21, 4, num_gates).to(kind) for kind in (dtype, *HALVES)]

    def results() -> list[Tensor]:
        settings: dict[str, Any] = {'merge_window': True, 'mem_kv': memory, 'backend': 'eager', **SETTINGS}
        return [nsa(q, k, v, pairs, pairs, gate, **settings) for gate in gates]

    assert_same_under(autocast, results)


@pytest.mark.skipif(
    importlib.util.find_spec('triton') is None or not support.is_interpreted(), reason="needs Triton's interpreter"
)
@every_autocast
def test_kernels_with_float16(autocast: torch.dtype) -> None:
    """The interpreter does not compute bfloat16."""
    (q, k, v, pairs), memory = make_tensors(torch.float16)
    gates, merged_gates = torch.rand(2, 21, 4, 3).half(), torch.rand(2, 21, 4, 1).half()

    def results() -> list[Tensor]:
        settings: dict[str, Any] = {'mem_kv': memory, 'backend': 'triton', **SETTINGS}
        sizes: dict[str, Any] = {'block_size': 4, 'stride': 2, 'mem_kv': memory, 'backend': 'triton'}
        return [
            *ops.compressed_attention(q, pairs, pairs, **sizes),
            nsa(q, k, v, pairs, pairs, gates, **settings),
            nsa(q, k, v, pairs, pairs, merged_gates, merge_window=True, **settings),
        ]

    assert_same_under(autocast, results)
