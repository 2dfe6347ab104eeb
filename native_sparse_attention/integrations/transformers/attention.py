"""Sparse attention in place of the attention module of a Hugging Face model, whose projections it keeps.

Legend: B batch, T new tokens, HQ query heads, H KV heads, D head size, l tokens of a compressed block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from native_sparse_attention.core.autocast import concatenate
from native_sparse_attention.core.random import as_seed
from native_sparse_attention.functional import nsa
from native_sparse_attention.integrations.transformers.cache import NSACacheLayer, layer_of
from native_sparse_attention.integrations.transformers.config import NSAConfig
from native_sparse_attention.integrations.transformers.dense_start import attend_with_dense_start
from native_sparse_attention.integrations.transformers.layout import Layout
from native_sparse_attention.losses import block_score_loss
from native_sparse_attention.nn.compress.apply import compress_tokens, with_zero_gradients
from native_sparse_attention.nn.gate import GATE_START, MERGED_GATE_START, OUTPUT_GATE_START, make_gate
from native_sparse_attention.nn.padding import from_front, move_to_front
from native_sparse_attention.ops import rotary


class Compressor(nn.Module):
    """Compress keys or values: positions `[H, l, D]` are added to the tokens of each block, and φ maps the block.

    network: φ, `[B, H, C, l, D]` to `[B, H, C, D]`. stride: d, tokens between starts of blocks.
    """

    def __init__(self, network: nn.Module, kv_heads: int, block_size: int, head_dim: int, stride: int) -> None:
        super().__init__()
        self.network, self.stride = network, stride
        self.positions = nn.Parameter(torch.zeros(kv_heads, block_size, head_dim))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.positions)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Return compressed tokens `[B, C, H, D]` of tokens `[B, T, H, D]`."""
        where = (self.positions, self.stride, cu_seqlens)
        return compress_tokens(self.network, tokens, *where, name='keys or values', value_dim=tokens.shape[3])


class Tokens(NamedTuple):
    """Tensors of new tokens `[B, T, heads, D]`: rotated queries and keys, values, what the compressed branch reads, and
    gates as `nsa` takes them, `[B, T, HQ, 3 or 2]` or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_cmp: Tensor
    raw_k: Tensor
    gates: Tensor | None

    def map(self, function: Any) -> Tokens:
        return Tokens(*(None if t is None else function(t) for t in self))  # type: ignore[arg-type]


class NSAAttention(nn.Module):
    """Mixin before the attention class of a model family. An instance of that class becomes one by `convert`."""

    # Attributes of the family's class.
    config: Any
    layer_idx: int
    head_dim: int
    scaling: float
    attention_dropout: float
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any
    q_norm: Any  # of families with norms of queries and keys
    k_norm: Any

    nsa: NSAConfig
    k_compress: Any
    v_compress: Any
    to_strategy_combine: Any
    head_rank: int = 0  # over which `apply_tp` divides heads
    block_losses: list[Tensor] | None = None  # takes the loss of each forward, where losses are collected

    @classmethod
    def convert(cls, attention: nn.Module, nsa: NSAConfig, like: Tensor | None) -> None:
        """Make a dense attention module one of this class, in place, and add its new modules.

        like: a weight with their dtype and device; None for those that PyTorch gives new tensors.
        """
        attention.__class__ = cls
        assert isinstance(attention, cls)
        attention.nsa = nsa
        attention._add_modules(like)

    def _add_modules(self, like: Tensor | None) -> None:
        nsa, heads, kv_heads = self.nsa, self.config.num_attention_heads, self.config.num_key_value_heads

        def compressor() -> Compressor:
            network, dim = nsa.make_network(self.head_dim, kv_heads), self.head_dim
            return Compressor(network, kv_heads, nsa.compress_block_size, dim, nsa.compress_block_sliding_stride)

        self.k_compress, self.v_compress, self.to_strategy_combine = compressor(), None, None
        if nsa.compressed_output:
            self.v_compress = compressor()
            start = (*MERGED_GATE_START, OUTPUT_GATE_START) if nsa.merge_window else GATE_START
            self.to_strategy_combine = make_gate(self.config.hidden_size, heads, start)
        for added in self.added_modules():
            added.train(self.training)
            if like is not None:
                added.to(device=like.device, dtype=like.dtype)

    def added_modules(self) -> list[nn.Module]:
        """Return the modules that dense attention does not have."""
        return [m for m in (self.k_compress, self.v_compress, self.to_strategy_combine) if m is not None]

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        nsa_layout: Layout | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Return the output `[B, T, dim]` and None in place of attention weights.

        attention_mask is not read: the model finds the layout of its tokens once, for all layers. past_key_values is
        the name of cache before transformers 5.24. kwargs: further arguments of the family.

        Raises ValueError without a layout, and where gradients would have to flow into a cache.
        """
        if nsa_layout is None or position_embeddings is None:
            raise ValueError('nsa_layout is None, but a converted attention layer must be called by its model')
        cache = past_key_values if cache is None else cache
        tokens = self.project(hidden_states, position_embeddings, nsa_layout)
        out = self._attend(tokens, None if cache is None else layer_of(cache, self.layer_idx), nsa_layout)
        return self.o_proj(out.flatten(2)), None

    def project(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], layout: Layout) -> Tokens:
        """Return what attention reads of hidden states `[B, T, dim]`. position_embeddings: cos and sin."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(hidden_states).unflatten(-1, (-1, self.head_dim)) for project in projections)
        if hasattr(self, 'q_norm'):
            q, k = self.q_norm(q), self.k_norm(k)
        # [B or 1, T, R / 2]; cos and sin hold each angle twice.
        cos, sin = (
            t[..., : t.shape[-1] // 2].to(torch.promote_types(t.dtype, torch.float32)) for t in position_embeddings
        )
        backend = 'eager' if self.nsa.backend == 'eager' else 'auto'
        rotated_q, rotated_k = (rotary(x, cos, sin, layout='half', backend=backend) for x in (q, k))
        q_cmp, raw_k = rotated_q, rotated_k
        if self.nsa.block_scores == 'plain':
            rotary_dim = position_embeddings[0].shape[-1]
            q_cmp, raw_k = (scale_rotary(x, rotary_dim, layout.rope_factor) for x in (q, k))
        gates = None
        if self.to_strategy_combine is not None:
            logits = self.to_strategy_combine(hidden_states).unflatten(-1, (q.shape[2], -1))
            gates = logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()
        return Tokens(rotated_q, rotated_k, v, q_cmp, raw_k, gates)

    def _attend(self, tokens: Tokens, layer: NSACacheLayer | None, layout: Layout) -> Tensor:
        """Return the output `[B, T, HQ, D]` of new tokens, which are appended to the cache layer."""
        if layout.cu_seqlens is not None:
            batch = tokens.q.shape[0]
            packed = tokens.map(lambda t: t.flatten(0, 1)[None])
            return self._attend_whole(packed, None, layout.cu_seqlens)[0][0].unflatten(0, (batch, -1))
        tokens = tokens.map(lambda t: move_to_front(t, layout.order))
        lengths = None if layout.order is None else layout.order.lengths
        if layer is None or layer.get_seq_length() == 0:
            out, k_cmp, v_cmp = self._attend_whole(tokens, lengths, None)
            if layer is not None:
                layer.start(self, tokens, k_cmp, v_cmp, lengths)
        else:
            trained = (tokens.q, *self.parameters())
            if torch.is_grad_enabled() and any(t.requires_grad for t in trained):
                raise ValueError(
                    f'the cache holds {layer.get_seq_length()} tokens, but must be empty or None where gradients are '
                    f'computed: they do not reach cached tokens. Use torch.no_grad() to generate'
                )
            with torch.no_grad():
                out = layer.decode(self, tokens, lengths)
        if layer is not None:
            layer.advance(layout, tokens.q.shape[1])
        return from_front(out, layout.order)

    def _attend_whole(
        self, tokens: Tokens, lengths: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the output of tokens without a cache, and compressed keys and values.

        lengths: int32 `[B]`, real tokens of each row, which stand first.
        """
        q, k, v, q_cmp, raw_k, gates = tokens
        losses = self.block_losses
        trains_scores = self.v_compress is not None or self.nsa.use_diff_topk or losses is not None
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains_scores):
            k_cmp = self.k_compress(raw_k, cu_seqlens)
        v_cmp = None if self.v_compress is None else self.v_compress(v, cu_seqlens)

        def sparse(start: int) -> Tensor:
            q_new, q_cmp_new = q[:, start:], q_cmp[:, start:]
            gates_new = None if gates is None else gates[:, start:]
            where: dict[str, Any]
            where = {'q_offset': start, 'seqlens_k': lengths} if cu_seqlens is None else {'cu_seqlens': cu_seqlens}
            sizes: dict[str, Any] = {
                'compress_block_size': self.nsa.compress_block_size,
                'compress_stride': self.nsa.compress_block_sliding_stride,
                'window_size': (self.nsa.sliding_window_size - 1, 0),
            }
            if losses is not None:
                shared: dict[str, Any] = {
                    name: self.sparse_settings[name] for name in ('selection_block_size', 'share_group')
                }
                shared |= {name: self.logit_settings[name] for name in ('scale', 'softcap', 'backend')}
                shared['min_position'] = self.nsa.dense_below  # of packed sequences, whose queries are all in q_new
                losses.append(block_score_loss(q_new, k, q_cmp_new, k_cmp, **shared, **sizes, **where))
            return nsa(
                q_new,
                *(k, v, k_cmp, v_cmp, gates_new),
                q_cmp=None if q_cmp is q else q_cmp_new,
                use_diff_topk=self.nsa.use_diff_topk,
                **sizes,
                **where,
                **self.sparse_settings,
                **settings,
            )

        below, settings = self.nsa.dense_below, {**self.logit_settings, **self._dropout(q.device)}
        out = attend_with_dense_start(sparse, (q, k, v), below, lengths, cu_seqlens, settings)
        if losses is not None and below >= q.shape[1] and cu_seqlens is None:  # no query is sparse
            losses.append(with_zero_gradients(q.new_zeros((), dtype=torch.promote_types(q.dtype, torch.float32)), self))
        if torch.is_grad_enabled() and (below > 0 or self.v_compress is None):
            out = with_zero_gradients(out, self)  # of what no query reads
        return out, k_cmp, v_cmp

    @property
    def sparse_settings(self) -> dict[str, Any]:
        """Arguments that `nsa` and `nsa_decode` share, beside `logit_settings`."""
        return {
            'merge_window': self.nsa.merge_window,
            'selection_block_size': self.nsa.selection_block_size,
            'num_selected': self.nsa.num_selected_blocks,
            'num_init': self.nsa.num_init_blocks,
            'num_local': self.nsa.num_local_blocks,
            'num_recent': self.nsa.sliding_window_size if self.nsa.select_before_window else 0,
            'share_group': self.nsa.query_heads_share_selected_kv,
        }

    @property
    def logit_settings(self) -> dict[str, Any]:
        """Arguments that `nsa`, `nsa_decode` and `window_attention` share."""
        softcap = getattr(self, 'attn_logit_softcapping', None)
        return {'scale': self.scaling, 'softcap': softcap, 'backend': self.nsa.backend}

    def _dropout(self, device: torch.device) -> dict[str, Any]:
        """Return the arguments of dropout of one forward, with a seed that differs between ranks with other heads."""
        if not self.training or not self.attention_dropout:
            return {}
        return {'dropout_p': self.attention_dropout, 'dropout_seed': as_seed(None, device) + self.head_rank}


def scale_rotary(x: Tensor, rotary_dim: int, factor: float) -> Tensor:
    """Multiply the first rotary_dim features of x `[..., D]` by the factor that cos and sin hold."""
    if factor == 1.0:
        return x
    return concatenate((x[..., :rotary_dim] * factor, x[..., rotary_dim:]), -1)
