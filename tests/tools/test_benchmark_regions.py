"""The parts of `benchmarks.regions`, in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip('triton')

from benchmarks import regions
from benchmarks.shapes import SHAPES

TINY = replace(SHAPES['tiny'], seqlen=40, compress_block_size=4, compress_stride=2, selection_block_size=4)


def test_regions_are_the_first_the_newest_and_others() -> None:
    drawn = regions.make_regions(TINY, 'cpu', size=2, count=4).indices
    assert drawn.shape == (1, 40, 2, 4)
    for position, rows in enumerate(drawn[0].tolist()):
        num_visible = -(-max(0, (position + 1 - 4) // 2 + 1) // 2)
        for row in rows:
            found = [region for region in row if region >= 0]
            assert row == sorted(found) + [-1] * (4 - len(found))
            assert len(set(found)) == len(found) == min(4, num_visible)
            assert {0, num_visible - 1, num_visible - 2} & set(range(num_visible)) <= set(found)


@pytest.mark.parametrize('part', [*regions.WHOLE, *regions.IN_REGIONS])
def test_parts(part: str) -> None:
    call, leaves = regions.make_part(part, replace(TINY, seqlen=12), 'cpu')
    out = call()
    assert out.requires_grad == bool(leaves)
    if leaves:
        grads = torch.autograd.grad(out.sum(), leaves)
        assert all(grad.isfinite().all() for grad in grads)


def test_parts_of_every_region_are_the_whole() -> None:
    shape = replace(TINY, seqlen=12)
    selected, found = (regions.make_part(part, shape, 'cpu')[0]() for part in ('selection', 'selection in regions'))
    assert torch.equal(selected, found)
    scores, found = (regions.make_part(part, shape, 'cpu')[0]() for part in ('scores', 'scores in regions'))
    assert torch.equal(scores, found)


def test_table() -> None:
    rows = [{'op': part, 'shape': 'long-64k-q32', 'forward_ms': 2.5} for part in regions.IN_REGIONS]
    text, table, shapes = regions.make_tables(rows)
    assert text.startswith('ms; 16 regions of 64')
    assert '| long-64k-q32 | forward | – | – | – | 2.5 | 2.5 |' in table
    assert '65,536 tokens' in shapes
