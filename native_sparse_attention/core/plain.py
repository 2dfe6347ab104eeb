"""Whether a module may be computed without being called, and whether attention may run where it is called.

The package goes around the modules that it knows: it casts their input beforehand, multiplies by their weights itself,
or replaces them by a kernel. That is right only where nothing else would run in a call, and where the weights are what
the module's own arithmetic reads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from native_sparse_attention.core import private


def is_plain(module: nn.Module, *types: type[nn.Module]) -> bool:
    """Whether a call of the module does what its class says, and nothing else.

    The module and the modules in it are exactly of these types, with no `forward` of their own, no buffers and no
    hooks, not even global ones. Their weights are plain floating tensors of more than 8 bits, not of a subclass. So a
    module is not plain where it has an adapter, pruning, a parametrisation, a quantised or sharded weight, or a hook of
    a profiler.
    A module that tensor parallelism has divided computes with the plain weights of its rank.
    Nothing is cached: any of these may change between calls.
    """
    return private.is_plain(module, types)


def kind_of(module: nn.Module) -> type[nn.Module]:
    """Return the class that `is_plain` compares: of a module that tensor parallelism has divided, the class before."""
    return getattr(type(module), 'divided_class', type(module))


def runs_hooks(module: nn.Module) -> bool:
    """Whether a call of the module, or of a module in it, runs forward hooks or a `forward` of the instance.

    Sharding, offload and profilers are among them. Nothing is cached, as in `is_plain`.
    """
    return private.runs_hooks(module)


def plain_weight(module: nn.Module) -> Tensor:
    """The weight of a module that is plain: a parameter, or the tensor that a transform has put in its place."""
    return module.weight  # type: ignore[return-value]


def plain_bias(module: nn.Module) -> Tensor:
    """The bias of a module that is plain and has one."""
    return module.bias  # type: ignore[return-value]


def refuse_context_parallel() -> None:
    """Raise inside `torch.distributed.tensor.experimental.context_parallel`.

    It shards the sequence and replaces scaled_dot_product_attention, the function that this looks at.
    """
    if torch.compiler.is_compiling():
        return
    module = getattr(F.scaled_dot_product_attention, '__module__', None) or ''
    if module.startswith('torch.distributed.tensor'):
        raise ValueError(
            "attention is called inside PyTorch's context_parallel, but must not be: it would read one shard alone"
        )
