"""What the FlexAttention backends share."""

from __future__ import annotations

from torch import Tensor


def unsupported(*tensors: Tensor) -> str | None:
    """Why FlexAttention cannot serve these inputs, or None where it can."""
    return 'not there yet'
