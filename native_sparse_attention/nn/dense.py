"""The dense twin of `SparseAttention`: full attention of the same shape and with the same calls."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor, nn

from native_sparse_attention.core.checks import check_flags, check_positive, make_sequences
from native_sparse_attention.core.geometry import Sequences
from native_sparse_attention.core.plain import refuse_context_parallel
from native_sparse_attention.inference.cache import LayerCache
from native_sparse_attention.inference.rollback import Checkpoint
from native_sparse_attention.nn.gate import make_output_gate
from native_sparse_attention.nn.heads import normalised_and_rotated
from native_sparse_attention.nn.layer import AttentionLayer
from native_sparse_attention.nn.padding import FrontOrder, from_front, to_front
from native_sparse_attention.nn.rotary import layout_of, make_rotary


class DenseAttention(AttentionLayer):
    """Full attention with the projections, rotary embedding, cache and calls of `SparseAttention`.

    Args:
        dim: features of the input.
        dim_head: D, size of a query or key head.
        heads: HQ, number of query heads.
        kv_heads: H, number of KV heads, a divisor of heads; default heads.
        causal: queries read no later token.
        norm: RMSNorm of the input inside the layer.
        dim_value_head: DV, size of a value head; default dim_head.
        rotary_emb: an instance of rotary-embedding-torch, None for a default one, False for none.
        rotary_layout: as in `SparseAttention`.
        output_gate: multiply the output of each head by a sigmoid gate, a linear function of the normalised input. It
            starts at sigmoid(2) for every input, as the window gate of `SparseAttention` does.
        qk_norm: RMSNorm of queries and keys, as in `SparseAttention`. On NVIDIA GPUs, where Triton computes it, the
            layer has no second derivative.

    Raises:
        ValueError: sizes do not fit; names argument, value and rule.
    """

    def __init__(
        self,
        dim: int,
        dim_head: int = 64,
        heads: int = 8,
        kv_heads: int | None = None,
        causal: bool = True,
        norm: bool = True,
        *,
        dim_value_head: int | None = None,
        rotary_emb: RotaryEmbedding | Literal[False] | None = None,
        rotary_layout: str = 'interleaved',
        output_gate: bool = False,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        value_dim = dim_head if dim_value_head is None else dim_value_head
        check_positive(dim=dim, dim_head=dim_head, heads=heads, kv_heads=kv_heads, dim_value_head=value_dim)
        check_flags(causal=causal, norm=norm, output_gate=output_gate, qk_norm=qk_norm)
        if heads % kv_heads != 0:
            raise ValueError(f'heads is {heads}, but must be a multiple of kv_heads, {kv_heads}')
        self.dim_head, self.heads, self.kv_heads, self.dim_value_head = dim_head, heads, kv_heads, value_dim
        self.causal = causal
        self.norm = nn.RMSNorm(dim) if norm else nn.Identity()
        self._make_qk_norms(qk_norm)
        self.rotary = make_rotary(dim_head, rotary_emb, rotary_layout)
        self.projection_sizes = [heads * dim_head, kv_heads * dim_head, kv_heads * value_dim]
        self.to_qkv = nn.Linear(dim, sum(self.projection_sizes), bias=False)
        self.combine_heads = nn.Linear(heads * value_dim, dim, bias=False)
        self.output_gate = make_output_gate(dim, heads) if output_gate else None

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        cache: LayerCache | None = None,
        return_cache: bool = False,
    ) -> Any:
        """Return attention over x `[B, T, dim]`, `[B, T, dim]`, and with `return_cache` the cache too.

        mask: bool or integers of 0 and 1 `[B, T]`, true at real tokens.
        cu_seqlens: int32 `[N + 1]` for packed sequences `[1, total, dim]`.
        cache: x are the tokens that follow it. Tokens that are padding or follow `cu_seqlens[-1]` give 0. A call with a
        cache runs without autograd; in training mode, or for an x that requires gradients, it is refused unless under
        torch.no_grad().
        """
        refuse_context_parallel()
        cached = self._check_call(x, mask, cu_seqlens, cache, return_cache)
        x, order = to_front(x, mask)
        if not cached:
            return self._attend_all(x, order, cu_seqlens)
        with torch.no_grad():
            cache = self._first_cache(x) if cache is None else cache
            out = self._attend_cached(x, order, cache)
        return (out, cache) if return_cache else out

    def decodes_fixed(self, cache: LayerCache, num_tokens: int) -> bool:
        """Return whether calls with so many new tokens make the same launches at every length, for a CUDA graph."""
        return False

    def _attend_all(self, x: Tensor, order: FrontOrder | None, cu_seqlens: Tensor | None) -> Tensor:
        batch, seqlen = x.shape[:2]
        if cu_seqlens is not None:
            return self._attend_layout(x, make_sequences(x, seqlen, None, None, cu_seqlens, None))
        if order is not None:
            padded = Sequences(batch, seqlen, seqlen, x.device, q_offset=0, seqlens_k=order.lengths)
            return from_front(self._attend_layout(x, padded), order)
        positions = torch.arange(seqlen, device=x.device).expand(batch, -1)
        x = self._normalise(x)
        q, k, v = self._project(x, positions)
        return self._combine(_sdpa(q, k, v, is_causal=self.causal), x)

    def _attend_layout(self, x: Tensor, sequences: Sequences) -> Tensor:
        """Return attention within the sequences of x; tokens outside of every sequence give 0."""
        layout = sequences.layout()
        real = (layout.position < layout.key_len)[..., None]
        x = self._normalise(x.masked_fill(~real, 0.0))
        q, k, v = self._project(x, layout.position)
        out = _sdpa(q, k, v, _visible(sequences, self.causal))
        return self._combine(out, x).masked_fill(~real, 0.0)

    def _attend_cached(self, x: Tensor, order: FrontOrder | None, cache: LayerCache) -> Tensor:
        seqlen = x.shape[1]
        cache.reserve(seqlen)
        offset = cache.lengths.clone()
        x = self._normalise(x)
        q, k, v = self._project(x, cache.positions(seqlen))
        checkpoint = Checkpoint([cache], seqlen, offset)
        try:
            cache.append(k, v, counts=None if order is None else order.lengths)
            return from_front(self._combine(self._attend_to_cache(q, cache, offset), x), order)
        except BaseException:
            checkpoint.restore()
            raise

    def _attend_to_cache(self, q: Tensor, cache: LayerCache, offset: Tensor) -> Tensor:
        """Return attention of q `[B, T, HQ, D]` at positions offset + t over the whole cache, `[B, T, HQ, DV]`."""
        batch, seqlen = q.shape[:2]
        num_keys = cache.max_length
        # Entries behind a row's length are undefined, and a NaN would survive the weight 0.
        unused = torch.arange(num_keys, device=q.device) >= cache.lengths[:, None]
        k, v = (t.masked_fill(unused[..., None, None], 0.0) for t in cache.read(num_keys)[:2])
        sequences = Sequences(batch, seqlen, num_keys, q.device, offset, cache.lengths)
        return _sdpa(q.to(cache.dtype), k, v, _visible(sequences, causal=True)).to(q.dtype)

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q `[B, T, HQ, D]` and k `[B, T, H, D]`, rotated, and v `[B, T, H, DV]` of the normalised input x."""
        q, (k, v) = self._split_heads(self.to_qkv(x))
        tables = None if self.rotary is None else self.rotary.tables(positions)
        return *normalised_and_rotated(self._norms, tables, layout_of(self.rotary), q, k), v

    def _combine(self, out: Tensor, x: Tensor) -> Tensor:
        """Gate the heads `[B, T, HQ, DV]`, merge them and project to `[B, T, dim]`. x: the normalised input."""
        if self.output_gate is not None:
            logits = self.output_gate(x)
            gates = logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()
            out = (out * gates[..., None]).to(out.dtype)
        return self.combine_heads(out.flatten(-2))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None, is_causal: bool = False) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, visible, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def _visible(sequences: Sequences, causal: bool) -> Tensor:
    """Return bool `[B, 1, T, S]`, true at the keys that each query reads."""
    layout = sequences.layout()
    index = torch.arange(sequences.seqlen_k, device=sequences.device)[None, None]
    key_position, visible = layout.key_position(index)
    if causal:
        visible = visible & (key_position <= layout.position[..., None])
    # A softmax over nothing may be NaN: queries of no sequence read the first key, and their result is dropped.
    visible = visible | ((index == 0) & ~visible.any(-1, keepdim=True))
    return visible[:, None]
