"""What Triton's layouts, as it prints them, say of who holds the numbers that are reduced."""

from __future__ import annotations

import re

# Per bit of the number of a lane, or of a warp, how far it moves in each dimension of a tensor.
Bits = list[list[int]]

LINEAR = re.compile(r'^(#\w+) = #ttg\.linear<\{(.*)\}>', re.MULTILINE)
SLICE = re.compile(r'#ttg\.slice<\{dim = (\d+), parent = (.*)\}>')
REDUCTION = re.compile(r'"tt\.reduce"\([^)]*\) <\{axis = (\d+) : i32[^}]*\}> \(\{.*?\}\) : \((.*?)\) ->', re.DOTALL)


def find_scattered_reductions(ttgir: str) -> list[str]:
    """Types of what is reduced along a dimension that moves with bits of a lane or of a warp between which there are
    others. Triton before 3.7 takes such bits for neighbours, and compares other numbers than it should
    (triton-lang/triton#9219): a result is wrong then, and not the same in all threads.
    """
    layouts = {
        name: {kind: _read_bits(text, kind) for kind in ('lane', 'warp')} for name, text in LINEAR.findall(ttgir)
    }
    scattered = []
    for axis, operands in REDUCTION.findall(ttgir):
        for layout in re.findall(r'tensor<[\dx]+x\w+, (.*?)>(?=, tensor|$)', operands):
            for kind in ('lane', 'warp'):
                moving = [place for place, bit in enumerate(_find_bits(layout, kind, layouts)) if bit[int(axis)]]
                if moving and moving != [*range(moving[0], moving[-1] + 1)]:
                    scattered.append(f'{operands} along {axis}: {kind}')
    return scattered


def _read_bits(text: str, kind: str) -> Bits:
    found = re.search(rf'\b{kind} = \[((?:\[[\d, ]+\](?:, )?)*)\]', text)
    assert found is not None, text
    return [[int(step) for step in bit.split(',')] for bit in re.findall(r'\[([\d, ]+)\]', found[1])]


def _find_bits(layout: str, kind: str, layouts: dict[str, dict[str, Bits]]) -> Bits:
    """None of layouts that are not linear, or slices of such: the bits of those stand together."""
    slice_ = SLICE.fullmatch(layout)
    if slice_:
        dim = int(slice_[1])
        return [bit[:dim] + bit[dim + 1 :] for bit in _find_bits(slice_[2], kind, layouts)]
    return layouts[layout][kind] if layout in layouts else []
