"""Problems of block selection inside regions, and its definition in plain PyTorch, written without the ops."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.core.backend import choose_backend
from native_sparse_attention.core.call import Call, Regions, SelectionRules, make_call
from native_sparse_attention.core.geometry import forced_priority
from native_sparse_attention.ops._triton import support
from native_sparse_attention.ops.block_selection import triton
from tests.support.harness import fence
from tests.support.problems import Extents, Heads
from tests.support.select_blocks_problems import Problem, Sizes, make_counts, make_problem

SIZE_NAMES = ('compress_block_size', 'compress_stride', 'selection_block_size')
NO_BLOCK = 2**31 - 1  # sorted behind every block
CALL_NAMES = ('seqlen_k', 'q_offset', 'seqlens_k', 'cu_seqlens', 'cu_seqlens_k', 'causal', 'scale', 'softcap')


def parse(q: Tensor, k_cmp: Tensor, settings: dict[str, Any]) -> tuple[Sizes, Call, dict[str, Any]]:
    """Return the block sizes, the record of the call and the other settings."""
    settings = dict(settings)
    sizes = tuple(settings.pop(name) for name in SIZE_NAMES)
    given = {name: settings.pop(name) for name in CALL_NAMES if name in settings}
    names = ('q_offset', 'seqlens_k', 'cu_seqlens', 'cu_seqlens_k', 'causal', 'scale', 'softcap')
    placed = (given.get(name, True if name == 'causal' else None) for name in names)
    call, _ = make_call(q, k_cmp, None, *placed, compress=sizes[:2], seqlen_k=given.get('seqlen_k'))
    return sizes, call, settings


def select_in_regions(
    q: Tensor, k_cmp: Tensor, lse: Tensor, regions: Tensor, *, region_size: int, backend: str, **settings: Any
) -> Tensor:
    """Call either backend with the settings of `select_blocks`."""
    choose_backend('select_in_regions', backend, q.device, _candidates(q, k_cmp))
    sizes, call, choice = parse(q, k_cmp, settings)
    forced = (choice.get('num_init', 1), choice.get('num_local', 2), choice.get('num_recent', 0))
    rules = SelectionRules(
        choice['num_selected'], *forced, choice.get('share_group', True), choice.get('block_counts')
    )  # fmt: skip
    select = triton.select_in_regions if backend == 'triton' else define_selection
    return select(q, k_cmp, lse, Regions(regions, region_size), sizes, call, rules)


def scores_in_regions(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    regions: Tensor,
    *,
    region_size: int,
    backend: str,
    forced: tuple[int, int, int] | None = None,
    **settings: Any,
) -> Tensor:
    """Call either backend with the settings of `chosen_scores`. forced: call `straight_through_scale` with these."""
    choose_backend('chosen_scores', backend, q.device, _candidates(q, k_cmp))
    sizes, call, _ = parse(q, k_cmp, settings)
    read = Regions(regions, region_size)
    if backend != 'triton':
        return define_scores(q, k_cmp, lse, block_indices, sizes, call, read, forced)
    if forced is None:
        return triton.chosen_scores(q, k_cmp, lse, block_indices, sizes, call, read)
    return triton.straight_through_scale(q, k_cmp, lse, block_indices, sizes, call, forced, read)


def _candidates(q: Tensor, k_cmp: Tensor) -> dict[str, Any]:
    return {'triton': partial(support.unsupported, q, k_cmp), 'eager': lambda: None}


class Dense:
    """Every compressed block and selection block of every query. blocks: `[J]`; visible, read: `[B, T, HI, C]`, by
    number in the query's sequence; shared: `[J, C]`, tokens that two blocks share.
    """

    def __init__(self, k_cmp: Tensor, regions: Regions, sizes: Sizes, call: Call) -> None:
        block_size, stride, selection_block_size = sizes
        layout, self.tokens = call.sequences.compressed_layout(block_size, stride)
        self.position = layout.position
        count = torch.arange(max(1, k_cmp.shape[1]), device=k_cmp.device)
        exists = count < layout.key_len[..., None]
        if call.causal:
            exists = exists & (count * stride + block_size - 1 <= layout.position[..., None])
        self.visible = exists[:, :, None] & (count < k_cmp.shape[1])
        self.slot = (count + layout.key_start[..., None]).clamp(0, max(0, k_cmp.shape[1] - 1))
        region = count // regions.size
        self.read = self.visible & (regions.indices[..., None] == region).any(3)
        # Enough blocks for all tokens of a sequence that has all the compressed blocks.
        self.max_tokens = min(call.sequences.seqlen_k, k_cmp.shape[1] * stride + block_size - 1)
        self.blocks = torch.arange(-(-self.max_tokens // selection_block_size), device=k_cmp.device)
        begin, start = self.blocks[:, None] * selection_block_size, count * stride
        stop = torch.minimum(begin + selection_block_size, start + block_size)
        self.shared = (stop - torch.maximum(begin, start)).clamp(min=0)

    def weights(self, q: Tensor, k_cmp: Tensor, lse: Tensor, call: Call) -> Tensor:
        """Return `[B, T, HQ, C]`, 0 outside of the read regions."""
        heads = q.shape[2]
        read = self.read.repeat_interleave(heads // self.read.shape[2], 2)
        # Keys of no sequence are NaN, and must not reach gradients.
        keys = torch.nn.functional.pad(k_cmp, (0,) * 5 + (k_cmp.shape[1] == 0,)).nan_to_num()
        every = torch.einsum('bthgd,bshd->bthgs', q.unflatten(2, (k_cmp.shape[2], -1)), keys).flatten(2, 3)
        logits = every.gather(-1, self.slot[:, :, None].expand(*every.shape[:3], -1)) * call.scale
        if call.softcap is not None:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        exponent = logits - lse.transpose(1, 2)[..., None]
        return exponent.masked_fill(~read, -torch.inf).exp()


@torch.no_grad()
def define_selection(
    q: Tensor, k_cmp: Tensor, lse: Tensor, regions: Regions, sizes: Sizes, call: Call, rules: SelectionRules
) -> Tensor:
    """Select blocks. A block that overlaps visible compressed blocks, but none that is read, is a candidate
    only where it is forced.
    """
    dense = Dense(k_cmp, regions, sizes, call)
    index_heads = k_cmp.shape[2] if rules.share_group else q.shape[2]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    weights = dense.weights(q.to(dtype), k_cmp.to(dtype), lse.to(dtype), call).unflatten(2, (index_heads, -1)).sum(3)
    scores = weights @ dense.shared.to(weights.dtype).T / sizes[1]
    overlap = (dense.shared > 0).float().T
    is_reached = (dense.read.float() @ overlap > 0) | (dense.visible.float() @ overlap == 0)
    own = (dense.position[..., None] - rules.num_recent) // sizes[2]
    selectable = dense.blocks < -(-dense.tokens.clamp(max=dense.max_tokens)[..., None] // sizes[2])
    if call.causal:
        selectable = selectable & (dense.blocks <= own)
    priority = forced_priority(dense.blocks, own, rules.num_init, rules.num_local, call.causal)
    is_candidate = selectable[:, :, None] & (is_reached | (priority > 0)[:, :, None])
    # By priority, then score, then number: sort by the last first.
    order = scores.nan_to_num(nan=torch.inf, posinf=torch.inf).sort(dim=-1, descending=True, stable=True).indices
    rank = torch.where(is_candidate, priority[:, :, None], -1).gather(-1, order)
    rank, by_rank = rank.sort(dim=-1, descending=True, stable=True)
    limit = rules.num_selected if rules.block_counts is None else rules.block_counts[..., None].clamp(min=0)
    slots = torch.arange(rank.shape[-1], device=q.device)
    is_selected = (rank >= 0) & (slots < limit) & (slots < rules.num_selected)
    blocks = torch.where(is_selected, order.gather(-1, by_rank), NO_BLOCK)
    blocks = torch.nn.functional.pad(blocks.sort(-1).values, (0, rules.num_selected), value=NO_BLOCK)
    blocks = blocks[..., : rules.num_selected]
    return torch.where(blocks == NO_BLOCK, -1, blocks).int()


def define_scores(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    sizes: Sizes,
    call: Call,
    regions: Regions,
    forced: tuple[int, int, int] | None = None,
) -> Tensor:
    dense = Dense(k_cmp, regions, sizes, call)
    index_heads = block_indices.shape[2]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    weights = dense.weights(q.to(dtype), k_cmp.to(dtype), lse.to(dtype), call).unflatten(2, (index_heads, -1)).sum(3)
    share = dense.shared.to(dtype) / (sizes[0] * (q.shape[2] // index_heads))
    every = torch.einsum('bthc,jc->bthj', weights, share)
    limit = -(-dense.tokens[..., None, None] // sizes[2])
    if call.causal:
        limit = torch.minimum(limit, dense.position[..., None, None] // sizes[2] + 1)
    exists = (block_indices >= 0) & (block_indices < limit) & (block_indices < len(dense.blocks))
    every = torch.nn.functional.pad(every, (0, 1))
    scores = every.gather(-1, torch.where(exists, block_indices, len(dense.blocks)).long())
    if forced is None:
        return scores
    num_init, num_local, num_recent = forced
    own = (dense.position[..., None, None] - num_recent) // sizes[2]
    is_forced = forced_priority(block_indices, own, num_init, num_local, call.causal) > 0
    return 1 + (scores - scores.detach()).masked_fill(is_forced, 0)


def assert_selects_as_well(blocks: Tensor, problem: Problem, **choice: Any) -> None:
    """Assert that blocks differ from those of the definition in float64 only where scores differ by less than float32
    roundings.
    """
    tensors, settings = problem
    exact = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    expected = select_in_regions(**exact, **settings, **choice, backend='eager')
    assert blocks.dtype == torch.int32
    if torch.equal(blocks, expected):
        return
    assert torch.equal(blocks >= 0, expected >= 0)
    assert ((blocks[..., 1:] > blocks[..., :-1]) | (blocks[..., 1:] < 0)).all()
    choice = settings | choice
    own, causal = parse(exact['q'], exact['k_cmp'], settings)[1].sequences.layout().position, choice.get('causal', True)
    own = (own[..., None, None] - choice.get('num_recent', 0)) // settings['selection_block_size']
    rules = (choice.get('num_init', 1), choice.get('num_local', 2), causal)
    forced = ((forced_priority(t, own, *rules) > 0) & (t >= 0) for t in (blocks, expected))
    forced_blocks, forced_expected = (
        torch.where(f, t, -1).sort(-1).values for f, t in zip(forced, (blocks, expected), strict=True)
    )
    assert torch.equal(forced_blocks, forced_expected)
    names = ('num_selected', 'num_init', 'num_local', 'num_recent', 'share_group', 'block_counts')
    settings = {name: value for name, value in settings.items() if name not in names}
    found, gold = (
        scores_in_regions(**exact, block_indices=t, **settings, backend='eager').sort(-1).values
        for t in (blocks, expected)
    )
    torch.testing.assert_close(found, gold, rtol=1e-4, atol=1e-6)


def draw_regions(problem: Problem, region_size: int, num_regions: int, index_heads: int, every: bool = False) -> Tensor:
    """Return int32 `[B, T, HI, R]`: the first, the two newest and random other regions with visible blocks, ascending;
    `every`: all of them, however many there are.
    """
    tensors, settings = problem
    q, k_cmp = tensors['q'], tensors['k_cmp']
    sizes, call, _ = parse(q, k_cmp, settings)
    layout, _ = call.sequences.compressed_layout(*sizes[:2])
    seen = layout.key_len
    if call.causal:
        seen = torch.minimum(seen, (layout.position + 1 - sizes[0]).div(sizes[1], rounding_mode='floor') + 1)
    count = -(-seen.clamp(0, k_cmp.shape[1]) // region_size)[..., None, None]
    if every:
        num_regions = max(1, -(-k_cmp.shape[1] // region_size))
    region = torch.arange(max(num_regions, -(-k_cmp.shape[1] // region_size)), device=q.device)
    lots = torch.rand(*q.shape[:2], index_heads, len(region)).to(q.device)
    lots = lots + 2 * ((region == 0) | (region >= count - 2))
    lots = lots.masked_fill(region >= count, -1)
    best = lots.topk(num_regions, -1)
    found = torch.where(best.values < 0, len(region), best.indices).sort(-1).values
    return fence(torch.where(found == len(region), -1, found).int())


def in_regions(
    extents: Extents,
    heads: Heads,
    sizes: Sizes,
    device: torch.device,
    *,
    region_size: int,
    num_regions: int = 3,
    share_group: bool = True,
    exact: bool = False,
    every: bool = False,
    **more: Any,
) -> Problem:
    """Return a problem of `select_blocks` and regions for it; NaN in the keys that no query reads would change nothing.

    exact: weights of 0 or 1, so that scores are counts. The log-sum-exp is that of all compressed blocks: any finite
    one defines scores.
    """
    make = make_counts if exact else make_problem
    tensors, settings = make(extents, heads, sizes, device, **more)
    index_heads = heads.kv_heads if share_group else heads.heads
    regions = draw_regions((tensors, settings), region_size, num_regions, index_heads, every)
    return tensors | {'regions': regions}, settings | {'region_size': region_size, 'share_group': share_group}
