"""Private interfaces of PyTorch and Triton: used in three files, each with a feature test and a public fallback."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as module_hooks

from native_sparse_attention import SparseAttention
from native_sparse_attention.autograd.saved_rotary import recompute_rotated
from native_sparse_attention.compress import CompressTransformer, ConvLinearCompress, GroupedMLP, MeanPool
from native_sparse_attention.core import private, private_recording, private_triton
from native_sparse_attention.nn.rotary import angle_tables, rotate
from native_sparse_attention.ops import _flex
from tests.tools.test_import import FILES, PACKAGE

PRIVATE = PACKAGE / 'core' / 'private.py'
# Recording calls needs interfaces of its own, and nothing is recorded without them.
RECORDING = PACKAGE / 'core' / 'private_recording.py'
TRITON = PACKAGE / 'core' / 'private_triton.py'
# Methods of a namedtuple, which are public.
OF_TUPLES = {'_asdict', '_replace', '_fields', '_make'}
# Undocumented attributes of Triton's kernels, compiled kernels and descriptors.
OF_TRITON = {'fn', 'arg_names', 'packed_metadata', 'launch_enter_hook', 'launch_exit_hook'}
TRITON_MODULES = ('triton.language', 'triton.tools.tensor_descriptor')
# PyTorch calls these methods of a module. Rotary keeps frequencies in float32 by them, and checks that in forward; a
# model keeps its tied weights, which `load_state_dict` ties again.
OVERRIDDEN = {('rotary.py', '_apply'), ('rotary.py', '_load_from_state_dict'), ('start.py', '_apply')}


def is_private(name: str) -> bool:
    return name.startswith('_') and not name.startswith('__')


@cache
def own_names() -> set[str]:
    """Return every name that the package defines itself, and those of namedtuples."""
    names = set(OF_TUPLES)
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding='utf-8'))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


def private_uses(source: str, file: str = '') -> Iterator[str]:
    """Return the private names that a source uses."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            is_foreign = is_private(node.attr) and node.attr not in own_names()
            if is_foreign or text == 'object.__new__' or node.attr in OF_TRITON or text.startswith('torch._'):
                yield text
        elif isinstance(node, ast.Import | ast.ImportFrom):
            base = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in ('.'.join([*base, alias.name]) for alias in node.names):
                top, *rest = name.split('.')
                if top == 'triton' and rest and not name.startswith(TRITON_MODULES):
                    yield name
                if top in ('torch', 'triton') and any(map(is_private, rest)):
                    yield name
        elif isinstance(node, ast.ClassDef):
            methods = [n.name for n in node.body if isinstance(n, ast.FunctionDef) and is_private(n.name)]
            if not any('Module' in ast.unparse(parent) for parent in node.bases):
                continue
            yield from (m for m in methods if hasattr(nn.Module, m) and (file, m) not in OVERRIDDEN)


@pytest.mark.parametrize('file', FILES, ids=[str(file.relative_to(PACKAGE)) for file in FILES])
def test_private_interfaces_are_used_in_three_files(file: Path) -> None:
    uses = list(private_uses(file.read_text(encoding='utf-8'), file.name))
    assert bool(uses) == (file in (PRIVATE, RECORDING, TRITON)), f'reaches into {uses}: use core/private*.py'


@pytest.mark.parametrize(
    'source',
    [
        'torch._C._are_functorch_transforms_active()',
        'torch._dynamo.config.patch({})',
        'import torch._dynamo',
        'from torch._C import _autograd',
        'from torch.utils._python_dispatch import TorchDispatchMode',
        'from triton.runtime import driver',
        'from triton import knobs',
        'import triton.compiler',
        'module._forward_hooks',
        'tensor._version',
        'op._opoverload',
        'object.__new__(TensorDescriptor)',
        'compiled.run(1, compiled.packed_metadata)',
        'class A(nn.Module):\n    def _apply(self, fn): ...',
    ],
)
def test_private_uses_are_found(source: str) -> None:
    assert list(private_uses(source))


# --- PyTorch ---


def without(owner: Any, name: str) -> ModuleType:
    """Return core/private.py, loaded without some interface of PyTorch."""
    spec = importlib.util.spec_from_file_location('private_without', PRIVATE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, 'private_without', module)
        patch.delattr(owner, name)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ('owner', 'name', 'changed'),
    [
        (torch._C, '_are_functorch_transforms_active', 'is_transformed'),
        (forward_ad, '_current_level', 'is_forward_ad'),
        (torch._C, '_len_torch_dispatch_stack', 'may_be_dispatched'),
        (module_hooks, '_global_backward_hooks', 'is_plain'),
        (torch._C._autograd, '_saved_tensors_hooks_is_enabled', 'saved_tensor_hooks'),  # type: ignore[attr-defined]
        (torch._C._autograd, '_top_saved_tensors_default_hooks', 'saved_tensor_hooks'),  # type: ignore[attr-defined]
    ],
)
def test_a_missing_interface_has_a_fallback(owner: Any, name: str, changed: str) -> None:
    """No other interface falls back with it."""
    kinds = ('is_transformed', 'is_forward_ad', 'may_be_dispatched', 'is_plain', 'saved_tensor_hooks')
    here, there = private, without(owner, name)
    x = torch.zeros(3)
    x.add_(1)

    def is_fast(module: ModuleType) -> dict[str, bool]:
        return {
            'is_transformed': module.is_transformed is not module._test_transforms,
            'is_forward_ad': module.is_forward_ad is not module._test_forward_ad,
            'may_be_dispatched': not module.may_be_dispatched(),
            'is_plain': module.is_plain(nn.Linear(2, 2), (nn.Linear,)) and not module.runs_hooks(nn.Linear(2, 2)),
            'saved_tensor_hooks': module.saved_tensor_hooks.is_free() and module.saved_tensor_hooks.version_of(x) == 1,
        }

    assert is_fast(here) == dict.fromkeys(kinds, True)
    assert is_fast(there) == {kind: kind != changed for kind in kinds}


@pytest.mark.parametrize(
    'name',
    [
        '_len_torch_dispatch_stack', '_get_tracing_state', '_are_functorch_transforms_active',
        '_dispatch_tls_is_dispatch_key_excluded',
    ],
)  # fmt: skip
def test_nothing_is_recorded_without_an_interface(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert private_recording.find_recording() is not None
    monkeypatch.delattr(torch._C, name)
    assert private_recording.find_recording() is None


def test_the_state_of_a_model_is_read_anew() -> None:
    for state_of in (private.state_of, private._listed_state):
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        read = state_of(model)
        assert {id(t) for t in read().tensors} == {id(t) for t in (*model.parameters(), *model.buffers())}
        model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
        assert {id(t) for t in read().tensors} == {id(t) for t in (*model.parameters(), *model.buffers())}
        assert not read().is_hooked
        handle = model[0].register_forward_pre_hook(print)
        assert read().is_hooked
        handle.remove()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model[0], 'forward', print)
            assert read().is_hooked
        model[0] = nn.Identity()
        assert model[0] in read().modules
    assert private.state_of is private._known_state


class Divided(Tensor):
    """Stand in for a DTensor: it has a part of a rank."""

    _local_tensor: Tensor

    def to_local(self) -> Tensor:
        return self._local_tensor


def test_the_state_of_a_divided_model_has_the_parts_of_the_rank() -> None:
    for state_of in (private.state_of, private._listed_state):
        model = nn.Linear(2, 3)
        parameter: Any = nn.Parameter(torch.zeros(3, 2).as_subclass(Divided))
        model.weight, parameter._local_tensor = parameter, torch.zeros(1, 2)
        read = state_of(model)
        assert {id(t) for t in read().tensors} == {id(model.bias), id(parameter._local_tensor)}
        parameter._local_tensor = torch.zeros(1, 2)
        assert {id(t) for t in read().tensors} == {id(model.bias), id(parameter._local_tensor)}
    del parameter._local_tensor
    parameter.to_local = lambda: model.bias
    assert [t is model.bias for t in private.state_of(model)().tensors] == [True, True]


def test_transforms_detected_by_refusal() -> None:
    found: list[tuple[bool, bool, bool, bool]] = []

    def look(x: Tensor) -> Tensor:
        found.append(
            (private.is_transformed(), private._test_transforms(), private.is_forward_ad(), private._test_forward_ad())
        )
        return x * 2

    x = torch.ones(2)
    with torch.inference_mode():
        look(x)
    with torch.no_grad(), forward_ad.dual_level():
        look(x)
    look(x)
    assert found == [(False, False, False, False), (False, False, True, True), (False, False, False, False)]
    torch.func.vmap(look)(x)
    torch.func.grad(lambda x: look(x).sum())(x)
    torch.func.vmap(torch.func.grad(lambda x: look(x).sum()))(x)
    torch.func.jvp(look, (x,), (x,))
    assert len(found) == 7
    assert all(fast == slow for fast, slow, _, _ in found)
    assert all(fast == slow for _, _, fast, slow in found)
    assert all(transformed for transformed, _, _, _ in found[3:])


FALLBACKS: dict[str, Any] = {
    'is_transformed': private._test_transforms,
    'is_forward_ad': private._test_forward_ad,
    'may_be_dispatched': lambda: True,
    'is_plain': lambda module, types: False,
    'saved_tensor_hooks': private.SavedTensorHooks(lambda: False, lambda t: 0),
}
NETWORKS: dict[str, Callable[[], nn.Module | None]] = {
    'mlp': lambda: None,
    'mean': MeanPool,
    'conv': lambda: ConvLinearCompress(2, 4, 4),
    'grouped': lambda: GroupedMLP(4, 4, 2),
    'transformer': lambda: CompressTransformer(1, 8, 2),
}


def results(layer: SparseAttention, x: Tensor) -> list[Tensor]:
    """Return output, gradients, and a prefill with two steps of decoding."""
    x = x.detach().requires_grad_()
    out = layer(x)
    grads = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()], allow_unused=True)
    layer.eval()
    with torch.no_grad():
        decoded, cache = layer(x[:, :-2], return_cache=True)
        steps = []
        for token in (x[:, -2:-1], x[:, -1:]):
            step, cache = layer(token, cache=cache, return_cache=True)
            steps.append(step)
    layer.train()
    return [out, *(grad for grad in grads if grad is not None), decoded, *steps]


@pytest.mark.parametrize('network', NETWORKS)
def test_a_layer_on_fallbacks(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    phi = NETWORKS[network]()
    layer = SparseAttention(8, 4, 4, 3, 4, 2, 4, 4, kv_heads=2, causal=True, compress_mlp=phi, backend='eager').double()
    x = torch.randn(2, 13, 8, dtype=torch.float64)
    expected = results(layer, x)
    for name, fallback in FALLBACKS.items():
        monkeypatch.setattr(private, name, fallback)
    found = results(layer, x)
    assert len(found) == len(expected)
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-10, atol=1e-12)


def test_nothing_is_saved_by_hooks_on_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip('triton')
    tables = angle_tables(torch.arange(5)[None], torch.tensor([0.3, 2.0]))

    def gradient() -> tuple[Tensor, Any]:
        x = torch.randn(1, 5, 2, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
        (rotated,) = rotate(tables, 'triton', x)
        with recompute_rotated(x, tables, 'triton', rotated) as context:
            out = rotated.square().sum()
        return torch.autograd.grad(out, x)[0], context

    expected, hooks = gradient()
    monkeypatch.setattr(private, 'saved_tensor_hooks', FALLBACKS['saved_tensor_hooks'])
    found, nothing = gradient()
    assert (hooks is None, nothing) == (True, None)
    assert found.equal(expected)


def test_graphs_without_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each length has a graph, and calls beyond the limit of graphs are not compiled."""
    assert private.find_graphs(_flex.GRAPH_SETTINGS).are_unlimited
    graphs = private.find_graphs(['no_such_setting'])
    assert not graphs.are_unlimited
    monkeypatch.setattr(_flex, '_graphs', lambda: graphs)
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend='eager'))
    double = _flex._compiled.__wrapped__(lambda x: (x * 2, x))
    with graphs.patch(_flex.GRAPH_SETTINGS):
        for length in range(12):
            assert double(torch.ones(length))[0].equal(torch.full((length,), 2.0))


def test_a_python_without_compile_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError('torch.compile is not supported')

    assert _flex._is_compile_supported.__wrapped__() == torch._dynamo.is_dynamo_supported()
    monkeypatch.setattr(torch, 'compile', refuse)
    assert not _flex._is_compile_supported.__wrapped__()


# Run in a process of its own, as ops are registered when they are imported.
REGISTERED = """
import sys
import torch
from native_sparse_attention.core import private, private_recording, private_triton
if sys.argv[1] == 'fallback':
    private.register_derivative = lambda op, backward, save: False
from native_sparse_attention.ops import gated_sum, window_attention
torch.manual_seed(0)
q, k, v = (torch.randn(1, 9, heads, 16, requires_grad=True) for heads in (2, 1, 1))
gates = torch.rand(1, 9, 2, 3, requires_grad=True)
out, lse = window_attention(q, k, v, window_size=(4, 0), backend='triton')
out = gated_sum(gates, out, out, out, backend='triton')
grads = torch.autograd.grad(out.sum(), [q, k, v, gates], create_graph=True)
try:
    torch.autograd.grad(grads[0].sum(), k)
except RuntimeError as error:
    assert 'native_sparse_attention::' in str(error) and 'has no second derivative' in str(error), error
else:
    raise AssertionError
with torch.no_grad():
    plain = window_attention(q, k, v, window_size=(4, 0), backend='triton')[0]
torch.save([t.detach() for t in (out, lse, plain, *grads)], sys.argv[2])
"""


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='triton is installed on Linux')
def test_ops_as_pytorch_registers_them(tmp_path: Path) -> None:
    found = []
    for kind in ('fast', 'fallback'):
        file = tmp_path / kind
        done = subprocess.run(
            [sys.executable, '-c', REGISTERED, kind, str(file)],
            env=os.environ | {'TRITON_INTERPRET': '1', 'CUDA_VISIBLE_DEVICES': ''},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        found.append(torch.load(file))
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


def test_an_op_of_other_makings_is_left_alone() -> None:
    op: Any = SimpleNamespace(_name='other')
    assert not private.register_derivative(op, lambda: None, lambda: None)
    assert private.qualified_name(op) == repr(op)


# --- Triton ---


def test_triton_as_it_is_known() -> None:
    """The installed Triton has every interface that the fast path needs."""
    pytest.importorskip('triton')
    assert private_triton.find_launcher() is not None
    assert private_triton.find_describer().__name__ == 'describe_unchecked'
    assert private_triton.find_launcher_builder().__name__ == 'build'


def test_a_triton_that_launches_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = pytest.importorskip('triton.runtime')
    compiler = pytest.importorskip('triton.backends.nvidia.compiler')
    with monkeypatch.context() as patch:
        patch.setattr(jit.JITFunction, 'run', lambda self, *args: None)
        assert private_triton.find_launcher() is None
    with monkeypatch.context() as patch:
        patch.setattr(compiler.CUDABackend, 'get_tensor_specialization', lambda arg, align: str(arg.shape))
        assert private_triton.find_launcher() is None
    with monkeypatch.context() as patch:
        patch.delattr('triton.knobs.runtime')
        assert private_triton.find_launcher() is None
    assert private_triton.find_launcher() is not None


def test_a_triton_that_builds_launchers_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first launch builds the launcher then."""
    compiler = pytest.importorskip('triton.compiler')
    monkeypatch.setattr(compiler.CompiledKernel, '_init_handles', lambda self: None)
    assert private_triton.find_launcher_builder()(SimpleNamespace()) is None


def test_descriptors_of_other_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor with other fields is made by its constructor."""
    module = pytest.importorskip('triton.tools.tensor_descriptor')

    @dataclass
    class Counted(module.TensorDescriptor):
        def __post_init__(self) -> None:
            super().__post_init__()
            self.count = len(self.shape)

    x = torch.zeros(4, 16)
    layout = {'shape': [4, 16], 'strides': [16, 1], 'block_shape': [2, 16]}
    fast = private_triton.find_describer()(x, layout)
    assert fast == module.TensorDescriptor(x, **layout)
    monkeypatch.setattr(module, 'TensorDescriptor', Counted)
    describe = private_triton.find_describer()
    assert describe.__name__ == 'describe'
    assert describe(x, layout).count == 2
