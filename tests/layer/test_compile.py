"""torch.compile makes one graph of the layer, forward and backward, and a second one for all but very short lengths.

On CPUs the kernels run in Triton's interpreter and graphs are executed op by op; on a GPU inductor compiles them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.compress.apply import compress_pair
from native_sparse_attention.nn.compress.build import make_networks
from native_sparse_attention.ops import gated_sum
from tests.tools.test_import import run_python

DIM = 8
pytestmark = pytest.mark.full

# The smallest layer with work for every branch and block selection: programs of the interpreter are slow.
SMALL: dict[str, Any] = {
    'dim': DIM,
    'dim_head': 4,
    'heads': 2,
    'kv_heads': 1,
    'sliding_window_size': 3,
    'compress_block_size': 2,
    'compress_block_sliding_stride': 2,
    'selection_block_size': 4,
    'num_selected_blocks': 2,
    'num_init_blocks': 0,
    'num_local_blocks': 1,
    'causal': True,
    'use_diff_topk': True,
}
KINDS = ('whole', 'padded', 'packed')


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def make_layer(device: torch.device, **changes: Any) -> SparseAttention:
    layer = SparseAttention(**SMALL | changes)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return layer.to(device)


def make_input(kind: str, seqlen: int, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """Return tokens `[1, T, DIM]`, padded or packed, with an empty sequence and tokens behind the last one."""
    x = torch.randn(1, seqlen, DIM).to(device)
    if kind == 'padded':
        return x, {'mask': torch.arange(seqlen, device=device)[None] >= seqlen // 3}
    if kind == 'packed':
        borders = [0, seqlen // 3, seqlen // 3, seqlen - 1]
        return x, {'cu_seqlens': torch.tensor(borders, dtype=torch.int32, device=device)}
    return x, {}


def output_and_gradients(layer: SparseAttention, module: Any, x: Tensor, **inputs: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = module(x, **inputs)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    return [out, *torch.autograd.grad(out.float().sin().sum(), [x, *parameters])]


def assert_compiles(
    layer: SparseAttention, kind: str, compiler: str, device: torch.device, lengths: tuple[int, ...]
) -> None:
    """Assert that the first length makes a graph, the second one a graph for every length, and further ones none."""
    compiled = torch.compile(layer, fullgraph=True, backend=compiler)
    for index, seqlen in enumerate(lengths):
        x, inputs = make_input(kind, seqlen, device)
        with torch.compiler.set_stance('default' if index < 2 else 'fail_on_recompile'):
            found = output_and_gradients(layer, compiled, x, **inputs)
        if index in (0, len(lengths) - 1):
            torch.testing.assert_close(found, output_and_gradients(layer, layer, x, **inputs))
    assert counters['stats']['unique_graphs'] <= 2


def compiler_of(device: torch.device, through_autograd: bool = False) -> str:
    """Return inductor on a GPU; on CPUs dynamo alone, or on request the joint graph of forward and backward."""
    return 'inductor' if device.type == 'cuda' else 'aot_eager' if through_autograd else 'eager'


# The quick run covers all settings, but not their combinations.
SLOW_EAGER = [pytest.param('eager', marks=pytest.mark.slow), 'triton']
SLOW_BUT_PACKED = [pytest.param(kind, marks=[] if kind == 'packed' else pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize('kind', SLOW_BUT_PACKED)
def test_every_length_with_triton(kind: str, device: torch.device) -> None:
    layer = make_layer(device, backend='triton')
    assert_compiles(layer, kind, compiler_of(device, through_autograd=True), device, (8, 9, 6))


@pytest.mark.parametrize('kind', SLOW_BUT_PACKED)
def test_every_length_with_eager(kind: str, device: torch.device) -> None:
    layer = make_layer(device, backend='eager', num_init_blocks=1, num_local_blocks=2, num_selected_blocks=4)
    assert_compiles(layer, kind, compiler_of(device), device, (24, 32, 5))


# Lengths and graphs so far: the first, all others, a single compressed block, none, a single token.
SHORT = {
    'triton': [(16, 1), (17, 2), (6, 2), (4, 3), (5, 3), (2, 4), (3, 4), (1, 5), (9, 5)],
    # One more, as T = 4 is a single selection block.
    'eager': [(16, 1), (17, 2), (6, 2), (4, 3), (5, 4), (2, 5), (3, 5), (1, 6), (9, 6)],
}


@pytest.mark.parametrize('backend', SLOW_EAGER)
def test_graphs_of_short_sequences(backend: str, device: torch.device) -> None:
    """PyTorch builds sizes of 0 and 1 into graphs: numbers of blocks and of tokens."""
    layer = make_layer(device, backend=backend, compress_block_size=4, use_diff_topk=False)
    compiled = torch.compile(layer, fullgraph=True, backend=compiler_of(device))
    for seqlen, num_graphs in SHORT[backend]:
        x, _ = make_input('whole', seqlen, device)
        torch.testing.assert_close(compiled(x), layer(x))
        assert counters['stats']['unique_graphs'] == num_graphs, seqlen


def test_gradients_without_a_block(device: torch.device) -> None:
    layer = make_layer(device, backend='eager', compress_block_size=4)
    assert_compiles(layer, 'whole', compiler_of(device, through_autograd=True), device, (3,))


@pytest.mark.parametrize('stride', [2, 4])
def test_sizes_of_compression_are_simple(stride: int) -> None:
    """The second graph serves all further lengths, multiples of the stride or not. In its sizes no length is divided by
    another: inductor of PyTorch 2.11 fails on those.
    """
    networks = make_networks(None, kv_heads=1, head_dim=4, value_dim=4, block_size=4)
    positions = (torch.zeros(1, 4, 4), torch.zeros(1, 4, 4))
    sizes = set()

    def note_sizes(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        tensors = [node.meta['example_value'] for node in graph.graph.nodes if 'example_value' in node.meta]
        shapes = [(*t.shape, *t.stride()) for t in tensors if isinstance(t, Tensor)]
        sizes.update(str(size) for shape in shapes for size in shape if isinstance(size, torch.SymInt))
        return graph

    function = partial(compress_pair, networks, positions=positions, stride=stride)
    compiled = torch.compile(function, fullgraph=True, backend=note_sizes)
    for seqlen in (8, 9, 16, 18, 31):
        x = torch.randn(2, seqlen, 2, 4, requires_grad=True)
        tokens = (x[:, :, :1], x[:, :, 1:])  # views, as the layer has them
        torch.testing.assert_close(compiled(tokens), function(tokens))
    assert counters['stats']['unique_graphs'] == 2
    assert any('//' in size for size in sizes)
    assert not any(re.search(r'//\D', size) for size in sizes), sizes


@pytest.mark.skipif(shutil.which('g++') is None, reason='inductor needs a compiler')
def test_gradients_of_gates_through_inductor(device: torch.device) -> None:
    """The gradient takes the memory that the backward pass reads last, a sigmoid here, so no other views of it may
    exist.
    """

    def add(logits: Tensor, *branches: Tensor) -> Tensor:
        return gated_sum(logits.sigmoid(), *(2 * branch for branch in branches), backend='eager')

    inputs = [torch.randn(2, 50, 4, size, device=device, requires_grad=True) for size in (3, 16, 16, 16)]
    found, expected = (
        torch.autograd.grad(function(*inputs).sin().sum(), inputs) for function in (torch.compile(add), add)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_joint_graph_with_eager(device: torch.device) -> None:
    layer = make_layer(device, backend='eager')
    assert_compiles(layer, 'padded', compiler_of(device, through_autograd=True), device, (9,))


@pytest.mark.parametrize('autocast', [False, True])
def test_half_types_with_eager(autocast: bool, device: torch.device) -> None:
    layer = make_layer(device, backend='eager').to(torch.float32 if autocast else torch.bfloat16)
    x = make_input('whole', 9, device)[0].to(layer.to_qkv.weight.dtype)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        found = output_and_gradients(layer, torch.compile(layer, fullgraph=True, backend='eager'), x)
        torch.testing.assert_close(found, output_and_gradients(layer, layer, x))


@pytest.mark.parametrize('backend', SLOW_EAGER)
def test_not_causal_heads_alone(backend: str, device: torch.device) -> None:
    settings = {'causal': False, 'query_heads_share_selected_kv': False, 'use_diff_topk': False}
    layer = make_layer(device, backend=backend, **settings)
    assert_compiles(layer, 'whole', compiler_of(device), device, (8,))


@pytest.mark.parametrize('backend', SLOW_EAGER)
def test_decoding(backend: str, device: torch.device) -> None:
    """Steps through a cache: one graph for the first, and one for all others."""
    layer = make_layer(device, backend=backend, use_diff_topk=False)
    compiled = torch.compile(layer, fullgraph=True, backend=compiler_of(device))
    x = torch.randn(1, 8, DIM).to(device)
    with torch.no_grad():
        cache = layer.init_cache(1, 16)
        outs = [layer(x[:, :4], cache=cache)]
        for index, token in enumerate(x[:, 4:].split(1, 1)):
            with torch.compiler.set_stance('default' if index < 2 else 'fail_on_recompile'):
                outs.append(compiled(token, cache=cache))
        torch.testing.assert_close(torch.cat(outs, 1), layer(x))


def test_a_step_is_one_graph() -> None:
    """`test_decoding` without code generation, which is quicker."""
    layer, x = make_layer(torch.device('cpu'), backend='eager', use_diff_topk=False), torch.randn(1, 6, DIM)
    compiled = torch.compile(layer, fullgraph=True, backend='eager')
    with torch.no_grad():
        cache = layer.init_cache(1, 16)
        outs = [compiled(x[:, :5], cache=cache), compiled(x[:, 5:], cache=cache)]
        torch.testing.assert_close(torch.cat(outs, 1), layer(x))


FIRST_CALL = """
import torch
from native_sparse_attention import SparseAttention

torch.manual_seed(0)
device = {device!r}
layer = SparseAttention(**{settings!r}).to(device)
compiled = torch.compile(layer, fullgraph=True, backend={compiler!r})
x = torch.randn(1, 6, layer.to_qkv.in_features, device=device)
results = []
for module in (compiled, layer):
    given = x.clone().requires_grad_()
    out = module(given)
    results.append((out, torch.autograd.grad(out.sin().sum(), given)[0]))
torch.testing.assert_close(*results)
"""


def test_first_call_of_a_process(device: torch.device) -> None:
    code = FIRST_CALL.format(device=device.type, settings=SMALL | {'backend': 'triton'}, compiler=compiler_of(device))
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize('causal', [True, False])
def test_inductor_at_a_size_of_use(kind: str, dtype: torch.dtype, causal: bool, device: torch.device) -> None:
    """'auto' takes the kernels and compiles; under autocast too."""
    sizes = {
        'dim': DIM,
        'dim_head': 64,
        'heads': 8,
        'kv_heads': 2,
        'sliding_window_size': 64,
        'compress_block_size': 16,
        'compress_block_sliding_stride': 8,
        'selection_block_size': 16,
        'num_selected_blocks': 6,
    }
    layer = make_layer(device, **sizes, causal=causal)
    compiled = torch.compile(layer, fullgraph=True)
    for index, seqlen in enumerate((512, 700, 130, 1000)):
        x, inputs = make_input(kind, seqlen, device)
        with torch.autocast('cuda', dtype, enabled=dtype == torch.bfloat16):
            assert layer.backend_for(x).name == 'triton'
            with torch.compiler.set_stance('default' if index < 2 else 'fail_on_recompile'):
                found = output_and_gradients(layer, compiled, x, **inputs)
            expected = output_and_gradients(layer, layer, x, **inputs)
        # Inductor rounds less often; where scores are close another block may be selected, so the mean is compared.
        for a, b in zip(found, expected, strict=True):
            error = (a.float() - b.float()).abs().mean() / (b.float().abs().mean() + 1e-6)
            assert error < (0.1 if dtype == torch.bfloat16 else 1e-3), index
    assert counters['stats']['unique_graphs'] <= 2
