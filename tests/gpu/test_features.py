"""Features of window and compressed attention on a GPU: single, in pairs and all together, by the error rules.

python -m pytest -m gpu -n 16 tests/gpu/test_features.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention.core.random import keep
from native_sparse_attention.ops import compressed_attention, window_attention
from native_sparse_attention.testing import make_qkv
from tests.support.feature_problems import FEATURES, SEED, make_features, split_features
from tests.support.gpu_problems import Problem, assert_obeys_the_rules, with_memory
from tests.support.problems import Extents, cumulative, row_integers, whole

harness = pytest.importorskip('tests.support.harness', reason='triton is not installed')

pytestmark = pytest.mark.gpu

BACKEND = 'triton'
HEAD_DIMS = (64, 128, 256, 128, 96)
HALVES = (torch.bfloat16, torch.float16)
WINDOWS = ((-1, 0), (127, 0), (-1, -1), (200, 64), (511, 0), (63, 0))
EXTENTS = (
    whole(384),
    whole(321, batch=2),
    Extents(1, 300, 700, {'q_offset': 350}, [700]),
    Extents(
        1,
        500,
        610,
        {'cu_seqlens': cumulative([130, 0, 364]), 'cu_seqlens_k': cumulative([190, 40, 380])},
        [190, 40, 380],
    ),
    Extents(2, 300, 500, {'seqlens_k': row_integers([500, 301])}, [500, 301]),
    Extents(1, 513, 513, {'cu_seqlens': cumulative([64, 1, 400])}, [64, 1, 400]),
    Extents(3, 300, 400, {'q_offset': row_integers([100, -40, 77])}, [400] * 3),
)
PAIRS = list(itertools.combinations(FEATURES, 2))
Names = tuple[str, ...]


@pytest.fixture(autouse=True)
def shared_gpu() -> Iterator[None]:
    """Leave free GPU memory to other test processes."""
    yield
    torch.cuda.empty_cache()


def make_problem(names: Names, index: int, dtype: torch.dtype, device: torch.device, **changes: Any) -> Problem:
    """Return problem `index`, which determines shape, positions and window."""
    random, generator = Random(f'features {index}'), torch.Generator(device).manual_seed(index)
    extents = EXTENTS[index % len(EXTENTS)]
    group, kv_heads = random.choice(((1, 2), (2, 2), (4, 1), (6, 1), (8, 1)))
    head_dim = HEAD_DIMS[index % len(HEAD_DIMS)]
    heads = group * kv_heads
    sizes: dict[str, Any] = {'heads': heads, 'kv_heads': kv_heads, 'head_dim': head_dim}
    sizes['value_dim'] = random.choice((head_dim, head_dim, 80))
    q, k, v = make_qkv(
        extents.batch, extents.seqlen_q, extents.seqlen_k, **sizes, dtype=dtype, device=device, generator=generator
    )
    extents.poison_keys(k, v)
    table = (random.choice((1, extents.batch)), random.choice((1, heads)))
    shape = (extents.batch, heads, extents.seqlen_q, extents.seqlen_k)
    features = make_features(names, shape, dtype=dtype, device=device, table=table)
    tensors, settings = split_features(features)
    left, right = WINDOWS[index % len(WINDOWS)]
    where = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in extents.where.items()}
    settings |= {'window_size': (left, right), 'causal': right == 0, **where, **changes}
    return Problem(window_attention, {'q': q, 'k': k, 'v': v, **tensors}, settings, {'out1': 0})


def assert_obeys(problem: Problem, device: torch.device) -> None:
    """Assert the error rules in memory filled with NaN; the first call has the bits of the second."""
    grads = problem.draw_grads(torch.Generator(device).manual_seed(1))
    with harness.poisoned_allocations():
        result = assert_obeys_the_rules(problem, grads, BACKEND)
    harness.assert_same_bits(problem.run(BACKEND, grads), result)


@pytest.mark.parametrize('index', range(len(FEATURES)), ids=FEATURES)
def test_each_feature(index: int, device: torch.device) -> None:
    assert_obeys(make_problem((FEATURES[index],), index, HALVES[index % 2], device), device)


@pytest.mark.parametrize('index', range(len(PAIRS)), ids=['-'.join(pair) for pair in PAIRS])
def test_every_pair(index: int, device: torch.device) -> None:
    assert_obeys(make_problem(PAIRS[index], index, HALVES[(index + index // 2) % 2], device), device)


@pytest.mark.parametrize(
    ('index', 'dtype'), [(1, torch.bfloat16), (3, torch.float16), (2, torch.float16), (0, torch.float32)]
)
def test_all_of_them(index: int, dtype: torch.dtype, device: torch.device) -> None:
    assert_obeys(make_problem(FEATURES, index, dtype, device), device)


@pytest.mark.parametrize('dtype', HALVES)
def test_a_bias_in_float32_that_rows_and_heads_share(dtype: torch.dtype, device: torch.device) -> None:
    """The gradient of the bias is a sum over rows and heads, without rounding to the half type."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = make_qkv(
        3, 300, 300, heads=8, kv_heads=2, head_dim=128, dtype=dtype, device=device, generator=generator
    )  # fmt: skip
    bias = torch.randn(1, 1, 300, 300, device=device, generator=generator)
    problem = Problem(
        window_attention, {'q': q, 'k': k, 'v': v, 'bias': bias}, {'window_size': (-1, 0)}, {'out1': 0}
    )  # fmt: skip
    assert_obeys(problem, device)


@pytest.mark.parametrize(('names', 'pairs', 'dtype'), [
    (('softcap',), 0, torch.bfloat16), (('sinks',), 1, torch.float16), (('softcap', 'sinks'), 3, torch.bfloat16),
])  # fmt: skip
def test_compressed(names: Names, pairs: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(pairs)
    sizes: dict[str, Any] = {'heads': 4, 'kv_heads': 2, 'head_dim': 128, 'dtype': dtype, 'device': device}
    q, k, v = make_qkv(1, 700, (700 - 32) // 16 + 1, **sizes, generator=generator)
    tensors = {'q': q, 'k_cmp': k, 'v_cmp': v}
    if pairs:
        for name in ('mem_k', 'mem_v'):
            tensors[name] = torch.randn(2, pairs, 128, dtype=dtype, device=device, generator=generator)
    more, others = split_features(make_features(names, (1, 4, 1, 1), device=device))
    function: Callable[..., Any] = with_memory if pairs else compressed_attention
    assert_obeys(Problem(function, tensors | more, {'block_size': 32, 'stride': 16, **others}, {'out1': 0}), device)


@pytest.mark.parametrize('head_dim', [64, 256])
def test_dropout_is_that_of_philox(head_dim: int, device: torch.device) -> None:
    """Dropout equals that of Philox bit for bit, whatever the tiles of a head size are."""
    batch, seqlen, heads, seqlen_k = 2, 200, 4, 256
    q = torch.zeros(batch, seqlen, heads, head_dim, dtype=torch.float16, device=device)
    k = torch.zeros(batch, seqlen_k, 2, head_dim, dtype=torch.float16, device=device)
    v = torch.eye(seqlen_k, dtype=torch.float16, device=device)[None, :, None].expand(batch, -1, 2, -1)
    settings: dict[str, Any] = {'window_size': (-1, -1), 'causal': False, 'dropout_seed': SEED}
    sizes = [torch.arange(size, device=device) for size in (batch, heads, seqlen, seqlen_k)]
    at = [t.view(-1, *(1,) * (3 - i)) for i, t in enumerate(sizes)]
    for dropout_p in (0.1, 0.75):
        out, _ = window_attention(q, k, v, **settings, dropout_p=dropout_p, backend=BACKEND)
        kept = keep(torch.tensor([SEED], device=device), dropout_p, *at)
        assert torch.equal(out.transpose(1, 2) != 0, kept)


@pytest.mark.parametrize('dtype', HALVES)
def test_masked_keys_may_hold_anything(dtype: torch.dtype, device: torch.device) -> None:
    """Masked keys pass the error rules whatever they hold.

    Bits are equal without a table of all pairs, for which the compiler lays out the loop over non-finite tiles in
    another way.
    """
    for names in (('segments', 'mask'), ('attn_mask',), ('bias', 'softcap')):
        problem = make_problem(names, 0, dtype, device, window_size=(-1, -1), causal=False)
        unread = slice(100, 230)
        for table in (problem.settings.get('attn_mask'), problem.tensors.get('bias')):
            if table is not None:
                table[..., unread] = False if table.dtype == torch.bool else -torch.inf
        if 'mask' in problem.settings:
            problem.settings['mask'][:, unread] = False
        grads = problem.draw_grads(torch.Generator(device).manual_seed(1))
        expected = problem.run(BACKEND, grads)
        for name in 'kv':
            assert (expected[f'grad of {name}'][:, unread] == 0).all()
            problem.tensors[name][:, unread] = torch.nan
        result = assert_obeys_the_rules(problem, grads, BACKEND)
        if names == ('segments', 'mask'):
            harness.assert_same_bits(result, expected)


def test_the_backward_repeats_bit_for_bit(device: torch.device) -> None:
    problem = make_problem(FEATURES, 1, torch.bfloat16, device)
    grads = problem.draw_grads(torch.Generator(device).manual_seed(1))
    expected = problem.run(BACKEND, grads)
    for _ in range(100):
        harness.assert_same_bits(problem.run(BACKEND, grads), expected)


def test_opcheck(device: torch.device) -> None:
    registered = pytest.importorskip('tests.kernels.test_registered_ops')
    for op, (function, args, kwargs) in registered.record('features', device).items():
        leaves = tuple(registered.leaf(value, not op.endswith('backward')) for value in args)
        torch.library.opcheck(function, leaves, kwargs)


def test_a_graph_drops_by_the_seed_of_each_replay(device: torch.device) -> None:
    """The seed is on the device, so replays of a graph drop other weights."""
    problem = make_problem(('sinks', 'segments'), 0, torch.bfloat16, device)
    seed = torch.zeros(1, dtype=torch.int64, device=device)

    def attend() -> Tensor:
        settings = {**problem.settings, 'dropout_p': 0.5, 'dropout_seed': seed}
        return problem.function(**problem.tensors, **settings, backend=BACKEND)[0]

    expected = []
    for number in (3, 2**50):
        seed.fill_(number)
        expected.append(attend())
    assert not torch.equal(*expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for number, wanted in zip((3, 2**50), expected, strict=True):
        seed.fill_(number)
        graph.replay()
        assert torch.equal(out, wanted)
