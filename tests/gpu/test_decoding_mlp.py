"""φ of decoding steps where it is an MLP: by the error rules, at every tile, and without a read of weights where no
block is complete.

python -m pytest -m gpu tests/gpu/test_decoding_mlp.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from native_sparse_attention.nn.compress import CompressMLP, GroupedMLP, MeanResidualMLP
from tests.support.gpu_decoding_problems import Decoder, Shape, assert_obeys_the_rules, draw_shape, state_of

harness = pytest.importorskip('tests.support.harness', reason='triton is not installed')
problems = pytest.importorskip('tests.support.mlp_problems')

pytestmark = pytest.mark.gpu

# Rows beside and on the borders of compressed blocks of 32 tokens that start every 16.
MIXED = Shape(lengths=(0, 31, 63, 1000, 127), capacity=1500)
MLPS = pytest.mark.parametrize('mlp', [CompressMLP, MeanResidualMLP, GroupedMLP])
DTYPES = pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32], ids=str)


@pytest.fixture(autouse=True)
def shared_gpu() -> Iterator[None]:
    """Leave free GPU memory to other test processes."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@DTYPES
@MLPS
def test_rules(mlp: type[nn.Module], dtype: torch.dtype, device: torch.device):
    """Steps that complete blocks of some rows and of none, in workspace filled with NaN."""
    decoder = Decoder(replace(MIXED, mlp=mlp, dtype=dtype, head_dim=64, value_dim=64), device)
    assert decoder.phi(dtype).mlps(decoder.cache()) is not None
    with harness.poisoned_allocations():
        assert_obeys_the_rules(decoder, 20)


@pytest.mark.parametrize('index', range(6))
def test_drawn_problems(index: int, device: torch.device):
    shape = replace(draw_shape(100 + index), learned=False, mlp=(CompressMLP, MeanResidualMLP, GroupedMLP)[index % 3])
    with harness.poisoned_allocations():
        assert_obeys_the_rules(Decoder(shape, device))


# Every tile of a layer: rows that may complete a block, by kind of weights.
ROWS = {CompressMLP: (1, 8, 16, 40, 300), MeanResidualMLP: (3,), GroupedMLP: (1, 33, 200)}
CASES = [(make, rows) for make, counts in ROWS.items() for rows in counts]


@DTYPES
@pytest.mark.parametrize('head_dim', [64, 128])
@pytest.mark.parametrize(('mlp', 'num_rows'), CASES, ids=lambda value: getattr(value, '__name__', str(value)))
@torch.no_grad()
def test_tiles(mlp: type[nn.Module], num_rows: int, head_dim: int, dtype: torch.dtype, device: torch.device):
    """Every second row completes a block, one of which is not finite; the second call has the bits of the first."""
    networks = problems.make_mlps(mlp, (head_dim, head_dim), 32, 4, 1.0, dtype, device)
    lengths = [31 + 16 * (row % 7) - row % 2 for row in range(num_rows)]
    blocks = [torch.randn(num_rows, 1, 4, 32, head_dim, device=device).to(dtype) for _ in range(2)]
    for b in blocks:
        b[1::2] = torch.nan  # not complete
        if num_rows > 2:
            b[2, 0, 1, 3, 5] = torch.inf
    complete = [1 - row % 2 for row in range(num_rows)]
    first = problems.check_compress(networks, blocks, lengths, 1, complete)
    second = problems.run_compress(networks, blocks, lengths, 1)
    for one, other in zip(first, second, strict=True):
        assert harness.same_bits(one[::2], other[::2])


def test_a_step_that_completes_no_block_reads_no_weight(device: torch.device):
    decoder, spoiled = (Decoder(replace(MIXED, mlp=CompressMLP, lengths=(40, 100)), device) for _ in range(2))
    caches = decoder.cache(), decoder.cache()
    for network in spoiled.networks:
        for parameter in network.parameters():
            nn.init.constant_(parameter, torch.nan)
    for step in range(7):  # until the first row has 47 tokens
        tokens = decoder.tokens(step)
        out = decoder.step(caches[0], tokens)
        assert out.isfinite().all()
        assert harness.same_bits(spoiled.step(caches[1], tokens), out), step
    harness.assert_same_bits(*map(state_of, caches))
    assert not spoiled.step(caches[1], decoder.tokens(7)).isfinite().all()


def test_a_row_has_the_same_bits_beside_other_complete_blocks(device: torch.device):
    """In batches of one size, whichever other rows complete a block."""
    shape = replace(MIXED, mlp=CompressMLP, lengths=(31, 31, 31, 63))
    alone = replace(shape, lengths=(31, 20, 24, 40))
    options: dict[str, Any] = {'num_splits': 2, 'tiles_of_program': 2}
    outs = []
    for each in (shape, alone):
        decoder = Decoder(each, device)
        outs.append(decoder.step(decoder.cache(), decoder.tokens(0), **options))
    assert harness.same_bits(outs[0][0], outs[1][0])
