"""Gates for the tests of attentions that differentiate them, and the comparison with eager, which does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention.ops import gated_sum
from native_sparse_attention.testing import assert_matches, outputs_and_gradients
from tests.support.harness import Tensors, fence

KINDS = ('above 0', 'some 0', 'any')
every_kind = pytest.mark.parametrize('kind', KINDS)
every_dtype = pytest.mark.parametrize('dtype', [torch.float32, torch.float16])

# Gates per head, by the mode of a call: '' has three branches, the others are merged.
NUM_GATES = {'': 3, 'gate': 1, 'output gate': 2}


def make_gate(q: Tensor, kind: str = 'any', dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a gate `[B, T, HQ]`. 'any': positive, 0 and negative among the heads of a query."""
    gate = torch.rand(q.shape[:3]) * 0.98 + 0.01
    chance = torch.rand(q.shape[:3])
    if kind != 'above 0':
        gate = gate.masked_fill(chance < 0.3, 0)
    if kind == 'any':
        gate = torch.where(chance > 0.6, -gate, gate)
    return fence(gate.to(q.device, dtype))


def multiplied(op: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return gate * output of an attention, and its log-sum-exp, which has no gradient. With Triton the attention takes
    the gate and `gated_sum` multiplies by it; with eager the product is taken outside.
    """

    def attend(gate: Tensor, backend: str, **arguments: Any) -> tuple[Tensor, Tensor]:
        if backend == 'eager':
            out, lse = op(**arguments, backend=backend)
            return (gate[..., None] * out).to(out.dtype), lse.detach()
        out, lse = op(**arguments, gate=gate, backend=backend)
        assert out.requires_grad or not torch.is_grad_enabled()
        assert not lse.requires_grad
        gates = torch.stack((gate, *[torch.zeros_like(gate)] * 2), -1)
        return gated_sum(gates, out, *[torch.zeros_like(out)] * 2, gate_in_attention=True, backend=backend), lse

    return attend


def assert_rules(op: Callable[..., tuple[Tensor, Tensor]], tensors: Tensors, **settings: Any) -> None:
    """Assert output, log-sum-exp and gradients of gate * output by the error rules. tensors: the gate among them."""

    def run(backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        cast = {n: t.to(dtype) if dtype is not None and t.is_floating_point() else t for n, t in tensors.items()}
        return outputs_and_gradients(lambda **t: multiplied(op)(**t, **settings, backend=backend), cast, grads)

    q, v = (tensors[name] for name in 'qv')
    grads = [torch.randn(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)]
    grads.append(torch.zeros(q.shape[0], q.shape[2], q.shape[1], device=q.device))
    result, same_dtype, gold = run('triton'), run('eager'), run('eager', torch.float64)
    for name, t in result.items():
        # The gradient of a gate carries the roundings of dout and of the output.
        dtype = q.dtype if name == 'grad of gate' else None
        assert_matches(t, gold[name], same_dtype[name], name=name, row_dims=0 if name == 'out1' else 1, dtype=dtype)
