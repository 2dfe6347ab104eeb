"""The feature table of the documentation names the backends that serve each feature."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from native_sparse_attention.core.modifiers import Modifiers
from native_sparse_attention.ops.compressed_attention.api import backend_of as compressed_backend
from native_sparse_attention.ops.window_attention.api import backend_of as window_backend

FEATURES = Path(__file__).parents[2] / 'docs' / 'features.md'


TABLE = torch.zeros(1, 1, 20, 20)
SEGMENTS = torch.zeros(1, 20, dtype=torch.int32)
ROWS = {
    '`segment_ids`': Modifiers(query_segments=SEGMENTS, key_segments=SEGMENTS),
    '`mask` of the keys': Modifiers(query_segments=SEGMENTS, key_segments=SEGMENTS),
    '`attn_mask` of pairs': Modifiers(attn_mask=TABLE.bool()),
    '`bias`': Modifiers(bias=TABLE),
    'gradient of `bias`': Modifiers(bias=TABLE.clone().requires_grad_()),
    '`softcap`': Modifiers(softcap=5.0),
    '`sinks`': Modifiers(sinks=torch.zeros(2)),
    '`dropout_p` with a seed': Modifiers(dropout_p=0.5, dropout_seed=torch.zeros(1, dtype=torch.int64)),
}


@pytest.mark.skipif(not torch._dynamo.is_dynamo_supported(), reason='torch.compile does not support this Python')
@pytest.mark.parametrize('feature', ROWS)
def test_table_of_features(feature: str, device: torch.device):
    row = next(line for line in FEATURES.read_text(encoding='utf-8').splitlines() if line.startswith(f'| {feature} |'))
    window, compressed = (cell.strip() for cell in row.split('|')[2:4])
    given: dict[str, Any] = ROWS[feature]._asdict()
    given |= {name: t.to(device) for name, t in given.items() if isinstance(t, torch.Tensor)}
    modifiers = Modifiers(**given)
    assert letters(window) == serving(window_backend, modifiers, device)
    if feature in ('`softcap`', '`sinks`'):
        assert letters(compressed) == serving(compressed_backend, modifiers, device)


def letters(cell: str) -> str:
    return ''.join(re.findall(r'\b[TFE]\b', cell))


def serving(backend_of: Callable[..., Any], modifiers: Modifiers, device: torch.device) -> str:
    q = torch.zeros(1, 20, 2, 16, device=device)
    found = ''
    for backend in ('triton', 'flex', 'eager'):
        try:
            backend_of(q, q, q, modifiers=modifiers, backend=backend)
        except ValueError:
            continue
        found += backend[0].upper()
    return found
