"""Gated sum of the three branches (equation 5 of arXiv 2502.11089)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.core.autocast import without_autocast
from native_sparse_attention.core.backend import Candidates, resolver, without_gate
from native_sparse_attention.core.checks import check_flags, check_gate, check_same_kind, check_tensors
from native_sparse_attention.ops._triton import support


def gated_sum(
    gates: Tensor,
    out_compressed: Tensor,
    out_selected: Tensor,
    out_window: Tensor,
    *,
    gate_in_attention: bool = False,
    backend: str = 'auto',
) -> Tensor:
    """Return the gated sum of the three branches (equation 5 of arXiv 2502.11089).

    It is gates[..., 0] * out_compressed + gates[..., 1] * out_selected + gates[..., 2] * out_window.

    Args:
        gates: `[B, T, HQ, 3]` after the sigmoid, any floating dtype; float32 inside (float64 for float64 outputs).
        out_compressed: `[B, T, HQ, DV]` output of the compressed branch.
        out_selected: `[B, T, HQ, DV]` output of the selected branch, in the same dtype.
        out_window: `[B, T, HQ, DV]` output of the window branch, in the same dtype.
        gate_in_attention: the attention ops received these gates as `gate` and differentiate the products. The outputs
            receive the gradient of the sum unchanged, and the gates receive none from here. Triton only.
        backend: 'auto', 'triton' or 'eager'.

    Returns:
        `[B, T, HQ, DV]` in the dtype of the branches.

    Raises:
        ValueError: shapes or dtypes do not fit, or an explicit backend does not support the call.
    """
    check_tensors(out_compressed=out_compressed, out_selected=out_selected, out_window=out_window)
    shape = out_compressed.shape
    if len(shape) != 4:
        raise ValueError(f'out_compressed has shape {tuple(shape)}, but must have 4 dimensions (B, T, HQ, DV)')
    check_same_kind(out_compressed=out_compressed, out_selected=out_selected, out_window=out_window)
    for name, tensor in (('out_selected', out_selected), ('out_window', out_window)):
        if tensor.shape != shape:
            raise ValueError(f'{name} has shape {tuple(tensor.shape)}, but out_compressed has {tuple(shape)}')
    check_gates(gates, out_compressed)
    check_flags(gate_in_attention=gate_in_attention)
    choice = backend_of(gates, out_compressed, gate_in_attention=gate_in_attention, backend=backend)
    return add(
        gates, out_compressed, out_selected, out_window, gate_in_attention=gate_in_attention, backend=choice.name
    )


def add(
    gates: Tensor,
    out_compressed: Tensor,
    out_selected: Tensor,
    out_window: Tensor,
    *,
    gate_in_attention: bool,
    backend: str,
) -> Tensor:
    """Run `gated_sum` with checked arguments on a resolved backend."""
    arguments: Any = (gates, out_compressed, out_selected, out_window)
    match backend:
        case 'triton':
            from native_sparse_attention.ops.gated_sum import triton as ops

            arguments = (*arguments, gate_in_attention)
        case _:
            from native_sparse_attention.ops.gated_sum import eager as ops
    return ops.gated_sum(*arguments)


def candidates(gates: Tensor, out: Tensor, *, gate_in_attention: bool = False, backend: str = 'auto') -> Candidates:
    """Return the candidates for these inputs. out: output of one of the branches."""
    return {'triton': partial(_unsupported, gates, out), 'eager': without_gate(gates if gate_in_attention else None)}


backend_of = resolver('gated_sum', candidates)


def _unsupported(gates: Tensor, out: Tensor) -> str | None:
    """Return the reason why Triton does not support this call, or None."""
    if gates.dtype == torch.float64:
        return f'gates has dtype {gates.dtype}, but its kernels compute in float32'
    return support.unsupported(out, name='out_compressed')


def check_gates(gates: Tensor, q: Tensor) -> None:
    check_gate('gates', gates, (*q.shape[:3], 3), '(B, T, HQ, 3)', q)


def stack_gates(gates: Tensor | Sequence[Tensor | None], q: Tensor) -> tuple[Tensor, tuple[bool, bool, bool]]:
    """Gates as `gated_sum` takes them, of such or of a triple of `[B, T, HQ]` and None, whose gates are 0; and which
    branches have a gate.
    """
    if isinstance(gates, Tensor):
        check_gates(gates, q)
        return gates, (True, True, True)
    if not isinstance(gates, (tuple, list)) or len(gates) != 3:
        kind = f'{len(gates)} gates' if isinstance(gates, (tuple, list)) else type(gates).__name__
        raise ValueError(f'gates is {kind}, but must be a tensor or 3 gates: of compressed, selected and window branch')
    for index, gate in enumerate(gates):
        if gate is not None:
            check_gate(f'gates[{index}]', gate, tuple(q.shape[:3]), '(B, T, HQ)', q)
    compressed, selected, window = gates
    zeros = next((torch.zeros_like(gate) for gate in gates if gate is not None), None)
    if zeros is None:
        raise ValueError('gates is None for every branch, but must be a gate for at least one')
    with without_autocast(q):  # `torch.stack` under autocast raises for the half type that is not autocast's
        stacked = torch.stack([zeros if gate is None else gate for gate in gates], -1)
    return stacked, (compressed is not None, selected is not None, window is not None)
