"""The definition of the loss of block scores, in loops over queries, heads and keys."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from tests.definition.definition import (
    block_scores,
    locate_queries,
    rows_of,
    shared_tokens,
    visible_compressed_blocks,
)


def block_score_loss(
    q: Tensor,
    k: Tensor,
    q_cmp: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    *,
    selection_block_size: int,
    window_size: tuple[int, int] | None = None,
    min_position: int = 0,
    share_group: bool = True,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    **settings: Any,
) -> Tensor:
    """Mean of KL(mass of full attention outside the window || scores), over rows with two blocks that have both."""
    sizes = {name: settings.pop(name) for name in ('compress_block_size', 'compress_stride')}
    block_size, stride = sizes.values()
    scores = block_scores(
        *(q_cmp, k_cmp, lse),
        **{**sizes, **settings, 'selection_block_size': selection_block_size, 'causal': causal, 'scale': scale},
        softcap=softcap,
    )
    where = {name: value for name, value in settings.items() if name != 'seqlen_k'}
    index_heads = k.shape[2] if share_group else q.shape[2]
    losses = []
    rows_q, rows_k = rows_of(q), rows_of(k)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    for query, index_head in itertools.product(
        locate_queries(q, settings.get('seqlen_k'), block_size, stride, **where), range(index_heads)
    ):
        if query.position >= query.num_keys or 0 < min_position > query.position:
            continue
        visible = [s for s in range(query.num_keys) if not causal or s <= query.position]
        far = [s for s in visible if window_size is None or not in_window(query.position - s, window_size)]
        compressed = visible_compressed_blocks(query, block_size, stride, causal)
        blocks = [
            j
            for j in sorted({s // selection_block_size for s in far})
            if any(shared_tokens(c, j, block_size, stride, selection_block_size) for c in compressed)
        ]
        if len(blocks) < 2:
            continue
        group_size = q.shape[2] // index_heads
        mass, share = (dict.fromkeys(blocks, torch.zeros(()).double()) for _ in range(2))
        for head in range(index_head * group_size, (index_head + 1) * group_size):
            kv_head = head // (q.shape[2] // k.shape[2])
            dense = {}
            for s in visible:
                key = rows_k[query.batch][query.first_key + s][kv_head]
                value = (rows_q[query.batch][query.index][head] * key).sum() * factor
                dense[s] = (value if softcap is None else softcap * torch.tanh(value / softcap)).exp()
            total = sum(dense.values())
            for s in far:
                if (block := s // selection_block_size) in mass:
                    mass[block] = mass[block] + dense[s] / total
            for j in blocks:
                share[j] = share[j] + scores.get((query.batch, query.index, head, j), 0)
        target = torch.stack([mass[j] for j in blocks]).detach()
        predicted = torch.stack([share[j] for j in blocks]) + 1e-20
        target, predicted = target / target.sum(), predicted / predicted.sum()
        losses.append((target * (target.log() - predicted.log())).sum())
    return torch.stack(losses).mean() if losses else torch.zeros(()).double()


def in_window(distance: int, window_size: tuple[int, int]) -> bool:
    left, right = window_size
    return (left < 0 or distance <= left) and (right < 0 or -distance <= right)
