"""A suite: cases that share a table, its result files and its method of measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks import report
from benchmarks.runner import Case, Method, Plot
from benchmarks.shapes import SHAPES


@dataclass(frozen=True)
class Suite:
    """What `python -m benchmarks.attention` needs of a suite.

    about: for `--list`. cases: name and description of each; names are patterns of `--cases`.
    shapes: default patterns of `--shapes`; None if each case has a shape of its own.
    backends: default of `--backends`; optional: backends that run if they are named.
    make_cases: from names of cases, shapes and backends; the main program adds suite and device.
    case_seconds: default limit of one case.
    """

    title: str
    about: str
    cases: Mapping[str, str]
    backends: Sequence[str]
    make_cases: Callable[[list[str], list[str], list[str]], list[Case]]
    make_tables: Callable[[list[Case]], list[str]]
    method: Method
    shapes: str | None = None
    optional: Sequence[str] = ()
    case_seconds: float = 90
    plots: Sequence[Plot] = ()


def legend(names: Sequence[str]) -> str:
    return report.table(('shape', ''), [[name, SHAPES[name].described()] for name in names])


def cross_one(gains: Sequence[tuple[int, float]], most: float) -> float | None:
    """Return the number of tokens from which on the gain is at least 1. gains: (tokens, gain), ascending.

    Between two measured lengths the gain is taken as a power of the length. If every gain is at least 1, the shortest
    length, provided that it is at most `most`; None if the gain of the longest is below 1.
    """
    if not gains or gains[-1][1] < 1:
        return None
    for (short, low), (long, high) in reversed([*pairwise(gains)]):
        if low < 1:
            return short * (long / short) ** (-math.log(low) / (math.log(high) - math.log(low)))
    return gains[0][0] if gains[0][0] <= most else None


def verdict(compared: Mapping[str, Mapping[str, float | None]]) -> str:
    """Count for each text how many ratios of a time to its limit are at most 1, and name the others."""
    lines = []
    for text, ratios in compared.items():
        known = {name: number for name, number in ratios.items() if number}
        over = [f'{name} by {100 * (number - 1):.1f} %' for name, number in known.items() if number > 1]
        if known:
            lines.append(f'{len(known) - len(over)} of {len(known)} {text}' + f'; not {", ".join(over)}' * bool(over))
    return ' '.join(f'{line}.' for line in lines)
