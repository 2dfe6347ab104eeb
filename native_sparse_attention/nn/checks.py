"""Checks of the settings and calls of attention layers, which run before anything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from native_sparse_attention.core import checks, geometry
from native_sparse_attention.core.backend import check_backend
from native_sparse_attention.core.plain import is_plain
from native_sparse_attention.core.projection import floating_weight, projection_dtype
from native_sparse_attention.core.random import check_probability
from native_sparse_attention.core.warn import warn_user
from native_sparse_attention.inference.cache import LayerCache, check_layer_cache
from native_sparse_attention.nn.linear import BranchLinear, SplitLinear
from native_sparse_attention.nn.padding import check_mask

_POSITIVE = ('dim_head', 'heads', 'kv_heads', 'dim_value_head', 'sliding_window_size')
_NOT_NEGATIVE = ('num_selected_blocks', 'num_init_blocks', 'num_local_blocks', 'num_sinks')
_FLAGS = (
    *('causal', 'use_diff_topk', 'query_heads_share_selected_kv', 'independent_branch_kv', 'recompute'),
    *('merge_window', 'compressed_output', 'select_before_window', 'output_gate'),
)
_FLAGS_OF_LUCIDRAINS = (
    *('use_triton_kernel', 'disable_triton_kernel', 'sliding_window_flex_mask', 'fine_selection_flex_mask'),
    *('use_flex_sliding_window', 'use_flex_fine_selection', 'use_triton_fine_selection', 'disable_flex'),
)


def refuse_unknown(function: str, unknown: Mapping[str, object]) -> None:
    """Raise for keyword arguments that a class or its forward does not have.

    The error is a TypeError, as Python raises, and for a flag of native-sparse-attention-pytorch a ValueError that
    names the class that takes it.
    """
    for name, value in unknown.items():
        if name in _FLAGS_OF_LUCIDRAINS:
            owner = function.split('.')[0]
            raise ValueError(
                f'{name} is {checks.shown(value)}, but must be left out: it is a flag of '
                f'native-sparse-attention-pytorch, which '
                f'native_sparse_attention.integrations.lucidrains.{owner} takes; here backend stands for it'
            )
        raise TypeError(f'{function}() got an unexpected keyword argument {name!r}')


def check_settings(
    layer: Any,
    dim: int,
    num_compressed_mem_kv: int,
    norm: bool,
    rotary_emb: object,
    *,
    compress_mlp: object,
    strategy_combine_mlp: object,
) -> None:
    """Raise ValueError where the settings of a `SparseAttention`, or constructor arguments that it does not keep, are
    wrong.
    """
    checks.check_positive(dim=dim, **{name: getattr(layer, name) for name in _POSITIVE})
    not_negative = {name: getattr(layer, name) for name in _NOT_NEGATIVE}
    checks.check_not_negative(num_compressed_mem_kv=num_compressed_mem_kv, **not_negative)
    check_probability(dropout=layer.dropout)
    if layer.heads % layer.kv_heads != 0:
        raise ValueError(f'heads is {layer.heads}, but must be a multiple of kv_heads, {layer.kv_heads}')
    names = ('compress_block_size', 'compress_block_sliding_stride')
    sizes: Any = (getattr(layer, name) for name in (*names, 'selection_block_size'))
    checks.check_block_sizes(*sizes, names=names)
    if rotary_emb is True:
        raise ValueError('rotary_emb is True, but must be a RotaryEmbedding, None for a default or False')
    check_backend(layer.backend)
    checks.check_flags(norm=norm, **{name: getattr(layer, name) for name in _FLAGS})
    _check_merged(layer, compress_mlp, strategy_combine_mlp)
    _warn_of_forced_blocks(layer)


def _warn_of_forced_blocks(layer: Any) -> None:
    """Warn where forced blocks leave none to be selected by score."""
    num_selected = layer.num_selected_blocks
    forced = geometry.num_forced_blocks(layer.num_init_blocks, layer.num_local_blocks, layer.causal)
    if 0 < num_selected <= forced:
        warn_user(
            f'num_selected_blocks is {num_selected}, but {forced} blocks are forced and count towards it, '
            f'so no block is ever selected by score: raise it, or lower num_init_blocks and num_local_blocks',
            layer,
        )


def _check_merged(layer: Any, compress_mlp: object, strategy_combine_mlp: object) -> None:
    """Raise ValueError for settings that merged attention excludes or requires; warn where scores are not trained."""
    if layer.merge_window and layer.independent_branch_kv:
        raise ValueError(
            'independent_branch_kv is True, but must be False where merge_window is set: one softmax reads k'
        )
    if layer.select_before_window:
        for name in ('merge_window', 'causal'):
            if not getattr(layer, name):
                raise ValueError(f'select_before_window is True, but must be False unless {name} is set')
    if layer.output_gate:
        for name in ('merge_window', 'compressed_output'):
            if not getattr(layer, name):
                raise ValueError(f'output_gate is True, but must be False unless {name} is set')
    if layer.compressed_output:
        return
    if not layer.merge_window:
        raise ValueError('compressed_output is False, but must be True unless merge_window is set')
    if strategy_combine_mlp is not None:
        raise ValueError('strategy_combine_mlp is given, but must be None where compressed_output is False: no gate')
    if layer.num_selected_blocks == 0 and compress_mlp is not None:
        raise ValueError(
            'compress_mlp is given, but must be None where compressed_output is False and no block is selected'
        )
    if isinstance(compress_mlp, tuple | list):
        raise ValueError('compress_mlp is a pair, but must be one module where compressed_output is False: for keys')
    has_parameters = compress_mlp is None or (
        isinstance(compress_mlp, nn.Module) and any(True for _ in compress_mlp.parameters())
    )
    if has_parameters and layer.num_selected_blocks > 0 and not layer.use_diff_topk:
        warn_user(
            'compressed_output is False and use_diff_topk is False, so the network that scores blocks is not trained: '
            'its gradients are 0 without return_block_loss',
            layer,
        )


def check_input(x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, layer: Any, cached: bool) -> None:
    """Check the tensors of a call of an attention layer. cached: the call has a cache."""
    checks.check_tensors(x=x)
    to_qkv = layer.to_qkv
    dim = to_qkv.in_features
    if x.dim() != 3 or x.shape[2] != dim:
        raise ValueError(f'x has shape {tuple(x.shape)}, but must be [B, T, {dim}]')
    if not x.is_floating_point():
        raise ValueError(f'x has dtype {x.dtype}, but must be a floating dtype')
    _check_dtype(x, layer, to_qkv)
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


def _check_dtype(x: Tensor, layer: Any, to_qkv: nn.Linear) -> None:
    """Raise ValueError unless x has the dtype of the weights or autocast casts both.

    Modules and weights of other kinds, such as quantised ones, may cast x themselves, and are not checked.
    """
    weight = floating_weight(to_qkv)
    if weight is None or weight.dtype == x.dtype:
        return
    are_plain = is_plain(layer.norm, nn.RMSNorm, nn.Identity) and is_plain(to_qkv, nn.Linear, BranchLinear, SplitLinear)
    if are_plain and projection_dtype(x) != projection_dtype(weight):
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
    """Raise ValueError unless cache fits x and `layout`, the layout of the layer's caches."""
    check_layer_cache(cache)
    if layout != cache.layout:  # which a dense layer shares in part
        for name, size in layout.items():
            held = cache.layout[name]
            if held != size:
                raise ValueError(f'cache was made for {name} = {held}, but the layer has {size}: use its init_cache')
    if cache.batch_size != x.shape[0]:
        raise ValueError(f'x has batch size {x.shape[0]}, but cache has {cache.batch_size}')


def check_block_loss(return_block_loss: bool, cached: bool, recompute: bool, num_selected_blocks: int) -> None:
    """Refuse return_block_loss in a call that has no loss of block scores."""
    if return_block_loss is False:
        return
    checks.check_flags(return_block_loss=return_block_loss)
    if cached:
        raise ValueError('return_block_loss is True with a cache, but a loss needs a forward without one')
    if recompute:
        raise ValueError('return_block_loss is True, but needs recompute=False')
    if num_selected_blocks == 0:
        raise ValueError('return_block_loss is True, but num_selected_blocks is 0: no block is selected')


def check_ids(name: str, ids: Tensor) -> None:
    """Raise ValueError unless ids is int32 or int64 `[B, T]`; name: of the argument."""
    checks.check_tensors(**{name: ids})
    if ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f'{name} has shape {tuple(ids.shape)} and dtype {ids.dtype}, but must be int32 or int64 [batch, tokens]'
        )
