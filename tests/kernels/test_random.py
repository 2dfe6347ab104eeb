"""The random numbers of the kernels equal those of eager, bit for bit."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.core.random import philox


@triton.jit
def random_kernel(seed_ptr, counter_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    s = tl.load(counter_ptr + i)
    t = tl.load(counter_ptr + SIZE + i)
    h = tl.load(counter_ptr + 2 * SIZE + i)
    b = tl.load(counter_ptr + 3 * SIZE + i)
    tl.store(out_ptr + i, tl.philox(tl.load(seed_ptr), s, t, h, b)[0].to(tl.int64))


@pytest.mark.quick
@pytest.mark.parametrize('seed', [0, 5, -1, 2**32 + 7, 2**63 - 1, -(2**63)])
def test_philox(seed: int, device: torch.device) -> None:
    counter = torch.randint(2**31 - 1, (4, 64), dtype=torch.int32, device=device)
    counter[:, :16] %= 9
    out: Tensor = torch.zeros(64, dtype=torch.int64, device=device)
    seeds = torch.tensor([seed], device=device)
    random_kernel[(1,)](seeds, counter, out, SIZE=64)  # pyright: ignore[reportArgumentType]
    assert out.equal(philox(seeds, *counter))
