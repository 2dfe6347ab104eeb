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

from native_sparse_attention.core import private
from native_sparse_attention.core.modifiers import OFF, Modifiers

# As in decoding: launches cost more there than the attention, and every new setting compiles for seconds.
FEW_QUERIES = 16
# Keys of a tile; the queries of a tile are a multiple of it.
TILE = 128
# Smaller head sizes Triton cannot multiply, so they are padded; for larger ones FlexAttention has no launch settings
# that fit into shared memory.
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
# The mask of selected attention compares with every chosen block in turn; with more of them it compiles for minutes.
MAX_SELECTED = 64
# Numbers are settings: the kernels have them built in. There is a graph per dtype, head layout, gradient mode and
# setting, and one each for lengths of 1, but dynamo gives up at 8 unless told otherwise.
GRAPH_SETTINGS = {'specialize_int': True, 'specialize_float': True, 'recompile_limit': 1024}


def passed_over(backend: str, q: Tensor, k: Tensor, v: Tensor, *others: Tensor, **settings: Any) -> str | None:
    """Why a call on `backend` does not take FlexAttention: it cannot serve, or with 'auto' is slower than eager."""
    if backend == 'auto' and q.shape[1] <= FEW_QUERIES:
        return f'q has {q.shape[1]} queries per row, and for up to {FEW_QUERIES} eager is faster'
    return unsupported(q, k, v, *others, **settings)


def unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *others: Tensor,
    factors: Tensor | None = None,
    num_selected: int = 0,
    modifiers: Modifiers = OFF,
) -> str | None:
    """Why FlexAttention cannot serve a call, or None where it can.

    others: what else may require a gradient. factors: of the logits of chosen blocks; num_selected: how many there are.
    """
    if modifiers.sinks is not None:
        return 'sinks is given, but its softmax is over keys alone'
    if modifiers.dropout_p:
        return f'dropout_p is {modifiers.dropout_p}, but it does not drop weights'
    bias = modifiers.bias
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        return 'bias requires a gradient, but it would add that up in any order and in the dtype of bias'
    compiling = torch.compiler.is_compiling()
    if q.device.type not in ('cpu', 'cuda'):
        return f'the tensors are on {q.device.type}, but it is tried on cpu and cuda alone'
    if 0 in q.shape or v.shape[-1] == 0:
        return f'q has shape {tuple(q.shape)} and v has head size {v.shape[-1]}, but it has no kernel for empty tensors'
    if not compiling and not _is_compile_supported():
        return 'torch.compile does not support this version of Python'
    needs_grad = [t is not None and t.requires_grad and torch.is_grad_enabled() for t in (factors, q, k, v, *others)]
    if q.device.type == 'cpu':
        if any(needs_grad):
            return 'an input requires a gradient, but it has no backward pass on CPUs'
        return 'torch.compile builds no FlexAttention with log-sum-exp for CPUs' if compiling else None
    if not compiling and importlib.util.find_spec('triton') is None:
        return 'triton is not installed'
    if q.dtype == torch.float64:
        return 'q has dtype torch.float64, but its kernels compute in float32'
    head_dim = max(q.shape[-1], v.shape[-1])
    if head_dim > MAX_HEAD_DIM:
        return f'the head size is {head_dim}, but its kernels fit head sizes up to {MAX_HEAD_DIM}'
    if num_selected > MAX_SELECTED:
        return f'{num_selected} blocks are chosen, but its mask compares with at most {MAX_SELECTED}'
    if needs_grad[0] and torch.are_deterministic_algorithms_enabled():
        return 'deterministic algorithms are asked for, but it adds up the gradient of block_scale in any order'
    return None


class Tiles(NamedTuple):
    """The tiles that are visited, as FlexAttention lists them: int32 counts `[B, H, tiles]` and indices `[B, H, tiles,
    tiles]`, for every tile of queries those of keys, and for the backward pass also the other way round. Full tiles,
    which every query of the tile reads whole, are listed apart and need no mask; None where an op does not look for
    them.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    q_num_blocks: Tensor | None
    q_indices: Tensor | None
    full_q_num_blocks: Tensor | None
    full_q_indices: Tensor | None


def rows_of_tile(rows_per_token: int) -> int:
    """Rows of a tile of queries where a token has several: it holds whole tokens."""
    return math.lcm(rows_per_token, TILE)


def find_tiles(first: Tensor, last: Tensor, seqlen_k: int, rows_per_token: int = 1, all_are_read: bool = True) -> Tiles:
    """The tiles to visit where the query at token t reads the keys [first, last) of E intervals.

    first, last: int64 `[B, T, H, E]`, 0 <= first <= last <= seqlen_k. With one interval, full tiles are listed apart,
    unless a query may read some of an interval's keys alone (all_are_read=False).
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
    if intervals != 1 or not all_are_read:
        return _list_tiles(visited, None)
    padding = (0, 0, 0, num_q * tokens - seqlen)
    # [B, query tiles, tokens of a tile, H]; tokens beyond the last one read nothing.
    first, last = (F.pad(t[..., 0], padding).unflatten(1, (num_q, tokens)) for t in (first, last))
    # [B, H, query tiles, 1]
    latest_first, earliest_last = (t.transpose(1, 2)[..., None] for t in (first.amax(2), last.amin(2)))
    edge = torch.arange(num_k, device=first.device) * TILE
    full = (latest_first <= edge) & (edge + TILE <= earliest_last)
    return _list_tiles(visited & ~full, full)


def without_nonfinite(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys `[B, S, H, D]` and values `[B, S, H, DV]`, 0 where one is not finite, and bool `[B, S, H]`: where that is.

    What a query of a tile does not read must not reach it, not even as 0 * NaN; what it reads is put back by
    `nonfinite_rows`."""
    finite = k.isfinite().all(-1) & v.isfinite().all(-1)
    return torch.where(finite[..., None], k, 0), torch.where(finite[..., None], v, 0), ~finite


def nonfinite_rows(out: Tensor, lse: Tensor, nonfinite: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """NaN in the rows that read a key or value that is not finite.

    out: `[B, T, HQ, DV]`, lse: `[B, HQ, T]`, nonfinite: `[B, S, H]`, first and last as in `find_tiles` with heads that
    are 1 or a multiple of H.
    """
    batch, _, kv_heads = nonfinite.shape
    heads = max(kv_heads, first.shape[2])
    before = F.pad(nonfinite.cumsum(1, dtype=torch.int32), (0, 0, 1, 0))
    row = torch.arange(batch, device=out.device)[:, None, None, None]
    head = (torch.arange(heads, device=out.device) // (heads // kv_heads))[:, None]
    tainted = (before[row, last, head] > before[row, first, head]).any(-1)
    tainted = tainted.repeat_interleave(out.shape[2] // heads, 2)
    return out.masked_fill(tainted[..., None], torch.nan), lse.masked_fill(tainted.transpose(1, 2), torch.nan)


def capped(softcap: float | None) -> Callable[..., Tensor] | None:
    """The score function of a soft cap."""
    if softcap is None:
        return None
    return lambda score, b, h, t, s: softcap * torch.tanh(score / softcap)


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
        with _graphs().patch(GRAPH_SETTINGS):
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
    pipelined: bool = True,
) -> tuple[Tensor, Tensor]:
    """FlexAttention over q `[B, HQ, T, D]`, k `[B, H, S, D]`, v `[B, H, S, DV]`: the output and its log-sum-exp.

    rows: of a tile of queries. pipelined: False where the modifiers load so much that several stages of it do not fit
    into shared memory.
    """
    block_mask = BlockMask(
        seq_lengths=(q.shape[2], k.shape[2]),
        BLOCK_SIZE=(rows, TILE),
        mask_mod=mask_mod,
        **tiles._asdict(),
    )
    value_dim = v.shape[3]
    if q.is_cuda:
        q, k, v = _pad_heads(q, k, v)
    # The kernel for short queries is built for one length and for some group sizes: the general one serves all.
    options: Any = {'BACKEND': 'TRITON'} if pipelined else {'BACKEND': 'TRITON', 'num_stages': 1}
    out, aux = flex_attention(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
        kernel_options=options,
    )
    assert aux.lse is not None
    return out[..., :value_dim], aux.lse


def _pad_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Head sizes as powers of two, that of q and k not below that of v, which add no work but zeros.

    The kernels compute with powers of two anyway, and their launch settings, made for the head size of q and k, fit
    into shared memory for such sizes.
    """
    value_dim = _power_of_two(max(MIN_HEAD_DIM, v.shape[3]))
    head_dim = max(_power_of_two(q.shape[3]), value_dim)
    sizes = (head_dim, head_dim, value_dim)
    q, k, v = (
        t if t.shape[3] == size else F.pad(t, (0, size - t.shape[3])) for t, size in zip((q, k, v), sizes, strict=True)
    )
    return q, k, v


def _power_of_two(size: int) -> int:
    """The smallest power of two that is no less than size."""
    return 1 << (size - 1).bit_length()


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=_graphs().are_unlimited, fullgraph=_graphs().are_unlimited)


@cache
def _graphs() -> private.Graphs:
    return private.find_graphs(GRAPH_SETTINGS)


@cache
def _is_compile_supported() -> bool:
    try:
        torch.compile(lambda: None)  # compiles nothing before it is called
    except RuntimeError:
        return False
    return True


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
    """The lists of bool `[B, H, query tiles, key tiles]`; those of the backward pass where there is one."""
    tables = torch.stack((partial,) if full is None else (partial, full))
    by_key = _list_columns(tables.transpose(3, 4)) if torch.is_grad_enabled() else (None, None, None, None)
    return Tiles(*_list_columns(tables), *by_key)


def _list_columns(tables: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Of one or two tables `[1 or 2, B, H, rows, columns]` how many columns of a row are True, and the columns with
    those in front, ascending.
    """
    counts = tables.sum(-1, dtype=torch.int32)
    indices = tables.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32).contiguous()
    return (counts[0], indices[0], counts[1], indices[1]) if len(tables) == 2 else (counts[0], indices[0], None, None)
