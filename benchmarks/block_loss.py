"""What does `block_score_loss` cost, and what do its parts? One layer, each part as a CUDA graph and from the host.

python -m benchmarks.block_loss             4 x 16,384 tokens, 8/4 heads of 64, and 65,536 tokens, 64/4 heads of 128

The divergence and the whole loss run twice: with the divergence in the kernels, and in plain PyTorch beside the kernels
of the mass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.timing import peak, reset_peak, seconds_of
from native_sparse_attention import losses
from native_sparse_attention.core.backend import serves
from native_sparse_attention.core.call import MassRules, make_call
from native_sparse_attention.losses import block_score_loss
from native_sparse_attention.ops._eager import take_rows
from native_sparse_attention.ops.block_divergence import block_divergence
from native_sparse_attention.ops.block_mass.api import backend_of, mass_at

SHAPES = ((4, 16_384, 8, 4, 64), (1, 65_536, 64, 4, 128))  # B, T, HQ, H, D
COUNTS = (128, 256, 512)  # queries of a row
SIZES: dict[str, Any] = {'compress_block_size': 32, 'compress_stride': 16, 'selection_block_size': 64}
WINDOW = (511, 0)
REPLAYS = 10
CALLS = 4  # few enough that their launches fit the queue of the GPU


def make_parts(
    shape: tuple[int, ...], num_queries: int, device: str, dtype: torch.dtype
) -> dict[str, Callable[[], Any]]:
    """Return a function that runs each part."""
    batch, seqlen, heads, kv_heads, dim = shape
    shapes = ((seqlen, heads), (seqlen, kv_heads), (seqlen, heads), (seqlen // 16 - 1, kv_heads))
    q, k, q_cmp, k_cmp = (torch.randn(batch, *size, dim, dtype=dtype, device=device) for size in shapes)
    trained = [q_cmp.requires_grad_(), k_cmp.requires_grad_()]
    call, _ = make_call(q, k, None, None, None, None, None, True, None)
    rows = losses._draw_rows(batch, seqlen, num_queries, torch.zeros(1, dtype=torch.int64, device=device))
    compress = (SIZES['compress_block_size'], SIZES['compress_stride'])
    tokens = call.sequences.layout(rows)
    compressed, _ = call.sequences.compressed_layout(*compress, rows)
    drawn, rules = take_rows(q, rows), MassRules(SIZES['selection_block_size'], WINDOW, True)
    backend = backend_of(q, k).name
    mass = mass_at(drawn, k, tokens, rules, call, backend)

    def divergence(name: str) -> Tensor:
        return block_divergence(q_cmp, k_cmp, mass, rows, (tokens, compressed), compress, rules, call, name)

    def loss(name: str) -> Tensor:
        candidates = {name: serves}
        with mock.patch.object(losses, 'divergence_candidates', return_value=candidates):
            return block_score_loss(q, k, q_cmp, k_cmp, window_size=WINDOW, num_queries=num_queries, **SIZES)

    def differentiate(run: Callable[[str], Tensor], name: str) -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(name), trained)

    parts: dict[str, Callable[[], Any]] = {'mass': lambda: mass_at(drawn, k, tokens, rules, call, backend)}
    for name in dict.fromkeys((backend, 'eager')):
        parts |= {
            f'divergence, {name}': lambda name=name: divergence(name),
            f'divergence, {name}, forward and backward': lambda name=name: differentiate(divergence, name),
            f'loss, divergence {name}': lambda name=name: loss(name),
            f'loss, divergence {name}, forward and backward': lambda name=name: differentiate(loss, name),
        }
    return parts


def measure(run: Callable[[], Any]) -> tuple[float, float, float]:
    """Return milliseconds of a replay, milliseconds of the host in a call that waits for nothing, and GiB of the peak
    beyond the inputs.
    """
    run()
    before = reset_peak('cuda')
    run()
    gib = (peak('cuda') - before) / 2**30
    host = min(host_seconds(run) for _ in range(REPLAYS)) * 1e3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return seconds_of(lambda: [graph.replay() for _ in range(REPLAYS)], 'cuda') / REPLAYS * 1e3, host, gib


def host_seconds(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        run()
    return (time.perf_counter() - began) / CALLS


if __name__ == '__main__':
    print(f'{torch.cuda.get_device_name()}, torch {torch.__version__}')
    print('B, T, HQ, H, D; queries; part: ms in a graph, ms of the host, GiB')
    for case in SHAPES:
        for count in COUNTS:
            for name, part in make_parts(case, count, 'cuda', torch.bfloat16).items():
                print(f'{case}; {count}; {name}: ' + '{:.3f}, {:.2f}, {:.2f}'.format(*measure(part)), flush=True)
