"""Rotary position embedding (Su et al. 2021): rotate pairs of features by given angles. RMSNorm before it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from native_sparse_attention.core.backend import BackendChoice, choose_backend, serves, transformed
from native_sparse_attention.core.checks import check_tensors, shown
from native_sparse_attention.ops._triton import support

LAYOUTS = ('interleaved', 'half')

Tables = tuple[Tensor, Tensor]


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, layout: str = 'interleaved', backend: str = 'auto') -> Tensor:
    """Rotate pair i of the features of x by the angle with cosine `cos[..., i]` and sine `sin[..., i]`.

    Args:
        x: `[B, T, H, D]`, queries or keys.
        cos: `[B, T, F]`, or `[1, T, F]` for all rows of the batch, with 2 F at most D; float32 (float64 is possible
            with a float64 x). Features from 2 F on pass through unchanged. Differentiable in eager.
        sin: like cos.
        layout: 'interleaved': pair i has the features 2 i and 2 i + 1; 'half': i and i + F, as in Hugging Face models.
        backend: 'auto', 'triton' or 'eager'.

    Returns:
        `[B, T, H, D]` in the dtype of x, computed in float32 (float64 for a float64 x) and rounded once.

    Raises:
        ValueError: shapes or dtypes do not fit, or an explicit backend does not support the call.
    """
    _check_input(x)
    _check_tables(cos, sin, x)
    is_half = check_layout(layout=layout)
    match backend_of(x, cos, sin, backend=backend).name:
        case 'triton':
            from native_sparse_attention.ops.rotary import triton

            return triton.rotary(x, cos, sin, is_half)
        case _:
            from native_sparse_attention.ops.rotary import eager

            return eager.rotary(x, cos, sin, is_half)


def _check_input(x: Tensor) -> None:
    check_tensors(x=x)
    if x.dim() != 4:
        raise ValueError(f'x has shape {tuple(x.shape)}, but must have 4 dimensions (B, T, H, D)')
    if not x.is_floating_point():
        raise ValueError(f'x has dtype {x.dtype}, but must be a floating dtype')


def _check_tables(cos: Tensor, sin: Tensor, x: Tensor) -> None:
    check_tensors(cos=cos, sin=sin)
    for name, table in (('cos', cos), ('sin', sin)):
        _check_table(name, table, x)
    if sin.shape != cos.shape:
        raise ValueError(f'sin has shape {tuple(sin.shape)}, but cos has {tuple(cos.shape)}')


def check_layout(**layout: object) -> bool:
    """Return whether a layout, given by its name, is 'half'; raise ValueError for one that does not exist."""
    ((name, value),) = layout.items()
    if not isinstance(value, str) or value not in LAYOUTS:
        raise ValueError(f"{name} is {shown(value)}, but must be 'interleaved' or 'half'")
    return value == 'half'


def shared_input(
    x: Tensor,
    num_plain: int,
    num_rotated: int = 0,
    tables: Tables | None = None,
    *,
    layout: str = 'interleaved',
    backend: str = 'auto',
) -> tuple[Tensor, ...]:
    """Return num_rotated outputs of x rotated, then num_plain outputs of x unchanged.

    The rotated outputs share memory, and the unchanged ones share that of x: do not write to them. Autograd adds the
    gradients of a tensor two at a time, with a rounded sum in memory each time; here all gradients are read once, added
    in float32, rotated back, and rounded once.

    Args:
        x: `[B, T, H, D]`.
        tables: cosines and sines, as `rotary` takes them; None rotates nothing.
        layout: as in `rotary`.
        backend: 'auto', 'triton' or 'eager', which leaves the sum to autograd. So do torch.compile, more than five
            outputs and, without rotated ones, an x that the kernel does not support.

    Raises:
        ValueError: as `rotary`.
    """
    is_needed = num_plain + num_rotated > 1 and torch.is_grad_enabled() and x.requires_grad
    adds = is_needed and _adds(x, num_plain + num_rotated, tables if num_rotated else None, backend)
    rotated = x
    if tables is not None and num_rotated:
        rotated = rotary(x.detach() if adds else x, *tables, layout=layout, backend=backend)
    if not adds:
        return (rotated,) * num_rotated + (x,) * num_plain
    from native_sparse_attention.ops.rotary import triton

    return triton.shared_input(x, rotated.detach(), tables, num_plain, num_rotated, layout == 'half')


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
    _check_input(x)
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
        _check_tables(*tables, x)
    is_half = check_layout(layout=layout)
    arguments = (x, weight, tables, eps, num_plain, num_rotated, is_half)
    match backend_of_norm(x, weight, tables, backend=backend).name:
        case 'triton':
            from native_sparse_attention.ops.rotary import triton

            return triton.norm_rotary(*arguments)
        case _:
            from native_sparse_attention.ops.rotary import eager

            return eager.norm_rotary(*arguments)


def backend_of(x: Tensor, cos: Tensor, sin: Tensor, *, backend: str = 'auto') -> BackendChoice:
    """Return the backend that serves these inputs."""
    candidates = {'triton': partial(_unsupported, x, cos, sin), 'eager': serves}
    return choose_backend('rotary', backend, x.device, candidates)


def backend_of_norm(x: Tensor, weight: Tensor, tables: Tables | None, *, backend: str = 'auto') -> BackendChoice:
    """Return the backend that serves these inputs."""
    candidates = {'triton': partial(_unsupported_norm, x, weight, tables), 'eager': serves}
    return choose_backend('norm_rotary', backend, x.device, candidates)


def is_fused(x: Tensor, weight: Tensor, tables: Tables | None, backend: str) -> bool:
    """Return whether the kernels compute this on a backend; where they cannot, nothing is raised."""
    if backend == 'auto':
        return backend_of_norm(x, weight, tables).name == 'triton'
    return backend == 'triton' and transformed('triton') is None and _unsupported_norm(x, weight, tables) is None


def _unsupported(x: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    """Return the reason why the kernel does not support a call, or None."""
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return 'cos or sin requires a gradient, which its kernel does not compute'
    if cos.dtype == torch.float64:
        return f'cos has dtype {cos.dtype}, but its kernel computes in float32'
    return support.unsupported(x, name='x')


def _unsupported_norm(x: Tensor, weight: Tensor, tables: Tables | None) -> str | None:
    """Return the reason why the kernels do not support a call, or None."""
    if weight.dtype not in support.DTYPES:
        return f'weight has dtype {weight.dtype}, but its kernels compute in float32'
    return support.unsupported(x, name='x') if tables is None else _unsupported(x, *tables)


def _check_table(name: str, table: Tensor, x: Tensor) -> None:
    batch, seqlen, _, head_dim = x.shape
    if table.dim() != 3 or (table.shape[0] != 1 and table.shape[0] != batch) or table.shape[1] != seqlen:
        raise ValueError(f'{name} has shape {tuple(table.shape)}, but must have ({batch} or 1, {seqlen}, F)')
    if 2 * table.shape[2] > head_dim:
        raise ValueError(f'{name} has {table.shape[2]} angles, but heads of {head_dim} features take {head_dim // 2}')
    if table.dtype != torch.float32 and not table.dtype == x.dtype == torch.float64:
        raise ValueError(f'{name} has dtype {table.dtype}, but must be float32')
    if table.device != x.device:
        raise ValueError(f'{name} is on {table.device}, but x is on {x.device}')


def _adds(x: Tensor, num_readers: int, tables: Tables | None, backend: str) -> bool:
    """Return whether the kernel adds the gradients of x; with rotated outputs it needs the kernel of `rotary`."""
    if torch.compiler.is_compiling() or num_readers > support.MAX_READERS:
        return False
    if tables is not None:
        return backend_of(x, *tables, backend=backend).name == 'triton'
    if backend == 'eager' or transformed('triton') is not None or support.unsupported(x, name='x') is not None:
        return False
    if backend == 'triton':
        return True
    return choose_backend('shared_input', backend, x.device, {'triton': serves, 'eager': serves}).name == 'triton'
