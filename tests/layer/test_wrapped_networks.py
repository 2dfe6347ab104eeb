"""Every network φ under hooks, adapters, pruning, parametrisations, tensor subclasses, transforms, sharding and copies.

Each is compared with the same network called as a module: within a module that the package does not know.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
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
from native_sparse_attention.inference.phi import Phi
from native_sparse_attention.nn.compress import MeanPool
from tests.layer.test_compress import NETWORKS, every_network, randomize

DIM, HEADS, DIM_HEAD, BLOCK, SEQLEN = 8, 2, 4, 4, 13


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Called(nn.Module):
    """A network that nothing goes around."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, blocks: Tensor) -> Tensor:
        return self.network(blocks)


def make_layer(networks: tuple[nn.Module, nn.Module]) -> SparseAttention:
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


def make_networks(make: Callable[..., nn.Module]) -> tuple[nn.Module, nn.Module]:
    key_network, value_network = (randomize(make(HEADS, DIM_HEAD, BLOCK)).double() for _ in range(2))
    return key_network, value_network


def make_pair(networks: tuple[nn.Module, nn.Module]) -> tuple[SparseAttention, SparseAttention]:
    """A layer with the networks, and one that calls them; they share the weights of the networks."""
    return make_layer(networks), make_layer((Called(networks[0]), Called(networks[1])))


def tokens(batch: int = 2) -> Tensor:
    return torch.randn(batch, SEQLEN, DIM, dtype=torch.float64)


def decode(layer: SparseAttention, x: Tensor, call: Callable[..., Tensor] | None = None) -> Tensor:
    """A prompt of 6 tokens, then one token at a time. call: what is called with the layer's arguments, default it."""
    cache, outs = layer.init_cache(len(x), SEQLEN, dtype=x.dtype), []
    with torch.no_grad():
        for part in x.split((6, *(1,) * (SEQLEN - 6)), dim=1):
            outs.append((call or layer)(part, cache=cache))
    return torch.cat(outs, 1)


def results(layer: SparseAttention, networks: tuple[nn.Module, nn.Module], x: Tensor) -> list[Tensor | None]:
    """The output, what decoding gives, and gradients of the input, the positions and the networks."""
    layer.eval()  # spectral norms change with every call in training mode
    x = x.detach().requires_grad_()
    of_networks = [p for network in networks for p in network.parameters() if p.requires_grad]
    leaves = [x, layer.k_intrablock_positions, layer.v_intrablock_positions, layer.to_qkv.weight, *of_networks]
    out = layer(x)
    gradients = torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True)
    return [out.detach(), decode(layer, x.detach()), *gradients]


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for index, (result, wanted) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(result, wanted, rtol=1e-9, atol=1e-11, msg=lambda m, i=index: f'{i}: {m}')


def leaves_of(network: nn.Module) -> list[nn.Module]:
    """The modules with a matrix."""
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


def with_adapters(network: nn.Module) -> None:
    names = [n for n, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv1d)]
    if not names:
        pytest.skip('peft has no adapter for this network')
    # Factors of grouped convolutions have a row per group at least.
    config = peft.LoraConfig(r=HEADS, target_modules=[names[0]] if names == ['conv'] else names)
    peft.inject_adapter_in_model(config, network)
    for name, parameter in network.named_parameters():
        if 'lora_' in name:
            nn.init.normal_(parameter)
    network.double()


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


def with_plain_tensors(network: nn.Module) -> None:
    """As FSDP1 and replicas of DataParallel have them: attributes instead of parameters."""
    for module in leaves_of(network):
        for name, parameter in dict(module.named_parameters(recurse=False)).items():
            delattr(module, name)
            setattr(module, name, parameter.detach())


CHANGES = [
    with_hooks,
    with_pre_hooks,
    with_backward_hooks,
    with_another_forward,
    with_adapters,
    with_pruning,
    with_weight_norm,
    with_spectral_norm,
    with_old_weight_norm,
    with_subclasses,
    with_plain_tensors,
]


@pytest.mark.filterwarnings('ignore:.*weight_norm.*:FutureWarning')
@every_network
@pytest.mark.parametrize('change', CHANGES, ids=lambda change: change.__name__)
def test_a_changed_network_is_called(make: Callable[..., nn.Module], change: Callable[[nn.Module], None]) -> None:
    networks = make_networks(make)
    before = make_layer(deepcopy(networks))
    for network in networks:
        change(network)
    layer, called = make_pair(networks)
    x = tokens()
    expected = results(called, networks, x)
    assert_same(results(layer, networks, x), expected)
    has_effect = change is not with_plain_tensors and (leaves_of(networks[0]) or 'hook' in change.__name__)
    if has_effect and change is not with_backward_hooks:
        assert not torch.allclose(before.eval()(x), expected[0])  # type: ignore[arg-type]


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
    expected = results(layer, networks, x)
    with global_hook(register, lambda module, *args: seen.add(module) or hook(module, *args)):
        found = results(layer, networks, x)
    assert_same(found, expected)
    assert {m for network in networks for m in [network, *leaves_of(network)]} <= seen


@every_network
@pytest.mark.parametrize('copy', [deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=['deepcopy', 'pickle'])
def test_copies(make: Callable[..., nn.Module], copy: Callable[[Any], Any]) -> None:
    networks = make_networks(make)
    layer, x = make_layer(networks), tokens()
    copied = copy(layer)
    for found, expected in zip(
        results(copied, (copied.k_compress, copied.v_compress), x), results(layer, networks, x), strict=True
    ):
        assert found is expected is None or found.equal(expected)  # type: ignore[union-attr, arg-type]


@every_network
def test_functional_call(make: Callable[..., nn.Module]) -> None:
    """With other weights than the layer's, and their gradients."""
    layer, called = make_pair(make_networks(make))
    x, weights = tokens(), {name: torch.randn_like(p) for name, p in layer.named_parameters()}

    def loss(module: nn.Module, weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(module, weights, (x,)).sin().sum()

    def of_called(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.replace('_compress.', '_compress.network.'): w for name, w in weights.items()}

    found, value = torch.func.grad_and_value(lambda w: loss(layer, w))(weights)
    expected, wanted = torch.func.grad_and_value(lambda w: loss(called, of_called(w)))(weights)
    torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    layer.eval()
    decoded = decode(
        layer, x, lambda part, cache: torch.func.functional_call(layer, weights, (part,), {'cache': cache})
    )
    torch.testing.assert_close(decoded, torch.func.functional_call(layer, weights, (x,)), rtol=1e-9, atol=1e-11)


@every_network
def test_vmap(make: Callable[..., nn.Module]) -> None:
    """Over rows, and over an ensemble of weights with its gradients. Caches are written in place, so have no vmap."""
    layer, called = make_pair(make_networks(make))
    x = tokens(3)
    torch.testing.assert_close(torch.vmap(lambda row: layer(row[None])[0])(x), called(x), rtol=1e-9, atol=1e-11)
    weights = {name: torch.stack((p, p / 2)).detach() for name, p in layer.named_parameters()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, weights, (x,)).sin().sum()

    found = torch.vmap(torch.func.grad(loss))(weights)
    for member in range(2):
        own = {name.replace('_compress.', '_compress.network.'): w[member] for name, w in weights.items()}
        called.load_state_dict(own)
        expected = torch.autograd.grad(called(x).sin().sum(), [*called.parameters()])
        assert_same([gradient[member] for gradient in found.values()], [*expected])


def test_the_mean_is_a_fast_path_only_where_nothing_watches() -> None:
    pools, positions = (MeanPool(), MeanPool()), (torch.zeros(1), torch.zeros(1))
    assert Phi(pools, positions).is_mean
    pools[1].register_forward_hook(lambda *_: None)
    assert not Phi(pools, positions).is_mean


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
    """They get the input that they would get as modules: float32."""
    layer, seen = make_layer(make_networks(NETWORKS['mlp'])).float(), []
    layer.to_strategy_combine.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=['to_qkv']), layer)
    layer.to_qkv.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    with torch.autocast('cpu', torch.bfloat16):
        before = layer(tokens().float())
        nn.init.normal_(layer.get_parameter('to_qkv.lora_B.default.weight'))
        assert not torch.allclose(layer(tokens().float()), before)
    assert seen == [torch.float32] * 4


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    if not torch.distributed.is_available():
        pytest.skip('torch was built without distributed')
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    yield torch.distributed.init_device_mesh('cpu', (1,))
    torch.distributed.destroy_process_group()


@every_network
@pytest.mark.parametrize('kind', ['FSDP2', 'FSDP2 per leaf', 'FSDP1', 'FSDP1, original parameters'])
def test_sharding(make: Callable[..., nn.Module], kind: str, mesh: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    networks = make_networks(make)
    layer, x = make_layer(networks), tokens()
    sharded: Any = deepcopy(layer)
    expected = layer(x)
    expected.sin().sum().backward()
    if kind == 'FSDP2 per leaf':
        for module in [m for m in sharded.modules() if not [*m.children()] and [*m.parameters()]]:
            fully_shard(module, mesh=mesh)
    if kind.startswith('FSDP2'):
        sharded = fully_shard(sharded, mesh=mesh)
    else:
        sharded = FullyShardedDataParallel(sharded, device_id=torch.device('cpu'), use_orig_params='original' in kind)
    out = sharded(x)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
    out.sin().sum().backward()
    if kind != 'FSDP1':
        gradients = {n.replace('_fsdp_wrapped_module.', ''): p.grad for n, p in sharded.named_parameters()}
        for name, p in layer.named_parameters():
            grad: Any = gradients[name]
            grad = grad.full_tensor() if hasattr(grad, 'full_tensor') else grad
            torch.testing.assert_close(grad.view(p.shape), p.grad, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(decode(sharded.eval(), x), expected, rtol=1e-9, atol=1e-11)
