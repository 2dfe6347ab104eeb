"""The processes of a run: rows and layers are divided over them, and they decide together."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from native_sparse_attention.distributed import apply_cp, apply_fsdp, apply_tp, hold_weights
from native_sparse_attention.nn.transformer import Transformer
from trainer.config import spelled
from trainer.console import UserError, as_user_error

Result = TypeVar('Result')


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, dp x cp x tp of them.

    Those of one data rank read the same rows. Context ranks divide their sequences, tensor ranks the heads.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    mesh: DeviceMesh | None = None  # data x context x tensor; None in one process

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.mesh is None or dist.get_rank() == 0

    def divide(self, model: Transformer, compiles: bool) -> None:
        """Divide a model over the processes, in place. An error is raised in all of them."""
        if self.mesh is None:
            return
        if self.tp > 1:
            with as_user_error(ValueError, of=f'--tp {self.tp}: '):
                apply_tp(model, self.mesh['tensor'])
        if self.cp > 1:
            with as_user_error(ValueError, of=f'--cp {self.cp}: '):
                apply_cp(model, self.mesh['context'])
        if compiles:
            for block in model.blocks:
                block.compile()
        if shards := tuple(name for name, ranks in (('data', self.dp), ('context', self.cp)) if ranks > 1):
            apply_fsdp(model, self.mesh[shards])
            if self.tp > 1:
                _make_one_group(self.mesh[shards[-1], 'tensor'])

    @property
    def can_capture(self) -> bool:
        """Whether the exchanges of a step can be part of a CUDA graph: context and tensor ranks compare on the host."""
        return self.mesh is None or self.cp == self.tp == 1

    def holding(self, model: Transformer) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the weights stay whole, for generation."""
        return hold_weights(model) if self.dp * self.cp > 1 else contextlib.nullcontext()

    def rows(self, ids: Tensor, dim: int = 0) -> Tensor:
        """Return the rows, dimension `dim` of ids, that this data rank reads."""
        return ids.tensor_split(self.dp, dim)[0 if self.mesh is None else self.mesh['data'].get_local_rank()]

    def tokens(self, ids: Tensor) -> Tensor:
        """Return the tokens, of the last dimension of ids, that this context rank reads."""
        return ids.tensor_split(self.cp, -1)[0 if self.mesh is None else self.mesh['context'].get_local_rank()]

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over the data ranks of a tensor, changed in place, that is equal on the ranks of each."""
        if self.mesh is None:
            return value
        dist.all_reduce(value)
        return value / (self.cp * self.tp)

    def agree(self, value: int) -> int:
        """Return the largest value of all processes. Nothing on a GPU is waited for."""
        if self.mesh is None:
            return value
        dist.all_reduce(largest := torch.tensor(value), dist.ReduceOp.MAX)
        return int(largest)

    def together(self, function: Callable[[], Result]) -> Result:
        """Return the result of a function that every process calls. An error of one of them is raised in all.

        The function communicates nothing.
        """
        result, error = None, None
        try:
            result = function()
        except (UserError, OSError) as raised:
            error = raised
        if self.mesh is not None:
            errors: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(errors, error)
            error = error or next(filter(None, errors), None)
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def from_first(self, function: Callable[[], Result]) -> Result:
        """Return the result of a function that the first process alone calls."""
        result: Any = self.together(function if self.is_first else lambda: None)
        if self.mesh is not None:
            dist.broadcast_object_list(copies := [result], src=0)
            result = result if self.is_first else copies[0]
        return result


ONE_PROCESS = Ranks()


@contextlib.contextmanager
def joined() -> Iterator[Callable[[argparse.Namespace], Ranks]]:
    """Join the processes that torchrun started, for the duration of the context. Without torchrun there is one.

    Yields a function of the options of this call, which returns the `Ranks` and sets `options.device` to the GPU of
    this process. It raises `UserError` if the number of processes is not dp x cp x tp, or if there are fewer GPUs.

    Only the first process prints. If a process fails, the others lose a peer and fail too. The first to fail has the
    cause, so it raises the error with its message, and the others raise a `UserError` without text.
    """
    if 'WORLD_SIZE' not in os.environ or os.environ['WORLD_SIZE'] == '1':
        yield lambda options: Ranks(*_layout(options, 1))
        return
    with as_user_error(ValueError):
        store, rank, world = next(iter(dist.rendezvous('env://')))
    with contextlib.ExitStack() as stack:
        if rank:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, 'w'))))
        try:
            yield lambda options: _join(options, store, rank, world)
        except (UserError, OSError, RuntimeError) as error:
            is_lost = is_lost_peer(error)
            if isinstance(error, RuntimeError) and not is_lost:
                raise
            try:
                is_cause = store.add('failed', 1) == 1
            except dist.DistError:  # without torchrun the store ends with the first process
                is_cause = True
            if not is_lost:
                _leave()
            if is_cause and not is_lost:
                raise
            message = 'another process of this run ended (the same command with --resume goes on)' if is_cause else ''
            raise UserError(message) from error
        _leave()


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another process ended."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and '/gloo/' in str(error))


def _join(options: argparse.Namespace, store: dist.Store, rank: int, world: int) -> Ranks:
    layout = _layout(options, world)
    kind = _choose_device(options)
    dist.init_process_group('gloo' if kind == 'cpu' else 'cpu:gloo,cuda:nccl', store=store, rank=rank, world_size=world)
    return Ranks(*layout, init_device_mesh(kind, layout, mesh_dim_names=('data', 'context', 'tensor')))


def _make_one_group(mesh: DeviceMesh) -> None:
    """Make one group of the ranks of both dimensions, over which PyTorch sums the norm of gradients in one step.

    Without it PyTorch 2.14 sums over one dimension after the other, and warns. No public function makes it.
    """
    if flatten := getattr(mesh, '_flatten', None):
        flatten()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _layout(options: argparse.Namespace, world: int) -> tuple[int, int, int]:
    """Return the numbers of data, of context and of tensor ranks."""
    dp, cp, tp = options.dp, options.cp, options.tp
    trains_nothing = [name for name in ('sample', 'compare', 'check_decode') if getattr(options, name)]
    if world > 1 and trains_nothing:
        raise UserError(f'{spelled(trains_nothing[0])}: runs in one process, without torchrun')
    for name, value in (('--dp', dp), ('--cp', cp), ('--tp', tp)):
        if value is not None and value < 1:
            raise UserError(f'{name} {value}: must be at least 1')
    given, needed = f'--cp {cp} --tp {tp}', f'a multiple of {cp * tp}'
    if dp is None and world % (cp * tp) == 0:
        dp = world // (cp * tp)
    elif dp is not None:
        given, needed = f'--dp {dp} {given}', str(dp * cp * tp)
    if dp is None or dp * cp * tp != world:
        raise UserError(
            f'{given}: the number of processes is {world}, but must be {needed} (torchrun --nproc-per-node)'
        )
    return dp, cp, tp


def _choose_device(options: argparse.Namespace) -> str:
    """Give the process a GPU of its own, and return 'cuda' or 'cpu'."""
    kind, on_host, present = options.device, int(os.environ.get('LOCAL_WORLD_SIZE', '1')), torch.cuda.device_count()
    if kind not in ('cuda', 'cpu'):
        raise UserError(f'--device {kind}: must be cuda or cpu for several processes, each of which takes a GPU')
    if kind == 'cuda':
        if on_host > present:
            raise UserError(f'--device cuda: {on_host} processes on a host with {present} GPUs, but each needs its own')
        options.device = f'cuda:{os.environ.get("LOCAL_RANK", "0")}'
        torch.cuda.set_device(options.device)
    return kind
