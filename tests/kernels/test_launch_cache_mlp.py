"""Decoding steps with replayed launches and networks φ, computed by the kernels or called."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from native_sparse_attention.nn.compress import CompressMLP, MeanResidualMLP
from native_sparse_attention.ops._triton.support import is_interpreted
from tests.kernels.test_launch_cache import ONE_HEAD, Beside, runs  # noqa: F401 - a fixture
from tests.support.decoding_problems import Case, make_layer

pytestmark = pytest.mark.skipif(not is_interpreted(), reason='a GPU has compiled kernels')


def test_one_mlp_for_keys_and_values(runs: list[str]) -> None:  # noqa: F811
    """A shared MLP gives its weights once; with two networks other launches are recorded."""
    beside = Beside(Case(heads=ONE_HEAD, network='mlp'), [23], runs)
    networks = beside.layer['networks']
    for pair, repeats in ((networks[:1] * 2, False), (networks[1:] * 2, True), (networks, False), (networks, True)):
        beside.check(repeats=repeats, networks=pair)


def test_mlps_with_weights_of_equal_properties(runs: list[str]) -> None:  # noqa: F811
    """Of MLPs with weights of equal properties, one adds the mean; another is called because it has a hook."""
    beside = Beside(Case(heads=ONE_HEAD, network='mlp'), [23], runs)
    mlps = [tuple(make(16, 8).requires_grad_(False) for _ in range(2)) for make in (CompressMLP, MeanResidualMLP)]
    for networks in mlps:
        beside.check(repeats=False, networks=networks)
        beside.check(repeats=True, networks=networks)
    mlps[0][0].to_out.register_forward_hook(lambda *_: None)
    beside.case = replace(beside.case, network='own')
    beside.check(repeats=False, networks=mlps[0])
    beside.check(repeats=True, networks=mlps[0])


@pytest.mark.parametrize('network', ['linear', 'mlp'])
def test_other_values_of_the_same_properties(network: str, runs: list[str]) -> None:  # noqa: F811
    beside = Beside(Case(heads=ONE_HEAD, network=network), [23], runs)
    beside.check(repeats=False)
    for seed in range(2):
        torch.manual_seed(seed)
        other = make_layer(beside.case, beside.device)
        beside.check(repeats=True, **{name: other[name] for name in ('networks', 'positions', 'freqs', 'mem_kv')})
