"""Model of time and memory of a training step of a whole model, fitted on one and two GPUs.

A token costs the same on every rank, and tensor ranks divide it. Each kind of parallelism adds the bytes that a rank
receives, at an effective bandwidth of its own, fitted on the two GPUs that have this kind alone. Blocks are recomputed
in the backward pass, so they exchange what their forward exchanges twice. Left out: latencies, stragglers, overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.distributed_cases import rows_per_rank
from benchmarks.shapes import Shape

Row = Mapping[str, Any]
SIMPLE = ({'fsdp': 2}, {'cp': 2}, {'tp': 2})  # in this order: weights are sharded over context ranks too
STATE_BYTES = 16  # of a parameter: weight, gradient and two moments of AdamW in float32
REDUCTIONS = 6  # of activations over tensor ranks in a block: two each in forward, recomputed forward and backward


def exchanged(shape: Shape, tokens: int, ranks: int, forwards: int = 1) -> float:
    """Return the bytes that a context rank receives: keys and values, compressed ones too, and their gradients."""
    keys = tokens * (1 + 1 / shape.compress_stride) * shape.kv_heads * (shape.head_dim + shape.value_dim)
    return keys * (forwards * shape.dtype.itemsize + 4) * (ranks - 1) / ranks  # gradients are summed in float32


def gathered_memory(shape: Shape, tokens: int) -> float:
    """Return bytes of gathered keys and values of all KV heads, and of the gradients of one while they are summed."""
    features, size = shape.head_dim + shape.value_dim, shape.dtype.itemsize
    return tokens * features * (shape.kv_heads * size * (1 + 1 / shape.compress_stride) + 2 * size + 4)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a row: ranks, tokens of a rank, rows of a rank, and attention with the heads of a rank."""

    fsdp: int
    cp: int
    tp: int
    tokens: float
    rows: int
    shape: Shape


def sizes_of(row: Row) -> Sizes:
    fsdp, cp, tp = (row['layout'].get(name, 1) for name in ('fsdp', 'cp', 'tp'))
    model = row['model']
    heads = {'heads': model['heads'] // tp, 'kv_heads': model['kv_heads'] // tp}
    heads |= {'head_dim': model['dim_head'], 'value_dim': model['dim_head']}
    stride = model['sparse_attn_kwargs']['compress_block_sliding_stride']
    shape = Shape('model', compress_stride=stride, dtype=getattr(torch, row['dtype']), **heads)
    return Sizes(fsdp, cp, tp, row['tokens'] / fsdp / cp, rows_per_rank(row['layout']), shape)


def received(row: Row) -> dict[str, float]:
    """Return the bytes that a rank receives in a step, by the kind of parallelism."""
    of, model = sizes_of(row), row['model']
    size, shards = of.shape.dtype.itemsize, of.fsdp * of.cp
    reduced = of.tokens * model['dim'] * size * 2 * (of.tp - 1) / of.tp
    return {
        'fsdp': row['parameters'] / of.tp * (2 * size + 4) * (shards - 1) / shards,
        'cp': model['depth'] * of.rows * exchanged(of.shape, row['length'], of.cp, forwards=2),
        'tp': model['depth'] * REDUCTIONS * reduced,
    }


@dataclass(frozen=True)
class Steps:
    """Coefficients of the model.

    work: ms per token on one GPU. per_byte: ms per byte that a rank receives, by the kind of parallelism. local: bytes
    of activations per token of a rank, divided by tensor ranks, beside the inputs of the blocks; None: not known.
    """

    work: float
    per_byte: Mapping[str, float]
    local: float | None = None

    def ms(self, row: Row) -> float | None:
        """Return the time of a step, or None if a kind of parallelism was not fitted."""
        sent = {kind: size for kind, size in received(row).items() if size}
        if not sent.keys() <= self.per_byte.keys():
            return None
        return self.work * row['tokens'] / row['gpus'] + sum(self.per_byte[kind] * size for kind, size in sent.items())

    def peak(self, row: Row) -> float | None:
        """Return bytes per GPU."""
        return None if self.local is None else fixed_memory(row) + self.local * sizes_of(row).tokens / sizes_of(row).tp


def fixed_memory(row: Row) -> float:
    """Return bytes of parameters with their state, inputs of the blocks, and gathered keys and values of one block."""
    of, model = sizes_of(row), row['model']
    inputs = model['depth'] * model['dim'] * of.shape.dtype.itemsize * of.tokens
    gathered = of.rows * gathered_memory(of.shape, row['length']) if of.cp > 1 else 0
    return STATE_BYTES * row['parameters'] / row['gpus'] + inputs + gathered


def fit_steps(rows: Sequence[Row]) -> Steps | None:
    """Fit rows of one model on one and two GPUs; None without the row of one GPU."""
    one = next((row for row in rows if row['gpus'] == 1), None)
    if one is None:
        return None
    fit = Steps(one['ms'] / one['tokens'], {})
    for layout in SIMPLE:
        row = next((row for row in rows if row['layout'] == layout), None)
        if row is None:
            continue
        (kind,), sent = layout, received(row)
        rest = row['ms'] - fit.work * row['tokens'] / row['gpus']
        rest -= sum(fit.per_byte.get(other, 0.0) * size for other, size in sent.items() if other != kind)
        local = fit.local
        if kind == 'fsdp' and row.get('peak_bytes'):
            local = (row['peak_bytes'] - fixed_memory(row)) / sizes_of(row).tokens
        fit = Steps(fit.work, {**fit.per_byte, kind: max(0.0, rest / sent[kind])}, local)
    return fit
