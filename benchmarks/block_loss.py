"""What does `block_score_loss` cost, by the number of its queries? Forward and backward of one layer, as a CUDA graph.

python -m benchmarks.block_loss             4 x 16,384 tokens, 8/4 heads of 64, and 65,536 tokens, 64/4 heads of 128
"""

from __future__ import annotations

import time

import torch

from native_sparse_attention.losses import block_score_loss

SHAPES = ((4, 16_384, 8, 4, 64), (1, 65_536, 64, 4, 128))  # B, T, HQ, H, D
SIZES = {'compress_block_size': 32, 'compress_stride': 16, 'selection_block_size': 64}
REPLAYS = 10


def measure(shape: tuple[int, ...], num_queries: int) -> tuple[float, float]:
    """Return milliseconds of a replay and GiB of the peak beyond the inputs."""
    batch, seqlen, heads, kv_heads, dim = shape
    sizes = ((seqlen, heads), (seqlen, kv_heads), (seqlen, heads), (seqlen // 16 - 1, kv_heads))
    tensors = [torch.randn(batch, *size, dim, dtype=torch.bfloat16, device='cuda') for size in sizes]
    trained = [tensor.requires_grad_() for tensor in tensors[2:]]

    def step() -> None:
        loss = block_score_loss(*tensors[:2], *trained, window_size=(511, 0), num_queries=num_queries, **SIZES)
        torch.autograd.grad(loss, trained)

    step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / REPLAYS * 1e3, peak


if __name__ == '__main__':
    print(f'{torch.cuda.get_device_name()}, torch {torch.__version__}; B, T, HQ, H, D: ms, GiB')
    for case in SHAPES:
        for count in (128, 256, 512):
            print(case, f'{count} queries:', '{:.2f}, {:.2f}'.format(*measure(case, count)))
