"""Shared argument checks of the ops: one-line errors that name the argument, the value and the rule.

A message is formatted only where it is raised: formatted before its check, it would make torch.compile recompile for
every length that it names.
"""

from __future__ import annotations

from numbers import Real
from typing import TypeGuard

import torch
from torch import Tensor, nn

from native_sparse_attention.core import private
from native_sparse_attention.core.geometry import Sequences, max_length_of_compressed, num_compressed_blocks

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INT_DTYPES = (torch.int32, torch.int64)


def is_int(value: object) -> bool:
    """Return whether a value is an integer: not a bool, but possibly a symbolic size of torch.export."""
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a real number, NumPy's included."""
    return isinstance(value, float) or is_int(value) or (isinstance(value, Real) and not isinstance(value, bool))


def shown(value: object) -> str:
    """Return a value for a message of one line."""
    return f'a {type(value).__name__}' if isinstance(value, torch.Tensor) or '\n' in repr(value) else repr(value)


def check_flags(**flags: bool) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f'{name} is {shown(value)}, but must be True or False')


def check_positive(**values: int) -> None:
    for name, value in values.items():
        if (type(value) is not int and not is_int(value)) or value < 1:
            raise ValueError(f'{name} is {shown(value)}, but must be an integer of at least 1')


def check_not_negative(**values: int) -> None:
    for name, value in values.items():
        if (type(value) is not int and not is_int(value)) or value < 0:
            raise ValueError(f'{name} is {shown(value)}, but must be an integer of at least 0')


def check_num_recent(num_recent: int, causal: bool) -> None:
    if num_recent and not causal:
        raise ValueError(f'num_recent is {num_recent}, but must be 0 where causal is False')


def check_tensors(**values: object) -> None:
    """Check that values are dense tensors, and that torch.jit.trace does not record them."""
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f'{name} is a {type(value).__name__}, but must be a tensor')
        if not _is_dense(value):
            kind = 'nested' if value.is_nested else str(value.layout).removeprefix('torch.')
            raise ValueError(f'{name} is a {kind} tensor, but must be a dense one')
        if torch.jit.is_tracing():
            raise ValueError(f'{name} is recorded by torch.jit.trace, but a trace has one length: use torch.export')


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def is_readable(tensor: Tensor) -> bool:
    """Return whether the host may read the values of a tensor for a check, without waiting for a device.

    It may on CPUs, outside of compiled graphs and transforms of torch.func. Subclasses, such as fake tensors, may have
    no values.
    """
    if torch.compiler.is_compiling() or not tensor.is_cpu or private.is_transformed():
        return False
    return type(tensor) is Tensor or type(tensor) is nn.Parameter


def check_float_dtype(**dtypes: torch.dtype) -> None:
    for name, dtype in dtypes.items():
        if dtype not in FLOAT_DTYPES:
            raise ValueError(f'{name} is {shown(dtype)}, but must be float64, float32, bfloat16 or float16')


def check_same_kind(**tensors: Tensor | None) -> None:
    """Check that all tensors are tensors of one floating dtype and one device."""
    first = dtype = device = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if first is None or not (isinstance(tensor, Tensor) and _is_dense(tensor)):
            check_tensors(**{name: tensor})
        if first is None:
            first, dtype, device = name, tensor.dtype, tensor.device
            if dtype not in FLOAT_DTYPES:
                raise ValueError(f'{first} has dtype {dtype}, but must be float64, float32, bfloat16 or float16')
        elif tensor.dtype != dtype:
            raise ValueError(f'{name} has dtype {tensor.dtype}, but {first} has {dtype}')
        elif tensor.device != device:
            raise ValueError(f'{name} is on {tensor.device}, but {first} is on {device}')


def check_device(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device != q.device:
        raise ValueError(f'{name} is on {tensor.device}, but q is on {q.device}')


def check_qkv(q: Tensor, k: Tensor, v: Tensor, k_name: str = 'k', v_name: str = 'v') -> None:
    """Check `[B, T, HQ, D]`, `[B, S, H, D]`, `[B, S, H, DV]` with HQ a multiple of H, one dtype, one device."""
    check_qk(q, k, k_name, **{v_name: v})
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f'{v_name} has shape {tuple(v.shape)}, but must be {tuple(k.shape[:3])} + (DV,) to match {k_name}'
        )


def check_compressed_heads(k_cmp: Tensor, k: Tensor) -> None:
    """Check that compressed keys `[B, C, H, D]` have as many heads as k, because a selection is of the heads of k."""
    if k_cmp.shape[2] != k.shape[2]:
        raise ValueError(f'k_cmp has {k_cmp.shape[2]} heads, but must have {k.shape[2]}, as k')


def check_qk(q: Tensor, k: Tensor, k_name: str = 'k', **others: Tensor) -> None:
    """Check q and k as `check_qkv` does. others: tensors of as many dimensions, the same dtype and device."""
    named = {'q': q, k_name: k, **others}
    check_tensors(**named)
    for name, tensor in named.items():
        if tensor.dim() != 4:
            raise ValueError(
                f'{name} has shape {tuple(tensor.shape)}, but must have 4 dimensions (batch, tokens, heads, head size)'
            )
    check_same_kind(**named)
    q_shape, k_shape = q.shape, k.shape
    if k_shape[0] != q_shape[0]:
        raise ValueError(f'{k_name} has batch size {k_shape[0]}, but q has {q_shape[0]}')
    if k_shape[3] != q_shape[3]:
        raise ValueError(f'{k_name} has head size {k_shape[3]}, but q has {q_shape[3]}')
    if k_shape[2] == 0 or q_shape[2] % k_shape[2] != 0:
        raise ValueError(f'q has {q_shape[2]} heads, but must have a multiple of the {k_shape[2]} heads of {k_name}')


def check_block_sizes(
    block_size: int,
    stride: int,
    *selection_block_size: int,
    names: tuple[str, str] = ('compress_block_size', 'compress_stride'),
) -> None:
    """Check 1 <= d <= l, and where it is given that l' is a multiple of d."""
    block_name, stride_name = names
    sizes = {block_name: block_size, stride_name: stride}
    if selection_block_size:
        (sizes['selection_block_size'],) = selection_block_size
    check_positive(**sizes)
    if stride > block_size:
        raise ValueError(f'{stride_name} is {stride}, but must be at most {block_name}, {block_size}')
    for size in selection_block_size:
        if size % stride != 0:
            raise ValueError(f'selection_block_size is {size}, but must be a multiple of {stride_name}, {stride}')


def check_lse(lse: Tensor, q: Tensor) -> None:
    check_tensors(lse=lse)
    batch, seqlen, heads, _ = q.shape
    if lse.shape != (batch, heads, seqlen):
        raise ValueError(f'lse has shape {tuple(lse.shape)}, but must have {(batch, heads, seqlen)} (B, HQ, T)')
    if not lse.is_floating_point():
        raise ValueError(f'lse has dtype {lse.dtype}, but must be a floating dtype')
    check_device('lse', lse, q)


def check_block_indices(block_indices: Tensor, q: Tensor, k: Tensor) -> None:
    check_tensors(block_indices=block_indices)
    batch, seqlen, heads, _ = q.shape
    shape = block_indices.shape
    if block_indices.dtype not in INT_DTYPES:
        raise ValueError(f'block_indices has dtype {block_indices.dtype}, but must be int32 or int64')
    if len(shape) != 4 or shape[:2] != (batch, seqlen) or (shape[2] != k.shape[2] and shape[2] != heads):
        raise ValueError(
            f'block_indices has shape {tuple(shape)}, but must have ({batch}, {seqlen}, {k.shape[2]} or, per query '
            f'head, {heads}, n)'
        )
    check_device('block_indices', block_indices, q)


def check_block_counts(block_counts: int | Tensor, index_heads: int, q: Tensor) -> None:
    """Check an int, or int32 or int64 `[B, T, index_heads]`."""
    if not isinstance(block_counts, Tensor):
        if not is_int(block_counts):
            raise ValueError(f'block_counts is {shown(block_counts)}, but must be an int, an integer tensor or None')
        return
    shape = (*q.shape[:2], index_heads)
    if block_counts.dtype not in INT_DTYPES:
        raise ValueError(f'block_counts has dtype {block_counts.dtype}, but must be int32 or int64')
    if block_counts.shape != shape:
        raise ValueError(f'block_counts has shape {tuple(block_counts.shape)}, but must have {shape}')
    check_device('block_counts', block_counts, q)


def logit_scale(q: Tensor, scale: float | None) -> float:
    """Return the scale of the logits: D ** -0.5 unless it is given."""
    if scale is not None and not (is_number(scale) and abs(scale) <= 1e30):
        raise ValueError(f'scale is {shown(scale)}, but must be a finite number or None, of up to 1e+30')
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def checked_softcap(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    # float32 holds such numbers and their inverses. Literals, since torch.compile would guard on globals.
    if not (is_number(softcap) and 1e-30 <= softcap <= 1e30):
        raise ValueError(
            f'softcap is {shown(softcap)}, but must be a finite number above 0, or None, from 1e-30 to 1e+30'
        )
    return float(softcap)


def make_sequences(
    q: Tensor,
    seqlen_k: int,
    q_offset: int | Tensor | None,
    seqlens_k: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> Sequences:
    """Return the checked sequence boundaries and offsets. Tensor values are checked only on CPUs, where reading is
    free.
    """
    batch, seqlen_q = q.shape[:2]
    if cu_seqlens_k is not None and cu_seqlens is None:
        raise ValueError('cu_seqlens_k is given, but needs cu_seqlens beside it')
    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(f'q has batch size {batch}, but must have 1 where cu_seqlens is given')
        if seqlens_k is not None:
            raise ValueError('seqlens_k is given, but cannot be combined with cu_seqlens')
        check_beside_q('cu_seqlens', cu_seqlens, None, q)
        if cu_seqlens_k is not None:
            check_beside_q('cu_seqlens_k', cu_seqlens_k, len(cu_seqlens), q)
    if seqlens_k is not None:
        check_beside_q('seqlens_k', seqlens_k, batch, q)
    if isinstance(q_offset, Tensor):
        check_beside_q('q_offset', q_offset, batch if cu_seqlens is None else len(cu_seqlens) - 1, q)
    else:
        _check_offset(q_offset)
    if is_readable(q):
        _check_extents(seqlen_q, seqlen_k, seqlens_k, cu_seqlens, cu_seqlens_k)
    cu_seqlens_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    return Sequences(batch, seqlen_q, seqlen_k, q.device, q_offset, seqlens_k, cu_seqlens, cu_seqlens_k)


def make_compressed_sequences(
    q: Tensor,
    k_cmp: Tensor,
    block_size: int,
    stride: int,
    seqlen_k: int | None,
    q_offset: int | Tensor | None,
    seqlens_k: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> Sequences:
    """Return the same for the compressed ops, where the number of keys in tokens is not the length of `k_cmp`."""
    num_compressed = k_cmp.shape[1]
    if seqlen_k is not None:
        check_not_negative(seqlen_k=seqlen_k)
    elif cu_seqlens_k is not None:
        # Only cu_seqlens_k gives the number of tokens: sequences shorter than a block have no entry in k_cmp.
        seqlen_k = torch.iinfo(torch.int64).max
    elif cu_seqlens is not None:
        seqlen_k = q.shape[1]
    elif seqlens_k is not None:
        seqlen_k = max_length_of_compressed(num_compressed, block_size, stride)
    else:
        if isinstance(q_offset, Tensor):
            raise ValueError(
                'seqlen_k is not given, but is needed where q_offset is per row and seqlens_k is not given'
            )
        _check_offset(q_offset)
        seqlen_k = max(0, q.shape[1] + (q_offset or 0))
    sequences = make_sequences(q, seqlen_k, q_offset, seqlens_k, cu_seqlens, cu_seqlens_k)
    check_num_compressed(k_cmp, sequences, block_size, stride)
    return sequences


def check_num_compressed(k_cmp: Tensor, sequences: Sequences, block_size: int, stride: int) -> None:
    """Check that k_cmp holds the compressed blocks of all keys."""
    num_compressed, seqlen_k = k_cmp.shape[1], sequences.seqlen_k
    seqlens_k, cu_seqlens_k = sequences.seqlens_k, sequences.cu_seqlens_k
    if seqlens_k is None and cu_seqlens_k is None:
        needed = num_compressed_blocks(seqlen_k, block_size, stride)
        if num_compressed < needed:
            raise ValueError(f'k_cmp has {num_compressed} compressed blocks, but seqlen_k = {seqlen_k} makes {needed}')
    elif is_readable(k_cmp):
        lengths = seqlens_k if seqlens_k is not None else cu_seqlens_k.diff()  # type: ignore[union-attr]
        blocks = num_compressed_blocks(lengths.long(), block_size, stride)
        needed = int(blocks.sum() if seqlens_k is None else blocks.max()) if blocks.numel() else 0
        if num_compressed < needed:
            raise ValueError(f'k_cmp has {num_compressed} compressed blocks, but the key lengths make {needed}')


def _check_offset(q_offset: int | None) -> None:
    if q_offset is not None and not is_int(q_offset):
        raise ValueError(f'q_offset is {shown(q_offset)}, but must be an int, an integer tensor or None')


def validate_packing(
    total: int, cu_seqlens: Tensor, *, total_k: int | None = None, cu_seqlens_k: Tensor | None = None
) -> None:
    """Check the content of `cu_seqlens` on any device. On a GPU this waits for the device, so no op does it.

    Args:
        total: number of query tokens.
        cu_seqlens: int32 or int64 `[N + 1]`, boundaries of the packed queries.
        total_k: number of key tokens, default total.
        cu_seqlens_k: int32 or int64 `[N + 1]`, boundaries of the keys, default cu_seqlens.

    Raises:
        ValueError: a tensor has another shape or dtype, does not start at 0, decreases, or ends behind the tokens.
    """
    check_integers('cu_seqlens', cu_seqlens, None)
    _check_cumulative('cu_seqlens', cu_seqlens, total)
    if cu_seqlens_k is not None:
        check_integers('cu_seqlens_k', cu_seqlens_k, None)
        if len(cu_seqlens_k) != len(cu_seqlens):
            raise ValueError(f'cu_seqlens_k has {len(cu_seqlens_k)} entries, but cu_seqlens has {len(cu_seqlens)}')
        _check_cumulative('cu_seqlens_k', cu_seqlens_k, total if total_k is None else total_k)


def _check_extents(
    seqlen_q: int, seqlen_k: int, seqlens_k: Tensor | None, cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None
) -> None:
    if cu_seqlens is not None:
        _check_cumulative('cu_seqlens', cu_seqlens, seqlen_q)
        if cu_seqlens_k is None:
            if int(cu_seqlens[-1]) > seqlen_k:
                raise ValueError(f'cu_seqlens ends at {int(cu_seqlens[-1])}, but there are {seqlen_k} keys')
        else:
            _check_cumulative('cu_seqlens_k', cu_seqlens_k, seqlen_k)
    if seqlens_k is not None and seqlens_k.numel():
        low, high = int(seqlens_k.min()), int(seqlens_k.max())
        if low < 0 or high > seqlen_k:
            raise ValueError(f'seqlens_k lies in [{low}, {high}], but must lie in [0, {seqlen_k}]')


def check_beside_q(name: str, tensor: Tensor, length: int | None, q: Tensor) -> None:
    check_integers(name, tensor, length)
    check_device(name, tensor, q)


def check_integers(name: str, tensor: Tensor, length: int | None) -> None:
    """Check int32 or int64 `[length]`, or of at least 2 entries if length is None."""
    check_tensors(**{name: tensor})
    if tensor.dtype not in INT_DTYPES:
        raise ValueError(f'{name} has dtype {tensor.dtype}, but must be int32 or int64')
    if tensor.dim() != 1:
        raise ValueError(f'{name} has shape {tuple(tensor.shape)}, but must have 1 dimension')
    if length is None and len(tensor) < 2:
        raise ValueError(f'{name} has {len(tensor)} entries, but must have one per sequence and one more')
    if length is not None and len(tensor) != length:
        raise ValueError(f'{name} has {len(tensor)} entries, but must have {length}')


def _check_cumulative(name: str, tensor: Tensor, total: int) -> None:
    values = tensor.tolist()
    if values[0] != 0:
        raise ValueError(f'{name} starts at {values[0]}, but must start at 0')
    decrease = next((i for i in range(1, len(values)) if values[i] < values[i - 1]), None)
    if decrease is not None:
        raise ValueError(f'{name} decreases at entry {decrease}, but must not')
    if values[-1] > total:
        raise ValueError(f'{name} ends at {values[-1]}, but there are {total} tokens')


def check_gate(name: str, gate: Tensor, expected: tuple[int, ...], legend: str, q: Tensor) -> None:
    check_tensors(**{name: gate})
    if gate.shape != expected:
        raise ValueError(f'{name} has shape {tuple(gate.shape)}, but must have {expected} {legend}')
    if not gate.is_floating_point():
        raise ValueError(f'{name} has dtype {gate.dtype}, but must be a floating dtype')
    if gate.device != q.device:
        raise ValueError(f'{name} is on {gate.device}, but the branches are on {q.device}')


def check_optional_gate(gate: Tensor | None, q: Tensor) -> None:
    """Check the `gate` of an attention op, which only the Triton kernels differentiate."""
    if gate is None:
        return
    check_tensors(gate=gate)
    check_device('gate', gate, q)
    check_gate('gate', gate, tuple(q.shape[:3]), '(B, T, HQ)', q)
    if gate.dtype == torch.float64:
        raise ValueError(f'gate has dtype {gate.dtype}, but its kernels compute in float32')


def check_window(window_size: tuple[int, int], causal: bool) -> tuple[int, int]:
    """Return the window in the form of the backends: right is 0 if causal."""
    is_pair = isinstance(window_size, tuple | list) and len(window_size) == 2
    left, right = window_size if is_pair else (-2, -2)
    if not (is_int(left) and is_int(right) and left >= -1 and right >= -1):
        raise ValueError(f'window_size is {shown(window_size)}, but must be (left, right), integers of at least -1')
    if causal and right > 0:
        raise ValueError(f'window_size is {window_size}, but right must be 0 (or -1) where causal is set')
    return left, 0 if causal else right
