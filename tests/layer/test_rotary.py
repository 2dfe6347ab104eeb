"""Rotary angles equal those of the library, in float32 for every dtype of the layer, also learned and partial ones."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu

from native_sparse_attention import SparseAttention
from native_sparse_attention.autograd.saved_rotary import recompute_rotated
from native_sparse_attention.nn.compress import MeanPool
from native_sparse_attention.nn.rotary import angle_tables, rotate
from tests.layer.test_attention import make_layer, tokens
from tests.layer.test_decoding import BACKENDS


def rotated(layer: SparseAttention, x: Tensor, positions: Tensor) -> Tensor:
    assert layer.rotary is not None
    return rotate(layer.rotary.tables(positions[None]), 'eager', x)[0]


def test_matches_the_library() -> None:
    layer = make_layer()
    assert layer.rotary is not None
    x = torch.randn(2, 50, 3, 6)
    expected = RotaryEmbedding(6).rotate_queries_or_keys(x.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(rotated(layer, x, torch.arange(50)), expected)


def test_half_layers_keep_their_angles() -> None:
    layer, x = make_layer(), torch.randn(1, 1, 1, 6)
    assert layer.rotary is not None
    expected = rotated(layer, x, torch.tensor([100_003]))
    assert layer.bfloat16().to_qkv.weight.dtype == torch.bfloat16
    assert rotated(layer, x, torch.tensor([100_003])).equal(expected)


def test_interpolation_learned_and_partial() -> None:
    emb = RotaryEmbedding(4, interpolate_factor=2.0, learned_freq=True)
    layer = make_layer(rotary_emb=emb)
    assert layer.rotary is not None
    x = torch.randn(1, 9, 1, 6)
    out = rotated(layer, x, torch.arange(9))
    assert out[..., 4:].equal(x[..., 4:])
    expected = RotaryEmbedding(4, custom_freqs=emb.freqs.data, interpolate_factor=2.0)
    expected = expected.rotate_queries_or_keys(x[:, :, 0].double()).float()
    torch.testing.assert_close(out[:, :, 0], expected)
    layer(tokens(1, 9)).sum().backward()
    assert emb.freqs.grad is not None


def test_xpos_is_refused() -> None:
    with pytest.raises(ValueError, match='xpos'):
        make_layer(rotary_emb=RotaryEmbedding(6, use_xpos=True))


def permuted(layer: SparseAttention, num_angles: int) -> SparseAttention:
    """Return the layer with neighbouring pairs that equals one with layout 'half', by permuted features of q and k."""
    twin = deepcopy(layer)
    assert twin.rotary is not None
    twin.rotary.layout = 'interleaved'
    order = torch.arange(2 * num_angles).view(2, num_angles).T.flatten()
    order = torch.cat((order, torch.arange(2 * num_angles, layer.dim_head)))
    sizes = ((layer.heads, layer.dim_head), (layer.kv_heads, layer.dim_head))
    *of_heads, v = layer.to_qkv.weight.data.split([*(count * dim for count, dim in sizes), layer.kv_heads * 4])
    weights = [w.unflatten(0, size)[:, order].flatten(0, 1) for w, size in zip(of_heads, sizes, strict=True)]
    twin.to_qkv.weight.data = torch.cat([*weights, v])
    for name in ('k_intrablock_positions', 'compress_mem_k'):
        getattr(twin, name).data = getattr(layer, name).data[..., order]
    return twin


@pytest.mark.full
@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize(
    ('num_angles', 'settings'), [(3, {}), (2, {'recompute': True}), (2, {'merge_window': True})], ids=str
)
def test_halves(num_angles: int, settings: dict[str, Any], backend: str, device: torch.device) -> None:
    """A layer with layout 'half' equals one with neighbouring pairs of permuted features, gradients and decoding
    included.
    """
    emb = RotaryEmbedding(2 * num_angles, custom_freqs=torch.tensor([1.0, 0.3, 0.02])[:num_angles])
    options = {'rotary_emb': emb, 'compress_mlp': (MeanPool(), MeanPool()), 'dim_value_head': 4, **settings}
    layer = make_layer(**options, rotary_layout='half', backend=backend).float().to(device)
    twin, x = permuted(layer, num_angles).to(device), tokens(2, 11).float().to(device).requires_grad_()
    outs = [attn(x) for attn in (layer, twin)]
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in outs]
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        cache = layer.init_cache(2, 11)
        parts = [layer(part, cache=cache) for part in x.split([6, 1, 3, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), outs[0], rtol=1e-4, atol=1e-5)


def test_the_layout_belongs_to_the_weights() -> None:
    layer = make_layer(rotary_layout='half')
    with pytest.raises(RuntimeError, match=r'rotary is .* but must be .* in halves'):
        make_layer().load_state_dict(layer.state_dict())
    with pytest.raises(ValueError, match="rotary_layout is 'half', but must be left out where rotary_emb is False"):
        make_layer(rotary_emb=False, rotary_layout='half')
    with pytest.raises(ValueError, match="rotary_layout is 'split', but must be 'interleaved' or 'half'"):
        make_layer(rotary_layout='split')


def make_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    return angle_tables(torch.arange(5, device=device)[None], torch.tensor([0.3, 2.0], device=device))


def test_rotated_is_recomputed(device: torch.device) -> None:
    """A backward pass recomputes it once for all nodes that saved it, also where it reaches only some of them."""
    x, tables = torch.randn(1, 5, 2, 6).to(device).requires_grad_(), make_tables(device)
    (rotated,) = rotate(tables, 'triton', x)
    with recompute_rotated(x, tables, 'triton', rotated):
        square, view, part = rotated.square(), rotated.view(5, 2, 6)[None].square(), rotated[..., :4].square()
    for outs in ((square,), (square, view, part), (part,), (view,), (part, view)):
        results = torch.autograd.grad([out.sum() for out in outs], rotated, retain_graph=True)[0]
        expected = torch.zeros_like(rotated)
        for out in outs:
            expected[..., : out.shape[-1]] += 2 * rotated.detach()[..., : out.shape[-1]]
        assert results.equal(expected)
    saved = [out.grad_fn._saved_self for out in (square, view, part)]  # type: ignore[union-attr]
    places = [t.untyped_storage().data_ptr() == rotated.untyped_storage().data_ptr() for t in saved]
    assert places == [False, False, True]


def test_an_input_changed_in_place_is_noticed(device: torch.device) -> None:
    x, tables = torch.randn(1, 5, 2, 6).to(device).requires_grad_(), make_tables(device)
    (rotated,) = rotate(tables, 'triton', x)
    with recompute_rotated(x, tables, 'triton', rotated):
        out = rotated.square().sum()
    x.detach().mul_(2)
    with pytest.raises(
        RuntimeError, match=r'modified by an inplace operation: \(1, 5, 2, 6\) is at version 1; expected'
    ):
        out.backward()


class Marked(Tensor):
    pass


@pytest.mark.parametrize(
    'why', ['eager', 'flex', 'learned', 'frozen', 'no grad', 'refused', 'others', 'subclass', None]
)
def test_where_rotated_is_saved(why: str | None, device: torch.device) -> None:
    x, tables = torch.randn(1, 5, 2, 6).to(device), make_tables(device)
    backend = why if why in ('eager', 'flex') else 'triton'
    x = x.as_subclass(Marked) if why == 'subclass' else x
    x = x.requires_grad_(why != 'frozen')
    tables = (tables[0].requires_grad_(), tables[1]) if why == 'learned' else tables
    contexts: dict[str | None, Any] = {
        'no grad': torch.no_grad(),
        'refused': disable_saved_tensors_hooks('why'),
        'others': save_on_cpu(),
    }
    with contexts.get(why, nullcontext()):
        (rotated,) = rotate(tables, backend, x)
        context = recompute_rotated(x, tables, backend, rotated)
    assert isinstance(context, nullcontext) == (why is not None)


def test_without_tables_nothing_is_recomputed() -> None:
    x = torch.randn(1, 5, 2, 6, requires_grad=True)
    assert isinstance(recompute_rotated(x, None, 'triton', x), nullcontext)
