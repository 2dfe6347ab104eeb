"""Selected attention in Triton against eager: indices, sizes, offsets, layouts, gradients, long CSR rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.ops import selected_attention
from native_sparse_attention.ops._triton import inverse_index
from native_sparse_attention.ops.selected_attention.triton.by_block import backward as by_block_backward
from native_sparse_attention.ops.selected_attention.triton.by_block import forward as by_block
from native_sparse_attention.ops.selected_attention.triton.by_block import partials
from native_sparse_attention.ops.selected_attention.triton.dkv import launch as dkv
from native_sparse_attention.testing import (
    INDEX_KINDS,
    LAYOUTS,
    assert_attention_matches,
    make_block_indices,
    outputs_and_gradients,
)
from tests.support.harness import (
    assert_close_to_eager,
    assert_same_bits,
    fewer_examples,
    make_grads,
    place,
    run_eager,
    run_triton,
)
from tests.support.problems import Extents, Heads, cumulative, drawn_extents, drawn_heads, packed, row_integers, whole
from tests.support.selected_attention_problems import (
    HEADS,
    KERNELS,
    TWO_GROUPS,
    kernels,  # noqa: F401, every test takes it
    make_indices,
    make_inputs,
    per_block,
    per_tile,
)


def assert_close(
    extents: Extents,
    heads: Heads,
    device: torch.device,
    *,
    num_selected: int = 3,
    block_size: int = 4,
    index_heads: int | None = None,
    indices: Tensor | None = None,
    scaled: bool = False,
    layout: str = 'contiguous',
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> None:
    """float32 within 1e-5, half types as in `assert_close_to_eager`."""
    if indices is None:
        indices = make_indices(extents, index_heads or heads.kv_heads, num_selected, block_size)
    tensors = make_inputs(extents, heads, device, indices, scaled=scaled, layout=layout, dtype=dtype)
    settings |= {'block_size': block_size, **place(extents.where, device)}
    assert_close_to_eager(selected_attention, tensors, make_grads(extents, heads, device), **settings)


@pytest.mark.quick
@pytest.mark.parametrize('kind', INDEX_KINDS)
@pytest.mark.parametrize(('dtype', 'scaled'), [(torch.float32, True), (torch.float16, False), (torch.float16, True)])
def test_every_kind_of_indices(kind: str, dtype: torch.dtype, scaled: bool, device: torch.device) -> None:
    """The error rules hold, with enough heads for the rule of mean errors."""
    extents = Extents(1, 5, 30, {'q_offset': 17}, [30])
    indices = make_block_indices(kind, 1, 5, 2, 3, seqlen_k=30, block_size=7, q_offset=17)
    tensors = make_inputs(extents, Heads(16, 2, 32, 24), device, indices, scaled=scaled, dtype=dtype)
    assert_attention_matches(selected_attention, tensors, 'triton', block_size=7, q_offset=17)


@pytest.mark.parametrize('group', [1, 2, 3, 4, 6, 8, 12, 16, 32, 40])
def test_groups(group: int, device: torch.device) -> None:
    assert_close(whole(4), Heads(group, 1, 16, 16), device, block_size=2, scaled=group % 3 == 0)


@pytest.mark.parametrize(
    ('head_dim', 'value_dim', 'dtype'),
    [
        (1, 3, torch.float32),
        (40, 40, torch.float32),
        (80, 64, torch.float32),
        (100, 192, torch.float32),
        (256, 17, torch.float32),
        (24, 40, torch.float16),
    ],
)
def test_head_sizes(head_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.float32:
        return assert_close(whole(6), Heads(3, 1, head_dim, value_dim), device, num_selected=2)
    extents = Extents(1, 8, 20, {}, [20])
    indices = make_block_indices('valid', 1, 8, 1, 2, seqlen_k=20, block_size=5, q_offset=12)
    tensors = make_inputs(extents, Heads(8, 1, head_dim, value_dim), device, indices, dtype=dtype)
    return assert_attention_matches(selected_attention, tensors, 'triton', block_size=5)


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('block_size', [1, 3, 16, 33, 64, 1000])
def test_block_sizes(block_size: int, causal: bool, device: torch.device) -> None:
    seqlen_k = min(2 * block_size, 90) + 7
    extents = Extents(1, 3, seqlen_k, {}, [seqlen_k])
    assert_close(extents, HEADS, device, block_size=block_size, num_selected=4, scaled=True, causal=causal)


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize(('seqlen', 'scaled'), [(48, True), (43, False)])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_whole_blocks(dtype: torch.dtype, seqlen: int, scaled: bool, causal: bool, device: torch.device) -> None:
    """Blocks that fill a key tile: later queries read them completely, queries inside them do not."""
    settings: dict[str, Any] = {'block_size': 16, 'num_selected': 3, 'scaled': scaled, 'causal': causal}
    assert_close(whole(seqlen), Heads(2, 1, 16, 16), device, dtype=dtype, **settings)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
@pytest.mark.parametrize(('name', 'value', 'scaled'), [('k', float('-inf'), True), ('v', float('inf'), False)])
def test_infinite_keys_before_unread_keys(
    name: str, value: float, scaled: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """A repeated index is read once, even if its block is not finite. Infinite values may become NaN: tiles of several
    queries mark the rows that read them by NaN.
    """
    indices = torch.tensor([0, 0, 1], dtype=torch.int32).expand(1, 32, 1, 3)
    tensors = make_inputs(whole(32), Heads(2, 1, 16, 16), device, indices, scaled=scaled, dtype=dtype)
    tensors['q'] = tensors['q'].abs()
    tensors[name][:, 3] = value
    expected = run_eager(selected_attention, tensors, block_size=16)
    found = run_triton(selected_attention, tensors, block_size=16)
    for result in ('out0', 'out1'):
        a, b = (t[result].where(t[result].isfinite(), torch.nan) for t in (found, expected))
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2, equal_nan=True)


def test_many_blocks(device: torch.device) -> None:
    assert_close(Extents(1, 1, 90, {}, [90]), HEADS, device, num_selected=60, block_size=1, scaled=True)


EXTENTS = {
    'offset': Extents(2, 5, 40, {'q_offset': 21}, [40, 40]),
    'negative offset': Extents(1, 9, 20, {'q_offset': -4}, [20]),
    'offset beyond the keys': Extents(1, 6, 12, {'q_offset': 9}, [12]),
    'row offsets': Extents(3, 4, 30, {'q_offset': row_integers([5, -2, 40])}, [30] * 3),
    'lengths': Extents(3, 5, 30, {'seqlens_k': row_integers([30, 9, 21])}, [30, 9, 21]),
    'lengths, row offsets': Extents(
        3, 5, 30, {'seqlens_k': row_integers([30, 13, 0]), 'q_offset': row_integers([20, -2, 3])}, [30, 13, 0]
    ),
    'packed': packed([0, 0, 7, 1, 9, 0], uncovered=2),
    'packed, other keys': Extents(
        1,
        14,
        50,
        {'cu_seqlens': cumulative([0, 5, 1, 6, 0]), 'cu_seqlens_k': cumulative([7, 13, 0, 20, 4])},
        [7, 13, 0, 20, 4],
    ),
    'packed, offsets': Extents(
        1,
        12,
        40,
        {
            'cu_seqlens': cumulative([6, 0, 5]),
            'cu_seqlens_k': cumulative([20, 5, 13]),
            'q_offset': row_integers([11, 3, -2]),
        },
        [20, 5, 13],
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('extents', EXTENTS.values(), ids=EXTENTS)
def test_query_offsets_and_lengths(extents: Extents, causal: bool, device: torch.device) -> None:
    assert_close(extents, Heads(2, 1, 16, 24), device, block_size=3 if causal else 4, causal=causal)


@fewer_examples(0.16)
@given(
    drawn_extents(max_seqlen=10),
    drawn_heads(),
    st.integers(1, 7),
    st.integers(0, 4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 0.7]),
    st.sampled_from(LAYOUTS),
)
def test_random_problems(
    extents: Extents,
    heads: Heads,
    block_size: int,
    num_selected: int,
    alone: bool,
    scaled: bool,
    causal: bool,
    scale: float | None,
    layout: str,
) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    sizes: dict[str, Any] = {'num_selected': num_selected, 'block_size': block_size}
    sizes['index_heads'] = heads.heads if alone else heads.kv_heads
    assert_close(extents, heads, device, **sizes, scaled=scaled, causal=causal, scale=scale, layout=layout)


@pytest.mark.parametrize('scaled', [False, True])
def test_heads_may_select_alone(scaled: bool, device: torch.device) -> None:
    assert_close(whole(5, batch=2), Heads(6, 2, 16, 16), device, index_heads=6, scaled=scaled, block_size=2)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_layouts(layout: str, device: torch.device) -> None:
    assert_close(whole(5, batch=2), TWO_GROUPS, device, layout=layout, block_size=2)


def test_strides_of_indices_and_factors(device: torch.device) -> None:
    """Indices expanded over tokens, 64-bit indices, and a last dimension that is not contiguous."""
    indices, factors = torch.tensor([[3, 0, 1], [1, 1, 0]]), 1 + torch.rand(3, 2)
    tensors = make_inputs(whole(6), TWO_GROUPS, device, indices.expand(1, 6, 2, 3))
    tensors['block_indices'] = indices.to(device).expand(1, 6, 2, 3)
    tensors['block_scale'] = factors.to(device).T.expand(1, 6, 2, 3)
    assert_close_to_eager(selected_attention, tensors, make_grads(whole(6), TWO_GROUPS, device), block_size=2)


@pytest.mark.parametrize('dtype', [torch.float16, torch.float64])
def test_factors_of_another_dtype(dtype: torch.dtype, device: torch.device) -> None:
    indices = make_block_indices('valid', 1, 6, 1, 3, seqlen_k=6, block_size=2)
    tensors = make_inputs(whole(6), HEADS, device, indices, scaled=True)
    grads = make_grads(whole(6), HEADS, device)
    tensors['block_scale'] = tensors['block_scale'].half()
    expected = run_triton(selected_attention, tensors, grads, block_size=2)
    tensors['block_scale'] = tensors['block_scale'].to(dtype)
    result = run_triton(selected_attention, tensors, grads, block_size=2)
    name = 'grad of block_scale'
    assert result[name].dtype == dtype
    torch.testing.assert_close(result.pop(name).half(), expected.pop(name), rtol=2e-3, atol=2e-3)
    assert_same_bits(result, expected)


def test_expanded_gradients(device: torch.device) -> None:
    results = []
    indices = make_block_indices('valid', 1, 9, 1, 2, seqlen_k=9, block_size=4)
    tensors = make_inputs(whole(9), HEADS, device, indices)
    for backend in ('triton', 'eager'):
        q, k, v = (tensors[name].detach().requires_grad_() for name in 'qkv')
        out, lse = selected_attention(q, k, v, tensors['block_indices'], block_size=4, backend=backend)
        (out.sum() + lse.sum()).backward()
        results.append((q.grad, k.grad, v.grad))
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('index', [0, 1], ids=['out', 'lse'])
def test_gradient_of_one_output(index: int, device: torch.device) -> None:
    indices = make_block_indices('valid', 1, 6, 1, 2, seqlen_k=6, block_size=2)
    tensors = make_inputs(whole(6), HEADS, device, indices, scaled=True)
    grads = make_grads(whole(6), HEADS, device)[index : index + 1]
    results = [
        outputs_and_gradients(
            lambda b=backend, **t: selected_attention(**t, block_size=2, backend=b)[index], tensors, grads
        )
        for backend in ('triton', 'eager')
    ]
    for name in results[0]:
        torch.testing.assert_close(results[0][name], results[1][name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('needed', [['q'], ['k'], ['v', 'block_scale'], ['block_scale'], []])
def test_only_needed_gradients(needed: list[str], device: torch.device) -> None:
    indices = make_block_indices('valid', 1, 5, 1, 2, seqlen_k=5, block_size=2)
    tensors = make_inputs(whole(5), HEADS, device, indices, scaled=True)
    grads = make_grads(whole(5), HEADS, device)
    expected = run_triton(selected_attention, tensors, grads, block_size=2)
    leaves: dict[str, Any] = {name: t.detach().requires_grad_(name in needed) for name, t in tensors.items()}
    outputs = selected_attention(**leaves, block_size=2, backend='triton')
    assert all(t.requires_grad == bool(needed) for t in outputs)
    if needed:
        torch.autograd.backward(outputs, grads)
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name in needed)
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, expected[f'grad of {name}'], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('logit', [6e4, -6e4])
def test_large_logits(logit: float, device: torch.device) -> None:
    indices = make_block_indices('valid', 1, 10, 1, 2, seqlen_k=10, block_size=4)
    tensors = make_inputs(whole(10), HEADS, device, indices)
    for name in 'qk':
        tensors[name] = tensors[name].abs() / tensors[name].norm(dim=-1, keepdim=True) * 6e4**0.5
    tensors['q'] = tensors['q'] * (1 if logit > 0 else -1)
    result = run_triton(selected_attention, tensors, block_size=4, scale=1.0)
    assert all(t.isfinite().all() for t in result.values())
    gold = run_eager(
        selected_attention,
        {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()},
        block_size=4,
        scale=1.0,
    )
    assert result['out1'].abs().max() > 3e4
    torch.testing.assert_close(result['out1'].double(), gold['out1'], rtol=1e-6, atol=1e-2)


def small_pieces(monkeypatch: pytest.MonkeyPatch, chunk_rows: int, workspace: int, most_entries: int) -> None:
    monkeypatch.setattr(dkv, 'CHUNK_ROWS', {4: chunk_rows})
    monkeypatch.setattr(dkv, 'WORKSPACE', workspace)
    monkeypatch.setattr(inverse_index, 'MAX_ENTRIES', most_entries)


@per_tile
@pytest.mark.parametrize(
    ('chunk_rows', 'workspace', 'most_entries'), [(1, 2**29, 2**24), (6, 2**13, 1), (8, 2**29, 40), (16, 1, 2**24)]
)
@pytest.mark.parametrize('where', ['whole', 'packed'])
def test_long_csr_rows_are_split(
    where: str,
    chunk_rows: int,
    workspace: int,
    most_entries: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks of one entry and of several, a small workspace for partial sums, and one pair at a time."""
    small_pieces(monkeypatch, chunk_rows, workspace, most_entries)
    extents = whole(5, batch=2) if where == 'whole' else packed([4, 0, 5], uncovered=1)
    indices = make_indices(extents, 2, 3, 3)
    indices[..., 0] = 0
    assert_close(extents, TWO_GROUPS, device, indices=indices, block_size=3)


# One of the two designs by block: their forward passes are the same.
@pytest.mark.parametrize('kernels', KERNELS[2:3], indirect=True)
@pytest.mark.parametrize(('chunk_rows', 'tokens'), [(1, 1), (6, 2), (16, 5)])
@pytest.mark.parametrize('where', ['whole', 'packed'])
def test_partial_results_of_some_tokens_at_a_time(
    where: str, chunk_rows: int, tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits do not depend on chunks, nor on the tokens and KV heads per launch."""
    extents = whole(12, batch=2) if where == 'whole' else packed([4, 0, 7], uncovered=1)
    indices = make_indices(extents, 2, 3, 3)
    indices[..., 0] = 0
    tensors = make_inputs(extents, TWO_GROUPS, device, indices, scaled=True, dtype=torch.float16)
    settings = {'block_size': 3, **place(extents.where, device)}
    with torch.no_grad():
        expected = selected_attention(**tensors, **settings, backend='triton')
        monkeypatch.setattr(by_block, 'CHUNK_ROWS', chunk_rows)
        monkeypatch.setattr(by_block, 'WORKSPACE', tokens * 3 * 2 * (2 * TWO_GROUPS.value_dim + 12))
        for result, same in zip(selected_attention(**tensors, **settings, backend='triton'), expected, strict=True):
            assert torch.equal(result, same)


@per_block
@pytest.mark.parametrize(
    ('heads', 'factor'), [(HEADS, None), (HEADS, 1.0), (HEADS, 1e6), (HEADS, 1e-6), (Heads(2, 1, 64, 128), None)]
)
@pytest.mark.parametrize(('size', 'sharpness'), [(1.0, 1.0), (1e6, 1.0), (1e-6, 1.0), (1.0, 40.0)])
def test_float16_partial_results(
    size: float,
    sharpness: float,
    heads: Heads,
    factor: float | None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """bfloat16 inputs use them, which the interpreter computes wrongly. Values are far outside the range of float16, or
    close to 0 where the logits of a block are 100 below those of another. If a head fills its tile, the columns of
    partial results are permuted.
    """
    indices = make_indices(whole(12), 1, 3, 3)
    tensors = make_inputs(whole(12), heads, device, indices, scaled=factor is not None)
    grads = make_grads(whole(12), heads, device)
    tensors['v'] = tensors['v'] * size
    tensors['q'] = tensors['q'] * sharpness
    if factor is not None:
        tensors['q'] = tensors['q'] / factor
        tensors['block_scale'] = tensors['block_scale'] * factor
    expected = run_triton(selected_attention, tensors, grads, block_size=3)
    monkeypatch.setattr(partials, 'partial_dtype', lambda _: torch.float16)
    result = run_triton(selected_attention, tensors, grads, block_size=3)
    assert not torch.equal(result['out0'], expected['out0'])
    for name, t in expected.items():
        error = (result[name] - t).nan_to_num()  # log-sum-exps of nothing
        assert error.norm() <= 2.0**-11 * t.nan_to_num(neginf=0).norm(), name


@per_block
@pytest.mark.parametrize(('chunk_rows', 'tokens'), [(512, 1), (6, 4)])
@pytest.mark.parametrize('where', ['whole', 'packed'])
def test_gradients_of_some_tokens_at_a_time(
    where: str, chunk_rows: int, tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later ranges of tokens add to the gradients of keys from earlier ranges."""
    extents = whole(7, batch=2) if where == 'whole' else packed([4, 0, 5], uncovered=1)
    indices = make_indices(extents, 2, 3, 3)
    indices[..., 0] = 0
    monkeypatch.setattr(dkv, 'CHUNK_ROWS', {4: chunk_rows})
    monkeypatch.setattr(by_block_backward, 'WORKSPACE', tokens * 3 * 2 * (4 * TWO_GROUPS.head_dim + 16))
    assert_close(extents, TWO_GROUPS, device, indices=indices, block_size=3, scaled=True)


@per_tile
def test_heads_that_select_alone_share_a_csr_row(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch, 4, 2**29, 2**24)
    assert_close(whole(6), Heads(4, 2, 16, 16), device, index_heads=4, block_size=3, scaled=True)


@per_tile
@pytest.mark.parametrize(
    ('num_entries', 'chunk', 'block_size', 'dims'),
    [(2**16, 256, 64, 256), (2**24, 4096, 64, 512), (2**20, 33, 2**16, 256), (100, 0, 16, 32)],
)
def test_partial_sums_fit_into_their_workspace(num_entries: int, chunk: int, block_size: int, dims: int) -> None:
    bytes_of_partial = 4 * block_size * dims
    chunk, num_partials = dkv.choose_chunk(num_entries, chunk, bytes_of_partial, dkv.WORKSPACE)
    assert num_partials * bytes_of_partial <= dkv.WORKSPACE
    # Any division of the entries between blocks with one chunk and with several fits into the bound.
    for length in (chunk + 1, 2 * chunk, 3 * chunk - 1, num_entries):
        if num_partials and length <= num_entries:
            assert num_entries // length * -(-length // chunk) <= num_partials


NOTHING_TO_READ = {
    'no keys': Extents(2, 2, 0, {}, [0, 0]),
    'before the first key': Extents(1, 2, 12, {'q_offset': -4}, [12]),
    'far before the first key': Extents(1, 2, 12, {'q_offset': -(2**40)}, [12]),
    'empty rows': Extents(2, 2, 12, {'seqlens_k': row_integers([0, 0]), 'q_offset': 3}, [0, 0]),
    'empty sequences': packed([0, 0, 0], uncovered=3),
    'no tokens': whole(0),
    'no rows': whole(4, batch=0),
    'keys only': Extents(2, 0, 9, {}, [9, 9]),
}


@pytest.mark.parametrize('extents', NOTHING_TO_READ.values(), ids=NOTHING_TO_READ)
def test_rows_with_nothing_to_read(extents: Extents, device: torch.device) -> None:
    indices = make_indices(extents, 1, 3, 4).clamp(max=2)
    tensors, grads = make_inputs(extents, HEADS, device, indices, scaled=True), make_grads(extents, HEADS, device)
    results = run_triton(selected_attention, tensors, grads, block_size=4, **place(extents.where, device))
    for name, t in results.items():
        assert t.eq(-torch.inf if name == 'out1' else 0).all(), name


@pytest.mark.parametrize('num_selected', [0, 2])
def test_no_block_is_selected(num_selected: int, device: torch.device) -> None:
    indices = torch.full((1, 3, 1, num_selected), -1, dtype=torch.int32)
    tensors, grads = make_inputs(whole(3), HEADS, device, indices, scaled=True), make_grads(whole(3), HEADS, device)
    results = run_triton(selected_attention, tensors, grads, block_size=4)
    for name, t in results.items():
        assert t.eq(-torch.inf if name == 'out1' else 0).all(), name
