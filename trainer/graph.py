"""Kernels that are compiled before the first step, and replay of a step as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from native_sparse_attention import build_kernels


class Graph:
    """A function of a tensor on a GPU, captured as it would run, and replayed.

    A step is more than a thousand launches, many of which take the host longer than the GPU. What the function leaves
    elsewhere, such as gradients, every replay writes anew, to the same places. Exchanges between processes are replayed
    too. A process can leave their group only after the graph is gone.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.input, self.graph = x.clone(), torch.cuda.CUDAGraph()
        # A thread of PyTorch queries the events of NCCL at any time, which 'global' forbids during a capture.
        mode = 'thread_local' if dist.is_initialized() else 'global'
        try:
            with torch.cuda.device(x.device), torch.cuda.graph(self.graph, capture_error_mode=mode):
                self.output = function(self.input)
        except BaseException:
            self.graph.reset()  # the traceback of the error holds this object while the process leaves the group
            raise

    def __call__(self, x: Tensor) -> Tensor:
        self.input.copy_(x)
        self.graph.replay()
        return self.output.clone()


def build_ahead(losses: Callable[[Tensor], object], loss: Callable[[Tensor], object], ids: Tensor) -> None:
    """Compile the kernels of training and of evaluation side by side. losses: of training. loss: of evaluation."""
    build_kernels(losses, ids)
    with torch.no_grad():
        build_kernels(loss, ids)
