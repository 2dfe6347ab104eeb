"""Compressed attention in Triton against eager: blocks, memory pairs, and bitwise guarantees.

The kernels are those of window attention; their shared parts are tested there.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.core.call import Call
from native_sparse_attention.core.geometry import Sequences
from native_sparse_attention.ops import compressed_attention
from native_sparse_attention.ops._triton.interval import keys
from native_sparse_attention.ops._triton.support import is_interpreted
from native_sparse_attention.testing import LAYOUTS, assert_attention_matches, lay_out, outputs_and_gradients
from tests.support import problems
from tests.support.harness import (
    assert_close_to_eager,
    assert_same_bits,
    fence,
    fewer_examples,
    make_grads,
    place,
    run_triton,
)
from tests.support.problems import (
    Extents,
    Heads,
    cumulative,
    drawn_block_sizes,
    drawn_extents,
    drawn_heads,
    packed,
    row_integers,
    whole,
)

HEADS = Heads(2, 1, 16, 16)
TWO_GROUPS = Heads(4, 2, 16, 24)
BLOCK, STRIDE = 4, 2
Tensors = dict[str, Any]


def attend(
    q: Tensor, k: Tensor, v: Tensor, mem_k: Tensor | None = None, mem_v: Tensor | None = None, **settings: Any
) -> tuple[Tensor, Tensor]:
    mem_kv = None if mem_k is None or mem_v is None else (mem_k, mem_v)
    return compressed_attention(q, k, v, mem_kv=mem_kv, **settings)


def make_inputs(
    extents: Extents,
    heads: Heads,
    device: torch.device,
    pairs: int,
    sizes: tuple[int, int] = (BLOCK, STRIDE),
    *,
    more: int = 0,
    dtype: torch.dtype = torch.float32,
    layout: str = 'contiguous',
) -> Tensors:
    """Return inputs with NaN in every block that belongs to no sequence (`more` at the end among them) and around every
    tensor.
    """
    q, _, _ = problems.make_qkv(extents, heads)
    k, v = problems.make_compressed(extents, heads, *sizes, more)
    tensors = {name: lay_out(t.to(device, dtype), layout) for name, t in zip('qkv', (q, k, v), strict=True)}
    if pairs:
        mem_kv = problems.make_mem_kv(heads, pairs)
        tensors |= {name: t.to(device, dtype) for name, t in zip(('mem_k', 'mem_v'), mem_kv, strict=True)}
    return {name: fence(t) for name, t in tensors.items()}


def settings_of(extents: Extents, device: torch.device, sizes: tuple[int, int] = (BLOCK, STRIDE)) -> dict[str, Any]:
    seqlen_k = {} if extents.packed else {'seqlen_k': extents.seqlen_k}
    return {'block_size': sizes[0], 'stride': sizes[1], **seqlen_k, **place(extents.where, device)}


def assert_close(
    extents: Extents,
    heads: Heads,
    device: torch.device,
    pairs: int,
    sizes: tuple[int, int] = (BLOCK, STRIDE),
    **settings: Any,
) -> None:
    tensors = make_inputs(extents, heads, device, pairs, sizes)
    settings = settings_of(extents, device, sizes) | settings
    assert_close_to_eager(attend, tensors, make_grads(extents, heads, device), **settings)


@pytest.mark.quick
@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('seqlen', [3, 4, 5, 6, 65, 66, 130, 257])
def test_lengths(seqlen: int, causal: bool, device: torch.device) -> None:
    """0 blocks, 1 block, numbers around a key tile, and more."""
    assert_close(whole(seqlen), HEADS, device, 1, causal=causal)
    if seqlen > 6:
        tensors = make_inputs(whole(seqlen), HEADS, device, 1, dtype=torch.float16)
        assert_attention_matches(attend, tensors, 'triton', **settings_of(whole(seqlen), device), causal=causal)


@pytest.mark.quick
@pytest.mark.parametrize('pairs', [0, 1, 2, 3, 31, 33, 70])
@pytest.mark.parametrize('causal', [True, False])
def test_memory_pairs(pairs: int, causal: bool, device: torch.device) -> None:
    assert_close(whole(70, batch=2), HEADS, device, pairs, causal=causal)


@pytest.mark.parametrize('split', [16, 32, 50])
def test_memory_adds_its_queries_in_splits(split: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, 'SPLIT', split)
    assert_close(whole(70, batch=2), HEADS, device, 2)
    assert_close(packed([40, 0, 20], uncovered=9), HEADS, device, 1)


def test_memory_larger_than_the_workspace(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, 'WORKSPACE', 1)
    assert_close(whole(20, batch=3), HEADS, device, 2)


def test_rows_that_the_workspace_parts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have the same bits whether their partial sums, memory included, fit the workspace together or one row at a
    time.
    """
    monkeypatch.setattr(keys, 'FULL_GRID', 1)
    extents = whole(20, batch=3)
    tensors, grads = make_inputs(extents, HEADS, device, 2), make_grads(extents, HEADS, device)
    together = run_triton(attend, tensors, grads, **settings_of(extents, device))
    rows_of_keys = (count_blocks(20) + 2) * HEADS.kv_heads
    monkeypatch.setattr(keys, 'WORKSPACE', 4 * rows_of_keys * (HEADS.head_dim + HEADS.value_dim))
    apart = run_triton(attend, tensors, grads, **settings_of(extents, device))
    for name in ('grad of mem_k', 'grad of mem_v'):  # sums over rows
        torch.testing.assert_close(apart.pop(name), together.pop(name), rtol=1e-5, atol=1e-6)
    assert_same_bits(apart, together)


@pytest.mark.parametrize('pairs', [0, 2])
@pytest.mark.parametrize('sizes', [(1, 1), (2, 1), (5, 3), (7, 7), (32, 16), (60, 1), (70, 70)])
def test_block_sizes(sizes: tuple[int, int], pairs: int, device: torch.device) -> None:
    assert_close(whole(70), HEADS, device, pairs, sizes)


@pytest.mark.parametrize('group', [1, 3, 6, 16])
def test_groups(group: int, device: torch.device) -> None:
    kv_heads = 2 if group < 8 else 1
    assert_close(whole(20), Heads(kv_heads * group, kv_heads, 16, 16), device, 2)


@pytest.mark.parametrize(('head_dim', 'value_dim'), [(1, 3), (40, 100), (96, 64), (128, 128), (192, 256)])
def test_head_sizes(head_dim: int, value_dim: int, device: torch.device) -> None:
    assert_close(whole(20), Heads(2, 1, head_dim, value_dim), device, 1)


EXTENTS = {
    'offset': Extents(2, 30, 90, {'q_offset': 35}, [90, 90]),
    'negative offset': Extents(1, 70, 40, {'q_offset': -11}, [40]),
    'keys end': Extents(2, 9, 75, {}, [75, 75]),
    'row offsets': Extents(3, 40, 100, {'q_offset': row_integers([5, -35, 61])}, [100] * 3),
    'lengths': Extents(3, 33, 70, {'seqlens_k': row_integers([70, 3, 41])}, [70, 3, 41]),
    'lengths, offset': Extents(2, 40, 20, {'seqlens_k': row_integers([0, 20]), 'q_offset': 30}, [0, 20]),
    'lengths, row offsets': Extents(
        3, 40, 70, {'seqlens_k': row_integers([70, 30, 0]), 'q_offset': row_integers([20, -5, 3])}, [70, 30, 0]
    ),
    'packed': packed([0, 0, 33, 1, 80, 0, 30, 0], uncovered=5),
    'packed, one sequence': packed([70], uncovered=70),
    'packed, no block': packed([1, 3, 2, 0, 3]),
    'packed, short sequences': packed([1, 4, 5, 6, 7, 3, 9]),
    'packed, other keys': Extents(
        1,
        60,
        110,
        {'cu_seqlens': cumulative([0, 20, 1, 33, 0]), 'cu_seqlens_k': cumulative([7, 40, 0, 50, 9])},
        [7, 40, 0, 50, 9],
    ),
    'packed, offsets': Extents(
        1,
        50,
        90,
        {
            'cu_seqlens': cumulative([20, 0, 28]),
            'cu_seqlens_k': cumulative([50, 5, 30]),
            'q_offset': row_integers([25, 3, -4]),
        },
        [50, 5, 30],
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize('extents', EXTENTS.values(), ids=EXTENTS)
@pytest.mark.parametrize(('pairs', 'causal'), [(0, True), (2, True), (1, False)])
def test_query_offsets_and_lengths(pairs: int, causal: bool, extents: Extents, device: torch.device) -> None:
    assert_close(extents, HEADS, device, pairs, causal=causal)


@fewer_examples(0.4)
@given(
    drawn_extents(max_seqlen=70),
    drawn_heads(),
    drawn_block_sizes(),
    st.integers(0, 3),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([None, 0.7]),
    st.sampled_from(LAYOUTS),
)
def test_drawn_problems(
    extents: Extents,
    heads: Heads,
    sizes: tuple[int, int, int],
    pairs: int,
    more: int,
    causal: bool,
    scale: float | None,
    layout: str,
) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    tensors = make_inputs(extents, heads, device, pairs, sizes[:2], more=more, layout=layout)
    settings = settings_of(extents, device, sizes[:2]) | {'causal': causal, 'scale': scale}
    assert_close_to_eager(attend, tensors, make_grads(extents, heads, device), **settings)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_layouts(layout: str, device: torch.device) -> None:
    extents = whole(50, batch=2)
    for dtype in (torch.float32, torch.float16):
        tensors = make_inputs(extents, TWO_GROUPS, device, 1, dtype=dtype, layout=layout)
        assert_attention_matches(attend, tensors, 'triton', **settings_of(extents, device))


@pytest.mark.parametrize('needed', [('q',), ('k',), ('v',), ('mem_k',), ('mem_v',), ('q', 'mem_k'), ('k', 'v')])
def test_gradients_where_they_are_needed(needed: tuple[str, ...], device: torch.device) -> None:
    extents = whole(40)
    tensors, grads = make_inputs(extents, HEADS, device, 2), make_grads(extents, HEADS, device)
    settings = settings_of(extents, device)
    expected = run_triton(attend, tensors, grads, **settings)
    leaves = {name: t.detach().requires_grad_(name in needed) for name, t in tensors.items()}
    torch.autograd.backward(attend(**leaves, **settings, backend='triton'), grads)
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name in needed)
        assert leaf.grad is None or leaf.grad.equal(expected[f'grad of {name}'])


def test_memory_alone_is_visible_before_the_first_block(device: torch.device) -> None:
    tensors = make_inputs(whole(40), HEADS, device, 1, (20, 10))
    out, lse = attend(**tensors, **settings_of(whole(40), device, (20, 10)), backend='triton')
    assert torch.equal(out[:, :19], tensors['mem_v'][:, 0].expand_as(out[:, :19]))
    assert lse.isfinite().all()
    assert not out[:, 19].equal(tensors['mem_v'][:, 0].expand_as(out[:, 19]))


def test_no_memory_pairs_are_no_memory(device: torch.device) -> None:
    tensors = make_inputs(whole(40), HEADS, device, 1)
    empty = tensors | {name: tensors[name][:, :0] for name in ('mem_k', 'mem_v')}
    without = {name: t for name, t in tensors.items() if len(name) == 1}
    settings = settings_of(whole(40), device)
    results = [run_triton(attend, t, **settings) for t in (empty, without)]
    assert_same_bits({name: results[0][name] for name in results[1]}, results[1])
    assert results[0]['grad of mem_k'].shape == (1, 0, 16)


@pytest.mark.parametrize('position', [0, 3, 30, 31, 32, 63, 64])
def test_the_future_changes_nothing(position: int, device: torch.device) -> None:
    tensors, grads = make_inputs(whole(70), HEADS, device, 1), make_grads(whole(70), HEADS, device)
    changed = {name: t.clone() for name, t in tensors.items()}
    changed['q'][:, position + 1 :] = torch.nan
    for name in 'kv':
        changed[name][:, max(0, (position + 1 - BLOCK) // STRIDE + 1) :] = torch.nan
    past = slice(position + 1)
    settings = settings_of(whole(70), device)
    expected, result = (run_triton(attend, t, grads, **settings) for t in (tensors, changed))
    assert torch.equal(result['out0'][:, past], expected['out0'][:, past])
    assert torch.equal(result['out1'][..., past], expected['out1'][..., past])
    assert torch.equal(result['grad of q'][:, past], expected['grad of q'][:, past])


@pytest.mark.parametrize('names', [('k',), ('v',), ('mem_k',), ('mem_v',)])
def test_non_finite_keys_reach_their_readers_only(names: tuple[str, ...], device: torch.device) -> None:
    """Non-finite: block 20 of the first KV head, visible from position 43 on, or a memory pair."""
    tensors, grads = make_inputs(whole(70), TWO_GROUPS, device, 1), make_grads(whole(70), TWO_GROUPS, device)
    spoiled = {name: t.clone() for name, t in tensors.items()}
    reads = torch.zeros(70, 4, dtype=torch.bool, device=device)
    for name in names:
        if name in 'kv':
            spoiled[name][:, 20, 0] = torch.nan
            reads[20 * STRIDE + BLOCK - 1 :, :2] = True
        else:
            spoiled[name][0] = torch.nan
            reads[:, :2] = True
    settings = settings_of(whole(70), device)
    expected, result = (run_triton(attend, t, grads, **settings) for t in (tensors, spoiled))
    for name in ('out0', 'grad of q'):
        assert torch.equal(result[name][:, ~reads], expected[name][:, ~reads]), name
    assert torch.equal(result['out1'].mT[:, ~reads], expected['out1'].mT[:, ~reads])
    assert not result['out0'][:, reads].isfinite().all(-1).any()


def test_queries_without_a_sequence_change_no_gradient(device: torch.device) -> None:
    """Queries of no sequence change no gradient of blocks or memory pairs, whatever they and their gradients are."""
    extents = packed([40, 0, 20], uncovered=9)
    tensors, grads = make_inputs(extents, HEADS, device, 2), make_grads(extents, HEADS, device)
    settings = settings_of(extents, device)
    expected = run_triton(attend, tensors, grads, **settings)
    tensors['q'][:, 60:] = torch.nan
    grads[0][:, 60:] = torch.nan
    grads[1][..., 60:] = torch.nan
    result = run_triton(attend, tensors, grads, **settings)
    for name in ('grad of k', 'grad of v', 'grad of mem_k', 'grad of mem_v'):
        assert torch.equal(result[name], expected[name]), name
    for name, t in (('out0', result['out0'][:, 60:]), ('out1', result['out1'][..., 60:])):
        assert t.eq(-torch.inf if name == 'out1' else 0).all(), name


def count_blocks(tokens: int) -> int:
    return max(0, (tokens - BLOCK) // STRIDE + 1)


@pytest.mark.parametrize('num_memory', [0, 1])
@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('lengths', [[33, 0, 1, 70, 7], [5, 3, 4, 5]])
def test_packed_is_alone(lengths: list[int], causal: bool, num_memory: int, device: torch.device) -> None:
    """Equal bit for bit, except gradients of memory, which sum over all sequences, and those of keys and values behind
    memory: alone, key tiles begin with memory.
    """
    extents = packed(lengths, uncovered=3)
    tensors, grads = make_inputs(extents, HEADS, device, num_memory), make_grads(extents, HEADS, device)
    together = run_triton(attend, tensors, grads, **settings_of(extents, device), causal=causal)
    memory: list[dict[str, Tensor]] = []
    first_key = 0
    for start, stop in itertools.pairwise([0, *itertools.accumulate(lengths)]):
        queries = slice(start, stop)
        keys = slice(first_key, first_key := first_key + count_blocks(stop - start))
        cuts = {'q': queries, 'k': keys, 'v': keys}
        own = {name: t[:, cuts[name]] if name in cuts else t for name, t in tensors.items()}
        own_grads = [grads[0][:, queries], grads[1][..., queries]]
        settings = settings_of(whole(stop - start), device)
        alone = run_triton(attend, own, own_grads, **settings, causal=causal)
        memory.append({name: alone.pop(name) for name in ('grad of mem_k', 'grad of mem_v') if num_memory})
        part = {f'grad of {name}': together[f'grad of {name}'][:, cut] for name, cut in cuts.items()}
        part |= {'out0': together['out0'][:, queries], 'out1': together['out1'][..., queries]}
        for name in ('grad of k', 'grad of v') if num_memory else ():
            torch.testing.assert_close(part[name], alone.pop(name), rtol=1e-5, atol=1e-6)
        assert_same_bits({name: part[name] for name in alone}, alone)
    for name in memory[0]:
        expected = torch.stack([grad[name] for grad in memory]).sum(0)
        torch.testing.assert_close(together[name], expected, rtol=1e-4, atol=1e-5)


def test_chunks_of_queries_equal_one_call(device: torch.device) -> None:
    tensors = make_inputs(whole(45), HEADS, device, 1)
    settings = settings_of(whole(45), device)
    out, lse = attend(**tensors, **settings, backend='triton')
    for start, stop in itertools.pairwise([0, 1, 2, 3, 4, 36, 37, 44, 45]):
        part = tensors | {'q': tensors['q'][:, start:stop]}
        out_part, lse_part = attend(**part, **settings, q_offset=start, backend='triton')
        torch.testing.assert_close(out_part, out[:, start:stop], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse_part, lse[..., start:stop], rtol=1e-5, atol=1e-6)


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    where = {'seqlens_k': row_integers([40, 9, 33])}
    extents = Extents(3, 35, 40, where, [40, 9, 33])
    tensors, grads = make_inputs(extents, HEADS, device, 1), make_grads(extents, HEADS, device)
    together = run_triton(attend, tensors, grads, **settings_of(extents, device))
    for row in range(3):
        own = slice(row, row + 1)
        alone = run_triton(
            attend,
            {name: t[own] if name in 'qkv' else t for name, t in tensors.items()},
            [grad[own] for grad in grads],
            **settings_of(Extents(1, 35, 40, {'seqlens_k': where['seqlens_k'][own]}, []), device),
        )
        names = [name for name in alone if 'mem' not in name]
        assert_same_bits({name: together[name][own] for name in names}, {name: alone[name] for name in names})


@pytest.mark.parametrize('pairs', [0, 2])
@pytest.mark.parametrize(
    'extents',
    [
        Extents(2, 4, 0, {}, [0, 0]),
        Extents(2, 4, 3, {'q_offset': 9}, [3, 3]),
        Extents(1, 4, 12, {'q_offset': -4}, [12]),
        Extents(2, 4, 12, {'seqlens_k': row_integers([0, 3]), 'q_offset': 3}, [0, 3]),
        whole(0),
        whole(3, batch=0),
        Extents(2, 0, 9, {}, [9, 9]),
    ],
    ids=['no keys', 'no blocks', 'before the first', 'empty rows', 'no tokens', 'no rows', 'keys only'],
)
def test_no_block_to_read(extents: Extents, pairs: int, device: torch.device) -> None:
    tensors, grads = make_inputs(extents, HEADS, device, pairs), make_grads(extents, HEADS, device)
    settings = settings_of(extents, device)
    assert_close_to_eager(attend, tensors, grads, **settings)
    results = run_triton(attend, tensors, grads, **settings)
    for name in ('grad of k', 'grad of v'):
        assert results[name].eq(0).all(), name
    if not pairs:
        assert results['out0'].eq(0).all()
        assert results['out1'].eq(-torch.inf).all()


def test_the_same_bits_twice(device: torch.device) -> None:
    extents = packed([33, 60], uncovered=2)
    tensors, grads = make_inputs(extents, HEADS, device, 3), make_grads(extents, HEADS, device)
    settings = settings_of(extents, device)
    assert_same_bits(*(run_triton(attend, tensors, grads, **settings) for _ in range(2)))


@pytest.mark.skipif(not is_interpreted(), reason='gigabytes of memory that nothing touches')
@pytest.mark.parametrize('name', ['q', 'k', 'v'])
def test_offsets_beyond_int32(name: str) -> None:
    device = torch.device('cpu')
    extents = whole(12)
    tensors = make_inputs(extents, HEADS, device, 0, dtype=torch.float16)
    grads = make_grads(extents, HEADS, device)
    settings = settings_of(extents, device)
    expected = run_triton(attend, tensors, grads, **settings)
    length = tensors[name].shape[1]
    strides = (0, 2**31 // (length - 1) + 16, 16, 1)
    memory = torch.empty((length - 1) * strides[1] + 32, dtype=torch.float16)
    tensors[name] = memory.as_strided(tensors[name].shape, strides).copy_(tensors[name])
    assert_same_bits(run_triton(attend, tensors, grads, **settings), expected)


JUNK = {
    'decreasing': {'cu_seqlens': row_integers([0, 30, 10, 40])},
    'beyond': {'cu_seqlens': row_integers([0, 10, 500, 2**31 - 1])},
    'negative': {'cu_seqlens': row_integers([-(2**31), -5, 10, 40])},
    'not from 0': {'cu_seqlens': row_integers([39, 40, 40, 40])},
    'other keys': {'cu_seqlens': row_integers([0, 10, 20, 40]), 'cu_seqlens_k': row_integers([0, 100, -7, 90])},
    'lengths': {'seqlens_k': row_integers([2**31 - 1])},
    'negative lengths': {'seqlens_k': row_integers([-(2**31)])},
    'offsets': {'q_offset': row_integers([2**31 - 1])},
    'negative offsets': {'q_offset': torch.tensor([-(2**63)])},
}


@pytest.mark.parametrize('where', JUNK.values(), ids=JUNK)
def test_any_content_of_borders_stays_inside_memory(where: dict[str, Tensor], device: torch.device) -> None:
    """Call the op below the argument checks, which read values only on CPUs."""
    from native_sparse_attention.ops.compressed_attention.triton import compressed_attention as unchecked

    tensors = make_inputs(whole(40), HEADS, device, 1)
    where = place(where, device)
    cu_seqlens = where.get('cu_seqlens')
    cu_seqlens_k = where.get('cu_seqlens_k', cu_seqlens)
    sequences = Sequences(1, 40, 40, device, where.get('q_offset'), where.get('seqlens_k'), cu_seqlens, cu_seqlens_k)

    def run(q: Tensor, k: Tensor, v: Tensor, mem_k: Tensor, mem_v: Tensor) -> tuple[Tensor, Tensor]:
        return unchecked(q, k, v, (mem_k, mem_v), (BLOCK, STRIDE), Call(sequences, True, 0.25), None)

    outputs_and_gradients(run, tensors)
