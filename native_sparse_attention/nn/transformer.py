"""A small language model, and the dense twin that it is compared with: the two differ in the attention alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from inspect import signature
from itertools import zip_longest
from math import ceil, isnan
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from native_sparse_attention.core.backend import check_backend
from native_sparse_attention.core.checks import (
    check_flags,
    check_integers,
    check_not_negative,
    check_positive,
    check_tensors,
    is_number,
    shown,
)
from native_sparse_attention.core.plain import runs_hooks
from native_sparse_attention.core.random import check_probability
from native_sparse_attention.inference.cache import MAX_ROLLBACK
from native_sparse_attention.inference.generation import (
    DecodeStep,
    Finite,
    continue_prompt,
    evaluating,
    gumbel_draw,
    last_real,
    sampler,
    stop_ids,
)
from native_sparse_attention.inference.model_cache import ModelCache, check_model_cache
from native_sparse_attention.inference.rollback import Checkpoint
from native_sparse_attention.nn.attention import SparseAttention
from native_sparse_attention.nn.checks import check_undifferentiated
from native_sparse_attention.nn.compress import hidden_size
from native_sparse_attention.nn.dense import DenseAttention
from native_sparse_attention.nn.padding import check_mask
from native_sparse_attention.nn.start import StartedModel, reset_networks, start_from, without_draws

DEFAULT_SPARSE_ATTN_KWARGS: Mapping[str, Any] = {
    'sliding_window_size': 32,
    'compress_block_size': 4,
    'compress_block_sliding_stride': 4,
    'selection_block_size': 4,
    'num_selected_blocks': 4,
}
SHAPE_SETTINGS = ('norm', 'dim_value_head', 'rotary_emb')  # of SparseAttention, which the dense twin shares
IGNORED_LABEL = -100
CHUNK_SIZE = 16_384  # tokens of a prompt in one forward, so that memory follows the cache and not the prompt


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


class Transformer(StartedModel):
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
        use_flex_sliding_window: deprecated flag of native-sparse-attention-pytorch, mapped to backend.
        use_flex_fine_selection: deprecated flag of native-sparse-attention-pytorch, mapped to backend.
        use_triton_fine_selection: deprecated flag of native-sparse-attention-pytorch, mapped to backend.
        sparse_attn_kwargs: further arguments of `SparseAttention`; by default windows of 32, and blocks of 4 of which 4
            are read. Every layer gets copies of the modules in it. The dense twin takes `norm`, `dim_value_head` and
            `rotary_emb` from it.
        tie_embeddings: one matrix is embedding and head.
        dense_output_gate: the dense twin has the `output_gate` of `DenseAttention`; refused with use_sparse_attn.
        backend: 'auto', 'triton', 'flex' or 'eager', for the sparse attention.

    Raises:
        ValueError: sizes do not fit; names argument, value and rule.
    """

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
        use_flex_sliding_window: bool = False,
        use_flex_fine_selection: bool = False,
        use_triton_fine_selection: bool = False,
        sparse_attn_kwargs: Mapping[str, Any] = DEFAULT_SPARSE_ATTN_KWARGS,
        *,
        tie_embeddings: bool = False,
        dense_output_gate: bool = False,
        backend: str = 'auto',
    ) -> None:
        super().__init__()
        check_backend(backend)
        check_positive(num_tokens=num_tokens, dim=dim, depth=depth)
        dim_hidden = hidden_size(ff_expansion_factor, dim, 'ff_expansion_factor', 'dim')
        flags = {'use_sparse_attn': use_sparse_attn, 'causal': causal, 'tie_embeddings': tie_embeddings}
        check_flags(**flags, dense_output_gate=dense_output_gate)
        if use_sparse_attn and dense_output_gate:
            raise ValueError('dense_output_gate is True, but only a dense model has it: use_sparse_attn must be False')
        backend = _backend_of_flags(
            backend, use_flex_sliding_window, use_flex_fine_selection, use_triton_fine_selection
        )
        self.num_tokens, self.causal, self.use_sparse_attn, self.backend = num_tokens, causal, use_sparse_attn, backend

        # Random numbers are drawn in the order of `modules`: first for what dense and sparse models have in common.
        self.token_emb = nn.Embedding(num_tokens, dim)
        self.norm = nn.RMSNorm(dim)
        self.to_logits = nn.Linear(dim, num_tokens, bias=False)
        if tie_embeddings:
            # The head's start serves both: logits of an embedding of unit variance would have the variance dim.
            self.token_emb.weight = self.to_logits.weight
        sizes = {'dim': dim, 'dim_head': dim_head, 'heads': heads, 'kv_heads': kv_heads, 'causal': causal}
        _check_settings(sparse_attn_kwargs, {*sizes, 'backend'})
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

    def forward(
        self,
        ids: Tensor,
        return_loss: bool = False,
        cache: ModelCache | None = None,
        return_cache: bool = False,
        *,
        return_block_loss: bool = False,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        last_only: bool = False,
        disable_flex: bool | None = None,
        disable_triton_kernel: bool | None = None,
    ) -> Any:
        """Logits `[B, T, num_tokens]` of the tokens that follow each of ids (int `[B, T]`).

        Args:
            return_loss: return instead the mean cross entropy, in nats, of every token given the tokens before it in
                its sequence (float32; float64 in a float64 model).
            cache: ids are the tokens that follow it, any number of them. A call with a cache runs without autograd; it
                is refused in training mode unless under torch.no_grad().
            return_cache: return (logits, cache); without a cache, start one that grows.
            return_block_loss: return a pair of logits or loss and the mean `block_score_loss` of the sparse layers, a
                scalar to add to the loss with a small weight.
            mask: bool or integers of 0 and 1 `[B, T]`, true at real tokens, padding left or right; logits of padding
                are undefined.
            cu_seqlens: int32 `[N + 1]`, borders of packed sequences in ids `[1, total]`.
            last_only: return the logits `[B, num_tokens]` after the last real token of each row alone, computed from
                one token per row.
            disable_flex, disable_triton_kernel: flags of native-sparse-attention-pytorch, mapped to a backend for this
                call with a DeprecationWarning.
        """
        flags = {'return_block_loss': return_block_loss, 'last_only': last_only}
        check_flags(return_loss=return_loss, return_cache=return_cache, **flags)
        _check_ids('ids', ids)
        if mask is not None:
            check_mask(mask, ids)
            mask = mask.bool()
        cached = cache is not None or return_cache
        options = self._options_of_flags(disable_flex, disable_triton_kernel)
        if last_only and (return_loss or cu_seqlens is not None or ids.shape[1] == 0):
            raise ValueError('last_only is True, but needs rows with tokens, without return_loss and cu_seqlens')
        if return_loss and cached:
            raise ValueError('return_loss is True with a cache, but a loss needs a forward without one')
        if return_block_loss:
            self._check_block_loss(cached)
        if not cached:
            block_losses: list[Tensor] | None = [] if return_block_loss else None
            if return_loss:
                out = self._loss(ids, mask, cu_seqlens, block_losses, **options)
            else:
                out = self._logits(self._embed(ids, mask, cu_seqlens, block_losses, **options), mask, last_only)
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
                embedded, cache = self._embed_cached(ids, mask, cache, **options)
                logits = self._logits(embedded, mask, last_only)
        except BaseException:
            if checkpoint is not None:
                checkpoint.restore()
            raise
        return (logits, cache) if return_cache else logits

    @property
    def blocks(self) -> list[Block]:
        return [cast(Block, block) for block in self.layers]

    def init_cache(
        self,
        batch_size: int,
        max_seq_len: int,
        max_rollback: int | None = MAX_ROLLBACK,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        page_size: int | None = None,
        num_pages: int | None = None,
    ) -> ModelCache:
        """Return a preallocated cache of all layers; arguments are those of `SparseAttention.init_cache`."""
        options = (max_rollback, dtype, device, page_size, num_pages)
        return ModelCache([b.attention.init_cache(batch_size, max_seq_len, *options) for b in self.blocks])

    def decodes_fixed(self, cache: ModelCache, num_tokens: int) -> bool:
        """Return whether one CUDA graph serves every call with the cache and `num_tokens` tokens per row.

        Such a call makes the same launches at every length of every row. A module with hooks or with a `forward` of its
        own, such as a sharded or offloaded one, runs Python that a replay would leave out: then there is no graph.
        """
        return not runs_hooks(self) and all(
            block.attention.decodes_fixed(layer, num_tokens) for block, layer in zip(self.blocks, cache, strict=True)
        )

    @torch.no_grad()
    def prefill(
        self, ids: Tensor, cache: ModelCache, *, mask: Tensor | None = None, chunk_size: int = CHUNK_SIZE
    ) -> Tensor:
        """Append ids `[B, T]` to the cache, chunk_size tokens at a time; logits `[B, num_tokens]` of what follows.

        mask: bool `[B, T]`, True at real tokens, of which every row needs one: its logits follow its own last one.
        Raises ValueError where the cache may not hold all, before anything is written.
        """
        _check_prompt('ids', ids, mask, self.token_emb)
        mask = None if mask is None else mask.bool()
        check_positive(chunk_size=chunk_size)
        self._check_cache(cache)
        cache.reserve(ids.shape[1])
        masks = [None] if mask is None else mask.split(chunk_size, dim=1)
        last, checkpoint = None, Checkpoint(cache, ids.shape[1])
        try:
            for part, real in zip_longest(ids.split(chunk_size, dim=1), masks):
                logits = self(part, cache=cache, mask=real, last_only=True)
                last = logits if real is None or last is None else torch.where(real.any(1, keepdim=True), logits, last)
        except BaseException:
            checkpoint.restore()
            raise
        return cast(Tensor, last)

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        *,
        mask: Tensor | None = None,
        seed: int | Sequence[int] | Tensor | None = None,
        generator: torch.Generator | None = None,
        stop_tokens: int | Sequence[int] | Tensor | None = None,
        callback: Callable[[Tensor], None] | None = None,
        chunk_size: int = CHUNK_SIZE,
        use_graph: bool | None = None,
        progress: bool = False,
    ) -> Tensor:
        """Continue prompt `[B, P]` by `max_new_tokens` tokens through the cache; returns the new tokens alone.

        Args:
            temperature: 0 takes the likeliest token.
            top_k: draw from the k likeliest.
            top_p: in (0, 1]: draw from the fewest of the likeliest whose probabilities reach p.
            mask: bool `[B, P]`, True at real tokens, padding on either side; every row continues after its own last.
            seed: one per row, of 0 to 2³² − 1: draw s of a row depends on its seed and s alone, so that its text is the
                same alone and in any batch (as far as its logits are). An int stands for seed, seed + 1, … of the rows.
            generator: where random numbers come from without a seed, on the model's device (default: torch's own).
            stop_tokens: ids. A row ends with the first that it draws, which it then repeats; the result is as long as
                the longest row, `[B, ≤ max_new_tokens]`. Whether all have stopped is looked up every 16 steps.
            callback: called with the tokens `[B]` of each step, on the device, whose columns together are the result.
                Reading them waits for the device; with stop_tokens every step does.
            chunk_size: tokens of the prompt in a forward.
            use_graph: replay the step of a token as a CUDA graph; None: where possible, see `generation.DecodeStep`.
            progress: show a bar (needs tqdm).

        Raises ValueError for other values, and for logits that are NaN or +inf.
        """
        self._check_causal()
        _check_prompt('prompt', prompt, mask, self.token_emb)
        mask = None if mask is None else mask.bool()
        check_not_negative(max_new_tokens=max_new_tokens)
        check_positive(chunk_size=chunk_size)
        check_flags(progress=progress)
        if callback is not None and not callable(callback):
            raise ValueError(f'callback is {shown(callback)}, but must be callable or None')
        choose = sampler(
            prompt.shape[0],
            max_new_tokens,
            prompt.device,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            generator=generator,
        )
        return self._continue(
            prompt,
            max_new_tokens,
            choose,
            mask,
            chunk_size,
            use_graph,
            stop_tokens=stop_ids(stop_tokens, prompt.device),
            callback=callback,
            progress=progress,
        )

    @torch.no_grad()
    def sample(
        self,
        prompt: Tensor,
        seq_len: int,
        temperature: float = 1.0,
        filter_thres: float = 0.9,
        use_cache_kv: bool = False,
    ) -> Tensor:
        """Continue prompt `[B, P]` to `seq_len` tokens; returns those after the prompt, `[B, max(0, seq_len - P)]`.

        The meaning is that of native-sparse-attention-pytorch 0.2.3: temperature ≤ 0 takes the likeliest token;
        otherwise one is drawn from the ceil((1 - filter_thres) · num_tokens) likeliest. use_cache_kv: decode through
        the cache instead of recomputing the whole sequence for every token; the result is the same.
        """
        self._check_causal()
        _check_prompt('prompt', prompt, None, self.token_emb)
        check_not_negative(seq_len=seq_len)
        if not is_number(temperature) or isnan(temperature):
            raise ValueError(f'temperature is {shown(temperature)}, but must be a number')
        check_probability(filter_thres=filter_thres)
        check_flags(use_cache_kv=use_cache_kv)
        kept = ceil((1 - filter_thres) * self.num_tokens)

        def choose(logits: Tensor, _: int) -> Tensor:
            return logits.argmax(-1) if temperature <= 0 else gumbel_draw(logits, temperature, kept)

        count = max(0, seq_len - prompt.shape[1])
        if use_cache_kv:
            return self._continue(prompt, count, choose)
        out = prompt
        with evaluating(self):
            finite = None
            for step in range(count):
                logits = self(out, last_only=True)
                finite = Finite(logits) if finite is None else finite
                token = choose(finite.replaced(logits), step)
                out = torch.cat((out, token[:, None].to(out.dtype)), dim=1)
            if finite is not None:
                finite.check()
        return out[:, prompt.shape[1] :]

    def _continue(
        self,
        prompt: Tensor,
        count: int,
        choose: Callable[[Tensor, int], Tensor],
        mask: Tensor | None = None,
        chunk_size: int = CHUNK_SIZE,
        use_graph: bool | None = None,
        **options: Any,
    ) -> Tensor:
        """`count` tokens after the prompt, through a preallocated cache; the rest is that of `continue_prompt`."""
        batch, length = prompt.shape
        new = prompt.new_empty(batch, count)
        if count == 0:
            return new
        with evaluating(self):
            cache = self.init_cache(batch, length + count)
            step = DecodeStep(self, cache, use_graph=use_graph)
            logits = self.prefill(prompt, cache, mask=mask, chunk_size=chunk_size)
            return continue_prompt(new, logits, step, choose, **options)

    def _check_causal(self) -> None:
        if not self.causal:
            raise ValueError('causal is False, but only a causal model can generate')

    def _check_block_loss(self, cached: bool) -> None:
        if cached:
            raise ValueError('return_block_loss is True with a cache, but a loss needs a forward without one')
        if not any(isinstance(block.attention, SparseAttention) for block in self.blocks):
            raise ValueError('return_block_loss is True, but the model has no sparse attention')

    def _check_cache(self, cache: ModelCache) -> None:
        check_model_cache(cache)
        if len(cache) != len(self.layers):
            raise ValueError(f'cache has {len(cache)} layers, but the model has {len(self.layers)}')

    def _embed(
        self,
        ids: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        block_losses: list[Tensor] | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the normalised output of the last block, `[B, T, dim]`; append losses of block scores to a list."""
        x = self._tokens(ids, mask)
        for block in self.blocks:
            if block_losses is not None and isinstance(block.attention, SparseAttention):
                x, block_loss = block(x, mask, cu_seqlens, return_block_loss=True, **options)
                block_losses.append(block_loss)
            else:
                x = block(x, mask, cu_seqlens, **options)
        return self.norm(x)

    def _embed_cached(
        self, ids: Tensor, mask: Tensor | None, cache: ModelCache | None, **options: Any
    ) -> tuple[Tensor, ModelCache]:
        x = self._tokens(ids, mask)
        if cache is not None:
            for block, layer in zip(self.blocks, cache, strict=True):
                x = block(x, mask, cache=layer, **options)
            return self.norm(x), cache
        layers = []
        for block in self.blocks:
            x, layer = block(x, mask, return_cache=True, **options)
            layers.append(layer)
        return self.norm(x), ModelCache(layers)

    def _logits(self, embedded: Tensor, mask: Tensor | None, last_only: bool) -> Tensor:
        if last_only:
            embedded = embedded[:, -1] if mask is None else last_real(embedded, mask)
        return self.to_logits(embedded)

    def _tokens(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        # Ids at padding may lie outside the vocabulary, such as -100.
        return self.token_emb(ids if mask is None else ids.masked_fill(~mask, 0))

    def _loss(
        self,
        ids: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        block_losses: list[Tensor] | None,
        **options: Any,
    ) -> Tensor:
        if ids.shape[1] < 2:
            raise ValueError(f'ids has {ids.shape[1]} tokens per row, but a loss needs at least 2')
        labels = ids[:, 1:]
        if mask is not None:
            labels = labels.masked_fill(~(mask[:, :-1] & mask[:, 1:]), IGNORED_LABEL)
            mask = mask[:, :-1]
        if cu_seqlens is not None:
            check_integers('cu_seqlens', cu_seqlens, None)
            labels = labels.masked_fill(~_continues(cu_seqlens, ids.shape[1]), IGNORED_LABEL)
            cu_seqlens = cu_seqlens.clamp(max=ids.shape[1] - 1)
        logits = _upcast(self.to_logits(self._embed(ids[:, :-1], mask, cu_seqlens, block_losses, **options)))
        total = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten().long(), ignore_index=IGNORED_LABEL, reduction='sum'
        )
        return total / (labels != IGNORED_LABEL).sum().clamp(min=1)

    def _options_of_flags(self, disable_flex: bool | None, disable_triton_kernel: bool | None) -> dict[str, Any]:
        """What the attention of this call gets for the flags of native-sparse-attention-pytorch."""
        flags = {'disable_flex': ('flex', disable_flex), 'disable_triton_kernel': ('triton', disable_triton_kernel)}
        given = {name: off for name, (_, off) in flags.items() if off is not None}
        if not given:
            return {}
        check_flags(**given)
        message = f"{' and '.join(given)} is deprecated: use backend='eager' in the constructor"
        warnings.warn(message, DeprecationWarning, stacklevel=5)  # past the frames of nn.Module.__call__
        runs_eager = any(off and self.backend in ('auto', backend) for backend, off in flags.values())
        return {'disable_triton_kernel': True} if runs_eager and self.use_sparse_attn else {}


def _feed_forward(dim: int, dim_hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, dim_hidden), nn.GELU(), nn.Linear(dim_hidden, dim))


def _check_settings(sparse_attn_kwargs: Mapping[str, Any], given: set[str]) -> None:
    """The dense twin takes few of them, but refuses the same names. given: arguments of the model itself."""
    if not isinstance(sparse_attn_kwargs, Mapping):
        raise ValueError(f'sparse_attn_kwargs is {shown(sparse_attn_kwargs)}, but must be a mapping of arguments')
    allowed = signature(SparseAttention).parameters.keys() - given
    for name in sparse_attn_kwargs:
        if name not in allowed:
            raise ValueError(
                f'sparse_attn_kwargs has {name!r}, but must have arguments of SparseAttention other than '
                f'{", ".join(sorted(given))}'
            )


def _backend_of_flags(backend: str, flex_window: bool, flex_selection: bool, triton_selection: bool) -> str:
    """The backend that the flags of native-sparse-attention-pytorch ask for."""
    flags = {
        'use_flex_sliding_window': flex_window,
        'use_flex_fine_selection': flex_selection,
        'use_triton_fine_selection': triton_selection,
    }
    check_flags(**flags)
    given = [name for name, value in flags.items() if value]
    if not given:
        return backend
    if flex_selection and triton_selection:
        raise ValueError('use_flex_fine_selection and use_triton_fine_selection are both True, but at most one may be')
    mapped = 'auto' if triton_selection else 'flex'  # auto takes Triton where it runs
    if backend not in ('auto', 'triton' if triton_selection else 'flex'):
        raise ValueError(f'backend is {backend!r}, but {" and ".join(given)} asks for {mapped!r}')
    warnings.warn(f'{" and ".join(given)} is now backend={mapped!r}', DeprecationWarning, stacklevel=3)
    return mapped if backend == 'auto' else backend


def _continues(cu_seqlens: Tensor, total: int) -> Tensor:
    """Bool `[total - 1]`: whether token t + 1 belongs to the sequence of token t."""
    ends = cu_seqlens.long()
    index = torch.arange(1, total, device=cu_seqlens.device)
    return (index < ends[-1]) & ~torch.isin(index, ends)


def _upcast(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _check_ids(name: str, ids: Tensor) -> None:
    check_tensors(**{name: ids})
    if ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f'{name} has shape {tuple(ids.shape)} and dtype {ids.dtype}, but must be int32 or int64 [batch, tokens]'
        )


def _check_prompt(name: str, ids: Tensor, mask: Tensor | None, token_emb: nn.Module) -> None:
    _check_ids(name, ids)
    if ids.shape[1] == 0:
        raise ValueError(f'{name} has no tokens, but needs at least 1')
    if mask is not None:
        check_mask(mask, ids)
        if mask.device.type == 'cpu' and not bool(mask.any(dim=1).all()):
            raise ValueError(f'mask has a row of padding alone, but {name} needs at least 1 real token in each')
    num_tokens: Any = getattr(token_emb, 'num_embeddings', None)
    # Reading them on a GPU would wait for it.
    if num_tokens is not None and ids.is_cpu and not torch.compiler.is_compiling():
        real = ids if mask is None else ids[mask.bool()]
        low, high = (int(real.min()), int(real.max())) if real.numel() else (0, 0)
        if low < 0 or high >= num_tokens:
            raise ValueError(f'{name} lies in [{low}, {high}], but must lie in [0, {num_tokens - 1}], the vocabulary')
