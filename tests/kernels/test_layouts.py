"""Scattered reductions are found in the layouts that Triton prints, and unknown layouts raise an error."""

from __future__ import annotations

import pytest

from tests.support.layouts import find_reductions

# Rows of #linear move with lane bits 0, 2 and 3, its columns with lane bit 4 and a warp. #cube: dimension 0 with lane
# bits 0 and 4, 1 with 1 and 2, 2 with 3; dimension 1 with warp bits 0 and 2, too.
LAYOUTS = """
#blocked = #ttg.blocked<{sizePerThread = [1, 1], threadsPerWarp = [2, 16], warpsPerCTA = [4, 1], order = [1, 0]}>
#cube = #ttg.linear<{register = [], lane = [[1, 0, 0], [0, 1, 0], [0, 2, 0], [0, 0, 1], [2, 0, 0]], \
warp = [[0, 4, 0], [0, 0, 2], [0, 8, 0]], block = []}>
#generic = #ttg.generic_linear<{lane = [[1, 0]]}>
#linear = #ttg.linear<{register = [], lane = [[1, 0], [0, 0], [4, 0], [8, 0], [0, 4]], warp = [[0, 8]], block = []}>
"""
SLICE_OF_ROWS = 'tensor<16xi32, #ttg.slice<{dim = 1, parent = #linear}>>'
SLICE_OF_COLUMNS = 'tensor<16xf32, #ttg.slice<{dim = 0, parent = #linear}>>'


def reduction(axis: int, *operands: str, op: str = 'reduce', attribute: str = '') -> str:
    return f"""{LAYOUTS}
    %0 = "tt.{op}"(%1) <{{axis = {axis} : i32}}> ({{
    ^bb0(%2: i32, %3: i32):
      tt.{op}.return %2 : i32
    }}) {attribute}: ({', '.join(operands)}) -> i32 loc(#loc)
    """


@pytest.mark.quick
@pytest.mark.parametrize(
    ('axis', 'operand', 'is_scattered'),
    [
        (0, 'tensor<16x16xi32, #linear>', True),
        (1, 'tensor<16x16xi32, #linear>', False),
        (0, SLICE_OF_ROWS, True),
        (0, SLICE_OF_COLUMNS, False),
        (0, 'tensor<4x16x4xf32, #cube>', True),
        (1, 'tensor<4x16x4xf32, #cube>', True),  # by the warps
        (2, 'tensor<4x16x4xf32, #cube>', False),
        (0, 'tensor<4xf32, #ttg.slice<{dim = 0, parent = #ttg.slice<{dim = 1, parent = #cube}>}>>', False),
        (0, 'tensor<4xf32, #ttg.slice<{dim = 1, parent = #ttg.slice<{dim = 1, parent = #cube}>}>>', True),
        (1, 'tensor<16x16xf32, #blocked>', False),
        (0, 'tensor<16xf32, #ttg.slice<{dim = 1, parent = #blocked}>>', False),
    ],
)
@pytest.mark.parametrize('op', ['reduce', 'scan'])
def test_lanes_that_lie_apart(axis: int, operand: str, is_scattered: bool, op: str):
    (found,) = find_reductions(reduction(axis, operand, op=op))
    assert (found.axis, found.operand, found.is_scattered) == (axis, operand, is_scattered)
    assert found.is_linear == ('#blocked' not in operand)


def test_every_operand_counts():
    text = reduction(0, SLICE_OF_COLUMNS, SLICE_OF_ROWS) + reduction(1, 'tensor<16x16xf32, #blocked>')
    assert [r.is_scattered for r in find_reductions(text)] == [False, True, False]


@pytest.mark.parametrize(
    'text',
    [
        reduction(0, 'tensor<16x16xi32, #generic>'),
        reduction(0, 'tensor<16x!tt.ptr<i32>, #linear>'),
        reduction(0, SLICE_OF_ROWS, attribute='{some = 1 : i32} '),
        '"tt.reduce"(%1) <{reduction_ordering = "x", axis = 0 : i32}> ({}) : (tensor<16xi32, #linear>) -> i32',
    ],
)
def test_unknown_layouts(text: str):
    with pytest.raises(ValueError, match='understood'):
        find_reductions(text)
