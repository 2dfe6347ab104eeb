"""Private interfaces of PyTorch: the package reaches into them in this file and in those named like it.

Each use has a feature test, which runs once, and a fallback to public interfaces. The fallback gives the same results
and costs host time or memory. So a new release of PyTorch that changes a private interface makes the package slower and
does not break it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain, repeat
from operator import contains
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.library import CustomOpDef, Library
from torch.nn.modules import module as module_hooks


def require(is_as_known: bool) -> None:
    """An assertion that python -O keeps."""
    if not is_as_known:
        raise AssertionError


def first(*candidates: Callable[[], Any]) -> Any:
    """The result of the first candidate whose feature test raises nothing; the last candidate is the fallback."""
    for candidate in candidates[:-1]:
        with suppress(Exception):
            return candidate()
    return candidates[-1]()


# --- Transforms and modes ---


class _WithoutTransforms(torch.autograd.Function):
    """PyTorch refuses to apply it under torch.func transforms, since it has no setup_context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()


def _test_transforms() -> bool:
    with torch.no_grad():
        try:
            _WithoutTransforms.apply(torch.zeros((), device='cpu'))
        except RuntimeError:
            return True
        return False


def _test_forward_ad() -> bool:
    with torch.inference_mode(False), torch.no_grad():
        x = torch.zeros((), device='cpu')
        try:
            forward_ad.make_dual(x, x)
        except RuntimeError:
            return False
        return True


def _known_transforms() -> Callable[[], bool]:
    require(isinstance(torch._C._are_functorch_transforms_active(), bool))
    return torch._C._are_functorch_transforms_active


def _known_forward_ad() -> Callable[[], bool]:
    require(isinstance(forward_ad._current_level, int))
    return lambda: forward_ad._current_level >= 0


def _known_dispatch_modes() -> Callable[[], bool]:
    require(isinstance(torch._C._len_torch_dispatch_stack(), int))
    return lambda: torch._C._len_torch_dispatch_stack() > 0


# Whether a transform of torch.func (vmap, grad, jvp, ...) is active.
is_transformed: Callable[[], bool] = first(_known_transforms, lambda: _test_transforms)
# Whether forward-mode derivatives are computed.
is_forward_ad: Callable[[], bool] = first(_known_forward_ad, lambda: _test_forward_ad)
# Whether a dispatch mode (selective checkpointing, fake tensors, ...) may be active. The fallback assumes one.
may_be_dispatched: Callable[[], bool] = first(_known_dispatch_modes, lambda: lambda: True)


# --- Modules ---

_HOOKS = ('_forward_pre_hooks', '_forward_hooks', '_backward_pre_hooks', '_backward_hooks')


def _does_only_forward(module: nn.Module, types: tuple[type[nn.Module], ...]) -> bool:
    # This runs in every decoding step: few generators, and no look-up of an attribute that a module may not have.
    weights = module._parameters.values()
    if type(module) not in types:
        if getattr(type(module), 'divided_class', None) not in types:
            return False
        weights = module.weights_of_rank()  # type: ignore[operator]
    if 'forward' in (own := vars(module)) or module._buffers:
        return False
    if module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks:
        return False
    for weight in weights:
        if weight is not None and not _is_plain_weight(weight):
            return False
    for name in ('weight', 'bias'):  # where there are tensors in place of parameters
        if name in own and own[name] is not None and not _is_plain_weight(own[name]):
            return False
    children = module._modules
    return not children or all(child is None or _does_only_forward(child, types) for child in children.values())


def _is_plain_weight(weight: Tensor) -> bool:
    if type(weight) is not nn.Parameter and type(weight) is not Tensor:
        return False
    return weight.is_floating_point() and weight.dtype.itemsize > 1


def _is_plain(module: nn.Module, types: tuple[type[nn.Module], ...]) -> bool:
    if module_hooks._global_forward_pre_hooks or module_hooks._global_forward_hooks:
        return False
    if module_hooks._global_backward_pre_hooks or module_hooks._global_backward_hooks:
        return False
    return _does_only_forward(module, types)


def _runs_hooks(module: nn.Module) -> bool:
    return bool(module_hooks._global_forward_pre_hooks or module_hooks._global_forward_hooks) or any(
        each._forward_pre_hooks or each._forward_hooks or 'forward' in vars(each) for each in module.modules()
    )


def _known_modules() -> tuple[Callable[[nn.Module, tuple[type[nn.Module], ...]], bool], Callable[[nn.Module], bool]]:
    module = nn.Module()
    for name in _HOOKS:
        require(not getattr(module, name))
        require(isinstance(getattr(module_hooks, '_global' + name), dict))
    module.register_forward_pre_hook(print)
    module.register_forward_hook(print)
    module.register_full_backward_pre_hook(print)
    module.register_full_backward_hook(print)
    module.register_parameter('weight', None)
    module.register_module('child', None)
    module.register_buffer('buffer', None)
    require(all(len(getattr(module, name)) == 1 for name in (*_HOOKS, '_parameters', '_modules', '_buffers')))
    return _is_plain, _runs_hooks


# Whether a call of the module does what its class says, see `core.plain.is_plain`; and whether it runs hooks, see
# `core.plain.runs_hooks`. No public interface lists hooks, so the fallback takes no module as plain and every module as
# hooked: then every module is called, in every decoding step.
is_plain: Callable[[nn.Module, tuple[type[nn.Module], ...]], bool]
runs_hooks: Callable[[nn.Module], bool]
is_plain, runs_hooks = first(_known_modules, lambda: (lambda module, types: False, lambda module: True))


class ModelState(NamedTuple):
    """tensors: parameters and buffers, of a DTensor the part of this rank, without those of other subclasses; None
    where one is gone. modules: all submodules. is_hooked: as `runs_hooks`.
    """

    tensors: list[Tensor | None]
    modules: list[nn.Module | None]
    is_hooked: bool


def _known_state(model: nn.Module) -> Callable[[], ModelState]:
    # Every replayed step reads the state, over hundreds of modules.
    modules = list(model.modules())
    stores = [store for module in modules for store in (module._parameters, module._buffers)]
    divided = [(store, name) for store in stores for name, t in store.items() if hasattr(t, 'to_local')]
    if not all(hasattr(store[name], '_local_tensor') for store, name in divided):
        return _listed_state(model)
    slots = [(store, name) for store in stores for name, t in store.items() if type(t) in (Tensor, nn.Parameter)]
    stores, names = [store for store, _ in slots], [name for _, name in slots]
    children, own = [module._modules for module in modules if module._modules], [vars(module) for module in modules]
    hooks = [module_hooks._global_forward_pre_hooks, module_hooks._global_forward_hooks]
    hooks += [each for module in modules for each in (module._forward_pre_hooks, module._forward_hooks)]

    def read() -> ModelState:
        is_hooked = any(hooks) or any(map(contains, own, repeat('forward')))
        parts = [getattr(part := store.get(name), '_local_tensor', part) for store, name in divided]
        return ModelState(
            [*map(dict.get, stores, names), *parts],  # type: ignore[arg-type]
            list(chain.from_iterable(map(dict.values, children))),
            is_hooked,
        )

    return read


def _listed_state(model: nn.Module) -> Callable[[], ModelState]:
    @torch.no_grad()
    def read() -> ModelState:
        given: Any = (*model.parameters(), *model.buffers())
        parts = [t.to_local() if hasattr(t, 'to_local') else t for t in given]
        tensors = [t for t in parts if type(t) in (Tensor, nn.Parameter)]
        return ModelState(tensors, list(model.modules()), runs_hooks(model))

    return read


def _test_state() -> Callable[[nn.Module], Callable[[], ModelState]]:
    module = nn.Sequential(nn.BatchNorm1d(1))
    read = _known_state(module)
    require((len(read().tensors), read().modules, read().is_hooked) == (5, [module[0]], False))
    norm: Any = module[0]
    norm.weight, norm.running_mean = nn.Parameter(torch.zeros(1)), torch.zeros(1, device='cpu')
    require(read().tensors[0] is norm.weight)
    require(any(t is norm.running_mean for t in read().tensors))
    norm.register_forward_hook(print)
    require(read().is_hooked)
    module[0] = nn.Identity()
    require(read().modules == [module[0]])
    return _known_state


# A function that reads the state of a model as it is now. The fallback goes through all modules at each call.
state_of: Callable[[nn.Module], Callable[[], ModelState]] = first(_test_state, lambda: _listed_state)


# --- Saved tensors ---


class SavedTensorHooks(NamedTuple):
    """is_free: whether hooks of saved tensors are allowed and none is active. version_of: counts the in-place changes
    of a tensor.
    """

    is_free: Callable[[], bool]
    version_of: Callable[[Tensor], int]


def _known_saved_tensor_hooks() -> SavedTensorHooks:
    autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
    is_enabled, innermost = autograd._saved_tensors_hooks_is_enabled, autograd._top_saved_tensors_default_hooks
    require(isinstance(is_enabled(), bool))
    require(innermost(True) is None or len(innermost(True)) == 2)
    require(isinstance(inspect.getattr_static(Tensor, '_version'), type(inspect.getattr_static(Tensor, 'data'))))
    return SavedTensorHooks(lambda: is_enabled() and innermost(True) is None, lambda t: t._version)


# No public interface says which hooks are active, or the version of a tensor. The fallback takes hooks as never free:
# then autograd saves every tensor itself.
saved_tensor_hooks: SavedTensorHooks = first(
    _known_saved_tensor_hooks, lambda: SavedTensorHooks(lambda: False, lambda t: 0)
)


# --- Compiled graphs ---


class Graphs(NamedTuple):
    """patch: a context in which torch.compile has the settings. are_unlimited: whether it takes them, so that one graph
    serves every length and no call exceeds the limit of graphs.
    """

    patch: Callable[[Mapping[str, Any]], AbstractContextManager[Any]]
    are_unlimited: bool


def find_graphs(settings: Iterable[str]) -> Graphs:
    """How torch.compile takes settings of these names. Imports torch._dynamo, which takes seconds.

    No public interface takes them. In the fallback each length has a graph of its own (dynamic=False), and calls beyond
    the limit of graphs are not compiled (fullgraph=False).
    """

    def known() -> Graphs:
        config: Any = torch._dynamo.config
        require(all(hasattr(config, name) for name in settings))
        with config.patch({}):
            return Graphs(config.patch, are_unlimited=True)

    return first(known, lambda: Graphs(lambda _: nullcontext(), are_unlimited=False))


# --- Registered ops ---

_LIBRARY = Library('native_sparse_attention', 'FRAGMENT')
# The dispatch keys of a call in which nothing but autograd and autocast takes part.
PLAIN_KEYS = ('CPU', 'CUDA', 'AutogradCPU', 'AutogradCUDA', 'ADInplaceOrView', 'AutocastCPU', 'AutocastCUDA')


def qualified_name(op: CustomOpDef) -> str:
    """namespace::name of an op; in the fallback its repr."""
    return getattr(op, '_qualname', repr(op))


def register_derivative(op: CustomOpDef, backward: Callable[..., Any], save: Callable[..., None]) -> bool:
    """Replace what op.register_autograd(backward, setup_context=save) registered for CPUs and GPUs by a faster form.

    PyTorch reads the whole schema again for each argument of each call, to fill in default values. The replacement
    calls `save` and the function of the op directly. It omits the search for outputs that are inputs, which the tests
    make. Where no mode, tensor subclass or transform takes part, it omits the second pass through the dispatcher too.

    Returns False, and replaces nothing, where PyTorch lacks an interface that this needs.
    """
    try:
        function = torch._disable_dynamo(op._init_fn)
        call = _make_differentiable(op, op._opoverload, backward, save, lambda derivative: derivative.apply)
        call_plain = _make_differentiable(op, function, backward, save, _plain_apply)
        other_keys = ~union_of_keys(PLAIN_KEYS)
        is_transformed = torch._C._are_functorch_transforms_active
        name = op._name
    except (AttributeError, TypeError):
        return False

    def dispatch(keys: Any, *inputs: Any) -> Any:
        is_plain = not keys.raw_repr() & other_keys and not is_transformed()
        return (call_plain if is_plain else call)(*inputs)

    for device in ('CPU', 'CUDA'):
        _LIBRARY.impl(name, dispatch, f'Autograd{device}', with_keyset=True)
        _LIBRARY.impl(name, function, device)
    return True


def union_of_keys(names: Iterable[str]) -> int:
    keys = 0
    for name in names:
        keys |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return keys


def _plain_apply(derivative: Any) -> Callable[..., Any]:
    """`derivative.apply` without its treatment of transforms, active or past."""
    parent: Any = super(torch.autograd.Function, derivative)
    return parent.apply


def _make_differentiable(
    op: CustomOpDef,
    function: Callable[..., Any],
    backward: Callable[..., Any],
    save: Callable[..., None],
    apply_of: Callable[[Any], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function with a derivative, recorded by `apply_of` of a subclass of torch.autograd.Function."""
    below_autograd = torch._C._AutoDispatchBelowAutograd

    def below(*inputs: Any) -> Any:
        with below_autograd():
            return function(*inputs)

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = below(*inputs)
        save(ctx, inputs, output)
        return output

    methods = {'forward': staticmethod(forward), 'backward': staticmethod(backward)}
    apply = apply_of(type(op._name, (torch.autograd.Function,), methods))

    def call(*inputs: Any) -> Any:
        needs_graph = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs)
        return (apply if needs_graph else below)(*inputs)

    return call
