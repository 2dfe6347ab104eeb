"""RMSNorm of queries or keys over the features of a head, followed by rotary embedding."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from native_sparse_attention.core.backend import BackendChoice, choose_backend, serves, transformed
from native_sparse_attention.core.checks import check_tensors
from native_sparse_attention.ops._triton import support
from native_sparse_attention.ops.rotary.api import check_input, check_layout, check_tables, unsupported

Tables = tuple[Tensor, Tensor]


def norm_rotary(
    x: Tensor,
    weight: Tensor,
    num_plain: int,
    num_rotated: int = 0,
    tables: Tables | None = None,
    *,
    eps: float,
    layout: str = 'interleaved',
    backend: str = 'auto',
) -> tuple[Tensor, ...]:
    """Return num_rotated outputs of x normalised and rotated, then num_plain outputs of x normalised.

    The normalised x is x / sqrt(mean(x ** 2) + eps) * weight, with the mean over the features of a head. The rotated
    outputs share memory, and so do the others: do not write to them. Triton reads x once for all outputs, and in the
    backward pass all gradients once, as in `shared_input`.

    Args:
        x: `[B, T, H, D]`, queries or keys.
        weight: `[D]`, any floating dtype; rounded to the dtype of x.
        num_plain: outputs without rotation.
        num_rotated: outputs with rotation, equal to those without where tables is None.
        tables: cosines and sines, as `rotary` takes them.
        eps: added to the mean of squares.
        layout: as in `rotary`.
        backend: 'auto', 'triton' or 'eager'. Triton has no second derivative.

    Returns:
        `[B, T, H, D]` each, in the dtype of x, computed in float32 (float64 for a float64 x). The normalised x is
        rounded before the rotation.

    Raises:
        ValueError: shapes or dtypes do not fit, or an explicit backend does not support the call.
    """
    check_input(x)
    check_tensors(weight=weight)
    if weight.shape != x.shape[3:]:
        raise ValueError(f'weight has shape {tuple(weight.shape)}, but must have ({x.shape[3]},)')
    if not weight.is_floating_point():
        raise ValueError(f'weight has dtype {weight.dtype}, but must be a floating dtype')
    if weight.device != x.device:
        raise ValueError(f'weight is on {weight.device}, but x is on {x.device}')
    if tables is None:
        num_plain, num_rotated = num_plain + num_rotated, 0
    else:
        check_tables(*tables, x)
    is_half = check_layout(layout=layout)
    arguments = (x, weight, tables, eps, num_plain, num_rotated, is_half)
    match backend_of(x, weight, tables, backend=backend).name:
        case 'triton':
            from native_sparse_attention.ops.rotary import triton

            return triton.norm_rotary(*arguments)
        case _:
            from native_sparse_attention.ops.rotary import eager

            return eager.norm_rotary(*arguments)


def backend_of(x: Tensor, weight: Tensor, tables: Tables | None, *, backend: str = 'auto') -> BackendChoice:
    """Return the backend that serves these inputs."""
    candidates = {'triton': partial(_unsupported, x, weight, tables), 'eager': serves}
    return choose_backend('norm_rotary', backend, x.device, candidates)


def is_fused(x: Tensor, weight: Tensor, tables: Tables | None, backend: str) -> bool:
    """Return whether the kernels compute this on a backend; where they cannot, nothing is raised."""
    if backend == 'auto':
        return backend_of(x, weight, tables).name == 'triton'
    return backend == 'triton' and transformed('triton') is None and _unsupported(x, weight, tables) is None


def _unsupported(x: Tensor, weight: Tensor, tables: Tables | None) -> str | None:
    """Return the reason why the kernels do not support a call, or None."""
    if weight.dtype not in support.DTYPES:
        return f'weight has dtype {weight.dtype}, but its kernels compute in float32'
    return support.unsupported(x, name='x') if tables is None else unsupported(x, *tables)
