"""Selected attention in plain PyTorch, which gathers the tokens of each query's blocks in query chunks."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from native_sparse_attention.core.autocast import without_autocast
from native_sparse_attention.core.call import Call
from native_sparse_attention.core.geometry import QueryLayout, in_window
from native_sparse_attention.core.modifiers import Modifiers
from native_sparse_attention.ops import _eager


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_scale: Tensor | None, block_size: int, call: Call
) -> tuple[Tensor, Tensor]:
    sequences, causal, scale, softcap = call
    batch, seqlen, heads, head_dim = q.shape
    seqlen_k, kv_heads = k.shape[1:3]
    index_heads, num_selected = block_indices.shape[2:]
    float_dtype = _eager.compute_dtype(q.dtype)
    # Cast once, so that gradients of keys that several queries read are summed in float32.
    tables = [_table(tensor.to(float_dtype)) for tensor in (k, v)]
    zero_row = batch * seqlen_k * kv_heads
    queries = rearrange(q, 'b t (h g) d -> b t h g d', h=index_heads)
    layout = sequences.layout()
    within_block = torch.arange(block_size, device=q.device)
    # Rows of k and v flattened to [B * S * H, D]: the row of key 0 for every batch entry and index head, [B, 1, HI, 1].
    first_row = torch.arange(batch, device=q.device)[:, None] * (seqlen_k * kv_heads)
    kv_head = torch.arange(index_heads, device=q.device) // (index_heads // kv_heads)
    first_row = (first_row + kv_head)[:, None, :, None]

    def attend(start: int, stop: int) -> tuple[Tensor, Tensor]:
        chunk = layout.chunk(start, stop)
        blocks = block_indices[:, start:stop].long()
        # [B, T, HI, n, l']: position of every token of every selected block, and whether the query reads it.
        token = blocks.clamp(-1, seqlen_k // block_size)[..., None] * block_size + within_block
        extents = (chunk.position, chunk.key_start, chunk.key_len)
        position, key_start, key_len = (t[..., None, None, None] for t in extents)
        visible = _counts(blocks, seqlen_k // block_size)[..., None] & (token < key_len)
        if causal:
            visible = visible & (token <= position)
        visible, index = (rearrange(t, 'b t h n l -> b t h (n l)') for t in (visible, token + key_start))
        row = first_row + index.clamp(0, max(0, seqlen_k - 1)) * kv_heads
        row = torch.where(visible, row, zero_row)
        # [B, T, HI, n * l', D and DV]
        keys, values = (torch.nn.functional.embedding(row, table, padding_idx=zero_row) for table in tables)
        logits = torch.einsum('bthgd,bthsd->bthgs', queries[:, start:stop].to(float_dtype), keys) * scale
        if block_scale is not None:
            factor = block_scale[:, start:stop].to(float_dtype).repeat_interleave(block_size, -1)
            logits = logits * factor.where(visible, 0)[:, :, :, None]
        weights, lse = _eager.masked_softmax(logits, visible[:, :, :, None], q.dtype, softcap=softcap)
        out = torch.einsum('bthgs,bthsd->bthgd', weights, values).to(q.dtype)
        return rearrange(out, 'b t h g d -> b t (h g) d'), rearrange(lse, 'b t h g -> b (h g) t')

    elements = batch * index_heads * num_selected * block_size * max(head_dim, v.shape[-1], heads // index_heads)
    with without_autocast(q):
        out, lse = _eager.in_query_chunks(attend, seqlen, elements, dims=(1, 2))
    return out, lse


def merged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_scale: Tensor | None,
    block_size: int,
    call: Call,
    window: tuple[int, int],
    modifiers: Modifiers,
) -> tuple[Tensor, Tensor]:
    """Attention over the union of the selected blocks and the window, in one softmax.

    Every query reads a row of a mask over all keys, so time and memory grow with S.
    """
    batch, seqlen, heads, _ = q.shape
    seqlen_k, kv_heads = k.shape[1:3]
    float_dtype = _eager.compute_dtype(q.dtype)
    # Cast once, so that the gradients of keys that several chunks read are added in float32.
    k, v = k.to(float_dtype), v.to(float_dtype)
    queries = rearrange(q, 'b t (h g) d -> b t h g d', h=kv_heads)
    layout = call.sequences.layout()
    index = torch.arange(seqlen_k, device=q.device)[None]

    def attend(start: int, stop: int) -> tuple[Tensor, Tensor]:
        chunk = layout.chunk(start, stop)
        blocks = block_indices[:, start:stop].long()
        factors = None if block_scale is None else block_scale[:, start:stop].to(float_dtype)
        visible, factor = _read_keys(chunk, blocks, factors, index, block_size, *window, call.causal)
        per_head = heads // blocks.shape[2]
        return _eager.masked_attention(
            queries[:, start:stop].to(float_dtype),
            k,
            v,
            visible.repeat_interleave(per_head, 1),
            call.scale,
            q.dtype,
            softcap=modifiers.softcap,
            sinks=modifiers.sinks,
            kept=_eager.dropout_factors(modifiers, batch, heads, start, stop, index, float_dtype),
            factor=None if factor is None else factor.repeat_interleave(per_head, 1),
        )

    with without_autocast(q):
        out, lse = _eager.in_query_chunks(attend, seqlen, batch * heads * seqlen_k, dims=(1, 2))
    return out, lse


def _read_keys(
    chunk: QueryLayout,
    blocks: Tensor,
    factors: Tensor | None,
    index: Tensor,
    block_size: int,
    left: int,
    right: int,
    causal: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return which keys each query of the chunk reads, and the factors of their logits: `[B, HI, T, S]` each.

    blocks: int64 `[B, T, HI, n]`. factors: of the blocks, or None. index: `[1, S]`, positions along the key axis.
    """
    key_position, own = chunk.key_position(index[:, None])  # [B, T, S]
    position = chunk.position[..., None]
    num_blocks = index.shape[1] // block_size + 1
    exists = _counts(blocks, num_blocks - 1)
    # [B, T, HI, blocks + 1]; the last entry takes the indices that name no block.
    slot = torch.where(exists, blocks, num_blocks)
    is_selected = torch.zeros(*blocks.shape[:3], num_blocks + 1, dtype=torch.bool, device=index.device)
    is_selected = is_selected.scatter(-1, slot, exists)
    block_of_key = (key_position.clamp(0) // block_size).clamp(max=num_blocks - 1)
    block_of_key = block_of_key[:, :, None].expand(*blocks.shape[:3], -1)  # [B, T, HI, S]
    in_block = is_selected.gather(-1, block_of_key)
    if causal:
        in_block = in_block & (key_position <= position)[:, :, None]
    visible = own[:, :, None] & (in_block | in_window(key_position, position, left, right)[:, :, None])
    factor = None
    if factors is not None:
        table = torch.ones(is_selected.shape, dtype=factors.dtype, device=index.device)
        factor = table.scatter(-1, slot, factors.where(exists, 1)).gather(-1, block_of_key).transpose(1, 2)
    return visible.transpose(1, 2), factor


def _counts(blocks: Tensor, last_block: int) -> Tensor:
    """Return whether an entry of a row `[..., n]` names an existing block and does not repeat an earlier entry."""
    entry = torch.arange(blocks.shape[-1], device=blocks.device)
    repeats = (blocks[..., :, None] == blocks[..., None, :]) & (entry < entry[:, None])
    return (blocks >= 0) & (blocks <= last_block) & ~repeats.any(-1)


def _table(tensor: Tensor) -> Tensor:
    """Return `[B, S, H, D]` as rows `[B * S * H + 1, D]`; the last row is 0 and stands for keys that are not read."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return torch.cat((rows, rows.new_zeros(1, rows.shape[-1])))
