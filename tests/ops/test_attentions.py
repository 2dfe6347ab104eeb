"""Properties that the compressed, the selected and the window attention share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.ops import _eager, compressed_attention, selected_attention, window_attention
from native_sparse_attention.testing import LAYOUTS, ROW_LIMITS, lay_out, outputs_and_gradients, row_errors
from tests.definition.definition import count_compressed_blocks
from tests.support.problems import (
    Extents,
    Heads,
    cumulative,
    make_compressed,
    make_mem_kv,
    make_qkv,
    normal,
    packed,
    row_integers,
    whole,
)

BLOCK, STRIDE, SELECTION_BLOCK, WINDOW = 5, 2, 4, 6
HEADS = Heads(6, 2, 4, 3)
QUERY_SIDE = ('q', 'block_indices', 'block_scale')
Tensors = dict[str, Tensor]


def make_compressed_inputs(extents: Extents, heads: Heads) -> Tensors:
    q, _, _ = make_qkv(extents, heads)
    k, v = make_compressed(extents, heads, BLOCK, STRIDE)
    return {'q': q, 'k': k, 'v': v}


def make_selected_inputs(extents: Extents, heads: Heads) -> Tensors:
    q, k, v = make_qkv(extents, heads)
    shape = (extents.batch, extents.seqlen_q, heads.kv_heads, 3)
    blocks = torch.randint(-1, extents.seqlen_k // SELECTION_BLOCK + 1, shape, dtype=torch.int32)
    return {'q': q, 'k': k, 'v': v, 'block_indices': blocks, 'block_scale': 0.5 + torch.rand(shape).double()}


def make_window_inputs(extents: Extents, heads: Heads) -> Tensors:
    return dict(zip('qkv', make_qkv(extents, heads), strict=True))


def compressed(extents: Extents, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    settings = {'seqlen_k': extents.seqlen_k, **extents.where, **settings}
    return compressed_attention(q, k, v, block_size=BLOCK, stride=STRIDE, **settings)


def selected(extents: Extents, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    return selected_attention(q, k, v, block_size=SELECTION_BLOCK, **extents.where, **settings)


def window(extents: Extents, q: Tensor, k: Tensor, v: Tensor, causal: bool = True, **settings: Any) -> Any:
    size = (WINDOW - 1, 0 if causal else WINDOW - 1)
    return window_attention(q, k, v, window_size=size, causal=causal, **extents.where, **settings)


@dataclass(frozen=True)
class Attention:
    """An op with fixed sizes: how to make its inputs, call it, and count its keys among `tokens` tokens."""

    make_inputs: Callable[[Extents, Heads], Tensors]
    attend: Callable[..., tuple[Tensor, Tensor]]
    count_keys: Callable[[int], int]


ATTENTIONS = {
    'compressed': Attention(
        make_compressed_inputs, compressed, lambda tokens: count_compressed_blocks(tokens, BLOCK, STRIDE)
    ),
    'selected': Attention(make_selected_inputs, selected, lambda tokens: tokens),
    'window': Attention(make_window_inputs, window, lambda tokens: tokens),
}

every_attention = pytest.mark.parametrize('attention', ATTENTIONS.values(), ids=ATTENTIONS)
both_ways = pytest.mark.parametrize('causal', [True, False])


def cut(tensors: Tensors, queries: slice, keys: slice) -> Tensors:
    """Return some of the queries and some of the keys."""
    return {name: t[:, queries if name in QUERY_SIDE else keys] for name, t in tensors.items()}


def results(
    attention: Attention, extents: Extents, tensors: Tensors, grads: list[Tensor] | None = None, **settings: Any
) -> dict[str, Tensor]:
    return outputs_and_gradients(lambda **t: attention.attend(extents, **t, **settings), tensors, grads)


def make_grads(extents: Extents, heads: Heads) -> list[Tensor]:
    shape = extents.batch, extents.seqlen_q
    return [normal(*shape, heads.heads, heads.value_dim), normal(extents.batch, heads.heads, extents.seqlen_q)]


def assert_same(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert result.keys() == expected.keys()
    for name in result:
        torch.testing.assert_close(
            result[name], expected[name], rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f'{n}: {m}'
        )


def assert_nothing_was_read(outputs: dict[str, Tensor]) -> None:
    for name, tensor in outputs.items():
        assert tensor.eq(-torch.inf if name == 'out1' else 0).all(), name


@every_attention
@both_ways
def test_gradcheck(causal: bool, attention: Attention) -> None:
    # The first query stands before the first key, and the second row has few keys: some rows read nothing.
    extents = Extents(2, 5, 9, {'q_offset': row_integers([-1, 4]), 'seqlens_k': row_integers([9, 5])}, [9, 5])
    heads = Heads(4, 2, 3, 2)
    tensors = attention.make_inputs(extents, heads)
    names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]

    def outputs(*floats: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention.attend(extents, **(tensors | dict(zip(names, floats, strict=True))), causal=causal)
        return out, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(outputs, [tensors[name].nan_to_num().requires_grad_() for name in names])


def test_gradcheck_of_memory() -> None:
    heads = Heads(4, 2, 3, 2)
    tensors = make_compressed_inputs(whole(8), heads)
    inputs = [t.requires_grad_() for t in (*tensors.values(), *make_mem_kv(heads, 2))]
    assert torch.autograd.gradcheck(lambda q, k, v, *mem_kv: compressed(whole(8), q, k, v, mem_kv=mem_kv), inputs)


@every_attention
@pytest.mark.parametrize('position', [0, 3, 4, 10, 17, 22])
def test_the_future_changes_nothing(position: int, attention: Attention) -> None:
    extents = whole(24, batch=2)
    tensors = attention.make_inputs(extents, HEADS)
    changed = {name: t.clone() for name, t in tensors.items()}
    for name in ('k', 'v'):
        changed[name][:, attention.count_keys(position + 1) :] = torch.nan
    changed['q'][:, position + 1 :] = torch.nan
    (out, lse), (same_out, same_lse) = (attention.attend(extents, **t) for t in (tensors, changed))
    assert torch.equal(out[:, : position + 1], same_out[:, : position + 1])
    assert torch.equal(lse[..., : position + 1], same_lse[..., : position + 1])


@every_attention
@both_ways
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5), uncovered=st.integers(0, 2))
def test_packed_is_alone(lengths: list[int], uncovered: int, causal: bool, attention: Attention) -> None:
    extents = packed(lengths, uncovered)
    tensors, grads = attention.make_inputs(extents, HEADS), make_grads(extents, HEADS)
    together = results(attention, extents, tensors, grads, causal=causal)
    first_key = 0
    for start, stop in itertools.pairwise([0, *itertools.accumulate(lengths)]):
        queries = slice(start, stop)
        keys = slice(first_key, first_key := first_key + attention.count_keys(stop - start))
        own_grads = [grads[0][:, queries], grads[1][..., queries]]
        alone = results(attention, whole(stop - start), cut(tensors, queries, keys), own_grads, causal=causal)
        assert_same(cut_results(together, queries, keys), alone)
    rest = slice(sum(lengths), None)
    assert_nothing_was_read(cut_results(together, rest, slice(first_key, None)))


def cut_results(outputs: dict[str, Tensor], queries: slice, keys: slice) -> dict[str, Tensor]:
    on_keys = ('grad of k', 'grad of v')
    return {
        name: t[..., queries] if name == 'out1' else t[:, keys if name in on_keys else queries]
        for name, t in outputs.items()
    }


@every_attention
@both_ways
def test_chunks_of_queries_equal_one_call(causal: bool, attention: Attention) -> None:
    tensors = attention.make_inputs(whole(23), HEADS)
    out, lse = attention.attend(whole(23), **tensors, causal=causal)
    for start, stop in itertools.pairwise([0, 1, 2, 9, 22, 23]):
        extents = Extents(1, stop - start, 23, {'q_offset': start}, [23])
        part = cut(tensors, slice(start, stop), slice(None))
        out_part, lse_part = attention.attend(extents, **part, causal=causal)
        torch.testing.assert_close(out_part, out[:, start:stop], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse_part, lse[..., start:stop], rtol=1e-12, atol=1e-12)


@every_attention
@both_ways
def test_small_chunks_inside_give_the_same(causal: bool, attention: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    for extents in (whole(23, batch=2), packed([0, 9, 3, 11], 1)):
        tensors, grads = attention.make_inputs(extents, HEADS), make_grads(extents, HEADS)
        expected = results(attention, extents, tensors, grads, causal=causal)
        for elements in (1, 700):
            with monkeypatch.context() as patch:
                patch.setattr(_eager, 'CHUNK_ELEMENTS', elements)
                assert_same(results(attention, extents, tensors, grads, causal=causal), expected)


@every_attention
def test_a_row_does_not_depend_on_its_neighbours(attention: Attention) -> None:
    extents = Extents(3, 7, 12, {'seqlens_k': row_integers([12, 9, 4])}, [12, 9, 4])
    tensors = attention.make_inputs(extents, HEADS)
    out, lse = attention.attend(extents, **tensors)
    changed = {name: t.clone() for name, t in tensors.items()}
    for name in 'qkv':
        changed[name][::2] = torch.nan
    changed_out, changed_lse = attention.attend(extents, **changed)
    assert torch.equal(changed_out[1], out[1])
    assert torch.equal(changed_lse[1], lse[1])
    alone = Extents(1, 7, 12, {'seqlens_k': row_integers([9])}, [9])
    out_alone, lse_alone = attention.attend(alone, **{name: t[1:2] for name, t in tensors.items()})
    torch.testing.assert_close(out_alone[0], out[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse_alone[0], lse[1], rtol=1e-12, atol=1e-12)


@every_attention
@both_ways
@pytest.mark.parametrize('names', ['kv', 'qkv'])
@pytest.mark.parametrize('poison', [-7.0, torch.nan, torch.inf])
def test_a_sequence_does_not_depend_on_its_neighbours(
    poison: float, names: str, causal: bool, attention: Attention
) -> None:
    extents = packed([9, 7, 8])
    tensors, grads = attention.make_inputs(extents, HEADS), make_grads(extents, HEADS)
    changed = {name: t.clone() for name, t in tensors.items()}
    queries = slice(9, 16)
    keys = slice(attention.count_keys(9), attention.count_keys(9) + attention.count_keys(7))
    for name in names:
        own = queries if name == 'q' else keys
        changed[name][:, : own.start] *= poison
        changed[name][:, own.stop :] *= poison
    outputs, same = (results(attention, extents, t, grads, causal=causal) for t in (tensors, changed))
    outputs, same = (cut_results(t, queries, keys) for t in (outputs, same))
    for name in outputs:
        assert torch.equal(same[name], outputs[name]), name


@every_attention
@pytest.mark.parametrize('poison', [torch.nan, torch.inf])
@pytest.mark.parametrize('names', ['k', 'v', 'kv'])
def test_non_finite_keys_reach_their_readers_only(names: str, poison: float, attention: Attention) -> None:
    tensors, grads = attention.make_inputs(whole(24), HEADS), make_grads(whole(24), HEADS)
    poisoned = {name: t.clone() for name, t in tensors.items()}
    key = attention.count_keys(12)
    for name in names:
        poisoned[name][:, key, 0] *= poison
    outputs, same = (results(attention, whole(24), t, grads) for t in (tensors, poisoned))
    # The key belongs to the first KV head. A query reads it where its value changes the output of the query.
    moved = {name: t.clone() for name, t in tensors.items()}
    moved['v'][:, key, 0] += 1
    reads = (attention.attend(whole(24), **moved)[0] != outputs['out0']).any(-1)
    assert reads.any()
    assert not reads[:, :12].any()
    assert same['out0'][~reads].equal(outputs['out0'][~reads])
    assert same['out1'].mT[~reads].equal(outputs['out1'].mT[~reads])
    assert same['grad of q'][~reads].equal(outputs['grad of q'][~reads])
    assert not same['out0'][reads].isfinite().all(-1).any()
    if names == 'v':
        assert same['out1'].equal(outputs['out1'])


NOTHING_TO_READ = {
    'no keys': Extents(2, 4, 0, {}, [0, 0]),
    'no keys but an offset': Extents(2, 4, 0, {'q_offset': 3}, [0, 0]),
    'before the first key': Extents(1, 4, 12, {'q_offset': -4}, [12]),
    'empty rows': Extents(2, 4, 12, {'seqlens_k': row_integers([0, 0]), 'q_offset': 3}, [0, 0]),
    'empty sequences': packed([0, 0, 0], uncovered=4),
    'keys of other sequences': Extents(
        1, 6, 12, {'cu_seqlens': cumulative([6, 0]), 'cu_seqlens_k': cumulative([0, 12])}, [0, 12]
    ),
    'no tokens': whole(0),
    'no rows': whole(4, batch=0),  # fewer tokens than a compressed block
    'keys only': Extents(2, 0, 9, {}, [9, 9]),
}


@every_attention
@pytest.mark.parametrize('extents', NOTHING_TO_READ.values(), ids=NOTHING_TO_READ)
def test_rows_with_nothing_to_read(extents: Extents, attention: Attention) -> None:
    tensors = attention.make_inputs(extents, HEADS)
    assert_nothing_was_read(results(attention, extents, tensors, make_grads(extents, HEADS)))


@every_attention
@pytest.mark.parametrize('seqlen', [1, 2, 5])
def test_rows_with_nothing_to_read_beside_others(seqlen: int, attention: Attention) -> None:
    extents = Extents(2, seqlen, 12, {'q_offset': row_integers([-seqlen, 6])}, [12, 12])
    tensors = attention.make_inputs(extents, HEADS)
    outputs = results(attention, extents, tensors, make_grads(extents, HEADS))
    assert_nothing_was_read({name: t[:1] for name, t in outputs.items()})
    assert all(t.isfinite().all() for name, t in outputs.items() if name != 'out1')


@every_attention
@both_ways
@pytest.mark.parametrize('layout', LAYOUTS)
def test_strides_change_nothing(layout: str, causal: bool, attention: Attention) -> None:
    extents = whole(13, batch=2)
    tensors = attention.make_inputs(extents, HEADS)
    laid_out = {name: lay_out(t, layout) if t.is_floating_point() else t for name, t in tensors.items()}
    expected = results(attention, extents, {name: t.contiguous() for name, t in laid_out.items()}, causal=causal)
    assert_same(results(attention, extents, laid_out, causal=causal), expected)


@every_attention
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize('logit', [6e4, -6e4])
def test_large_logits(logit: float, dtype: torch.dtype, attention: Attention) -> None:
    tensors = attention.make_inputs(whole(20), HEADS)
    tensors |= {name: t / t.norm(dim=-1, keepdim=True) * 6e4**0.5 for name, t in tensors.items() if name in 'qk'}
    # One key that is parallel or opposite to every query.
    tensors['q'] = tensors['q'].abs() * (1 if logit > 0 else -1)
    tensors['k'][:, 0] = tensors['k'][:, 0].abs()
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    outputs = results(attention, whole(20), tensors, scale=1.0)
    assert all(t.isfinite().all() for name, t in outputs.items() if name != 'out1')
    assert outputs['out1'].abs().masked_fill(outputs['out1'] == -torch.inf, 0).max() > 3e4
    expected = results(
        attention, whole(20), {n: t.double() if n in 'qkv' else t for n, t in tensors.items()}, scale=1.0
    )
    assert row_errors(outputs['out0'], expected['out0']).max() <= 2 * ROW_LIMITS.get(dtype, 0)
    assert torch.equal(outputs['out1'] == -torch.inf, expected['out1'] == -torch.inf)


@every_attention
@pytest.mark.parametrize('chunk', [None, 2**14])
@pytest.mark.parametrize('dtype', ROW_LIMITS)
def test_lower_precision(
    dtype: torch.dtype, chunk: int | None, attention: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunk:
        monkeypatch.setattr(_eager, 'CHUNK_ELEMENTS', chunk)
    extents, heads = whole(300), Heads(4, 2, 16, 8)
    tensors = attention.make_inputs(extents, heads)
    tensors = {name: t.to(dtype) if name in 'qkv' else t for name, t in tensors.items()}
    grads = [t.to(dtype) for t in make_grads(extents, heads)]
    outputs = results(attention, extents, tensors, grads)
    assert outputs['out0'].dtype == dtype
    assert outputs['out1'].dtype == torch.float32
    gold = results(attention, extents, {n: t.double() if n in 'qkv' else t for n, t in tensors.items()}, grads)
    for name, limit in (('out0', 1), ('out1', 0), ('grad of q', 1), ('grad of k', 1), ('grad of v', 1)):
        worst = float(row_errors(outputs[name], gold[name], row_dims=limit).max())
        assert worst <= ROW_LIMITS[outputs[name].dtype], f'{name}: {worst:.2e}'


@every_attention
def test_float64_stays_float64(attention: Attention) -> None:
    out, lse = attention.attend(whole(12), **attention.make_inputs(whole(12), HEADS))
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)


@every_attention
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype, attention: Attention) -> None:
    tensors = attention.make_inputs(whole(12), HEADS)
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}

    def under_autocast(**leaves: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast('cpu', torch.bfloat16):
            return attention.attend(whole(12), **leaves)

    outputs, expected = outputs_and_gradients(under_autocast, tensors), results(attention, whole(12), tensors)
    for name in expected:
        assert torch.equal(outputs[name], expected[name]), name


@every_attention
def test_inputs_are_left_alone(attention: Attention) -> None:
    tensors = attention.make_inputs(whole(12), HEADS)
    copies = {name: t.clone() for name, t in tensors.items()}
    results(attention, whole(12), tensors)
    assert all(torch.equal(tensors[name], copies[name]) for name in tensors)


@every_attention
@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'q': normal(2, 12, 6)}, r'q has shape \(2, 12, 6\), but must have 4 dimensions'),
        ({'q': torch.zeros(2, 12, 6, 4).int()}, r'q has dtype torch.int32, but must be float64, float32'),
        ({'q': normal(2, 12, 5, 4)}, r'q has 5 heads, but must have a multiple of the 2 heads of k'),
        ({'k': normal(2, 12, 2, 5)}, r'k\w* has head size 5, but q has 4'),
        ({'k': normal(1, 12, 2, 4)}, r'k\w* has batch size 1, but q has 2'),
        ({'k': normal(2, 12, 2, 4).float()}, r'k\w* has dtype torch.float32, but q has torch.float64'),
        ({'v': normal(2, 11, 2, 3)}, r'v\w* has shape \(2, 11, 2, 3\), but must be \(2, \d+, 2\) \+ \(DV,\)'),
        ({'backend': 'fast'}, r"backend is 'fast', but must be one of 'auto', 'triton', 'flex', 'eager'"),
        ({'q_offset': 1.5}, r'q_offset is 1.5, but must be an int, an integer tensor or None'),
        ({'q_offset': row_integers([1])}, r'q_offset has 1 entries, but must have 2'),
        ({'q_offset': torch.zeros(2)}, r'q_offset has dtype torch.float32, but must be int32 or int64'),
        ({'seqlens_k': row_integers([1, 2, 3])}, r'seqlens_k has 3 entries, but must have 2'),
        ({'seqlens_k': row_integers([1, 13])}, r'seqlens_k lies in \[1, 13\], but must lie in \[0, 12\]'),
        ({'seqlens_k': row_integers([-1, 3])}, r'seqlens_k lies in \[-1, 3\], but must lie in \[0, 12\]'),
        ({'seqlens_k': torch.zeros(2, 1).int()}, r'seqlens_k has shape \(2, 1\), but must have 1 dimension'),
        ({'cu_seqlens': cumulative([12])}, r'q has batch size 2, but must have 1 where cu_seqlens is given'),
        ({'cu_seqlens_k': cumulative([12])}, r'cu_seqlens_k is given, but needs cu_seqlens beside it'),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str, attention: Attention) -> None:
    tensors = attention.make_inputs(whole(12, batch=2), HEADS)
    with pytest.raises(ValueError, match=message):
        attention.attend(whole(12, batch=2), **(tensors | changes))


@every_attention
@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'cu_seqlens': torch.tensor([0.0, 12.0])}, r'cu_seqlens has dtype torch.float32, but must be int32 or int64'),
        ({'cu_seqlens': row_integers([12])}, r'cu_seqlens has 1 entries, but must have one per sequence and one more'),
        ({'cu_seqlens': row_integers([1, 12])}, r'cu_seqlens starts at 1, but must start at 0'),
        ({'cu_seqlens': row_integers([0, 8, 5, 12])}, r'cu_seqlens decreases at entry 2, but must not'),
        ({'cu_seqlens': row_integers([0, 13])}, r'cu_seqlens ends at 13, but there are 12 tokens'),
        ({'cu_seqlens_k': row_integers([0, 3, 12])}, r'cu_seqlens_k has 3 entries, but must have 2'),
        ({'cu_seqlens_k': row_integers([0, 13])}, r'cu_seqlens_k ends at 13, but there are 12 tokens'),
        ({'seqlens_k': row_integers([12])}, r'seqlens_k is given, but cannot be combined with cu_seqlens'),
        ({'q_offset': row_integers([1, 2])}, r'q_offset has 2 entries, but must have 1'),
    ],
)
def test_wrong_packing(changes: dict[str, Any], message: str, attention: Attention) -> None:
    tensors = attention.make_inputs(whole(12), HEADS)
    with pytest.raises(ValueError, match=message):
        attention.attend(whole(12), **tensors, **({'cu_seqlens': cumulative([12])} | changes))


@every_attention
def test_an_explicit_backend_does_not_fall_back(attention: Attention) -> None:
    tensors = attention.make_inputs(whole(12), HEADS)
    with pytest.raises(ValueError, match=r"backend 'triton' cannot serve this call of \w+: \w+"):
        attention.attend(whole(12), **tensors, backend='triton')


@every_attention
def test_triton_needs_a_gpu_or_its_interpreter(attention: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    tensors = attention.make_inputs(whole(12), HEADS)
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    with pytest.raises(ValueError, match=r'the tensors are on cpu, but its kernels run on GPUs|has no triton backend'):
        attention.attend(whole(12), **tensors, backend='triton')
