"""Decoding: attention of new tokens over a cache, from append to gated output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from native_sparse_attention import composition, functional
from native_sparse_attention.core import checks
from native_sparse_attention.core.backend import BackendChoice, check_backend, transformed
from native_sparse_attention.core.geometry import num_compressed_blocks
from native_sparse_attention.core.modifier_checks import reduce_sinks
from native_sparse_attention.inference.cache import LayerCache, check_layer_cache
from native_sparse_attention.inference.decode_checks import check_layer, check_new_tokens, check_rotary
from native_sparse_attention.inference.phi import Phi
from native_sparse_attention.inference.rollback import Checkpoint, settle_peaks
from native_sparse_attention.nn.rotary import angle_tables, rotate
from native_sparse_attention.ops.decoding import api
from native_sparse_attention.ops.decoding.step import MAX_SPLITS, LayerSettings, Mlps, Tokens, look_at
from native_sparse_attention.ops.gated_sum.api import backend_of as sum_backend
from native_sparse_attention.ops.rotary.api import backend_of as rotary_backend
from native_sparse_attention.ops.rotary.api import check_layout

if TYPE_CHECKING:
    from native_sparse_attention.ops.decoding.triton import LaunchCache


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
    q_cmp: Tensor | None = None,
    freqs: Tensor | None = None,
    interpolate_factor: float = 1.0,
    rotary_layout: str = 'interleaved',
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
    num_recent: int = 0,
    share_group: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sinks_cmp: Tensor | None = None,
    num_splits: int = 0,
    tiles_of_program: int = 0,
    backend: str = 'auto',
) -> Tensor:
    """Run `nsa` for new tokens over a cache: append, compress, attend and gate. Nothing is differentiated.

    Rotary embedding is applied here where freqs are given. Any other embedding is applied by the caller: q and k are
    rotated then, and q_cmp and raw_k are not.

    Args:
        q: `[B, T, HQ, D]` queries of the new tokens, without rotary embedding if freqs are given.
        k: `[B, T, H, D]` keys, like q.
        v: `[B, T, H, DV]` values.
        gates: `[B, T, HQ, 3]` after the sigmoid; with merge_window `[B, T, HQ, 1 or 2]` or None, as in `nsa`.
        cache: advances by the new tokens. It has compressed keys, with `has_raw_k` where freqs are given. Where gates
            are None it has no compressed values (`has_v_cmp`), and where num_selected is 0 too, no compressed keys.
        networks: φ for keys and for values, `[B, H, C, l, D or DV]` to `[B, H, C, D or DV]`.
        positions: `[H, l, D]` and `[H, l, DV]`, added to the blocks before φ.
        merge_window: as in `nsa`. Where gates are None, networks, positions and mem_kv
            for values are None too, and where num_selected is 0, also those for keys.
        q_cmp: `[B, T, HQ, D]` queries of the compressed branch; default q. Refused together with freqs.
        freqs: float32 `[F]`; the angles are position / interpolate_factor * freqs. None: q and k are read as given.
        interpolate_factor: divisor of the positions; left out where freqs are None, as rotary_layout.
        rotary_layout: pairs of features that freqs rotate, 'interleaved' or 'half', as in `ops.rotary`.
        mem_kv: a pair `[H, M, D]`, `[H, M, DV]` that every query sees in the compressed branch.
        raw_k: `[B, T, H, D]` keys to compress, in a cache with `has_raw_k`; default k.
        raw_v: `[B, T, H, DV]` values to compress, in a cache with `has_raw_v`; default v.
        k_window: `[B, T, H, D]` keys of the window branch; default k.
        v_window: `[B, T, H, DV]` values of the window branch; default v.
        counts: int32 or int64 `[B]`, number of real tokens of each row, which stand first; default T.
        selection_block_size: l', tokens of a selection block.
        num_selected: n, as in `nsa`.
        window_size: W, keys that a query reads in the window branch, its own included.
        num_init: as in `nsa`.
        num_local: as in `nsa`.
        num_recent: as in `nsa`.
        share_group: as in `nsa`.
        scale: factor of the logits, default D ** -0.5.
        softcap: as in `nsa`; steps with it run the ops of `nsa`.
        sinks: as in `nsa`; steps with it run the ops of `nsa`.
        sinks_cmp: as in `nsa`; steps with it run the ops of `nsa`.
        num_splits: parts into which the kernels split a row, at most 64; 0: chosen by the number of rows.
        tiles_of_program: tiles that a program of the kernels reads; 0: chosen by the number of rows.
        backend: 'auto', 'triton', 'flex' or 'eager'. The Triton decode kernels take up to 16 tokens at a time; longer
            chunks run the Triton ops of `nsa`.

    Returns:
        `[B, T, HQ, DV]` in the dtype of q.

    Raises:
        ValueError: shapes, devices or settings do not fit, networks cannot compress blocks, an explicit backend does
            not support the call, or the cache is full; nothing is written then.
    """
    check_layer_cache(cache)
    checks.check_flags(merge_window=merge_window)
    if merge_window:
        composition.check_merged(gates, q, mem_kv, sinks_cmp, k_window=k_window, v_window=v_window)
    phi, memory = Phi(networks, positions), None
    if mem_kv is not None:
        mem_k, mem_v = mem_kv
        memory = _laid_out(mem_k, cache.dtype), None if mem_v is None else _laid_out(mem_v, cache.dtype)
    by_kernels = softcap is None and sinks is None and sinks_cmp is None
    by_launches = by_kernels and counts is None and not torch.compiler.is_compiling()
    is_mean = phi.is_mean
    mlps = phi.mlps(cache) if by_launches and not is_mean else None
    # The key of recorded launches: shape, strides, dtype and alignment of tensors, and the other arguments by value.
    given = (
        *(q, k, v, gates, *positions, freqs, *(memory or (None, None)), k_window, v_window),
        *(None if raw_k is k else raw_k, None if raw_v is v else raw_v, None if q_cmp is q else q_cmp),
        *(() if mlps is None else mlps.tensors()),
    )
    values = (
        *(selection_block_size, num_selected, window_size, num_init, num_local, num_recent, share_group, scale),
        *(num_splits, tiles_of_program, interpolate_factor, rotary_layout, backend, merge_window, is_mean),
        mlps and mlps.adds_mean,
    )
    launches = cache.session.launches
    if by_launches and launches and transformed('triton') is None:
        looks, addresses = look_at(given, cache.owned_tensors())
        recorded = launches.find((values, looks))
        if recorded is not None and cache.has_room(q.shape[1]) and not recorded.are_watched():
            return _replay(q, v, cache, phi, recorded, addresses)
    raw_k, raw_v, q_cmp = (b if a is None else a for a, b in ((raw_k, k), (raw_v, v), (q_cmp, q)))
    tokens = Tokens(q, k, v, raw_k, raw_v, k_window, v_window, q_cmp)
    check_backend(backend)
    is_half = check_layout(rotary_layout=rotary_layout)
    checks.check_positive(window_size=window_size, selection_block_size=selection_block_size)
    checks.check_not_negative(num_selected=num_selected, num_init=num_init, num_local=num_local)
    checks.check_not_negative(num_recent=num_recent, num_splits=num_splits, tiles_of_program=tiles_of_program)
    if num_splits > MAX_SPLITS:
        raise ValueError(f'num_splits is {num_splits}, but must be at most {MAX_SPLITS}')
    check_new_tokens(tokens, gates, cache, counts, merge_window)
    needs_blocks = gates is not None or num_selected > 0
    check_rotary(tokens, cache, freqs, interpolate_factor, rotary_layout)
    check_layer(tokens, cache, phi, mem_kv, selection_block_size, needs_blocks)
    modifiers = {
        'softcap': checks.checked_softcap(softcap),
        'sinks': reduce_sinks(sinks, q),
        'sinks_cmp': reduce_sinks(sinks_cmp, q, 'sinks_cmp'),
    }
    settings = LayerSettings(
        *_compressed_sizes(cache, selection_block_size),
        *(selection_block_size, num_selected, window_size, num_init, num_local, num_recent, share_group),
        *(checks.logit_scale(q, scale), merge_window, is_half, num_splits, tiles_of_program),
    )
    with torch.no_grad():
        sizes = (selection_block_size, num_selected)
        has_sinks = sinks is not None or sinks_cmp is not None
        features = {'softcap': softcap, 'has_sinks': has_sinks}
        choice = backend_of(q, k, v, cache, *sizes, **features, backend=backend)
        by_ops = choice.name != 'triton' or not by_launches
        if by_ops and backend not in ('auto', 'eager'):
            _check_ops(tokens, gates, cache, freqs, settings, modifiers, backend)
        cache.reserve(q.shape[1])
        layer = (gates, cache, phi, freqs, interpolate_factor, memory)
        if by_ops:
            return _decode_by_ops(tokens, *layer, counts, settings, modifiers, backend).to(q.dtype)
        mlps = mlps if q.dtype == cache.dtype else None
        out, recorded = _decode_by_kernels(tokens, *layer, settings, mlps, given)
    if recorded.is_complete:
        looks, _ = look_at(given, cache.owned_tensors())
        launches.record((values, looks), recorded)
    return out


def _laid_out(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor contiguous in dtype: itself where it is, for which a step is spared two calls of PyTorch."""
    if tensor.dtype == dtype and tensor.is_contiguous():
        return tensor
    return tensor.to(dtype).contiguous()


def _decode_by_kernels(
    tokens: Tokens,
    gates: Tensor | None,
    cache: LayerCache,
    phi: Phi,
    freqs: Tensor | None,
    interpolate_factor: float,
    mem_kv: tuple[Tensor, Tensor | None] | None,
    settings: LayerSettings,
    mlps: Mlps | None,
    given: tuple[Tensor | None, ...],
) -> tuple[Tensor, LaunchCache]:
    """Run a step by the Triton kernels; return its output and its launches, for `_replay`.

    mlps: φ where the kernels compute it and it is no mean. given: the tensors that differ from step to step.
    """
    from native_sparse_attention.ops.decoding import triton

    q, storage, workspace, is_mean = tokens.q, cache.storage(), cache.session.workspace, phi.is_mean
    calls_networks = not is_mean and mlps is None
    if calls_networks:
        phi.check(cache, q)
    launches = triton.LaunchCache(given, storage[:-1], workspace)
    rotated, q_cmp, new_k, new_v = triton.append(
        *(tokens, storage, phi.positions, freqs, interpolate_factor, settings, is_mean, calls_networks),
        *(workspace, launches),
    )
    if mlps is not None:
        assert new_k is not None
        blocks = (new_k, new_v)
        new_k, new_v = triton.compress(blocks, mlps, storage, q.shape[1], settings, workspace, launches)
    elif calls_networks:
        launches.blocks = [None if b is None else b.transpose(1, 2) for b in (new_k, new_v)]
        new_k, new_v = _compress_blocks(phi, launches.blocks, cache, q)
        launches.give(new_k, new_v)
    out = triton.attend(*(rotated, q_cmp, new_k, new_v, gates, mem_kv, storage, settings, workspace, q.dtype, launches))
    cache.advance(q.shape[1])
    return out, launches


def _replay(q: Tensor, v: Tensor, cache: LayerCache, phi: Phi, launches: LaunchCache, addresses: list[int]) -> Tensor:
    """Replay the recorded launches of a step.

    addresses: data pointers of the arguments, whose shapes, strides and dtypes equal those of the recorded step.
    """
    out = q.new_empty(*q.shape[:3], v.shape[3])
    if not launches.blocks:
        launches.replay([*addresses, out.data_ptr()])
    else:
        phi.check(cache, q)
        launches.replay(addresses, stop=1)
        with torch.no_grad():
            new_k, new_v = _compress_blocks(phi, launches.blocks, cache, q)
        compressed = (0 if t is None else t.data_ptr() for t in (new_k, new_v))
        launches.replay([*addresses, *compressed, out.data_ptr()], start=1)
    cache.advance(q.shape[1])
    return out


def _compress_blocks(phi: Phi, blocks: list[Tensor | None], cache: LayerCache, q: Tensor) -> list[Tensor | None]:
    """Run φ between the launches of a step, which have written the new tokens into the rings."""
    try:
        return phi.aligned(blocks, q.dtype)
    except BaseException:
        settle_peaks(cache, q.shape[1])
        raise


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
    backend: str = 'auto',
) -> BackendChoice:
    """Return 'triton' where the decode kernels serve these new tokens in fixed launches, else 'eager'.

    'eager' stands for the ops of `nsa` one by one, by whatever backend serves them. softcap, has_sinks: features that
    only the ops have.
    """
    if backend == 'triton' and not 1 <= q.shape[1] <= api.MAX_NEW_TOKENS:
        backend = 'auto'
    return api.backend_of(
        *(q, k, v),
        storage=cache.storage(),
        compress=_compressed_sizes(cache, selection_block_size),
        selection_block_size=selection_block_size,
        num_selected=num_selected,
        softcap=softcap,
        has_sinks=has_sinks,
        backend=backend,
    )


def _compressed_sizes(cache: LayerCache, selection_block_size: int) -> tuple[int, int]:
    """Return l and d; without compressed keys, where neither is used, l' for both."""
    return cache.compress or (selection_block_size, selection_block_size)


def _check_ops(
    tokens: Tokens,
    gates: Tensor | None,
    cache: LayerCache,
    freqs: Tensor | None,
    settings: LayerSettings,
    modifiers: dict[str, Any],
    backend: str,
) -> None:
    """Raise ValueError where the backend cannot serve an op of `_decode_by_ops`."""
    q, k, v = tokens[:3]
    of_cache, num_keys = torch.empty((), dtype=cache.dtype, device=cache.device), cache.max_length + q.shape[1]
    new_q = of_cache.expand(q.shape)
    held = (of_cache.expand(len(t), num_keys, *t.shape[2:]) for t in (k, v))
    merging = {'merge_window': settings.merge_window, 'compressed_output': gates is not None}
    selecting = {'num_selected': settings.num_selected, 'share_group': settings.share_group}
    composition.backend_of(new_q, *held, **selecting, **modifiers, **merging, backend=backend)
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
    settings: LayerSettings,
    modifiers: dict[str, Any],
    backend: str,
) -> Tensor:
    """Run a step of any number of tokens by the ops of `nsa`. An error leaves the lengths as they were."""
    q, k, v, raw_k, raw_v, k_window, v_window, q_cmp = tokens
    num_tokens, dtype = q.shape[1], raw_k.dtype
    offset = cache.lengths.clone()
    tables = None if freqs is None else angle_tables(cache.positions(num_tokens), freqs, interpolate_factor)
    layout = 'half' if settings.is_half else 'interleaved'
    rotated, k, k_window = rotate(tables, backend, q, k, k_window, layout=layout)
    compressed = None
    if cache.compress is not None:
        candidates, *blocks = cache.block_candidates(raw_k, raw_v)
        compressed = (candidates, *phi.of_tokens(blocks, dtype))
    checkpoint = Checkpoint([cache], num_tokens, offset)
    try:
        appended = {'k_window': k_window, 'v_window': v_window, 'raw_k': raw_k, 'raw_v': raw_v}
        cache.append(k, v, counts=counts, compressed=compressed, **appended)  # type: ignore[arg-type]
        return _attend_to_cache(rotated, q_cmp, gates, cache, mem_kv, offset, settings, modifiers, backend)
    except BaseException:
        checkpoint.restore()
        raise


def _attend_to_cache(
    q: Tensor,
    q_cmp: Tensor,
    gates: Tensor | None,
    cache: LayerCache,
    mem_kv: tuple[Tensor, Tensor | None] | None,
    offset: Tensor,
    settings: LayerSettings,
    modifiers: dict[str, Any],
    backend: str,
) -> Tensor:
    """Run `nsa` for queries q and q_cmp `[B, T, HQ, D]` at positions offset + t over everything in the cache."""
    num_keys = cache.max_length
    compressed = (None, None)
    if cache.compress is not None:
        compressed = cache.read_compressed(num_compressed_blocks(num_keys, *cache.compress))
    k, v, k_window, v_window = cache.read(num_keys)
    return functional.nsa(
        q.to(cache.dtype),
        k,
        v,
        *compressed,
        gates,
        merge_window=settings.merge_window,
        mem_kv=mem_kv,
        q_cmp=q_cmp.to(cache.dtype),
        k_window=k_window,
        v_window=v_window,
        compress_block_size=settings.compress_block_size,
        compress_stride=settings.compress_stride,
        selection_block_size=settings.selection_block_size,
        num_selected=settings.num_selected,
        window_size=(settings.window_size - 1, 0),
        num_init=settings.num_init,
        num_local=settings.num_local,
        num_recent=settings.num_recent,
        share_group=settings.share_group,
        scale=settings.scale,
        q_offset=offset,
        seqlens_k=cache.lengths,
        **modifiers,
        backend=backend,
    )
