"""Private interfaces of PyTorch for recording the operations of a call, beside those in `core.private`.

Each has a feature test. Where one is missing, `find_recording` returns None, and no call is recorded or replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from native_sparse_attention.core.private import PLAIN_KEYS, union_of_keys


class Recording(NamedTuple):
    """Interfaces of PyTorch that recording uses.

    Attributes:
        mode: base class of dispatch modes, whose `__torch_dispatch__` receives every operation of a thread, and those
            of the backward pass that the thread starts.
        innermost_mode: the dispatch mode of this thread that receives operations first, or None.
        storage_id: a number that identifies the memory of a tensor while something of `hold_id` is alive.
        hold_id: an object that keeps the number from being reused, but does not keep the memory.
        function_of: the Python function of a custom op, given its overload.
        is_mutable: whether an operation changes an argument, given its overload.
        is_plain: whether nothing but autograd and autocast takes part in a call: no mode, transform or trace.
        is_plain_tensor: the same of a tensor: it is not one of a transform, and its memory holds its values.
        is_below_autograd: whether autograd records nothing, as inside the kernel of an op, or in inference mode.
        hooks: the innermost hooks of saved tensors (pack, unpack), or None; raises RuntimeError if hooks are disabled.
        release: releases the saved tensors of a node, given its context in its backward pass, unless the graph is kept.
            Does nothing where PyTorch lacks the interface: it releases them after the node.
    """

    mode: type
    innermost_mode: Callable[[], Any]
    storage_id: Callable[[Tensor], int]
    hold_id: Callable[[Tensor], Any]
    function_of: Callable[[Any], Callable[..., Any]]
    is_mutable: Callable[[Any], bool]
    is_plain: Callable[[], bool]
    is_plain_tensor: Callable[[Tensor], bool]
    is_below_autograd: Callable[[], bool]
    hooks: Callable[[], Any]
    release: Callable[[Any], None]


def find_recording() -> Recording | None:
    """Return the interfaces, or None where PyTorch lacks one."""
    with suppress(Exception):
        return _known_recording()
    return None


def _known_recording() -> Recording:
    from torch._library.custom_ops import OPDEFS
    from torch.autograd import forward_ad
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode

    c: Any = torch._C
    count_modes, mode_at, count_functions = (
        c._len_torch_dispatch_stack, c._get_dispatch_stack_at, c._len_torch_function_stack
    )  # fmt: skip
    is_transformed, tracing_state = c._are_functorch_transforms_active, c._get_tracing_state
    is_excluded, autograd = c._dispatch_tls_is_dispatch_key_excluded, c.DispatchKey.AutogradFunctionality
    hooks_enabled, innermost_hooks = (
        c._autograd._saved_tensors_hooks_is_enabled, c._autograd._top_saved_tensors_default_hooks
    )  # fmt: skip

    def innermost_mode() -> Any:
        count = count_modes()
        return mode_at(count - 1) if count else None

    def function_of(op: Any) -> Callable[..., Any]:
        return OPDEFS[op._schema.name]._init_fn

    def is_mutable(op: Any) -> bool:
        return op._schema.is_mutable

    def is_plain() -> bool:
        return not (
            count_modes() or count_functions() or is_transformed() or forward_ad._current_level >= 0 or tracing_state()
        )

    other_keys, keys_of = ~union_of_keys(PLAIN_KEYS), c._dispatch_keys

    def is_plain_tensor(tensor: Tensor) -> bool:
        return not keys_of(tensor).raw_repr() & other_keys

    def is_below_autograd() -> bool:
        return is_excluded(autograd)

    def hooks() -> Any:
        if not hooks_enabled():
            raise RuntimeError('hooks of saved tensors are disabled')
        return innermost_hooks(True)

    def storage_id(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def hold_id(tensor: Tensor) -> Any:
        return StorageWeakRef(tensor.untyped_storage())

    release = getattr(c._FunctionBase, 'maybe_clear_saved_tensors', lambda ctx: None)
    operations = (storage_id, hold_id, function_of, is_mutable)
    found = Recording(
        TorchDispatchMode, innermost_mode, *operations, is_plain, is_plain_tensor, is_below_autograd, hooks, release
    )
    _test(found)
    return found


def _test(found: Recording) -> None:
    # No mode runs here: the first one imports torch._dynamo, which takes seconds.
    x, other = torch.zeros(4, device='cpu'), torch.zeros(4, device='cpu')
    is_known = found.storage_id(x[1:]) == found.storage_id(x) != found.storage_id(other)
    is_known = is_known and found.innermost_mode() is None and isinstance(found.is_plain(), bool)
    is_known = is_known and not found.hold_id(x).expired()
    is_known = is_known and found.is_plain_tensor(x) and not found.is_plain_tensor(torch._neg_view(x))
    with torch.inference_mode(False):
        is_known = is_known and not found.is_below_autograd()
    with torch.inference_mode():
        is_known = is_known and found.is_below_autograd()
    if not is_known:
        raise AssertionError
    own: Any = repr
    with torch.autograd.graph.saved_tensors_hooks(own, own):
        if found.hooks() != (own, own):
            raise AssertionError
