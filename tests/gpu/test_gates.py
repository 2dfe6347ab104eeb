"""Gates inside the attentions on a GPU, in every design, by the error rules.

python -m pytest -m gpu -n 16 tests/gpu/test_gates.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention.ops import compressed_attention, selected_attention, window_attention
from native_sparse_attention.testing import make_qkv

harness = pytest.importorskip('tests.support.harness', reason='triton is not installed')
gate_problems = pytest.importorskip('tests.support.gate_problems')
designs = pytest.importorskip('tests.gpu.test_selected_features')

pytestmark = pytest.mark.gpu

SEQLEN = 700
every_kind = pytest.mark.parametrize('kind', gate_problems.KINDS)


@pytest.fixture(autouse=True)
def shared_gpu() -> Iterator[None]:
    """Leave free GPU memory to other test processes."""
    yield
    torch.cuda.empty_cache()


def assert_rules(op: Callable[..., Any], tensors: dict[str, Tensor], kind: str, **settings: Any) -> None:
    """Assert the rules in memory filled with NaN; a gate is one of three neighbours in memory, in the dtype of q."""
    gates = torch.stack([gate_problems.make_gate(tensors['q'], kind) for _ in range(3)], -1)
    with harness.poisoned_allocations():
        gate_problems.assert_rules(op, tensors | {'gate': gates.to(tensors['q'].dtype)[..., 1]}, **settings)


def compress(mem_k: Tensor, mem_v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    return compressed_attention(**arguments, block_size=32, stride=16, mem_kv=(mem_k, mem_v))


@designs.half_types
@every_kind
@pytest.mark.parametrize('head_dim', [64, 128, 256])
@pytest.mark.parametrize('group', [1, 16])
def test_windows(group: int, head_dim: int, kind: str, dtype: torch.dtype, device: torch.device):
    shape: dict[str, Any] = {'heads': 2 * group, 'kv_heads': 2, 'head_dim': head_dim, 'dtype': dtype, 'device': device}
    tensors = dict(zip('qkv', make_qkv(1, SEQLEN, SEQLEN, **shape), strict=True))
    assert_rules(window_attention, tensors, kind, window_size=(200, 0))


@designs.half_types
@every_kind
@pytest.mark.parametrize('head_dim', [64, 128, 256])
@pytest.mark.parametrize('packed', [False, True], ids=['whole', 'packed'])
def test_compressed(packed: bool, head_dim: int, kind: str, dtype: torch.dtype, device: torch.device):
    shape: dict[str, Any] = {'heads': 16, 'kv_heads': 1, 'head_dim': head_dim, 'dtype': dtype, 'device': device}
    borders = torch.tensor([0, 300, 300, SEQLEN - 5], dtype=torch.int32, device=device)
    where = {'cu_seqlens': borders} if packed else {}
    q, k_cmp, v_cmp = make_qkv(1, SEQLEN, (SEQLEN - 32) // 16 + 1, **shape)
    memory = torch.randn(2, 1, 3, head_dim, dtype=dtype, device=device).unbind()
    tensors = {'q': q, 'k_cmp': k_cmp, 'v_cmp': v_cmp, **dict(zip(('mem_k', 'mem_v'), memory, strict=True))}

    def attend(v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        return compress(v_cmp=v, **arguments)

    tensors['v'] = tensors.pop('v_cmp')
    assert_rules(attend, tensors, kind, **where)


@designs.half_types
@every_kind
@designs.designs
@pytest.mark.parametrize('head_dim', [64, 128])
def test_selected(
    head_dim: int,
    design: str,
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
):
    tensors = designs.make_tensors(design, device, monkeypatch, dtype=dtype, head_dim=head_dim)
    assert_rules(partial(selected_attention, block_size=32), tensors, kind)
