"""Overlapping blocks that are not laid out equal laid-out blocks, and are laid out where needed."""

import itertools
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from native_sparse_attention.nn.compress import (
    CompressMLP,
    ConvLinearCompress,
    GroupedMLP,
    MeanPool,
    MeanResidualMLP,
    SingleProjection,
    apply,
    overlapping,
)
from native_sparse_attention.nn.compress.apply import compress_pair, compress_tokens
from tests.layer.test_compress import NETWORKS, every_network, make_double, random_blocks


def laid_out(network, tokens, positions, stride, cu_seqlens=None):
    """Return summaries `[B, C, H, D]` of blocks that are laid out one by one, those of one sequence after the other."""
    block_size, borders = positions.shape[1], [0, tokens.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    starts = [
        start
        for first, last in itertools.pairwise(borders)
        for start in range(first, last - block_size + 1, stride)
    ]  # fmt: skip
    if not starts:
        return tokens.new_zeros(tokens.shape[0], 0, *tokens.shape[2:])
    blocks = torch.stack([tokens[:, start : start + block_size].transpose(1, 2) for start in starts], 2)
    return network(blocks + positions[:, None]).transpose(1, 2)


# heads, head size, l, d, tokens, borders of packed sequences
OVERLAPS = [
    (2, 4, 4, 2, 13, None),
    (1, 3, 6, 2, 11, None),
    (3, 4, 3, 3, 10, None),
    (2, 4, 4, 1, 4, None),
    (2, 4, 4, 2, 3, None),
    (2, 4, 5, 2, 14, None),
    (2, 4, 4, 2, 23, [0, 5, 5, 8, 19, 21]),
    (1, 4, 6, 2, 12, [0, 3, 5]),
    (2, 4, 2, 2, 12, [0, 3, 12]),
    (2, 4, 5, 2, 23, [0, 5, 5, 8, 19, 21]),
]


@every_network
@pytest.mark.parametrize(('heads', 'dim', 'length', 'stride', 'total', 'borders'), OVERLAPS)
def test_overlapping_blocks_need_not_be_laid_out(make, heads, dim, length, stride, total, borders):
    network = make_double(make, heads, dim, length)
    batch = 2 if borders is None else 1
    tokens = torch.randn(batch, heads, total, dim, dtype=torch.float64).transpose(1, 2).requires_grad_()
    positions = torch.randn(heads, length, dim, dtype=torch.float64, requires_grad=True)
    cu_seqlens = None if borders is None else torch.tensor(borders, dtype=torch.int32)
    leaves = [tokens, positions, *network.parameters()]
    expected = laid_out(network, tokens, positions, stride, cu_seqlens)
    result = compress_tokens(network, tokens, positions, stride, cu_seqlens, name='keys', value_dim=dim)
    assert cu_seqlens is None or result.shape[1] == (total // stride if total >= length else 0)
    result = result[:, : expected.shape[1]]
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    if expected.shape[1]:
        grad = torch.randn_like(expected)
        found, wanted = (torch.autograd.grad(t, leaves, grad, materialize_grads=True) for t in (result, expected))
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@every_network
@pytest.mark.parametrize('autocast', [True, False])
def test_half_types_need_not_be_laid_out(make, autocast):
    network = make(2, 8, 4)
    tokens, positions = torch.randn(2, 21, 2, 8), torch.randn(2, 4, 8)
    gold = laid_out(deepcopy(network).double(), tokens.bfloat16().double(), positions.bfloat16().double(), 2)
    if not autocast:
        network = network.bfloat16()
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        result = compress_tokens(network, tokens.bfloat16(), positions, 2, name='keys', value_dim=8)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), gold, rtol=0, atol=2**-5 * gold.abs().max().item())


@pytest.mark.parametrize('name', ['mlp', 'grouped mlp', 'projection'])
@pytest.mark.parametrize(('heads', 'dim', 'length', 'stride', 'total', 'borders'), OVERLAPS)
def test_keys_and_values_are_summarised_as_each_alone(name, heads, dim, length, stride, total, borders, monkeypatch):
    """MLPs run as one where autocast casts their weights to the dtype of the tokens, here float64."""
    for module in (apply, overlapping):
        monkeypatch.setattr(module, 'projection_dtype', lambda tensor: torch.float64)
    dtype = torch.float32 if 'mlp' in name and length % stride == 0 else torch.float64
    networks = [NETWORKS[name](heads, dim, length).to(dtype) for _ in range(2)]
    batch = 2 if borders is None else 1
    both = [torch.randn(batch, total, heads, dim, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    positions = [torch.randn(heads, length, dim, dtype=dtype, requires_grad=True) for _ in range(2)]
    cu_seqlens = None if borders is None else torch.tensor(borders, dtype=torch.int32)
    results = compress_pair(
        (networks[0], networks[1]), (both[0], both[1]), (positions[0], positions[1]), stride, cu_seqlens
    )
    for result, network, tokens, at in zip(results, networks, both, positions, strict=True):
        alone, leaves = deepcopy(network).double(), [tokens, at, *network.parameters()]
        expected = laid_out(alone, tokens, at.double(), stride, cu_seqlens)
        result = result[:, : expected.shape[1]]
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
        if expected.shape[1]:
            grad = torch.randn_like(expected)
            found = torch.autograd.grad(result, leaves, grad, retain_graph=True)
            wanted = torch.autograd.grad(expected, [tokens, at, *alone.parameters()], grad)
            torch.testing.assert_close(found[0], wanted[0], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found[1:], tuple(t.to(dtype) for t in wanted[1:]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('name', ['mlp', 'grouped mlp'])
def test_keys_and_values_together_under_autocast(name):
    networks = [NETWORKS[name](2, 8, 4) for _ in range(2)]
    tokens, positions = (
        [torch.randn(2, 421, 2, 8).bfloat16() for _ in range(2)],
        [torch.randn(2, 4, 8) for _ in range(2)],
    )
    with torch.autocast('cpu', torch.bfloat16):
        results = compress_pair((networks[0], networks[1]), (tokens[0], tokens[1]), (positions[0], positions[1]), 2)
    for result, network, t, at in zip(results, networks, tokens, positions, strict=True):
        gold = laid_out(deepcopy(network).double(), t.double(), at.double(), 2)
        assert result.dtype == torch.bfloat16
        with torch.autocast('cpu', torch.bfloat16):
            same_dtype = laid_out(network, t, at.bfloat16(), 2)
        errors = [(out.double() - gold).abs() for out in (result, same_dtype)]
        assert errors[0].max() <= 2 * errors[1].max()
        assert errors[0].mean() <= 1.1 * errors[1].mean()


@pytest.mark.parametrize('which', [(0,), (0, 1)])
def test_networks_of_another_dtype_are_refused_without_autocast(which):
    networks = [NETWORKS['mlp'](2, 8, 4) for _ in range(2)]
    for index in which:
        networks[index].bfloat16()
    tokens, positions = torch.randn(1, 16, 2, 8), torch.randn(2, 4, 8)
    with pytest.raises(RuntimeError, match=r'dtype|scalar type'):
        compress_pair((networks[0], networks[1]), (tokens, tokens), (positions, positions), 2)


class Operations(TorchDispatchMode):
    """Count operations that return new memory."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view and 'empty' not in str(func) and 'unsafe_view' not in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize('name', ['mlp', 'grouped mlp'])
def test_mlps_of_keys_and_values_take_few_operations_under_autocast(name):
    networks, positions = [NETWORKS[name](2, 4, 4) for _ in range(2)], torch.zeros(2, 4, 4, requires_grad=True)
    tokens = torch.randn(1, 16, 2, 4).bfloat16().requires_grad_()
    leaves = [tokens, positions, *networks[0].parameters(), *networks[1].parameters()]

    def count(k_network):
        with Operations() as operations, torch.autocast('cpu', torch.bfloat16):
            results = compress_pair((k_network, networks[1]), (tokens, tokens), (positions, positions), 2)
            torch.autograd.grad([result.sum() for result in results], leaves, allow_unused=True)
        return operations.count

    together = count(networks[0])
    networks[0].register_forward_hook(lambda module, inputs, output: output)
    assert together <= 36 < count(networks[0])


def test_derivatives_take_two_operations_per_slot():
    """Two operations per slot, none of which fills, copies or adds the tokens."""
    tokens, counts = torch.randn(2, 32, 2, 4, requires_grad=True), []
    for places in (2, 5):
        network = SingleProjection(4, 2 * places)
        out = compress_tokens(network, tokens, torch.zeros(2, 2 * places, 4), 2, name='keys', value_dim=4)
        with Operations() as operations:
            torch.autograd.grad(out, [tokens, *network.parameters()], torch.ones_like(out))
        counts.append(operations.count)
    assert counts[1] - counts[0] == 2 * (5 - 2)


def random_product(per_head, first_chunks=None):
    """`linear` and its inputs: chunks of two kinds, positions, weight and bias, l / d = 3."""
    sets = 4 if per_head else 2
    shapes = [(2, 5, 2, 2, 3), (2, 5, 2, 2, 3), (2, 2, 6, 3), (sets, 4, 18), (sets, 4)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def linear(k, v, positions, weight, bias):
        return overlapping.OverlappingBlocks((k, v), positions, first_chunks).linear(weight, bias)

    return linear, inputs


@pytest.mark.full
@pytest.mark.parametrize(('per_head', 'first_chunks'), [(False, None), (True, [0, 2]), (True, [])])
def test_derivatives_of_every_kind(per_head, first_chunks):
    """Forward derivatives, batched gradients and second derivatives."""
    first_chunks = None if first_chunks is None else torch.tensor(first_chunks, dtype=torch.int64)
    linear, inputs = random_product(per_head, first_chunks)
    assert torch.autograd.gradcheck(linear, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(linear, inputs)


@pytest.mark.parametrize('per_head', [False, True])
def test_derivatives_that_some_inputs_need(per_head):
    linear, inputs = random_product(per_head)
    expected = torch.autograd.grad(linear(*inputs).sin().sum(), inputs)
    for needs in itertools.product([False, True], repeat=len(inputs)):
        given = [t.detach().requires_grad_(need) for t, need in zip(inputs, needs, strict=True)]
        out = linear(*given).sin().sum()
        assert out.requires_grad == any(needs)
        if any(needs):
            out.backward()
        for t, need, gradient in zip(given, needs, expected, strict=True):
            assert (t.grad is not None) == need
            assert t.grad is None or torch.equal(t.grad, gradient)


@pytest.mark.parametrize('per_head', [False, True])
def test_torch_compile_sees_plain_operations(per_head):
    linear, inputs = random_product(per_head)
    expected = torch.autograd.grad(linear(*inputs).sin().sum(), inputs)
    compiled = torch.compile(linear, fullgraph=True, backend='aot_eager')
    found = torch.autograd.grad(compiled(*inputs).sin().sum(), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Largest(TorchDispatchMode):
    """The most elements of a storage that an operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return result


@pytest.mark.parametrize(
    'name', ['mlp', 'mean + mlp', 'grouped mlp', 'conv', 'projection', 'projection per head', 'mean']
)
@pytest.mark.parametrize('borders', [None, [0, 300, 700]])
def test_nothing_of_the_size_of_all_blocks_is_made(name, borders):
    heads, dim, length, stride, total = 2, 4, 16, 2, 800
    network = NETWORKS[name](heads, dim, length)
    if 'mlp' in name:  # the hidden layer must not hide it
        kinds = {'mlp': CompressMLP, 'mean + mlp': MeanResidualMLP}
        network = kinds[name](dim, length, 0.1) if name in kinds else GroupedMLP(dim, length, heads, 0.1)
    tokens = torch.randn(1, total, heads, dim, requires_grad=True)
    positions = torch.zeros(heads, length, dim)
    cu_seqlens = None if borders is None else torch.tensor(borders, dtype=torch.int32)
    with Largest() as largest:
        compress_tokens(network, tokens, positions, stride, cu_seqlens, name='keys', value_dim=dim).sum().backward()
    assert largest.elements <= 4 * tokens.numel() < tokens.numel() * length // stride


@pytest.mark.parametrize('stride', [2, 3])
def test_mean_residual_mlp_starts_as_the_block_mean(stride):
    network = MeanResidualMLP(4, 4)
    tokens, positions = torch.randn(1, 14, 2, 4), torch.randn(2, 4, 4)
    found, expected = (
        compress_tokens(n, tokens, positions, stride, name='keys', value_dim=4) for n in (network, MeanPool())
    )
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    assert network.to_out.weight.grad is not None
    assert network.to_out.weight.grad.any()


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_changes_of_a_network_take_effect():
    tokens, positions = torch.randn(1, 9, 2, 4), torch.zeros(2, 4, 4)

    def changed(change):
        network = CompressMLP(4, 4)
        change(network)
        result = compress_tokens(network, tokens, positions, 2, name='keys', value_dim=4)
        torch.testing.assert_close(result, laid_out(network, tokens, positions, 2))
        return result

    changed(lambda network: None)
    changed(lambda network: setattr(network, 'to_hidden', Doubled(16, 16)))
    changed(lambda network: setattr(network, 'forward', lambda blocks: blocks.sum(-2)))
    changed(lambda network: network.to_hidden.register_forward_hook(lambda module, inputs, output: output + 1))
    changed(lambda network: network.to_hidden.register_forward_pre_hook(lambda module, inputs: inputs[0] + 1))
    changed(lambda network: nn.utils.parametrizations.weight_norm(network.to_hidden))


@pytest.mark.parametrize('heads', [1, 3])
def test_convolution_is_called_where_it_has_a_hook(heads):
    network, blocks = make_double(NETWORKS['conv'], heads, 5, 4), random_blocks(3, 5, 4)
    expected = network(blocks) + 1
    network.conv.register_forward_hook(lambda module, inputs, output: output + 1)
    torch.testing.assert_close(network(blocks), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('register', ['register_full_backward_hook', 'register_full_backward_pre_hook'])
def test_backward_hooks_of_a_network_are_called(register: str):
    network, calls = CompressMLP(4, 4), []
    getattr(network.to_hidden, register)(lambda module, *gradients: calls.append(module))
    tokens, positions = torch.randn(1, 9, 2, 4, requires_grad=True), torch.zeros(2, 4, 4)
    compress_tokens(network, tokens, positions, 2, name='keys', value_dim=4).sum().backward()
    assert calls == [network.to_hidden]


@pytest.mark.parametrize(
    'network',
    [
        SingleProjection(4, 4),
        SingleProjection(4, 4, heads=2),
        GroupedMLP(4, 4, 2),
        ConvLinearCompress(2, 4, 4),
    ],
    ids=['projection', 'projections', 'grouped', 'convolution'],
)
def test_networks_that_were_rebuilt(network: nn.Module):
    """Networks with an additional layer, or a bias more or less, have the results of laid-out blocks."""
    match network:
        case SingleProjection(compress=nn.Sequential() as layers):
            layers[1] = nn.Linear(16, 4)
        case SingleProjection():
            network.compress = nn.Sequential(nn.Flatten(-2), nn.Linear(16, 4, bias=False), nn.ReLU())
        case GroupedMLP():
            network.net.append(nn.ReLU())
        case ConvLinearCompress():
            nn.utils.parametrizations.weight_norm(network.conv)
    tokens, positions = torch.randn(1, 9, 2, 4), torch.randn(2, 4, 4)
    result = compress_tokens(network, tokens, positions, 2, name='keys', value_dim=4)
    torch.testing.assert_close(result, laid_out(network, tokens, positions, 2))


@pytest.mark.parametrize('name', NETWORKS)
def test_a_batch_of_no_rows(name: str):
    network, tokens, positions = NETWORKS[name](2, 3, 4), torch.randn(0, 9, 2, 3), torch.randn(2, 4, 3)
    assert compress_tokens(network, tokens, positions, 2, name='keys', value_dim=3).shape == (0, 3, 2, 3)


@pytest.mark.parametrize('name', NETWORKS)
def test_tokens_of_no_block_have_no_gradient(name: str):
    """Packed sequences that are too short for a block, and blocks across a border, have no gradient."""
    network, positions = NETWORKS[name](2, 3, 8), torch.randn(2, 8, 3)
    cu_seqlens = torch.tensor([0, 6, 30, 35, 40], dtype=torch.int32)
    tokens = torch.randn(1, 40, 2, 3)
    tokens[:, :6] = torch.nan
    tokens[:, 30:] = torch.nan
    tokens.requires_grad_()
    out = compress_tokens(network, tokens, positions, 4, cu_seqlens, name='keys', value_dim=3)
    assert out.isfinite().all()
    out[:, :5].sum().backward()
    assert all(p.grad.isfinite().all() for p in [tokens, *network.parameters()] if p.grad is not None)
