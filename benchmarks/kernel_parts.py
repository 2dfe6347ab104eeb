"""Assign the kernels of a training step to parts of the model, by PyTorch's profiler.

`marked` opens a range of the profiler around every part of a forward pass. A kernel belongs to the innermost range, or
op of a known name, in which it was launched. A kernel of the backward pass belongs to the part of the forward op that
made its autograd node; the two have one sequence number. A kernel for which neither is known belongs to `NOT_ASSIGNED`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple
from unittest import mock

from torch.autograd import DeviceType
from torch.nn import utils
from torch.profiler import record_function

from native_sparse_attention import composition, functional
from native_sparse_attention.autograd import replay
from native_sparse_attention.nn import attention, dense
from native_sparse_attention.nn.heads import BranchHeads
from native_sparse_attention.nn.layer import AttentionLayer
from native_sparse_attention.nn.linear import FixedStartLinear
from native_sparse_attention.nn.rotary import Rotary
from native_sparse_attention.nn.transformer import Block, Transformer
from train_enwik8 import Run

HEAD = 'embedding, head, cross entropy'
FEED_FORWARD = 'feed-forward and its norm'
PROJECTIONS = 'projections of attention'
NORMS = 'norms, rotary'
PHI = 'φ'
GATES = 'gates'
COMPRESSED = 'compressed attention'
SELECTION = 'block selection'
TOP_K_GRADIENT = 'gradient of the selection (use_diff_topk)'
MERGED = 'selected attention and window, merged'
SELECTED = 'selected attention'
WINDOW = 'window attention'
DENSE = 'dense attention'
GATED_SUM = 'gated sum, output gate'
BLOCK_LOSS = 'loss of block scores'
OTHER = 'residual sums, rest of a block'
OPTIMIZER = 'clipping, optimizer'
BATCH = 'batch, copies'
NOT_ASSIGNED = 'not assigned'
# In the order of tables.
PARTS = (
    *(HEAD, FEED_FORWARD, PROJECTIONS, NORMS, PHI, GATES, COMPRESSED, SELECTION, TOP_K_GRADIENT, MERGED, SELECTED),
    *(WINDOW, DENSE, GATED_SUM, BLOCK_LOSS, OTHER, OPTIMIZER, BATCH, NOT_ASSIGNED),
)

# Functions and methods that run inside a range: (owner, name, part). The methods of classes are replaced, since layers
# compute otherwise where a module has a hook or a forward of its own.
RANGES: tuple[tuple[Any, str, str], ...] = (
    (Run, 'train_step', BATCH),
    (Run, 'differentiate', HEAD),
    (utils, 'clip_grad_norm_', OPTIMIZER),
    (Transformer, 'forward', HEAD),
    (Block, 'forward', OTHER),
    (AttentionLayer, '_normalise', NORMS),
    (attention.SparseAttention, '_project', PROJECTIONS),
    (attention.SparseAttention, '_compress', PHI),
    (attention.SparseAttention, '_combine', PROJECTIONS),
    (FixedStartLinear, 'forward', GATES),
    (Rotary, 'tables', NORMS),
    (BranchHeads, '__init__', NORMS),
    (BranchHeads, 'queries', NORMS),
    (BranchHeads, 'keys', NORMS),
    (composition, 'shared_input', NORMS),
    (attention, 'block_score_loss', BLOCK_LOSS),
    (functional.compressed_attention, 'attend', COMPRESSED),
    (functional.block_selection, 'select', SELECTION),
    (functional.block_selection, 'score', TOP_K_GRADIENT),
    (functional.selected_attention, 'attend_merged', MERGED),
    (functional.selected_attention, 'attend', SELECTED),
    (functional.window_attention, 'attend', WINDOW),
    (functional.gated_sum, 'add', GATED_SUM),
    (functional, '_add_compressed', GATED_SUM),
    (dense.DenseAttention, '_project', PROJECTIONS),
    (dense.DenseAttention, '_combine', PROJECTIONS),
    (dense, 'normalised_and_rotated', NORMS),
    (dense, '_sdpa', DENSE),
)
# Start of the names of ranges; those of optimizers are PyTorch's.
RANGE, OF_OPTIMIZER = 'part: ', 'Optimizer.'
# Events of the profiler: an autograd node that runs; a call of CUDA's interfaces, to which some versions of PyTorch
# link kernels a second time.
NODE = 'autograd::engine::evaluate_function: '
CUDA_CALL = re.compile(r'cu(da)?[A-Z]')
# Ops that belong to one part wherever they run; None: the range decides. Queries are rotated again in the backward
# pass of the attention that reads them.
OPS: dict[str, str | None] = {
    'torch::autograd::AccumulateGrad': BATCH,
    'aten::sigmoid': GATES,
    'aten::sigmoid_backward': GATES,
    'native_sparse_attention::add_gradients': NORMS,
    'native_sparse_attention::block_divergence': BLOCK_LOSS,
    'native_sparse_attention::block_divergence_backward': BLOCK_LOSS,
    'native_sparse_attention::block_mass': BLOCK_LOSS,
    'native_sparse_attention::chosen_scores': TOP_K_GRADIENT,
    'native_sparse_attention::chosen_scores_backward': TOP_K_GRADIENT,
    'native_sparse_attention::gated_sum': GATED_SUM,
    'native_sparse_attention::gated_sum_backward': GATED_SUM,
    'native_sparse_attention::interval_attention': None,
    'native_sparse_attention::interval_attention_backward': None,
    'native_sparse_attention::list_flex_tiles': None,
    'native_sparse_attention::merged_attention': MERGED,
    'native_sparse_attention::merged_attention_backward': MERGED,
    'native_sparse_attention::norm_rotary': NORMS,
    'native_sparse_attention::norm_rotary_backward': NORMS,
    'native_sparse_attention::nsa_backward': None,
    'native_sparse_attention::rotary': NORMS,
    'native_sparse_attention::select_blocks': SELECTION,
    'native_sparse_attention::selected_attention': SELECTED,
    'native_sparse_attention::selected_attention_backward': SELECTED,
}
# Kernels of the package for training, and the part of those that serve one alone; None: the op or range decides.
KERNELS: dict[str, str | None] = {
    'backward_kernel': GATED_SUM,
    'block_dq_kernel': None,
    'block_kernel': None,
    'block_lse_kernel': BLOCK_LOSS,
    'combine_kernel': None,
    'convert_kernel': None,
    'dbias_kernel': None,
    'delta_kernel': None,
    'divergence_kernel': BLOCK_LOSS,
    'dk_kernel': BLOCK_LOSS,
    'dkv_kernel': None,
    'dq_from_dlogits_kernel': None,
    'dq_kernel': None,
    'dscale_kernel': TOP_K_GRADIENT,
    'finite_kernel': None,
    'forward_kernel': None,
    'mass_kernel': BLOCK_LOSS,
    'mean_kernel': BLOCK_LOSS,
    'merge_kernel': None,
    'norm_rotary_backward_kernel': NORMS,
    'norm_rotary_kernel': NORMS,
    'partial_kernel': TOP_K_GRADIENT,
    'place_kernel': None,
    'rotary_kernel': NORMS,
    'select_kernel': SELECTION,
    'slot_kernel': None,
    'split_kernel': MERGED,
    'sum_kernel': None,
    'union_dq_kernel': None,
    'union_forward_kernel': None,
    'union_kernel': None,
}


class Time(NamedTuple):
    """Microseconds of a kernel, or of an op on a CPU."""

    name: str
    part: str
    is_backward: bool
    micros: float


@contextmanager
def marked(model: Transformer) -> Iterator[None]:
    """Open a range around every part of the model, and replay no recorded calls, whose kernels have no ops.

    The CUDA graph of a training step contains no recorded calls either.
    """
    modules = [(block.feed_forward, FEED_FORWARD) for block in model.blocks]
    own = [(module, 'forward', part) for module, part in [*modules, (model.norm, NORMS)]]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(replay, 'DEVICE_TYPES', ()))
        for owner, name, part in (*RANGES, *own):
            stack.enter_context(mock.patch.object(owner, name, _in_range(getattr(owner, name), part)))
        yield


def _in_range(function: Callable[..., Any], part: str) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(RANGE + part):
            return function(*args, **kwargs)

    return call


class Steps:
    """Events of the profiler (FunctionEvent) of whole steps inside `marked`."""

    def __init__(self, events: Iterable[Any]) -> None:
        self.events = [event for event in events if not getattr(event, 'is_user_annotation', False) or _on_cpu(event)]
        # The last op that starts with a sequence number makes the autograd node with this number.
        made: dict[int, Any] = {}
        for event in self.events:
            if _on_cpu(event) and event.sequence_nr >= 0 and _node_of(event) is None:
                last = made.get(event.sequence_nr)
                if last is None or last.time_range.start <= event.time_range.start:
                    made[event.sequence_nr] = event
        self.made = made

    def part_of(self, event: Any) -> tuple[str | None, bool]:
        """Return the part of an event on the CPU, or None; and whether it belongs to the backward pass."""
        is_backward = False
        while event is not None:
            name = event.name.removeprefix(NODE)
            if name.startswith(RANGE):
                return name.removeprefix(RANGE), is_backward
            part = OPTIMIZER if name.startswith(OF_OPTIMIZER) else OPS.get(name)
            if part is not None:
                return part, is_backward or _node_of(event) is not None
            if event.name.startswith(NODE):
                event, is_backward = self.made.get(event.sequence_nr), True
            else:
                event = event.cpu_parent
        return None, is_backward

    def assign(self, name: str, launcher: Any, micros: float) -> Time:
        """Return the time of a kernel or an op. launcher: the event that launched it, or None."""
        part, is_backward = (None, False) if launcher is None else self.part_of(launcher)
        return Time(name, KERNELS.get(name) or part or NOT_ASSIGNED, is_backward, micros)

    def device_times(self) -> list[Time]:
        """Return the times of kernels and copies on a GPU, those that no op is known to have launched included."""
        times, linked, total = [], Counter[str](), Counter[str]()
        for event in self.events:
            if not _on_cpu(event):
                total[event.name] += event.time_range.elapsed_us()
            elif not CUDA_CALL.match(event.name):
                for kernel in event.kernels:
                    if not _is_range(kernel.name):
                        linked[kernel.name] += kernel.duration
                        times.append(self.assign(kernel.name, event, kernel.duration))
        unlinked = {name: micros - linked[name] for name, micros in total.items() if not _is_range(name)}
        # Durations are rounded to nanoseconds.
        return times + [self.assign(name, None, micros) for name, micros in unlinked.items() if micros > 0.1]

    def host_times(self) -> list[Time]:
        """Return the times of ops on a CPU, without those of other ops inside them."""
        outer = (RANGE, OF_OPTIMIZER, NODE)
        ops = [event for event in self.events if _on_cpu(event) and not event.name.startswith(outer)]
        return [self.assign(event.name, event, event.self_cpu_time_total) for event in ops]


def _on_cpu(event: Any) -> bool:
    return event.device_type == DeviceType.CPU


def _is_range(name: str) -> bool:
    return name.startswith((RANGE, OF_OPTIMIZER))


def _node_of(event: Any) -> Any:
    """Return the event of the autograd node in which an event runs, or None."""
    while event is not None and not event.name.startswith(NODE):
        event = event.cpu_parent
    return event


class Kernel(NamedTuple):
    """All launches of a kernel in one part and pass, per step."""

    name: str
    part: str
    is_backward: bool
    ms: float
    launches: float


def sum_kernels(times: Iterable[Time], steps: int) -> list[Kernel]:
    """Return the kernels of a step, the longest first."""
    found: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    for time in times:
        found[time[:3]].append(time.micros)
    kernels = [Kernel(*key, sum(micros) / 1e3 / steps, len(micros) / steps) for key, micros in found.items()]
    return sorted(kernels, key=lambda kernel: -kernel.ms)
