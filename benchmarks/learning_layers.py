"""Experimental attention layers of `benchmarks.learning`, as subclasses of those of the package."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.gate import GATE_START, make_gate, make_output_gate
from native_sparse_attention.nn.rotary import rotate
from native_sparse_attention.ops import (
    compressed_attention,
    select_blocks,
    selected_attention,
    straight_through_scale,
    window_attention,
)
from native_sparse_attention.ops.block_mass import block_mass

FAR_BLOCK = 16  # tokens of a block of `FarField`


class FlooredGate(nn.Module):
    """The package's gate, whose selected branch stays open: its gate is 0.1 + 0.9 times a sigmoid."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.logits = make_gate(dim, heads)

    def forward(self, x: Tensor) -> Tensor:
        compressed, selected, window = self.logits(x).unflatten(-1, (-1, 3)).float().unbind(-1)
        # The logit of 0.1 + 0.9 * sigmoid(selected).
        selected = (0.1 + 0.9 * selected.sigmoid()).log() - math.log(0.9) - nn.functional.logsigmoid(-selected)
        return torch.stack((compressed, selected, window), -1).flatten(-2)


class SharedGate(nn.Module):
    """A gate of the compressed branch and one of both others, which starts at 0.5."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.logits = make_gate(dim, heads, (GATE_START[0], 0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x).unflatten(-1, (-1, 2))[..., (0, 1, 1)].flatten(-2)


def _sigmoid(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()[..., None]


class WithWindow(SparseAttention):
    """The output of the layer plus a window branch with a softmax and a gate of its own; without a cache."""

    def __init__(self, dim: int, dim_head: int, heads: int, **settings: Any) -> None:
        super().__init__(dim, dim_head, heads, **settings)
        self.window_gate = make_output_gate(dim, heads)
        nn.init.constant_(self.window_gate.bias, GATE_START[0])

    def _project(self, x: Tensor) -> Any:
        self._gate = _sigmoid(self.window_gate(self.norm(x)))
        return super()._project(x)

    def _nsa(self, q: Tensor, *tensors: Any, **settings: Any) -> Tensor:
        k, v, size = tensors[0], tensors[1], self.sliding_window_size - 1
        out, gate = super()._nsa(q, *tensors, **settings), self._gate
        self._gate = gate.detach()  # for the probes; the autograd graph of a step must not outlive it
        places = {name: settings[name] for name in ('q_offset', 'seqlens_k', 'cu_seqlens', 'backend')}
        window, _ = window_attention(q, k, v, window_size=(size, 0), causal=True, softcap=self.softcap, **places)
        return out + (window * gate).to(out.dtype)


class RotatedScores(SparseAttention):
    """Compressed keys rotated at the middle of their blocks, and read by rotated queries; without packing."""

    def _nsa(self, q: Tensor, *tensors: Any, **settings: Any) -> Tensor:
        k, v, k_cmp, *rest = tensors
        assert self.rotary is not None
        assert settings['cu_seqlens'] is None
        middle = torch.arange(k_cmp.shape[1], device=q.device)[None] * self.compress_block_sliding_stride
        tables = self.rotary.tables(middle + self.compress_block_size // 2)
        (k_cmp,) = rotate(tables, settings['backend'], k_cmp)
        return super()._nsa(q, k, v, k_cmp, *rest, **{**settings, 'q_cmp': q})


class OwnChoice(SparseAttention):
    """Blocks are selected by `_choose`, which takes the arguments of `select_blocks`; without packing."""

    def _nsa(self, q: Tensor, *tensors: Any, **settings: Any) -> Tensor:
        assert settings['cu_seqlens'] is None
        return super()._nsa(q, *tensors, **{**settings, 'choose': self._choose})

    def _choose(self, *scored: Tensor, **settings: Any) -> Tensor:
        return select_blocks(*scored, **settings)


class FirstChoice(OwnChoice):
    """The queries of every group of `num_queries` read the blocks that the first of them selects. Without padding."""

    num_queries = 16

    def _choose(self, *scored: Tensor, **settings: Any) -> Tensor:
        blocks = select_blocks(*scored, **settings)
        queries = torch.arange(blocks.shape[1], device=blocks.device)
        return blocks[:, queries - queries % self.num_queries]


class FirstChoiceOf64(FirstChoice):
    num_queries = 64


class FarField(OwnChoice):
    """Merged attention whose softmax also reads the block means of keys and values before the window.

    A mean of rotated keys of `FAR_BLOCK` tokens stands for all of them, so the logarithm of that number, and a learned
    bias per head, are added to its logit. Selected blocks are read twice, as tokens and in means. Without packing.
    """

    def __init__(self, dim: int, dim_head: int, heads: int, **settings: Any) -> None:
        super().__init__(dim, dim_head, heads, **settings)
        self.far_bias = nn.Parameter(torch.zeros(heads))

    def _nsa(self, q: Tensor, *tensors: Any, **settings: Any) -> Tensor:
        k, v, k_cmp, *_ = tensors
        assert settings['cu_seqlens'] is None
        places = {name: settings[name] for name in ('q_offset', 'seqlens_k', 'backend')}
        places |= {'softcap': self.softcap, 'causal': True}
        q_cmp, sizes = settings['q_cmp'], (self.compress_block_size, self.compress_block_sliding_stride)
        _, lse = compressed_attention(
            q_cmp, k_cmp, k_cmp, block_size=sizes[0], stride=sizes[1], seqlen_k=k.shape[1], **places
        )
        scoring = {'compress_block_size': sizes[0], 'compress_stride': sizes[1], 'seqlen_k': k.shape[1], **places}
        scoring |= {'selection_block_size': self.selection_block_size}
        scoring |= {name: self._common_settings[name] for name in ('num_init', 'num_local', 'num_recent')}
        share = self.query_heads_share_selected_kv
        select = partial(self._choose, num_selected=self.num_selected_blocks, share_group=share)
        blocks = select(q_cmp, k_cmp, lse, **scoring)
        factors = straight_through_scale(q_cmp, k_cmp, lse, blocks, **scoring) if self.use_diff_topk else None
        near, near_lse = selected_attention(
            *(q, k, v, blocks),
            block_size=self.selection_block_size,
            block_scale=factors,
            unit_scale=factors is not None,
            window_size=(self.sliding_window_size - 1, 0),
            **places,
        )
        window = self.sliding_window_size
        if q.shape[1] <= window:
            return near
        count = k.shape[1] // FAR_BLOCK
        means = (t[:, : count * FAR_BLOCK].unflatten(1, (count, FAR_BLOCK)).mean(2) for t in (k, v))
        # The query at t reads the blocks up to that of the last token before its window.
        far, far_lse = compressed_attention(
            *(q[:, window:], *means),
            block_size=FAR_BLOCK,
            stride=FAR_BLOCK,
            seqlen_k=k.shape[1],
            **{**places, 'q_offset': FAR_BLOCK - 1},
        )
        logit = (far_lse - near_lse[..., window:]).mT + self.far_bias + math.log(FAR_BLOCK)
        weight = logit.sigmoid()[..., None].to(near.dtype)
        return torch.cat((near[:, :window], torch.lerp(near[:, window:], far, weight)), 1)


class RandomBlocks(OwnChoice):
    """In training a quarter of the selected blocks is random, the same of 64 consecutive queries; without packing.

    A block that is not selected has no gradient, neither of its keys nor of its score. Random blocks give both.
    """

    def _choose(self, q_cmp: Tensor, k_cmp: Tensor, lse: Tensor, **settings: Any) -> Tensor:
        if not self.training:
            return select_blocks(q_cmp, k_cmp, lse, **settings)
        count = settings['num_selected'] // 4
        settings['num_selected'] -= count
        blocks = select_blocks(q_cmp, k_cmp, lse, **settings)
        size, (batch, seqlen, heads, _) = settings['selection_block_size'], blocks.shape
        past = torch.arange(seqlen, device=q_cmp.device)[:, None, None] // size + 1
        tiles = torch.rand(batch, -(-seqlen // 64), heads, count, device=q_cmp.device).repeat_interleave(64, 1)
        return torch.cat((blocks, (tiles[:, :seqlen] * past).to(blocks.dtype)), -1)


@torch.no_grad()
def heaviest_blocks(q: Tensor, k: Tensor, block_size: int, near: int, num_selected: int) -> Tensor:
    """Return the blocks of most mass before the last `near` tokens, int32 `[B, T, H, n]`, padded with -1.

    q: `[B, T, HQ, D]`. k: `[B, T, H, D]`.
    """
    mass = block_mass(q, k, block_size=block_size, window_size=(near - 1, 0))
    best, blocks = mass.topk(min(num_selected, mass.shape[-1]), dim=-1)
    return blocks.masked_fill(best == 0, -1).int()


class HeaviestBlocks(OwnChoice):
    """The blocks that hold most of full attention's mass before the window: a perfect choice, without scores."""

    def _nsa(self, q: Tensor, *tensors: Any, **settings: Any) -> Tensor:
        # `_choose` reads them in this forward.
        self._rotated: tuple[Tensor, Tensor] | None = (q.detach(), tensors[0].detach())
        out = super()._nsa(q, *tensors, **settings)
        self._rotated = None
        return out

    def _choose(self, *scored: Tensor, **settings: Any) -> Tensor:
        assert self._rotated is not None
        q, k = self._rotated
        return heaviest_blocks(
            q, k, settings['selection_block_size'], self.sliding_window_size, settings['num_selected']
        )


class EveryBlockRows(SparseAttention):
    """In training a sixteenth of the queries, consecutive ones, reads every block: full attention; without packing.

    So the keys and the scores of all blocks have a gradient, at a sixteenth of the cost.
    """

    def _nsa(self, q: Tensor, *tensors: Any, **settings: Any) -> Tensor:
        assert settings['cu_seqlens'] is None
        out = super()._nsa(q, *tensors, **settings)
        if not self.training:
            return out
        *shared, gates = tensors
        batch, seqlen, count = *q.shape[:2], q.shape[1] // 16
        start = torch.randint(seqlen - count + 1, (batch,), device=q.device)
        rows = (start[:, None] + torch.arange(count, device=q.device))[..., None, None]

        def take(x: Tensor) -> Tensor:
            return x.gather(1, rows.expand(-1, -1, *x.shape[2:]))

        def choose(q_cmp: Tensor, k_cmp: Tensor, _: Tensor, **settings: Any) -> Tensor:
            every = torch.arange(-(-seqlen // settings['selection_block_size']), device=q.device, dtype=torch.int32)
            return every.expand(*q_cmp.shape[:2], k_cmp.shape[2], -1).contiguous()

        changed = {'q_cmp': take(settings['q_cmp']), 'q_offset': start, 'choose': choose}
        dense = super()._nsa(take(q), *shared, take(gates), **{**settings, **changed})
        return out.scatter(1, rows.expand_as(dense), dense)


class DetachedScores(SparseAttention):
    """Block scores whose gradient reaches the network of compressed keys alone, not queries and keys."""

    def _compress(
        self, new: Any, cu_seqlens: Tensor | None, trains_scores: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        return super()._compress(new._replace(raw_k=new.raw_k.detach()), cu_seqlens, trains_scores)

    def _nsa(self, q: Tensor, *tensors: Any, **settings: Any) -> Tensor:
        return super()._nsa(q, *tensors, **{**settings, 'q_cmp': settings['q_cmp'].detach()})

    def _block_loss(self, q: Tensor, k: Tensor, q_cmp: Tensor, k_cmp: Tensor, settings: dict[str, Any]) -> Tensor:
        return super()._block_loss(q, k, q_cmp.detach(), k_cmp, settings)


class DetachedScoresWithWindow(WithWindow, DetachedScores):
    """Detached block scores, and a gated window beside the merged softmax."""
