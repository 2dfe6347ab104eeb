"""Attention over a sequence that is divided over ranks, by queries.

Each rank computes the compressed blocks that start in its tokens, for which it fetches up to l - 1 tokens of other
ranks, and gathers those of all ranks. Keys and values are gathered one KV head after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from native_sparse_attention.autograd.recompute import SavedSelection
from native_sparse_attention.core.autocast import concatenate
from native_sparse_attention.core.checks import check_integers, check_tensors
from native_sparse_attention.core.geometry import num_compressed_blocks
from native_sparse_attention.core.random import as_seed
from native_sparse_attention.distributed.sequence import (
    DividedSequence,
    Division,
    Held,
    exchange_objects,
    fetch,
    gather,
    owned_blocks,
    run_uncompiled,
)
from native_sparse_attention.functional import nsa
from native_sparse_attention.nn.compress.apply import compress_tokens
from native_sparse_attention.ops import select_blocks

# Arguments of `nsa` that the division over ranks determines, or that it does not support.
_EXCLUDED = ('q_offset', 'seqlens_k', 'cu_seqlens_k', 'segment_ids', 'block_indices', 'block_counts', 'choose')
_SEED_STEP = 0x5851F42D4C957F2D  # between the dropout seeds of the calls of `nsa`


@run_uncompiled
def context_parallel_nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor | Sequence[Tensor | None] | None,
    *,
    compress_k: Callable[[Tensor], Tensor],
    compress_v: Callable[[Tensor], Tensor] | None,
    group: Any,
    q_cmp: Tensor | None = None,
    q_window: Tensor | None = None,
    k_window: Tensor | None = None,
    v_window: Tensor | None = None,
    k_cmp_input: Tensor | None = None,
    v_cmp_input: Tensor | None = None,
    compress_block_size: int,
    compress_stride: int,
    cu_seqlens: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """Compute `nsa` of a sequence that is divided over the ranks of a group.

    Each rank has the tokens of its shard, of any length, also 0; the shards follow each other in the order of the
    ranks. Gradients of q, k, v and gates are those of the whole computation. Gradients of what is replicated (weights
    of the networks, mem_kv, sinks) are the part of the rank: their sum over the group is the whole.

    Args:
        q: `[B, T, HQ, D]` queries of this rank, with rotary embedding.
        k: `[B, T, H, D]` keys of this rank, with rotary embedding.
        v: `[B, T, H, DV]` values of this rank.
        gates: as in `nsa`, for the tokens of this rank.
        compress_k: network φ of keys, `[B, H, C, l, D]` to `[B, H, C, D]`; a module or a function. A rank without
            blocks calls it with a block of constants, whose gradients are 0.
        compress_v: the same for values. None together with gates.
        group: process group of the ranks.
        q_cmp: as in `nsa`, as are the next three.
        q_window: queries of the window branch; default q.
        k_window: keys of the window branch; default k.
        v_window: values of the window branch; default v.
        k_cmp_input: `[B, T, H, D]` keys without rotary embedding, which are compressed; default k.
        v_cmp_input: `[B, T, H, DV]` values that are compressed; default v.
        compress_block_size: l, tokens of a compressed block.
        compress_stride: d, tokens between starts of compressed blocks, at most l.
        cu_seqlens: int32 `[N + 1]`, borders of packed sequences in the whole sequence, the same on all ranks. It is
            read on the host.
        **settings: other arguments of `nsa`, the same on all ranks: merge_window, mem_kv, selection_block_size,
            num_selected, window_size, num_init, num_local, num_recent, share_group, use_diff_topk, causal, scale,
            softcap, sinks, sinks_cmp, dropout_p, dropout_seed and backend. Dropout draws other numbers than `nsa`.

    Returns:
        `[B, T, HQ, DV]` in the dtype of q, of the tokens of this rank.

    Raises:
        ValueError: as `nsa`, on all ranks if one of them has an error; arguments that differ between ranks; other
            settings, or no tokens on any rank.
    """
    tokens = {'q': q, 'k': k, 'v': v, 'q_cmp': q_cmp, 'q_window': q_window, 'k_window': k_window, 'v_window': v_window}
    tokens |= {'k_cmp_input': k_cmp_input, 'v_cmp_input': v_cmp_input}
    settings |= {'compress_block_size': compress_block_size, 'compress_stride': compress_stride}
    try:
        described = _check(tokens, gates, compress_k, compress_v, cu_seqlens, settings)
    except Exception as error:  # of any class, so that the other ranks do not wait
        exchange_objects(group, error)
        raise
    sequence = DividedSequence.agree(group, q.shape[1], cu_seqlens, described)
    to_compress: Any = [tokens[name] if t is None else t for name in 'kv' for t in (tokens.pop(f'{name}_cmp_input'),)]
    networks = [n if isinstance(n, nn.Module) else _Function(n) for n in (compress_k, compress_v) if n is not None]

    def compress(tokens: list[Tensor], borders: Tensor | None) -> list[Tensor]:
        out = []
        for name, network, x in zip(('keys', 'values'), networks, tokens, strict=False):
            x = x if x.shape[1] else _constant_block(x, compress_block_size)
            no_positions = x.new_zeros(()).expand(x.shape[2], compress_block_size, x.shape[3])
            settings: dict[str, Any] = {'name': name, 'value_dim': x.shape[3]}
            out.append(compress_tokens(network, x, no_positions, compress_stride, borders, **settings))
        return out

    sizes = (compress_block_size, compress_stride)
    k_cmp, v_cmp = compress_divided(compress, sequence, sequence.shards, sizes, to_compress[: len(networks)])
    causal_sizes = sizes if settings.get('causal', True) else None
    of_nsa: Any = {**tokens, 'k_cmp': k_cmp, 'v_cmp': v_cmp, 'gates': gates, **settings}
    return attend_divided(nsa, sequence, sequence.shards, **of_nsa, causal_sizes=causal_sizes)


def _check(
    tokens: dict[str, Any], gates: Any, compress_k: Any, compress_v: Any, cu_seqlens: Any, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return a description of the arguments. Raise what `nsa` raises, which is called without any tokens."""
    for name in _EXCLUDED:
        if settings.get(name) is not None:
            raise ValueError(f'{name} is given, but must be None where a sequence is divided over ranks')
    for name, network in (('compress_k', compress_k), ('compress_v', compress_v)):
        if not callable(network) and (network is not None or name == 'compress_k'):
            raise ValueError(f'{name} is a {type(network).__name__}, but must be a module or a function')
    all_gates = {f'gates[{i}]': gate for i, gate in enumerate(gates if isinstance(gates, tuple | list) else [gates])}
    given: Any = {name: t for name, t in {**tokens, **all_gates}.items() if t is not None or name in 'qkv'}
    check_tensors(**given)
    q = tokens['q']
    for name, t in given.items():
        if t.ndim < 2 or t.shape[:2] != q.shape[:2]:
            raise ValueError(f'{name} has shape {tuple(t.shape)}, but must start with that of q, {tuple(q.shape[:2])}')
    if cu_seqlens is not None:
        check_integers('cu_seqlens', cu_seqlens, None)
        if len(q) != 1:
            raise ValueError(f'q has batch size {len(q)}, but must have 1 where cu_seqlens is given')
    none = _map(lambda t: t[:, :0], tokens)
    k_cmp, v_cmp = (none[name] if t is None else t for name in 'kv' for t in (none.pop(f'{name}_cmp_input'),))
    none |= {'k_cmp': k_cmp, 'v_cmp': None if compress_v is None else v_cmp, 'gates': _map(lambda t: t[:, :0], gates)}
    with torch.no_grad():
        nsa(**none, **settings)
    values = {**settings, **{name: t[:, :0] for name, t in given.items()}}
    return {'gradients': torch.is_grad_enabled(), **{name: _describe(value) for name, value in values.items()}}


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f'{list(value.shape)} of {value.dtype}{", with gradients" if value.requires_grad else ""}'
    return str([_describe(part) for part in value]) if isinstance(value, tuple | list) else repr(value)


def _map(function: Callable[[Any], Any], tensors: Any) -> Any:
    """Return the result of a function for a tensor or None, or those for a list, a tuple or a dict of them."""
    if isinstance(tensors, dict):
        return {name: _map(function, t) for name, t in tensors.items()}
    if isinstance(tensors, tuple | list):
        return tuple(_map(function, t) for t in tensors)
    return None if tensors is None else function(tensors)


def _constant_block(x: Tensor, block_size: int) -> Tensor:
    """Return tokens of one block `[B, l, H, D]` with the gradients of x `[B, 0, H, D]`.

    With it a network raises the same errors on all ranks, and its result requires gradients on all or on none. The
    values differ, so that norms of them have gradients.
    """
    batch, _, heads, dim = x.shape
    values = torch.linspace(-1, 1, block_size * dim, dtype=x.dtype, device=x.device).view(1, block_size, 1, dim)
    return concatenate([x, values.expand(batch, -1, heads, -1)], 1)


class _Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, blocks: Tensor) -> Tensor:
        return self.function(blocks)


def compress_divided(
    compress: Callable[[list[Tensor], Tensor | None], Sequence[Tensor | None]],
    sequence: DividedSequence,
    layout: Held,
    sizes: tuple[int, int],
    tokens: Sequence[Tensor],
) -> tuple[Any, Any]:
    """Return the compressed keys and values of all ranks, or None in place of the latter.

    Args:
        compress: called with local tokens and their borders `[N + 1]` as packed sequences, or None for one sequence.
        sequence: of the tokens.
        layout: of the tokens, one of those of the sequence.
        sizes: (l, d).
        tokens: `[B, T, H, D]` keys, and values if they are compressed, of this rank.
    """
    wanted, blocks = owned_blocks(sequence.held, sequence.sequences, *sizes)
    local = [fetch(t, sequence.group, layout, wanted) for t in tokens]
    parts, count = wanted[sequence.rank], sum(map(len, blocks[sequence.rank]))
    borders = None
    if len(parts) > 1:
        ends = list(accumulate(map(len, parts), initial=0))
        borders = torch.tensor(ends, dtype=torch.int32, device=tokens[0].device)
    own = [t[:, :count] for t in compress(local, borders) if t is not None]
    k_cmp, *v_cmp = gather(own, sequence.group, blocks)
    return k_cmp, v_cmp[0] if v_cmp else None


def attend_divided(
    attend: Callable[..., Tensor],
    sequence: DividedSequence,
    layout: Held,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cmp: Tensor | None,
    v_cmp: Tensor | None,
    gates: Any,
    *,
    q_cmp: Tensor | None = None,
    q_window: Tensor | None = None,
    k_window: Tensor | None = None,
    v_window: Tensor | None = None,
    mem_kv: tuple[Tensor, Tensor | None] | None = None,
    sinks: Tensor | None = None,
    sinks_cmp: Tensor | None = None,
    dropout_seed: int | Tensor | None = None,
    choose: Callable[..., Tensor] = select_blocks,
    causal_sizes: tuple[int, int] | None,
    **settings: Any,
) -> Tensor:
    """Return the output for the tokens of this rank, `[B, T, HQ, DV]`.

    attend: `nsa`, called for each KV head and each range of the tokens that this rank holds. layout: of the tokens and
    of the output, one of those of the sequence. k_cmp, v_cmp: of all ranks. causal_sizes: (l, d), or None where queries
    read later keys. The other arguments are those of `nsa`, with the tokens of this rank.
    """
    kv_heads, group_size = k.shape[2], q.shape[2] // k.shape[2]
    queries = {'q': q, 'q_cmp': q_cmp, 'q_window': q_window}
    keys: Any = {'k': k, 'v': v, 'k_window': k_window, 'v_window': v_window}
    keys = {name: t for name, t in keys.items() if t is not None}
    parts = sequence.held[sequence.rank] or (range(1),)
    seed = as_seed(dropout_seed, q.device) if settings.get('dropout_p') else None
    division = Division.of(sequence.group, layout, sequence.held)
    pieces = _map(lambda t: iter(division.split(t, kv_heads)), (queries, gates))
    of_parts = [[_map(next, pieces) for _ in range(kv_heads)] for _ in parts]
    # Gradients of pieces of a split are concatenated. Those of slices would each be padded to the whole and added.
    own_keys = _split(keys, 1, 2, kv_heads)
    of_heads = _split({'k_cmp': k_cmp, 'v_cmp': v_cmp}, 1, -2, kv_heads)
    memories = _split(mem_kv, 1, 0, kv_heads)
    head_sinks = _split({'sinks': sinks, 'sinks_cmp': sinks_cmp}, group_size, 0, kv_heads)
    visible = [_count_visible(sequence, part, causal_sizes) for part in parts]

    def attend_head(head: int) -> list[Tensor]:
        gathered = gather(list(own_keys[head].values()), sequence.group, layout)
        of_head = {'mem_kv': memories[head], **head_sinks[head]}
        outs = []
        for index, part in enumerate(parts):
            of_part, part_gates = of_parts[index][head]
            if seed is not None:  # random numbers depend on indices in the call
                call = (sequence.rank * 2 + index) * kv_heads + head
                of_part['dropout_seed'] = seed + (call * _SEED_STEP) % 2**63
            select = choose.part((head, index)) if isinstance(choose, SavedSelection) else choose
            tokens, blocks = visible[index]
            seen = {name: t[:, :tokens] for name, t in zip(keys, gathered, strict=True)}
            seen |= {name: t if t is None else t[:, :blocks] for name, t in of_heads[head].items()}
            where = _positions(sequence, part, tokens)
            outs.append(attend(**of_part, **seen, **of_head, gates=part_gates, choose=select, **where, **settings))
        return outs

    out = q.new_empty(*q.shape[:3], v.shape[3])
    for head in range(kv_heads):
        out = division.join(out, attend_head(head), head)
    return out


def _split(tensors: Any, size: int | list[int], dim: int, count: int) -> list[Any]:
    """Return the `count` pieces of all tensors along a dimension."""
    pieces = _map(lambda t: iter(t.split(size, dim)), tensors)
    return [_map(next, pieces) for _ in range(count)]


def _count_visible(sequence: DividedSequence, part: range, causal_sizes: tuple[int, int] | None) -> tuple[int, Any]:
    """Return the number of tokens, and of compressed blocks, that a range of queries may read.

    Kernels divide the keys that they are given over programs, so keys that no query reads would leave many idle.
    """
    if causal_sizes is None:
        return sequence.total, None
    seen = [range(s.start, min(s.stop, part.stop)) for s in sequence.sequences if s.start < part.stop]
    return part.stop, sum(num_compressed_blocks(len(s), *causal_sizes) for s in seen)


def _positions(sequence: DividedSequence, part: range, tokens: int) -> dict[str, Any]:
    """Return the arguments of `nsa` that place a range of queries among the first `tokens` of the sequence."""
    borders = sequence.cu_seqlens
    if borders is None:
        return {'q_offset': part.start}
    return {
        'q_offset': (part.start - borders[:-1]).clamp(min=0),
        'cu_seqlens': borders.clamp(part.start, part.stop) - part.start,
        'cu_seqlens_k': borders.clamp(max=tokens),
    }
