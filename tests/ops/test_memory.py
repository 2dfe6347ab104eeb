"""No op builds a tensor of queries times keys, where a query reads few keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from native_sparse_attention.ops import chosen_scores, compressed_attention, selected_attention, window_attention
from native_sparse_attention.testing import make_block_indices, make_qkv

SEQLEN, BLOCK = 4096, 8


class LargestTensor(TorchDispatchMode):
    """Record the bytes of the largest storage that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@contextmanager
def saved_bytes() -> Iterator[dict[int, int]]:
    """Return the bytes of storages that are saved for the backward pass, by address."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


@cache
def make_blocks(index_heads: int) -> Tensor:
    return make_block_indices('valid', 1, SEQLEN, index_heads, 4, seqlen_k=SEQLEN, block_size=BLOCK)


def selected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return selected_attention(q, k, v, make_blocks(1), block_size=BLOCK)[0]


def selected_per_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return selected_attention(q, k, v, make_blocks(2), block_size=BLOCK)[0]


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return window_attention(q, k, v, window_size=(63, 0))[0]


def scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # As many compressed blocks as tokens, so that all of their scores would be as large as a T x S matrix.
    sizes: dict[str, Any] = {'compress_block_size': 1, 'compress_stride': 1, 'selection_block_size': BLOCK}
    lse = torch.full((1, q.shape[2], SEQLEN), 9.0)
    return chosen_scores(q, k, lse, make_blocks(1), **sizes) + 0 * v.sum()


@pytest.mark.parametrize('op', [selected, selected_per_head, window, scores])
def test_memory_holds_no_queries_times_keys(op: Callable[..., Tensor]) -> None:
    q, k, v = (t.requires_grad_() for t in make_qkv(1, SEQLEN, SEQLEN, heads=2, kv_heads=1, head_dim=4))
    op(q, k, v)  # selects the blocks, which takes a tensor of queries times blocks
    with LargestTensor() as largest, saved_bytes() as kept:
        op(q, k, v).sum().backward()
    # A mask of bools for every query and key would already be too large.
    assert largest.bytes < SEQLEN * SEQLEN
    assert sum(kept.values()) < 4 * SEQLEN * SEQLEN


def test_memory_of_the_compressed_branch_is_bounded_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    # Queries times blocks, as all blocks are read: chunk by chunk, and recomputed in the backward pass.
    monkeypatch.setattr('native_sparse_attention.ops._eager.CHUNK_ELEMENTS', 2**18)
    q, k, v = (t.requires_grad_() for t in make_qkv(1, SEQLEN, SEQLEN // 4, heads=2, kv_heads=1, head_dim=4))
    with LargestTensor() as largest, saved_bytes() as kept:
        compressed_attention(q, k, v, block_size=4, stride=4)[0].sum().backward()
    assert largest.bytes <= 4 * 2**18
    assert sum(kept.values()) < SEQLEN * SEQLEN
