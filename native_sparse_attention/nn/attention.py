"""`SparseAttention`: projections, rotary, gates and cache around `nsa`; the arithmetic of attention is in the ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor, nn

from native_sparse_attention import composition, functional
from native_sparse_attention.autograd.recompute import recompute
from native_sparse_attention.autograd.saved_rotary import recompute_rotated
from native_sparse_attention.core.backend import BackendChoice, check_backend
from native_sparse_attention.core.checks import check_flags, checked_softcap, make_sequences
from native_sparse_attention.core.plain import is_plain
from native_sparse_attention.core.projection import floating_weight, projection_dtype
from native_sparse_attention.core.random import as_seed
from native_sparse_attention.inference import decode as decoding
from native_sparse_attention.inference.cache import LayerCache
from native_sparse_attention.inference.rollback import retract
from native_sparse_attention.losses import block_score_loss
from native_sparse_attention.nn.checks import check_block_loss, check_input, check_settings, refuse_unknown
from native_sparse_attention.nn.compress.apply import compress_pair, compress_tokens, with_zero_gradients
from native_sparse_attention.nn.compress.build import make_networks
from native_sparse_attention.nn.gate import GATE_START, MERGED_GATE_START, OUTPUT_GATE_START, check_gate, make_gate
from native_sparse_attention.nn.heads import BranchHeads, Projected
from native_sparse_attention.nn.layer import AttentionLayer
from native_sparse_attention.nn.linear import BranchLinear, FixedStartLinear, SplitLinear
from native_sparse_attention.nn.padding import FrontOrder, from_front, to_front
from native_sparse_attention.nn.rotary import layout_of, make_rotary
from native_sparse_attention.ops import select_blocks

# Beside those of every attention layer.
_WEIGHT_SETTINGS = (
    *('softcap', 'query_heads_share_selected_kv', 'independent_branch_kv', 'merge_window', 'compressed_output'),
    *('num_init_blocks', 'num_local_blocks', 'compress_block_sliding_stride', 'selection_block_size'),
    'select_before_window',
)
# Linear layers that autocast gives the dtype of its input.
_LINEAR = (nn.Linear, BranchLinear, SplitLinear, FixedStartLinear)


class SparseAttention(AttentionLayer):
    """Native Sparse Attention (arXiv 2502.11089) as a layer, `[B, T, dim]` to `[B, T, dim]`.

    Every query reads compressed summaries of the whole past, the few blocks with the highest compressed scores, and a
    window of recent tokens. A sigmoid gate per head and branch, a function of the normalised input, weights the sum.

    Args:
        dim: features of the input.
        dim_head: D, size of a query or key head.
        heads: HQ, number of query heads.
        sliding_window_size: W, keys that a query reads in the window branch, its own included.
        compress_block_size: l, tokens of a compressed block.
        compress_block_sliding_stride: d, tokens between starts of compressed blocks, at most l.
        selection_block_size: l', tokens of a selection block, a multiple of d.
        num_selected_blocks: n, blocks that a query reads, forced ones included; 0 switches the branch off.
        kv_heads: H, number of KV heads, a divisor of heads; default heads.
        num_compressed_mem_kv: learned key/value pairs that the compressed branch always sees.
        causal: queries read no later token. A cache requires it.
        norm: RMSNorm of the input inside the layer.
        use_diff_topk: gradients reach the block scores through the logits of the selected blocks.
        query_heads_share_selected_kv: the heads of a group read the same blocks; otherwise each selects for itself.
        compress_mlp: network φ, `[B, H, C, l, D]` to `[B, H, C, D]`, copied for keys and for values; or a pair (for
            keys, for values), which DV != D requires. Default: an MLP with one hidden layer.
            `native_sparse_attention.compress` has others.
        compress_mlp_expand_factor: hidden units of the default MLP over l * D.
        strategy_combine_mlp: network from dim to 3 * heads gate logits, laid out (heads, 3); with merge_window to
            heads, and with output_gate to 2 * heads, laid out (heads, 2). Default: a linear layer whose gates start
            with the window, or the output, open.
        dim_value_head: DV, size of a value head; default dim_head.
        num_init_blocks: forced blocks at the start.
        num_local_blocks: forced blocks up to the query's own.
        independent_branch_kv: every branch has its own projection of keys and values, as the paper describes.
        rotary_emb: an instance of rotary-embedding-torch, None for a default one, False for none.
        rotary_layout: 'interleaved' rotates pairs of neighbouring features, 'half' features i and i + F, where F is the
            number of frequencies, as Hugging Face models do.
        backend: 'auto', 'triton', 'flex' or 'eager'. An explicit backend raises where it does not support a call.
        recompute: save neither branch outputs nor rotated queries and keys for the backward pass, which recomputes
            them. About half of the memory, the same gradients to the bit, and one more forward of the three attentions.
            With qk_norm Triton saves rotated keys, and recomputes normalised queries.
        softcap: logits of all branches become softcap * tanh(logit / softcap).
        num_sinks: learned logits per head without values, in the softmax of the compressed and of the window branch (or
            the merged softmax), so that a query can attend to nothing. Without a compressed output its branch has none.
        dropout: share of weights dropped of the window branch (or merged softmax) in training, never with a cache.
        merge_window: read selected blocks and window in one softmax, each key once. One gate per head remains, for the
            compressed output. Where everything visible is read, it is dense attention. Excludes independent_branch_kv.
        qk_norm: RMSNorm of queries and keys over the features of a head, before rotary, with learned weights that all
            heads share. Every branch reads the normalised keys, so they are what φ compresses.
        compressed_output: False, with merge_window: the compressed branch scores blocks alone. There is no gate, and no
            network, positions or memory of values; compress_mlp is one module then.
        select_before_window: only blocks with a key before the window are selected, and local blocks end with the
            newest of them. Requires merge_window and causal.
        output_gate: a second gate per head multiplies the merged output, the gated compressed one included, as in
            `DenseAttention`. Requires merge_window and compressed_output.

    Raises:
        ValueError: sizes do not fit; names argument, value and rule.
    """

    # Modules and parameters, or None where the compressed branch gives no output or does not exist.
    k_compress: Any
    v_compress: Any
    k_intrablock_positions: Any
    v_intrablock_positions: Any
    to_strategy_combine: Any

    def __init__(
        self,
        dim: int,
        dim_head: int,
        heads: int,
        sliding_window_size: int,
        compress_block_size: int,
        compress_block_sliding_stride: int,
        selection_block_size: int,
        num_selected_blocks: int,
        kv_heads: int | None = None,
        num_compressed_mem_kv: int = 1,
        causal: bool = False,
        norm: bool = True,
        use_diff_topk: bool = False,
        query_heads_share_selected_kv: bool = True,
        compress_mlp: nn.Module | tuple[nn.Module, nn.Module] | None = None,
        compress_mlp_expand_factor: float = 1.0,
        strategy_combine_mlp: nn.Module | None = None,
        *,
        dim_value_head: int | None = None,
        num_init_blocks: int = 1,
        num_local_blocks: int = 2,
        independent_branch_kv: bool = False,
        rotary_emb: RotaryEmbedding | bool | None = None,
        rotary_layout: str = 'interleaved',
        backend: str = 'auto',
        recompute: bool = False,
        softcap: float | None = None,
        num_sinks: int = 0,
        dropout: float = 0.0,
        merge_window: bool = False,
        compressed_output: bool = True,
        select_before_window: bool = False,
        qk_norm: bool = False,
        output_gate: bool = False,
        **unknown: NoReturn,
    ) -> None:
        super().__init__()
        refuse_unknown('SparseAttention', unknown)
        self.dim_head, self.heads, self.kv_heads = dim_head, heads, heads if kv_heads is None else kv_heads
        self.dim_value_head = dim_head if dim_value_head is None else dim_value_head
        self.sliding_window_size, self.compress_block_size = sliding_window_size, compress_block_size
        self.compress_block_sliding_stride = compress_block_sliding_stride
        self.selection_block_size, self.num_selected_blocks = selection_block_size, num_selected_blocks
        self.num_init_blocks, self.num_local_blocks = num_init_blocks, num_local_blocks
        self.causal, self.use_diff_topk = causal, use_diff_topk
        self.query_heads_share_selected_kv = query_heads_share_selected_kv
        self.independent_branch_kv, self.select_before_window = independent_branch_kv, select_before_window
        self.backend, self.recompute = backend, recompute
        self.softcap, self.num_sinks, self.dropout = checked_softcap(softcap), num_sinks, dropout
        self.merge_window, self.compressed_output, self.output_gate = merge_window, compressed_output, output_gate
        networks = {'compress_mlp': compress_mlp, 'strategy_combine_mlp': strategy_combine_mlp}
        check_settings(self, dim, num_compressed_mem_kv, norm, rotary_emb, **networks)
        check_flags(qk_norm=qk_norm)

        self.norm = nn.RMSNorm(dim) if norm else nn.Identity()
        self._make_qk_norms(qk_norm)
        self.rotary = make_rotary(dim_head, rotary_emb, rotary_layout)
        # Queries, then keys and values of the compressed, the selected and the window branch, or one pair for all.
        kv_heads, value_dim = self.kv_heads, self.dim_value_head
        sizes = [heads * dim_head, kv_heads * dim_head, kv_heads * value_dim]
        self.projection_sizes = [sizes[0], *sizes[1:] * (3 if independent_branch_kv else 1)]
        self.to_qkv = BranchLinear(dim, sizes, 3) if independent_branch_kv else nn.Linear(dim, sum(sizes), bias=False)
        self.combine_heads = nn.Linear(heads * value_dim, dim, bias=False)

        def parameter(*shape: int, exists: bool) -> nn.Parameter | None:
            # None instead of an empty parameter, which never gets a gradient: distributed training waits for that.
            return nn.Parameter(torch.empty(shape)) if exists and all(shape) else None

        self._compresses = compressed_output or num_selected_blocks > 0
        self.k_intrablock_positions = parameter(kv_heads, compress_block_size, dim_head, exists=self._compresses)
        self.v_intrablock_positions = parameter(kv_heads, compress_block_size, value_dim, exists=compressed_output)
        self.compress_mem_k = parameter(kv_heads, num_compressed_mem_kv, dim_head, exists=self._compresses)
        self.compress_mem_v = parameter(kv_heads, num_compressed_mem_kv, value_dim, exists=compressed_output)
        self.compress_sinks = parameter(heads, num_sinks, exists=compressed_output)
        self.window_sinks = parameter(heads, num_sinks, exists=True)
        self.k_compress = self.v_compress = None
        if self._compresses:
            self.k_compress, self.v_compress = make_networks(
                compress_mlp,
                kv_heads=kv_heads,
                head_dim=dim_head,
                value_dim=value_dim if compressed_output else None,
                block_size=compress_block_size,
                compress_mlp_expand_factor=compress_mlp_expand_factor,
            )
        self.to_strategy_combine = None
        if compressed_output:
            start = MERGED_GATE_START if merge_window else GATE_START
            start = (*start, OUTPUT_GATE_START) if output_gate else start
            gate = make_gate(dim, heads, start) if strategy_combine_mlp is None else strategy_combine_mlp
            check_gate(gate, dim, heads, len(start))
            self.to_strategy_combine = gate
        self.reset_parameters()

    @property
    def weight_settings(self) -> dict[str, Any]:
        """Settings that weights depend on: not budgets, backends and dropout, which may change after training."""
        num_gates = 3 if not self.merge_window else int(self.compressed_output) + int(self.output_gate)
        own = {name: getattr(self, name) for name in _WEIGHT_SETTINGS}
        return {**super().weight_settings, **own, 'gate': f'{num_gates} sigmoids per head'}

    def networks(self) -> Iterator[nn.Module]:
        """Yield the modules of the networks φ and of the gate, which dense attention does not have."""
        for network in (self.k_compress, self.v_compress, self.to_strategy_combine):
            if network is not None:
                yield from network.modules()

    def reset_parameters(self) -> None:
        """Set positions inside blocks, memory pairs and sinks to 0, their start.

        Modules inside the layer reset their own parameters: call `reset_parameters` of each of `self.modules()` that
        has it, in this order, after `to_empty`. The result equals a new layer with the default networks.
        """
        for parameter in self.parameters(recurse=False):
            nn.init.zeros_(parameter)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        cache: LayerCache | None = None,
        return_cache: bool = False,
        return_block_loss: bool = False,
        backend: str | None = None,
        **unknown: NoReturn,
    ) -> Any:
        """Attend.

        Args:
            x: `[B, T, dim]`; with a cache the tokens that follow it, any number; packed: `[1, total, dim]`.
            mask: bool or integers of 0 and 1 `[B, T]`, true at real tokens, padding on either side. Padding gives 0 and
                influences nothing.
            cu_seqlens: int32 or int64 `[N + 1]`, borders of packed sequences; tokens that follow the last give 0.
            cache: as returned by `init_cache` or an earlier call; advanced in place. The call has no gradients: in
                training mode, or for an x that requires gradients, it is refused unless under torch.no_grad().
            return_cache: return the cache too; without one, start one that grows.
            return_block_loss: return the `block_score_loss` of this call too, which trains the block scores. Refused
                with a cache, with recompute and without selected blocks.
            backend: of this call; default that of the layer.

        Returns:
            `[B, T, dim]`, or a pair of it and the cache (return_cache) or the scalar loss (return_block_loss).

        Raises:
            ValueError: shapes or settings that do not fit, or a full cache; nothing is written then.
        """
        refuse_unknown('SparseAttention.forward', unknown)
        cached = self._check_call(x, mask, cu_seqlens, cache, return_cache)
        check_block_loss(return_block_loss, cached, self.recompute, self.num_selected_blocks)
        backend = self.backend if backend is None else backend
        check_backend(backend)
        x, order = to_front(x, mask)
        if not cached:
            out, block_loss = self._attend_whole(x, order, cu_seqlens, backend, return_block_loss)
            return (out, block_loss) if return_block_loss else out
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            cache = self._first_cache(x) if cache is None else cache
            out = self._attend_cached(x, order, cache, backend)
        return (out, cache) if return_cache else out

    def extra_repr(self) -> str:
        names = ('softcap', 'num_sinks', 'dropout', 'merge_window', 'select_before_window', 'output_gate')
        settings = {name: getattr(self, name) for name in names}
        if not self.compressed_output:
            settings['compressed_output'] = 'False'
        return ', '.join(f'{name}={value}' for name, value in settings.items() if value)

    def decodes_fixed(self, cache: LayerCache, num_tokens: int) -> bool:
        """Return whether calls with so many new tokens make the same launches at every length, for a CUDA graph."""
        q, k, v = self._stand_ins(cache.batch_size, num_tokens, dtype=cache.dtype, device=cache.device)
        sizes = (self.selection_block_size, self.num_selected_blocks)
        features = {'softcap': self.softcap, 'has_sinks': self.num_sinks > 0}
        choice = decoding.backend_of(q, k, v, cache, *sizes, **features, backend=self.backend)
        return choice.name == 'triton'

    def backend_for(self, x: Tensor) -> BackendChoice:
        """Return the backend that a forward of x `[B, T, dim]` would take, the reason against each faster one, and in
        `ops` the backend of each op of `nsa`.
        """
        check_input(x, None, None, self, cached=False)
        trains = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters()))
        kind: dict[str, Any] = {'dtype': projection_dtype(x), 'device': x.device, 'requires_grad': trains}
        return composition.backend_of(
            *self._stand_ins(x.shape[0], x.shape[1], **kind),
            num_selected=self.num_selected_blocks,
            share_group=self.query_heads_share_selected_kv,
            use_diff_topk=self.use_diff_topk,
            softcap=self.softcap,
            sinks=self.window_sinks,
            sinks_cmp=self.compress_sinks,
            dropout_p=self._dropout_p,
            causal=self.causal,
            merge_window=self.merge_window,
            compressed_output=self.compressed_output,
            backend=self.backend,
        )

    def _stand_ins(self, batch: int, seqlen: int, **kind: Any) -> list[Tensor]:
        """Return q, k and v of one element each in their sizes, for the choice of a backend."""
        sizes = ((self.heads, self.dim_head), (self.kv_heads, self.dim_head), (self.kv_heads, self.dim_value_head))
        return [torch.empty((), **kind).expand(batch, seqlen, *size) for size in sizes]

    def _attend_whole(
        self, x: Tensor, order: FrontOrder | None, cu_seqlens: Tensor | None, backend: str, needs_block_loss: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output for tokens without a cache, and the loss of the block scores or None."""
        x, positions = self._with_positions(x, cu_seqlens)
        tables, layout = None if self.rotary is None else self.rotary.tables(positions), layout_of(self.rotary)
        recomputes = self.recompute and torch.is_grad_enabled()
        readers: dict[str, bool] = {'merges': self.merge_window, 'compresses': self.k_compress is not None}
        heads = BranchHeads(self._project(x), self._norms, tables, layout, backend, **readers, recomputes=recomputes)
        new = heads.new
        k_cmp, v_cmp = self._compress(new, cu_seqlens, self.use_diff_topk or needs_block_loss)

        def read(parameter: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
            # Copied, because parameters may have other values when `attend` is recomputed.
            return None if parameter is None else parameter.to(dtype or parameter.dtype, copy=recomputes)

        mem_k, mem_v = read(self.compress_mem_k, new.q.dtype), read(self.compress_mem_v, new.q.dtype)
        fixed: dict[str, Any] = {
            'mem_kv': None if mem_k is None else (mem_k, mem_v),
            'sinks': read(self.window_sinks),
            'sinks_cmp': read(self.compress_sinks),
            'dropout_p': self._dropout_p,
            'dropout_seed': as_seed(None, x.device) + self.head_rank if self._dropout_p else None,
            'q_offset': 0,
            'seqlens_k': None if order is None else order.lengths,
            'cu_seqlens': cu_seqlens,
            'backend': backend,
        }
        losses: list[Tensor] = []

        def attend(select: Callable[..., Tensor]) -> Tensor:
            (q, q_window, q_cmp), (k, k_window) = heads.queries(), heads.keys()
            v_window = new.v if new.k_window is None and not self.merge_window else new.v_window
            if needs_block_loss:
                assert k_cmp is not None
                losses.append(self._block_loss(q, k, q_cmp, k_cmp, fixed))
            with recompute_rotated(q_cmp, tables, backend, q, layout):
                of_branches = {'q_cmp': q_cmp, 'q_window': q_window, 'k_window': k_window, 'v_window': v_window}
                return self._nsa(q, k, new.v, k_cmp, v_cmp, new.gates, **of_branches, choose=select, **fixed)

        out = recompute(attend) if recomputes else attend(select_blocks)
        if self.k_compress is not None and not self.compressed_output:
            out = with_zero_gradients(out, self.k_compress, self.k_intrablock_positions, self.compress_mem_k)
        return from_front(self._combine(out), order), losses[0] if losses else None

    def _with_positions(self, x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x with 0 in place of tokens of no sequence, and the positions `[1, T]` of its tokens."""
        if cu_seqlens is None:
            return x, torch.arange(x.shape[1], device=x.device)[None]
        layout = make_sequences(x, x.shape[1], None, None, cu_seqlens, None).layout()
        return torch.where(layout.covered[..., None], x, 0), layout.position

    def _block_loss(self, q: Tensor, k: Tensor, q_cmp: Tensor, k_cmp: Tensor, settings: dict[str, Any]) -> Tensor:
        """Return the `block_score_loss`. q, k: with rotary embedding."""
        shared = {name: self._common_settings[name] for name in ('selection_block_size', 'share_group', 'softcap')}
        places = {name: settings[name] for name in ('q_offset', 'seqlens_k', 'cu_seqlens', 'backend')}
        return block_score_loss(q, k, q_cmp, k_cmp, **self._whole_settings, **shared, **places)

    def _compress(
        self, new: Projected, cu_seqlens: Tensor | None, trains_scores: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return compressed keys `[B, C, H, D]` and values `[B, C, H, DV]`, each None where nothing reads it."""
        if self.k_compress is None:
            return None, None
        positions = self.k_intrablock_positions, self.v_intrablock_positions
        where = (self.compress_block_sliding_stride, cu_seqlens)
        if self.v_compress is not None:
            return compress_pair((self.k_compress, self.v_compress), (new.raw_k, new.raw_v), positions, *where)
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains_scores):
            keys = (self.k_compress, new.raw_k, positions[0], *where)
            return compress_tokens(*keys, name='keys', value_dim=self.dim_head), None

    def _attend_cached(self, x: Tensor, order: FrontOrder | None, cache: LayerCache, backend: str) -> Tensor:
        """Return the output for the tokens after those in the cache, which advances."""
        new, rotary = self._project(x).normalised(self._norms), self.rotary
        counts = None if order is None else order.lengths
        out = decoding.nsa_decode(
            *(new.q, new.k, new.v, new.gates, cache),
            raw_k=new.raw_k,
            raw_v=new.raw_v,
            k_window=new.k_window,
            v_window=new.v_window,
            networks=(self.k_compress, self.v_compress),
            positions=(self.k_intrablock_positions, self.v_intrablock_positions),
            freqs=None if rotary is None else rotary(x.device),
            interpolate_factor=1.0 if rotary is None else rotary.interpolate_factor,
            rotary_layout=layout_of(rotary),
            mem_kv=self._memory,
            sinks=self.window_sinks,
            sinks_cmp=self.compress_sinks,
            counts=counts,
            window_size=self.sliding_window_size,
            backend=backend,
            **self._common_settings,
        )
        try:
            return from_front(self._combine(out), order)
        except BaseException:
            retract(cache, x.shape[1], counts)
            raise

    def _project(self, x: Tensor) -> Projected:
        x = self._normalise(x)
        to_qkv, to_logits, x_qkv, x_logits = self.to_qkv, self.to_strategy_combine, x, x
        if (dtype := projection_dtype(x)) != x.dtype:
            rounded = x.to(dtype)  # once, where autocast would do so for each of two linear layers
            x_qkv, x_logits = (rounded if m is not None and is_plain(m, *_LINEAR) else x for m in (to_qkv, to_logits))
        q, pairs = self._split_heads(to_qkv(x_qkv))
        raw_k, raw_v = pairs[:2]
        k, v = pairs[2:4] if self.independent_branch_kv else (raw_k, raw_v)
        k_window, v_window = pairs[4:] if self.independent_branch_kv else (None, None)
        gates = None
        if to_logits is not None:
            logits = torch.unflatten(to_logits(x_logits), -1, (self.heads, -1))
            gates = logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()
        return Projected(q, k, v, raw_k, raw_v, k_window, v_window, gates)

    @property
    def _memory(self) -> tuple[Tensor, Tensor | None] | None:
        """Memory pairs of the compressed branch, or their keys alone where it only scores blocks."""
        return None if (mem_k := self.compress_mem_k) is None else (mem_k, self.compress_mem_v)

    @property
    def _dropout_p(self) -> float:
        return self.dropout if self.training else 0.0

    @property
    def _common_settings(self) -> dict[str, Any]:
        """Arguments that `nsa` and `nsa_decode` share."""
        return {
            'selection_block_size': self.selection_block_size,
            'num_selected': self.num_selected_blocks,
            'num_init': self.num_init_blocks,
            'num_local': self.num_local_blocks,
            'num_recent': self.sliding_window_size if self.select_before_window else 0,
            'share_group': self.query_heads_share_selected_kv,
            'softcap': self.softcap,
            'merge_window': self.merge_window,
        }

    @property
    def _whole_settings(self) -> dict[str, Any]:
        """Arguments that `nsa` and `block_score_loss` share."""
        window = self.sliding_window_size - 1
        return {
            'compress_block_size': self.compress_block_size,
            'compress_stride': self.compress_block_sliding_stride,
            'window_size': (window, 0 if self.causal else window),
            'causal': self.causal,
        }

    def _nsa(self, q: Tensor, *tensors: Any, **settings: Any) -> Tensor:
        """Return `nsa` with the settings of the layer, `[B, T, HQ, DV]`."""
        options = {**self._whole_settings, **self._common_settings, 'use_diff_topk': self.use_diff_topk, **settings}
        return functional.nsa(q, *tensors, **options)

    def _combine(self, out: Tensor) -> Tensor:
        """Merge the heads and project them to `[B, T, dim]`."""
        combine = self.combine_heads
        out, weight = out.flatten(2), floating_weight(combine)
        if weight is not None and weight.dtype != out.dtype and is_plain(combine, nn.Linear):
            out = out.to(projection_dtype(weight))  # hooks of other modules may cast their weights
        return combine(out)

    def _branch_layout(self) -> dict[str, Any]:
        compress = (self.compress_block_size, self.compress_block_sliding_stride) if self._compresses else None
        return {
            'compress': compress,
            'has_raw_k': self._compresses and (self.rotary is not None or self.independent_branch_kv),
            'has_v_cmp': self.compressed_output,
            'has_raw_v': self.independent_branch_kv,
            'has_window': self.independent_branch_kv,
        }
