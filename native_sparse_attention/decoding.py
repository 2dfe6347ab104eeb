"""Decoding: attention of new tokens over a cache, from append to gated output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from native_sparse_attention import functional, ops
from native_sparse_attention.cache import LayerCache
from native_sparse_attention.compress import MeanPool, compress_blocks
from native_sparse_attention.geometry import num_compressed_blocks
from native_sparse_attention.ops._checks import check_block_sizes, check_not_negative, check_positive, check_qkv
from native_sparse_attention.ops.backend import BackendChoice, transformed
from native_sparse_attention.ops.compressed_attention.api import check_mem_kv
from native_sparse_attention.ops.decoding import api
from native_sparse_attention.ops.decoding.step import ALIGNMENT, Settings, Tokens, look_at
from native_sparse_attention.ops.gated_sum.api import check_gates
from native_sparse_attention.rotary import angle_tables

if TYPE_CHECKING:
    from native_sparse_attention.ops.decoding.triton import Launches


class Phi(NamedTuple):
    """The networks of keys and of values, and what is added to the tokens of a block: `[H, l, D]` and `[H, l, DV]`."""

    networks: tuple[nn.Module, nn.Module]
    positions: tuple[Tensor, Tensor]

    @property
    def is_mean(self) -> bool:
        of_keys, of_values = self.networks
        return type(of_keys) is MeanPool and type(of_values) is MeanPool

    def __call__(self, blocks_k: Tensor, blocks_v: Tensor) -> tuple[Tensor, Tensor]:
        """Compressed keys `[B, C, H, D]` and values `[B, C, H, DV]` of blocks `[B, H, C, l, D or DV]`."""
        networks = zip(self.networks, (blocks_k, blocks_v), ('keys', 'values'), strict=True)
        k_cmp, v_cmp = (compress_blocks(n, b, name=name, value_dim=b.shape[-1]) for n, b, name in networks)
        return k_cmp, v_cmp

    def settled(self, blocks: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The same of blocks cast to dtype, with the same strides and alignment whatever the networks return."""
        pair = (t.contiguous() for t in self(*(b.to(dtype) for b in blocks)))
        return [t if t.data_ptr() % ALIGNMENT == 0 else t.clone() for t in pair]


def nsa_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    cache: LayerCache,
    *,
    networks: tuple[nn.Module, nn.Module],
    positions: tuple[Tensor, Tensor],
    freqs: Tensor | None = None,
    interpolate_factor: float = 1.0,
    mem_kv: tuple[Tensor, Tensor] | None = None,
    raw_k: Tensor | None = None,
    raw_v: Tensor | None = None,
    k_window: Tensor | None = None,
    v_window: Tensor | None = None,
    counts: Tensor | None = None,
    selection_block_size: int,
    num_selected: int,
    window_size: int,
    num_init: int = 1,
    num_local: int = 2,
    share_group: bool = True,
    scale: float | None = None,
    num_splits: int = 0,
    tiles_of_program: int = 0,
    backend: str = 'auto',
) -> Tensor:
    """`nsa` of new tokens over a cache, which advances by them: appended, compressed, attended to and gated. Nothing is
    differentiated.

    Args:
        q: `[B, T, HQ, D]`, k: `[B, T, H, D]`, v: `[B, T, H, DV]`: new tokens of every row, before rotary.
        gates: `[B, T, HQ, 3]` after the sigmoid.
        cache: of sizes (l, d), with `has_raw_k` where freqs are given.
        networks: φ of keys and of values, `[B, H, C, l, D or DV]` to `[B, H, C, D or DV]`. positions: what is added to
            blocks before, `[H, l, D]` and `[H, l, DV]`.
        freqs: float32 `[F]`, angles are position / interpolate_factor * freqs; None for no rotary embedding.
        mem_kv: a pair `[H, M, D]`, `[H, M, DV]` that every query sees in the compressed branch.
        raw_k, raw_v: what is compressed; default k, v. k_window, v_window: of the window branch; default k, v.
        counts: int32 `[B]`, how many of the T are real; the others stand behind them. Default all.
        selection_block_size, num_selected, num_init, num_local, share_group, scale: as in `nsa`. window_size: W, the
            query's own token included.
        num_splits, tiles_of_program: as in `ops.decoding.step.Settings`.
        backend: 'auto', 'triton', 'flex' or 'eager'. The kernels of Triton decode up to 16 tokens at a time; longer
            chunks go through those of `nsa`.

    Returns:
        `[B, T, HQ, DV]` in the dtype of q.

    Raises:
        ValueError: shapes or settings that do not fit, or a full cache; nothing is written then.
    """
    phi, memory = Phi(networks, positions), None
    if mem_kv is not None:
        memory = mem_kv[0].to(cache.dtype).contiguous(), mem_kv[1].to(cache.dtype).contiguous()
    # What a step depends on: tensors by what they look like, and everything else by value.
    given = (
        *(q, k, v, gates, *positions, freqs, *(memory or (None, None)), k_window, v_window),
        *(None if raw_k is k else raw_k, None if raw_v is v else raw_v),
    )
    values = (
        *(selection_block_size, num_selected, window_size, num_init, num_local, share_group, scale, num_splits),
        *(tiles_of_program, interpolate_factor, backend, phi.is_mean),
    )
    if counts is None and not torch.compiler.is_compiling() and cache.launches and transformed('triton') is None:
        looks, addresses = look_at(given, cache.storage()[:-1])
        launches = cache.launches.get((values, looks))
        if launches is not None and cache.has_room(q.shape[1]) and not launches.are_watched():
            return _decode_again(q, v, cache, phi, launches, addresses)
    tokens = Tokens(q, k, v, k if raw_k is None else raw_k, v if raw_v is None else raw_v, k_window, v_window)
    check_positive(window_size=window_size)
    check_not_negative(num_selected=num_selected, num_init=num_init, num_local=num_local)
    check_not_negative(num_splits=num_splits, tiles_of_program=tiles_of_program)
    _check_tokens(tokens, gates, cache)
    _check_layer(tokens, cache, positions, freqs, mem_kv, selection_block_size)
    assert cache.compress is not None
    settings = Settings(
        *(*cache.compress, selection_block_size, num_selected, window_size, num_init, num_local, share_group),
        *(q.shape[-1] ** -0.5 if scale is None else scale, num_splits, tiles_of_program),
    )
    with torch.no_grad():
        choice = backend_of(q, k, v, cache, selection_block_size, backend=backend)
        by_ops = choice.name != 'triton' or counts is not None or torch.compiler.is_compiling()
        if by_ops and backend not in ('auto', 'eager'):
            # One that cannot serve raises here.
            chosen = {'num_selected': num_selected, 'share_group': share_group}
            functional.backend_of(*(t.to(cache.dtype) for t in (q, k, v)), **chosen, backend=backend)
        cache.reserve(q.shape[1])
        layer = (gates, cache, phi, freqs, interpolate_factor, memory)
        if by_ops:
            return _decode_by_ops(tokens, *layer, counts, settings, backend).to(q.dtype)
        out, launches = _decode_by_kernels(tokens, *layer, settings, given)
    if launches.is_complete:
        looks, _ = look_at(given, cache.storage()[:-1])
        cache.remember((values, looks), launches)
    return out


def _decode_by_kernels(
    tokens: Tokens,
    gates: Tensor,
    cache: LayerCache,
    phi: Phi,
    freqs: Tensor | None,
    interpolate_factor: float,
    mem_kv: tuple[Tensor, Tensor] | None,
    settings: Settings,
    given: tuple[Tensor | None, ...],
) -> tuple[Tensor, Launches]:
    """A step, and its launches, which `_decode_again` makes again. given: tensors that are others then."""
    from native_sparse_attention.ops.decoding import triton

    q, storage, workspace = tokens.q, cache.storage(), cache.workspace
    launches = triton.Launches(given, storage[:-1], workspace)
    turned, q_cmp, new_k, new_v = triton.append(
        *(tokens, storage, phi.positions, freqs, interpolate_factor, settings, phi.is_mean, workspace, launches)
    )
    if not phi.is_mean:
        launches.blocks = [new_k, new_v]
        new_k, new_v = phi.settled(launches.blocks, q.dtype)
        launches.give(new_k, new_v)
    out, _ = triton.attend(
        *(turned, q_cmp, new_k, new_v, gates, mem_kv, storage, settings, workspace, q.dtype, launches)
    )
    cache.advance(q.shape[1])
    return out, launches


def _decode_again(
    q: Tensor, v: Tensor, cache: LayerCache, phi: Phi, launches: Launches, addresses: list[int]
) -> Tensor:
    """A step by launches that were made before. addresses: of the tensors given, which look as those did."""
    out = q.new_empty(*q.shape[:3], v.shape[3])
    if phi.is_mean:
        launches.again([*addresses, out.data_ptr()])
    else:
        launches.again(addresses, stop=1)
        with torch.no_grad():
            new_k, new_v = phi.settled(launches.blocks, q.dtype)
        launches.again([*addresses, new_k.data_ptr(), new_v.data_ptr(), out.data_ptr()], start=1)
    cache.advance(q.shape[1])
    return out


def backend_of(
    q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, selection_block_size: int, *, backend: str = 'auto'
) -> BackendChoice:
    """'triton' where the kernels of decoding serve these new tokens in fixed launches, else 'eager': the ops of `nsa`
    one by one, by whatever backend serves them.
    """
    if backend == 'triton' and not 1 <= q.shape[1] <= api.MAX_NEW_TOKENS:
        backend = 'auto'
    assert cache.compress is not None
    return api.backend_of(
        *(q, k, v),
        storage=cache.storage(),
        compress=cache.compress,
        selection_block_size=selection_block_size,
        backend=backend,
    )


def _check_tokens(tokens: Tokens, gates: Tensor, cache: LayerCache) -> None:
    q, k, v, raw_k, raw_v, k_window, v_window = tokens
    check_qkv(q, k, v)
    check_gates(gates, q)
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
    ):
        if tensor is not None and tensor.shape != like.shape:
            raise ValueError(f'{name} has shape {tuple(tensor.shape)}, but must have {tuple(like.shape)}')
    for name, raw, tensor in (('raw_k', raw_k, k), ('raw_v', raw_v, v)):
        if raw is not tensor and not layout[f'has_{name}']:
            raise ValueError(f'cache has has_{name} = False, but {name} is given')


def _check_layer(
    tokens: Tokens,
    cache: LayerCache,
    positions: tuple[Tensor, Tensor],
    freqs: Tensor | None,
    mem_kv: tuple[Tensor, Tensor] | None,
    selection_block_size: int,
) -> None:
    (heads, head_dim), value_dim = tokens.k.shape[2:], tokens.v.shape[3]
    if cache.compress is None:
        raise ValueError('cache has no compressed keys, but needs compress=(l, d)')
    check_block_sizes(*cache.compress, selection_block_size)
    if cache.page_size is not None and cache.page_size % selection_block_size != 0:
        raise ValueError(
            f'cache has page_size {cache.page_size}, but must have a multiple of selection_block_size, '
            f'{selection_block_size}'
        )
    for name, tensor, size in (('keys', positions[0], head_dim), ('values', positions[1], value_dim)):
        if tensor.shape != (heads, cache.compress[0], size):
            rule = (heads, cache.compress[0], size)
            raise ValueError(f'positions of {name} have shape {tuple(tensor.shape)}, but must have {rule} (H, l, D)')
    if freqs is not None:
        if freqs.dim() != 1 or 2 * len(freqs) > head_dim:
            raise ValueError(f'freqs has shape {tuple(freqs.shape)}, but must have at most {head_dim // 2} (D / 2)')
        if not cache.layout['has_raw_k']:
            raise ValueError('cache has has_raw_k = False, but with freqs what is compressed are keys before rotary')
    if mem_kv is not None:
        check_mem_kv(mem_kv, heads, head_dim, value_dim)


def _decode_by_ops(
    tokens: Tokens,
    gates: Tensor,
    cache: LayerCache,
    phi: Phi,
    freqs: Tensor | None,
    interpolate_factor: float,
    mem_kv: tuple[Tensor, Tensor] | None,
    counts: Tensor | None,
    settings: Settings,
    backend: str,
) -> Tensor:
    """Any number of tokens, by the ops of `nsa`."""
    q, k, v, raw_k, raw_v, k_window, v_window = tokens
    num_tokens, dtype = q.shape[1], raw_k.dtype
    offset = cache.lengths.clone()
    turned, k, k_window = _rotate((q, k, k_window), cache.positions(num_tokens), freqs, interpolate_factor, backend)
    candidates, *blocks = cache.block_candidates(raw_k, raw_v)
    blocks_k, blocks_v = (
        rearrange(b, 'b c l h d -> b h c l d').to(dtype) + p[:, None].to(dtype)
        for b, p in zip(blocks, phi.positions, strict=True)
    )
    cache.append(
        k,
        v,
        counts=counts,
        k_window=k_window,
        v_window=v_window,
        raw_k=raw_k,
        raw_v=raw_v,
        compressed=(candidates, *phi(blocks_k, blocks_v)),
    )
    num_keys = cache.max_length
    num_compressed = num_compressed_blocks(num_keys, settings.compress_block_size, settings.compress_stride)
    k, v, k_window, v_window = cache.read(num_keys)
    return functional.nsa(
        turned.to(cache.dtype),
        k,
        v,
        *cache.read_compressed(num_compressed),
        gates,
        mem_kv=mem_kv,
        q_cmp=q.to(cache.dtype),
        k_window=k_window,
        v_window=v_window,
        compress_block_size=settings.compress_block_size,
        compress_stride=settings.compress_stride,
        selection_block_size=settings.selection_block_size,
        num_selected=settings.num_selected,
        window_size=(settings.window_size - 1, 0),
        num_init=settings.num_init,
        num_local=settings.num_local,
        share_group=settings.share_group,
        scale=settings.scale,
        q_offset=offset,
        seqlens_k=cache.lengths,
        backend=backend,
    )


def _rotate(
    tensors: tuple[Tensor | None, ...], positions: Tensor, freqs: Tensor | None, factor: float, backend: str
) -> Any:
    if freqs is None:
        return tensors
    cos, sin = angle_tables(positions, freqs, factor)
    backend = 'eager' if backend == 'flex' else backend
    return tuple(None if t is None else ops.rotary(t, cos, sin, backend=backend) for t in tensors)
