"""Types of `import triton` for the type checker.

From 3.8 on Triton declares that calls in kernels take the types of its annotations. In Triton's language a
`tl.constexpr` parameter takes a plain number, and a name that is bound under a constant condition is bound: these
declarations refuse code that compiles. Here such calls declare nothing. A launch, `kernel[grid](...)`, is checked.
"""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar, overload

from triton.compiler import compile as compile
from triton.runtime import JITFunction
from triton.runtime._async_compile import AsyncCompileMode as AsyncCompileMode

knobs: Any

T = TypeVar('T')

class Kernel(JITFunction[T]):
    # As before 3.8: the statements that follow a call of a helper are not checked.
    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn: ...

@overload
def jit(fn: T) -> Kernel[T]: ...
@overload
def jit(*, do_not_specialize: Iterable[int | str] | None = None) -> Callable[[T], Kernel[T]]: ...
def next_power_of_2(n: int) -> int: ...
