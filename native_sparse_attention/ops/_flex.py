"""What the FlexAttention backends share: when they must refuse, which tiles are visited, and the call itself.

A query reads intervals of the key axis. FlexAttention goes through the key axis in tiles, and for a tile of queries it
visits those tiles of keys that an interval of one of its queries touches; inside them the mask function of the op
decides per query and key. The lists of tiles are counted from the intervals, so nothing of size T x S ever exists.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

# Keys of a tile; the queries of a tile are a multiple of it.
TILE = 128
# Of q and k, and of v: smaller ones are padded with zeros; beyond that FlexAttention has no launch settings that fit into shared memory.
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
# Numbers are settings: the kernels have them built in. There is a graph per dtype, head layout, gradient mode and
# setting, and one each for lengths of 1, but dynamo gives up at 8 unless told otherwise.
GRAPH_SETTINGS = {'specialize_int': True, 'specialize_float': True, 'recompile_limit': 1024}


def unsupported(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> str | None:
    """Why FlexAttention cannot serve a call, or None where it can.

    others: what else of the call may require a gradient.
    """
    compiling = torch.compiler.is_compiling()
    if q.device.type not in ('cpu', 'cuda'):
        return f'the tensors are on {q.device.type}, but it is tried on cpu and cuda alone'
    if 0 in q.shape or v.shape[-1] == 0:
        return f'q has shape {tuple(q.shape)} and v has head size {v.shape[-1]}, but it has no kernel for empty tensors'
    if not compiling and not torch._dynamo.is_dynamo_supported():
        return 'torch.compile does not support this version of Python'
    if q.device.type == 'cpu':
        needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, *others))
        if needs_grad:
            return 'an input requires a gradient, but it has no backward pass on CPUs'
        return 'torch.compile builds no FlexAttention with log-sum-exp for CPUs' if compiling else None
    return _unsupported_on_gpu(q, v)


def _unsupported_on_gpu(q: Tensor, v: Tensor) -> str | None:
    if importlib.util.find_spec('triton') is None:
        return 'triton is not installed'
    if q.dtype == torch.float64:
        return 'q has dtype torch.float64, but its kernels compute in float32'
    head_dim = max(q.shape[-1], v.shape[-1])
    if head_dim > MAX_HEAD_DIM:
        return f'the head size is {head_dim}, but its kernels fit head sizes up to {MAX_HEAD_DIM}'
    return None


class Tiles(NamedTuple):
    """The tiles that are visited, as FlexAttention lists them: int32 counts `[B, H, tiles]` and indices `[B, H, tiles,
    tiles]`, for every tile of queries those of keys, for every tile of keys those of queries. Full tiles, which every
    query of the tile reads whole, are listed apart and need no mask; None where an op does not look for them.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor | None
    full_q_indices: Tensor | None


def rows_of_tile(rows_per_token: int) -> int:
    """Rows of a tile of queries where a token has several: it holds whole tokens."""
    return math.lcm(rows_per_token, TILE)


def find_tiles(first: Tensor, last: Tensor, seqlen_k: int, rows_per_token: int = 1) -> Tiles:
    """The tiles to visit where the query at token t reads the keys [first, last) of E intervals.

    first, last: int64 `[B, T, H, E]`, 0 <= first <= last <= seqlen_k. With one interval, full tiles are listed apart.
    """
    batch, seqlen, heads, intervals = first.shape
    tokens = rows_of_tile(rows_per_token) // rows_per_token
    # At least two, so that short and long sequences share a compiled graph.
    num_q, num_k = (max(2, -(-length // tile)) for length, tile in ((seqlen, tokens), (seqlen_k, TILE)))
    token = torch.arange(seqlen, device=first.device)
    head = torch.arange(batch * heads, device=first.device).view(batch, 1, heads, 1)
    row = head * num_q + (token // tokens)[:, None, None]
    tile_first = first // TILE
    tile_last = torch.where(first < last, (last + (TILE - 1)) // TILE, tile_first)
    visited = _covered(row, tile_first, tile_last, batch * heads * num_q, num_k).view(batch, heads, num_q, num_k)
    if intervals != 1:
        return _list_tiles(visited, None)
    padding = (0, 0, 0, num_q * tokens - seqlen)
    latest_first = F.pad(first[..., 0], padding, value=seqlen_k).unflatten(1, (num_q, tokens)).amax(2)
    earliest_last = F.pad(last[..., 0], padding).unflatten(1, (num_q, tokens)).amin(2)
    # [B, H, query tiles, key tiles]
    latest_first, earliest_last = (t.transpose(1, 2)[..., None] for t in (latest_first, earliest_last))
    edge = torch.arange(num_k, device=first.device) * TILE
    full = (latest_first <= edge) & (edge + TILE <= earliest_last)
    return _list_tiles(visited & ~full, full)


def zero_unread(tensor: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """`[B, S, H, D]` with the keys that no query reads set to 0, whatever they hold: 0 * NaN is NaN.

    first, last: `[B, T, HI, E]` as in `find_tiles`, with HI 1, H or a multiple of H.
    """
    batch, seqlen, kv_heads = tensor.shape[:3]
    index_heads = first.shape[2]
    head = torch.arange(batch * index_heads, device=tensor.device).view(batch, 1, index_heads, 1)
    read = _covered(head, first, last, batch * index_heads, seqlen).view(batch, index_heads, seqlen)
    if index_heads > kv_heads:
        read = read.unflatten(1, (kv_heads, -1)).any(2)
    return torch.where(read.transpose(1, 2)[..., None], tensor, 0)


def heads_first(tensor: Tensor) -> Tensor:
    """`[B, S, H, D]` as `[B, H, S, D]`, in one memory layout whatever came in, so that views do not compile anew."""
    return tensor.contiguous().transpose(1, 2)


def with_a_key(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v, with a key that nobody reads where there is none: FlexAttention wants at least one."""
    return (k, v) if k.shape[1] else (F.pad(k, (0, 0, 0, 0, 0, 1)), F.pad(v, (0, 0, 0, 0, 0, 1)))


def run(function: Callable[..., tuple[Tensor, Tensor]], q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """function(q, *arguments), which calls `attend`: compiled on GPUs, and on CPUs as FlexAttention runs without."""
    # Autocast must not turn float32 tensors into half ones.
    with torch.autocast(q.device.type, enabled=False):
        if torch.compiler.is_compiling():
            return function(q, *arguments)
        if q.device.type == 'cpu':
            with warnings.catch_warnings():
                warnings.filterwarnings('ignore', 'flex_attention called without torch.compile', UserWarning)
                return function(q.detach(), *arguments)
        with torch._dynamo.config.patch(GRAPH_SETTINGS):
            return _compiled(function)(q, *arguments)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tiles,
    mask_mod: Callable[..., Tensor],
    scale: float,
    score_mod: Callable[..., Tensor] | None = None,
    rows: int = TILE,
) -> tuple[Tensor, Tensor]:
    """FlexAttention over q `[B, HQ, T, D]`, k `[B, H, S, D]`, v `[B, H, S, DV]`: the output and its log-sum-exp.

    rows: of a tile of queries.
    """
    block_mask = BlockMask(
        seq_lengths=(q.shape[2], k.shape[2]),
        BLOCK_SIZE=(rows, TILE),
        mask_mod=mask_mod,
        **tiles._asdict(),
    )
    value_dim = v.shape[3]
    if q.is_cuda:
        q, k, v = (F.pad(t, (0, max(0, MIN_HEAD_DIM - t.shape[3]))) for t in (q, k, v))
    # The kernel for short queries is built for one length and for some group sizes: the general one serves all.
    out, aux = flex_attention(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
        kernel_options={'BACKEND': 'TRITON'},
    )
    return out[..., :value_dim], aux.lse


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True)


def _covered(row: Tensor, first: Tensor, last: Tensor, num_rows: int, length: int) -> Tensor:
    """bool `[num_rows, length]`: the places that the intervals [first, last) of each row cover.

    row, first, last: int64 that broadcast against one another. Counts where intervals begin and end, and adds up.
    """
    change = torch.zeros(num_rows * (length + 1), dtype=torch.int32, device=first.device)
    one = torch.ones((), dtype=torch.int32, device=first.device)
    for place, step in ((first, one), (last, -one)):
        index = (row * (length + 1) + place).flatten()
        change.scatter_add_(0, index, step.expand_as(index))
    return change.view(num_rows, length + 1)[:, :length].cumsum(1, dtype=torch.int32) > 0


def _list_tiles(partial: Tensor, full: Tensor | None) -> Tiles:
    """The lists of bool `[B, H, query tiles, key tiles]`."""
    nothing = (None, None)
    return Tiles(
        *_true_columns(partial),
        *(nothing if full is None else _true_columns(full)),
        *_true_columns(partial.transpose(2, 3)),
        *(nothing if full is None else _true_columns(full.transpose(2, 3))),
    )


def _true_columns(table: Tensor) -> tuple[Tensor, Tensor]:
    """How many columns of each row are True, and all columns with those in front, ascending."""
    indices = table.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return table.sum(-1, dtype=torch.int32), indices.to(torch.int32).contiguous()
