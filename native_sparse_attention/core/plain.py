"""Whether a module may be computed without being called.

The package goes around the modules that it knows: it casts their input beforehand, multiplies by their weights itself,
or replaces them by a kernel. That is right only where nothing else would run in a call, and where the weights are what
the module's own arithmetic reads.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules import module as module_hooks


def is_plain(module: nn.Module, *types: type[nn.Module]) -> bool:
    """Whether a call of the module does what its class says, and nothing else.

    The module and the modules in it are exactly of these types, with no `forward` of their own and no hooks, not even
    global ones. Their weights are plain floating tensors of more than 8 bits, not of a subclass. So a module is not
    plain where it has an adapter, pruning, a parametrisation, a quantised or sharded weight, or a hook of a profiler.
    Nothing is remembered: any of these may come and go between calls.
    """
    return not _has_global_hooks() and _is_plain(module, types)


def plain_weight(module: nn.Module) -> Tensor:
    """The weight of a module that is plain: a parameter, or the tensor that a transform has put in its place."""
    return module.weight  # type: ignore[return-value]


def plain_bias(module: nn.Module) -> Tensor:
    """The bias of a module that is plain and has one."""
    return module.bias  # type: ignore[return-value]


def _is_plain(module: nn.Module, types: tuple[type[nn.Module], ...]) -> bool:
    # This runs in every step of decoding: few generators, and no look-up of an attribute that a module may not have.
    if type(module) not in types:
        return False
    own = vars(module)
    if 'forward' in own:
        return False
    if module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks:
        return False
    for weight in module._parameters.values():
        if weight is not None and not _is_plain_weight(weight):
            return False
    for name in ('weight', 'bias'):  # where there are tensors in place of parameters
        if name in own and own[name] is not None and not _is_plain_weight(own[name]):
            return False
    children = module._modules
    return not children or all(child is None or _is_plain(child, types) for child in children.values())


def _is_plain_weight(weight: Tensor) -> bool:
    if type(weight) is not nn.Parameter and type(weight) is not Tensor:
        return False
    return weight.is_floating_point() and weight.dtype.itemsize > 1


def _has_global_hooks() -> bool:
    return bool(
        module_hooks._global_forward_pre_hooks
        or module_hooks._global_forward_hooks
        or module_hooks._global_backward_pre_hooks
        or module_hooks._global_backward_hooks
    )
