"""Exact attention inside selected blocks (arXiv 2502.11089, eq. 11 and 12)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.core import checks
from native_sparse_attention.core.backend import Candidates, resolver, serves, without_gate
from native_sparse_attention.core.call import Call, make_call
from native_sparse_attention.core.modifier_checks import make_modifiers
from native_sparse_attention.core.modifiers import Modifiers
from native_sparse_attention.core.random import check_probability
from native_sparse_attention.core.segments import mask_outputs
from native_sparse_attention.ops._triton import support

# Most indices per row: a kernel holds the whole row to find repeated indices.
MAX_SELECTED = 1024


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    block_size: int,
    block_scale: Tensor | None = None,
    unit_scale: bool = False,
    q_offset: int | Tensor | None = None,
    seqlens_k: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    segment_ids: Tensor | None = None,
    softcap: float | None = None,
    block_counts: int | Tensor | None = None,
    window_size: tuple[int, int] | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    gate: Tensor | None = None,
    backend: str = 'auto',
    _design: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to the tokens of the selected blocks, and with window_size also to the window, in one softmax.

    Every token that is not in the future is read once. A row of indices is a set: a block is read once, in any order
    and however often its index is repeated. -1 is padding at any place, and any other index that is out of range or in
    the future contributes nothing.

    Args:
        q: `[B, T, HQ, D]` queries. Packed: B is 1.
        k: `[B, S, H, D]` keys.
        v: `[B, S, H, DV]` values.
        block_indices: int32 or int64 `[B, T, H, n]`, or `[B, T, HQ, n]` where heads select alone. Block j holds the
            tokens [j * block_size, (j + 1) * block_size) of the query's sequence.
        block_size: l', tokens of a block.
        block_scale: factors of the logits of each selected block, in the shape of block_indices; where an index is
            repeated in a row, the first one counts. Differentiable.
        unit_scale: treat block_scale as 1 everywhere, as `straight_through_scale` returns it, and use its gradient
            alone. Requires window_size; the Triton kernels require it there.
        q_offset: position of the first query, an int, `[B]` (packed: `[N]`), or None: queries end where the keys end.
        seqlens_k: int32 or int64 `[B]`, number of real keys of each row.
        causal: queries read no later key; otherwise every key of a selected block is read.
        scale: factor of the logits, default D ** -0.5.
        cu_seqlens: int32 or int64 `[N + 1]`, boundaries of packed queries. Queries behind the last give 0.
        cu_seqlens_k: the same for the keys, where they differ.
        segment_ids: as in `compressed_attention`; padding is not read.
        softcap: from 1e-30 to 1e30: a logit, factors included, becomes softcap * tanh(logit / softcap).
        block_counts: how many of the first indices of a row count, an int or int32 or int64 `[B, T, H]` (`[B, T, HQ]`
            where heads select alone). Values below 0 count as 0, values above n as n.
        window_size: (left, right), keys before and after the query's own that are read as well; -1 is unbounded.
            Causal: right is 0 (or -1). None: no window. Flex does not support it; for the limits of Triton see backend.
        sinks: `[HQ]` or `[HQ, M]`, logits of keys without values, as in `window_attention`; requires window_size.
        dropout_p: probability with which weights are dropped, as in `window_attention`; requires window_size.
        dropout_seed: as in `window_attention`; requires window_size.
        gate: as in `compressed_attention`; not together with block_scale.
        backend: 'auto', 'triton', 'flex' or 'eager'. With window_size the Triton kernels require causal=True and
            support neither dropout nor a block_scale without unit_scale; eager supports everything, with memory and
            time that grow with S.

    Returns:
        The output `[B, T, HQ, DV]` in the dtype of q, and its log-sum-exp `[B, HQ, T]` in float32 (float64 for float64
        inputs), both differentiable. Rows that read nothing give 0 and -inf.

    Raises:
        ValueError: shapes, dtypes or settings do not fit, or an explicit backend does not support the call.
    """
    # _design (tests and benchmarks) forces one of the designs of the Triton kernels.
    checks.check_qkv(q, k, v)
    checks.check_flags(unit_scale=unit_scale)
    checks.check_positive(block_size=block_size)
    checks.check_block_indices(block_indices, q, k)
    if block_scale is not None:
        checks.check_tensors(block_scale=block_scale)
        if not block_scale.is_floating_point():
            raise ValueError(f'block_scale has dtype {block_scale.dtype}, but must be a floating dtype')
        if block_scale.shape != block_indices.shape:
            raise ValueError(
                f'block_scale has shape {tuple(block_scale.shape)}, but block_indices has {tuple(block_indices.shape)}'
            )
        checks.check_device('block_scale', block_scale, q)
    if _design is not None and (backend != 'triton' or window_size is not None):
        raise ValueError(f'_design is {_design!r}, but needs backend="triton" and no window_size')
    checks.check_optional_gate(gate, q)
    if gate is not None and block_scale is not None:
        raise ValueError('gate is given with block_scale, but must be None beside it')
    window = _check_merged(window_size, causal, sinks, dropout_p, dropout_seed, unit_scale, gate)
    placed = (q_offset, seqlens_k, cu_seqlens, cu_seqlens_k)
    call, padding = make_call(q, k, segment_ids, *placed, causal, scale, softcap)
    if block_counts is not None:
        checks.check_block_counts(block_counts, block_indices.shape[2], q)
        block_indices, block_scale = keep_first(block_counts, block_indices, block_scale)
    if padding is not None:
        # A padding token that selects nothing has no output and no gradient, and no query selects its block.
        block_indices = block_indices.masked_fill(padding[:, :, None, None], -1)
    settings: dict[str, Any] = {'block_scale': block_scale, 'num_selected': block_indices.shape[3], 'backend': backend}
    if window is None:
        choice = backend_of(q, k, v, gate=gate, **settings)
        outputs = attend(
            q, k, v, block_indices, block_scale, block_size, call, gate=gate, backend=choice.name, design=_design
        )
    else:
        modifiers = make_modifiers(q, k, None, None, None, None, softcap, sinks, dropout_p, dropout_seed)
        if padding is not None:
            q, k, v = (t.masked_fill(padding[:, :, None, None], 0) for t in (q, k, v))
        choice = merged_backend_of(
            q, k, v, causal=causal, unit_scale=unit_scale, dropout_p=modifiers.dropout_p, **settings
        )
        if unit_scale and block_scale is not None:
            block_scale = 1 + (block_scale - block_scale.detach())
        outputs = attend_merged(
            q, k, v, block_indices, block_scale, block_size, call, window, modifiers, backend=choice.name
        )
    return mask_outputs(*outputs, padding)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_scale: Tensor | None,
    block_size: int,
    call: Call,
    *,
    gate: Tensor | None,
    backend: str,
    design: str | None = None,
    unit_scale: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run `selected_attention` without a window, with checked arguments on a resolved backend.

    unit_scale: block_scale is 1 everywhere.
    """
    arguments: Any = (q, k, v, block_indices, block_scale, block_size, call)
    match backend:
        case 'triton':
            from native_sparse_attention.ops.selected_attention import triton as ops

            arguments = (*arguments, gate, design, unit_scale)
        case 'flex':
            from native_sparse_attention.ops.selected_attention import flex as ops
        case _:
            from native_sparse_attention.ops.selected_attention import eager as ops
    return ops.selected_attention(*arguments)


def attend_merged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_scale: Tensor | None,
    block_size: int,
    call: Call,
    window: tuple[int, int],
    modifiers: Modifiers,
    *,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Run `selected_attention` with a window, with checked arguments on a resolved backend."""
    match backend:
        case 'triton':
            from native_sparse_attention.ops.selected_attention.triton import merged as ops
        case _:
            from native_sparse_attention.ops.selected_attention import eager as ops
    return ops.merged_attention(q, k, v, block_indices, block_scale, block_size, call, window, modifiers)


def candidates(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_scale: Tensor | None = None,
    num_selected: int = 1,
    gate: Tensor | None = None,
    backend: str = 'auto',
) -> Candidates:
    from native_sparse_attention.ops import _flex

    unsupported = partial(_flex.passed_over, backend, q, k, v, factors=block_scale, num_selected=num_selected)
    return {
        'triton': partial(_not_by_triton, q, k, v, num_selected),
        'flex': without_gate(gate, unsupported),
        'eager': without_gate(gate),
    }


backend_of = resolver('selected_attention', candidates)


def _check_merged(
    window_size: tuple[int, int] | None,
    causal: bool,
    sinks: Tensor | None,
    dropout_p: float,
    dropout_seed: int | Tensor | None,
    unit_scale: bool,
    gate: Tensor | None,
) -> tuple[int, int] | None:
    """Return the window, or None without one; then options that need a window are refused."""
    if dropout_p != 0 or window_size is not None:
        check_probability(dropout_p=dropout_p)
    if window_size is None:
        for name, is_given in (
            ('sinks', sinks is not None),
            ('dropout_p', dropout_p != 0),
            ('dropout_seed', dropout_seed is not None),
            ('unit_scale', unit_scale),
        ):
            if is_given:
                raise ValueError(f'{name} is given, but needs window_size beside it')
        return None
    if gate is not None:
        raise ValueError('gate is given with window_size, but must be None beside it')
    return checks.check_window(window_size, causal)


def merged_candidates(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    block_scale: Tensor | None = None,
    unit_scale: bool = False,
    num_selected: int = 1,
    dropout_p: float = 0.0,
    backend: str = 'auto',
) -> Candidates:
    def not_by_triton() -> str | None:
        if not causal:
            return 'causal is False, but with window_size its kernels are causal'
        if block_scale is not None and not unit_scale:
            return 'block_scale may differ from 1, but with window_size its kernels scale no logits'
        if dropout_p:
            return f'dropout_p is {dropout_p}, but with window_size its kernels drop no weights'
        return _not_by_triton(q, k, v, num_selected)

    return {
        'triton': not_by_triton,
        'flex': lambda: 'it has no selected blocks and window in one softmax',
        'eager': serves,
    }


merged_backend_of = resolver('selected_attention', merged_candidates)


def keep_first(
    block_counts: int | Tensor, block_indices: Tensor, block_scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the first indices of every row and their factors; other indices are cut off or become -1."""
    if not isinstance(block_counts, Tensor):
        kept = slice(max(0, block_counts))
        return block_indices[..., kept], None if block_scale is None else block_scale[..., kept]
    entry = torch.arange(block_indices.shape[3], device=block_indices.device)
    return torch.where(entry < block_counts[..., None], block_indices, -1), block_scale


def _not_by_triton(q: Tensor, k: Tensor, v: Tensor, num_selected: int) -> str | None:
    """Return the reason why the kernels do not support a call, or None."""
    if num_selected > MAX_SELECTED:
        return f'a query selects {num_selected} blocks, but its kernels hold rows of up to {MAX_SELECTED} indices'
    return support.too_many_selected(q, k, num_selected) or support.unsupported(q, k, v)
