"""Features of window attention, drawn by the kernel tests in the interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

FEATURES = ('softcap', 'sinks', 'segments', 'mask', 'bias', 'attn_mask', 'dropout')
SEED = 2**40 + 12345
# Differentiable features; the others are passed on unchanged.
DIFFERENTIABLE = ('sinks', 'bias')


def make_features(
    names: Iterable[str],
    shape: tuple[int, int, int, int],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = 'cpu',
    table: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Return keyword arguments of `window_attention`. shape: B, HQ, T, S; table: the first two sizes of bias and
    attn_mask.
    """
    batch, heads, seqlen_q, seqlen_k = shape
    size = (*(table or (batch, heads)), seqlen_q, seqlen_k)
    generator = torch.Generator(device).manual_seed(0)

    def uniform(*sizes: int) -> Tensor:
        return torch.rand(*sizes, device=device, generator=generator)

    def make_ids(length: int) -> Tensor:
        return (uniform(batch, length) * 4).sort(1).values.int() - 1

    features: dict[str, Any] = {}
    for name in names:
        match name:
            case 'softcap':
                features['softcap'] = 1.5
            case 'sinks':
                features['sinks'] = 2 * uniform(heads, 2) - 1
            case 'segments':
                features['segment_ids'] = (make_ids(seqlen_q), make_ids(seqlen_k))
            case 'mask':
                features['mask'] = uniform(batch, seqlen_k) < 0.8
            case 'bias':
                bias = torch.randn(size, device=device, generator=generator).to(dtype)
                features['bias'] = bias.masked_fill(uniform(*size) < 0.1, -torch.inf)
            case 'attn_mask':
                features['attn_mask'] = uniform(*size) < 0.7
            case 'dropout':
                features |= {'dropout_p': 0.3, 'dropout_seed': SEED}
            case _:
                raise ValueError(f'name is {name!r}, but must be one of {", ".join(FEATURES)}')
    return features


def split_features(features: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split the features into differentiable ones and the others."""
    tensors = {name: value for name, value in features.items() if name in DIFFERENTIABLE}
    return tensors, {name: value for name, value in features.items() if name not in tensors}
