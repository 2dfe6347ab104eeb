"""The definitions of the ops, token by token, to be read beside the paper.

One loop per batch row, query, head and key, in float64, differentiable, and nothing shared with the package. Signatures
are those of the public ops. Letters: l = compress_block_size, d = stride, l' = selection_block_size, t = position of a
query in its sequence, c = compressed block, j = selection block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Output and log-sum-exp by batch, index of the query and head; None for rows that read nothing.
Results = dict[tuple[int, int, int], tuple[Tensor, Tensor] | None]


class Query(NamedTuple):
    """A query: where it is stored, its position, and the keys and compressed blocks of its sequence."""

    batch: int
    index: int
    position: int
    first_key: int
    num_keys: int
    first_block: int
    num_blocks: int


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    *,
    block_size: int,
    stride: int,
    mem_kv: tuple[Tensor, Tensor] | None = None,
    seqlen_k: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    **where: Any,
) -> tuple[Tensor, Tensor]:
    results: Results = {}
    rows_q, rows_k, rows_v = map(rows_of, (q, k_cmp, v_cmp))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    for query in locate_queries(q, seqlen_k, block_size, stride, **where):
        for head in range(q.shape[2]):
            kv_head = head // (q.shape[2] // k_cmp.shape[2])
            keys, values = [], []
            if mem_kv is not None:
                keys += [key.double() for key in mem_kv[0][kv_head]]
                values += [value.double() for value in mem_kv[1][kv_head]]
            for c in visible_compressed_blocks(query, block_size, stride, causal):
                keys.append(rows_k[query.batch][query.first_block + c][kv_head])
                values.append(rows_v[query.batch][query.first_block + c][kv_head])
            row_q = rows_q[query.batch][query.index][head]
            of_sinks = None if sinks is None else sinks[head]
            results[query.batch, query.index, head] = attend(row_q, keys, values, factor, None, softcap, of_sinks)
    return collect(q, v_cmp, results)


def block_scores(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    *,
    compress_block_size: int,
    compress_stride: int,
    selection_block_size: int,
    seqlen_k: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    **where: Any,
) -> dict[tuple[int, int, int, int], Tensor]:
    """Equation 9, per head: {(batch, index of the query, head, selection block): score}."""
    scores = {}
    rows_q, rows_k, rows_lse = map(rows_of, (q, k_cmp, lse[..., None]))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    for query in locate_queries(q, seqlen_k, compress_block_size, compress_stride, **where):
        visible = visible_compressed_blocks(query, compress_block_size, compress_stride, causal)
        for head in range(q.shape[2]):
            kv_head = head // (q.shape[2] // k_cmp.shape[2])
            weights = {}
            for c in visible:
                key = rows_k[query.batch][query.first_block + c][kv_head]
                capped = (rows_q[query.batch][query.index][head] * key).sum() * factor
                if softcap is not None:
                    capped = softcap * torch.tanh(capped / softcap)
                weights[c] = (capped - rows_lse[query.batch][head][query.index].squeeze()).exp()
            for j in selection_blocks(query, selection_block_size):
                score = q.new_zeros((), dtype=torch.float64)
                for c in visible:
                    shared = shared_tokens(c, j, compress_block_size, compress_stride, selection_block_size)
                    if shared:
                        score = score + weights[c] * shared / compress_stride
                scores[query.batch, query.index, head, j] = score
    return scores


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    *,
    compress_block_size: int,
    compress_stride: int,
    selection_block_size: int,
    num_selected: int,
    num_init: int = 1,
    num_local: int = 2,
    num_recent: int = 0,
    seqlen_k: int | None = None,
    share_group: bool = True,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    block_counts: int | Tensor | None = None,
    **where: Any,
) -> Tensor:
    sizes = {'compress_block_size': compress_block_size, 'compress_stride': compress_stride}
    scores = block_scores(
        q,
        k_cmp,
        lse,
        **sizes,
        selection_block_size=selection_block_size,
        seqlen_k=seqlen_k,
        causal=causal,
        scale=scale,
        softcap=softcap,
        **where,
    )
    index_heads = k_cmp.shape[2] if share_group else q.shape[2]
    group_size = q.shape[2] // index_heads
    block_indices = torch.full((*q.shape[:2], index_heads, num_selected), -1, dtype=torch.int32)
    for query in locate_queries(q, seqlen_k, compress_block_size, compress_stride, **where):
        blocks = selection_blocks(query, selection_block_size)
        selecting = query.position - num_recent
        allowed = [j for j in blocks if not causal or j * selection_block_size <= selecting]
        forced = forced_blocks(selecting // selection_block_size, num_init, num_local, causal)
        for index_head in range(index_heads):
            heads = range(index_head * group_size, (index_head + 1) * group_size)
            total = {
                j: sum(float(scores[query.batch, query.index, head, j].detach()) for head in heads) for j in allowed
            }
            best_first = sorted(allowed, key=lambda j, total=total: (-total[j], j))
            count = count_of(block_counts, query, index_head, num_selected)
            taken = list(dict.fromkeys([j for j in forced if j in allowed] + best_first))
            taken = taken[: min(count, num_selected)]
            for entry, j in enumerate(sorted(taken)):
                block_indices[query.batch, query.index, index_head, entry] = j
    return block_indices


def forced_blocks(own_block: int, num_init: int, num_local: int, causal: bool) -> list[int]:
    """Return forced blocks in the order in which they are selected. Some of them may not exist."""
    own = [own_block] if num_local > 0 else []
    initial = list(range(num_init))
    local = []
    for distance in range(1, num_local):
        local.append(own_block - distance)
        if not causal:
            local.append(own_block + distance)
    return own + initial + local


def chosen_scores(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    *,
    compress_block_size: int,
    compress_stride: int,
    **settings: Any,
) -> Tensor:
    sizes = {'compress_block_size': compress_block_size, 'compress_stride': compress_stride}
    scores = block_scores(q, k_cmp, lse, **sizes, **settings)
    group_size = q.shape[2] // block_indices.shape[2]
    results = []
    for batch, index, index_head, entry in every_index(block_indices):
        j = int(block_indices[batch, index, index_head, entry])
        result = torch.zeros((), dtype=torch.float64)
        for head in range(index_head * group_size, (index_head + 1) * group_size):
            if (batch, index, head, j) in scores:
                factor = compress_stride / (compress_block_size * group_size)
                result = result + scores[batch, index, head, j] * factor
        results.append(result)
    return stack_as(results, block_indices.shape)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    block_size: int,
    block_scale: Tensor | None = None,
    block_counts: int | Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    **where: Any,
) -> tuple[Tensor, Tensor]:
    results: Results = {}
    rows_q, rows_k, rows_v = map(rows_of, (q, k, v))
    rows_scale = None if block_scale is None else rows_of(block_scale)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    for query in locate_queries(q, k.shape[1], **where):
        for head in range(q.shape[2]):
            kv_head = head // (q.shape[2] // k.shape[2])
            index_head = head // (q.shape[2] // block_indices.shape[2])
            row = block_indices[query.batch, query.index, index_head].tolist()
            row = row[: count_of(block_counts, query, index_head, len(row))]
            keys, values, factors = [], [], []
            for key_position in range(query.num_keys):
                if key_position // block_size not in row or (causal and key_position > query.position):
                    continue
                first_occurrence = row.index(key_position // block_size)
                keys.append(rows_k[query.batch][query.first_key + key_position][kv_head])
                values.append(rows_v[query.batch][query.first_key + key_position][kv_head])
                if rows_scale is not None:
                    factors.append(rows_scale[query.batch][query.index][index_head][first_occurrence])
            row_q = rows_q[query.batch][query.index][head]
            results[query.batch, query.index, head] = attend(row_q, keys, values, factor, factors, softcap)
    return collect(q, v, results)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window_size: tuple[int, int],
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    **where: Any,
) -> tuple[Tensor, Tensor]:
    left, right = window_size
    results: Results = {}
    rows_q, rows_k, rows_v = map(rows_of, (q, k, v))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    for query in locate_queries(q, k.shape[1], **where):
        for head in range(q.shape[2]):
            kv_head = head // (q.shape[2] // k.shape[2])
            keys, values = [], []
            for key_position in range(query.num_keys):
                if causal and key_position > query.position:
                    continue
                if left >= 0 and key_position < query.position - left:
                    continue
                if right >= 0 and key_position > query.position + right:
                    continue
                keys.append(rows_k[query.batch][query.first_key + key_position][kv_head])
                values.append(rows_v[query.batch][query.first_key + key_position][kv_head])
            row_q = rows_q[query.batch][query.index][head]
            of_sinks = None if sinks is None else sinks[head]
            results[query.batch, query.index, head] = attend(row_q, keys, values, factor, None, softcap, of_sinks)
    return collect(q, v, results)


def gated_sum(gates: Tensor, out_compressed: Tensor, out_selected: Tensor, out_window: Tensor) -> Tensor:
    """Equation 5."""
    out = []
    rows_gates, *branches = map(rows_of, (gates, out_compressed, out_selected, out_window))
    for batch, index, head in every_index(gates[..., 0]):
        factors = rows_gates[batch][index][head].unbind()
        out.append(sum(gate * rows[batch][index][head] for gate, rows in zip(factors, branches, strict=True)))
    return stack_as(out, out_compressed.shape)


def nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    gates: Tensor,
    *,
    q_cmp: Tensor | None = None,
    q_window: Tensor | None = None,
    k_window: Tensor | None = None,
    v_window: Tensor | None = None,
    mem_kv: tuple[Tensor, Tensor] | None = None,
    compress_block_size: int,
    compress_stride: int,
    selection_block_size: int,
    num_selected: int,
    window_size: tuple[int, int],
    num_init: int = 1,
    num_local: int = 2,
    num_recent: int = 0,
    share_group: bool = True,
    use_diff_topk: bool = False,
    block_counts: int | Tensor | None = None,
    sinks: Tensor | None = None,
    sinks_cmp: Tensor | None = None,
    **where: Any,
) -> Tensor:
    q_cmp = q if q_cmp is None else q_cmp
    q_window = q if q_window is None else q_window
    k_window = k if k_window is None else k_window
    v_window = v if v_window is None else v_window
    seqlen_k = k.shape[1]
    sizes = {'compress_block_size': compress_block_size, 'compress_stride': compress_stride}
    settings = {**sizes, 'selection_block_size': selection_block_size, 'seqlen_k': seqlen_k, **where}

    blocks: dict[str, Any] = {'block_size': compress_block_size, 'stride': compress_stride}
    out_compressed, lse = compressed_attention(
        q_cmp, k_cmp, v_cmp, **blocks, mem_kv=mem_kv, seqlen_k=seqlen_k, sinks=sinks_cmp, **where
    )
    forced: dict[str, int] = {'num_init': num_init, 'num_local': num_local}
    counts: dict[str, Any] = {'num_selected': num_selected, 'block_counts': block_counts, 'num_recent': num_recent}
    block_indices = select_blocks(q_cmp, k_cmp, lse, share_group=share_group, **counts, **forced, **settings)
    block_scale = None
    if use_diff_topk:
        scores = chosen_scores(q_cmp, k_cmp, lse, block_indices, **settings)
        is_forced = torch.zeros(scores.shape, dtype=torch.bool)
        causal = where.get('causal', True)
        for query in locate_queries(q, seqlen_k, **positions_of(where)):
            without_scale = forced_blocks(
                (query.position - num_recent) // selection_block_size, **forced, causal=causal
            )
            for index_head, entry in itertools.product(*map(range, block_indices.shape[2:])):
                if int(block_indices[query.batch, query.index, index_head, entry]) in without_scale:
                    is_forced[query.batch, query.index, index_head, entry] = True
        block_scale = (1 + (scores - scores.detach())).masked_fill(is_forced, 1)
    out_selected, _ = selected_attention(
        q, k, v, block_indices, block_size=selection_block_size, block_scale=block_scale, **where
    )
    out_window, _ = window_attention(q_window, k_window, v_window, window_size=window_size, sinks=sinks, **where)
    return gated_sum(gates, out_compressed, out_selected, out_window)


def count_of(block_counts: int | Tensor | None, query: Query, index_head: int, default: int) -> int:
    """Return how many entries of a row of block indices are read."""
    if isinstance(block_counts, Tensor):
        block_counts = int(block_counts[query.batch, query.index, index_head])
    return default if block_counts is None else max(0, block_counts)


def attend(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    scale: float,
    factors: list[Tensor] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Return output and log-sum-exp of one query over the keys it reads, None where it reads nothing. sinks `[]` or
    `[M]` are logits of keys whose values are 0.
    """
    if not keys and sinks is None:
        return None
    logits = (q * torch.stack(keys)).sum(1) * scale if keys else torch.zeros(0).double()
    if factors:
        logits = logits * torch.stack(factors)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    of_sinks = logits[:0] if sinks is None else sinks.double().flatten()
    lse = torch.cat((logits, of_sinks)).logsumexp(0)
    weights = (logits - lse).exp()
    return (weights[:, None] * torch.stack(values)).sum(0) if keys else torch.zeros(()).double(), lse


def locate_queries(
    q: Tensor,
    seqlen_k: int | None,
    block_size: int = 1,
    stride: int = 1,
    *,
    q_offset: int | Tensor | None = None,
    seqlens_k: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Iterator[Query]:
    """Every query that belongs to a sequence."""
    if cu_seqlens is not None:
        ends_q = cu_seqlens.tolist()
        ends_k = ends_q if cu_seqlens_k is None else cu_seqlens_k.tolist()
        first_block = 0
        for sequence in range(len(ends_q) - 1):
            num_queries, num_keys = (ends[sequence + 1] - ends[sequence] for ends in (ends_q, ends_k))
            num_blocks = count_compressed_blocks(num_keys, block_size, stride)
            offset = first_position(q_offset, sequence, num_keys - num_queries)
            for t in range(num_queries):
                yield Query(0, ends_q[sequence] + t, offset + t, ends_k[sequence], num_keys, first_block, num_blocks)
            first_block += num_blocks
        return
    for batch in range(q.shape[0]):
        if seqlens_k is not None:
            num_keys = int(seqlens_k[batch])
        elif seqlen_k is not None:
            num_keys = seqlen_k
        else:
            assert not isinstance(q_offset, Tensor)
            num_keys = max(0, q.shape[1] + (q_offset or 0))
        num_blocks = count_compressed_blocks(num_keys, block_size, stride)
        offset = first_position(q_offset, batch, num_keys - q.shape[1])
        for t in range(q.shape[1]):
            yield Query(batch, t, offset + t, 0, num_keys, 0, num_blocks)


def first_position(q_offset: int | Tensor | None, sequence: int, default: int) -> int:
    if q_offset is None:
        return default
    return int(q_offset[sequence]) if isinstance(q_offset, Tensor) else q_offset


def count_compressed_blocks(num_tokens: int, block_size: int, stride: int) -> int:
    """Blocks of l tokens, one every d tokens, as long as they are complete."""
    return sum(start + block_size <= num_tokens for start in range(0, num_tokens, stride))


def visible_compressed_blocks(query: Query, block_size: int, stride: int, causal: bool) -> list[int]:
    """Compressed blocks whose last token is not in the future."""
    return [c for c in range(query.num_blocks) if not causal or c * stride + block_size - 1 <= query.position]


def selection_blocks(query: Query, block_size: int) -> range:
    """Selection blocks of the query's sequence; the last may be incomplete."""
    return range(len(range(0, query.num_keys, block_size)))


@cache
def shared_tokens(c: int, j: int, compress_block_size: int, stride: int, selection_block_size: int) -> int:
    compressed = range(c * stride, c * stride + compress_block_size)
    selected = range(j * selection_block_size, (j + 1) * selection_block_size)
    return len(set(compressed) & set(selected))


def rows_of(tensor: Tensor) -> list[list[tuple[Tensor, ...]]]:
    """Return the rows of a tensor `[A, B, C, D]`, in float64. Unlike indices they have gradients of their own size."""
    return [[inner.unbind() for inner in outer.unbind()] for outer in tensor.double().unbind()]


def collect(q: Tensor, v: Tensor, results: Results) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of all rows: 0 and -inf for those that read nothing."""
    batch, seqlen_q, heads, _ = q.shape
    nothing = torch.zeros((), dtype=torch.float64), torch.tensor(-torch.inf, dtype=torch.float64)
    found = [
        results.get((row, index, head)) or nothing
        for row, index, head in itertools.product(range(batch), range(seqlen_q), range(heads))
    ]
    out = stack_as([out.expand(v.shape[-1]) for out, _ in found], (batch, seqlen_q, heads, v.shape[-1]))
    return out, stack_as([lse for _, lse in found], (batch, seqlen_q, heads)).transpose(1, 2).contiguous()


def stack_as(tensors: list[Any], shape: tuple[int, ...]) -> Tensor:
    return torch.stack(tensors).view(shape) if tensors else torch.zeros(shape, dtype=torch.float64)


def positions_of(where: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that give the positions of queries."""
    return {name: value for name, value in where.items() if name not in ('causal', 'scale', 'softcap')}


def every_index(tensor: Tensor) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, tensor.shape))
