"""Text generation of a language model through its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from math import ceil, isnan
from typing import Any, cast

import torch
from torch import Tensor, nn

from native_sparse_attention.core.checks import (
    check_flags,
    check_not_negative,
    check_positive,
    is_number,
    is_readable,
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
    sampler,
    stop_ids,
)
from native_sparse_attention.inference.model_cache import ModelCache, check_model_cache
from native_sparse_attention.inference.rollback import Checkpoint
from native_sparse_attention.nn.checks import check_ids
from native_sparse_attention.nn.padding import check_mask
from native_sparse_attention.nn.start import StartedModel

CHUNK_SIZE = 16_384  # tokens of a prompt in one forward, so that memory follows the cache and not the prompt


class GeneratingModel(StartedModel):
    """Base of a model whose forward takes ids and a cache as that of `Transformer` does."""

    causal: bool
    num_tokens: int

    @property
    def blocks(self) -> Sequence[Any]:
        """Modules with an `attention`, one for each layer of the cache."""
        raise NotImplementedError

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
        """Append ids `[B, T]` to the cache, chunk_size tokens at a time; return the next logits `[B, num_tokens]`.

        mask: bool `[B, T]`, True at real tokens, of which every row needs one; logits follow the last one of the row.
        Raises ValueError where the cache cannot hold all, before anything is written.
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
        """Continue prompt `[B, P]` by `max_new_tokens` tokens through the cache; return the new tokens alone.

        Args:
            temperature: 0 takes the likeliest token.
            top_k: draw from the k likeliest.
            top_p: in (0, 1]: draw from the fewest likeliest tokens whose probabilities sum to p or more.
            mask: bool `[B, P]`, True at real tokens, padding on either side; a row continues after its last real token.
            seed: one per row, of 0 to 2³² − 1. Draw s of a row depends only on its seed and s, so its text is the same
                alone and in any batch, as far as its logits are. An int stands for seed, seed + 1, … of the rows.
            generator: source of random numbers without a seed, on the model's device; default: that of PyTorch.
            stop_tokens: ids. A row ends with the first one that it draws, and then repeats it; the result is as long as
                the longest row, `[B, ≤ max_new_tokens]`. Every 16 steps the host checks whether all rows have ended.
            callback: called with the tokens `[B]` of each step, on the device; together they are the columns of the
                result. Reading them waits for the device; with stop_tokens every step waits.
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
        random: dict[str, Any] = {'seed': seed, 'generator': generator}
        sizes = (prompt.shape[0], max_new_tokens, prompt.device)
        choose = sampler(*sizes, temperature=temperature, top_k=top_k, top_p=top_p, **random)
        options = {'stop_tokens': stop_ids(stop_tokens, prompt.device), 'callback': callback, 'progress': progress}
        return self._continue(prompt, max_new_tokens, choose, mask, chunk_size, use_graph, **options)

    @torch.no_grad()
    def sample(
        self,
        prompt: Tensor,
        seq_len: int,
        temperature: float = 1.0,
        filter_thres: float = 0.9,
        use_cache_kv: bool = False,
    ) -> Tensor:
        """Continue prompt `[B, P]` to `seq_len` tokens; return those after the prompt, `[B, max(0, seq_len - P)]`.

        As in native-sparse-attention-pytorch 0.2.3, temperature ≤ 0 takes the likeliest token, and otherwise one is
        drawn from the ceil((1 - filter_thres) · num_tokens) likeliest. use_cache_kv: decode through the cache instead
        of recomputing the whole sequence for every token; the result is the same.
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
        """Return `count` tokens after the prompt, through a preallocated cache. options: as in `continue_prompt`."""
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

    def _check_cache(self, cache: ModelCache) -> None:
        check_model_cache(cache)
        if len(cache) != len(self.blocks):
            raise ValueError(f'cache has {len(cache)} layers, but the model has {len(self.blocks)}')


def _check_prompt(name: str, ids: Tensor, mask: Tensor | None, token_emb: nn.Module) -> None:
    check_ids(name, ids)
    if ids.shape[1] == 0:
        raise ValueError(f'{name} has no tokens, but needs at least 1')
    if mask is not None:
        check_mask(mask, ids)
        if is_readable(mask) and not bool(mask.any(dim=1).all()):
            raise ValueError(f'mask has a row of padding alone, but {name} needs at least 1 real token in each')
    num_tokens: Any = getattr(token_emb, 'num_embeddings', None)
    # Reading them on a GPU would wait for it.
    if num_tokens is not None and is_readable(ids):
        real = ids if mask is None else ids[mask.bool()]
        low, high = (int(real.min()), int(real.max())) if real.numel() else (0, 0)
        if low < 0 or high >= num_tokens:
            raise ValueError(f'{name} lies in [{low}, {high}], but must lie in [0, {num_tokens - 1}], the vocabulary')
