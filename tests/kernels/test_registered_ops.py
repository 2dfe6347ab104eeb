"""PyTorch's requirements on registered ops: fake tensors, autograd, tracing, transforms, autocast and checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from native_sparse_attention.losses import block_score_loss
from native_sparse_attention.ops import (
    chosen_scores,
    compressed_attention,
    gated_sum,
    rotary,
    select_blocks,
    selected_attention,
    straight_through_scale,
    window_attention,
)
from native_sparse_attention.ops.block_mass import block_mass
from native_sparse_attention.ops.rotary import norm_rotary, shared_input
from native_sparse_attention.testing import make_qkv
from tests.support.harness import run_triton, same_bits

NAMESPACE = 'native_sparse_attention'
T, BLOCK, STRIDE, SELECTION_BLOCK = 20, 4, 2, 4
C = (T - BLOCK) // STRIDE + 1
SIZES: dict[str, Any] = {
    'compress_block_size': BLOCK,
    'compress_stride': STRIDE,
    'selection_block_size': SELECTION_BLOCK,
}
Tensors = dict[str, Any]


def inputs(device: torch.device, keys: int = T) -> Tensors:
    return dict(zip('qkv', make_qkv(1, T, keys, heads=2, kv_heads=1, head_dim=16, device=device), strict=True))


def compressed(q: Tensor, k: Tensor, v: Tensor, mem_k: Tensor, mem_v: Tensor, **settings: Any) -> Any:
    return compressed_attention(q, k, v, block_size=BLOCK, stride=STRIDE, mem_kv=(mem_k, mem_v), **settings)


def windowed(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Any:
    return window_attention(q, k, v, window_size=(5, 0), **settings)


def featured(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bias: Tensor, ids: Tensor, **settings: Any) -> Any:
    attn_mask = (ids[:, :, None] + ids[:, None] < 5)[:, None]
    features: dict[str, Any] = {'sinks': sinks, 'bias': bias, 'attn_mask': attn_mask, 'segment_ids': ids, 'softcap': 2}
    return windowed(q, k, v, **features, dropout_p=0.2, dropout_seed=1, **settings)


def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **settings: Any) -> Any:
    return window_attention(q, k, v, window_size=(5, 0), cu_seqlens=cu_seqlens, **settings)


def selected(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_scale: Tensor, **settings: Any) -> Any:
    return selected_attention(q, k, v, indices, block_size=SELECTION_BLOCK, block_scale=block_scale, **settings)


def merged(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_scale: Tensor, sinks: Tensor, backend: str
) -> tuple[Tensor, Tensor]:
    settings: dict[str, Any] = {
        'block_size': SELECTION_BLOCK,
        'window_size': (4, 0),
        'unit_scale': True,
        'sinks': sinks,
    }
    return selected_attention(q, k, v, indices, block_scale=block_scale, **settings, backend=backend)


def selected_gated(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, gate: Tensor, **settings: Any) -> Any:
    return selected_attention(q, k, v, indices, block_size=SELECTION_BLOCK, gate=gate, **settings)


def selection(q: Tensor, k: Tensor, lse: Tensor, **settings: Any) -> Tensor:
    return select_blocks(q, k, lse, num_selected=3, **SIZES, **settings)


def mass(q: Tensor, k: Tensor, **settings: Any) -> Tensor:
    return block_mass(q, k, block_size=SELECTION_BLOCK, window_size=(5, 0), **settings)


def diverge(q_cmp: Tensor, k_cmp: Tensor, **settings: Any) -> Tensor:
    q, k = q_cmp.detach(), q_cmp.detach()[:, :, :1].flip(1)
    return block_score_loss(q, k, q_cmp, k_cmp, **SIZES, window_size=(5, 0), num_queries=9, seed=0, **settings)


def scores(q: Tensor, k: Tensor, lse: Tensor, indices: Tensor, **settings: Any) -> Tensor:
    return chosen_scores(q, k, lse, indices, **SIZES, **settings)


def scale_of(q: Tensor, k: Tensor, lse: Tensor, indices: Tensor, **settings: Any) -> Tensor:
    return straight_through_scale(q, k, lse, indices, num_init=1, num_local=0, **SIZES, **settings)


def make_indices(device: torch.device) -> Tensors:
    return {'indices': torch.arange(3, dtype=torch.int32, device=device).expand(1, T, 1, 3).contiguous()}


def make_selected(device: torch.device) -> Tensors:
    block_scale = torch.rand(1, T, 1, 3, device=device) + 0.5
    return inputs(device) | make_indices(device) | {'block_scale': block_scale}


def make_selection(device: torch.device) -> Tensors:
    tensors = inputs(device, C)
    _, lse = compressed_attention(**_renamed(tensors), block_size=BLOCK, stride=STRIDE, backend='eager')
    return {'q': tensors['q'], 'k': tensors['k'], 'lse': lse}


def _renamed(tensors: Tensors) -> Tensors:
    return {'q': tensors['q'], 'k_cmp': tensors['k'], 'v_cmp': tensors['v']}


def make_memory(device: torch.device) -> Tensors:
    return {name: torch.randn(1, 2, 16, device=device) for name in ('mem_k', 'mem_v')}


def make_features(device: torch.device) -> Tensors:
    ids = torch.arange(T, dtype=torch.int32, device=device)[None] // 7
    return {'sinks': torch.randn(2, device=device), 'bias': torch.randn(1, 1, T, T, device=device), 'ids': ids}


def make_outs(device: torch.device) -> Tensors:
    names = ('out_compressed', 'out_selected', 'out_window')
    return {name: torch.randn(1, T, 2, 16, device=device) for name in names}


def make_gated(device: torch.device) -> Tensors:
    return {'gates': torch.rand(1, T, 2, 3, device=device)} | make_outs(device)


def make_gate(device: torch.device) -> Tensors:
    return {'gate': torch.rand(1, T, 2, device=device)}


def gate_in_attention(out_compressed: Tensor, out_selected: Tensor, out_window: Tensor, **settings: Any) -> Tensor:
    gates = out_compressed.detach()[..., :3].sigmoid()
    return gated_sum(gates, out_compressed, out_selected, out_window, gate_in_attention=True, **settings)


def rotated(x: Tensor, positions: Tensor, **settings: Any) -> Tensor:
    angles = positions[..., None] / torch.arange(1, 7, device=x.device)
    return rotary(x, angles.cos(), angles.sin(), **settings)


def shared(x: Tensor, positions: Tensor, **settings: Any) -> Tensor:
    angles = positions[..., None] / torch.arange(1, 7, device=x.device)
    return torch.stack(shared_input(x, 1, 2, (angles.cos(), angles.sin()), **settings))


def normalised(x: Tensor, weight: Tensor, positions: Tensor, **settings: Any) -> Tensor:
    angles = positions[..., None] / torch.arange(1, 7, device=x.device)
    return torch.stack(norm_rotary(x, weight, 1, 2, (angles.cos(), angles.sin()), eps=1e-6, **settings))


def make_normalised(device: torch.device) -> Tensors:
    positions = torch.arange(T, device=device)[None]
    return {'x': inputs(device)['q'], 'weight': torch.rand(16, device=device) + 0.5, 'positions': positions}


# Every public op with a Triton backend: how to call it, and how to make its tensors.
OPS: dict[str, tuple[Callable[..., Any], Callable[[torch.device], Tensors]]] = {
    'window': (windowed, inputs),
    'features': (featured, lambda d: inputs(d) | make_features(d)),
    'packed': (packed, lambda d: inputs(d) | {'cu_seqlens': torch.tensor([0, 7, T], dtype=torch.int32, device=d)}),
    'compressed': (compressed, lambda d: inputs(d, C) | make_memory(d)),
    'selected': (selected, make_selected),
    'merged': (merged, lambda d: make_selected(d) | {'sinks': torch.zeros(inputs(d)['q'].shape[2], device=d)}),
    'window, gated': (windowed, lambda d: inputs(d) | make_gate(d)),
    'features, gated': (featured, lambda d: inputs(d) | make_features(d) | make_gate(d)),
    'compressed, gated': (compressed, lambda d: inputs(d, C) | make_memory(d) | make_gate(d)),
    'selected, gated': (selected_gated, lambda d: inputs(d) | make_indices(d) | make_gate(d)),
    'selection': (selection, make_selection),
    'mass': (mass, lambda d: {name: t for name, t in inputs(d).items() if name != 'v'}),
    'divergence': (diverge, lambda d: {'q_cmp': inputs(d)['q'], 'k_cmp': inputs(d, C)['k']}),
    'scores': (scores, lambda d: make_selection(d) | {'indices': make_selected(d)['indices']}),
    'scale': (scale_of, lambda d: make_selection(d) | {'indices': make_selected(d)['indices']}),
    'gated sum': (gated_sum, make_gated),
    'gated sum, gate in attention': (gate_in_attention, make_outs),
    'rotary': (rotated, lambda d: {'x': inputs(d)['q'], 'positions': torch.arange(T, device=d)[None]}),
    'norm and rotary': (normalised, make_normalised),
    'shared input': (shared, lambda d: {'x': inputs(d)['q'], 'positions': torch.arange(T, device=d)[None]}),
}
DIFFERENTIABLE = [name for name in OPS if name not in ('selection', 'mass')]
# The loss of the block scores calls it, too.
WITHOUT_GRADIENT = ('block_mass',)

every_op = pytest.mark.parametrize('name', DIFFERENTIABLE)


class Recorder(TorchDispatchMode):
    """Record the calls of the package's registered ops, one per op."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == NAMESPACE:
            self.calls.setdefault(func._schema.name.split('::')[1], (func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def record(name: str, device: torch.device) -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    op, make = OPS[name]
    tensors = make(device)
    with Recorder() as recorder:
        run_triton(op, tensors) if name in DIFFERENTIABLE else op(**tensors, backend='triton')
    assert recorder.calls
    return recorder.calls


@pytest.mark.parametrize('requires_grad', [False, True])
def test_a_view_that_negates(device: torch.device, requires_grad: bool) -> None:
    """PyTorch resolves the negation before kernels see the memory."""
    tensors = {name: t.requires_grad_(requires_grad) for name, t in inputs(device).items()}
    q = torch.complex(torch.zeros_like(tensors['q']), tensors['q'].detach()).conj().imag
    assert q.is_neg()
    out, lse = windowed(**tensors | {'q': q}, backend='triton')
    expected, expected_lse = windowed(**tensors | {'q': q.resolve_neg()}, backend='triton')
    assert same_bits(out, expected)
    assert same_bits(lse, expected_lse)
    assert out.requires_grad == requires_grad


def leaf(value: Any, requires_grad: bool) -> Any:
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(requires_grad and value.is_floating_point())
    return value


@pytest.mark.quick
def test_every_registered_op_is_among_those_that_are_checked(device: torch.device) -> None:
    checked = {op for name in OPS for op in record(name, device)}
    schemas = torch._C._jit_get_all_schemas()
    registered = {s.name.split('::')[1] for s in schemas if s.name.startswith(f'{NAMESPACE}::')}
    # tests/ops/test_flex.py checks the op of the flex backend, which has no kernel, and test_replay_conditions.py the
    # one of recorded calls.
    assert registered - {'list_flex_tiles', 'nsa_backward'} == checked


@pytest.mark.quick
@pytest.mark.plain_memory  # it compares where in its buffer a result lies
@pytest.mark.parametrize('name', OPS)
def test_opcheck(name: str, device: torch.device) -> None:
    for op, (function, args, kwargs) in record(name, device).items():
        differentiable = name in DIFFERENTIABLE and not op.endswith('backward') and op not in WITHOUT_GRADIENT
        leaves = tuple(leaf(value, differentiable) for value in args)
        torch.library.opcheck(function, leaves, kwargs)


# The others are linear, and their own derivative.
@pytest.mark.quick
@pytest.mark.parametrize(
    'name', [n for n in DIFFERENTIABLE if n not in ('rotary', 'shared input', 'gated sum, gate in attention')]
)
def test_a_second_derivative_is_refused(name: str, device: torch.device) -> None:
    op, make = OPS[name]
    leaves = {n: leaf(t, True) for n, t in make(device).items()}
    out = op(**leaves, backend='triton')
    out = out if isinstance(out, Tensor) else out[0]
    wanted = [t for t in leaves.values() if t.requires_grad]
    grads = torch.autograd.grad(out.square().sum(), wanted, create_graph=True, allow_unused=True)
    total = sum(grad.square().sum() for grad in grads if grad is not None)
    assert isinstance(total, Tensor)
    with pytest.raises(RuntimeError, match='has no second derivative: use backend="eager"'):
        total.backward()


@pytest.mark.parametrize('name', OPS)
@pytest.mark.parametrize('transform', [torch.func.vmap, torch.func.grad])
def test_transforms_of_torch_func_are_refused(transform: Callable[..., Any], name: str, device: torch.device) -> None:
    op, make = OPS[name]
    tensors = make(device)

    first, value = next(iter(tensors.items()))

    def run(x: Tensor) -> Any:
        return op(**(tensors | {first: x}), backend='triton')

    with pytest.raises(ValueError, match=r'torch\.func transforms'):
        transform(run)(torch.stack([value, value]) if transform is torch.func.vmap else value)


@every_op
def test_autocast_changes_nothing(name: str, device: torch.device) -> None:
    op, make = OPS[name]
    tensors = make(device)

    def under_autocast(**leaves: Any) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return op(**leaves)

    result, expected = run_triton(under_autocast, tensors), run_triton(op, tensors)
    for n in expected:
        assert same_bits(result[n], expected[n]), n


@every_op
@pytest.mark.parametrize('use_reentrant', [True, False])
def test_checkpointing_changes_nothing(use_reentrant: bool, name: str, device: torch.device) -> None:
    op, make = OPS[name]
    tensors = make(device)

    def checkpointed(**leaves: Any) -> Any:
        def run(*values: Any) -> Any:
            return op(**dict(zip(leaves, values, strict=False)), backend='triton')

        backend = leaves.pop('backend')
        assert backend == 'triton'
        return checkpoint(run, *leaves.values(), use_reentrant=use_reentrant)

    result, expected = run_triton(checkpointed, tensors), run_triton(op, tensors)
    for n in expected:
        assert same_bits(result[n], expected[n]), n


@every_op
def test_each_gradient_alone(name: str, device: torch.device) -> None:
    op, make = OPS[name]
    tensors = make(device)
    expected = run_triton(op, tensors)
    for wanted in (n for n, t in tensors.items() if t.is_floating_point()):
        leaves = {n: leaf(t, n == wanted) for n, t in tensors.items()}
        outputs = op(**leaves, backend='triton')
        outputs = [t for t in ((outputs,) if isinstance(outputs, Tensor) else outputs) if t.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
        assert same_bits(leaves[wanted].grad, expected[f'grad of {wanted}']), wanted
        assert all(t.grad is None for n, t in leaves.items() if n != wanted)


@pytest.mark.parametrize('name', OPS)
def test_no_gradient_is_no_graph(name: str, device: torch.device) -> None:
    op, make = OPS[name]
    outputs = op(**make(device), backend='triton')
    for t in (outputs,) if isinstance(outputs, Tensor) else outputs:
        assert not t.requires_grad
