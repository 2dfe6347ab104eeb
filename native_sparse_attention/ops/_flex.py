"""Shared parts of the FlexAttention backends: unsupported calls, visited tiles, and the call itself.

A query reads intervals of the key axis. FlexAttention visits, for a query tile, the key tiles that an interval of one
of its queries touches; inside them the op's mask function decides per query and key. The tile lists are counted from
the intervals, so no tensor of size T x S exists.
"""

from __future__ import annotations

import importlib.util
import operator
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from native_sparse_attention.core import private
from native_sparse_attention.core.autocast import without_autocast
from native_sparse_attention.core.modifiers import OFF, Modifiers

# With few queries, as in decoding, launches cost more than the attention, and a new setting compiles for seconds.
FEW_QUERIES = 16
# Keys per tile; the rows of a query tile are a multiple of it.
TILE = 128
# Triton cannot multiply smaller head sizes, so they are padded; for larger ones no launch settings of FlexAttention fit
# shared memory.
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
# The mask of selected attention compares with every selected block in turn; with more of them it compiles for minutes.
MAX_SELECTED = 64
# Numbers are compile-time constants. There is a graph per dtype, head layout, gradient mode and setting, and one for
# each length of 1, but dynamo stops at 8 graphs by default.
GRAPH_SETTINGS = {'specialize_int': True, 'specialize_float': True, 'recompile_limit': 1024}


def passed_over(backend: str, q: Tensor, k: Tensor, v: Tensor, *others: Tensor, **settings: Any) -> str | None:
    """Return why a call on `backend` does not use FlexAttention: it is unsupported, or with 'auto'
    slower than eager.
    """
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
    """Return the reason why FlexAttention does not support a call, or None.

    others: further tensors that may require gradients. factors: `block_scale`; num_selected: selected blocks per query.
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
        return f'{num_selected} blocks are selected, but its mask compares with at most {MAX_SELECTED}'
    if needs_grad[0] and torch.are_deterministic_algorithms_enabled():
        return 'deterministic algorithms are requested, but it adds up the gradient of block_scale in any order'
    return None


class Tiles(NamedTuple):
    """Visited tiles in FlexAttention's format: int32 counts `[B, H, tiles]` and indices `[B, H, tiles, tiles]`, key
    tiles by query tile, and for the backward pass query tiles by key tile. Full tiles, which every query of the tile
    reads whole, are listed separately and need no mask; None if an op does not look for them.
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
    """Return the rows of a query tile with several rows per token; it holds whole tokens."""
    # The least common multiple, in arithmetic that torch.compile follows where rows_per_token is symbolic.
    common = 1
    while common < TILE and rows_per_token % (2 * common) == 0:
        common *= 2
    return TILE // common * rows_per_token


def find_tiles(first: Tensor, last: Tensor, seqlen_k: int, rows_per_token: int = 1, all_are_read: bool = True) -> Tiles:
    """Return the tiles to visit if the query at token t reads the keys [first, last) of E intervals.

    first, last: int64 `[B, T, H, E]`, 0 <= first <= last <= seqlen_k. With one interval, full tiles are listed
    separately, unless a query may read only some keys of an interval (all_are_read=False).
    """
    by_key = torch.is_grad_enabled()
    full = first.shape[3] == 1 and all_are_read
    tables = _list_tiles(first, last, seqlen_k, rows_per_token, full, by_key)
    lists = [table if full else (table[0], None) for table in tables]
    (counts, full_counts), (indices, full_indices), *of_keys = lists
    (q_counts, full_q_counts), (q_indices, full_q_indices) = of_keys or ((None, None), (None, None))
    return Tiles(counts, indices, full_counts, full_indices, q_counts, q_indices, full_q_counts, full_q_indices)


def without_nonfinite(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys `[B, S, H, D]` and values `[B, S, H, DV]` with their non-finite elements set to 0, and bool
    `[B, S, H]`: the rows of these elements.

    A key that a query of a tile does not read must not reach it, not even as 0 * NaN; `nonfinite_rows` restores the
    effect on the queries that read it. A gradient of NaN passes; the kernels may spread it to dk
    and dv of other keys of the same tile of 128, also of other packed sequences.
    """
    finite = k.isfinite().all(-1) & v.isfinite().all(-1)
    k, v = (t.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for t in (k, v))
    return k, v, ~finite


def nonfinite_rows(out: Tensor, lse: Tensor, nonfinite: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse with NaN in the rows that read a non-finite key or value.

    out: `[B, T, HQ, DV]`, lse: `[B, HQ, T]`, nonfinite: `[B, S, H]`, first and last as in `find_tiles` with 1 or a
    multiple of H heads.
    """
    batch, _, kv_heads = nonfinite.shape
    heads = max(kv_heads, first.shape[2])
    before = F.pad(nonfinite.cumsum(1, dtype=torch.int32), (0, 0, 1, 0))
    row = torch.arange(batch, device=out.device)[:, None, None, None]
    head = (torch.arange(heads, device=out.device) // (heads // kv_heads))[:, None]
    is_nonfinite = (before[row, last, head] > before[row, first, head]).any(-1)
    return with_nan(out, lse, is_nonfinite.repeat_interleave(out.shape[2] // heads, 2))


def with_nan(out: Tensor, lse: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return out `[B, T, HQ, DV]` and lse `[B, HQ, T]` with NaN in rows (bool `[B, T, HQ]`), and in their gradients."""
    factor = torch.ones(rows.shape, dtype=lse.dtype, device=lse.device).masked_fill(rows, torch.nan)
    return out * factor[..., None].to(out.dtype), lse * factor.transpose(1, 2)


def capped(softcap: float | None) -> Callable[..., Tensor] | None:
    """Return the score function of a soft cap, or None."""
    if softcap is None:
        return None
    return lambda score, b, h, t, s: softcap * torch.tanh(score / softcap)


def heads_first(tensor: Tensor) -> Tensor:
    """Return `[B, S, H, D]` as `[B, H, S, D]`, in one memory layout for all inputs, so that views do not recompile."""
    return tensor.contiguous().transpose(1, 2)


def with_a_key(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v with at least one key, which FlexAttention requires; no query reads the added key."""
    return (k, v) if k.shape[1] else (F.pad(k, (0, 0, 0, 0, 0, 1)), F.pad(v, (0, 0, 0, 0, 0, 1)))


def run(function: Callable[..., tuple[Tensor, Tensor]], q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return function(q, *arguments), which calls `attend`: compiled on GPUs, uncompiled on CPUs."""
    with without_autocast(q):
        if torch.compiler.is_compiling():
            # Inductor of PyTorch 2.11 has no masks that read expressions of symbolic sizes, such as a ratio of heads.
            return function(q, *(operator.index(a) if isinstance(a, int) else a for a in arguments))
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
    """Call FlexAttention on q `[B, HQ, T, D]`, k `[B, H, S, D]`, v `[B, H, S, DV]`. Returns the output and its
    log-sum-exp.

    rows: of a query tile. pipelined: False if the modifiers load so much that several pipeline stages exceed shared
    memory.
    """
    block_mask = BlockMask(
        seq_lengths=(q.shape[2], k.shape[2]), BLOCK_SIZE=(rows, TILE), mask_mod=mask_mod, **tiles._asdict()
    )
    value_dim = v.shape[3]
    if q.is_cuda:
        q, k, v = _pad_heads(q, k, v)
    # The kernel for short queries is specialised to one length and some group sizes; the general one supports all.
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
    """Pad head sizes with zeros to powers of two, that of q and k to at least that of v.

    The kernels compute with powers of two anyway, and their launch settings, chosen by the head size of q and k, fit
    shared memory for such sizes.
    """
    value_dim = _power_of_two(max(MIN_HEAD_DIM, v.shape[3]))
    head_dim = max(_power_of_two(q.shape[3]), value_dim)
    sizes = (head_dim, head_dim, value_dim)
    q, k, v = (
        t if t.shape[3] == size else F.pad(t, (0, size - t.shape[3])) for t, size in zip((q, k, v), sizes, strict=True)
    )
    return q, k, v


def _power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least size."""
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
    """Return bool `[num_rows, length]`: the positions that the intervals [first, last) of each row cover.

    row, first, last: int64, broadcastable. Counts the starts and ends of intervals, and adds them up.
    """
    change = torch.zeros(num_rows * (length + 1), dtype=torch.int32, device=first.device)
    one = torch.ones((), dtype=torch.int32, device=first.device)
    for position, step in ((first, one), (last, -one)):
        index = (row * (length + 1) + position).flatten()
        change.scatter_add_(0, index, step.expand_as(index))
    return change.view(num_rows, length + 1)[:, :length].cumsum(1, dtype=torch.int32) > 0


# An op of its own, because inductor of PyTorch 2.11 to 2.13 fails to compile tables whose sides are symbolic.
@torch.library.custom_op('native_sparse_attention::list_flex_tiles', mutates_args=())
def _list_tiles(
    first: Tensor, last: Tensor, seqlen_k: int, rows_per_token: int, list_full: bool, by_key: bool
) -> list[Tensor]:
    """Return the counts and indices of `find_tiles`, `[1, ...]`, or `[2, ...]` with those of full tiles; by_key: also
    those of the backward pass.
    """
    batch, seqlen, heads, _ = first.shape
    tokens = rows_of_tile(rows_per_token) // rows_per_token
    num_q, num_k = _num_tiles(seqlen, tokens), _num_tiles(seqlen_k, TILE)
    token = torch.arange(seqlen, device=first.device)
    head = torch.arange(batch * heads, device=first.device).view(batch, 1, heads, 1)
    row = head * num_q + (token // tokens)[:, None, None]
    tile_first = first // TILE
    tile_last = torch.where(first < last, (last + (TILE - 1)) // TILE, tile_first)
    visited = _covered(row, tile_first, tile_last, batch * heads * num_q, num_k).view(batch, heads, num_q, num_k)
    tables = visited[None]
    if list_full:
        padding = (0, 0, 0, num_q * tokens - seqlen)
        # [B, query tiles, tokens of a tile, H]; tokens beyond the last one read nothing.
        first, last = (F.pad(t[..., 0], padding).unflatten(1, (num_q, tokens)) for t in (first, last))
        # [B, H, query tiles, 1]
        latest_first, earliest_last = (t.transpose(1, 2)[..., None] for t in (first.amax(2), last.amin(2)))
        edge = torch.arange(num_k, device=first.device) * TILE
        full = (latest_first <= edge) & (edge + TILE <= earliest_last)
        tables = torch.stack((visited & ~full, full))
    return [*_list_columns(tables), *(_list_columns(tables.mT) if by_key else ())]


@_list_tiles.register_fake
def _(first: Tensor, last: Tensor, seqlen_k: int, rows_per_token: int, list_full: bool, by_key: bool) -> list[Tensor]:
    batch, seqlen, heads, _ = first.shape
    num_q = _num_tiles(seqlen, rows_of_tile(rows_per_token) // rows_per_token)
    num_k = _num_tiles(seqlen_k, TILE)
    sides = [(num_q, num_k), (num_k, num_q)] if by_key else [(num_q, num_k)]
    shapes = [(1 + list_full, batch, heads, *side[:end]) for side in sides for end in (1, 2)]
    return [first.new_empty(shape, dtype=torch.int32) for shape in shapes]


def _num_tiles(length: int, tile: int) -> int:
    # At least two tiles, so that short and long sequences share a compiled graph.
    return max(2, -(-length // tile))


def _list_columns(tables: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for tables `[N, B, H, rows, columns]`, the number of True columns per row, and the columns with the True
    ones first, ascending; both int32.
    """
    indices = tables.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return tables.sum(-1, dtype=torch.int32), indices.to(torch.int32).contiguous()
