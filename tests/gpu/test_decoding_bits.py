"""Repeated decoding steps have equal bits: a thousand times, and in another process.

python -m pytest -m gpu -n 4 tests/gpu/test_decoding_bits.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention.nn.compress import CompressMLP
from tests.gpu.test_decoding import MIXED, PHI, harness, shared_gpu  # noqa: F401 - a fixture
from tests.gpu.test_runtime import ROOT, digest, environment_here
from tests.support.gpu_decoding_problems import Decoder, state_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize('batch', [1, 5, 160])
@PHI
@torch.no_grad()
def test_repeated_steps_give_the_same_bits(phi: dict[str, Any], batch: int, device: torch.device):
    """A step is repeated a thousand times, with overlapping launches and more programs than fit on the GPU."""
    lengths = (1023,) if batch == 1 else MIXED.lengths * (batch // 5)
    decoder = Decoder(replace(MIXED, lengths=lengths, num_tokens=2, **phi), device)
    cache, tokens = decoder.cache(), decoder.tokens(0)
    start = cache.lengths.clone()
    expected = decoder.step(cache, tokens)
    state = state_of(cache)
    differs = torch.zeros((), dtype=torch.bool, device=device)
    for _ in range(1000):
        cache.lengths.copy_(start)
        cache.advance(-2)
        differs |= (decoder.step(cache, tokens) != expected).any()
    assert expected.isfinite().all()
    assert not differs
    harness.assert_same_bits(state_of(cache), state)


HASH = f"""
import json, sys, torch
from {__name__} import digests_of_steps, VARIANTS
print(json.dumps({{name: digests_of_steps(name, torch.device(sys.argv[1])) for name in VARIANTS}}))
"""
VARIANTS: dict[str, dict[str, Any]] = {
    'mean': {},
    'learned': {'learned': True, 'num_tokens': 3},
    'mlp': {'mlp': CompressMLP, 'num_tokens': 3},
    'heads alone': {'share_group': False, 'page_size': 64},
}


def digests_of_steps(name: str, device: torch.device) -> dict[str, str]:
    """Return digests of the weights of φ, of every output, and of the cache after each step: the first difference names
    its origin.
    """
    decoder = Decoder(replace(MIXED, **VARIANTS[name]), device)
    cache = decoder.cache()
    weights = [p for network in decoder.networks for p in network.parameters()]
    found: dict[str, Tensor] = {f'φ {place}': weight for place, weight in enumerate(weights)}
    for step in range(5):
        found[f'out {step}'] = decoder.step(cache, decoder.tokens(step))
        found |= {f'{of} {step}': tensor.clone() for of, tensor in state_of(cache).items()}
    return {of: digest({of: tensor.detach()}) for of, tensor in found.items()}


def test_processes_give_the_same_bits(device: torch.device, tmp_path: Path):
    """A process that compiles every kernel, a process that finds them compiled, and another order of calls."""
    environment = environment_here() | {'TRITON_CACHE_DIR': str(tmp_path)}
    command = [sys.executable, '-c', HASH, device.type]
    first, *others = (
        json.loads(subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True).stdout)
        for _ in range(2)
    )
    assert list(first) == list(VARIANTS)
    others.append({name: digests_of_steps(name, device) for name in reversed(VARIANTS)})
    differ = [
        [f'{name}: {of}' for name in VARIANTS for of in first[name] if digests[name][of] != first[name][of]]
        for digests in others
    ]
    assert differ == [[], []]
