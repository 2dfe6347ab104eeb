"""Tensors that the layer saves for the backward pass, which recomputes rotated queries; with `recompute=True` fewer.
Neither changes a bit.
"""

from __future__ import annotations

import gc
import warnings
from contextlib import suppress
from typing import Any

import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.transformer import Transformer

DIM = 12
SIZES: dict[str, Any] = {
    'dim': DIM,
    'dim_head': 6,
    'heads': 4,
    'kv_heads': 2,
    'sliding_window_size': 5,
    'compress_block_size': 4,
    'compress_block_sliding_stride': 2,
    'selection_block_size': 4,
    'num_selected_blocks': 4,
    'causal': True,
}
SETTINGS: dict[str, dict[str, Any]] = {
    'default': {},
    'diff_topk': {'use_diff_topk': True},
    'heads alone': {'query_heads_share_selected_kv': False, 'use_diff_topk': True},
    'own branches': {'independent_branch_kv': True},
    'qk norm': {'qk_norm': True},
    'no selection': {'num_selected_blocks': 0},
    'no rotary': {'rotary_emb': False},
    'learned rotary': {'rotary_emb': RotaryEmbedding(4, learned_freq=True)},
    'not causal': {'causal': False, 'num_selected_blocks': 6},
}
INPUTS: dict[str, dict[str, Tensor]] = {
    'whole': {},
    'padded': {'mask': torch.tensor([[0] * 5 + [1] * 12, [1] * 17], dtype=torch.bool)},
    'packed': {'cu_seqlens': torch.tensor([0, 5, 5, 16], dtype=torch.int32)},
}


def make_layers(dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[SparseAttention, SparseAttention]:
    """Return a layer that saves everything, and one with the same weights that recomputes."""
    layers = []
    for recompute in (False, True):
        torch.manual_seed(0)
        layer = SparseAttention(**SIZES | settings, recompute=recompute)
        for parameter in layer.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.5)
        layers.append(layer.to(dtype))
    return layers[0], layers[1]


def run(layer: SparseAttention, x: Tensor, compiled: Any = None, **inputs: Any) -> list[Tensor]:
    """Return output and gradients of the layer, or of its compiled form."""
    x = x.clone().requires_grad_()
    out = (layer if compiled is None else compiled)(x, **inputs)
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    return [out, *torch.autograd.grad(out.float().sin().sum(), leaves, materialize_grads=True)]


def assert_same_bits(layers: tuple[SparseAttention, SparseAttention], x: Tensor, **inputs: Any) -> None:
    kept, again = (run(layer, x, **inputs) for layer in layers)
    for a, b in zip(kept, again, strict=True):
        assert a.dtype == b.dtype
        assert a.isfinite().all()
        assert a.equal(b)


@pytest.mark.parametrize(('name', 'backend'), [('default', 'auto'), ('default', 'triton'), ('learned rotary', 'auto')])
def test_parameters_that_have_other_values_by_then(name: str, backend: str, device: torch.device) -> None:
    """The backward pass uses the parameters of a functional call, which the module no longer has."""
    layers, x = make_layers(**SETTINGS[name], backend=backend), torch.randn(2, 17, DIM).to(device)
    gradients = []
    for layer in layers:
        torch.manual_seed(1)
        parameters = layer.to(device).named_parameters()
        given = {n: (p + torch.randn_like(p)).detach().requires_grad_() for n, p in parameters}
        out = torch.func.functional_call(layer, given, (x,))
        gradients.append(torch.autograd.grad(out.sin().sum(), [*given.values()], materialize_grads=True))
    for a, b in zip(*gradients, strict=True):
        assert a.equal(b)


@pytest.mark.parametrize('merge_window', [False, True])
def test_parameters_that_change_in_place(merge_window: bool) -> None:
    """Gradients are those of the old values, or PyTorch refuses the backward pass, as without recompute."""
    settings: dict[str, Any] = {'num_sinks': 2, 'use_diff_topk': True, 'merge_window': merge_window}
    x, results = torch.randn(2, 17, DIM), dict[Any, Any]()
    names = [name for name, _ in make_layers(**settings)[0].named_parameters()]
    for changed in (None, *names):
        for layer in make_layers(**settings):
            out, parameters = layer(x), dict(layer.named_parameters())
            with torch.no_grad():
                if changed is not None:
                    parameters[changed].add_(1)
            gradients: list[Tensor] | None = None
            with suppress(RuntimeError):
                gradients = list(torch.autograd.grad(out.sin().sum(), list(parameters.values())))
            results[changed, layer.recompute] = gradients
    expected = results[None, False]
    for (changed, recompute), gradients in results.items():
        assert (gradients is None) == (results[changed, False] is None), (changed, recompute)
        if gradients is not None:
            assert all(a.equal(b) for a, b in zip(gradients, expected, strict=True)), (changed, recompute)
    refused = {changed for (changed, _), gradients in results.items() if gradients is None}
    assert 'to_qkv.weight' in refused
    assert not refused & {'compress_mem_k', 'compress_mem_v', 'window_sinks', 'compress_sinks'}


@pytest.mark.parametrize('kind', INPUTS)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('name', SETTINGS)
def test_gradients_have_the_same_bits(name: str, dtype: torch.dtype, kind: str) -> None:
    x = torch.randn(1 if kind == 'packed' else 2, 17, DIM).to(dtype)
    assert_same_bits(make_layers(dtype, **SETTINGS[name], backend='eager'), x, **INPUTS[kind])


@pytest.mark.full
@pytest.mark.parametrize(
    ('name', 'kind', 'dtype'),
    [
        ('diff_topk', 'packed', torch.float16),
        ('own branches', 'whole', torch.float32),
        ('no selection', 'whole', torch.float16),
        ('learned rotary', 'whole', torch.float32),
    ],
)
def test_gradients_of_the_kernels_have_the_same_bits(
    name: str, kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    layers = make_layers(dtype, **SETTINGS[name], backend='triton')
    x = torch.randn(1, 17, DIM).to(device, dtype)
    inputs = {key: value.to(device) for key, value in INPUTS[kind].items()}
    assert_same_bits((layers[0].to(device), layers[1].to(device)), x, **inputs)


@pytest.mark.gpu
@pytest.mark.parametrize('backend', ['triton', 'flex'])
@pytest.mark.parametrize('kind', ['whole', 'packed'])
@pytest.mark.parametrize('use_diff_topk', [True, False])
def test_gradients_at_a_size_of_use_have_the_same_bits(
    use_diff_topk: bool, kind: str, backend: str, device: torch.device
) -> None:
    sizes = {
        'dim': 256,
        'dim_head': 64,
        'heads': 32,
        'kv_heads': 2,
        'sliding_window_size': 64,
        'compress_block_size': 32,
        'compress_block_sliding_stride': 16,
        'selection_block_size': 64,
        'num_selected_blocks': 8,
    }
    layers = make_layers(torch.bfloat16, **sizes, use_diff_topk=use_diff_topk, backend=backend)
    borders = torch.tensor([0, 700, 700, 2040], dtype=torch.int32, device=device)
    x = torch.randn(1, 2048, 256, device=device).bfloat16()
    inputs = {'cu_seqlens': borders} if kind == 'packed' else {}
    layers = layers[0].to(device), layers[1].to(device)
    if backend == 'flex' and use_diff_topk:
        # FlexAttention adds gradients of factors in any order.
        for kept, again in zip(*(run(layer, x, **inputs) for layer in layers), strict=True):
            torch.testing.assert_close(again, kept, rtol=0.02, atol=0.02 * kept.abs().max().item())
    else:
        assert_same_bits(layers, x, **inputs)


def test_autocast() -> None:
    layers = make_layers(use_diff_topk=True)
    with torch.autocast('cpu', torch.bfloat16):
        assert_same_bits(layers, torch.randn(2, 17, DIM))


def test_second_derivatives() -> None:
    results = []
    x = torch.randn(1, 11, DIM, dtype=torch.float64, requires_grad=True)
    for layer in make_layers(torch.float64, use_diff_topk=True):
        (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), x)[0])
    assert results[0].equal(results[1])


@pytest.mark.full
@pytest.mark.parametrize('backend', ['eager', 'triton'])
def test_compiles(backend: str, device: torch.device) -> None:
    torch._dynamo.reset()
    layer = make_layers(use_diff_topk=True, backend=backend)[1].to(device)
    x = torch.randn(1, 9, DIM).to(device)
    compiler = 'inductor' if device.type == 'cuda' else 'aot_eager'
    compiled: Any = torch.compile(layer, fullgraph=True, backend=compiler)
    torch.testing.assert_close(run(layer, x, compiled), run(layer, x))
    torch._dynamo.reset()


class Calls(TorchDispatchMode):
    """Count the calls of each registered op of the package."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == 'native_sparse_attention':
            name = func._schema.name.split('::')[1]
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.full
def test_blocks_are_selected_once(device: torch.device) -> None:
    # The second layer recomputes k too.
    for layer, times, again in zip(make_layers(backend='triton'), (1, 2), (1, 2), strict=True):
        with Calls() as calls:
            run(layer.to(device), torch.randn(1, 9, DIM).to(device))
        assert calls.counts['select_blocks'] == 1
        assert calls.counts['selected_attention'] == times
        assert calls.counts['interval_attention'] == 2 * times
        # q and k, their recomputed forms, and their gradients
        assert calls.counts['rotary'] == 2 + again
        assert calls.counts['add_gradients'] == 2


@pytest.mark.parametrize('recompute', [False, True])
@pytest.mark.parametrize('backend', ['eager', 'triton'])
def test_a_graph_that_is_retained(backend: str, recompute: bool, device: torch.device) -> None:
    layer = make_layers(use_diff_topk=True, backend=backend)[recompute]
    x = torch.randn(1, 9, DIM).to(device).requires_grad_()
    out = layer.to(device)(x).sum()
    first, second = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
    assert first.equal(second)


def test_without_gradients_nothing_is_recomputed(device: torch.device) -> None:
    _, layer = make_layers(backend='triton')
    with Calls() as calls, torch.no_grad():
        layer.to(device)(torch.randn(1, 9, DIM).to(device))
    assert calls.counts['selected_attention'] == 1


class Kept(TorchDispatchMode):
    """Track storages that operations return, those with this name in the op, and which of them still exist."""

    def __init__(self, name: str = '') -> None:
        super().__init__()
        self.name = name
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, Tensor) and self.name in func._schema.name:
                storage = t.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def bytes(self, *others: Tensor) -> int:
        """Return the bytes of the existing storages, without the given ones."""
        left_out = {t.untyped_storage()._cdata for t in others}
        return sum(
            size for key, (storage, size) in self.storages.items() if key not in left_out and not storage.expired()
        )


def bytes_of_dense(layer: SparseAttention, x: Tensor) -> int:
    """Return the bytes that a dense layer with FlashAttention saves: its input, q, k, v, the output and its
    log-sum-exp.
    """
    features = layer.heads * (layer.dim_head + layer.dim_value_head)
    features += layer.kv_heads * (layer.dim_head + layer.dim_value_head)
    tokens = x.shape[0] * x.shape[1]
    return x.numel() * x.element_size() + tokens * (features * x.element_size() + layer.heads * 4)


@pytest.mark.full
@pytest.mark.parametrize(('recompute', 'limit'), [(False, 3.0), (True, 1.6)])
@pytest.mark.parametrize('changes', [{'use_diff_topk': True}], ids=str)
def test_bytes_kept_for_the_backward_pass(
    changes: dict[str, Any], recompute: bool, limit: float, device: torch.device
) -> None:
    # A quarter of the paper's layer; without the norm, which on CPUs keeps float32 copies of its input.
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        layer = SparseAttention(
            *(512, 128, 16, 512, 32, 16, 64, 16),
            **({'kv_heads': 1, 'causal': True, 'norm': False, 'backend': 'triton', 'recompute': recompute} | changes),
        )
    layer = layer.to(device, torch.float16)
    x = torch.randn(1, 64, 512, device=device).half().requires_grad_()
    with Kept() as kept:
        out = layer(x)
    gc.collect()
    # The input is among the tracked tensors, as a view.
    ratio = kept.bytes(out, *layer.parameters()) / bytes_of_dense(layer, x)
    print(f'{ratio:.2f} times what a dense layer keeps')
    assert ratio <= limit
    assert ratio > limit - 1  # otherwise tensors were missed


ROTARY, SIZE_OF_Q, SIZE_OF_K = 'native_sparse_attention::rotary', 9 * 4 * 6 * 4, 9 * 2 * 6 * 4


@pytest.mark.full
def test_rotated_queries_are_not_kept(device: torch.device) -> None:
    layer, x = make_layers(backend='triton')[0].to(device), torch.randn(1, 9, DIM).to(device).requires_grad_()
    with Kept(ROTARY) as kept:
        out = layer(x).sum()
        for retain_graph, size in ((True, SIZE_OF_K), (False, SIZE_OF_K), (False, 0)):
            gc.collect()
            assert kept.bytes() == size
            if size:
                torch.autograd.grad(out, x, retain_graph=retain_graph)


@pytest.mark.full
def test_hooks_of_others_are_not_hidden(device: torch.device) -> None:
    layer, x = make_layers(backend='triton', use_diff_topk=True)[0].to(device), torch.randn(1, 9, DIM).to(device)
    shapes: list[torch.Size] = []

    def pack(t: Tensor) -> Tensor:
        shapes.append(t.shape)
        return t.detach()

    expected = run(layer, x)
    with saved_tensors_hooks(pack, lambda t: t), Calls() as calls:
        results = run(layer, x)
    assert calls.counts['rotary'] == 2
    # The queries of the projection, of the compressed branch and of the scores, and the rotated ones of the other two
    assert shapes.count(torch.Size((1, 9, 4, 6))) >= 4
    with Calls() as calls:
        checkpointed = run(layer, x, lambda x: checkpoint(layer, x, use_reentrant=False))
    assert calls.counts['rotary'] == 2 + 2
    for a, b, c in zip(results, expected, checkpointed, strict=True):
        assert a.equal(b)
        assert a.equal(c)


@pytest.mark.parametrize('recompute', [False, True])
def test_saved_tensors_are_freed_with_the_output(recompute: bool, device: torch.device) -> None:
    """Saved tensors are freed with the output, without a garbage collection: nothing saved refers to its owner."""
    layer, x = make_layers(backend='triton')[recompute].to(device), torch.randn(1, 9, DIM).to(device)
    with Kept() as kept:
        out = layer(x)
    gc.collect()  # garbage of the interpreter
    gc.disable()
    try:
        assert kept.bytes(x, *layer.parameters()) > out.nbytes
        del out
        assert kept.bytes(x, *layer.parameters()) == 0
    finally:
        gc.enable()


def test_changed_saved_tensors_are_detected(device: torch.device) -> None:
    layer, x = make_layers(backend='triton')[0].to(device), torch.randn(1, 9, DIM).to(device)
    projected: list[Tensor] = []
    layer.to_qkv.register_forward_hook(lambda *args: projected.append(args[2].detach()))
    assert layer.compress_mem_k is not None
    memory = layer.compress_mem_k.detach()
    for changed in (lambda: projected[-1][..., :24], lambda: memory):
        out = layer(x).sum()
        changed().mul_(2)
        with pytest.raises(RuntimeError, match='modified by an inplace operation'):
            out.backward()


@pytest.mark.full
def test_a_backward_pass_that_is_compiled(device: torch.device) -> None:
    torch._dynamo.reset()
    layer, x = make_layers(backend='triton')[0].to(device), torch.randn(1, 9, DIM).to(device).requires_grad_()
    expected, out = torch.autograd.grad(layer(x).sum(), x), layer(x).sum()
    with compiled_autograd._enable(torch.compile(backend='aot_eager', fullgraph=True)):
        results = torch.autograd.grad(out, x)
    assert results[0].equal(expected[0])
    torch._dynamo.reset()


def test_a_model_passes_it_on() -> None:
    model = Transformer(
        9, 16, 2, dim_head=8, heads=2, use_sparse_attn=True, sparse_attn_kwargs={**SIZES_OF_MODEL, 'recompute': True}
    )
    layers = [module for module in model.modules() if isinstance(module, SparseAttention)]
    assert len(layers) == 2
    assert all(layer.recompute for layer in layers)


SIZES_OF_MODEL: dict[str, Any] = {
    'sliding_window_size': 4,
    'compress_block_size': 4,
    'compress_block_sliding_stride': 2,
    'selection_block_size': 4,
    'num_selected_blocks': 4,
}


def test_non_bool_flags_are_refused() -> None:
    with pytest.raises(ValueError, match="recompute is 'yes', but must be True or False"):
        SparseAttention(**SIZES, recompute='yes')  # type: ignore[arg-type]
