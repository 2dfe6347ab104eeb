"""Compressed attention and block selection within regions of compressed blocks, against their definition."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention import compressed_regions as composed
from native_sparse_attention.core.call import Call, Regions, SelectionRules, make_call
from native_sparse_attention.core.geometry import forced_priority
from native_sparse_attention.ops.block_selection import eager as block_selection
from native_sparse_attention.ops.compressed_attention import eager as compressed_attention
from native_sparse_attention.ops.compressed_regions.eager import select_regions
from native_sparse_attention.ops.compressed_regions.regions import RegionRules, check_region_rules
from native_sparse_attention.ops.selected_attention import api as selected_attention
from tests.definition import definition
from tests.support.problems import (
    Extents,
    Heads,
    assert_agree,
    drawn_block_sizes,
    drawn_extents,
    drawn_heads,
    make_compressed,
    make_mem_kv,
    make_qkv,
    packed,
    row_integers,
    whole,
)

HEADS = Heads(4, 2, 4, 3)
EXTENTS = [
    whole(40, batch=2),
    packed([33, 0, 5, 21], uncovered=2),
    Extents(2, 9, 40, {'seqlens_k': row_integers([40, 23])}, [40, 23]),
    Extents(1, 12, 40, {'q_offset': 9}, [40]),
]
Sizes = tuple[int, int, int]


def make_problem(
    extents: Extents, heads: Heads, sizes: Sizes, causal: bool, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Call]:
    q, _, _ = make_qkv(extents, heads)
    k_cmp, v_cmp = make_compressed(extents, heads, *sizes[:2])
    where = extents.where
    placed = (where.get('q_offset'), where.get('seqlens_k'), where.get('cu_seqlens'), where.get('cu_seqlens_k'))
    call, _ = make_call(q, k_cmp, None, *placed, causal, None, softcap, compress=sizes[:2], seqlen_k=extents.seqlen_k)
    return q, k_cmp, v_cmp, call


def select_all(extents: Extents, index_heads: int, count: int) -> Tensor:
    shape = (extents.batch, extents.seqlen_q, index_heads, count)
    return torch.arange(count, dtype=torch.int32).expand(shape).contiguous()


@pytest.mark.parametrize('softcap', [None, 2.0])
@pytest.mark.parametrize('share_group', [True, False])
@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('extents', EXTENTS, ids=str)
def test_with_every_region_it_is_the_function_without_regions(
    extents: Extents, causal: bool, share_group: bool, softcap: float | None
) -> None:
    sizes, size = (5, 2, 4), 4
    q, k_cmp, v_cmp, call = make_problem(extents, HEADS, sizes, causal, softcap)
    memory, sinks = make_mem_kv(HEADS, 2), torch.randn(HEADS.heads, dtype=torch.float64)
    rules = RegionRules(size, 64, share_group)
    indices = select_regions(q, k_cmp, sizes[:2], call, rules)
    regions = Regions(indices, size)

    def attend(q: Tensor, k: Tensor, v: Tensor, mem_k: Tensor, mem_v: Tensor, sinks: Tensor, regions: Any = None):
        return compressed_attention.compressed_attention(
            q, k, v, (mem_k, mem_v), sizes[:2], call, sinks, regions=regions
        )

    assert_agree(partial(attend, regions=regions), attend, q, k_cmp, v_cmp, *memory, sinks, atol=1e-12)
    _, lse = attend(q, k_cmp, v_cmp, *memory, sinks)
    for num_init, num_local, num_recent in ((1, 2, 0), (0, 0, 0), (2, 1, 3)):
        selection = SelectionRules(3, num_init, num_local, num_recent if causal else 0, share_group)
        expected = block_selection.select_blocks(q, k_cmp, lse, sizes, call, selection)
        found = block_selection.select_blocks(q, k_cmp, lse, sizes, call, selection, regions)
        assert torch.equal(found, expected)

    def score(q: Tensor, k: Tensor, lse: Tensor, regions: Any = None) -> Tensor:
        return block_selection.chosen_scores(q, k, lse, expected, sizes, call, regions)

    assert_agree(partial(score, regions=regions), score, q, k_cmp, lse, atol=1e-12)


def read_by_definition(
    query: definition.Query, row_q: Tensor, keys: list[Tensor], rules: RegionRules, sizes: Sizes, call: Call
) -> list[int]:
    """Regions that a query with these heads `[G, D]` reads. keys: those of the compressed blocks of its sequence."""
    size, count = rules.size, len(keys)
    visible = list(range(count))
    if call.causal:
        visible = [c for c in visible if c * sizes[1] + sizes[0] - 1 <= query.position]
    if not visible:
        return []
    num_regions = -(-len(visible) // size)
    complete = [r for r in range(num_regions) if (r + 1) * size <= len(visible)]
    scores = [0.0] * num_regions
    for row in row_q:
        logits = [float(torch.stack(keys[r * size : (r + 1) * size]).mean(0) @ row) * call.scale for r in complete]
        if call.softcap is not None:
            logits = [call.softcap * float(torch.tensor(x / call.softcap).tanh()) for x in logits]
        weights = torch.tensor(logits, dtype=torch.float64).softmax(0).tolist()
        for r, weight in zip(complete, weights, strict=True):
            scores[r] += weight
    if call.causal:
        # Queries behind the keys may stand in a region without blocks.
        own = (query.position - sizes[0] + 1) // sizes[1] // size
        first = [own, own - 1, 0]
    else:
        own = min(max(query.position, 0) // (size * sizes[1]), num_regions - 1)
        last = [num_regions - 1] if count % size else []
        first = [own, *last, 0, own - 1, own + 1]
    chosen = [r for r in dict.fromkeys(first) if 0 <= r < num_regions]
    others = sorted((r for r in range(num_regions) if r not in chosen), key=lambda r: (-scores[r], r))
    return sorted([*chosen, *others][: rules.num_regions])


@given(
    drawn_extents(40),
    drawn_heads(),
    drawn_block_sizes(4),
    st.integers(1, 4),
    st.integers(3, 6),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1.5]),
)
def test_regions_blocks_and_attention_are_their_definition(
    extents: Extents,
    heads: Heads,
    sizes: Sizes,
    size: int,
    num_regions: int,
    share_group: bool,
    causal: bool,
    softcap: float | None,
) -> None:
    assume(size * sizes[1] % sizes[2] == 0)
    rules = RegionRules(size, num_regions if causal else max(num_regions, 5), share_group)
    check_region_rules(rules, sizes, causal)
    q, k_cmp, v_cmp, call = make_problem(extents, heads, sizes, causal, softcap)
    memory = make_mem_kv(heads, 1)
    indices = select_regions(q, k_cmp, sizes[:2], call, rules)
    regions = Regions(indices, size)
    out, lse = compressed_attention.compressed_attention(
        q, k_cmp, v_cmp, memory, sizes[:2], call, None, regions=regions
    )
    selection = SelectionRules(4, 1, 1, 0, share_group)
    blocks = block_selection.select_blocks(q, k_cmp, lse, sizes, call, selection, regions)
    scores = block_selection.chosen_scores(q, k_cmp, lse, blocks, sizes, call, regions)
    group = heads.heads // heads.kv_heads if share_group else 1
    for query in definition.locate_queries(q, extents.seqlen_k, *sizes[:2], **extents.where):
        at = (query.batch, query.index)
        for index_head in range(heads.heads // group):
            own_heads = range(index_head * group, (index_head + 1) * group)
            kv_head = own_heads[0] // (heads.heads // heads.kv_heads)
            stored = range(query.first_block, query.first_block + query.num_blocks)
            keys = [k_cmp[query.batch, c, kv_head] for c in stored]
            read = read_by_definition(query, q[at][own_heads], keys, rules, sizes, call)
            assert [r for r in indices[at][index_head].tolist() if r >= 0] == read
            assert_row(
                query, own_heads, read, (q, k_cmp, v_cmp, memory), (out, lse, blocks, scores), rules, sizes, call
            )


def assert_row(
    query: definition.Query,
    own_heads: range,
    read: list[int],
    inputs: tuple[Any, ...],
    outputs: tuple[Tensor, ...],
    rules: RegionRules,
    sizes: Sizes,
    call: Call,
) -> None:
    """Output, selected blocks and their scores of one query and the heads that select together."""
    q, k_cmp, v_cmp, (mem_k, mem_v) = inputs
    out, lse, blocks, scores = outputs
    at, (block_size, stride, selection_size) = (query.batch, query.index), sizes
    index_head, kv_head = own_heads[0] // len(own_heads), own_heads[0] // (q.shape[2] // k_cmp.shape[2])
    visible = [c for c in range(query.num_blocks) if not call.causal or c * stride + block_size - 1 <= query.position]
    kept = [c for c in visible if c // rules.size in read]
    weights = dict.fromkeys(kept, 0.0)
    for head in own_heads:
        rows = [query.first_block + c for c in kept]
        keys = torch.cat((mem_k[kv_head], k_cmp[query.batch, rows, kv_head]))
        logits = keys @ q[at][head] * call.scale
        if call.softcap is not None:
            logits = call.softcap * (logits / call.softcap).tanh()
        p = logits.softmax(0)
        values = torch.cat((mem_v[kv_head], v_cmp[query.batch, rows, kv_head]))
        torch.testing.assert_close(out[at][head], p @ values)
        torch.testing.assert_close(lse[query.batch, head, query.index], logits.logsumexp(0))
        for c, weight in zip(kept, p[len(mem_k[kv_head]) :].tolist(), strict=True):
            weights[c] += weight
    own = query.position // selection_size
    candidates = {}
    for j in range(-(-query.num_keys // selection_size)):
        if call.causal and j > own:
            continue
        tokens = range(j * selection_size, (j + 1) * selection_size)
        shared = {c: len(set(range(c * stride, c * stride + block_size)) & set(tokens)) / stride for c in visible}
        shared = {c: share for c, share in shared.items() if share}
        priority = forced_priority(j, own, 1, 1, call.causal)
        if priority or not shared or shared.keys() & weights.keys():
            candidates[j] = (priority, sum(weights[c] * share for c, share in shared.items() if c in weights))
    first = sorted(candidates, key=lambda j: (-candidates[j][0], -round(candidates[j][1], 10), j))[:4]
    assert [j for j in blocks[at][index_head].tolist() if j >= 0] == sorted(first)
    for j, score in zip(blocks[at][index_head].tolist(), scores[at][index_head].tolist(), strict=True):
        expected = candidates[j][1] * stride / (block_size * len(own_heads)) if j >= 0 else 0
        assert abs(score - expected) < 1e-9


@pytest.mark.parametrize('softcap', [None, 2.0])
@pytest.mark.parametrize('extents', EXTENTS, ids=str)
def test_gradients(extents: Extents, softcap: float | None) -> None:
    """Of the output, its log-sum-exp and the scores, with regions that do not depend on the inputs."""
    sizes, heads = (3, 2, 4), Heads(2, 1, 3, 2)
    q, k_cmp, v_cmp, call = make_problem(extents, heads, sizes, True, softcap)
    k_cmp, v_cmp = k_cmp.nan_to_num(0.3), v_cmp.nan_to_num(0.2)
    regions = Regions(select_regions(q, k_cmp, sizes[:2], call, RegionRules(2, 3, True)), 2)
    memory = make_mem_kv(heads, 1)

    def attend(*tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v, mem_k, mem_v = tensors
        out, lse = compressed_attention.compressed_attention(q, k, v, (mem_k, mem_v), sizes[:2], call, None, regions)
        selection = SelectionRules(3, 1, 1, 0, True)
        blocks = block_selection.select_blocks(q, k, lse, sizes, call, selection, regions)
        scores = block_selection.chosen_scores(q, k, lse, blocks, sizes, call, regions)
        return out, lse.where(lse.isfinite(), 0), scores

    tensors = [t.clone().requires_grad_() for t in (q, k_cmp, v_cmp, *memory)]
    assert torch.autograd.gradcheck(attend, tensors, fast_mode=True)


@pytest.mark.parametrize('share_group', [True, False])
@pytest.mark.parametrize('extents', [*EXTENTS, packed([70, 3, 45], 4), whole(75)], ids=str)
@pytest.mark.parametrize('sizes', [(5, 2, 4), (4, 4, 8), (7, 3, 3)])
def test_composed_of_existing_ops(sizes: Sizes, extents: Extents, share_group: bool) -> None:
    """Regions by `select_blocks`, and attention by `selected_attention`, equal the functions written from the
    definition.
    """
    q, k_cmp, v_cmp, call = make_problem(extents, HEADS, sizes, True, None)
    rules = RegionRules(4, 3, share_group)
    indices = select_regions(q, k_cmp, sizes[:2], call, rules)
    assert torch.equal(composed.select_by_blocks(q, k_cmp, sizes[:2], call, rules, backend='eager'), indices)
    regions = Regions(indices, rules.size)
    of_blocks = call._replace(sequences=call.sequences.of_compressed(k_cmp.shape[1], *sizes[:2]))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        tensors = (q, k, v, regions.indices, None, regions.size, of_blocks)
        return selected_attention.attend(*tensors, gate=None, backend='eager', compress=sizes[:2])

    def attend_by_definition(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return compressed_attention.compressed_attention(q, k, v, None, sizes[:2], call, None, regions)

    assert_agree(attend, attend_by_definition, q, k_cmp, v_cmp)


@pytest.mark.parametrize(
    ('rules', 'causal', 'message'),
    [
        (RegionRules(3, 8, True), True, 'region_size is 3, but 3 \\* 2 tokens, those of a region, must be a positive'),
        (RegionRules(0, 8, True), True, 'region_size is 0'),
        (RegionRules(4, 2, True), True, 'num_regions is 2, but must be at least 3'),
        (RegionRules(4, 4, True), False, 'num_regions is 4, but must be at least 5'),
    ],
)
def test_rules_that_do_not_fit(rules: RegionRules, causal: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_region_rules(rules, (5, 2, 4), causal)
