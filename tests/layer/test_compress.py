"""The networks φ: shapes, values against loops over single blocks, gradients, and refusals."""

import inspect
import itertools
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import native_sparse_attention
from native_sparse_attention.nn import compress
from native_sparse_attention.nn.compress import (
    AttentionPool,
    CompressMLP,
    CompressTransformer,
    ConvLinearCompress,
    GroupedMLP,
    MeanPool,
    MeanResidualMLP,
    SingleProjection,
)
from native_sparse_attention.nn.compress.apply import compress_blocks
from native_sparse_attention.nn.compress.build import make_networks

# Each maker takes the heads, head size and block length, in this order.
NETWORKS = {
    'mlp': lambda heads, dim, length: CompressMLP(dim, length, 1.5),
    'mean + mlp': lambda heads, dim, length: MeanResidualMLP(dim, length, 1.5),
    'grouped mlp': lambda heads, dim, length: GroupedMLP(dim, length, heads, 1.5),
    'attention pool': lambda heads, dim, length: AttentionPool(dim, length),
    'conv': lambda heads, dim, length: ConvLinearCompress(heads, dim, length),
    'projection': lambda heads, dim, length: SingleProjection(dim, length),
    'projection per head': lambda heads, dim, length: SingleProjection(dim, length, heads),
    'transformer': lambda heads, dim, length: CompressTransformer(2, heads * dim, heads),
    'mean': lambda heads, dim, length: MeanPool(),
}

# heads, head size, block length
SHAPES = [(1, 1, 1), (1, 5, 4), (2, 4, 3), (3, 7, 5), (4, 6, 1)]

every_network = pytest.mark.parametrize('make', NETWORKS.values(), ids=NETWORKS)
every_shape = pytest.mark.parametrize(('heads', 'dim', 'length'), SHAPES)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def randomize(network):
    """Move every parameter away from its start, so that no identity, zero or one hides a mistake."""
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.5)
    return network


def make_double(make, heads, dim, length):
    return randomize(make(heads, dim, length).double())


def random_blocks(heads, dim, length, batch=2, num_blocks=3):
    return torch.randn(batch, heads, num_blocks, length, dim, dtype=torch.float64)


def naive_mlp(network, block, head):
    hidden = network.to_hidden.weight @ block.reshape(-1) + network.to_hidden.bias
    return network.to_out.weight @ hidden.clamp(min=0) + network.to_out.bias


def naive_mean_residual_mlp(network, block, head):
    return naive_mean(network, block, head) + naive_mlp(network, block, head)


def naive_grouped_mlp(network, block, head):
    first, _, second = network.net
    hidden = (block.reshape(-1) @ first.weight[head] + first.bias[0, head, 0]).clamp(min=0)
    return hidden @ second.weight[head] + second.bias[0, head, 0]


def naive_attention_pool(network, block, head):
    weights = torch.stack([network.to_attn_logits.weight @ token for token in block]).exp()
    return sum(w * token for w, token in zip(weights, block, strict=True)) / weights.sum(dim=0)


def naive_conv(network, block, head):
    dim = block.shape[1]
    rows = slice(head * dim, (head + 1) * dim)
    return F.conv1d(block.T[None], network.conv.weight[rows], network.conv.bias[rows])[0, :, 0]


def naive_projection(network, block, head):
    return network.compress[1].weight @ block.reshape(-1)


def naive_projection_per_head(network, block, head):
    # With one head the class has no weight per head.
    if isinstance(network.compress, nn.Sequential):
        return naive_projection(network, block, head)
    return sum(token @ weight for token, weight in zip(block, network.compress.weight[head], strict=True))


def naive_mean(network, block, head):
    return sum(block) / len(block)


NAIVE = {
    'mlp': naive_mlp,
    'mean + mlp': naive_mean_residual_mlp,
    'grouped mlp': naive_grouped_mlp,
    'attention pool': naive_attention_pool,
    'conv': naive_conv,
    'projection': naive_projection,
    'projection per head': naive_projection_per_head,
    'mean': naive_mean,
}


@pytest.mark.parametrize('name', NAIVE)
@every_shape
def test_equals_a_loop_over_blocks_and_heads(name, heads, dim, length):
    network = make_double(NETWORKS[name], heads, dim, length)
    blocks = random_blocks(heads, dim, length)
    expected = torch.empty_like(blocks[:, :, :, 0])
    for b, h, c in itertools.product(*map(range, blocks.shape[:3])):
        expected[b, h, c] = NAIVE[name](network, blocks[b, h, c], h)
    torch.testing.assert_close(network(blocks), expected, rtol=1e-12, atol=1e-12)


def naive_transformer(network, block):
    """Apply plain encoder layers to the whole block [l, H·D]; the last token is the result."""
    x = block
    for layer in network.layers:
        heads, dim = layer.attn.num_heads, x.shape[1]
        normed = naive_rms_norm(x, layer.norm1.weight)
        q, k, v = (p(normed) for p in (layer.attn.q_proj, layer.attn.k_proj, layer.attn.v_proj))
        per_head = []
        for part in torch.arange(dim).chunk(heads):
            logits = q[:, part] @ k[:, part].T / len(part) ** 0.5
            per_head.append(logits.softmax(dim=-1) @ v[:, part])
        x = x + layer.attn.out_proj(torch.cat(per_head, dim=-1))
        first, activation, _, second, _ = layer.ff
        x = x + second(activation(first(naive_rms_norm(x, layer.norm2.weight))))
    return x[-1]


def naive_rms_norm(x, weight):
    return x / (x.square().mean(dim=-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * weight


@every_shape
@pytest.mark.parametrize('num_layers', [1, 3])
def test_transformer_equals_a_loop_over_blocks(num_layers, heads, dim, length):
    encoder_heads = 2 if heads * dim % 2 == 0 else 1
    network = randomize(CompressTransformer(num_layers, heads * dim, encoder_heads, ff_hidden_dim=5).double())
    blocks = random_blocks(heads, dim, length)
    side_by_side = blocks.permute(0, 2, 3, 1, 4).flatten(-2)
    expected = torch.stack([torch.stack([naive_transformer(network, block) for block in row]) for row in side_by_side])
    expected = expected.unflatten(-1, (heads, dim)).transpose(1, 2)
    torch.testing.assert_close(network(blocks), expected, rtol=1e-12, atol=1e-12)


@every_network
@every_shape
@pytest.mark.parametrize(('batch', 'num_blocks'), [(1, 1), (2, 5), (2, 0), (0, 3)])
def test_shapes(make, heads, dim, length, batch, num_blocks):
    blocks = random_blocks(heads, dim, length, batch, num_blocks).float()
    network = make(heads, dim, length)
    assert network(blocks).shape == (batch, heads, num_blocks, dim)
    assert compress_blocks(network, blocks, name='keys', value_dim=dim).shape == (batch, num_blocks, heads, dim)


@every_network
def test_gradcheck(make):
    heads, dim, length = 2, 2, 2
    network = make_double(make, heads, dim, length)
    blocks = random_blocks(heads, dim, length, batch=1, num_blocks=2).requires_grad_()
    names = [name for name, _ in network.named_parameters()]

    def run(blocks, *parameters):
        call = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(network, call, (blocks,))

    assert torch.autograd.gradcheck(run, (blocks, *network.parameters()))


@every_network
def test_a_block_changes_only_its_own_summary(make):
    heads, dim, length = 2, 4, 3
    network = make_double(make, heads, dim, length)
    blocks = random_blocks(heads, dim, length)
    before = network(blocks)
    changed = blocks.clone()
    changed[1, :, 2] += 1
    same = network(changed) == before
    assert not same[1, :, 2].any()
    same[1, :, 2] = True
    assert same.all()


@every_network
def test_overlapping_blocks_need_not_be_copied_first(make):
    heads, dim, length, stride = 2, 4, 3, 2
    network = make_double(make, heads, dim, length)
    tokens = torch.randn(2, heads, 9, dim, dtype=torch.float64)
    views = tokens.unfold(2, length, stride).transpose(-1, -2)
    copies = torch.stack([tokens[:, :, c * stride : c * stride + length] for c in range(views.shape[2])], dim=2)
    torch.testing.assert_close(network(views), network(copies), rtol=1e-12, atol=1e-12)


@every_network
@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_autocast(make, dtype):
    heads, dim, length = 2, 8, 4
    network = make(heads, dim, length)
    blocks = random_blocks(heads, dim, length).to(dtype).requires_grad_()
    with torch.autocast('cpu', torch.bfloat16):
        compressed = compress_blocks(network, blocks, name='keys', value_dim=dim)
    assert compressed.dtype == dtype
    gold = deepcopy(network).double()(blocks.double()).transpose(1, 2)
    torch.testing.assert_close(compressed.double(), gold, rtol=0, atol=2**-5 * gold.abs().max().item())
    compressed.float().square().sum().backward()
    for tensor in (blocks, *network.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@every_network
def test_more_blocks_than_a_cuda_grid_holds(make):
    network = make(1, 8, 4).cuda()
    blocks = torch.randn(1, 1, 2**16 + 1, 4, 8, device='cuda', requires_grad=True)
    with torch.autocast('cuda', torch.bfloat16):
        compressed = network(blocks)
    compressed.float().sum().backward()
    gold = deepcopy(network).double()(blocks[:, :, -9:].double())
    torch.testing.assert_close(compressed[:, :, -9:].double(), gold, rtol=0, atol=2**-5 * gold.abs().max().item())


@every_network
def test_half_weights(make):
    network = make(2, 8, 4).to(torch.bfloat16)
    blocks = random_blocks(2, 8, 4).to(torch.bfloat16)
    gold = deepcopy(network).double()(blocks.double())
    torch.testing.assert_close(network(blocks).double(), gold, rtol=0, atol=2**-5 * gold.abs().max().item())


@every_network
def test_state_dict_round_trip(make):
    saved = randomize(make(2, 4, 3)).double()
    loaded = make(2, 4, 3).double()
    loaded.load_state_dict(saved.state_dict())
    blocks = random_blocks(2, 4, 3)
    assert torch.equal(loaded(blocks), saved(blocks))


@pytest.mark.parametrize('cls', [CompressMLP, GroupedMLP])
def test_hidden_size(cls):
    def hidden(expand_factor):
        heads = {'heads': 2} if cls is GroupedMLP else {}
        network = cls(4, 3, expand_factor=expand_factor, **heads)
        return {p.shape[-2:] for p in network.parameters() if p.ndim >= 2}

    assert any(15 in shape for shape in hidden(1.3))  # int(1.3 · 12)
    for expand_factor in (0.0, 0.08, -1.0, float('nan'), float('inf'), '1', None):
        with pytest.raises(
            ValueError, match=f'^expand_factor is {expand_factor!r}, but must be a number that times 12,'
        ):
            hidden(expand_factor)


@pytest.mark.parametrize('make', [NETWORKS['grouped mlp'], NETWORKS['conv'], NETWORKS['projection per head']])
def test_weights_of_one_head_serve_every_head(make):
    network = make_double(make, 1, 4, 3)
    blocks = random_blocks(3, 4, 3)
    expected = torch.cat([network(head) for head in blocks.split(1, dim=1)], dim=1)
    torch.testing.assert_close(network(blocks), expected, rtol=1e-12, atol=1e-12)


def test_mlp_with_another_output_size():
    assert CompressMLP(4, 3, dim_out=7)(torch.randn(1, 2, 3, 3, 4)).shape == (1, 2, 3, 7)


def test_transformer_drops_in_training_only():
    network = CompressTransformer(1, 8, 2, dropout=0.5).double()
    blocks = random_blocks(2, 4, 3)
    assert not torch.equal(network(blocks), network(blocks))
    network.eval()
    assert torch.equal(network(blocks), network(blocks))


def test_attention_pool_starts_from_the_tokens_as_logits():
    blocks = random_blocks(2, 4, 3)
    expected = (blocks.softmax(dim=-2) * blocks).sum(dim=-2)
    torch.testing.assert_close(AttentionPool(4, 3).double()(blocks), expected, rtol=1e-12, atol=1e-12)


def test_projection_tells_the_tokens_of_a_block_apart():
    network = SingleProjection(4, 3, 2).double()
    blocks = random_blocks(2, 4, 3)
    assert not torch.allclose(network(blocks), network(blocks.flip(-2)))


# As in native-sparse-attention-pytorch 0.2.3, but for MeanPool and MeanResidualMLP, which it does not have.
SIGNATURES = {
    GroupedMLP: [('dim_head',), ('compress_window_size',), ('heads',), ('expand_factor', 1.0)],
    AttentionPool: [('dim_head',), ('compress_window_size',)],
    ConvLinearCompress: [('heads',), ('dim_head',), ('compress_window_size',)],
    SingleProjection: [('dim_head',), ('compress_window_size',), ('heads', 1)],
    CompressTransformer: [('num_layers',), ('dim',), ('num_heads',), ('ff_hidden_dim', None), ('dropout', 0.0)],
    MeanPool: [],
    MeanResidualMLP: [('dim_head',), ('compress_window_size',), ('expand_factor', 1.0)],
}


@pytest.mark.parametrize('cls', SIGNATURES, ids=lambda cls: cls.__name__)
def test_constructor_arguments_are_those_of_lucidrains(cls):
    parameters = inspect.signature(cls).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    found = [(p.name,) if p.default is p.empty else (p.name, p.default) for p in positional]
    assert found == SIGNATURES[cls]


SIZES = {'kv_heads': 2, 'head_dim': 4, 'value_dim': 4, 'block_size': 3, 'compress_mlp_expand_factor': 1.0}


def test_default_networks():
    network_k, network_v = make_networks(None, **{**SIZES, 'value_dim': 6, 'compress_mlp_expand_factor': 2.0})
    assert isinstance(network_k, CompressMLP)
    assert isinstance(network_v, CompressMLP)
    assert network_k.to_hidden.weight.shape == (2 * 3 * 4, 3 * 4)
    assert network_v.to_hidden.weight.shape == (2 * 3 * 6, 3 * 6)
    assert network_v.to_out.weight.shape == (6, 2 * 3 * 6)


@every_network
def test_one_module_is_copied_for_keys_and_values(make):
    given = make(2, 4, 3).double()
    network_k, network_v = make_networks(given, **SIZES)
    assert len({id(given), id(network_k), id(network_v)}) == 3
    blocks = random_blocks(2, 4, 3)
    before = network_v(blocks), given(blocks)
    for parameter in network_k.parameters():
        nn.init.constant_(parameter, 0.3)
    assert torch.equal(network_k(blocks), before[0]) == (not [*given.parameters()])
    assert torch.equal(network_v(blocks), before[0])
    assert torch.equal(given(blocks), before[1])


@pytest.mark.parametrize('container', [tuple, list])
def test_a_pair_is_used_as_given(container):
    pair = container([GroupedMLP(4, 3, 2), AttentionPool(6, 3)])
    network_k, network_v = make_networks(pair, **{**SIZES, 'value_dim': 6})
    assert network_k is pair[0]
    assert network_v is pair[1]


def test_other_head_size_of_values_needs_a_pair():
    with pytest.raises(ValueError, match=r'^compress_mlp must be a pair .* got one MeanPool for head sizes 4 and 6$'):
        make_networks(MeanPool(), **{**SIZES, 'value_dim': 6})


@pytest.mark.parametrize(
    ('given', 'got'),
    [
        ((MeanPool(),), r'tuple of \(MeanPool\)'),
        ([MeanPool(), MeanPool(), MeanPool()], r'list of \(MeanPool, MeanPool, MeanPool\)'),
        ((MeanPool(), None), r'tuple of \(MeanPool, NoneType\)'),
        (torch.relu, 'builtin_function_or_method'),
        (MeanPool, 'type'),
    ],
)
def test_anything_else_is_refused(given, got):
    with pytest.raises(ValueError, match=f'^compress_mlp must be None, a module or a pair of modules, got {got}$'):
        make_networks(given, **SIZES)


class Returns(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, blocks):
        return self.function(blocks)


WRONG_OUTPUT = {
    'blocks themselves': (lambda x: x, r'\[1, 2, 3, 3, 4\]'),
    'summed over the blocks': (lambda x: x.mean(dim=(2, 3)), r'\[1, 2, 4\]'),
    'heads and blocks swapped': (lambda x: x.mean(dim=-2).transpose(1, 2), r'\[1, 3, 2, 4\]'),
    'another head size': (lambda x: x.mean(dim=-2)[..., :3], r'\[1, 2, 3, 3\]'),
    'a pair': (lambda x: (x, x), r'tuple of \(Tensor, Tensor\)'),
    'nothing': (lambda x: None, 'NoneType'),
}


@pytest.mark.parametrize(('function', 'received'), WRONG_OUTPUT.values(), ids=WRONG_OUTPUT)
@pytest.mark.parametrize('name', ['keys', 'values'])
def test_a_wrong_output_is_refused_before_anything_runs(function, received, name):
    pair = (Returns(function), MeanPool()) if name == 'keys' else (MeanPool(), Returns(function))
    rule = r'must map \[B, H, C, l, D\] = \[1, 2, 3, 3, 4\] to \[B, H, C, D\] = \[1, 2, 3, 4\]'
    with pytest.raises(ValueError, match=rf'^compress_mlp \({name}\) {rule}, got {received}$'):
        make_networks(pair, **SIZES)
    with pytest.raises(ValueError, match=rf'^compress_mlp \({name}\) {rule}, got {received}$'):
        compress_blocks(Returns(function), torch.randn(1, 2, 3, 3, 4), name=name, value_dim=4)


@pytest.mark.parametrize(
    'network',
    [
        GroupedMLP(4, 3, heads=3),
        GroupedMLP(4, 2, heads=2),
        ConvLinearCompress(3, 4, 3),
        ConvLinearCompress(1, 8, 3),
        SingleProjection(4, 3, heads=4),
        SingleProjection(4, 2),
        AttentionPool(5, 3),
        CompressTransformer(1, 12, 3),
        nn.ModuleList([MeanPool()]),
    ],
    ids=lambda network: type(network).__name__,
)
def test_a_network_of_other_sizes_is_refused_by_name(network):
    with pytest.raises(ValueError, match=r'^compress_mlp \(keys\) must map .* = \[1, 2, 3, 4\], got ') as raised:
        make_networks(network, **SIZES)
    assert '\n' not in str(raised.value)
    assert raised.value.__cause__ is not None


def test_an_error_of_several_lines_becomes_one_line():
    def fail(blocks):
        raise RuntimeError('first\nsecond')

    with pytest.raises(ValueError, match=r'^compress_mlp \(keys\) must map .*, got RuntimeError: first$'):
        make_networks(Returns(fail), **SIZES)


def test_the_check_leaves_networks_and_random_state_as_they_were():
    network = nn.Sequential(CompressTransformer(1, 8, 2, dropout=0.5), nn.BatchNorm2d(2))
    network[0].eval()
    state = deepcopy(network.state_dict())
    random_state = torch.get_rng_state()
    make_networks((network, network), **SIZES)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert (network.training, network[0].training, network[1].training) == (True, False, True)
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, state[name])
    with pytest.raises(ValueError, match='compress_mlp'):
        make_networks((network, nn.Linear(1, 1)), **SIZES)
    assert (network.training, network[0].training, network[1].training) == (True, False, True)


def test_the_check_runs_where_the_weights_are():
    seen = []

    class Watched(AttentionPool):
        def forward(self, blocks):
            seen.append((blocks.device.type, blocks.dtype, self.training, torch.is_grad_enabled()))
            return super().forward(blocks)

    make_networks((Watched(4, 3).double(), Watched(4, 3).to('meta', torch.bfloat16)), **SIZES)
    assert seen == [('cpu', torch.float64, False, False), ('meta', torch.bfloat16, False, False)]


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16])
def test_without_blocks_the_network_is_not_called(dtype):
    def refuse(blocks):
        raise AssertionError('called')

    compressed = compress_blocks(Returns(refuse), torch.empty(2, 3, 0, 5, 4, dtype=dtype), name='values', value_dim=4)
    assert compressed.shape == (2, 0, 3, 4)
    assert compressed.dtype == dtype


def test_summaries_are_token_major():
    blocks = random_blocks(2, 4, 3)
    compressed = compress_blocks(MeanPool(), blocks, name='keys', value_dim=4)
    assert torch.equal(compressed, blocks.mean(dim=-2).transpose(1, 2))


@pytest.mark.full
@every_network
def test_compiles_without_graph_breaks(make):
    network = make_double(make, 2, 4, 3)
    torch.compiler.reset()
    compiled = torch.compile(compress_blocks, backend='eager', fullgraph=True)
    for num_blocks in (3, 0):
        blocks = random_blocks(2, 4, 3, num_blocks=num_blocks)
        expected = compress_blocks(network, blocks, name='keys', value_dim=4)
        assert torch.equal(compiled(network, blocks, name='keys', value_dim=4), expected)


def test_every_network_is_tried():
    classes = {c for c in vars(compress).values() if inspect.isclass(c) and issubclass(c, nn.Module)}
    classes = {c for c in classes if c.__module__.startswith(native_sparse_attention.__name__)}
    assert {c for c in classes if not c.__name__.startswith('_')} == {type(make(2, 4, 3)) for make in NETWORKS.values()}
