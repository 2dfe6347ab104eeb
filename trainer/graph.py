"""Replay of a step as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


class Graph:
    """A function of a tensor on a GPU, captured as it would run, and replayed.

    A step is more than a thousand launches, many of which take the host longer than the GPU. What the function leaves
    elsewhere, such as gradients, every replay writes anew, to the same places. Exchanges between processes are replayed
    too; their group can be left only once no graph of it is left.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.input, self.graph = x.clone(), torch.cuda.CUDAGraph()
        # NCCL asks for events in a thread of its own, at any time.
        mode = 'thread_local' if dist.is_initialized() else 'global'
        with torch.cuda.device(x.device), torch.cuda.graph(self.graph, capture_error_mode=mode):
            self.output = function(self.input)

    def __call__(self, x: Tensor) -> Tensor:
        self.input.copy_(x)
        self.graph.replay()
        return self.output.clone()
