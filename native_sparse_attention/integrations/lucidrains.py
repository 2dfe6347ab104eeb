"""`SparseAttention` and `Transformer` with the arguments of native-sparse-attention-pytorch 0.2.3 (lucidrains).

Arguments have the names, order and defaults of 0.2.3; further arguments of this package are keyword-only. Flags of
kernels stand for a backend and give a DeprecationWarning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from native_sparse_attention.core.checks import check_flags, check_tensors
from native_sparse_attention.core.warn import warn_user
from native_sparse_attention.inference.cache import LayerCache
from native_sparse_attention.inference.model_cache import ModelCache, check_model_cache
from native_sparse_attention.nn import attention, transformer

# The backend that a flag of a call switches off.
_DISABLED = {'disable_flex': 'flex', 'disable_triton_kernel': 'triton'}


class SparseAttention(attention.SparseAttention):
    """`native_sparse_attention.SparseAttention` with the arguments of native-sparse-attention-pytorch 0.2.3.

    use_triton_kernel: True stands for backend='auto', which takes Triton where it runs; False for 'eager'; None, the
    default, for `backend`. settings: further arguments of the class without flags.

    Raises ValueError as that class, and for use_triton_kernel with a backend.
    """

    def __init__(
        self,
        dim: int,
        dim_head: int,
        heads: int,
        sliding_window_size: int,
        compress_block_size: int,
        compress_block_sliding_stride: int,
        selection_block_size: int,
        num_selected_blocks: int,
        kv_heads: int | None = None,
        num_compressed_mem_kv: int = 1,
        causal: bool = False,
        norm: bool = True,
        use_diff_topk: bool = False,
        use_triton_kernel: bool | None = None,
        query_heads_share_selected_kv: bool = True,
        compress_mlp: nn.Module | None = None,
        compress_mlp_expand_factor: float = 1.0,
        strategy_combine_mlp: nn.Module | None = None,
        *,
        backend: str = 'auto',
        **settings: Any,
    ) -> None:
        if use_triton_kernel is not None:
            check_flags(use_triton_kernel=use_triton_kernel)
            if backend != 'auto':
                raise ValueError(f'use_triton_kernel and backend={backend!r} are given, but one must be left out')
            backend = 'auto' if use_triton_kernel else 'eager'
            _warn(['use_triton_kernel'], backend, self)
        super().__init__(
            *(dim, dim_head, heads, sliding_window_size, compress_block_size, compress_block_sliding_stride),
            *(selection_block_size, num_selected_blocks, kv_heads, num_compressed_mem_kv, causal, norm, use_diff_topk),
            *(query_heads_share_selected_kv, compress_mlp, compress_mlp_expand_factor, strategy_combine_mlp),
            backend=backend,
            **settings,
        )

    def forward(
        self,
        inp: Tensor,
        cache: LayerCache | None = None,
        disable_triton_kernel: bool = False,
        sliding_window_flex_mask: None = None,
        fine_selection_flex_mask: None = None,
        return_cache: bool = False,
        **options: Any,
    ) -> Any:
        """Attend over inp `[B, T, dim]`, as `native_sparse_attention.SparseAttention` over x.

        disable_triton_kernel: True runs this call in eager. sliding_window_flex_mask, fine_selection_flex_mask: refused
        with a ValueError, as backend='flex' makes its own masks. options: further arguments, such as mask.
        """
        if sliding_window_flex_mask is not None or fine_selection_flex_mask is not None:
            name = 'sliding_window_flex_mask' if sliding_window_flex_mask is not None else 'fine_selection_flex_mask'
            raise ValueError(f"{name} is given, but must be None: backend='flex' makes its own masks")
        options |= _backend_of_call(self, disable_triton_kernel=disable_triton_kernel)
        return super().forward(inp, cache=cache, return_cache=return_cache, **options)


class Transformer(transformer.Transformer):
    """`native_sparse_attention.transformer.Transformer` with the arguments of native-sparse-attention-pytorch 0.2.3.

    use_triton_fine_selection stands for backend='auto', which takes Triton where it runs; without it,
    use_flex_sliding_window and use_flex_fine_selection stand for 'flex'. settings: further arguments of the class
    without flags.

    Raises ValueError as that class, and for flags that contradict each other or the backend.
    """

    def __init__(
        self,
        num_tokens: int,
        dim: int,
        depth: int,
        dim_head: int = 64,
        heads: int = 8,
        kv_heads: int | None = None,
        ff_expansion_factor: float = 4.0,
        use_sparse_attn: bool = False,
        causal: bool = True,
        use_flex_sliding_window: bool = False,
        use_flex_fine_selection: bool = False,
        use_triton_fine_selection: bool = False,
        sparse_attn_kwargs: Mapping[str, Any] = transformer.DEFAULT_SPARSE_ATTN_KWARGS,
        *,
        backend: str = 'auto',
        **settings: Any,
    ) -> None:
        flags = {
            'use_flex_sliding_window': use_flex_sliding_window,
            'use_flex_fine_selection': use_flex_fine_selection,
            'use_triton_fine_selection': use_triton_fine_selection,
        }
        super().__init__(
            *(num_tokens, dim, depth, dim_head, heads, kv_heads, ff_expansion_factor, use_sparse_attn, causal),
            sparse_attn_kwargs,
            backend=_backend_of_model(self, backend, flags),
            **settings,
        )

    def forward(
        self,
        ids: Tensor,
        return_loss: bool = False,
        disable_flex: bool = False,
        disable_triton_kernel: bool = False,
        cache: ModelCache | None = None,
        return_cache: bool = False,
        **options: Any,
    ) -> Any:
        """Return logits or the loss, as `native_sparse_attention.transformer.Transformer`.

        disable_flex, disable_triton_kernel: True runs this call in eager where it would take that backend.
        cache: with return_cache, ids are all tokens so far or one new token alone, and logits are those of tokens that
        the cache does not hold. Without return_cache, ids are the new tokens alone.
        options: further arguments, such as mask.
        """
        if cache is not None and return_cache:
            ids = _new_ids(ids, cache)
            if isinstance(mask := options.get('mask'), Tensor):
                options['mask'] = mask[..., -ids.shape[-1] :]
        flags = {'disable_flex': disable_flex, 'disable_triton_kernel': disable_triton_kernel}
        options |= _backend_of_call(self, **flags)
        return super().forward(ids, return_loss, cache, return_cache, **options)


def _new_ids(ids: Tensor, cache: ModelCache) -> Tensor:
    """Return the ids that follow the cache."""
    check_model_cache(cache)
    check_tensors(ids=ids)
    length, held = ids.shape[-1], cache.max_length
    if length != 1 and length <= held:
        raise ValueError(f'ids has {length} tokens per row, but must have 1 or more than the {held} in the cache')
    return ids if length == 1 else ids[..., held:]


def _backend_of_call(module: Any, **flags: bool) -> dict[str, str]:
    """Return the argument `backend` of a call with such flags; empty where they leave the model's backend."""
    check_flags(**flags)
    given = [name for name, is_set in flags.items() if is_set]
    if given:
        _warn(given, 'eager', module)
    return {'backend': 'eager'} if any(module.backend in ('auto', _DISABLED[name]) for name in given) else {}


def _backend_of_model(module: nn.Module, backend: str, flags: dict[str, bool]) -> str:
    check_flags(**flags)
    given = [name for name, is_set in flags.items() if is_set]
    if not given:
        return backend
    triton = flags['use_triton_fine_selection']
    if triton and flags['use_flex_fine_selection']:
        raise ValueError('use_flex_fine_selection and use_triton_fine_selection are both True, but at most one may be')
    mapped = 'auto' if triton else 'flex'
    if backend not in ('auto', 'triton' if triton else 'flex'):
        raise ValueError(f'backend is {backend!r}, but {" and ".join(given)} asks for {mapped!r}')
    _warn(given, mapped, module)
    return mapped if backend == 'auto' else backend


def _warn(flags: list[str], backend: str, module: nn.Module) -> None:
    message = f'{" and ".join(flags)} is deprecated: use backend={backend!r}'
    warn_user(message, module, DeprecationWarning)
