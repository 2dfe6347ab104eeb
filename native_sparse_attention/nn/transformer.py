"""A small language model with sparse attention, or with dense attention for comparison."""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpoint_activations

from native_sparse_attention.core.backend import check_backend
from native_sparse_attention.core.checks import check_flags, check_integers, check_positive, check_tensors, shown
from native_sparse_attention.inference.generation import last_real
from native_sparse_attention.inference.model_cache import ModelCache
from native_sparse_attention.inference.rollback import Checkpoint
from native_sparse_attention.nn.attention import SparseAttention
from native_sparse_attention.nn.checks import check_ids, check_undifferentiated, refuse_unknown
from native_sparse_attention.nn.compress.networks import hidden_size
from native_sparse_attention.nn.dense import DenseAttention
from native_sparse_attention.nn.generator import GeneratingModel
from native_sparse_attention.nn.padding import check_mask
from native_sparse_attention.nn.pretrained import Arguments, load, save
from native_sparse_attention.nn.start import reset_networks, start_from, without_draws

DEFAULT_SPARSE_ATTN_KWARGS: Mapping[str, Any] = {
    'sliding_window_size': 32,
    'compress_block_size': 4,
    'compress_block_sliding_stride': 4,
    'selection_block_size': 4,
    'num_selected_blocks': 4,
}
# Arguments of SparseAttention that the dense twin shares.
SHAPE_SETTINGS = ('norm', 'qk_norm', 'dim_value_head', 'rotary_emb', 'rotary_layout')
IGNORED_LABEL = -100


class LossAndLogits(NamedTuple):
    """Result of a forward of `Transformer` with labels.

    Attributes:
        loss: mean cross entropy, a scalar.
        logits: `[B, T, num_tokens]`.
    """

    loss: Tensor
    logits: Tensor


class Block(nn.Module):
    """Attention, then a feed-forward network, each added to its input. Both normalise their input.

    Args:
        attention: `SparseAttention` or `DenseAttention`.
        feed_forward: module `[B, T, dim]` to `[B, T, dim]`.
    """

    def __init__(self, attention: SparseAttention | DenseAttention, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, mask: Tensor | None = None, cu_seqlens: Tensor | None = None, **options: Any) -> Any:
        """Return `[B, T, dim]`; arguments are those of the attention.

        With return_cache or return_block_loss, return the pair of it and the cache or the loss.
        """
        out = self.attention(x, mask, cu_seqlens, **options)
        out, *beside = out if isinstance(out, tuple) else (out,)
        x = x + out
        x = x + self.feed_forward(x)
        return (x, *beside) if beside else x


class Transformer(GeneratingModel):
    """A decoder over token ids, with sparse attention or its dense twin in every block.

    With one seed, dense and sparse models start from bitwise the same embedding, feed-forward networks, head and
    attention projections; with `independent_branch_kv` every branch starts from the keys and values of the dense twin.

    Args:
        num_tokens: size of the vocabulary.
        dim: width of the model.
        depth: number of blocks.
        dim_head: D, size of a query or key head.
        heads: HQ, number of query heads.
        kv_heads: H, number of KV heads, a divisor of heads; default heads.
        ff_expansion_factor: hidden size of the feed-forward networks over dim.
        use_sparse_attn: sparse attention in every block; False builds the dense twin.
        causal: tokens read no later token.
        sparse_attn_kwargs: further arguments of `SparseAttention`; by default windows of 32, and blocks of 4 of which 4
            are read. Every layer gets copies of the modules in it. The dense twin takes `norm`, `qk_norm`,
            `dim_value_head` and `rotary_emb` from it, and nothing else: `output_gate` gates sparse attention alone.
        tie_embeddings: one matrix is embedding and head.
        dense_output_gate: the dense twin has the `output_gate` of `DenseAttention`; refused with use_sparse_attn.
        backend: 'auto', 'triton', 'flex' or 'eager', for the sparse attention.

    Raises:
        ValueError: sizes do not fit; names argument, value and rule.
    """

    # transformers.Trainer reads these: num_items_in_batch is taken, and labels are shifted in the forward.
    accepts_loss_kwargs = True
    loss_type = 'ForCausalLM'

    def __init__(
        self,
        num_tokens: int,
        dim: int,
        depth: int,
        dim_head: int = 64,
        heads: int = 8,
        kv_heads: int | None = None,
        ff_expansion_factor: float = 4.0,
        use_sparse_attn: bool = False,
        causal: bool = True,
        sparse_attn_kwargs: Mapping[str, Any] = DEFAULT_SPARSE_ATTN_KWARGS,
        *,
        tie_embeddings: bool = False,
        dense_output_gate: bool = False,
        backend: str = 'auto',
        **unknown: NoReturn,
    ) -> None:
        super().__init__()
        refuse_unknown('Transformer', unknown)
        check_backend(backend)
        check_positive(num_tokens=num_tokens, dim=dim, depth=depth)
        dim_hidden = hidden_size(ff_expansion_factor, dim, 'ff_expansion_factor', 'dim')
        flags = {'use_sparse_attn': use_sparse_attn, 'causal': causal, 'tie_embeddings': tie_embeddings}
        check_flags(**flags, dense_output_gate=dense_output_gate)
        if use_sparse_attn and dense_output_gate:
            raise ValueError('dense_output_gate is True, but only a dense model has it: use_sparse_attn must be False')
        self.num_tokens, self.causal, self.use_sparse_attn, self.backend = num_tokens, causal, use_sparse_attn, backend
        self._checkpointing: tuple[dict[str, Any], int] | None = None

        # Random numbers are drawn in the order of `modules`: first for what dense and sparse models have in common.
        self.token_emb = nn.Embedding(num_tokens, dim)
        self.norm = nn.RMSNorm(dim)
        self.to_logits = nn.Linear(dim, num_tokens, bias=False)
        if tie_embeddings:
            # The head's start serves both: logits of an embedding of unit variance would have the variance dim.
            self.token_emb.weight = self.to_logits.weight
        sizes = {'dim': dim, 'dim_head': dim_head, 'heads': heads, 'kv_heads': kv_heads, 'causal': causal}
        _check_settings(sparse_attn_kwargs, {*sizes, 'backend'})
        arguments = {**sizes, **flags, 'num_tokens': num_tokens, 'depth': depth, 'backend': backend}
        arguments |= {'ff_expansion_factor': ff_expansion_factor, 'dense_output_gate': dense_output_gate}
        self._arguments = Arguments({**arguments, 'sparse_attn_kwargs': sparse_attn_kwargs}, 'sparse_attn_kwargs')
        shape = {name: sparse_attn_kwargs[name] for name in SHAPE_SETTINGS if name in sparse_attn_kwargs}
        # Modules among the settings are copied, so that no layer shares weights with another.
        blocks = [
            Block(
                DenseAttention(**sizes, **deepcopy(shape), output_gate=dense_output_gate),
                _feed_forward(dim, dim_hidden),
            )
            for _ in range(depth)
        ]
        if use_sparse_attn:
            with without_draws():
                attentions = [
                    SparseAttention(**sizes, backend=backend, **deepcopy(dict(sparse_attn_kwargs)))
                    for _ in range(depth)
                ]
            for block, attention in zip(blocks, attentions, strict=True):
                start_from(attention, cast(DenseAttention, block.attention))
                block.attention = attention
            if sparse_attn_kwargs.get('compress_mlp') is None:
                reset_networks(attentions)
        self.layers = nn.ModuleList(blocks)
        self._arguments.names = frozenset(self.state_dict())

    def forward(
        self,
        ids: Tensor,
        return_loss: bool = False,
        cache: ModelCache | None = None,
        return_cache: bool = False,
        *,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_block_loss: bool = False,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        last_only: bool = False,
        backend: str | None = None,
        **unknown: NoReturn,
    ) -> Any:
        """Return the logits `[B, T, num_tokens]` of the token after each of ids, int `[B, T]`.

        Args:
            return_loss: return instead the mean cross entropy, in nats, of every token given the tokens before it in
                its sequence (float32; float64 in a float64 model).
            cache: ids are the tokens that follow it, any number of them. A call with a cache runs without autograd; it
                is refused in training mode unless under torch.no_grad().
            return_cache: return (logits, cache); without a cache, start one that grows.
            labels: int32 or int64 `[B, T]`, in most cases ids; -100 is ignored. Return instead `LossAndLogits`: the
                mean cross entropy of every label given the tokens before it in its sequence, and the logits.
            num_items_in_batch: number by which the sum over labels is divided; default: labels that count in this call.
            return_block_loss: return a pair of that and the mean `block_score_loss` of the sparse layers, a
                scalar to add to the loss with a small weight.
            mask: bool or integers of 0 and 1 `[B, T]`, true at real tokens, padding left or right; logits of padding
                are undefined.
            cu_seqlens: int32 `[N + 1]`, borders of packed sequences in ids `[1, total]`.
            last_only: return the logits `[B, num_tokens]` after the last real token of each row alone, computed from
                one token per row.
            backend: of the sparse attention in this call; default that of the model.
        """
        refuse_unknown('Transformer.forward', unknown)
        flags = {'return_block_loss': return_block_loss, 'last_only': last_only}
        check_flags(return_loss=return_loss, return_cache=return_cache, **flags)
        if backend is not None:
            check_backend(backend)
        check_ids('ids', ids)
        if mask is not None:
            check_mask(mask, ids)
            mask = mask.bool()
        cached = cache is not None or return_cache
        if labels is not None:
            _check_labels(labels, ids, return_loss or last_only or cached)
        elif num_items_in_batch is not None:
            raise ValueError('num_items_in_batch is given, but must be None without labels')
        if last_only and (return_loss or cu_seqlens is not None or ids.shape[1] == 0):
            raise ValueError('last_only is True, but needs rows with tokens, without return_loss and cu_seqlens')
        if return_loss and cached:
            raise ValueError('return_loss is True with a cache, but a loss needs a forward without one')
        if return_block_loss:
            self._check_block_loss(cached)
        if not cached:
            block_losses: list[Tensor] | None = [] if return_block_loss else None
            if return_loss:
                out = self._loss(ids, mask, cu_seqlens, backend, block_losses)
            elif labels is not None:
                logits = self.to_logits(self._embed(ids, mask, cu_seqlens, backend, block_losses))
                targets = self._targets(labels, mask, cu_seqlens)
                total = summed_cross_entropy(logits[:, : targets.shape[1]], targets)
                out = LossAndLogits(self._mean(total, targets, num_items_in_batch), logits)
            else:
                out = self._logits(self._embed(ids, mask, cu_seqlens, backend, block_losses), mask, last_only)
            return out if block_losses is None else (out, torch.stack(block_losses).mean())
        if cu_seqlens is not None:
            raise ValueError('cu_seqlens is given with a cache, but packed sequences have none')
        check_undifferentiated(ids, self)
        if cache is not None:
            self._check_cache(cache)
            cache.reserve(ids.shape[1])
        checkpoint = None if cache is None else Checkpoint(cache, ids.shape[1])
        try:
            with torch.no_grad():
                embedded, cache = self._embed_cached(ids, mask, cache, backend)
                logits = self._logits(embedded, mask, last_only)
        except BaseException:
            if checkpoint is not None:
                checkpoint.restore()
            raise
        return (logits, cache) if return_cache else logits

    @property
    def blocks(self) -> list[Block]:
        return [cast(Block, block) for block in self.layers]

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write the model to a directory: config.json with the constructor arguments, model.safetensors with the
        weights, of which tied ones are written once.

        Modules in sparse_attn_kwargs (`compress_mlp`, `strategy_combine_mlp`, `rotary_emb`) are not written, only their
        weights: `from_pretrained` needs them again. Raises ValueError for weights that are sharded, quantised or on the
        meta device, for those of adapters and parametrisations, and ImportError without safetensors.
        """
        save(self, self._arguments, directory)

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str], **changes: Any) -> Transformer:
        """Return the model that `save_pretrained` wrote, on the CPU, in the dtypes of its weights and in eval mode.

        changes: constructor arguments in place of the saved ones; those in `sparse_attn_kwargs` are added to the saved
        ones. Raises ValueError where the directory holds no such model, where a module that was saved by name is not
        given, and where a change does not fit the weights.
        """
        return load(cls, directory, changes)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Save only the input of each block in training mode, and recompute the block in the backward pass.

        gradient_checkpointing_kwargs: of `torch.utils.checkpoint.checkpoint`; default `{'use_reentrant': False}`.
        """
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs)

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """As `gradient_checkpointing_enable`, for the first of every n layers. offload is refused."""
        check_positive(every_n_layers=every_n_layers)
        if offload:
            raise ValueError('offload is True, but must be False: what is saved stays on its device')
        self._checkpointing = {'use_reentrant': False} | (activation_checkpointing_kwargs or {}), every_n_layers

    def gradient_checkpointing_disable(self) -> None:
        """Save activations again."""
        self._checkpointing = None

    activation_checkpointing_disable = gradient_checkpointing_disable

    def _check_block_loss(self, cached: bool) -> None:
        if cached:
            raise ValueError('return_block_loss is True with a cache, but a loss needs a forward without one')
        if not any(isinstance(block.attention, SparseAttention) for block in self.blocks):
            raise ValueError('return_block_loss is True, but the model has no sparse attention')

    def _embed(
        self,
        ids: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        backend: str | None,
        block_losses: list[Tensor] | None,
    ) -> Tensor:
        """Return the normalised output of the last block, `[B, T, dim]`; append losses of block scores to a list."""
        return self.norm(self._run_blocks(self._tokens(ids, mask), mask, cu_seqlens, backend, block_losses))

    def _run_blocks(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        backend: str | None = None,
        block_losses: list[Tensor] | None = None,
        **more: Any,
    ) -> Tensor:
        """more: arguments of every block."""
        for index, block in enumerate(self.blocks):
            options: dict[str, Any] = {**_options(block, backend), **more}
            if block_losses is not None and isinstance(block.attention, SparseAttention):
                options['return_block_loss'] = True
                x, block_loss = self._run_block(index, options, x, mask, cu_seqlens)
                block_losses.append(block_loss)
            else:
                x = self._run_block(index, options, x, mask, cu_seqlens)
        return x

    def _run_block(self, index: int, options: dict[str, Any], *args: Tensor | None) -> Any:
        block, (settings, every_n_layers) = self.blocks[index], self._checkpointing or ({}, 0)
        if not every_n_layers or not self.training or index % every_n_layers:
            return block(*args, **options)
        return checkpoint_activations(partial(block, **options), *args, **settings)

    def _embed_cached(
        self, ids: Tensor, mask: Tensor | None, cache: ModelCache | None, backend: str | None
    ) -> tuple[Tensor, ModelCache]:
        x = self._tokens(ids, mask)
        if cache is not None:
            for block, layer in zip(self.blocks, cache, strict=True):
                x = block(x, mask, cache=layer, **_options(block, backend))
            return self.norm(x), cache
        layers = []
        for block in self.blocks:
            x, layer = block(x, mask, return_cache=True, **_options(block, backend))
            layers.append(layer)
        return self.norm(x), ModelCache(layers)

    def _logits(self, embedded: Tensor, mask: Tensor | None, last_only: bool) -> Tensor:
        if last_only:
            embedded = embedded[:, -1] if mask is None else last_real(embedded, mask)
        return self.to_logits(embedded)

    def _tokens(self, ids: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        # Ids at padding may lie outside the vocabulary, such as -100.
        return self.token_emb(ids if mask is None else ids.masked_fill(~mask, 0), **options)

    def _loss(
        self,
        ids: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        backend: str | None,
        block_losses: list[Tensor] | None,
    ) -> Tensor:
        targets = self._targets(ids, mask, cu_seqlens)
        mask = None if mask is None else mask[:, :-1]
        cu_seqlens = None if cu_seqlens is None else cu_seqlens.clamp(max=ids.shape[1] - 1)
        return self._mean_loss(self._embed(ids[:, :-1], mask, cu_seqlens, backend, block_losses), targets)

    def _mean_loss(self, embedded: Tensor, targets: Tensor) -> Tensor:
        # A head that is divided over ranks computes the loss without all logits.
        if (summed := getattr(self.to_logits, 'summed_cross_entropy', None)) is not None:
            return self._mean(summed(embedded, targets), targets)
        return self._mean(summed_cross_entropy(self.to_logits(embedded), targets), targets)

    def _targets(self, labels: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        """Return the label after each token but the last, `[B, T - 1]`, ignored where it is of another sequence."""
        if labels.shape[1] < 2:
            raise ValueError(f'ids has {labels.shape[1]} tokens per row, but a loss needs at least 2')
        targets = labels[:, 1:]
        if mask is not None:
            targets = targets.masked_fill(~(mask[:, :-1] & mask[:, 1:]), IGNORED_LABEL)
        if cu_seqlens is not None:
            check_integers('cu_seqlens', cu_seqlens, None)
            targets = targets.masked_fill(~continues(cu_seqlens, labels.shape[1]), IGNORED_LABEL)
        return targets

    def _mean(self, total: Tensor, targets: Tensor, count: Tensor | int | None = None) -> Tensor:
        """Return the loss: the sum over targets `[B, T]` divided by count, default the number of those that count."""
        return total / (num_labels(targets).clamp(min=1) if count is None else count)


def _check_labels(labels: Tensor, ids: Tensor, is_excluded: bool) -> None:
    check_tensors(labels=labels)
    check_ids('labels', labels)
    if labels.shape != ids.shape:
        raise ValueError(f'labels has shape {tuple(labels.shape)}, but must have that of ids, {tuple(ids.shape)}')
    if is_excluded:
        raise ValueError('labels is given, but needs a forward without a cache, return_loss and last_only')


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    logits, flat = _upcast(logits).flatten(0, 1), targets.flatten().long()
    return F.cross_entropy(logits, flat, ignore_index=IGNORED_LABEL, reduction='sum')


def num_labels(targets: Tensor) -> Tensor:
    return (targets != IGNORED_LABEL).sum()


def _options(block: Block, backend: str | None) -> dict[str, str]:
    """Return the argument `backend` of a block's call; dense attention takes none. Layers may be wrapped."""
    if backend is None or not any(isinstance(module, SparseAttention) for module in block.attention.modules()):
        return {}
    return {'backend': backend}


def _feed_forward(dim: int, dim_hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, dim_hidden), nn.GELU(), nn.Linear(dim_hidden, dim))


def _check_settings(sparse_attn_kwargs: Mapping[str, Any], given: set[str]) -> None:
    """Raise ValueError for names that are no arguments of `SparseAttention`, and for `given`, those of the model."""
    if not isinstance(sparse_attn_kwargs, Mapping):
        raise ValueError(f'sparse_attn_kwargs is {shown(sparse_attn_kwargs)}, but must be a mapping of arguments')
    allowed = signature(SparseAttention).parameters.keys() - {*given, 'unknown'}
    for name in sparse_attn_kwargs:
        if name not in allowed:
            raise ValueError(
                f'sparse_attn_kwargs has {name!r}, but must have arguments of SparseAttention other than '
                f'{", ".join(sorted(given))}'
            )


def continues(cu_seqlens: Tensor, total: int) -> Tensor:
    """Return bool `[total - 1]`: token t + 1 belongs to the sequence of token t."""
    ends = cu_seqlens.long()
    index = torch.arange(1, total, device=cu_seqlens.device)
    return (index < ends[-1]) & ~torch.isin(index, ends)


def _upcast(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
