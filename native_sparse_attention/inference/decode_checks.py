"""Checks of the arguments of `nsa_decode`, which run before anything is written."""

from __future__ import annotations

import torch
from torch import Tensor

from native_sparse_attention.core import checks
from native_sparse_attention.inference.cache import LayerCache
from native_sparse_attention.inference.phi import Phi
from native_sparse_attention.ops.compressed_attention.api import check_mem_kv
from native_sparse_attention.ops.decoding.step import Tokens
from native_sparse_attention.ops.gated_sum.api import check_gates
from native_sparse_attention.ops.rotary.api import check_layout


def check_new_tokens(
    tokens: Tokens, gates: Tensor | None, cache: LayerCache, counts: Tensor | None, merge_window: bool
) -> None:
    q, k, v, raw_k, raw_v, k_window, v_window, q_cmp = tokens
    checks.check_qkv(q, k, v)
    checks.check_same_kind(**tokens._asdict())
    if q.device != cache.device:
        raise ValueError(f'q is on {q.device}, but cache is on {cache.device}')
    if not merge_window:
        checks.check_tensors(gates=gates)
        assert gates is not None
        check_gates(gates, q)
    if cache.layout['has_v_cmp'] != (gates is not None):
        raise ValueError(f'cache has has_v_cmp = {cache.layout["has_v_cmp"]}, but gates go with compressed values')
    if k.shape[1] != q.shape[1]:
        raise ValueError(f'k has {k.shape[1]} tokens, but q has {q.shape[1]}')
    layout, sizes = cache.layout, (*k.shape[2:], v.shape[3])
    held = (layout['kv_heads'], layout['head_dim'], layout['value_dim'])
    if held != sizes:
        raise ValueError(f'cache holds {held[0]} heads of sizes {held[1:]}, but k and v have {sizes[0]} of {sizes[1:]}')
    if cache.batch_size != q.shape[0]:
        raise ValueError(f'q has batch size {q.shape[0]}, but cache has {cache.batch_size}')
    if (k_window is None) != (v_window is None):
        raise ValueError('k_window and v_window must be given together or not at all')
    if layout['has_window'] != (k_window is not None):
        raise ValueError(f'cache has has_window = {layout["has_window"]}, but k_window and v_window go with it')
    for name, tensor, like in (
        ('raw_k', raw_k, k),
        ('raw_v', raw_v, v),
        ('k_window', k_window, k),
        ('v_window', v_window, v),
        ('q_cmp', q_cmp, q),
    ):
        if tensor is not None and tensor.shape != like.shape:
            raise ValueError(f'{name} has shape {tuple(tensor.shape)}, but must have {tuple(like.shape)}')
    for name, raw, tensor in (('raw_k', raw_k, k), ('raw_v', raw_v, v)):
        if raw is not tensor and not layout[f'has_{name}']:
            raise ValueError(f'cache has has_{name} = False, but {name} is given')
    if counts is not None:
        checks.check_beside_q('counts', counts, q.shape[0], q)
        if checks.is_readable(counts) and not bool(counts.clamp(0, q.shape[1]).equal(counts)):
            raise ValueError(f'counts is {counts.tolist()}, but must lie in [0, {q.shape[1]}], the new tokens')


def check_rotary(
    tokens: Tokens, cache: LayerCache, freqs: Tensor | None, interpolate_factor: float, rotary_layout: str
) -> None:
    head_dim = tokens.q.shape[3]
    if freqs is None:
        if check_layout(rotary_layout=rotary_layout):
            raise ValueError(f'rotary_layout is {rotary_layout!r}, but must be left out where freqs are None')
        if interpolate_factor != 1:
            raise ValueError(f'interpolate_factor is {interpolate_factor}, but must be left out where freqs are None')
        return
    checks.check_tensors(freqs=freqs)
    _check_parameter('freqs', freqs, (torch.float32,), tokens.q.device)
    if freqs.dim() != 1 or 2 * len(freqs) > head_dim:
        raise ValueError(f'freqs has shape {tuple(freqs.shape)}, but must have at most {head_dim // 2} (D / 2)')
    if tokens.q_cmp is not tokens.q:
        raise ValueError('q_cmp is given, but must be None where freqs are: q is without rotary embedding then')
    if cache.compress is not None and not cache.layout['has_raw_k']:
        raise ValueError('cache has has_raw_k = False, but with freqs what is compressed are keys before rotary')


def check_layer(
    tokens: Tokens,
    cache: LayerCache,
    phi: Phi,
    mem_kv: tuple[Tensor, Tensor | None] | None,
    selection_block_size: int,
    needs_blocks: bool,
) -> None:
    (heads, head_dim), value_dim, device = tokens.k.shape[2:], tokens.v.shape[3], tokens.q.device
    if cache.compress is None:
        if needs_blocks:
            raise ValueError('cache has no compressed keys, but needs compress=(l, d)')
        if mem_kv is not None:
            raise ValueError('mem_kv is given, but must be None where the cache has no compressed keys')
    has = (cache.compress is not None, cache.compress is not None and cache.layout['has_v_cmp'])
    for index, exists in enumerate(has):
        for name, part in (('networks', phi.networks[index]), ('positions', phi.positions[index])):
            if (part is not None) != exists:
                rule = 'given' if exists else 'None'
                raise ValueError(f'{name}[{index}] is {checks.shown(part)}, but must be {rule} for such a cache')
    if cache.compress is None:
        return
    checks.check_block_sizes(*cache.compress, selection_block_size)
    if cache.page_size is not None and cache.page_size % selection_block_size != 0:
        raise ValueError(
            f'cache has page_size {cache.page_size}, but must have a multiple of selection_block_size, '
            f'{selection_block_size}'
        )
    for index, size in enumerate((head_dim, value_dim)):
        if index == 1 and not cache.layout['has_v_cmp']:
            continue
        rule, of_block = (heads, cache.compress[0], size), phi.positions[index]
        checks.check_tensors(**{f'positions[{index}]': of_block})
        assert of_block is not None
        _check_parameter(f'positions[{index}]', of_block, checks.FLOAT_DTYPES, device)
        if of_block.shape != rule:
            shape = tuple(of_block.shape)
            raise ValueError(f'positions[{index}] has shape {shape}, but must have {rule} (H, l, D or DV)')
    if mem_kv is not None:
        if cache.layout['has_v_cmp']:
            check_mem_kv(mem_kv, heads, head_dim, value_dim)  # type: ignore[arg-type]
        else:
            check_mem_kv((mem_kv[0], mem_kv[0]), heads, head_dim, head_dim)
        for index, tensor in enumerate(mem_kv):
            if tensor is not None:
                _check_parameter(f'mem_kv[{index}]', tensor, checks.FLOAT_DTYPES, device)


def _check_parameter(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    if tensor.dtype not in dtypes:
        rule = ' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)
        raise ValueError(f'{name} has dtype {tensor.dtype}, but must be {rule}')
    if tensor.device != device:
        raise ValueError(f'{name} is on {tensor.device}, but q is on {device}')
