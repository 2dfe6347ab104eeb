"""Kernels at sizes that need a GPU of 80 GB: more than 2^31 elements, a million tokens, grids past 65,535, memory.

    python -m pytest -m gpu -n 4 tests/gpu/test_sizes.py

The last rows of a result are compared with eager on these rows alone.
"""

from __future__ import annotations

import fcntl
import gc
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention import nsa
from native_sparse_attention.ops import (
    chosen_scores,
    compressed_attention,
    gated_sum,
    select_blocks,
    selected_attention,
    window_attention,
)
from native_sparse_attention.ops.rotary import norm_rotary
from native_sparse_attention.testing import assert_matches, make_block_indices, make_qkv
from tests.gpu.test_rules import assert_chooses_as_well
from tests.support.gpu_problems import Problem, assert_obeys_the_rules, attention_lse, choose, make_nsa, with_memory

harness = pytest.importorskip('tests.support.harness', reason='triton is not installed')
selected_problems = pytest.importorskip('tests.support.selected_attention_problems')

pytestmark = pytest.mark.gpu

BACKEND = 'triton'
# Elements that no int32 counts.
MANY = 2**31
MILLION = 1_000_000
# Rows at the end of an input that are compared.
TAIL = 128
GIB = 2**30

Op = Callable[..., Any]


@pytest.fixture(autouse=True)
def shared_gpu() -> Iterator[None]:
    """Leave free GPU memory to other test processes."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def most_memory(shared_gpu: None) -> Iterator[None]:
    """Let one process at a time take tens of gigabytes, of all that test on this GPU."""
    with (Path(tempfile.gettempdir()) / 'native-sparse-attention-gpu.lock').open('w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()


def random_blocks(seqlen: int, block_size: int, num_selected: int, kv_heads: int, device: torch.device) -> Tensor:
    """Return `[1, T, H, n]`: blocks up to the query's own, ascending, some of them repeated."""
    blocks = torch.rand(1, seqlen, kv_heads, num_selected, device=device)
    blocks *= (torch.arange(seqlen, device=device) // block_size + 1)[:, None, None]
    return blocks.int().sort(-1).values


def gradients(op: Op, tensors: dict[str, Tensor], dout: Tensor, **settings: Any) -> dict[str, Tensor]:
    """Return the first output and the gradients of the floating tensors, from the gradient of that output alone."""
    leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
    outputs = op(**leaves, **settings)
    out = outputs if isinstance(outputs, Tensor) else outputs[0]
    out.backward(dout.to(out.dtype).expand_as(out))
    results = {'out': out.detach()}
    return results | {f'grad of {name}': t.grad for name, t in leaves.items() if t.grad is not None}


def assert_tail_matches(
    op: Op,
    tensors: dict[str, Tensor],
    settings: dict[str, Any],
    rows: dict[str, int],
    tail_settings: dict[str, Any] | None = None,
) -> None:
    """Assert that the last rows of the output and of the gradients of a causal op match eager.

    rows: by name of a tensor, how many rows at its end depend on the last TAIL queries alone; TAIL for out and q.
    tensors that have a row per query are cut to those for eager. tail_settings: settings of eager's call that differ.
    """
    generator = torch.Generator(tensors['q'].device).manual_seed(3)
    seqlen, heads = tensors['q'].shape[1:3]
    per_query = {name for name, t in tensors.items() if t.shape[1] == seqlen and name not in ('k', 'v')}
    width = tensors['v_cmp' if 'v_cmp' in tensors else 'v'].shape[3]
    dout = torch.randn(1, 1, heads, width, device=tensors['q'].device, generator=generator)
    result = gradients(partial(op, backend=BACKEND), tensors, dout, **settings)
    result = {
        name: t[:, -rows.get(name.removeprefix('grad of '), TAIL) :].clone() for name, t in result.items()
    }  # fmt: skip
    torch.cuda.empty_cache()
    tail = {name: t[:, -TAIL:] if name in per_query else t for name, t in tensors.items()}
    expected = []
    for dtype in (torch.float64, tensors['q'].dtype):
        cast = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tail.items()}
        found = gradients(partial(op, backend='eager'), cast, dout, **settings, **(tail_settings or {}))
        expected.append({name: t[:, -rows.get(name.removeprefix('grad of '), TAIL) :] for name, t in found.items()})
    gold, same_dtype = expected
    for name, tensor in result.items():
        assert_matches(tensor, gold[name], same_dtype[name], name=name)


def many_tokens(heads: int, head_dim: int) -> int:
    """Return so many tokens that q and the output have more than 2^31 elements."""
    return MANY // (heads * head_dim) + 1000


@pytest.mark.usefixtures('most_memory')
def test_window_past_2_31_elements(device: torch.device):
    seqlen = many_tokens(16, 128)
    q, k, v = make_qkv(1, seqlen, seqlen, heads=16, kv_heads=1, head_dim=128, dtype=torch.bfloat16, device=device)
    rows = {'k': TAIL, 'v': TAIL}
    assert_tail_matches(window_attention, {'q': q, 'k': k, 'v': v}, {'window_size': (127, 0)}, rows)


@pytest.mark.usefixtures('most_memory')
def test_compressed_past_2_31_elements(device: torch.device):
    seqlen, size = many_tokens(16, 128), 64
    shape: dict[str, Any] = {'heads': 16, 'kv_heads': 1, 'head_dim': 128, 'dtype': torch.bfloat16, 'device': device}
    q, k, v = make_qkv(1, seqlen, seqlen // size, **shape)
    tensors = {'q': q, 'k_cmp': k, 'v_cmp': v}
    rows = {'k_cmp': TAIL // size, 'v_cmp': TAIL // size}
    settings = {'block_size': size, 'stride': size, 'seqlen_k': seqlen}
    assert_tail_matches(compressed_attention, tensors, settings, rows, {'q_offset': seqlen - TAIL})


@pytest.mark.usefixtures('most_memory')
def test_selected_past_2_31_elements(device: torch.device):
    seqlen = many_tokens(16, 128)
    q, k, v = make_qkv(1, seqlen, seqlen, heads=16, kv_heads=1, head_dim=128, dtype=torch.bfloat16, device=device)
    indices = random_blocks(seqlen, 64, 4, 1, device)
    # Random selections read few of the last keys.
    indices[:, -TAIL:, :, 0] = seqlen // 64 - 1
    tensors = {'q': q, 'k': k, 'v': v, 'block_indices': indices}
    assert_tail_matches(selected_attention, tensors, {'block_size': 64}, {'k': TAIL // 2, 'v': TAIL // 2})


def choice_past_2_31_elements(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    seqlen, size = many_tokens(16, 128), 64
    shape: dict[str, Any] = {'heads': 16, 'kv_heads': 1, 'head_dim': 128, 'dtype': torch.bfloat16, 'device': device}
    q, k_cmp, v_cmp = make_qkv(1, seqlen, seqlen // size, **shape)
    with torch.no_grad():
        _, lse = compressed_attention(
            q, k_cmp, v_cmp, block_size=size, stride=size, seqlen_k=seqlen, backend=BACKEND
        )  # fmt: skip
    settings = {'compress_block_size': size, 'compress_stride': size, 'selection_block_size': size, 'seqlen_k': seqlen}
    return {'q': q, 'k_cmp': k_cmp, 'lse': lse}, settings | {'causal': True}


@pytest.mark.usefixtures('most_memory')
def test_selection_past_2_31_elements(device: torch.device):
    tensors, settings = choice_past_2_31_elements(device)
    selection = {'num_selected': 16, 'num_init': 1, 'num_local': 2, 'share_group': True}
    blocks = select_blocks(**tensors, **settings, **selection, backend=BACKEND)
    seqlen = tensors['q'].shape[1]
    tail = {'q': tensors['q'][:, -TAIL:], 'k_cmp': tensors['k_cmp'], 'lse': tensors['lse'][..., -TAIL:]}
    assert_chooses_as_well(blocks[:, -TAIL:], tail, settings | {'q_offset': seqlen - TAIL}, selection)


@pytest.mark.usefixtures('most_memory')
def test_scores_past_2_31_elements(device: torch.device):
    tensors, settings = choice_past_2_31_elements(device)
    seqlen = tensors['q'].shape[1]
    indices = random_blocks(seqlen, 64, 4, 1, device)
    tensors['q'].requires_grad_()
    dout = torch.randn(1, 1, 1, 4, device=device)
    scores = chosen_scores(**tensors, block_indices=indices, **settings, backend=BACKEND)
    scores.backward(dout.expand_as(scores))
    assert tensors['q'].grad is not None
    result = [scores[:, -TAIL:].detach(), tensors['q'].grad[:, -TAIL:].clone()]
    expected = []
    for dtype in (torch.float64, torch.bfloat16):
        q = tensors['q'].detach()[:, -TAIL:].to(dtype).requires_grad_()
        where = settings | {'q_offset': seqlen - TAIL, 'block_indices': indices[:, -TAIL:]}
        lse = tensors['lse'][..., -TAIL:].to(torch.promote_types(dtype, torch.float32))
        found = chosen_scores(q, tensors['k_cmp'].to(dtype), lse, **where, backend='eager')
        found.backward(dout.to(found.dtype).expand_as(found))
        expected.append([found.detach(), q.grad])
    (scores_gold, gold), (_, same_dtype) = expected
    # float32 from the sums of tensor cores, which eager's are not: see tests/support/gpu_problems.py.
    assert (result[0].double() - scores_gold).norm() <= 1e-5 * scores_gold.norm()
    assert_matches(result[1], gold, same_dtype, name='grad of q')


@pytest.mark.usefixtures('most_memory')
def test_gated_sum_past_2_31_elements(device: torch.device):
    seqlen = many_tokens(16, 128)
    shape = (1, seqlen, 16, 128)
    gates = torch.rand(*shape[:3], 3, device=device, requires_grad=True)
    branches = [
        torch.randn(shape if i == 0 else (1, 1, 16, 128), dtype=torch.bfloat16, device=device).expand(shape)
        for i in range(3)
    ]
    dout = torch.randn(1, 1, 16, 128, dtype=torch.bfloat16, device=device)
    branches[0].requires_grad_()
    out = gated_sum(gates, *branches, backend=BACKEND)
    out.backward(dout.expand_as(out))
    tail = [t.detach()[:, -TAIL:].requires_grad_(t.requires_grad) for t in (gates, *branches)]
    expected = gated_sum(tail[0], *tail[1:], backend='eager')
    expected.backward(dout.expand_as(expected))
    for result, of_tail in ((out, expected), (gates.grad, tail[0].grad), (branches[0].grad, tail[1].grad)):
        assert result is not None
        torch.testing.assert_close(result[:, -TAIL:], of_tail, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures('most_memory')
def test_norm_and_rotary_past_2_31_elements(device: torch.device):
    seqlen = many_tokens(16, 128)
    x = torch.randn(1, seqlen, 16, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = (torch.rand(128, device=device) + 0.5).requires_grad_()
    angles = 1000 * torch.rand(1, seqlen, 64, device=device)
    tables = angles.cos(), angles.sin()
    outputs = norm_rotary(x, weight, 1, 1, tables, eps=1e-6, backend=BACKEND)
    # Only the last rows have gradients, so that they alone make up that of the weight.
    grad = torch.zeros_like(x)
    grad[:, -TAIL:] = torch.randn(1, TAIL, 16, 128, device=device)
    torch.autograd.backward(outputs, [grad, grad])
    leaves = x.detach()[:, -TAIL:].requires_grad_(), weight.detach().requires_grad_()
    tail_tables = tables[0][:, -TAIL:], tables[1][:, -TAIL:]
    expected = norm_rotary(*leaves, 1, 1, tail_tables, eps=1e-6, backend='eager')
    torch.autograd.backward(expected, [grad[:, -TAIL:]] * 2)
    for result, of_tail in ((outputs[0], expected[0]), (outputs[1], expected[1]), (x.grad, leaves[0].grad)):
        assert result is not None
        torch.testing.assert_close(result[:, -TAIL:], of_tail, rtol=2e-2, atol=2e-2)
    assert weight.grad is not None
    assert leaves[1].grad is not None
    assert (weight.grad - leaves[1].grad).norm() <= 0.01 * leaves[1].grad.norm()


def spread(tensor: Tensor, axis: int, buffer: Tensor, start: int) -> Tensor:
    """Return the values of `[B, T, H, D]` in `buffer`, from `start` on, with neighbours along `axis` so far apart that
    the offset of the last one exceeds 2^31 elements.
    """
    others = [size for i, size in enumerate(tensor.shape) if i != axis]
    far = MANY // (tensor.shape[axis] - 1) + 16
    far -= far % 16
    strides = list(torch.empty(others, device='meta').stride())
    strides.insert(axis, far)
    return buffer.as_strided(tensor.shape, strides, start).copy_(tensor)


@pytest.mark.parametrize('axis', [0, 1, 2], ids=['batch', 'tokens', 'heads'])
@pytest.mark.parametrize('op', ['window', 'compressed', 'selected', 'selected by block', 'selection', 'scores', 'sum'])
def test_strides_past_2_31(op: str, axis: int, device: torch.device):
    """Inputs whose rows lie far apart have the bits of contiguous ones, outputs and gradients."""
    by_block = op == 'selected by block'
    op = 'selected' if by_block else op
    attend = selected_problems.with_design('block') if by_block else selected_attention
    buffer = torch.empty(MANY + MANY // 16, dtype=torch.bfloat16, device=device)
    sizes = {'compress_block_size': 8, 'compress_stride': 4, 'selection_block_size': 16}
    q, k, v = make_qkv(2, 40, 40, heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=device)
    _, k_cmp, v_cmp = make_qkv(2, 1, 9, heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=device)
    lse = attention_lse(q, k_cmp, v_cmp, sizes)
    blocks = make_block_indices('valid', 2, 40, 2, 2, seqlen_k=40, block_size=16, device=device)
    problems = {
        'window': Problem(window_attention, {'q': q, 'k': k, 'v': v}, {'window_size': (9, 0)}),
        'compressed': Problem(
            compressed_attention, {'q': q, 'k_cmp': k_cmp, 'v_cmp': v_cmp}, {'block_size': 8, 'stride': 4}
        ),
        'selected': Problem(attend, {'q': q, 'k': k, 'v': v}, {'block_indices': blocks, 'block_size': 16}),
        'selection': Problem(select_blocks, {'q': q, 'k_cmp': k_cmp}, {'lse': lse, 'num_selected': 2, **sizes}),
        'scores': Problem(chosen_scores, {'q': q, 'k_cmp': k_cmp}, {'lse': lse, 'block_indices': blocks, **sizes}),
        'sum': Problem(
            gated_sum,
            {name: torch.randn_like(q) for name in ('out_compressed', 'out_selected', 'out_window')},
            {'gates': torch.rand(2, 40, 4, 3, device=device)},
        ),
    }
    problem = problems[op]
    grads = problem.draw_grads(torch.Generator(device).manual_seed(0)) if op != 'selection' else None
    run = (
        partial(problem.run, BACKEND, grads)
        if op != 'selection'
        else lambda: {'blocks': select_blocks(**problem.tensors, **problem.settings, backend=BACKEND)}
    )
    expected = run()
    starts = range(0, 2**26, 2**20)
    for name, start in zip(problem.tensors, starts, strict=False):
        problem.tensors[name] = spread(problem.tensors[name], axis, buffer, start)
    if grads is not None and op != 'scores':
        grads[0] = spread(grads[0], axis, buffer, starts[-1])
    harness.assert_same_bits(run(), expected)


@pytest.mark.usefixtures('most_memory')
def test_a_million_tokens(device: torch.device):
    """The composition, forward and backward: all values are finite, and the last rows match eager."""
    tensors, settings = make_nsa(
        1, MILLION, heads=4, kv_heads=1, sizes=(32, 16, 64, 16, 512), device=device
    )  # fmt: skip
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    out = nsa(**leaves, **settings, use_diff_topk=True, backend=BACKEND)
    out.float().square().mean().backward()
    assert out.isfinite().all()
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.isfinite().all(), name
    per_query = ('q', 'gates')
    expected = []
    for dtype in (torch.float64, torch.bfloat16):
        tail = {n: (t[:, -TAIL:] if n in per_query else t).detach() for n, t in tensors.items()}
        tail = {n: t if n == 'gates' and dtype == torch.bfloat16 else t.to(dtype) for n, t in tail.items()}
        expected.append(nsa(**tail, **settings, backend='eager'))
    assert_matches(out[:, -TAIL:].detach(), expected[0], expected[1], name='out')


ROWS = 70_001


def grid_problem(op: str, device: torch.device) -> Problem:
    """Return a problem with so many sequences that a grid has more than 65,535 programs along its axis of tiles."""
    shape: dict[str, Any] = {'heads': 2, 'kv_heads': 1, 'head_dim': 16, 'dtype': torch.bfloat16, 'device': device}
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = make_qkv(ROWS, 3, 7, **shape, generator=generator)
    _, k_cmp, v_cmp = make_qkv(ROWS, 1, 3, **shape, generator=generator)
    memory = {
        name: torch.randn(1, 1, 16, dtype=q.dtype, device=device, generator=generator) for name in ('mem_k', 'mem_v')
    }
    sizes = {'compress_block_size': 3, 'compress_stride': 2, 'selection_block_size': 4, 'seqlen_k': 7}
    blocks = make_block_indices(
        'valid', ROWS, 3, 1, 2, seqlen_k=7, block_size=4, q_offset=4, device=device, generator=generator
    )  # fmt: skip
    lse = attention_lse(q, k_cmp, v_cmp, sizes)
    names = ('out_compressed', 'out_selected', 'out_window')
    return {
        'window': Problem(window_attention, {'q': q, 'k': k, 'v': v}, {'window_size': (3, 0)}, {'out1': 0}),
        'compressed': Problem(
            with_memory,
            {'q': q, 'k_cmp': k_cmp, 'v_cmp': v_cmp, **memory},
            {'block_size': 3, 'stride': 2, 'seqlen_k': 7},
            {'out1': 0},
        ),
        'selected': Problem(
            selected_attention, {'q': q, 'k': k, 'v': v, 'block_indices': blocks}, {'block_size': 4}, {'out1': 0}
        ),
        'scores': Problem(
            chosen_scores,
            {'q': q, 'k_cmp': k_cmp, 'lse': lse, 'block_indices': blocks},
            sizes,
            {'grad of lse': 0},
        ),
        'sum': Problem(
            gated_sum,
            {'gates': torch.rand(ROWS, 3, 2, 3, device=device), **{name: torch.randn_like(q) for name in names}},
            {},
            {},
            {'grad of gates': torch.bfloat16},
        ),
    }[op]


@pytest.mark.parametrize('op', ['window', 'compressed', 'selected', 'scores', 'sum'])
def test_grids_past_65535(op: str, device: torch.device):
    problem = grid_problem(op, device)
    assert_obeys_the_rules(problem, problem.draw_grads(torch.Generator(device).manual_seed(1)), BACKEND)


def test_selections_past_65535(device: torch.device):
    problem = grid_problem('scores', device)
    tensors = {name: problem.tensors[name] for name in ('q', 'k_cmp', 'lse')}
    selection = {'num_selected': 1, 'num_init': 0, 'num_local': 0, 'share_group': True}
    settings = problem.settings | {'causal': True}
    assert_chooses_as_well(choose(BACKEND, tensors, settings, selection), tensors, settings, selection)


def test_programs_past_65535_of_one_sequence(device: torch.device):
    """One row has more than 65,535 tokens, so kernels with a program per query have as many programs."""
    tensors, settings = make_nsa(1, ROWS, heads=2, kv_heads=1, head_dim=16, sizes=(16, 8, 16, 4, 16), device=device)
    out = nsa(**tensors, **settings, backend=BACKEND)
    per_query = ('q', 'gates')
    tail = {n: t[:, -TAIL:] if n in per_query else t for n, t in tensors.items()}
    gold = nsa(**{n: t.double() for n, t in tail.items()}, **settings, backend='eager')
    assert_matches(out[:, -TAIL:], gold, nsa(**tail, **settings, backend='eager'), name='out')


def peaks(op: Op, tensors: dict[str, Tensor], **settings: Any) -> dict[str, int]:
    """Return the peak bytes of a forward and of a backward beyond inputs, results and saved tensors."""
    leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = op(**leaves, **settings, backend=BACKEND)
    out = outputs if isinstance(outputs, Tensor) else outputs[0]
    found = {'forward': torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()}
    if out.requires_grad:
        # At most the size of the output is saved with it, and the log-sum-exp.
        assert torch.cuda.memory_allocated() - before <= 2.2 * out.nbytes + 2**24
        dout = torch.randn_like(out[:, :1]).expand_as(out)
        torch.cuda.reset_peak_memory_stats()
        kept = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(out, [t for t in leaves.values() if t.requires_grad], dout)
        found['backward'] = torch.cuda.max_memory_allocated() - kept - sum(grad.nbytes for grad in grads)
    return found


def memory_problems(
    seqlen: int, kv_heads: int, device: torch.device, heads: int = 64, head_dim: int = 128
) -> dict[str, tuple[Op, dict[str, Tensor], dict[str, Any]]]:
    shape: dict[str, Any] = {
        'heads': heads,
        'kv_heads': kv_heads,
        'head_dim': head_dim,
        'dtype': torch.bfloat16,
        'device': device,
    }
    q, k, v = make_qkv(1, seqlen, seqlen, **shape)
    _, k_cmp, v_cmp = make_qkv(1, 1, (seqlen - 32) // 16 + 1, **shape)
    sizes = {'compress_block_size': 32, 'compress_stride': 16, 'selection_block_size': 64, 'seqlen_k': seqlen}
    blocks = random_blocks(seqlen, 64, 16, kv_heads, device)
    lse = torch.full((1, heads, seqlen), 9.0, device=device)
    compressed = {'q': q, 'k_cmp': k_cmp, 'v_cmp': v_cmp}
    branches = dict.fromkeys(('out_compressed', 'out_selected', 'out_window'), q)
    return {
        'window': (window_attention, {'q': q, 'k': k, 'v': v}, {'window_size': (511, 0)}),
        'compressed': (compressed_attention, compressed, {'block_size': 32, 'stride': 16}),
        'selected': (selected_attention, {'q': q, 'k': k, 'v': v, 'block_indices': blocks}, {'block_size': 64}),
        'selection': (select_blocks, {'q': q, 'k_cmp': k_cmp, 'lse': lse}, sizes | {'num_selected': 16}),
        'scores': (chosen_scores, {'q': q, 'k_cmp': k_cmp, 'lse': lse, 'block_indices': blocks}, sizes),
        'sum': (gated_sum, {'gates': torch.rand(1, seqlen, heads, 3, device=device), **branches}, {}),
    }


@pytest.mark.parametrize(
    ('seqlen', 'heads', 'kv_heads', 'head_dim'),
    [(2**18, 64, 4, 128), (2**18, 64, 64, 128), (2**19, 4, 4, 64), (2**20, 64, 4, 128)],
)
def test_workspace_of_long_sequences(seqlen: int, heads: int, kv_heads: int, head_dim: int, device: torch.device):
    """The workspace is at most 1 GiB, also where parts of one KV head cover some tokens, and unions some tiles."""
    function, tensors, settings = memory_problems(seqlen, kv_heads, device, heads, head_dim)['selected']
    for phase, size in peaks(function, tensors, **settings).items():
        assert size <= GIB, f'{phase}: {size / GIB:.2f} GiB'


@pytest.mark.parametrize('kv_heads', [4, 64])
@pytest.mark.parametrize('op', ['window', 'compressed', 'selected', 'selection', 'scores', 'sum'])
def test_workspace(op: str, kv_heads: int, device: torch.device):
    """The workspace is at most 1 GiB beside inputs, results and saved tensors at any size, and linear in the length."""
    found = []
    for seqlen in (16384, 32768):
        function, tensors, settings = memory_problems(seqlen, kv_heads, device)[op]
        found.append(peaks(function, tensors, **settings))
        del tensors
    print(op, kv_heads, found)
    for phase, size in found[1].items():
        assert size <= GIB, f'{phase}: {size / GIB:.2f} GiB'
        assert size <= 2.2 * found[0][phase] + 2**24, (
            f'{phase}: {found[0][phase]} bytes, and {size} at twice the length'
        )


@pytest.mark.parametrize('kv_heads', [4, 64])
@pytest.mark.parametrize('op', ['window', 'compressed', 'selected'])
def test_workspace_with_gates(op: str, kv_heads: int, device: torch.device):
    """The workspace with gates inside the attentions, as `nsa` passes them."""
    function, tensors, settings = memory_problems(65536, kv_heads, device)[op]
    tensors['gate'] = torch.rand(1, 65536, 64, device=device)
    for phase, size in peaks(function, tensors, **settings).items():
        assert size <= GIB, f'{phase}: {size / GIB:.2f} GiB'
