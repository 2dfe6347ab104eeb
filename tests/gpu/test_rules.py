"""The kernels on a GPU against eager in float64: drawn problems of every op, and every launch setting by itself.

    python -m pytest -m gpu -n 15 tests/gpu/test_rules.py -k 'not every_launch'
    python -m pytest -m gpu -n 15 tests/gpu/test_rules.py -k every_launch

test_runtime.py and test_sizes.py test device memory, graphs, streams and sizes.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention import nsa, ops
from native_sparse_attention.composition import backend_of
from native_sparse_attention.core.checks import make_sequences
from native_sparse_attention.core.geometry import forced_priority
from native_sparse_attention.ops import chosen_scores, selected_attention, window_attention
from native_sparse_attention.ops.block_mass import block_mass
from native_sparse_attention.testing import make_block_indices, make_qkv
from tests.support.gpu_problems import (
    Problem,
    assert_obeys_the_rules,
    attention_lse,
    block_loss,
    choose,
    draw_problem,
    draw_select_blocks,
    make_nsa,
    with_memory,
)

harness = pytest.importorskip('tests.support.harness', reason='triton is not installed')
selected_plan = pytest.importorskip('native_sparse_attention.ops.selected_attention.triton.plan')
dlogits = pytest.importorskip('native_sparse_attention.ops.selected_attention.triton.dlogits.storage')

pytestmark = pytest.mark.gpu

BACKEND = 'triton'
COUNTS = {
    'window': 150, 'compressed': 130, 'selected': 180, 'chosen_scores': 70, 'block_mass': 60, 'block_loss': 60,
    'gated_sum': 40, 'norm_rotary': 60,
}  # fmt: skip
SELECT_COUNT = 60


@pytest.fixture(autouse=True)
def shared_gpu() -> Iterator[None]:
    """Leave free GPU memory to other test processes."""
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ('op', 'index'),
    [pytest.param(op, index, id=f'{op}-{index}') for op, count in COUNTS.items() for index in range(count)],
)
def test_rules(op: str, index: int, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """Random problems by the error rules, in memory filled with NaN; the first call has the bits of the second."""
    if index % 4 > 1:
        # Without these settings a small problem would take neither the design by block nor unions.
        monkeypatch.setattr(selected_plan, 'MIN_SEQLEN_BY_BLOCK', 0)
        monkeypatch.setattr(selected_plan, 'MIN_SEQLEN_MIXED', 0)
        monkeypatch.setattr(selected_plan, 'MAX_BLOCK_RATIO', 0)
        monkeypatch.setattr(selected_plan, 'MAX_BLOCK_RATIO_LARGE', 8 * (index % 4 == 2))
        monkeypatch.setattr(selected_plan, 'MAX_UNION_PERCENT', {'forward': 60, 'backward': 60})
    if index % 2 == 0:
        monkeypatch.setattr(dlogits, 'MIN_TOKENS', 1)
        monkeypatch.setattr(dlogits, 'MIN_BLOCK_RATIO', 0)
    problem, generator = draw_problem(op, index, device)
    grads = problem.draw_grads(generator)
    with harness.poisoned_allocations():
        result = assert_obeys_the_rules(problem, grads, BACKEND)
    harness.assert_same_bits(problem.run(BACKEND, grads), result)


@pytest.mark.parametrize('spoiled', ['every key', 'a block of keys', 'a query'])
def test_nan_stays_nan(spoiled: str, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """Gradients of queries by block are NaN where eager has NaN; their units are the smallest possible where keys are 0
    or NaN.
    """
    monkeypatch.setattr(selected_plan, 'MIN_SEQLEN_BY_BLOCK', 0)
    monkeypatch.setattr(selected_plan, 'MAX_BLOCK_RATIO', 0)
    generator = torch.Generator(device).manual_seed(0)
    sizes: dict[str, Any] = {'heads': 4, 'kv_heads': 4, 'head_dim': 64, 'dtype': torch.bfloat16}
    q, k, v = make_qkv(1, 256, 256, **sizes, device=device, generator=generator)
    blocks = make_block_indices('valid', 1, 256, 4, 2, seqlen_k=256, block_size=64, device=device, generator=generator)
    if spoiled == 'a query':
        k.zero_()
        q[:, 200] = torch.nan
    else:
        k[:, : 64 if spoiled == 'a block of keys' else 256] = torch.nan
    found = []
    for backend in (BACKEND, 'eager'):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out, _ = selected_attention(leaves[0], leaves[1], leaves[2], blocks, block_size=64, backend=backend)
        found.append(torch.autograd.grad(out.sum(), leaves)[0].isnan())
    assert found[1].any()
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize('index', range(SELECT_COUNT))
def test_selection_is_exact(index: int, device: torch.device):
    """Where scores are counts, many of them equal, the selected blocks equal those of eager."""
    problem = draw_select_blocks(index, device, exact=True)
    with harness.poisoned_allocations():
        blocks = choose(BACKEND, *problem)
    assert torch.equal(blocks, choose('eager', *problem)), problem[1:]
    assert torch.equal(blocks, choose(BACKEND, *problem))


@pytest.mark.parametrize('index', range(SELECT_COUNT))
def test_selected_blocks_have_the_highest_scores(index: int, device: torch.device):
    """Where rounding decides between nearly equal scores, the selected blocks score as high as eager's."""
    problem = draw_select_blocks(index, device, exact=False)
    with harness.poisoned_allocations():
        blocks = choose(BACKEND, *problem)
    assert_chooses_as_well(blocks, *problem)


def assert_chooses_as_well(
    blocks: Tensor, tensors: dict[str, Tensor], settings: dict[str, Any], selection: dict[str, Any]
) -> None:
    """Assert that rows are filled as by eager, that forced blocks are among them, and that in float64 the others score
    as high.
    """
    precise = {name: t.double() for name, t in tensors.items()}
    expected = choose('eager', precise, settings, selection)
    assert blocks.dtype == expected.dtype == torch.int32
    assert torch.equal(blocks >= 0, expected >= 0)
    following = (blocks[..., 1:] > blocks[..., :-1]) | (blocks[..., 1:] == -1)
    assert following.all()
    own = own_block(precise, settings, selection.get('num_recent', 0))
    forced = forced_priority(expected, own, selection['num_init'], selection['num_local'], settings['causal']) > 0
    found = (expected[..., :, None] == blocks[..., None, :]).any(-1)
    assert (found | ~forced | (expected < 0)).all()
    score, expected_score = (
        chosen_scores(**precise, block_indices=chosen, **settings, backend='eager').sort(-1).values
        for chosen in (blocks, expected)
    )
    torch.testing.assert_close(score, expected_score, rtol=1e-4, atol=1e-6)


def own_block(tensors: dict[str, Tensor], settings: dict[str, Any], num_recent: int) -> Tensor:
    """Return the block of the token num_recent before each query, `[B, T, 1, 1]`."""
    names = ('q_offset', 'seqlens_k', 'cu_seqlens', 'cu_seqlens_k')
    sequences = make_sequences(tensors['q'], settings['seqlen_k'], *(settings.get(name) for name in names))
    return (sequences.layout().position[..., None, None] - num_recent) // settings['selection_block_size']


@dataclass(frozen=True)
class Entry:
    """An entry of a table of launch settings."""

    module: str
    table: str
    key: tuple[str, int, int]

    def __str__(self) -> str:
        return '-'.join([*self.module.split('.')[2:], self.table, *map(str, self.key)])


def every_entry() -> list[Entry]:
    from native_sparse_attention.ops._triton.launch import Settings

    entries = []
    for found in pkgutil.walk_packages([str(Path(ops.__file__).parent)], f'{ops.__name__}.'):
        if found.name.endswith('settings'):
            for name, table in vars(importlib.import_module(found.name)).items():
                if isinstance(table, dict) and any(isinstance(value, Settings) for value in table.values()):
                    entries += [Entry(found.name, name, key) for key in table]
    return entries


def problems_for(
    module: str, head_dim: int, dtype: torch.dtype, device: torch.device, block_size: int
) -> Iterator[Problem]:
    """Return problems whose kernels take their settings from the tables of `module`, at a head size. block_size: of
    selected attention.
    """
    generator = torch.Generator(device).manual_seed(0)
    shape: dict[str, Any] = {'dtype': dtype, 'device': device, 'generator': generator}
    shape |= {'heads': 6, 'kv_heads': 2, 'head_dim': head_dim}
    q, k, v = make_qkv(2, 333, 333, **shape)
    _, k_cmp, v_cmp = make_qkv(2, 1, 40, **shape)
    sizes = {'compress_block_size': 16, 'compress_stride': 8, 'selection_block_size': 16}
    tensors = {'q': q, 'k': k, 'v': v}
    indices = make_block_indices(
        'valid', 2, 333, 2, 6, seqlen_k=333, block_size=16, device=device, generator=generator
    )  # fmt: skip
    if 'interval' in module:
        for capped in ({}, {'softcap': 5.0}):
            yield Problem(window_attention, tensors, {'window_size': (100, 0), **capped}, {'out1': 0})
        memory = {name: t[0, :3].transpose(0, 1).contiguous() for name, t in (('mem_k', k), ('mem_v', v))}
        compressed = {'q': q, 'k_cmp': k_cmp, 'v_cmp': v_cmp} | memory
        yield Problem(with_memory, compressed, {'block_size': 16, 'stride': 8}, {'out1': 0})
    elif 'selected' in module:
        # The heads of one query fill a tile of any height.
        indices = make_block_indices(
            'valid', 2, 333, 2, 6, seqlen_k=333, block_size=block_size, device=device, generator=generator
        )  # fmt: skip
        for heads in (16, 32, 64):
            many = {**shape, 'heads': heads, 'kv_heads': 1}
            wide = dict(zip('qkv', make_qkv(1, 150, 150, **many), strict=True))
            wide['block_indices'] = indices[:1, :150, :1].contiguous()
            yield Problem(selected_attention, wide, {'block_size': block_size}, {'out1': 0})
        scale = 1 + 0.1 * torch.randn(indices.shape, device=device, generator=generator)
        tensors |= {'block_indices': indices, 'block_scale': scale}
        by_name = {'out1': 0, 'grad of block_scale': 3}, {'grad of block_scale': dtype}
        yield Problem(selected_attention, tensors, {'block_size': block_size}, *by_name)
        borders = torch.tensor([0, 100, 100, 320], dtype=torch.int32, device=device)
        packed = {name: t[:1] for name, t in tensors.items() if name != 'block_scale'}
        yield Problem(selected_attention, packed, {'block_size': block_size, 'cu_seqlens': borders}, {'out1': 0})
    elif 'block_selection' in module:
        lse = attention_lse(q, k_cmp, v_cmp, sizes | {'seqlen_k': 333})
        tensors = {'q': q, 'k_cmp': k_cmp, 'lse': lse, 'block_indices': indices}
        yield Problem(chosen_scores, tensors, sizes, {'grad of lse': 0})
    elif 'block_divergence' in module:
        scored = {'q_cmp': q.flip(1), 'k_cmp': k_cmp}
        for settings in ({'window_size': (100, 0)}, {'causal': False, 'softcap': 5.0}):
            yield Problem(block_loss, scored, {**sizes, **settings, 'target': (q, k)}, {'out0': 0})
    elif 'block_mass' in module:
        for settings in ({'window_size': (100, 0)}, {'causal': False, 'softcap': 5.0}):
            yield Problem(block_mass, {'q': q, 'k': k}, {'block_size': 16, **settings})
    else:
        raise NotImplementedError(f'{module}: say here which op takes its settings')


def take_settings(entry: Entry, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Make every launch that looks up this table take this entry. Returns the list of the lookups so far."""
    from native_sparse_attention.ops._triton import launch

    table = getattr(importlib.import_module(entry.module), entry.table)
    _, itemsize, head_dim = entry.key
    asked, find_settings, own = [], launch.find_settings, launch.architecture_of(device)

    def find_this(found: Any, *rest: Any) -> Any:
        if found is not table:
            return find_settings(found, *rest)
        asked.append(rest)
        return table[entry.key]

    def by_block(
        q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_size: int, backward: bool = False, **_: int
    ) -> str:
        """Take the design by block wherever a whole block fits into the tiles of a pass."""
        settings, is_fused = selected_plan.settings, entry.table == 'FUSED'
        tiles = (settings.FUSED if is_fused else settings.BLOCK_DQ) if backward else settings.BLOCK
        found = table[entry.key] if tiles is table else find_settings(tiles, own, itemsize, head_dim)
        design = 'fused' if backward and is_fused else 'block'
        return design if block_size <= found.block_n else 'query'

    monkeypatch.setattr(launch, 'find_settings', find_this)
    if entry.table.startswith(('BLOCK', 'FUSED')):
        monkeypatch.setattr(selected_plan, 'choose_design', by_block)
    if entry.table.startswith('DLOGITS'):
        monkeypatch.setattr(dlogits, 'MIN_TOKENS', 1)
        monkeypatch.setattr(dlogits, 'MIN_BLOCK_RATIO', 0)
    return asked


def block_sizes_for(entry: Entry) -> list[int]:
    """Return the smallest and the largest block size of selected attention that the tiles of an entry serve."""
    if 'selected' not in entry.module:
        return [16]
    block_n = getattr(importlib.import_module(entry.module), entry.table)[entry.key].block_n
    return sorted({16, block_n if entry.table.startswith(('BLOCK', 'FUSED')) else min(64, block_n)})


@pytest.mark.parametrize('entry', every_entry(), ids=str)
def test_every_launch_setting(entry: Entry, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """Each entry passes the error rules, and the first call, which compiles, has the bits of the second.

    Entries of other architectures run too, except those that need more shared memory than this GPU has.
    """
    from triton.runtime.errors import OutOfResources

    from native_sparse_attention.ops._triton import launch

    table = getattr(importlib.import_module(entry.module), entry.table)
    architecture, itemsize, head_dim = entry.key
    own = launch.architecture_of(device)
    foreign = launch.find_settings(table, own, itemsize, head_dim) != table[entry.key]
    asked = take_settings(entry, device, monkeypatch)
    try:
        for dtype in (torch.bfloat16, torch.float16) if itemsize == 2 else (torch.float32,):
            for problem in itertools.chain(
                *(problems_for(entry.module, head_dim, dtype, device, size) for size in block_sizes_for(entry))
            ):
                grads = problem.draw_grads(torch.Generator(device).manual_seed(1))
                with harness.poisoned_allocations():
                    result = assert_obeys_the_rules(problem, grads, BACKEND)
                harness.assert_same_bits(problem.run(BACKEND, grads), result)
            if 'block_selection' in entry.module:
                for index in range(3):
                    tensors, settings, selection = selection_at(head_dim, dtype, index, device)
                    blocks = choose(BACKEND, tensors, settings, selection)
                    assert torch.equal(blocks, choose(BACKEND, tensors, settings, selection))
                    assert_chooses_as_well(blocks, tensors, settings, selection)
    except OutOfResources as error:
        if not foreign:
            raise
        pytest.skip(f'{architecture} has what {own} has not: {error}')
    assert asked, f'no problem here takes settings from {entry.table}'


def selection_at(
    head_dim: int, dtype: torch.dtype, index: int, device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Return problems of block selection at a head size: of groups, of single heads, and without causality."""
    generator = torch.Generator(device).manual_seed(index)
    shape: dict[str, Any] = {'dtype': dtype, 'device': device, 'generator': generator}
    q, k_cmp, v_cmp = make_qkv(2, 500, 61, heads=8, kv_heads=2, head_dim=head_dim, **shape)
    settings = {'compress_block_size': 16, 'compress_stride': 8, 'selection_block_size': 16, 'seqlen_k': 500}
    settings['causal'] = index < 2
    lse = attention_lse(q, k_cmp, v_cmp, settings)
    selection = {'num_selected': 8, 'num_init': 1, 'num_local': 2, 'share_group': index != 1}
    return {'q': q, 'k_cmp': k_cmp, 'lse': lse}, settings, selection


def test_auto_runs_the_tested_kernels(device: torch.device):
    """'auto' takes the kernels on this GPU for every op of the composition and every setting."""
    tensors, settings = make_nsa(1, 300, device=device)
    q, k, v = (tensors[name] for name in 'qkv')
    assert backend_of(q, k, v, use_diff_topk=True).name == BACKEND
    changes: tuple[dict[str, Any], ...] = ({}, {'use_diff_topk': True}, {'share_group': False})
    for change in changes:
        assert torch.equal(nsa(**tensors, **settings, **change), nsa(**tensors, **settings, **change, backend=BACKEND))
