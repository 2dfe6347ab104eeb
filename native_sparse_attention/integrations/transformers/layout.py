"""Layout of the tokens of one forward: padding and packed sequences, found once per forward and read by every layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from native_sparse_attention.core.checks import check_tensors, make_sequences
from native_sparse_attention.nn.padding import FrontOrder, check_mask, front_order


class Layout(NamedTuple):
    """Where the new tokens `[B, T]` of a forward belong.

    order: their order with padding behind, or None where all are real. min_count: at least so many tokens of each row
    are real. cu_seqlens: int32 `[N + 1]`, boundaries of packed sequences in the B * T tokens of the flattened batch, or
    None. rope_factor: factor of cos and sin, as YaRN has one.
    """

    order: FrontOrder | None
    min_count: int
    cu_seqlens: Tensor | None
    rope_factor: float


def make_layout(
    tokens: Tensor,
    attention_mask: Any,
    position_ids: Tensor | None,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    seen: int | None,
    rope_factor: float,
    needs_counts: bool,
) -> Layout:
    """Return the layout of tokens `[B, T, ...]`.

    Args:
        attention_mask: bool or numbers, 0 and 1, `[B, seen + T]`, true at real tokens, or None.
        position_ids: `[B or 1, T]` or None. Without a cache and a mask, positions that do not grow start a new packed
            sequence.
        cu_seqlens: boundaries of packed queries and keys as given to the model, which must agree.
        seen: tokens per row in the cache, padding included; None without a cache.
        rope_factor: as in `Layout`.
        needs_counts: read the shortest row from the device, for `min_count`.

    Raises:
        ValueError: a mask of another shape or kind, such as a 4-D mask, packed sequences with a mask or a cache, and
            position_ids that skip positions where they may be those of packed sequences.
    """
    (batch, seqlen), boundaries = tokens.shape[:2], _check_packed(tokens, attention_mask, cu_seqlens, seen)
    if attention_mask is None:
        if boundaries is None and not seen and position_ids is not None:
            boundaries = _boundaries_of(position_ids, batch, is_cached=seen is not None)
        return Layout(None, seqlen, boundaries, rope_factor)
    mask = new_columns(attention_mask, seen or 0, tokens)
    # Read once per forward rather than in each layer, as transformers does for FlashAttention.
    if may_read(mask) and bool(mask.all()):
        return Layout(None, seqlen, None, rope_factor)
    order = front_order(mask)
    min_count = int(order.lengths.min()) if needs_counts and may_read(mask) else 0
    return Layout(order, min_count, None, rope_factor)


def real_positions(layout: Layout, tokens: Tensor, seen: int, past: Tensor | None) -> Tensor | None:
    """Return positions `[B or 1, T]` of tokens `[B, T, ...]` in their own sequences, or None where they are columns.

    seen: columns in the cache. past: int32 `[B]`, real tokens of each row in the cache, or None where all are.
    """
    if layout.cu_seqlens is not None:
        return make_sequences(tokens, tokens.shape[1], None, None, layout.cu_seqlens, None).layout().position
    if layout.order is None and past is None:
        return None
    mask = tokens.new_ones(tokens.shape[:2], dtype=torch.bool) if layout.order is None else layout.order.mask
    return (mask.cumsum(1) - 1).clamp(min=0) + (seen if past is None else past[:, None])


def new_columns(attention_mask: Any, seen: int, tokens: Tensor) -> Tensor:
    """Return the columns of a mask `[B, seen + T]` that belong to tokens `[B, T, ...]`, or raise ValueError."""
    check_tensors(attention_mask=attention_mask)
    batch, seqlen = tokens.shape[:2]
    if attention_mask.ndim != 2:
        raise ValueError(
            f'attention_mask has shape {tuple(attention_mask.shape)}, but must be a padding mask of 2 dimensions: '
            f'sparse attention takes no mask per query'
        )
    if attention_mask.shape != (batch, seen + seqlen):
        raise ValueError(
            f'attention_mask has shape {tuple(attention_mask.shape)}, but must have {(batch, seen + seqlen)}: '
            f'the {seen} tokens in the cache and {seqlen} new ones'
        )
    mask = attention_mask[:, seen:]
    if mask.is_floating_point():  # prompts of adapters come with a float mask of ones
        mask = mask.where(mask == mask.round(), 2).int()  # 2 is refused, where a fraction would be rounded to 0
    check_mask(mask, tokens)
    return mask.bool()


def _check_packed(
    tokens: Tensor, attention_mask: Any, cu_seqlens: tuple[Tensor | None, Tensor | None], seen: int | None
) -> Tensor | None:
    """Return the boundaries of packed sequences in int32, or None where none are given."""
    of_queries, of_keys = cu_seqlens
    if of_queries is None and of_keys is None:
        return None
    check_tensors(cu_seq_lens_q=of_queries, cu_seq_lens_k=of_keys)
    assert of_queries is not None
    assert of_keys is not None
    is_read = of_keys.is_cpu and may_read(of_keys)
    if of_queries.shape != of_keys.shape or (is_read and not torch.equal(of_queries, of_keys)):
        raise ValueError('cu_seq_lens_k differs from cu_seq_lens_q, but packed keys must be those of the queries')
    if attention_mask is not None:
        raise ValueError(
            'attention_mask is given, but must be None where cu_seq_lens_q is: packed rows have no padding'
        )
    if seen is not None:
        raise ValueError('a cache is given, but must be None where cu_seq_lens_q is: packed sequences are not cached')
    if tokens.shape[0] != 1:
        raise ValueError(f'the batch size is {tokens.shape[0]}, but must be 1 where cu_seq_lens_q is given')
    return of_queries.int()


def _boundaries_of(position_ids: Tensor, batch: int, is_cached: bool) -> Tensor | None:
    """Return the boundaries of packed sequences in the flattened batch, or None where each row is one sequence."""
    steps = position_ids.diff(dim=1)
    if not may_read(steps):
        if is_cached:
            return None
        raise ValueError(
            'position_ids is given while the model is compiled or captured, where packed sequences cannot be found in '
            'it: leave it out, or give cu_seq_lens_q and cu_seq_lens_k'
        )
    if bool((steps == 1).all()):
        return None
    starts = torch.nn.functional.pad(steps <= 0, (1, 0), value=True)
    if is_cached:
        if bool(starts[:, 1:].any()):
            raise ValueError(
                'position_ids start again, but must not where a cache is given: packed rows are not cached'
            )
        return None
    if bool((steps > 1).any()):
        raise ValueError(
            'position_ids skip positions, which does not say whether a packed sequence begins: give an attention_mask '
            'of ones for rows of one sequence, or cu_seq_lens_q and cu_seq_lens_k'
        )
    first = starts.expand(batch, -1).flatten().nonzero()[:, 0]
    return torch.cat((first, first.new_full((1,), batch * starts.shape[1]))).int()


def may_read(tensor: Tensor) -> bool:
    """Return whether values may be read on the host: not in a compiled graph, nor while a CUDA graph is captured."""
    return not torch.compiler.is_compiling() and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
