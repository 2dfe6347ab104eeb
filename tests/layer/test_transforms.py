"""The layer in eager under torch.func, torch.export, selective checkpointing and other default devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.transformer import Transformer
from native_sparse_attention.ops import compressed_attention
from tests.layer.test_compress import every_network

SIZES: dict[str, Any] = {
    'sliding_window_size': 3,
    'compress_block_size': 4,
    'compress_block_sliding_stride': 2,
    'selection_block_size': 4,
    'num_selected_blocks': 2,
    'num_local_blocks': 1,
    'num_init_blocks': 0,
}


def make_layer(**settings: Any) -> SparseAttention:
    torch.manual_seed(0)
    return SparseAttention(8, 4, 2, kv_heads=1, causal=True, backend='eager', **SIZES, **settings).double()


def make_model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(11, 8, 2, 4, 2, use_sparse_attn=True, sparse_attn_kwargs=SIZES, backend='eager')


def tokens(batch: int, seqlen: int = 13) -> Tensor:
    return torch.randn(batch, seqlen, 8, dtype=torch.float64)


@every_network
@pytest.mark.parametrize(
    'settings',
    [{}, {'use_diff_topk': True, 'rotary_emb': False}, {'recompute': True}],
    ids=['default', 'diff_topk', 'recompute'],
)
def test_vmap(make: Callable[..., nn.Module], settings: dict[str, Any]) -> None:
    layer = make_layer(compress_mlp=make(1, 4, 4), **settings)
    x, weights = tokens(3), {name: p.detach() for name, p in layer.named_parameters()}
    torch.testing.assert_close(torch.vmap(lambda row: layer(row[None])[0])(x), layer(x))

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(layer, weights, (row[None],)).sin().sum()

    per_row = torch.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    for index, row in enumerate(x):
        expected = torch.autograd.grad(loss(dict(layer.named_parameters()), row), [*layer.parameters()])
        torch.testing.assert_close([gradient[index] for gradient in per_row.values()], [*expected])
    ensemble = {name: torch.stack((w, 2 * w)) for name, w in weights.items()}
    out = torch.vmap(lambda w: torch.func.functional_call(layer, w, (x,)))(ensemble)
    for index in range(2):
        member = {name: w[index] for name, w in ensemble.items()}
        torch.testing.assert_close(out[index], torch.func.functional_call(layer, member, (x,)))


def test_vmap_of_padded_and_packed_rows() -> None:
    """No value is read from a mask that differs between the rows."""
    layer, x = make_layer(), tokens(3)
    mask = torch.arange(13) >= torch.tensor([[0], [5], [9]])
    for given in (mask, mask.int()):
        padded = torch.vmap(lambda row, mask: layer(row[None], mask=mask[None])[0])(x, given)
        torch.testing.assert_close(padded, layer(x, mask=mask))
    cu_seqlens = torch.tensor([0, 5, 9], dtype=torch.int32)
    packed = torch.vmap(lambda row: layer(row[None], cu_seqlens=cu_seqlens)[0])(x)
    torch.testing.assert_close(packed, torch.cat([layer(row[None], cu_seqlens=cu_seqlens) for row in x]))


@pytest.mark.parametrize('mode', [lambda: torch.device('meta'), FakeTensorMode], ids=['meta', 'fake'])
def test_shapes_without_values(mode: Callable[[], Any]) -> None:
    with mode():
        layer = SparseAttention(8, 4, 2, kv_heads=1, causal=True, recompute=True, dropout=0.1, **SIZES)
        x, mask = torch.randn(2, 13, 8, requires_grad=True), torch.ones(2, 13, dtype=torch.int32)
        layer(x).sum().backward()
        assert x.grad is not None
        assert layer(x, mask=mask).shape == x.shape
        assert layer(x[:1], cu_seqlens=mask[0, :3]).shape == (1, 13, 8)
        cache = layer.eval().init_cache(2, 13)
        assert layer(x.detach(), mask=mask, cache=cache).shape == x.shape
        model = Transformer(11, 8, 1, 4, 2, use_sparse_attn=True, sparse_attn_kwargs=SIZES)
        assert model(mask, mask=mask).shape == (2, 13, 11)


@pytest.mark.parametrize('layout', [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    rows = [torch.randn(5, 8), torch.randn(9, 8)]
    for module, nested in (
        (make_layer(), torch.nested.nested_tensor(rows, layout=layout)),
        (make_model(), torch.nested.nested_tensor([row[:, 0].long() for row in rows], layout=layout)),
    ):
        with pytest.raises(ValueError, match=r'^(x|ids) is a nested tensor, but must be a dense one$'):
            module(nested)


@pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore::torch.jit.TracerWarning')
def test_traces_are_refused() -> None:
    """A trace holds the number of blocks of its example, and would give wrong results for other lengths."""
    for module, example in (
        (make_layer().eval(), tokens(1)),
        (make_model().eval(), torch.zeros(1, 13, dtype=torch.long)),
    ):
        with pytest.raises(ValueError, match=r'^(x|ids) is recorded by torch\.jit\.trace, but a trace has one length'):
            torch.jit.trace(module, (example,))


@pytest.mark.parametrize(('strict', 'recompute'), [pytest.param(True, False, marks=pytest.mark.full), (False, True)])
def test_export_of_every_length(strict: bool, recompute: bool) -> None:
    layer = make_layer(recompute=recompute).eval()
    exported = torch.export.export(
        layer,
        (tokens(1, 40),),
        dynamic_shapes=({1: torch.export.Dim('T', min=16, max=4096)},),
        strict=strict,
        prefer_deferred_runtime_asserts_over_guards=True,
    ).module()
    for seqlen in (16, 40, 77, 300):
        x = tokens(1, seqlen)
        torch.testing.assert_close(exported(x), layer(x))


def test_export_of_a_dimension_without_bounds() -> None:
    """With `Dim.AUTO` a length that is built into the graph would not be noticed until another one is given."""
    layer = make_layer().eval()
    shapes = ({1: torch.export.Dim.DYNAMIC},)
    exported = torch.export.export(layer, (tokens(1, 40),), dynamic_shapes=shapes).module()
    for seqlen in (16, 77, 300):
        x = tokens(1, seqlen)
        torch.testing.assert_close(exported(x), layer(x))


class Compressed(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        sizes: dict[str, Any] = {'seqlen_k': q.shape[1], 'q_offset': q.shape[1] - q.shape[1]}
        return compressed_attention(q, k, k, block_size=4, stride=2, **sizes)[0]


def test_export_of_an_op_with_symbolic_sizes() -> None:
    def example(seqlen: int) -> tuple[Tensor, Tensor]:
        return torch.randn(1, seqlen, 2, 4), torch.randn(1, (seqlen - 4) // 2 + 1, 2, 4)

    seqlen, blocks = torch.export.Dim('T', min=16, max=4096), torch.export.Dim('C', min=7, max=4096)
    options: Any = {'strict': False, 'prefer_deferred_runtime_asserts_over_guards': True}
    exported = torch.export.export(Compressed(), example(40), dynamic_shapes=({1: seqlen}, {1: blocks}), **options)
    q, k = example(77)
    torch.testing.assert_close(exported.module()(q, k), Compressed()(q, k))


@pytest.mark.parametrize('saved', ['baddbmm', 'bmm', 'mm', 'exp'])
def test_selective_checkpointing(saved: str) -> None:
    layer, x = make_layer(), tokens(1).requires_grad_()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if saved in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    out: Any = checkpoint(
        layer, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy)
    )
    leaves = [x, *layer.parameters()]
    found, expected = (torch.autograd.grad(each.sin().sum(), leaves) for each in (out, layer(x)))
    torch.testing.assert_close(found, expected)


def test_generation_under_another_default_device() -> None:
    model = make_model()
    ids = torch.randint(11, (2, 5))
    expected = model.generate(ids, 6, seed=3, top_p=0.9)
    with torch.device('meta'):
        assert model.generate(ids, 6, seed=3, top_p=0.9).equal(expected)
        model.generate(ids, 6, stop_tokens=3)


@torch.no_grad()
def test_caches_under_another_default_device() -> None:
    model = make_model().eval()
    ids, index = torch.randint(11, (2, 9)), torch.tensor([1, 0, 1])

    def logits() -> list[Tensor]:
        cache = model.init_cache(2, 20)
        model(ids, cache=cache)
        cache[0].crop(6)  # torn
        cache.crop(5)
        beams, chosen, (_, first) = cache.repeat_interleave(2), cache.select(index), model(ids, return_cache=True)
        cache.reorder(index[:2])
        first.crop(index[:2] + 3)
        return [model(ids[:1, :1].expand(len(c.lengths), -1), cache=c) for c in (cache, beams, chosen, first)]

    expected = logits()
    with torch.device('meta'):
        found = logits()
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
