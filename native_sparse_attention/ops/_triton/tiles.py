"""Tiles of rows: loaded, stored, cleared of what is not finite, multiplied; tiles of keys: sorted."""

# To pyright a jit function that another calls never returns, nor does tl.static_range.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_product(a, b, total):
    """total + a @ b.

    In float32 the product is added up by itself first: a sum over thousands of rows is more exact in two steps, and
    eager's is taken in several too. The multiplication by 1 keeps the compiler from making one step of them.
    """
    if a.dtype == tl.float32:
        total = tl.fma(tl.dot(a, b, input_precision='ieee'), tl.full(total.shape, 1.0, tl.float32), total)
    else:
        total = tl.dot(a, b, total, input_precision='ieee')
    return total


@triton.jit
def load_rows(ptr, rows, stride, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr, INT64_OFFSETS=True):
    """Rows of SIZE elements, padded to BLOCK with zeros; 0 in rows that the mask leaves out. INT64_OFFSETS: int32 may
    not count the elements up to the last of them.
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
    exists,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """ROWS rows of SIZE elements of a head of `[B, S, H, SIZE]`, from `first` on, padded to BLOCK with zeros; all of
    them exist, or else zeros are fetched. tiles: its tensor descriptor (`describe_tiles`); without one, ptr leads to
    row and head.
    """
    if tiles is not None:
        first = tl.where(exists, first, 2**30)  # beyond all tensors, where zeros are
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
    """x with 0 for what is not finite, and per row 0, or NaN where something was not. 0 * NaN is NaN: rows that a query
    does not read must not meet its weights of 0 with such values.
    """
    difference = x - x  # [BLOCK, BLOCK_D], NaN where x is not finite
    return tl.where(difference == 0, x, 0.0).to(x.dtype), tl.sum(difference.to(tl.float32), 1)


@triton.jit
def is_finite_tile(x):
    """Whether the sum of x, in float32, is finite, which takes one addition an element. A sum of products is not
    where a factor was not, be the other factor 0.
    """
    # As a vector: Triton 3.7 fails to compile one dimension after the other for Blackwell.
    return tl.abs(tl.sum(tl.ravel(x), 0)) < float('inf')


@triton.jit
def find_largest(x):
    """The largest number of x, the same in all threads, so that a loop may depend on it.

    As a vector, whose elements Triton may lay out anew: where heads were added up, several threads hold the same number
    of a row, and before 3.7 it then compares the wrong ones (triton-lang/triton#9219).
    """
    return tl.max(tl.ravel(x), 0)


@triton.jit
def sort_tile(keys, LOG_SIZE: tl.constexpr, ROTATION: tl.constexpr):
    """`[2 ** LOG_SIZE]` integers in ascending order, all at least 0 and below half of what their type holds.

    Batcher's bitonic sorter, as tl.sort has it. A key's partner is found by a sum though, which the interpreter takes
    at once; tl.sort's exclusive or takes it seconds for a thousand keys. The steps go most often between neighbours,
    which should be keys of one thread. So the ROTATION upper bits of the places that keys come from are taken for the
    lower ones, where a thread has 2 ** ROTATION runs of keys.
    """
    cube = tl.reshape(keys, [2] * LOG_SIZE)
    for stage in tl.static_range(1, LOG_SIZE + 1):
        # Every other run of 2 ** stage keys is to descend: its complements are sorted.
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
    """A bit of the places of the sorter, to be broadcast to `[2] * LOG_SIZE`."""
    dim: tl.constexpr = (2 * LOG_SIZE - 1 - BIT + ROTATION) % LOG_SIZE
    return tl.reshape(tl.arange(0, 2), [1] * dim + [2] + [1] * (LOG_SIZE - 1 - dim))
