"""What does `block_score_loss` cost, and what do its parts? One layer, each part as a CUDA graph.

python -m benchmarks.block_loss             4 x 16,384 tokens, 8/4 heads of 64, and 65,536 tokens, 64/4 heads of 128
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import peak, reset_peak, seconds_of
from native_sparse_attention import losses
from native_sparse_attention.core.call import MassRules, make_call
from native_sparse_attention.losses import block_score_loss
from native_sparse_attention.ops.block_mass.api import backend_of, mass_at

SHAPES = ((4, 16_384, 8, 4, 64), (1, 65_536, 64, 4, 128))  # B, T, HQ, H, D
COUNTS = (128, 256, 512)  # queries of a row
SIZES: dict[str, Any] = {'compress_block_size': 32, 'compress_stride': 16, 'selection_block_size': 64}
WINDOW = (511, 0)
REPLAYS = 10


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
    sizes = (SIZES['compress_block_size'], SIZES['compress_stride'], SIZES['selection_block_size'])
    tokens = losses._at_rows(call.sequences.layout(), rows)
    compressed = losses._at_rows(call.sequences.compressed_layout(*sizes[:2])[0], rows)
    candidates = losses._candidates(tokens, sizes[2], -(-seqlen // sizes[2]), WINDOW, True)
    drawn, rules = losses._gather(q, rows), MassRules(sizes[2], WINDOW, True)
    backend = backend_of(q, k).name

    def scores() -> Tensor:
        return losses._block_scores(
            losses._gather(q_cmp, rows), k_cmp, compressed, candidates, sizes, heads // kv_heads, call
        )

    def loss() -> Tensor:
        return block_score_loss(q, k, q_cmp, k_cmp, window_size=WINDOW, num_queries=num_queries, **SIZES)

    grad = torch.ones_like(scores())
    return {
        'mass': lambda: mass_at(drawn, k, tokens, rules, call, backend),
        'scores': scores,
        'scores, forward and backward': lambda: torch.autograd.grad(scores(), trained, grad),
        'loss': loss,
        'loss, forward and backward': lambda: torch.autograd.grad(loss(), trained),
    }


def measure(run: Callable[[], Any]) -> tuple[float, float]:
    """Return milliseconds of a replay and GiB of the peak beyond the inputs."""
    run()
    before = reset_peak('cuda')
    run()
    gib = (peak('cuda') - before) / 2**30
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return seconds_of(lambda: [graph.replay() for _ in range(REPLAYS)], 'cuda') / REPLAYS * 1e3, gib


if __name__ == '__main__':
    print(f'{torch.cuda.get_device_name()}, torch {torch.__version__}')
    print('B, T, HQ, H, D; queries; part: ms, GiB')
    for case in SHAPES:
        for count in COUNTS:
            for name, part in make_parts(case, count, 'cuda', torch.bfloat16).items():
                print(f'{case}; {count}; {name}: ' + '{:.2f}, {:.2f}'.format(*measure(part)), flush=True)
