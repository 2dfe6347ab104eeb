"""The definition of the layer: sequence by sequence and token by token, around the definition of `nsa`."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.rotary import Rotary
from tests.definition.definition import nsa


def compress(tokens: Tensor, positions: Tensor, network: Callable[[Tensor], Tensor], stride: int) -> Tensor:
    """Equation 7 for one sequence: tokens `[S, H, D]`, learned positions `[H, l, D]` -> `[C, H, D]`.

    network: one block of all heads `[H, l, D]` -> `[H, D]`.
    """
    num_tokens, block_size = tokens.shape[0], positions.shape[1]
    blocks, rows = [], tokens.unbind()
    for start in range(0, num_tokens, stride):
        if start + block_size <= num_tokens:
            block = torch.stack([rows[start + i] + positions[:, i] for i in range(block_size)], 1)
            blocks.append(network(block))
    return torch.stack(blocks) if blocks else tokens.new_zeros(0, *tokens.shape[1:])


def layer(attn: SparseAttention, x: Tensor, mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """Compute `SparseAttention` in float64, sequence by sequence; tokens of no sequence give 0."""
    sequences = []
    if cu_seqlens is not None:
        for start, stop in itertools.pairwise(cu_seqlens.tolist()):
            sequences.append((0, list(range(start, stop))))
    else:
        for batch in range(x.shape[0]):
            sequences.append((batch, [t for t in range(x.shape[1]) if mask is None or bool(mask[batch, t])]))
    out = torch.zeros_like(x)
    for batch, tokens in sequences:
        if tokens:
            out[batch, tokens] = layer_of_one_sequence(attn, x[batch, tokens])
    return out


def layer_of_one_sequence(attn: SparseAttention, x: Tensor) -> Tensor:
    """`[T, dim]` -> `[T, dim]`."""
    if isinstance(attn.norm, nn.RMSNorm):
        eps = torch.finfo(x.dtype).eps if attn.norm.eps is None else attn.norm.eps
        x = torch.stack([token / (token.square().mean() + eps).sqrt() * attn.norm.weight for token in x])

    heads, kv_heads, head_dim, value_dim = attn.heads, attn.kv_heads, attn.dim_head, attn.dim_value_head
    num_branches = 3 if attn.independent_branch_kv else 1
    widths = [(heads, head_dim)] + [(kv_heads, head_dim), (kv_heads, value_dim)] * num_branches
    projected = (x @ attn.to_qkv.weight.T).split([count * width for count, width in widths], -1)
    q_cmp, *pairs = (features.unflatten(-1, shape) for features, shape in zip(projected, widths, strict=True))
    q_cmp = normalise(q_cmp, attn.q_norm)
    pairs[::2] = [normalise(keys, attn.k_norm) for keys in pairs[::2]]
    # Pairs of compressed, selected and window branch; shared ones stand for all three.
    k_raw, v_raw, k, v, k_window, v_window = pairs * (3 // num_branches)
    q, k, k_window = (rotate(features, attn.rotary) for features in (q_cmp, k, k_window))

    stride = attn.compress_block_sliding_stride
    k_cmp = compress(k_raw, attn.k_intrablock_positions, on_one_block(attn.k_compress), stride)
    v_cmp = compress(v_raw, attn.v_intrablock_positions, on_one_block(attn.v_compress), stride)
    logits = attn.to_strategy_combine(x[None])[0]
    gates = torch.stack([torch.sigmoid(logits[:, 3 * head : 3 * head + 3]) for head in range(heads)], 1)

    mem_kv = None
    if attn.compress_mem_k is not None and attn.compress_mem_v is not None:
        mem_kv = (attn.compress_mem_k, attn.compress_mem_v)
    window = attn.sliding_window_size
    out = nsa(
        *(tensor[None] for tensor in (q, k, v, k_cmp, v_cmp, gates)),
        q_cmp=q_cmp[None],
        k_window=k_window[None],
        v_window=v_window[None],
        mem_kv=mem_kv,
        compress_block_size=attn.compress_block_size,
        compress_stride=stride,
        selection_block_size=attn.selection_block_size,
        num_selected=attn.num_selected_blocks,
        window_size=(window - 1, 0 if attn.causal else window - 1),
        num_init=attn.num_init_blocks,
        num_local=attn.num_local_blocks,
        share_group=attn.query_heads_share_selected_kv,
        use_diff_topk=attn.use_diff_topk,
        causal=attn.causal,
        softcap=attn.softcap,
        sinks=attn.window_sinks,
        sinks_cmp=attn.compress_sinks,
    )
    return out[0].flatten(-2) @ attn.combine_heads.weight.T


def normalise(x: Tensor, norm: nn.RMSNorm | None) -> Tensor:
    """Divide the features of each head of `[T, H, D]` by their root mean square, and scale them."""
    if norm is None:
        return x
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight


def rotate(x: Tensor, rotary: Rotary | None) -> Tensor:
    """Rotate the feature pairs (2i, 2i + 1) of `[T, H, D]` by position times frequency i, an angle in float32."""
    if rotary is None:
        return x
    result = []
    freqs = rotary(x.device)
    for position, row in enumerate(x.unbind()):
        angles = torch.tensor(position, dtype=torch.float32) / rotary.interpolate_factor * freqs
        cos, sin = angles.cos().double(), angles.sin().double()
        features = list(row.unbind(1))
        for i in range(len(freqs)):
            even, odd = features[2 * i : 2 * i + 2]
            features[2 * i : 2 * i + 2] = even * cos[i] - odd * sin[i], odd * cos[i] + even * sin[i]
        result.append(torch.stack(features, 1))
    return torch.stack(result)


def on_one_block(network: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda block: network(block[None, :, None])[0, :, 0]
