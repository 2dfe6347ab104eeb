"""Decoding: attention of new tokens over a cache, from append to gated output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from native_sparse_attention import functional
from native_sparse_attention.core.backend import BackendChoice, check_backend, transformed
from native_sparse_attention.core.checks import (
    FLOAT_DTYPES,
    check_all_block_sizes,
    check_beside_q,
    check_flags,
    check_not_negative,
    check_positive,
    check_qkv,
    check_same_kind,
    check_tensors,
    checked_softcap,
    logit_scale,
    shown,
)
from native_sparse_attention.core.geometry import num_compressed_blocks
from native_sparse_attention.core.modifier_checks import reduce_sinks
from native_sparse_attention.core.plain import is_plain
from native_sparse_attention.inference.cache import LayerCache, check_layer_cache
from native_sparse_attention.nn.compress import MeanPool, check_network, compress_blocks
from native_sparse_attention.nn.rotary import angle_tables, rotate
from native_sparse_attention.ops.compressed_attention.api import check_mem_kv
from native_sparse_attention.ops.decoding import api
from native_sparse_attention.ops.decoding.step import ALIGNMENT, MAX_SPLITS, Settings, Tokens, look_at
from native_sparse_attention.ops.gated_sum.api import backend_of as sum_backend
from native_sparse_attention.ops.gated_sum.api import check_gates
from native_sparse_attention.ops.rotary.api import backend_of as rotary_backend

if TYPE_CHECKING:
    from native_sparse_attention.ops.decoding.triton import LaunchCache


class Phi(NamedTuple):
    """The networks of keys and of values, and what is added to the tokens of a block: `[H, l, D]` and `[H, l, DV]`.

    Those of values are None where blocks are scored alone, all where there are no compressed blocks.
    """

    networks: tuple[Any, Any]
    positions: tuple[Any, Any]

    @property
    def is_mean(self) -> bool:
        of_keys, of_values = self.networks
        return is_plain(of_keys, MeanPool) and is_plain(of_values, MeanPool)

    def try_on(self, cache: LayerCache, q: Tensor) -> None:
        """Raise ValueError where the networks cannot compress what new tokens complete: they are run on zeros, once for
        every cache and number of blocks.
        """
        assert cache.compress is not None
        block_size, stride = cache.compress
        num_blocks = -(-q.shape[1] // stride)
        case = (*self.networks, num_blocks, q.dtype)
        # What runs while a graph is captured would be part of it.
        if case in cache.networks_tried or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        heads = cache.layout['kv_heads']
        for network, name, size in zip(self.networks, ('keys', 'values'), ('head_dim', 'value_dim'), strict=True):
            shape = (q.shape[0], heads, num_blocks, block_size, cache.layout[size])
            check_network(network, shape, name=name, like=q)
        cache.networks_tried.add(case)

    def __call__(self, blocks_k: Tensor, blocks_v: Tensor) -> tuple[Tensor, Tensor]:
        """Compressed keys `[B, C, H, D]` and values `[B, C, H, DV]` of blocks `[B, H, C, l, D or DV]`."""
        return self._summarise(0, blocks_k), self._summarise(1, blocks_v)

    def of_tokens(self, blocks: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor | None]:
        """Compressed keys and values, None without a network, in dtype; blocks: `[B, C, l, H, D or DV]`, as
        `LayerCache.block_candidates` gives them, to which positions are added here.
        """
        summaries: list[Tensor | None] = []
        for index, (tokens, positions) in enumerate(zip(blocks, self.positions, strict=True)):
            if positions is None:
                summaries.append(None)
            else:
                laid_out = rearrange(tokens, 'b c l h d -> b h c l d').to(dtype)
                summaries.append(self._summarise(index, laid_out + positions[:, None].to(dtype)))
        return summaries

    def _summarise(self, index: int, blocks: Tensor) -> Tensor:
        return compress_blocks(self.networks[index], blocks, name=('keys', 'values')[index], value_dim=blocks.shape[-1])

    def settled(self, blocks: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The same of blocks cast to dtype, with the same strides and alignment whatever the networks return."""
        pair = (t.contiguous() for t in self(*(b.to(dtype) for b in blocks)))
        return [t if t.data_ptr() % ALIGNMENT == 0 else t.clone() for t in pair]


def nsa_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor | None,
    cache: LayerCache,
    *,
    networks: tuple[nn.Module | None, nn.Module | None],
    positions: tuple[Tensor | None, Tensor | None],
    merge_window: bool = False,
    freqs: Tensor | None = None,
    interpolate_factor: float = 1.0,
    mem_kv: tuple[Tensor, Tensor | None] | None = None,
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
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sinks_cmp: Tensor | None = None,
    num_splits: int = 0,
    tiles_of_program: int = 0,
    backend: str = 'auto',
) -> Tensor:
    """`nsa` of new tokens over a cache, which advances by them: appended, compressed, attended to and gated. Nothing is
    differentiated.

    Args:
        q: `[B, T, HQ, D]`, k: `[B, T, H, D]`, v: `[B, T, H, DV]`: new tokens of every row, before rotary.
        gates: `[B, T, HQ, 3]` after the sigmoid; with merge_window `[B, T, HQ, 1]` or None, as in `nsa`.
        cache: of sizes (l, d), with `has_raw_k` where freqs are given. Where gates are None, without compressed values
            (`has_v_cmp`), and where num_selected is 0 besides, without sizes.
        merge_window: as in `nsa`, whose ops decode then. Where gates are None, so are the networks, positions and
            mem_kv of values, and where num_selected is 0 besides, those of keys.
        networks: φ of keys and of values, `[B, H, C, l, D or DV]` to `[B, H, C, D or DV]`. positions: what is added to
            blocks before, `[H, l, D]` and `[H, l, DV]`.
        freqs: float32 `[F]`, angles are position / interpolate_factor * freqs; None for no rotary embedding.
        mem_kv: a pair `[H, M, D]`, `[H, M, DV]` that every query sees in the compressed branch.
        raw_k, raw_v: what is compressed; default k, v. k_window, v_window: of the window branch; default k, v.
        counts: int32 or int64 `[B]`, how many of the T are real; the others stand behind them. Default all.
        selection_block_size, num_selected, num_init, num_local, share_group, scale: as in `nsa`. window_size: W, the
            query's own token included.
        softcap, sinks, sinks_cmp: as in `nsa`, whose ops decode where one is given.
        num_splits, tiles_of_program: as in `ops.decoding.step.Settings`; at most 64 splits.
        backend: 'auto', 'triton', 'flex' or 'eager'. The kernels of Triton decode up to 16 tokens at a time; longer
            chunks go through those of `nsa`.

    Returns:
        `[B, T, HQ, DV]` in the dtype of q.

    Raises:
        ValueError: shapes, devices or settings that do not fit, networks that cannot compress blocks, an explicit
            backend that cannot serve the call, or a full cache; nothing is written then.
    """
    check_layer_cache(cache)
    check_flags(merge_window=merge_window)
    if merge_window:
        functional.check_merged(gates, q, mem_kv, sinks_cmp, k_window=k_window, v_window=v_window)
    phi, memory = Phi(networks, positions), None
    if mem_kv is not None:
        mem_k, mem_v = mem_kv
        memory = mem_k.to(cache.dtype).contiguous(), None if mem_v is None else mem_v.to(cache.dtype).contiguous()
    # What a step depends on: tensors by what they look like, and everything else by value.
    given = (
        *(q, k, v, gates, *positions, freqs, *(memory or (None, None)), k_window, v_window),
        *(None if raw_k is k else raw_k, None if raw_v is v else raw_v),
    )
    values = (
        *(selection_block_size, num_selected, window_size, num_init, num_local, share_group, scale, num_splits),
        *(tiles_of_program, interpolate_factor, backend, is_mean := phi.is_mean),
    )
    by_kernels = softcap is None and sinks is None and sinks_cmp is None and not merge_window
    by_launches = by_kernels and counts is None and not torch.compiler.is_compiling()
    if by_launches and cache.launches and transformed('triton') is None:
        looks, addresses = look_at(given, cache.storage()[:-1])
        launches = cache.launches.get((values, looks))
        if launches is not None and cache.has_room(q.shape[1]) and not launches.are_watched():
            return _decode_again(q, v, cache, phi, is_mean, launches, addresses)
    tokens = Tokens(q, k, v, k if raw_k is None else raw_k, v if raw_v is None else raw_v, k_window, v_window)
    check_backend(backend)
    check_positive(window_size=window_size)
    check_not_negative(num_selected=num_selected, num_init=num_init, num_local=num_local)
    check_not_negative(num_splits=num_splits, tiles_of_program=tiles_of_program)
    if num_splits > MAX_SPLITS:
        raise ValueError(f'num_splits is {num_splits}, but must be at most {MAX_SPLITS}')
    _check_tokens(tokens, gates, cache, counts, merge_window)
    needs_blocks = gates is not None or num_selected > 0
    _check_layer(tokens, cache, phi, freqs, mem_kv, selection_block_size, needs_blocks)
    modifiers = {
        'softcap': checked_softcap(softcap),
        'sinks': reduce_sinks(sinks, q),
        'sinks_cmp': reduce_sinks(sinks_cmp, q, 'sinks_cmp'),
    }
    block_size, stride = cache.compress or (1, 1)
    settings = Settings(
        *(block_size, stride, selection_block_size, num_selected, window_size, num_init, num_local, share_group),
        *(logit_scale(q, scale), num_splits, tiles_of_program),
    )
    with torch.no_grad():
        sizes = (selection_block_size, num_selected)
        has_sinks = sinks is not None or sinks_cmp is not None
        features = {'softcap': softcap, 'has_sinks': has_sinks, 'merge_window': merge_window}
        choice = backend_of(q, k, v, cache, *sizes, **features, backend=backend)
        by_ops = choice.name != 'triton' or not by_launches
        if by_ops and backend not in ('auto', 'eager'):
            _check_ops(tokens, gates, cache, freqs, settings, modifiers, merge_window, backend)
        cache.reserve(q.shape[1])
        layer = (gates, cache, phi, freqs, interpolate_factor, memory)
        if by_ops:
            return _decode_by_ops(tokens, *layer, counts, settings, modifiers, merge_window, backend).to(q.dtype)
        out, launches = _decode_by_kernels(tokens, *layer, settings, given)  # type: ignore[arg-type]
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
) -> tuple[Tensor, LaunchCache]:
    """A step, and its launches, which `_decode_again` makes again. given: tensors that are others then."""
    from native_sparse_attention.ops.decoding import triton

    q, storage, workspace, is_mean = tokens.q, cache.storage(), cache.workspace, phi.is_mean
    if not is_mean:
        phi.try_on(cache, q)
    launches = triton.LaunchCache(given, storage[:-1], workspace)
    turned, q_cmp, new_k, new_v = triton.append(
        *(tokens, storage, phi.positions, freqs, interpolate_factor, settings, is_mean, workspace, launches)  # type: ignore[arg-type]
    )
    if not is_mean:
        launches.blocks = [new_k, new_v]
        new_k, new_v = phi.settled(launches.blocks, q.dtype)
        launches.give(new_k, new_v)
    out = triton.attend(*(turned, q_cmp, new_k, new_v, gates, mem_kv, storage, settings, workspace, q.dtype, launches))
    cache.advance(q.shape[1])
    return out, launches


def _decode_again(
    q: Tensor, v: Tensor, cache: LayerCache, phi: Phi, is_mean: bool, launches: LaunchCache, addresses: list[int]
) -> Tensor:
    """A step by launches that were made before. addresses: of the tensors given, which look as those did."""
    out = q.new_empty(*q.shape[:3], v.shape[3])
    if is_mean:
        launches.replay([*addresses, out.data_ptr()])
    else:
        phi.try_on(cache, q)
        launches.replay(addresses, stop=1)
        with torch.no_grad():
            new_k, new_v = phi.settled(launches.blocks, q.dtype)
        launches.replay([*addresses, new_k.data_ptr(), new_v.data_ptr(), out.data_ptr()], start=1)
    cache.advance(q.shape[1])
    return out


def backend_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: LayerCache,
    selection_block_size: int,
    num_selected: int,
    *,
    softcap: float | None = None,
    has_sinks: bool = False,
    merge_window: bool = False,
    backend: str = 'auto',
) -> BackendChoice:
    """'triton' where the kernels of decoding serve these new tokens in fixed launches, else 'eager': the ops of `nsa`
    one by one, by whatever backend serves them.

    softcap, has_sinks, merge_window: what goes through the ops alone.
    """
    if merge_window:
        return BackendChoice('eager', {'triton': 'merge_window is True, but its kernels keep the branches apart'})
    if backend == 'triton' and not 1 <= q.shape[1] <= api.MAX_NEW_TOKENS:
        backend = 'auto'
    assert cache.compress is not None
    return api.backend_of(
        *(q, k, v),
        storage=cache.storage(),
        compress=cache.compress,
        selection_block_size=selection_block_size,
        num_selected=num_selected,
        softcap=softcap,
        has_sinks=has_sinks,
        backend=backend,
    )


def _check_tokens(
    tokens: Tokens, gates: Tensor | None, cache: LayerCache, counts: Tensor | None, merge_window: bool
) -> None:
    q, k, v, raw_k, raw_v, k_window, v_window = tokens
    check_qkv(q, k, v)
    check_same_kind(**tokens._asdict())
    if q.device != cache.device:
        raise ValueError(f'q is on {q.device}, but cache is on {cache.device}')
    if not merge_window:
        check_tensors(gates=gates)
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
    ):
        if tensor is not None and tensor.shape != like.shape:
            raise ValueError(f'{name} has shape {tuple(tensor.shape)}, but must have {tuple(like.shape)}')
    for name, raw, tensor in (('raw_k', raw_k, k), ('raw_v', raw_v, v)):
        if raw is not tensor and not layout[f'has_{name}']:
            raise ValueError(f'cache has has_{name} = False, but {name} is given')
    if counts is not None:
        check_beside_q('counts', counts, q.shape[0], q)
        if counts.is_cpu and not torch.compiler.is_compiling() and not bool(counts.clamp(0, q.shape[1]).equal(counts)):
            raise ValueError(f'counts is {counts.tolist()}, but must lie in [0, {q.shape[1]}], the new tokens')


def _check_layer(
    tokens: Tokens,
    cache: LayerCache,
    phi: Phi,
    freqs: Tensor | None,
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
                raise ValueError(f'{name}[{index}] is {shown(part)}, but must be {rule} for such a cache')
    if cache.compress is None:
        return
    check_all_block_sizes(*cache.compress, selection_block_size)
    if cache.page_size is not None and cache.page_size % selection_block_size != 0:
        raise ValueError(
            f'cache has page_size {cache.page_size}, but must have a multiple of selection_block_size, '
            f'{selection_block_size}'
        )
    for index, size in enumerate((head_dim, value_dim)):
        if index == 1 and not cache.layout['has_v_cmp']:
            continue
        rule, of_block = (heads, cache.compress[0], size), phi.positions[index]
        check_tensors(**{f'positions[{index}]': of_block})
        assert of_block is not None
        _check_parameter(f'positions[{index}]', of_block, FLOAT_DTYPES, device)
        if of_block.shape != rule:
            shape = tuple(of_block.shape)
            raise ValueError(f'positions[{index}] has shape {shape}, but must have {rule} (H, l, D or DV)')
    if freqs is not None:
        _check_parameter('freqs', freqs, (torch.float32,), device)
        if freqs.dim() != 1 or 2 * len(freqs) > head_dim:
            raise ValueError(f'freqs has shape {tuple(freqs.shape)}, but must have at most {head_dim // 2} (D / 2)')
        if not cache.layout['has_raw_k']:
            raise ValueError('cache has has_raw_k = False, but with freqs what is compressed are keys before rotary')
    if mem_kv is not None:
        if cache.layout['has_v_cmp']:
            check_mem_kv(mem_kv, heads, head_dim, value_dim)  # type: ignore[arg-type]
        else:
            check_mem_kv((mem_kv[0], mem_kv[0]), heads, head_dim, head_dim)
        for index, tensor in enumerate(mem_kv):
            if tensor is not None:
                _check_parameter(f'mem_kv[{index}]', tensor, FLOAT_DTYPES, device)


def _check_parameter(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    if tensor.dtype not in dtypes:
        rule = ' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)
        raise ValueError(f'{name} has dtype {tensor.dtype}, but must be {rule}')
    if tensor.device != device:
        raise ValueError(f'{name} is on {tensor.device}, but q is on {device}')


def _check_ops(
    tokens: Tokens,
    gates: Tensor | None,
    cache: LayerCache,
    freqs: Tensor | None,
    settings: Settings,
    modifiers: dict[str, Any],
    merge_window: bool,
    backend: str,
) -> None:
    """Raise ValueError where this backend has an op of `_decode_by_ops` that cannot serve it."""
    q, k, v = tokens[:3]
    of_cache, num_keys = torch.empty((), dtype=cache.dtype, device=cache.device), cache.max_length + q.shape[1]
    new_q = of_cache.expand(q.shape)
    held = (of_cache.expand(len(t), num_keys, *t.shape[2:]) for t in (k, v))
    merging = {'merge_window': merge_window, 'compressed_output': gates is not None}
    selecting = {'num_selected': settings.num_selected, 'share_group': settings.share_group}
    functional.backend_of(new_q, *held, **selecting, **modifiers, **merging, backend=backend)
    backend = 'eager' if backend == 'flex' else backend
    if gates is not None:
        sum_backend(gates, new_q, backend=backend)
    if freqs is not None:
        rotary_backend(q, freqs, freqs, backend=backend)


def _decode_by_ops(
    tokens: Tokens,
    gates: Tensor | None,
    cache: LayerCache,
    phi: Phi,
    freqs: Tensor | None,
    interpolate_factor: float,
    mem_kv: tuple[Tensor, Tensor | None] | None,
    counts: Tensor | None,
    settings: Settings,
    modifiers: dict[str, Any],
    merge_window: bool,
    backend: str,
) -> Tensor:
    """Any number of tokens, by the ops of `nsa`."""
    q, k, v, raw_k, raw_v, k_window, v_window = tokens
    num_tokens, dtype = q.shape[1], raw_k.dtype
    offset = cache.lengths.clone()
    tables = None if freqs is None else angle_tables(cache.positions(num_tokens), freqs, interpolate_factor)
    turned, k, k_window = rotate(tables, backend, q, k, k_window)
    compressed = None
    if cache.compress is not None:
        candidates, *blocks = cache.block_candidates(raw_k, raw_v)
        compressed = (candidates, *phi.of_tokens(blocks, dtype))
    cache.append(
        k,
        v,
        counts=counts,
        k_window=k_window,
        v_window=v_window,
        raw_k=raw_k,
        raw_v=raw_v,
        compressed=compressed,  # type: ignore[arg-type]
    )
    num_keys = cache.max_length
    summaries = (None, None)
    if cache.compress is not None:
        summaries = cache.read_compressed(num_compressed_blocks(num_keys, *cache.compress))
    k, v, k_window, v_window = cache.read(num_keys)
    return functional.nsa(
        turned.to(cache.dtype),
        k,
        v,
        *summaries,
        gates,
        merge_window=merge_window,
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
        **modifiers,
        backend=backend,
    )
