"""Decoding kernels on a GPU with caches of more than 2^31 elements.

python -m pytest -m gpu -n 2 tests/gpu/test_decoding_sizes.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention.core.geometry import num_compressed_blocks
from native_sparse_attention.inference.cache import LayerCache
from native_sparse_attention.inference.paged_cache import PagedLayerCache
from tests.gpu.test_decoding import MIXED, harness, shared_gpu  # noqa: F401 - a fixture
from tests.support.gpu_decoding_problems import Decoder, fill, set_lengths

pytestmark = pytest.mark.gpu

# Elements that int32 cannot count.
FAR = 2**31


@pytest.mark.parametrize('where', ['rows', 'pages', 'strides'])
def test_far_apart(where: str, device: torch.device):
    """Rows, pages and tokens of a row more than 2^31 elements behind the first have the bits of a small cache."""
    seqlen = 131_072
    shape = replace(MIXED, lengths=(seqlen - 40,), capacity=seqlen, kv_heads=4, max_rollback=8)
    row = shape.kv_heads * shape.head_dim * seqlen
    options: dict[str, Any] = {'num_splits': 4, 'tiles_of_program': 4}
    decoder = Decoder(shape, device)
    near, batch = decoder.cache(), 1
    if where == 'rows':
        batch = FAR // row + 2
        far = LayerCache(batch, seqlen, dtype=shape.dtype, device=device, max_rollback=8, **shape.layout)
    elif where == 'pages':
        page_size = 1024
        pages, all_pages = seqlen // page_size, FAR // (row // seqlen * page_size) + 200
        far = PagedLayerCache(
            1,
            seqlen,
            page_size=page_size,
            selection_block_size=shape.sizes[2],
            num_pages=all_pages,
            block_table=(all_pages - 1 - torch.arange(pages, device=device)).int()[None],
            dtype=shape.dtype,
            device=device,
            max_rollback=8,
            **shape.layout,
        )
    else:
        far = decoder.cache()
        for name in ('k', 'v', 'k_cmp', 'v_cmp'):
            setattr(far, name, spread(getattr(far, name)))
    assert _last_offset(far.k) > FAR
    lengths = (5,) * (batch - 1) + shape.lengths
    for name, whole in decoder.contents.items():
        if where == 'rows':
            getattr(far, name)[-1:, : whole.shape[1]] = whole
        elif where == 'pages':
            fill(far, name, whole, far.lengths)
    set_lengths(far, lengths)
    for step in range(5):
        tokens = decoder.tokens(step)
        many = {name: t.expand(batch, *t.shape[1:]) for name, t in tokens.items()}
        out = decoder.step(far, many, **options)[-1:]
        assert harness.same_bits(out, decoder.step(near, tokens, **options)), step
    new = slice(shape.lengths[0], shape.lengths[0] + 5)
    blocks = num_compressed_blocks(new.stop, *shape.sizes[:2])
    for name, count in (('k', new.stop), ('v', new.stop), ('k_cmp', blocks), ('v_cmp', blocks)):
        found, expected = (cache._read(name, count)[-1:, -5:] for cache in (far, near))
        assert harness.same_bits(found, expected), name


def spread(tensor: Tensor) -> Tensor:
    """Return the same `[B, S, H, D]` with the last token more than 2^31 elements behind the first."""
    strides = (0, FAR // (tensor.shape[1] - 1) + 16, *tensor.stride()[2:])
    size = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, strides, strict=True))
    buffer = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
    return buffer.as_strided(tensor.shape, strides).copy_(tensor)


def _last_offset(tensor: Tensor) -> int:
    return sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
