"""Decoding by dense attention of PyTorch and by public implementations of NSA that have a whole step."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.decode_steps import Row, Step, judge_rows
from benchmarks.peers import Peer, adapt, dense_attention, import_from, stand_in_for_pkg_resources
from benchmarks.shapes import Shape
from native_sparse_attention.core.geometry import num_compressed_blocks

# Tokens of a page of mdy666; capacities are multiples of it.
PAGE_SIZE = 128


def make_dense(shape: Shape, device: str, backend: str) -> Step:
    """Return a step by cuDNN or FlashAttention-2. The heads of a group are queries of one head: keys are read once."""
    q, k, v = (
        torch.randn(shape.batch, shape.kv_heads, tokens, dim, dtype=shape.dtype, device=device)
        for tokens, dim in (
            (shape.heads // shape.kv_heads, shape.head_dim),
            (shape.seqlen, shape.head_dim),
            (shape.seqlen, shape.value_dim),
        )
    )
    return Step(partial(dense_attention(backend, device), q, k, v))


def mdy666(shape: Shape, device: str, folder: Path) -> Step:
    """Adapter for fcf117c: `nsa_decode(q, k, v, w, context_lens, block_tables, cmp_slot_mapping, …)`.

    q `[B, HQ, D]`, k and v `[pages, PAGE_SIZE, H, ·]`, which hold tokens and compressed pairs, w logits `[B, HQ, 3]`,
    the slot of the compressed pair that the token completes. Its window reads one key more than its size.
    """
    stand_in_for_pkg_resources()
    nsa_decode = import_from(folder, 'flash_nsa.inference').nsa_decode
    sizes = (shape.compress_block_size, shape.compress_stride)
    compressed = num_compressed_blocks(shape.seqlen, *sizes)
    pages, pages_cmp = (-(-count // PAGE_SIZE) for count in (shape.seqlen, compressed))

    def random(*size: int) -> Tensor:
        return torch.randn(size, dtype=shape.dtype, device=device)

    def table(first: int, columns: int) -> Tensor:
        numbers = torch.arange(shape.batch * columns, dtype=torch.int32, device=device)
        return (first + numbers).view(shape.batch, columns)

    tokens, pairs = table(0, pages), table(shape.batch * pages, pages_cmp)
    k, v = (
        random(shape.batch * (pages + pages_cmp), PAGE_SIZE, shape.kv_heads, dim)
        for dim in (shape.head_dim, shape.value_dim)
    )
    q, logits = random(shape.batch, shape.heads, shape.head_dim), random(shape.batch, shape.heads, 3)
    run = partial(
        nsa_decode,
        *(q, k, v, logits),
        context_lens=torch.full((shape.batch,), shape.seqlen, dtype=torch.int32, device=device),
        block_tables=tokens,
        cmp_slot_mapping=pairs[:, (compressed - 1) // PAGE_SIZE] * PAGE_SIZE + (compressed - 1) % PAGE_SIZE,
        cmp_block_tables=pairs,
        fixed_y_maxlen=compressed,
        fixed_num_slc_blocks=-(-shape.seqlen // shape.selection_block_size),
        kernel_size=shape.compress_block_size,
        stride=shape.compress_stride,
        block_size=shape.selection_block_size,
        top_n=shape.num_selected,
        window_size=shape.window,
    )

    def row(index: int) -> Row:
        of_row = [
            pool[table[index].long()].flatten(0, 1)[:count]
            for table, count in ((tokens, shape.seqlen), (pairs, compressed))
            for pool in (k, v)
        ]
        return Row(q[index], q[index], *of_row, gates=logits[index].float().sigmoid(), window=shape.window + 1)

    return Step(run, judge=partial(judge_rows, shape, row))


# less: what a peer leaves to its caller.
DECODERS = {
    'mdy666': Peer(
        'mdy666/Scalable-Flash-Native-Sparse-Attention',
        'fcf117c',
        'flash_nsa/inference/__init__.py',
        mdy666,
        less="rotary and the write of the token's own key and value",
    )
}


def make_peer(name: str, shape: Shape, device: str) -> Step:
    return adapt(DECODERS[name], shape, device)
