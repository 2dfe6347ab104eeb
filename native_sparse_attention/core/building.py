"""Whether kernels are only compiled in this context, not launched (`build_kernels`)."""

from __future__ import annotations

from contextvars import ContextVar

is_building: ContextVar[bool] = ContextVar('is_building', default=False)
