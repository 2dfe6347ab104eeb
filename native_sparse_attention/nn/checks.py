"""What `SparseAttention` refuses, before anything runs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from native_sparse_attention.core import geometry
from native_sparse_attention.core.checks import check_flags, check_tensors
from native_sparse_attention.core.plain import is_plain
from native_sparse_attention.core.projection import projection_dtype
from native_sparse_attention.inference.cache import LayerCache, check_layer_cache
from native_sparse_attention.nn.linear import BranchLinear
from native_sparse_attention.nn.padding import check_mask


def check_layer_sizes(
    heads: int,
    kv_heads: int,
    compress_block_size: int,
    compress_block_sliding_stride: int,
    selection_block_size: int,
) -> None:
    """HQ a multiple of H, d at most l, l' a multiple of d."""
    if heads % kv_heads != 0:
        raise ValueError(f'heads is {heads}, but must be a multiple of kv_heads, {kv_heads}')
    if compress_block_sliding_stride > compress_block_size:
        raise ValueError(
            f'compress_block_sliding_stride is {compress_block_sliding_stride}, but must be at most '
            f'compress_block_size, {compress_block_size}'
        )
    if selection_block_size % compress_block_sliding_stride != 0:
        raise ValueError(
            f'selection_block_size is {selection_block_size}, but must be a multiple of '
            f'compress_block_sliding_stride, {compress_block_sliding_stride}'
        )


def backend_of_flag(use_triton_kernel: bool | None, backend: str) -> str:
    """Return the backend that the deprecated flag names, or `backend` where it is None."""
    if use_triton_kernel is None:
        return backend
    check_flags(use_triton_kernel=use_triton_kernel)
    message = "use_triton_kernel is deprecated: use backend='auto', which takes Triton where it runs, or 'eager'"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    if backend != 'auto':
        raise ValueError(f'use_triton_kernel and backend={backend!r} are given, but one must be left out')
    return 'auto' if use_triton_kernel else 'eager'


def warn_of_forced_blocks(num_selected_blocks: int, num_init_blocks: int, num_local_blocks: int, causal: bool) -> None:
    """Warn where forced blocks leave none to be selected by score."""
    forced = geometry.num_forced_blocks(num_init_blocks, num_local_blocks, causal)
    if 0 < num_selected_blocks <= forced:
        warnings.warn(
            f'num_selected_blocks is {num_selected_blocks}, but {forced} blocks are forced and count towards it, '
            f'so no block is ever chosen by score: raise it, or lower num_init_blocks and num_local_blocks',
            stacklevel=3,
        )


def warn_of_untrained_scores(network: nn.Module, use_diff_topk: bool) -> None:
    """Warn where the network that scores blocks alone has parameters, but no gradient."""
    if not use_diff_topk and any(True for _ in network.parameters()):
        warnings.warn(
            'compressed_output is False and use_diff_topk is False, so the network that scores blocks is not trained: '
            'its gradients are 0 without return_block_loss',
            stacklevel=3,
        )


def check_merged(
    merge_window: bool,
    compressed_output: bool,
    independent_branch_kv: bool,
    strategy_combine_mlp: nn.Module | None,
    compress_mlp: object,
    num_selected_blocks: int,
) -> None:
    """Raise ValueError for settings that merged attention excludes, or that need it."""
    if not compressed_output and not merge_window:
        raise ValueError('compressed_output is False, but must be True unless merge_window is set')
    if merge_window and independent_branch_kv:
        raise ValueError(
            'independent_branch_kv is True, but must be False where merge_window is set: one softmax reads k'
        )
    if not compressed_output and strategy_combine_mlp is not None:
        raise ValueError('strategy_combine_mlp is given, but must be None where compressed_output is False: no gate')
    if not compressed_output and num_selected_blocks == 0 and compress_mlp is not None:
        raise ValueError(
            'compress_mlp is given, but must be None where compressed_output is False and no block is selected'
        )
    if not compressed_output and isinstance(compress_mlp, tuple | list):
        raise ValueError('compress_mlp is a pair, but must be one module where compressed_output is False: for keys')


def check_input(
    x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, norm: nn.Module, to_qkv: nn.Linear, cached: bool
) -> None:
    """norm, to_qkv: the modules that read x. cached: with a cache."""
    check_tensors(x=x)
    dim = to_qkv.in_features
    if x.dim() != 3 or x.shape[2] != dim:
        raise ValueError(f'x has shape {tuple(x.shape)}, but must be [B, T, {dim}]')
    if not x.is_floating_point():
        raise ValueError(f'x has dtype {x.dtype}, but must be a floating dtype')
    _check_dtype(x, norm, to_qkv)
    if mask is not None:
        kind = type(mask).__name__
        if not isinstance(mask, Tensor):
            raise ValueError(f'mask is a {kind}, but must be a bool tensor; a cache is given by name')
        if cu_seqlens is not None:
            raise ValueError('mask and cu_seqlens are given, but one must be left out')
        check_mask(mask, x)
    if cu_seqlens is not None:
        if x.shape[0] != 1:
            raise ValueError(f'x has batch size {x.shape[0]}, but must have 1 where cu_seqlens is given')
        if cached:
            raise ValueError('cu_seqlens is given, but a cache takes rows, not packed sequences')


def _check_dtype(x: Tensor, norm: nn.Module, to_qkv: nn.Linear) -> None:
    """The dtype of the weights, unless autocast casts both."""
    # Modules and weights of other kinds, such as quantised ones, may cast x themselves.
    weight = getattr(to_qkv, 'weight', x)
    if weight.dtype == x.dtype or not (
        is_plain(norm, nn.RMSNorm, nn.Identity) and is_plain(to_qkv, nn.Linear, BranchLinear)
    ):
        return
    if projection_dtype(x) != projection_dtype(weight):
        raise ValueError(f'x has dtype {x.dtype}, but must have that of the weights, {weight.dtype}, or be autocast')


def check_undifferentiated(x: Tensor, module: nn.Module) -> None:
    """Refuse a call with a cache that would drop gradients: in training mode, or of an x that requires them."""
    if torch.is_grad_enabled() and (module.training or x.requires_grad):
        why = 'the module is in training mode' if module.training else 'x requires gradients'
        raise ValueError(
            f'cache is used where gradients are recorded and {why}, but a call with a cache has none: pass cache=None '
            'and return_cache=False to train, or decode in eval() or under torch.no_grad()'
        )


def check_cache(cache: LayerCache, x: Tensor, layout: Mapping[str, Any]) -> None:
    """layout: what the layer's own caches have."""
    check_layer_cache(cache)
    for name, size in layout.items():
        held = cache.layout[name]
        if held != size:
            raise ValueError(f'cache was made for {name} = {held}, but the layer has {size}: use its init_cache')
    if cache.batch_size != x.shape[0]:
        raise ValueError(f'x has batch size {x.shape[0]}, but cache has {cache.batch_size}')


def check_block_loss(cached: bool, recompute: bool, num_selected_blocks: int) -> None:
    """Refuse return_block_loss in a call that has no loss of block scores."""
    if cached:
        raise ValueError('return_block_loss is True with a cache, but a loss needs a forward without one')
    if recompute:
        raise ValueError('return_block_loss is True, but needs recompute=False')
    if num_selected_blocks == 0:
        raise ValueError('return_block_loss is True, but num_selected_blocks is 0: no block is selected')
