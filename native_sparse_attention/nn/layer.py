"""Base of `SparseAttention` and `DenseAttention`: the checks of a call, caches, and the settings beside the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from native_sparse_attention.core.checks import check_flags
from native_sparse_attention.core.plain import is_plain
from native_sparse_attention.core.projection import floating_weight, projection_dtype
from native_sparse_attention.inference.cache import FIRST_CAPACITY, MAX_ROLLBACK, LayerCache
from native_sparse_attention.inference.paged_cache import cache_kind, make_cache
from native_sparse_attention.nn.checks import check_cache, check_input, check_undifferentiated
from native_sparse_attention.nn.heads import HeadNorm, Norms
from native_sparse_attention.nn.linear import join_loaded
from native_sparse_attention.nn.rotary import Rotary, describe_rotary

_KEY = 'settings'  # in the metadata of a state dict


class AttentionLayer(nn.Module):
    """An attention layer with a cache. Subclasses set the attributes that are declared here.

    State dicts record the settings that their weights were made with, in the metadata, where `nn.Module` keeps
    versions. Loading compares them and reports each that differs, as it does sizes. Formats that drop metadata
    (safetensors, DCP) and older state dicts load without the comparison, and so does `dict(state_dict)`.
    """

    dim_head: int
    heads: int  # of this rank, where tensor parallelism divides them
    kv_heads: int
    head_ranks: int = 1  # over which heads are divided
    head_rank: int = 0  # this one
    projection_sizes: list[int]  # output features of to_qkv: of queries, then of keys and values of each branch
    dim_value_head: int
    causal: bool
    norm: nn.Module
    to_qkv: nn.Linear
    q_norm: HeadNorm | None
    k_norm: HeadNorm | None
    rotary: Rotary | None
    selection_block_size: int = 1  # pages of a cache hold a multiple of so many tokens

    # Dtype and device of the weights in a call, where they differ between calls; set by `apply_fsdp`.
    run_dtype: torch.dtype | None = None
    run_device: torch.device | None = None

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_record)
        self.register_load_state_dict_pre_hook(_compare)

    def _make_qk_norms(self, qk_norm: bool) -> None:
        self.q_norm, self.k_norm = (HeadNorm(self.dim_head) if qk_norm else None for _ in range(2))

    @property
    def _norms(self) -> Norms:
        return self.q_norm, self.k_norm

    @property
    def weight_settings(self) -> dict[str, Any]:
        """Settings that determine the meaning of the weights, in addition to their shapes."""
        return {
            'heads': self.heads * self.head_ranks,
            'kv_heads': self.kv_heads * self.head_ranks,
            'dim_head': self.dim_head,
            'dim_value_head': self.dim_value_head,
            'causal': self.causal,
            **describe_rotary(self.rotary),
        }

    def divide_heads(self, ranks: int, rank: int) -> None:
        """Compute with one of `ranks` equal parts of the heads, whose weights the modules of the layer have."""
        self.heads, self.kv_heads = self.heads // ranks, self.kv_heads // ranks
        self.head_ranks, self.head_rank = ranks, rank

    def _normalise(self, x: Tensor) -> Tensor:
        """Return the input `[B, T, dim]` after the norm of the layer.

        PyTorch has no fused kernel for a float32 weight beside an input of a half type, as autocast leaves them. In
        float32 it has one, with the same single rounding to the half type.
        """
        norm, weight = self.norm, floating_weight(self.norm) if x.dtype.itemsize < 4 else None
        if weight is not None and weight.dtype == torch.float32 and is_plain(norm, nn.RMSNorm):
            return norm(x.float()).to(x.dtype)
        return norm(x)

    def _split_heads(self, qkv: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
        """Return q `[B, T, HQ, D]`, and k and v of each branch, `[B, T, H, D or DV]`, of the output of to_qkv, before
        the norms.
        """
        # Few operations, none of them a method that Python wraps: they cost the host of a step much.
        if isinstance(qkv, Tensor) and self.dim_value_head == self.dim_head:
            sizes = (self.heads, *[self.kv_heads] * (len(self.projection_sizes) - 1))
            q, *pairs = torch.unflatten(qkv, -1, (-1, self.dim_head)).split_with_sizes(sizes, dim=-2)
        else:
            q, *pairs = qkv if isinstance(qkv, tuple) else qkv.split_with_sizes(self.projection_sizes, dim=-1)
            q, kv_sizes = torch.unflatten(q, -1, (self.heads, -1)), (self.kv_heads, -1)
            pairs = [torch.unflatten(t, -1, kv_sizes) for t in pairs]
        return q, pairs

    def init_cache(
        self,
        batch_size: int,
        max_seq_len: int,
        max_rollback: int | None = MAX_ROLLBACK,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        page_size: int | None = None,
        num_pages: int | None = None,
    ) -> LayerCache:
        """Return a preallocated cache for `batch_size` rows of up to `max_seq_len` tokens; it is never reallocated.

        max_rollback: tokens that `crop` can take back; None: all, for which all keys before rotary are kept. dtype,
        device: default those of the layer's weights (under autocast its dtype). page_size: a multiple of
        selection_block_size, for a `PagedLayerCache`; its pools have num_pages pages (default: enough for all rows).
        """
        self._check_causal()
        dtype, device = cache_kind(self, self.to_qkv, dtype, device)
        kind: dict[str, Any] = {'max_rollback': max_rollback, 'dtype': dtype, 'device': device}
        paging = {'page_size': page_size, 'num_pages': num_pages, 'selection_block_size': self.selection_block_size}
        return make_cache(batch_size, max_seq_len, **kind, **paging, **self._cache_layout)

    def _first_cache(self, x: Tensor) -> LayerCache:
        """Return an empty cache for x `[B, T, dim]` and what follows it; it grows."""
        kind: dict[str, Any] = {'dtype': projection_dtype(x), 'device': x.device}
        return make_cache(x.shape[0], max(x.shape[1], FIRST_CAPACITY), grows=True, **kind, **self._cache_layout)

    @property
    def _cache_layout(self) -> dict[str, Any]:
        """The settings that the layer and its caches must agree on."""
        sizes = {'kv_heads': self.kv_heads, 'head_dim': self.dim_head, 'value_dim': self.dim_value_head}
        return {**sizes, **self._branch_layout()}  # a property of super() would break graphs of torch.compile

    def _branch_layout(self) -> dict[str, Any]:
        """The settings of caches beside the sizes of keys and values."""
        return {}

    def _check_call(
        self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, cache: LayerCache | None, return_cache: bool
    ) -> bool:
        """Check the arguments of a forward; return whether it uses a cache."""
        check_flags(return_cache=return_cache)
        cached = cache is not None or return_cache
        check_input(x, mask, cu_seqlens, self, cached)
        if cached:
            self._check_causal()
            check_undifferentiated(x, self)
        if cache is not None:
            check_cache(cache, x, self._cache_layout)
        return cached

    def _check_causal(self) -> None:
        if not self.causal:
            raise ValueError('causal is False, but a cache needs causal=True')


def _record(layer: AttentionLayer, state_dict: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    local_metadata[_KEY] = dict(layer.weight_settings)


def _compare(
    layer: AttentionLayer,
    state_dict: Any,
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    errors: list[str],
) -> None:
    if isinstance(layer.to_qkv, nn.Linear):
        join_loaded(layer.projection_sizes, state_dict, f'{prefix}to_qkv.')
    recorded = local_metadata.get(_KEY, {})
    for name, value in layer.weight_settings.items():
        made_with = recorded.get(name, value)
        if value != made_with:
            errors.append(
                f'{prefix}{name} is {value!r}, but must be {made_with!r}, with which the state dict was made (load '
                'dict(state_dict) to skip this check)'
            )
