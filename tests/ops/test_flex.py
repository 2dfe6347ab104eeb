"""FlexAttention against eager: on CPUs tile by tile like its kernels, on GPUs the kernels, outputs and gradients."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention import nsa
from native_sparse_attention.ops import _flex, compressed_attention, selected_attention, window_attention
from native_sparse_attention.ops.selected_attention.api import backend_of as selected_backend
from native_sparse_attention.ops.window_attention.api import backend_of as window_backend
from native_sparse_attention.testing import make_block_indices
from tests.support.problems import (
    Extents,
    Heads,
    drawn_extents,
    make_compressed,
    make_mem_kv,
    make_qkv,
    normal,
    packed,
    whole,
)

# The compiler of kernels for GPUs.
INDUCTOR = ('config', 'ir', 'scheduler', 'graph')
# Tiles of one key show whether the intervals are right, larger ones the mask, beside tiles of both kinds.
tiles = st.sampled_from([1, 4])
# One for all, since each is traced anew. Three queries of a group do not divide a tile.
HEADS = Heads(6, 2, 4, 3)


@contextmanager
def small_tiles(tile: int) -> Iterator[None]:
    """On a CPU, FlexAttention evaluates the mask everywhere. Here it visits the listed, small tiles alone, and
    evaluates the mask in partial ones only, as the kernels do.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, tiles: _flex.Tiles, mask_mod: Callable, *rest: Any, **more: Any) -> Any:
        rows = rest[2] if len(rest) > 2 else tile
        partial, full = visited_tiles(tiles)

        def visible(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
            place = (b, h % partial.shape[1], t // rows, s // tile)
            return full[place] | (partial[place] & mask_mod(b, h, t, s))

        return plain_attend(q, k, v, tiles, visible, *rest, **more)

    plain_attend = _flex.attend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_flex, 'TILE', tile)
        patch.setattr(_flex, 'attend', attend)
        yield


def visited_tiles(tiles: _flex.Tiles) -> tuple[Tensor, Tensor]:
    """Return partial and full tiles as bool `[B, H, query tiles, key tiles]`; the lists of the backward pass must
    agree.
    """
    names = ('kv_num_blocks', 'kv_indices'), ('q_num_blocks', 'q_indices')
    partial, by_key = (table(*(getattr(tiles, name) for name in pair)) for pair in names)
    assert torch.equal(partial, by_key.transpose(2, 3))
    if tiles.full_kv_num_blocks is None:
        return partial, torch.zeros_like(partial)
    full, by_key = (table(*(getattr(tiles, f'full_{name}') for name in pair)) for pair in names)
    assert torch.equal(full, by_key.transpose(2, 3))
    assert not (partial & full).any()
    return partial, full


def table(counts: Tensor, indices: Tensor) -> Tensor:
    """Return bool `[B, H, rows, columns]` of one kind of list, which the kernels need in int32, contiguous and
    ascending.
    """
    assert counts.dtype == indices.dtype == torch.int32
    assert counts.is_contiguous()
    assert indices.is_contiguous()
    listed = torch.arange(indices.shape[-1]) < counts[..., None]
    assert ((indices.diff(dim=-1) > 0) | ~listed[..., 1:]).all()
    return torch.zeros(indices.shape, dtype=torch.bool).scatter_(-1, indices.long(), listed)


def assert_flex_is_eager(
    op: Callable[..., tuple[Tensor, Tensor]], tile: int, *tensors: Tensor, **settings: Any
) -> None:
    assume(tensors[0].shape[1])
    with small_tiles(tile):
        results = op(*tensors, **settings, backend='flex')
    for result, expected in zip(results, op(*tensors, **settings, backend='eager'), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


def spoil(k: Tensor, v: Tensor) -> None:
    """Set a key or two to NaN, which some of the rows read."""
    place = torch.rand(k.shape[:3]) < 0.05
    k[place], v[place] = torch.nan, torch.nan


@pytest.mark.full
@given(drawn_extents(), tiles, st.sampled_from([(3, 0), (-1, 0), (0, 4), (5, -1), (-1, -1)]))
def test_window(extents: Extents, tile: int, window_size: tuple[int, int]) -> None:
    q, k, v = make_qkv(extents, HEADS)
    spoil(k, v)
    causal = window_size[1] == 0
    assert_flex_is_eager(window_attention, tile, q, k, v, window_size=window_size, causal=causal, **extents.where)


@pytest.mark.full
@given(drawn_extents(), tiles, st.sampled_from([(3, 0), (-1, 0), (2, 4), (-1, -1)]), st.integers(1, 31))
def test_window_features(extents: Extents, tile: int, window_size: tuple[int, int], drawn: int) -> None:
    """drawn: a bit for every feature."""
    q, k, v = make_qkv(extents, HEADS)
    spoil(k, v)
    per_query, per_key = (extents.batch, extents.seqlen_q), (extents.batch, extents.seqlen_k)
    # [B, 1, T, S] and [1, HQ, T, S]
    tables = [torch.rand(*size, extents.seqlen_q, extents.seqlen_k) for size in ((extents.batch, 1), (1, HEADS.heads))]
    features: dict[str, Any] = {
        'segment_ids': (torch.randint(-1, 3, per_query), torch.randint(-1, 3, per_key)),
        'mask': torch.rand(per_key) < 0.8,
        'attn_mask': tables[0] < 0.8,
        'bias': tables[1].double().masked_fill(tables[1] < 0.2, -torch.inf),
        'softcap': 1.5,
    }
    settings = {name: value for bit, (name, value) in enumerate(features.items()) if drawn >> bit & 1}
    settings |= {'window_size': window_size, 'causal': window_size[1] == 0, **extents.where}
    assert_flex_is_eager(window_attention, tile, q, k, v, **settings)


@pytest.mark.full
@given(drawn_extents(), tiles, st.sampled_from([(4, 2), (3, 2), (5, 5), (1, 1)]), st.integers(0, 2), st.booleans())
def test_compressed(extents: Extents, tile: int, sizes: tuple[int, int], pairs: int, causal: bool) -> None:
    q, _, _ = make_qkv(extents, HEADS)
    k_cmp, v_cmp = make_compressed(extents, HEADS, *sizes, more=pairs)
    spoil(k_cmp, v_cmp)
    settings: dict[str, Any] = {'block_size': sizes[0], 'stride': sizes[1], 'causal': causal} | extents.where
    if causal:
        settings['softcap'] = 1.5
    if pairs:
        settings['mem_kv'] = make_mem_kv(HEADS, pairs)
    if not extents.packed:
        settings['seqlen_k'] = extents.seqlen_k
    assert_flex_is_eager(compressed_attention, tile, q, k_cmp, v_cmp, **settings)


@pytest.mark.full
@given(drawn_extents(), tiles, st.sampled_from([3, 4, 9]), st.sampled_from([0, 1, 4]), st.booleans(), st.data())
def test_selected(
    extents: Extents, tile: int, block_size: int, num_selected: int, causal: bool, data: st.DataObject
) -> None:
    q, k, v = make_qkv(extents, HEADS)
    spoil(k, v)
    index_heads = data.draw(st.sampled_from([HEADS.kv_heads, HEADS.heads]), 'index_heads')
    shape = (extents.batch, extents.seqlen_q, index_heads, num_selected)
    junk = torch.tensor([-1, -2, 100, 2**32, 2**32 + 1, -(2**63), 2**63 - 1])
    indices = torch.randint(0, extents.seqlen_k // block_size + 2, shape)
    indices = torch.where(torch.rand(shape) < 0.2, junk[torch.randint(0, len(junk), shape)], indices)
    settings: dict[str, Any] = {'block_size': block_size, 'causal': causal} | extents.where
    if data.draw(st.booleans(), 'with block_scale'):
        settings['block_scale'] = normal(*shape).masked_fill(indices < 0, torch.nan)
    assert_flex_is_eager(selected_attention, tile, q, k, v, indices, **settings)


@pytest.mark.parametrize('rows_per_token', [1, 3, 6])
def test_tiles_are_those_that_are_read(rows_per_token: int, monkeypatch: pytest.MonkeyPatch):
    """Every tile in which a query reads is visited, no other one is, and full tiles are those that all queries read
    whole.
    """
    width = 4
    monkeypatch.setattr(_flex, 'TILE', width)
    batch, seqlen, head_count, seqlen_k = 2, 21, 3, 30
    ends = torch.randint(0, seqlen_k + 1, (batch, seqlen, head_count, 1, 2)).sort(-1).values
    ends[:, 4:16, 0] = torch.tensor([2, 29])
    ends[:, 16:, 1] = 7
    first, last = ends.unbind(-1)
    partial, full = visited_tiles(_flex.find_tiles(first, last, seqlen_k, rows_per_token))
    key = torch.arange(seqlen_k)
    # [B, H, rows, keys], rows and keys padded to whole tiles
    reads = ((first <= key) & (key < last)).transpose(1, 2).repeat_interleave(rows_per_token, 2)
    tile = _flex.rows_of_tile(rows_per_token)
    padding = (0, -seqlen_k % width, 0, -seqlen * rows_per_token % tile)
    reads = torch.nn.functional.pad(reads, padding).unflatten(3, (-1, width)).unflatten(2, (-1, tile))
    any_read, all_read = reads.any(5).any(3), reads.all(5).all(3)
    count = any_read.shape[2]
    assert all_read.any()
    assert torch.equal((partial | full)[:, :, :count], any_read)
    assert torch.equal(full[:, :, :count], all_read)
    assert not (partial | full)[:, :, count:].any()


def test_lists_for_the_backward_pass_alone_where_there_is_one():
    first, last = torch.zeros(1, 9, 1, 1, dtype=torch.int64), torch.full((1, 9, 1, 1), 9)
    with torch.no_grad():
        tiles = _flex.find_tiles(first, last, 9)
    assert tiles.kv_indices is not None
    assert tiles.full_kv_indices is not None
    assert tiles.q_indices is None
    assert tiles.full_q_indices is None


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_on_cpu(dtype: torch.dtype):
    q, k, v = (t.to(dtype) for t in make_qkv(whole(9), HEADS))
    out, lse = window_attention(q, k, v, window_size=(3, 0), backend='flex')
    expected, expected_lse = window_attention(q, k, v, window_size=(3, 0), backend='eager')
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)


def test_says_nothing_and_takes_weights_without_gradients():
    """A call gives no warning, and inputs may be parameters where no gradient is recorded."""
    q, k, v = (t.requires_grad_() for t in make_qkv(whole(9), HEADS))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter('error')
        out, _ = window_attention(q, k, v, window_size=(3, 0), backend='flex')
    assert not out.requires_grad


def test_autocast_changes_nothing():
    q, k, v = (t.float() for t in make_qkv(whole(9), HEADS))
    expected, _ = window_attention(q, k, v, window_size=(3, 0), backend='flex')
    with torch.autocast('cpu', dtype=torch.bfloat16):
        out, _ = window_attention(q, k, v, window_size=(3, 0), backend='flex')
    assert torch.equal(out, expected)


def test_gradients_on_cpu_are_refused():
    q, k, v = (t.requires_grad_() for t in make_qkv(whole(9), HEADS))
    with pytest.raises(ValueError, match=r"'flex' cannot serve .* no backward pass on CPUs"):
        window_attention(q, k, v, window_size=(3, 0), backend='flex')
    indices, factors = torch.zeros(1, 9, 2, 1, dtype=torch.int32), torch.ones(1, 9, 2, 1, requires_grad=True)
    tensors = (q.detach(), k.detach(), v.detach(), indices)
    with pytest.raises(ValueError, match='no backward pass on CPUs'):
        selected_attention(*tensors, block_size=4, block_scale=factors, backend='flex')
    memory = make_mem_kv(HEADS, 1)
    with pytest.raises(ValueError, match='no backward pass on CPUs'):
        compressed_attention(
            *tensors[:3], block_size=1, stride=1, mem_kv=(memory[0].requires_grad_(), memory[1]), backend='flex'
        )
    assert window_attention(q, k, v, window_size=(3, 0))[0].requires_grad


def dense_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Any,
    mask_mod: Callable,
    scale: float,
    score_mod: Any = None,
    *_: Any,
    **__: Any,
) -> Any:
    """FlexAttention in plain PyTorch, with derivatives on CPUs."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    index = torch.meshgrid(*map(torch.arange, (*q.shape[:3], k.shape[2])), indexing='ij')
    scores = q @ k.mT * scale
    scores = scores if score_mod is None else score_mod(scores, *index)
    scores = scores.masked_fill(~mask_mod(*index), -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp() @ v, lse


@pytest.mark.parametrize('op', [window_attention, compressed_attention, selected_attention])
def test_gradients_of_rows_that_read_nan(op: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are NaN where those of eager are. The kernels spread NaN within their tiles, so other keys may have it."""
    monkeypatch.setattr(_flex, 'attend', dense_attend)
    monkeypatch.setattr(_flex, 'run', lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(_flex, 'unsupported', lambda *_, **__: None)
    q, k, v = make_qkv(whole(24), HEADS)
    k[0, 9, 1], v[0, 9, 1] = torch.nan, torch.nan
    indices = make_block_indices('valid', 1, 24, 2, 2, seqlen_k=24, block_size=4)
    settings: dict[Any, dict[str, Any]] = {
        window_attention: {'window_size': (3, 0)},
        compressed_attention: {'block_size': 1, 'stride': 1},
        selected_attention: {'block_size': 4, 'block_indices': indices},
    }
    found, expected = (
        outputs_and_gradients(op, q, k, v, **settings[op], backend=backend) for backend in ('flex', 'eager')
    )
    for result, wanted in zip(found[:3], expected[:3], strict=True):  # no keys
        torch.testing.assert_close(result, wanted, rtol=1e-9, atol=1e-9, equal_nan=True)
    for result, wanted in zip(found[3:], expected[3:], strict=True):
        assert wanted.isnan().any()
        assert result[wanted.isnan()].isnan().all()
        torch.testing.assert_close(result[:, :, 0], wanted[:, :, 0], rtol=1e-9, atol=1e-9)  # the other KV head


def outputs_and_gradients(op: Callable, *qkv: Tensor, **settings: Any) -> list[Tensor]:
    """Return the output, its log-sum-exp, and the gradients of q, k and v."""
    leaves = [t.clone().requires_grad_() for t in qkv]
    out, lse = op(*leaves, **settings)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out.sin().sum(), leaves)]


def test_unsupported_features_are_refused():
    q, k, v = make_qkv(whole(9), HEADS)
    features: dict[str, Any] = {
        'sinks is given': {'sinks': normal(6)},
        'dropout_p is 0.5': {'dropout_p': 0.5},
        'bias requires a gradient': {'bias': normal(1, 1, 9, 9).requires_grad_()},
    }
    for reason, settings in features.items():
        with pytest.raises(ValueError, match=rf"'flex' cannot serve .* {reason}, but"):
            window_attention(q, k, v, window_size=(3, 0), **settings, backend='flex')
    with pytest.raises(ValueError, match=r"'flex' cannot serve .* sinks is given, but"):
        compressed_attention(q, k, v, block_size=1, stride=1, sinks=normal(6), backend='flex')
    with torch.no_grad():
        out, _ = window_attention(q, k, v, window_size=(3, 0), bias=features.popitem()[1]['bias'], backend='flex')
    assert not out.requires_grad


def test_empty_tensors_are_refused():
    q, k, v = make_qkv(packed([]), HEADS)
    with pytest.raises(ValueError, match='no kernel for empty tensors'):
        window_attention(q, k, v, window_size=(3, 0), backend='flex')


def test_other_devices_are_refused():
    q, k, v = (t.to('meta') for t in make_qkv(whole(9), HEADS))
    with pytest.raises(ValueError, match='the tensors are on meta, but it is tried on cpu and cuda alone'):
        window_attention(q, k, v, window_size=(3, 0), backend='flex')


def test_compiling_for_cpus_is_refused():
    q, k, v = make_qkv(whole(9), HEADS)

    @torch.compile(backend='eager')
    def attend(q: Tensor) -> Tensor:
        return window_attention(q, k, v, window_size=(3, 0), backend='flex')[0]

    with pytest.raises(Exception, match='no FlexAttention with log-sum-exp for CPUs'):
        attend(q)


def test_auto_takes_eager_on_cpus():
    q, k, v = make_qkv(whole(9), HEADS)
    for choice in (window_backend(q, k, v), selected_backend(q, k, v)):
        assert choice.name == 'eager'
        assert choice.passed_over['flex'] == 'the tensors are on cpu'


@pytest.mark.full
@pytest.mark.parametrize('lengths', [[3], [0, 40, 2], [150]])
def test_composition(lengths: list[int]):
    """The three branches together, also without a compressed block."""
    extents = packed(lengths, 2)
    q, k, v = make_qkv(extents, HEADS)
    settings: dict[str, Any] = {
        'compress_block_size': 4,
        'compress_stride': 2,
        'selection_block_size': 4,
        'num_selected': 3,
        'window_size': (5, 0),
    }
    arguments = (
        q,
        k,
        v,
        *make_compressed(extents, HEADS, 4, 2),
        torch.rand(1, extents.seqlen_q, HEADS.heads, 3).double(),
    )
    results = [nsa(*arguments, **settings, **extents.where, backend=backend) for backend in ('flex', 'eager')]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_few_graphs_serve_many_lengths():
    """Graphs do not depend on lengths; here they are traced, not compiled."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def run(function: Callable[..., Any], q: Tensor, *arguments: Any) -> Any:
        with torch._dynamo.config.patch(_flex.GRAPH_SETTINGS):
            return torch.compile(function, backend=backend, dynamic=True, fullgraph=True)(q, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_flex, 'run', run)
        for seqlen in (300, 130, 77, 400, 650, 200):
            q, k, v = make_qkv(whole(seqlen, 2), Heads(6, 2, 16, 16))
            indices = make_block_indices('valid', 2, seqlen, 2, 4, seqlen_k=seqlen, block_size=16)
            out, _ = selected_attention(q, k, v, indices, block_size=16, backend='flex')
            torch.testing.assert_close(out, selected_attention(q, k, v, indices, block_size=16, backend='eager')[0])
    assert len(graphs) <= 2


@pytest.mark.full
def test_ops_in_a_compiled_function_take_symbolic_sizes(monkeypatch: pytest.MonkeyPatch):
    """Functions compile as on a GPU; here they are traced. Numbers of heads are symbolic there, too."""
    monkeypatch.setattr(_flex, 'unsupported', lambda *_, **__: None)
    q, k, v = (t.float() for t in make_qkv(whole(300, 2), Heads(6, 2, 16, 16)))
    indices = make_block_indices('valid', 2, 300, 2, 4, seqlen_k=300, block_size=64)
    bias = torch.randn(2, 1, 300, 300)
    captured: list[Any] = []

    def attend(backend: str) -> Tensor:
        out, lse = window_attention(q, k, v, window_size=(50, 0), bias=bias, backend=backend)
        out = out + selected_attention(q, k, v, indices, block_size=64, backend=backend)[0]
        return out + compressed_attention(q, k, v, block_size=1, stride=1, backend=backend)[0] + lse.mean()

    def keep_captured(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        calls = [node for node in graph.graph.nodes if 'flex_attention' in str(node.target)]
        assert len(calls) == 3
        captured.extend(buffer.meta['example_value'] for node in calls for buffer in (*node.args[-2], *node.args[-1]))
        return graph.forward

    compiled = torch.compile(attend, backend=keep_captured, dynamic=True, fullgraph=True)
    torch.testing.assert_close(compiled('flex'), attend('eager'), rtol=1e-4, atol=1e-5)
    # Inductor refuses masks that read expressions of symbolic sizes.
    numbers = [value for value in captured if not isinstance(value, Tensor)]
    assert len(numbers) < len(captured)
    assert all(isinstance(value, int) or value.node.expr.is_Symbol for value in numbers)


@pytest.mark.parametrize(('intervals', 'by_key'), [(1, True), (4, False)])
def test_opcheck_of_the_tile_lists(intervals: int, by_key: bool):
    first = torch.zeros(2, 300, 2, intervals, dtype=torch.long)
    arguments = (first, first + 64, 300, 3, intervals == 1, by_key)
    torch.library.opcheck(torch.ops.native_sparse_attention.list_flex_tiles.default, arguments)


@pytest.mark.full
@pytest.mark.parametrize('intervals', [1, 4])
def test_inductor_writes_code_for_tiles_of_symbolic_lengths(intervals: int, monkeypatch: pytest.MonkeyPatch):
    """Inductor plans kernels as for a GPU, which need not exist, and is stopped before Triton compiles them."""

    class WrittenError(Exception):
        pass

    def stop(graph: Any) -> None:
        graph.codegen()
        raise WrittenError

    def find(first: Tensor, last: Tensor, k: Tensor) -> list[Tensor]:
        return [tiles + 1 for tiles in _flex.find_tiles(first, last, k.shape[1], 3) if tiles is not None]

    driver = pytest.importorskip('triton').runtime.driver
    target = importlib.import_module('triton.backends.compiler').GPUTarget('cuda', 90, 32)
    config, ir, scheduler, graph = (importlib.import_module(f'torch._inductor.{n}') for n in INDUCTOR)
    scheduling = importlib.import_module('torch._inductor.codegen.triton').TritonScheduling
    monkeypatch.setattr(driver, '_active', SimpleNamespace(get_current_target=lambda: target))
    monkeypatch.setattr(ir, 'is_gpu', lambda device: True)
    monkeypatch.setattr(scheduler, 'is_gpu', lambda device: True)
    monkeypatch.setattr(scheduler.Scheduler, 'create_backend', lambda self, device: scheduling(self))
    monkeypatch.setattr(graph.GraphLowering, 'compile_to_module', stop)
    first = torch.zeros(2, 300, 2, intervals, dtype=torch.long)
    with config.patch(cpu_backend='triton', fx_graph_cache=False), pytest.raises(Exception, match='WrittenError'):
        torch.compile(find, dynamic=True, fullgraph=True)(first, first + 64, torch.zeros(2, 300, 1))


def test_no_block_mask_of_queries_by_keys():
    """The largest table of a call counts tiles, not keys."""
    seqlen = 4096
    indices = make_block_indices('valid', 1, seqlen, 1, 4, seqlen_k=seqlen, block_size=64)
    sizes = []

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        tensors = [t for a in arguments for t in (a if isinstance(a, tuple) else (a,)) if isinstance(t, Tensor)]
        sizes.append(max(t.numel() for t in tensors))
        return arguments[0], arguments[0][..., 0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_flex, 'run', run)
        q, k, v = make_qkv(whole(seqlen), Heads(2, 1, 4, 4))
        selected_attention(q, k, v, indices, block_size=64, backend='flex')
    assert sizes == [q.numel()]
