"""Lower bounds and pins: CI runs the versions of pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REQUIREMENT = re.compile(r"'([A-Za-z0-9_-]+)(?:\[\w+\])?(?:>=([0-9.]+))?(?:; [^']*)?'")


def lower_bounds() -> dict[str, str]:
    """Return the lower bound of every requirement of pyproject.toml, with the build backend (Python 3.10 has no
    tomllib).
    """
    text = (ROOT / 'pyproject.toml').read_text(encoding='utf-8')
    build, project = re.search(r'^requires = .*$', text, re.MULTILINE), text.split('\ndependencies = [')[1]
    assert build is not None
    return dict(REQUIREMENT.findall(build[0] + project.split('\n[tool.')[0]))


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text(encoding='utf-8').splitlines()
    return dict(re.split(r'==|;| ', line)[:2] for line in lines if line and not line.startswith('#'))


def as_numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r'\d+', version)))


def test_every_requirement_has_a_lower_bound() -> None:
    bounds = lower_bounds()
    assert {'torch', 'triton', 'einops', 'pytest', 'matplotlib', 'mkdocstrings', 'hatchling'} <= bounds.keys()
    assert all(bounds.values()), bounds


@pytest.mark.parametrize('name', lower_bounds())
def test_ci_runs_the_lower_bound(name: str) -> None:
    """The bound is in the run with the oldest versions, or it is the pin."""
    bound, oldest, pin = lower_bounds()[name], pins('constraints-oldest.txt').get(name), pins('constraints.txt')[name]
    assert as_numbers(bound) <= as_numbers(pin)
    numbers = as_numbers(pin if oldest is None else oldest)
    assert numbers[: len(as_numbers(bound))] == as_numbers(bound)
    assert oldest is None or not any(numbers[len(as_numbers(bound)) :]), 'a later release than the lower bound'


def test_the_oldest_versions_are_pinned_in_both() -> None:
    """.ci/run takes constraints.txt for packages that constraints-oldest.txt omits."""
    assert pins('constraints-oldest.txt').keys() <= pins('constraints.txt').keys()
