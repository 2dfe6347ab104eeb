"""The benchmark of the layer: measurements, report, and comparison of outputs."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import judge, peers, runner
from benchmarks.attention import __main__ as attention
from benchmarks.attention import parts, parts_report
from benchmarks.attention.parts_report import TARGET_SHAPE, Found
from benchmarks.shapes import SHAPES, TENSORS, make_tensors
from native_sparse_attention import ops


def row(part: str, backend: str, forward: float, backward: float | None = None, **rest: Any) -> runner.Case:
    total = forward + backward if backward else None
    case = {'op': part, 'shape': rest.pop('shape', TARGET_SHAPE), 'backend': backend}
    return {**case, 'forward_ms': forward, 'backward_ms': backward, 'total_ms': total, **rest}


ROWS = [
    row('compressed', 'triton', 8.0, 34.1, peak_bytes=2**30),
    row('compressed', 'mdy666', 9.0, 38.0),
    row('compressed', 'xunhao', 14.0, 36.0),
    row('compressed+selection', 'triton', 12.0),
    row('compressed+selection', 'mdy666', 19.0),
    row('selection', 'triton', 4.0),
    row('selected', 'triton', 7.0, 20.0),
    row('selected', 'mdy666', 13.0, 30.0),
    row('window', 'triton', 4.0, 10.0),
    row('window', 'flex', 4.4, 11.6),
    row('window', 'flash', 5.0, 14.0),
    row('sum', 'triton', 1.0, 2.0),
    row('sum', 'mdy666', 1.1, 2.4),
    row('nsa', 'triton', 25.0, 60.0, peak_bytes=2**30),
    row('nsa', 'cudnn', 120.0, 330.0),
    row('nsa', 'mdy666', 39.0, 79.0),
    row('nsa', 'fla', 5.0, 5.0),
    row('nsa', 'xunhao', 1.0, 1.0, wrong=True, note='wrong: a row is off by 1 of its norm'),
    row('nsa', 'triton', 2.0, 4.0, shape='short-4k-h4'),
    row('nsa', 'cudnn', 1.0, 2.0, shape='short-4k-h4'),
    row('nsa', 'triton', 3.0, 6.0, shape='paper-16k-h4'),
    row('nsa', 'cudnn', 6.0, 12.0, shape='paper-16k-h4'),
    row('nsa', 'triton', 50.0, 120.0, shape='long-128k-h4', peak_bytes=2**31),
    row('compressed', 'triton', 30.0, 120.0, shape='long-128k-h4', peak_bytes=2**32),
    row('nsa', 'triton', 600.0, 1500.0, shape='long-1024k-q32', peak_bytes=2**33),
    row('layer-inside', 'triton', 27.5, 75.0),
]
# A part whose passes wait for the host.
SHORT_ROWS = [
    row('window', 'triton', 0.2, 0.5, shape='trainer', forward_kernels_ms=0.06, backward_kernels_ms=0.17),
    row('window', 'flash', 0.1, 0.6, shape='trainer', forward_kernels_ms=0.09, backward_kernels_ms=0.1),
]


def cells(table: str, *names: str) -> dict[str, str]:
    lines = [[cell.strip() for cell in line[1:-1].split('|')] for line in table.splitlines()]
    (found,) = (line for line in lines if tuple(line[: len(names)]) == names)
    return dict(zip(lines[0], found, strict=True))


def test_targets():
    table = parts_report.target_table(Found(ROWS))
    compressed = cells(table, 'compressed')
    assert (compressed['verdict forward'], compressed['verdict backward']) == ('met', 'missed by 10.0 %')
    # Each pass has its own best.
    assert (compressed['which forward'], compressed['which backward']) == ('mdy666', 'xunhao')
    assert cells(table, 'window')['which forward'] == 'flex'


def test_best_of_the_whole():
    # The steps are 19 + 13 + 4.4 + 1.1 and 36 + 30 + 11.6 + 2.4. Wrong and incomplete results do not count.
    assert Found(ROWS).best('nsa', TARGET_SHAPE, 'forward') == (37.5, 'fastest steps')
    assert Found(ROWS).best('nsa', TARGET_SHAPE, 'backward') == (79.0, 'mdy666')


def test_ratios():
    (text,) = parts_report.ratio_lines(Found(ROWS))
    assert 'forward of dense attention by cuDNN over `nsa`, 64k tokens: 4.80; at least 4.9: missed by 2.0 %.' in text
    assert 'backward of dense attention by cuDNN over `nsa`, 64k tokens: 5.50; at least 5.2: met.' in text
    # Half as fast at 4k, twice as fast at 16k.
    assert 'is the faster from 8,192 tokens on; at most 8,192: met.' in text
    assert 'forward of the layer without projections over `nsa`, 64k tokens: 1.10; at most 1.15: met.' in text
    assert 'over `nsa`, 64k tokens: 1.25; at most 1.15: missed by 8.7 %.' in text


def test_always_and_never_faster():
    dense = row('nsa', 'cudnn', 1.0, 1.0)
    assert parts_report.break_even(Found([dense, row('nsa', 'triton', 2.0, 2.0)])) is None
    assert parts_report.break_even(Found([dense, row('nsa', 'triton', 0.5, 0.5)])) is None  # not measured
    short = [row('nsa', name, ms, ms, shape='paper-8k-h4') for name, ms in (('cudnn', 1.0), ('triton', 0.5))]
    assert parts_report.break_even(Found(short)) == 8192


def test_verdict():
    assert parts_report.compare(Found(ROWS)) == (
        '6 of 9 targets are met; not compressed backward by 10.0 %, window forward by 33.3 %, nsa forward by 2.0 %. '
        '11 of 11 passes are no slower than the best public one.'
    )
    assert parts_report.compare(Found(SHORT_ROWS)) == (
        '1 of 2 passes are no slower than the best public one; not window forward of trainer by 100.0 %. '
        '1 of 2 passes are no slower by their kernels alone; '
        'not window backward of trainer by 70.0 %.'
    )


def test_kernels_of_short_passes():
    tables = '\n\n'.join(parts_report.make_tables(SHORT_ROWS))
    assert '| window | trainer | triton | 0.2 | 0.06 | 0.5 | 0.17 |' in tables
    assert 'kernels' not in '\n\n'.join(parts_report.make_tables(ROWS))
    # Here the whole has the sum of the steps, too.
    steps = {'compressed+selection': 0.3, 'selected': 0.2, 'window': 0.1, 'sum': 0.05}
    rows = [row(part, 'mdy666', 1.0, shape='trainer', forward_kernels_ms=ms) for part, ms in steps.items()]
    rows.append(row('nsa', 'mdy666', 1.0, shape='trainer', forward_kernels_ms=0.9))
    assert Found(rows).best('nsa', 'trainer', 'forward_kernels') == (pytest.approx(0.65), 'fastest steps')


def test_long_sequences():
    assert parts_report.long_line(Found(ROWS)) == 'From 262,144 tokens on 2 of 2 passes ran.'
    rows = [row('selection', 'triton', 9.0, shape='long-256k-h4'), row('window', 'triton', 9.0, shape='long-256k-h4')]
    text = parts_report.long_line(Found(rows))
    assert text == 'From 262,144 tokens on 2 of 3 passes ran; not window backward of long-256k-h4.'
    assert parts_report.long_line(Found(ROWS[:1])) == ''


def test_memory_and_shares():
    growth = parts_report.growth_table(Found(ROWS))
    # A million tokens with half as many heads.
    assert cells(growth, 'nsa')['up to'] == '1,048,576'
    assert cells(growth, 'nsa')[''] == 'linear'
    assert cells(growth, 'compressed')[''] == 'up to 2.00 times that of the length before'
    shares = cells(parts_report.share_table(Found(ROWS)), TARGET_SHAPE, 'forward')
    assert (shares['compressed'], shares['selection'], shares['whole']) == ('8 (33 %)', '4 (17 %)', '25')


def test_all_tables(tmp_path: Path):
    for rows in (ROWS, []):
        for plot in (parts_report.plot_times, parts_report.plot_shares):
            plot(tmp_path / 'image.png', rows, 'A title')
        assert parts_report.make_tables(rows)


def test_cases(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, 'find_folder', lambda file: Path())

    def cases(shapes: str, backends: list[str]) -> list[tuple[str, str, str]]:
        options = argparse.Namespace(shapes=shapes, backends=','.join(backends), device='cpu')
        found, _ = attention.make_cases('parts', options, [*parts_report.PARTS])
        return [(case['shape'], case['op'], case['backend']) for case in found]

    everything = ['triton', 'cudnn', 'flash', 'flex', *peers.PEERS]
    shapes = ','.join(reversed(parts.DEFAULT_SHAPES))
    names = [name for name, _, _ in cases(shapes, everything)]
    # Cases with targets come first.
    assert tuple(dict.fromkeys(names)) == parts.DEFAULT_SHAPES
    assert {part for _, part, _ in cases(TARGET_SHAPE, ['triton'])} == set(parts_report.PARTS)
    # The whole of a million tokens has half as many heads.
    assert 'nsa' not in {part for _, part, _ in cases('long-1024k-h4', everything)}
    assert cases('long-1024k-q32', everything) == [('long-1024k-q32', 'nsa', 'triton')]
    assert {backend for _, _, backend in cases('long-256k-h4', everything)} == {'triton'}
    # Larger groups run a copy of the kernels of another peer.
    assert 'fsa' not in {backend for _, _, backend in cases(TARGET_SHAPE, everything)}
    assert ('paper-32k-h16', 'nsa', 'fsa') in cases('paper-32k-h16', everything)


def test_neighbours_correlate():
    shape = replace(SHAPES['tiny'], seqlen=4096, heads=8, compress_stride=2, compress_block_size=2)
    related = make_tensors(shape, 'cpu', ('q', 'v_cmp'), rho=0.9)
    for t, expected in ((related['q'], 0.9), (related['v_cmp'], 0.81), (make_tensors(shape, 'cpu', 'k')['k'], 0)):
        for distance in (1, 2, 5):
            found = (t[:, distance:] * t[:, :-distance]).mean()
            assert float(found) == pytest.approx(expected**distance, abs=0.03)
        assert float(t.mean()) == pytest.approx(0, abs=0.03)
        assert float(t.var()) == pytest.approx(1, abs=0.05)
    # By the definition, from the same noise.
    generator = torch.Generator().manual_seed(TENSORS.index('q'))
    noise = torch.randn(1, 4096, 16, generator=generator)
    x = noise[:, 0]
    for t in range(1, 50):
        x = 0.9 * x + (1 - 0.81) ** 0.5 * noise[:, t]
    torch.testing.assert_close(related['q'][:, 49, 0], x, rtol=1e-4, atol=2e-3)


def test_each_tensor_is_the_same_whatever_the_others_are():
    alone, together = (make_tensors(SHAPES['tiny'], 'cpu', names)['v'] for names in (['v'], TENSORS))
    assert torch.equal(alone, together)


def test_blocks_read_together():
    blocks = torch.tensor([[0, 1], [0, -1], [0, 2], [0, 2]])[None, :, None]
    # {0, 1} and {0, 2}; all of them.
    assert parts.union(blocks, 2) == 2
    assert parts.union(blocks, 4) == 3


@pytest.mark.full
@pytest.mark.parametrize('part', ['selected', 'window', 'sum', 'nsa', 'layer-inside'])
def test_parts_of_ours(part: str):
    pytest.importorskip('native_sparse_attention.ops.selected_attention.triton.op')
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    call, leaves = parts.make_call({'op': part, 'backend': 'triton', 'shape': 'tiny', 'device': device})
    if part == 'layer-inside':
        out = call()
        assert all(t is not None for t in torch.autograd.grad(out.sum(), leaves, allow_unused=False))
        assert out.shape == (1, 96, 64)
        return
    facts = call.facts()
    assert facts.get('error', 0) < 1e-4
    assert facts.get('agreement', 1) > 0.99
    assert 'wrong' not in facts


FLASH_ATTN = """
import torch

def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, causal, window_size):
    from native_sparse_attention.ops import window_attention
    tensors = (t[None] for t in (q, k, v))
    return window_attention(*tensors, window_size=window_size, cu_seqlens=cu_q, backend='eager')[0][0]
"""


@pytest.mark.filterwarnings('ignore:flex_attention called without')
@pytest.mark.parametrize('backend', ['flash', 'flex'])
def test_window_of_pytorch(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / 'flash_attn.py').write_text(FLASH_ATTN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch, 'compile', lambda function, **settings: function)
    problem = parts.make_problem('window', replace(SHAPES['tiny'], batch=2), 'cpu')
    steps = parts.make_steps('window', backend, problem)
    # FlexAttention has no backward pass on CPUs.
    leaves = [t.detach() for t in problem.leaves(steps.layout)]
    out = steps.unlay(parts.needed(steps.window)(*leaves))
    assert out.shape == (2, 96, 4, 16)
    for place in judge.places(problem):
        assert max(judge.row_errors(problem, out[place], judge.window_row(problem, *place))) < 1e-4


@pytest.mark.parametrize('backend', ['cudnn', 'flash'])
def test_dense_attention(backend: str):
    call, leaves = parts.make_call({'op': 'nsa', 'backend': backend, 'shape': 'tiny', 'device': 'cpu'})
    assert (len(leaves), call().shape) == (3, (1, 96, 4, 16))
    assert call.facts()['error'] < 1e-4


def eager_steps(problem: peers.Problem, folder: Path, faulty: str = '') -> peers.Steps:
    """Return the steps of an implementation that computes rows one after the other, with eager ops."""
    shape, where = problem.shape, {'cu_seqlens': problem.borders(), 'backend': 'eager'}
    sizes = {'compress_block_size': shape.compress_block_size, 'compress_stride': shape.compress_stride}

    def compress(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        settings = {'block_size': shape.compress_block_size, 'stride': shape.compress_stride}
        out, lse = ops.compressed_attention(q[None], k[None], v[None], **settings, **where)
        return out[0] * (1.2 if faulty == 'compressed' else 1), lse

    def choose(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = compress(q, k, v)
        chosen = {'selection_block_size': shape.selection_block_size, 'num_selected': shape.num_selected}
        blocks = ops.select_blocks(q[None], k[None], lse, **sizes, **chosen, **where)[0].transpose(0, 1)
        return out, blocks.roll(1, 1) if faulty == 'compressed+selection' else blocks

    def select(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor:
        rows = (t[None] for t in (q, k, v, blocks.transpose(0, 1)))
        return ops.selected_attention(*rows, block_size=shape.selection_block_size, **where)[0][0]

    def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        near = (shape.window - 1 + (faulty == 'window'), 0)
        return ops.window_attention(q[None], k[None], v[None], window_size=near, **where)[0][0]

    return peers.of_rows(problem, compress=lambda *t: compress(*t)[0], choose=choose, select=select, window=window)


@pytest.fixture
def faulty_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a peer of two sequences that computes the given steps wrongly."""
    (tmp_path / 'here.py').touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(SHAPES, 'two', replace(SHAPES['tiny'], batch=2))

    def call(part: str, faulty: str = '', less: str = '') -> runner.Case:
        peer = peers.Peer('some/body', '', 'here.py', partial(eager_steps, faulty=faulty), less=less)
        monkeypatch.setitem(peers.PEERS, 'faulty_peer', peer)
        found, _ = parts.make_call({'op': part, 'backend': 'faulty_peer', 'shape': 'two', 'device': 'cpu'})
        assert found().shape == (2, 96, 4, 16)
        return found.facts()

    return call


@pytest.mark.parametrize(
    'part', ['compressed', 'compressed+selection', 'selected', 'window', 'sum', 'nsa', 'nsa-unrelated']
)
def test_parts_of_a_peer(part: str, faulty_peer: Any):
    facts = faulty_peer(part)
    assert facts.get('error', 0) < 1e-4
    assert facts.get('agreement', 1) > 0.99


@pytest.mark.parametrize('part', ['compressed', 'compressed+selection', 'window'])
def test_wrong_parts_are_seen(part: str, faulty_peer: Any, monkeypatch: pytest.MonkeyPatch):
    # One key more in a window of 16.
    monkeypatch.setattr(judge, 'MAX_ERROR', 0.01)
    assert faulty_peer(part, faulty=part)['wrong']


def test_peers_that_do_less_are_not_wrong(faulty_peer: Any):
    assert faulty_peer('nsa', faulty='compressed', less='half of it') == {'note': 'does less'}


@pytest.mark.usefixtures('instant_worker')
def test_suite_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, 'find_folder', lambda file: None)
    flags = ['--device', 'cpu', '--commit', 'abc', '--shapes', 'tiny', '--out', str(tmp_path)]
    attention.main([*flags, '--cases', 'parts/nsa*,parts/window'])
    (text,) = tmp_path.glob('cpu/parts.md')
    rows = json.loads(text.with_suffix('.json').read_text())['rows']
    assert [(case['op'], case['backend']) for case in rows] == [
        ('window', 'triton'), ('window', 'flash'), ('window', 'flex'),
        ('nsa', 'triton'), ('nsa', 'cudnn'), ('nsa', 'flash'), ('nsa-unrelated', 'triton'),
    ]  # fmt: skip
    for image in tmp_path.glob('cpu/*.png'):
        assert image.name in text.read_text()
    assert len([*tmp_path.glob('cpu/*.png')]) == 2
