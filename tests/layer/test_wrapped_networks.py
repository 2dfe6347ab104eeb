"""Every network φ under hooks, adapters, pruning, parametrisations, tensor subclasses, transforms, sharding and copies.

Each is compared with the same network inside a module that the package does not know, and so calls.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.nn.utils import parametrizations, prune
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

from native_sparse_attention import SparseAttention
from native_sparse_attention.core.plain import is_plain
from native_sparse_attention.inference.phi import Phi
from native_sparse_attention.nn.compress import MeanPool
from native_sparse_attention.nn.dense import DenseAttention
from native_sparse_attention.nn.linear import HeadLinear
from tests.layer.test_compress import NETWORKS, every_network, randomize

DIM, HEADS, DIM_HEAD, BLOCK, SEQLEN = 8, 2, 4, 4, 13

Networks = tuple[nn.Module, nn.Module]
Results = list[Tensor | None]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Called(nn.Module):
    """Wraps a network so that it is called as a module."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, blocks: Tensor) -> Tensor:
        return self.network(blocks)


def make_layer(networks: Networks) -> SparseAttention:
    torch.manual_seed(1)
    layer = SparseAttention(
        DIM,
        DIM_HEAD,
        2 * HEADS,
        sliding_window_size=3,
        compress_block_size=BLOCK,
        compress_block_sliding_stride=2,
        selection_block_size=4,
        num_selected_blocks=2,
        num_local_blocks=1,
        num_init_blocks=0,
        kv_heads=HEADS,
        causal=True,
        backend='eager',
    ).double()
    nn.init.normal_(layer.k_intrablock_positions)
    nn.init.normal_(layer.v_intrablock_positions)
    nn.init.normal_(layer.to_strategy_combine.weight)  # type: ignore[arg-type]
    layer.k_compress, layer.v_compress = networks
    return layer


def make_networks(make: Callable[..., nn.Module]) -> Networks:
    key_network, value_network = (randomize(make(HEADS, DIM_HEAD, BLOCK)).double() for _ in range(2))
    return key_network, value_network


def make_pair(networks: Networks) -> tuple[SparseAttention, SparseAttention]:
    """Return a layer with the networks, and one that calls them; they share the weights of the networks."""
    return make_layer(networks), make_layer((Called(networks[0]), Called(networks[1])))


def tokens(batch: int = 2) -> Tensor:
    return torch.randn(batch, SEQLEN, DIM, dtype=torch.float64)


def decode(layer: SparseAttention, x: Tensor, call: Callable[..., Tensor] | None = None) -> Tensor:
    """Decode a prompt of 6 tokens, then one token at a time. call: takes the layer's arguments; default the layer."""
    cache, outs = layer.init_cache(len(x), SEQLEN, dtype=x.dtype), []
    with torch.no_grad():
        for part in x.split((6, *(1,) * (SEQLEN - 6)), dim=1):
            outs.append((layer if call is None else call)(part, cache=cache))
    return torch.cat(outs, 1)


def results(
    layer: Any, x: Tensor, call: Callable[..., Tensor] | None = None, weights: Iterable[Tensor] | None = None
) -> Results:
    """Return the output, the result of decoding, and gradients of the input and the weights, default those of the
    layer. call: as in `decode`.
    """
    layer.eval()  # spectral norms change with every call in training mode
    x = x.detach().requires_grad_()
    leaves = [x, *(p for p in (layer.parameters() if weights is None else weights) if p.requires_grad)]
    out = (layer if call is None else call)(x)
    out.sin().sum().backward()
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return [out.detach(), decode(layer, x.detach(), call), *map(whole, gradients)]


def whole(tensor: Any) -> Tensor | None:
    return tensor.full_tensor() if hasattr(tensor, 'full_tensor') else tensor


def assert_same(found: Results, expected: Results) -> None:
    for index, (result, wanted) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(result, wanted, rtol=1e-9, atol=1e-11, msg=lambda m, i=index: f'{i}: {m}')


def leaves_of(network: nn.Module) -> list[nn.Module]:
    """Return the modules with a matrix."""
    weights = [(m, getattr(m, 'weight', None)) for m in network.modules()]
    return [m for m, weight in weights if isinstance(weight, Tensor) and weight.dim() > 1]


class Twice(Tensor):
    """A weight whose products are doubled."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (F.linear, F.conv1d, torch.conv1d, torch.einsum):
            return super().__torch_function__(func, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return 2 * func(*args, **(kwargs or {}))


def with_hooks(network: nn.Module) -> None:
    for module in {network, *leaves_of(network)}:
        module.register_forward_hook(lambda module, args, out: out.sin())


def with_pre_hooks(network: nn.Module) -> None:
    for module in {network, *leaves_of(network)}:
        module.register_forward_pre_hook(lambda module, args: (args[0].sin(),))


def triple(module: nn.Module, grads: Any, _: Any) -> Any:
    return tuple(None if grad is None else 3 * grad for grad in grads)


def with_backward_hooks(network: nn.Module) -> None:
    for module in {network, *leaves_of(network)}:
        module.register_full_backward_hook(triple)


def with_another_forward(network: nn.Module) -> None:
    for module in {network, *leaves_of(network)}:
        module.forward = (lambda forward: lambda x: forward(x).sin())(module.forward)


class Adapted(nn.Module):
    """An adapter of a network for which peft has none."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.lora = nn.Linear(DIM_HEAD, DIM_HEAD, bias=False).double()

    def forward(self, blocks: Tensor) -> Tensor:
        out = self.network(blocks)
        return out + self.lora(out)


def with_other_classes(network: nn.Module) -> None:
    for module in {network, *leaves_of(network)}:
        base: Any = type(module)
        module.__class__ = type('Own', (base,), {'forward': lambda self, x, base=base: base.forward(self, x).sin()})


def with_adapters(network: nn.Module) -> nn.Module | None:
    if isinstance(network, MeanPool) or isinstance(getattr(network, 'compress', None), HeadLinear):
        return Adapted(network)
    linear: Any = [name for name, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv1d)]
    # Factors of grouped convolutions have a row per group at least.
    config = peft.LoraConfig(
        r=HEADS,
        target_modules=linear[0] if linear == ['conv'] else linear,
        target_parameters=[f'{name}.weight' for name, m in network.named_modules() if isinstance(m, HeadLinear)],
    )
    peft.inject_adapter_in_model(config, network)
    for name, parameter in network.named_parameters():
        if 'lora_' in name:
            nn.init.normal_(parameter)
    network.double()
    return None


def with_pruning(network: nn.Module) -> None:
    for module in leaves_of(network):
        prune.l1_unstructured(module, 'weight', 0.5)


def with_weight_norm(network: nn.Module) -> None:
    for module in leaves_of(network):
        parametrizations.weight_norm(module)
        nn.init.normal_(module.parametrizations.weight.original0)  # type: ignore[union-attr, arg-type]


def with_spectral_norm(network: nn.Module) -> None:
    for module in leaves_of(network):
        parametrizations.spectral_norm(module)


def with_old_weight_norm(network: nn.Module) -> None:
    for module in leaves_of(network):
        nn.utils.weight_norm(module)
        nn.init.normal_(module.weight_g)  # type: ignore[arg-type]


def with_subclasses(network: nn.Module) -> None:
    for module in leaves_of(network):
        module.weight = nn.Parameter(module.weight.detach().as_subclass(Twice))  # type: ignore[union-attr]


def with_buffers(network: nn.Module) -> None:
    for module in leaves_of(network):
        weight = module.weight.detach().as_subclass(Twice)  # type: ignore[union-attr]
        del module.weight
        module.register_buffer('weight', weight)


def with_plain_tensors(network: nn.Module) -> None:
    """Replace parameters by attributes, as FSDP1 and replicas of DataParallel do."""
    for module in leaves_of(network):
        for name, parameter in dict(module.named_parameters(recurse=False)).items():
            delattr(module, name)
            setattr(module, name, parameter.detach())


# Return results of a layer with two networks that are wrapped in some way, and those of a layer that calls them.
Way = Callable[[Networks, Tensor], tuple[Results, Results]]


def changed(change: Callable[[nn.Module], nn.Module | None]) -> Way:
    def way(networks: Networks, x: Tensor) -> tuple[Results, Results]:
        before = make_layer(deepcopy(networks)).eval()(x)
        key_network, value_network = (change(network) or network for network in networks)
        layer, called = make_pair((key_network, value_network))
        expected = results(called, x)
        has_effect = change not in WITHOUT_EFFECT and (change in ON_ANY_NETWORK or bool(leaves_of(networks[0])))
        assert torch.allclose(before, called(x)) != has_effect
        return results(layer, x), expected

    return way


def of_called(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace('_compress.', '_compress.network.'): weight for name, weight in weights.items()}


def by_functional_call(networks: Networks, x: Tensor) -> tuple[Results, Results]:
    """Call with other weights than those of the layer."""
    layer, called = make_pair(networks)
    weights = {name: torch.randn_like(p).requires_grad_() for name, p in layer.named_parameters()}

    def of(module: SparseAttention, weights: dict[str, Tensor]) -> Results:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            return torch.func.functional_call(module, weights, args, kwargs)

        return results(module, x, call, weights.values())

    return of(layer, weights), of(called, of_called(weights))


def by_vmap(networks: Networks, x: Tensor) -> tuple[Results, Results]:
    """Map over rows, and over an ensemble of weights with its gradients. Caches, which change in place, refuse."""
    layer, called = make_pair(networks)
    found: Results = [torch.vmap(lambda row: layer(row[None])[0])(x)]
    expected: Results = [called(x)]
    weights = {name: torch.stack((p, p / 2)).detach() for name, p in layer.named_parameters()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, weights, (x,)).sin().sum()

    gradients = torch.vmap(torch.func.grad(loss))(weights)
    for member in range(2):
        called.load_state_dict(of_called({name: w[member] for name, w in weights.items()}))
        found += [gradient[member] for gradient in gradients.values()]
        expected += torch.autograd.grad(called(x).sin().sum(), [*called.parameters()])
    cache = layer.eval().init_cache(1, SEQLEN)
    with pytest.raises(RuntimeError, match='vmap'):
        torch.vmap(lambda row: layer(row[None], cache=cache))(x)
    assert cache.max_length == int(cache.lengths) == 0
    return found, expected


def by_copy(copy: Callable[[SparseAttention], SparseAttention]) -> Way:
    def way(networks: Networks, x: Tensor) -> tuple[Results, Results]:
        layer, called = make_pair(networks)
        return results(copy(layer), x), results(called, x)

    return way


def sharded(kind: str) -> Way:
    def way(networks: Networks, x: Tensor) -> tuple[Results, Results]:
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

        layer, called = make_pair(networks)
        expected, layer = results(called, x), deepcopy(layer)
        if kind.startswith('FSDP1'):
            original, device = 'original' in kind, torch.device('cpu')
            wrapped: Any = FullyShardedDataParallel(layer, device_id=device, use_orig_params=original)
            if not original:  # one flat parameter holds all gradients
                return results(layer, x, wrapped, []), expected[:3]
            found = results(layer, x, wrapped)
            pairs = zip(found, expected, strict=True)
            return [t if t is None or e is None else t.view(e.shape) for t, e in pairs], expected
        if 'leaf' in kind:
            for module in [m for m in layer.modules() if not [*m.children()] and [*m.parameters()]]:
                fully_shard(module)
        return results(fully_shard(layer), x), expected

    return way


ON_ANY_NETWORK = [with_hooks, with_pre_hooks, with_another_forward, with_other_classes, with_adapters]
WITHOUT_EFFECT = [with_backward_hooks, with_plain_tensors]  # on the output
CHANGES = [
    with_hooks,
    with_pre_hooks,
    with_backward_hooks,
    with_another_forward,
    with_other_classes,
    with_adapters,
    with_pruning,
    with_weight_norm,
    with_spectral_norm,
    with_old_weight_norm,
    with_subclasses,
    with_buffers,
    with_plain_tensors,
]
WAYS: dict[str, Way] = {
    **{change.__name__.removeprefix('with_'): changed(change) for change in CHANGES},
    'functional_call': by_functional_call,
    'vmap': by_vmap,
    'deepcopy': by_copy(deepcopy),
    'pickle': by_copy(lambda layer: pickle.loads(pickle.dumps(layer))),
    **{kind: sharded(kind) for kind in ('FSDP2', 'FSDP2 per leaf', 'FSDP1', 'FSDP1, original parameters')},
}


@pytest.fixture(scope='module')
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp('group') / 'store'
    torch.distributed.init_process_group('gloo', init_method=f'file://{store}', rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings('ignore:.*weight_norm.*:FutureWarning')
@every_network
@pytest.mark.parametrize('way', WAYS.values(), ids=WAYS)
@pytest.mark.usefixtures('one_rank')
def test_a_wrapped_network_is_called(make: Callable[..., nn.Module], way: Way) -> None:
    assert_same(*way(make_networks(make), tokens(3)))


@contextmanager
def global_hook(register: Callable[..., Any], hook: Callable[..., Any]) -> Iterator[None]:
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


GLOBAL_HOOKS = {
    'forward': (module_hooks.register_module_forward_hook, lambda module, args, out: None),
    'forward pre': (module_hooks.register_module_forward_pre_hook, lambda module, args: None),
    'backward': (module_hooks.register_module_full_backward_hook, lambda module, grads, _: None),
    'backward pre': (module_hooks.register_module_full_backward_pre_hook, lambda module, grads: None),
}


@every_network
@pytest.mark.parametrize(('register', 'hook'), GLOBAL_HOOKS.values(), ids=GLOBAL_HOOKS)
def test_global_hooks_see_every_module(make: Callable[..., nn.Module], register: Any, hook: Any) -> None:
    networks, seen = make_networks(make), set()
    layer, x = make_layer(networks), tokens()
    expected = results(layer, x)
    with global_hook(register, lambda module, *args: seen.add(module) or hook(module, *args)):
        found = results(layer, x)
    assert_same(found, expected)
    assert {m for network in networks for m in [network, *leaves_of(network)]} <= seen


@pytest.mark.parametrize('index', [0, 1])
def test_the_mean_is_a_fast_path_only_where_nothing_watches(index: int) -> None:
    pools, positions = (MeanPool(), MeanPool()), (torch.zeros(1), torch.zeros(1))
    assert Phi(pools, positions).is_mean
    pools[index].register_forward_hook(lambda *_: None)
    assert not Phi(pools, positions).is_mean


@pytest.mark.parametrize('dtype', [torch.int8, torch.float8_e4m3fn])
def test_weights_of_8_bits_are_not_plain(dtype: torch.dtype) -> None:
    linear = nn.Linear(2, 2)
    assert is_plain(linear, nn.Linear)
    linear.weight = nn.Parameter(torch.zeros(2, 2).to(dtype), requires_grad=False)
    assert not is_plain(linear, nn.Linear)


QUANTIZED = {
    'int8': Int8WeightOnlyConfig(),
    'int8 dynamic': Int8DynamicActivationInt8WeightConfig(),
    'float8': Float8WeightOnlyConfig(),
}


@every_network
@pytest.mark.parametrize('config', QUANTIZED.values(), ids=QUANTIZED)
def test_quantised_layers(make: Callable[..., nn.Module], config: Any) -> None:
    layer = make_layer(make_networks(make)).bfloat16().requires_grad_(False)
    quantize_(layer, config)
    rounding: dict[str, Any] = {'rtol': 0.03, 'atol': 0.03}  # networks that are not quantised take their fast path
    called = deepcopy(layer)
    called.k_compress, called.v_compress = Called(called.k_compress), Called(called.v_compress)
    for seqlen in (SEQLEN, BLOCK - 1):
        x = tokens()[:, :seqlen].bfloat16()
        assert layer(x).isfinite().all()
        torch.testing.assert_close(layer(x), called(x), **rounding)
    x = tokens().bfloat16().requires_grad_()
    if not isinstance(config, Int8DynamicActivationInt8WeightConfig):  # which has no derivative
        (found,), (expected,) = (torch.autograd.grad(module(x).sum(), x) for module in (layer, called))
        torch.testing.assert_close(found, expected, **rounding)
    decoded, wanted = (decode(module.eval(), x.detach()) for module in (layer, called))
    torch.testing.assert_close(decoded, wanted, **rounding)


def test_projections_with_adapters_and_hooks_under_autocast() -> None:
    """Adapters and hooks get the float32 input that a call of the module gives them."""
    layer, seen = make_layer(make_networks(NETWORKS['mlp'])).float(), []
    layer.to_strategy_combine.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=['to_qkv']), layer)
    layer.to_qkv.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    with torch.autocast('cpu', torch.bfloat16):
        before = layer(tokens().float())
        nn.init.normal_(layer.get_parameter('to_qkv.lora_B.default.weight'))
        assert not torch.allclose(layer(tokens().float()), before)
    assert seen == [torch.float32] * 4


class Packed(nn.Module):
    """A linear layer whose `weight` is a method, as in torch.ao.quantization."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.in_features = linear, linear.in_features

    def weight(self) -> Tensor:
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def stored_in_float32(linear: nn.Linear) -> nn.Linear:
    """Hooks cast the weight for each call."""
    linear.float().register_forward_pre_hook(lambda module, args: module.double() and None)
    linear.register_forward_hook(lambda module, args, out: module.float() and None)
    return linear


@pytest.mark.parametrize('replace', [Packed, stored_in_float32], ids=lambda replace: replace.__name__)
@pytest.mark.parametrize('make', [make_layer, lambda _: DenseAttention(DIM, DIM_HEAD, 2 * HEADS, causal=True).double()])
@torch.no_grad()
def test_projections_that_are_called(make: Callable[..., Any], replace: Callable[[nn.Linear], nn.Module]) -> None:
    layer, x = make(make_networks(NETWORKS['mlp'])).float().double().eval(), tokens()
    expected = layer(x)
    for name, module in [*layer.named_children()]:
        if isinstance(module, nn.Linear):
            setattr(layer, name, replace(module))
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(decode(layer, x), expected)
