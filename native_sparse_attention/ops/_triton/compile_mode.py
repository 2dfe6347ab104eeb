"""The mode of Triton in which threads compile kernels."""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import AbstractContextManager
from typing import Any

import triton

from native_sparse_attention.core.private_triton import find_launcher_builder

build_launcher = find_launcher_builder()


def compile_mode(pool: Executor) -> AbstractContextManager[Any] | None:
    """Return a context in which kernels compile in the pool, and which waits for them at its end; None in Triton's
    interpreter.
    """
    return None if triton.knobs.runtime.interpret else triton.AsyncCompileMode(pool)
