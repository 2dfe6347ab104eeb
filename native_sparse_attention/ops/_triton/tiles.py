"""Tile primitives: load, store, sanitise and multiply tiles of rows; sort tiles of keys."""

# To pyright a jit function that another calls never returns, nor does tl.static_range.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_product(a, b, total):
    """Return total + a @ b.

    In float32 the product is accumulated separately first, since a sum over thousands of rows is more exact in two
    steps (eager takes several steps too). The multiplication by 1 keeps the compiler from fusing both steps.
    """
    if a.dtype == tl.float32:
        total = tl.fma(tl.dot(a, b, input_precision='ieee'), tl.full(total.shape, 1.0, tl.float32), total)
    else:
        total = tl.dot(a, b, total, input_precision='ieee')
    return total


@triton.jit
def dot_exact(a, b, out):
    """Return out + a @ b for float32 a `[M, K]`. For a half type b, a is split into a high and a low part of that type.

    Eager rounds only the result; with a rounded to a single part the result would fail the error rules.
    """
    if b.dtype == tl.float32:
        out = add_product(a, b, out)
    elif b.dtype == tl.bfloat16:
        # Truncate to the upper bits: rounding would need a conversion back.
        high = (a.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        low = (a - high).to(tl.bfloat16)
        out = tl.dot(high.to(tl.bfloat16), b, out, input_precision='ieee')
        out = tl.dot(low, b, out, input_precision='ieee')
    else:
        # float16 has few exponents: divide each row by the power of two at or below its largest magnitude.
        largest = tl.max(tl.abs(a), 1)
        unit = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        unit = tl.where(unit == 0, 1.0, unit)[:, None]
        scaled = a / unit
        high = scaled.to(tl.float16)
        low = (scaled - high.to(tl.float32)).to(tl.float16)
        product = tl.dot(high, b, input_precision='ieee')
        out += tl.dot(low, b, product, input_precision='ieee') * unit
    return out


@triton.jit
def load_rows(ptr, rows, stride, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr, INT64_OFFSETS=True):
    """Load rows of SIZE elements, padded to BLOCK with zeros; masked rows are 0. INT64_OFFSETS: element offsets may
    exceed int32.
    """
    offsets = tl.arange(0, BLOCK)
    rows = rows.to(tl.int64) if INT64_OFFSETS else rows
    pointers = ptr + rows[:, None] * stride + offsets[None, :]
    if SIZE == BLOCK:
        return tl.load(pointers, mask=mask[:, None], other=0.0)
    return tl.load(pointers, mask=mask[:, None] & (offsets < SIZE)[None, :], other=0.0)


@triton.jit
def load_tile(
    tiles,
    ptr,
    row,
    first,
    head,
    stride,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    exists=True,
):
    """Load ROWS rows of SIZE elements of a head of `[B, S, H, SIZE]`, from row `first` on, padded to BLOCK with zeros.

    All rows exist, or `exists` is false and zeros are loaded. tiles: the tensor's descriptor (`describe_tiles`);
    without one (None), ptr points to the batch row and head.
    """
    if tiles is not None:
        first = tl.where(exists, first, 2**30)  # out of bounds, so that the descriptor returns zeros
        tile = tl.reshape(tiles.load([row.to(tl.int32), first, head.to(tl.int32), 0]), [ROWS, BLOCK])
    else:
        tile = load_rows(
            ptr, first + tl.arange(0, ROWS), stride, tl.full([ROWS], 1, tl.int1) & exists, SIZE, BLOCK, INT64_OFFSETS
        )
    return tile


@triton.jit
def store_rows(ptr, rows, stride, values, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr, INT64_OFFSETS=True):
    """INT64_OFFSETS: as in `load_rows`."""
    offsets = tl.arange(0, BLOCK)
    rows = rows.to(tl.int64) if INT64_OFFSETS else rows
    pointers = ptr + rows[:, None] * stride + offsets[None, :]
    tl.store(pointers, values.to(ptr.dtype.element_ty), mask=mask[:, None] & (offsets < SIZE)[None, :])


@triton.jit
def split_finite(x):
    """Return x with non-finite values replaced by 0, and per row 0, or NaN where a value was replaced.

    Rows that a query does not read must not meet its zero weights with such values, since 0 * NaN is NaN.
    """
    difference = x - x  # [BLOCK, BLOCK_D], NaN where x is not finite
    return tl.where(difference == 0, x, 0.0).to(x.dtype), tl.sum(difference.to(tl.float32), 1)


@triton.jit
def is_finite_tile(x):
    """Return whether the float32 sum of x is finite, at the cost of one addition per element. A sum of products is not
    finite if a factor was not, even if the other factor is 0.
    """
    # As a vector: Triton 3.7 fails to compile one dimension after the other for Blackwell.
    return tl.abs(tl.sum(tl.ravel(x), 0)) < float('inf')


@triton.jit
def find_largest(x):
    """Return the maximum of x, the same in all threads, so that a loop may depend on it.

    x is reduced as a vector, which Triton may lay out again: after a sum over heads several threads hold the same
    element of a row, and before 3.7 Triton then compares the wrong ones (triton-lang/triton#9219).
    """
    return tl.max(tl.ravel(x), 0)


@triton.jit
def sort_tile(keys, LOG_SIZE: tl.constexpr, ROTATION: tl.constexpr):
    """Sort `[2 ** LOG_SIZE]` integers in ascending order. All are at least 0 and below half the range of their type.

    This is Batcher's bitonic sorter, as in tl.sort. A key's partner is found by a sum, which the interpreter evaluates
    at once; the exclusive or of tl.sort takes it seconds per thousand keys. Most steps compare neighbours, which should
    be keys of one thread: the ROTATION upper bits of the key indices are exchanged with the lower ones, where a thread
    holds 2 ** ROTATION runs of keys.
    """
    cube = tl.reshape(keys, [2] * LOG_SIZE)
    for stage in tl.static_range(1, LOG_SIZE + 1):
        # Every other run of 2 ** stage keys is sorted in descending order, by sorting the complements.
        if stage < LOG_SIZE:
            cube = cube ^ -_bit(LOG_SIZE, stage, ROTATION)
        for step in tl.static_range(stage):
            partners = tl.sum(cube, (LOG_SIZE - stage + step + ROTATION) % LOG_SIZE, keep_dims=True) - cube
            is_second = _bit(LOG_SIZE, stage - 1 - step, ROTATION) != 0
            cube = tl.where(is_second, tl.maximum(cube, partners), tl.minimum(cube, partners))
        if stage < LOG_SIZE:
            cube = cube ^ -_bit(LOG_SIZE, stage, ROTATION)
    rotated = tl.reshape(cube, [2**ROTATION, 2 ** (LOG_SIZE - ROTATION)])
    return tl.reshape(tl.trans(rotated), [2**LOG_SIZE])


@triton.jit
def _bit(LOG_SIZE: tl.constexpr, BIT: tl.constexpr, ROTATION: tl.constexpr):
    """Return one bit of the sorter's key indices, broadcastable to `[2] * LOG_SIZE`."""
    dim: tl.constexpr = (2 * LOG_SIZE - 1 - BIT + ROTATION) % LOG_SIZE
    return tl.reshape(tl.arange(0, 2), [1] * dim + [2] + [1] * (LOG_SIZE - 1 - dim))
