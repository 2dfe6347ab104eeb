"""Selection of the combinations of a test's parameters that are run: every pair of values occurs in one of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations

Case = Mapping[str, Hashable]


def choose_pairs(cases: Sequence[Case], first: Iterable[int] = ()) -> set[int]:
    """Return the positions of cases that together hold every pair of values that occurs in `cases`, or every value
    where there is one parameter.

    Args:
        cases: the values of each case by parameter. Not empty.
        first: positions of cases that are chosen whatever they hold.
    """
    pairs = [set(combinations(sorted(case.items()), min(2, len(case)))) for case in cases]
    chosen = set(first)
    missing = set().union(*pairs).difference(*(pairs[position] for position in chosen))
    while missing:
        best = max(range(len(cases)), key=lambda position: len(missing.intersection(pairs[position])))
        chosen.add(best)
        missing -= pairs[best]
    return chosen
