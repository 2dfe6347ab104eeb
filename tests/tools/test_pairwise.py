"""Combinations of parameters, and the selection of those that are run."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.pairwise import Case, choose_pairs


def pairs_of(cases: list[Case]) -> set[object]:
    return {pair for case in cases for pair in combinations(sorted(case.items()), 2)}


@pytest.mark.parametrize(('sizes', 'most'), [((3, 3, 3, 2), 12), ((4, 9, 2), 36), ((2, 2, 2, 2, 2), 8), ((5, 3), 15)])
def test_every_pair_occurs(sizes: tuple[int, ...], most: int) -> None:
    cases: list[Case] = [dict(zip('abcde', values, strict=False)) for values in product(*map(range, sizes))]
    chosen = choose_pairs(cases)
    assert pairs_of([cases[position] for position in chosen]) == pairs_of(cases)
    assert len(chosen) <= most


def test_every_value_of_a_single_parameter_occurs() -> None:
    cases: list[Case] = [{'a': 0}, {'a': 1}, {'a': 0}, {'a': 2}]
    assert choose_pairs(cases, first=[0]) == {0, 1, 3}
    assert choose_pairs([{}], first=[0]) == {0}


def test_pairs_that_do_not_occur_are_not_missed() -> None:
    cases: list[Case] = [{'a': 0, 'b': 0, 'c': 0}, {'a': 0, 'b': 1, 'c': 0}, {'a': 1, 'b': 1, 'c': 1}]
    assert choose_pairs(cases) == {0, 1, 2}


def test_cases_that_are_chosen_first_count() -> None:
    cases: list[Case] = [{'a': 0, 'b': 0}, {'a': 0, 'b': 0}, {'a': 1, 'b': 0}]
    assert choose_pairs(cases, first=[1]) == {1, 2}
