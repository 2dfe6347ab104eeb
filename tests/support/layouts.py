"""Parse Triton's printed layouts: which lanes and warps hold the elements that a reduction combines."""

from __future__ import annotations

import re
from typing import NamedTuple

# For each bit of a lane or warp number: its step in each dimension of a tensor.
Bits = list[list[int]]

LAYOUT = re.compile(r'^(#\w+) = #ttg\.(\w+)<\{(.*)\}>', re.MULTILINE)
SLICE = re.compile(r'#ttg\.slice<\{dim = (\d+), parent = (.*)\}>')
REDUCTION = re.compile(
    r'"tt\.(?:reduce|scan)"\([^)]*\) <\{axis = (\d+) : i32[^}]*\}> \(\{.*?\}\) : \((.*?)\) ->', re.DOTALL
)
# Layouts in which the bits that move along a dimension are adjacent.
REGULAR = {'blocked', 'nvidia_mma'}


class Reduction(NamedTuple):
    """One operand of a reduction or scan. axis: the reduced axis of this tensor type. is_linear: its layout is given
    bit by bit. is_scattered: the bits of a lane or warp that move along the axis have other bits between them.

    Triton before 3.7 takes such bits for adjacent ones and combines the wrong elements (triton-lang/triton#9219):
    results are wrong and differ between threads.
    """

    axis: int
    operand: str
    is_linear: bool
    is_scattered: bool


def find_reductions(ttgir: str) -> list[Reduction]:
    """Return every operand of every reduction and scan.

    Raises:
        ValueError: if a layout is unknown.
    """
    layouts = {name: (kind, text) for name, kind, text in LAYOUT.findall(ttgir)}
    found = REDUCTION.findall(ttgir)
    if len(found) != ttgir.count('"tt.reduce"(') + ttgir.count('"tt.scan"('):
        raise ValueError(f'of the reductions only {len(found)} are understood')
    return [_look_at(int(axis), operand, layouts) for axis, operands in found for operand in _split(operands)]


def _split(operands: str) -> list[str]:
    found = re.split(r', (?=tensor<)', operands)
    if not all(re.fullmatch(r'tensor<[\dx]+x\w+, #.*>', operand) for operand in found):
        raise ValueError(f'operands {operands} are not understood')
    return found


def _look_at(axis: int, operand: str, layouts: dict[str, tuple[str, str]]) -> Reduction:
    layout = operand.split(', ', 1)[1].removesuffix('>')
    dims: list[int] = []
    while slice_ := SLICE.fullmatch(layout):
        dims.append(int(slice_[1]))
        layout = slice_[2]
    kind, text = layouts[layout]
    if kind in REGULAR:
        return Reduction(axis, operand, False, False)
    if kind != 'linear':
        raise ValueError(f'layout {kind} of {operand} is not understood')
    of_parent = axis
    for dim in dims:
        of_parent += of_parent >= dim
    is_scattered = any(_lies_apart(_read_bits(text, of), of_parent) for of in ('lane', 'warp'))
    return Reduction(axis, operand, True, is_scattered)


def _read_bits(text: str, of: str) -> Bits:
    found = re.search(rf'\b{of} = \[((?:\[[\d, ]+\](?:, )?)*)\]', text)
    if found is None:
        raise ValueError(f'layout {text} is not understood')
    return [[int(step) for step in bit.split(',')] for bit in re.findall(r'\[([\d, ]+)\]', found[1])]


def _lies_apart(bits: Bits, axis: int) -> bool:
    moving = [place for place, bit in enumerate(bits) if bit[axis]]
    return bool(moving) and len(moving) <= moving[-1] - moving[0]
