"""Selected attention over compressed keys in Triton, and the choice of regions, against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention import compressed_regions as composed
from native_sparse_attention import nsa
from native_sparse_attention.core.call import Call, Regions, make_call
from native_sparse_attention.ops.compressed_regions.eager import select_regions
from native_sparse_attention.ops.compressed_regions.regions import RegionRules
from native_sparse_attention.ops.selected_attention import api as selected_attention
from tests.kernels.test_selected_attention import EXTENTS
from tests.support.harness import assert_close_to_eager, fence, fewer_examples, make_grads, place
from tests.support.problems import (
    Extents,
    Heads,
    drawn_extents,
    drawn_heads,
    make_compressed,
    make_mem_kv,
    normal,
    whole,
)
from tests.support.selected_attention_problems import (
    force_dlogits,
    kernels,  # noqa: F401, every test takes it
    make_indices,
    per_block,
    per_tile,
)

HEADS = Heads(2, 1, 16, 16)


def make_compressed_call(q: Tensor, k: Tensor, sizes: tuple[int, int], seqlen_k: int, causal: bool, where: Any) -> Call:
    placed = (where.get('q_offset'), where.get('seqlens_k'), where.get('cu_seqlens'), where.get('cu_seqlens_k'))
    softcap = where.get('softcap')
    return make_call(q, k, None, *placed, causal, None, softcap, compress=sizes, seqlen_k=seqlen_k)[0]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_scale: Tensor | None = None,
    *,
    sizes: tuple[int, int],
    size: int,
    seqlen_k: int,
    backend: str,
    causal: bool = True,
    **where: Any,
) -> tuple[Tensor, Tensor]:
    """Selected attention over compressed keys and values. size: blocks of a region."""
    call = make_compressed_call(q, k, sizes, seqlen_k, causal, where)
    call = call._replace(sequences=call.sequences.of_compressed(k.shape[1], *sizes))
    tensors = (q, k, v, block_indices, block_scale, size, call)
    return selected_attention.attend(*tensors, gate=None, backend=backend, compress=sizes)


def assert_close(
    extents: Extents,
    heads: Heads,
    device: torch.device,
    *,
    sizes: tuple[int, int] = (5, 2),
    size: int = 3,
    num_regions: int = 3,
    index_heads: int | None = None,
    more: int = 0,
    scaled: bool = False,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> None:
    q = normal(extents.batch, extents.seqlen_q, heads.heads, heads.head_dim)
    k, v = make_compressed(extents, heads, *sizes, more)
    blocks = Extents(extents.batch, extents.seqlen_q, k.shape[1], {}, [])
    indices = make_indices(blocks, index_heads or heads.kv_heads, num_regions, size)
    tensors = {name: place(t, device, dtype) for name, t in (('q', q), ('k', k), ('v', v))}
    tensors['block_indices'] = place(indices, device)
    if scaled:
        tensors['block_scale'] = fence((1 + 0.5 * torch.randn(indices.shape)).to(device))
    settings |= {'sizes': sizes, 'size': size, 'seqlen_k': extents.seqlen_k, **place(extents.where, device)}
    assert_close_to_eager(attend, tensors, make_grads(extents, heads, device), **settings)


@pytest.mark.quick
@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('extents', EXTENTS.values(), ids=EXTENTS)
def test_query_offsets_and_lengths(extents: Extents, causal: bool, device: torch.device) -> None:
    assert_close(extents, Heads(2, 1, 16, 24), device, size=3 if causal else 4, causal=causal)


@pytest.mark.parametrize('index_heads', [2, 4])
@pytest.mark.parametrize('sizes', [(1, 1), (4, 4), (7, 3), (8, 1)])
def test_block_sizes(sizes: tuple[int, int], index_heads: int, device: torch.device) -> None:
    assert_close(whole(30), Heads(4, 2, 16, 16), device, sizes=sizes, index_heads=index_heads, scaled=True, more=2)


@pytest.mark.parametrize('softcap', [None, 2.0])
@pytest.mark.parametrize('seqlen', [68, 100])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_whole_regions(dtype: torch.dtype, seqlen: int, softcap: float | None, device: torch.device) -> None:
    """Regions that fill a key tile: later queries read them completely, queries inside them do not."""
    settings: dict[str, Any] = {'sizes': (4, 2), 'size': 16, 'num_regions': 2, 'softcap': softcap}
    assert_close(whole(seqlen), HEADS, device, dtype=dtype, **settings)


@pytest.mark.parametrize('where', [{}, {'q_offset': 70}])
def test_stored_gradients_of_logits(where: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large groups compute dq from gradients of logits that the kernel for dk and dv stores."""
    ranges = force_dlogits(monkeypatch)
    extents = Extents(1, 24, 100, where, [100])
    settings: dict[str, Any] = {'sizes': (4, 2), 'size': 16, 'num_regions': 2}
    assert_close(extents, Heads(16, 1, 16, 16), device, dtype=torch.float16, **settings)
    assert sum(ranges) == 24


@fewer_examples(0.16)
@given(
    drawn_extents(max_seqlen=12),
    drawn_heads(),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 0.7]),
)
def test_random_problems(
    extents: Extents,
    heads: Heads,
    stride: int,
    longer: int,
    size: int,
    num_regions: int,
    per_head: bool,
    causal: bool,
    softcap: float | None,
) -> None:
    settings: dict[str, Any] = {'sizes': (stride + longer, stride), 'size': size, 'num_regions': num_regions}
    index_heads = heads.heads if per_head else heads.kv_heads
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    assert_close(extents, heads, device, index_heads=index_heads, causal=causal, softcap=softcap, **settings)


@per_tile
@pytest.mark.parametrize('share_group', [True, False])
@pytest.mark.parametrize('sizes', [(5, 2), (4, 4), (7, 3)])
@pytest.mark.parametrize('extents', [*EXTENTS.values(), whole(75)], ids=[*EXTENTS, 'whole'])
def test_selected_regions_equal_those_of_eager(
    extents: Extents, sizes: tuple[int, int], share_group: bool, device: torch.device
) -> None:
    q = normal(extents.batch, extents.seqlen_q, 4, 16).to(device, torch.float32)
    k, _ = (t.to(device, torch.float32) for t in make_compressed(extents, Heads(4, 2, 16, 16), *sizes))
    call = make_compressed_call(q, k, sizes, extents.seqlen_k, True, place(extents.where, device))
    rules = RegionRules(4, 3, share_group)
    expected = select_regions(q, k, sizes, call, rules)
    assert torch.equal(composed.select_regions(q, k, sizes, call, rules, backend='triton'), expected)


@per_tile
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(('num_memory', 'has_sinks'), [(2, False), (1, True), (0, True)])
@pytest.mark.parametrize('extents', [EXTENTS['lengths'], EXTENTS['packed, offsets'], whole(40)], ids=str)
def test_memory_pairs_and_sinks_join_the_softmax(
    extents: Extents, num_memory: int, has_sinks: bool, dtype: torch.dtype, device: torch.device
) -> None:
    sizes, heads = (5, 2), Heads(4, 2, 16, 24)
    k, v = make_compressed(extents, heads, *sizes)
    q, memory = normal(extents.batch, extents.seqlen_q, 4, 16), make_mem_kv(heads, num_memory)
    names = ('q', 'k', 'v', 'mem_k', 'mem_v')
    tensors = {name: place(t, device, dtype) for name, t in zip(names, (q, k, v, *memory), strict=True)}
    if has_sinks:
        tensors['sinks'] = place(normal(heads.heads), device, torch.float32)
    call = make_compressed_call(tensors['q'], tensors['k'], sizes, extents.seqlen_k, True, place(extents.where, device))
    regions = Regions(select_regions(tensors['q'], tensors['k'], sizes, call, RegionRules(4, 3, True)), 4)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mem_k: Tensor, mem_v: Tensor, sinks: Tensor | None = None, *, backend: str
    ) -> tuple[Tensor, Tensor]:
        return composed.attend_to_regions(q, k, v, (mem_k, mem_v), sizes, call, sinks, regions, backend=backend)

    assert_close_to_eager(attend, tensors, make_grads(extents, heads, device))


@per_tile
def test_output_is_rounded_once(device: torch.device) -> None:
    """The mean error of the output beside memory pairs is that of eager in the same dtype."""
    sizes, extents, heads = (8, 4), whole(260), Heads(4, 1, 32, 64)
    k, v = make_compressed(extents, heads, *sizes)
    inputs = (normal(1, 260, 4, 32), k, v, *make_mem_kv(heads, 2))
    tensors = [place(t, device, torch.float16) for t in inputs]
    call = make_compressed_call(tensors[0], tensors[1], sizes, 260, True, {})
    regions = Regions(select_regions(tensors[0], tensors[1], sizes, call, RegionRules(16, 3, True)), 16)

    def attend(backend: str, *tensors: Tensor) -> Tensor:
        q, k, v, *memory = tensors
        out, _ = composed.attend_to_regions(
            q, k, v, (memory[0], memory[1]), sizes, call, None, regions, backend=backend
        )
        return out.double()

    gold = attend('eager', *(t.double() for t in tensors))
    error, expected = ((attend(name, *tensors) - gold).abs().mean() for name in ('triton', 'eager'))
    assert error < 1.1 * expected


NSA_MODES: dict[str, dict[str, Any]] = {
    'separate': {'use_diff_topk': True},
    'alone': {'share_group': False, 'softcap': 2.0, 'use_diff_topk': True},
    'merged': {'merge_window': True, 'use_diff_topk': True, 'num_recent': 4},
    'scores': {'merge_window': True, 'use_diff_topk': True},
}


@per_tile
@pytest.mark.parametrize('mode', NSA_MODES)
@pytest.mark.parametrize('extents', [EXTENTS['lengths'], EXTENTS['packed, offsets'], whole(60)], ids=str)
def test_nsa_with_two_levels(extents: Extents, mode: str, device: torch.device) -> None:
    """The composition, with some of the regions."""
    sizes, heads = (5, 2), Heads(4, 2, 16, 16)
    batch, seqlen = extents.batch, extents.seqlen_q
    q, q_cmp = normal(batch, seqlen, 4, 16), normal(batch, seqlen, 4, 16)
    k, v = (normal(batch, extents.seqlen_k, 2, 16) for _ in 'kv')
    num_gates = 1 if NSA_MODES[mode].get('merge_window') else 3
    gates = torch.rand(batch, seqlen, 4, num_gates).double()
    k_cmp, v_cmp = make_compressed(extents, heads, *sizes)
    inputs = {'q': q, 'k': k, 'v': v, 'q_cmp': q_cmp, 'k_cmp': k_cmp, 'v_cmp': v_cmp, 'gates': gates}
    inputs |= dict(zip(('mem_k', 'mem_v'), make_mem_kv(heads, 1), strict=True))
    if mode == 'scores':
        inputs = {name: t for name, t in inputs.items() if name not in ('v_cmp', 'gates', 'mem_v')}
    tensors = {name: place(t, device, torch.float32) for name, t in inputs.items()}
    settings: dict[str, Any] = {**NSA_MODES[mode], **place(extents.where, device), 'num_selected': 4}
    settings |= dict(zip(('compress_block_size', 'compress_stride', 'selection_block_size'), (*sizes, 4), strict=True))

    def attend(*, mem_k: Tensor, mem_v: Tensor | None = None, backend: str, **given: Any) -> Tensor:
        given = {'v_cmp': None, 'gates': None, **given}
        return nsa(
            **given, mem_kv=(mem_k, mem_v), window_size=(5, 0), compress_levels=2, region_size=4, num_regions=3,
            backend=backend,
        )  # fmt: skip

    grads = make_grads(extents, heads, device)[:1]
    assert_close_to_eager(attend, tensors, grads, **settings)


@per_block
def test_many_queries_of_one_region(device: torch.device) -> None:
    """More queries stand inside a region than it has keys, and they are spread over several tiles of rows."""
    assert_close(whole(150), Heads(4, 1, 16, 16), device, sizes=(20, 16), size=4, num_regions=2, dtype=torch.float16)
