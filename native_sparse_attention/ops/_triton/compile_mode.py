"""The mode of Triton in which threads compile kernels."""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import AbstractContextManager
from typing import Any

import triton
from triton.runtime import driver


def compile_mode(pool: Executor) -> AbstractContextManager[Any] | None:
    """Return a context in which kernels compile in the pool, and which waits for them at its end; None in Triton's
    interpreter.
    """
    return None if triton.knobs.runtime.interpret else triton.AsyncCompileMode(pool)


def build_launcher(kernel: Any) -> None:
    """Compile the C code that launches a compiled kernel.

    Triton 3.6 does so when a kernel is first launched, in 0.2 to 0.3 s for each signature, and keeps the library in its
    cache on disk. Newer versions have one launcher for all signatures.
    """
    active: Any = driver.active
    active.launcher_cls(kernel.src, kernel.metadata)
