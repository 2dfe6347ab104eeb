"""Every planted fault applies to the present kernels (tests/support/planted_faults.py runs them)."""

from __future__ import annotations

import builtins
import dis
from types import CodeType

import pytest

from tests.support.planted_faults import FAULTS
from tests.support.planting import Fault, plant, with_fault

TEXT = """
def first(x):
    return scale(x + 1) + x + 1

class Second:
    def method(self, x):
        return scale(  # a comment
            x + 1,
        )
"""


def undefined_names(code: CodeType, defined: set[str]) -> set[str]:
    """Return the global names that functions read and the module does not define."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname == 'LOAD_GLOBAL'} - defined
    nested = [undefined_names(const, defined) for const in code.co_consts if isinstance(const, CodeType)]
    return names.union(*nested)


@pytest.mark.parametrize('fault', FAULTS, ids=[fault.name for fault in FAULTS])
def test_fault_can_be_planted(fault: Fault) -> None:
    code = compile(with_fault(fault), fault.file, 'exec')
    assert not undefined_names(code, {*code.co_names, *dir(builtins)})


def test_names_differ() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20


def test_places_are_found_by_tokens_of_a_function() -> None:
    changed = plant(TEXT, Fault('', '', 'Second.method', 'scale( x+1', 'scale(x', ()))
    assert changed == TEXT.replace('scale(  # a comment\n            x + 1', 'scale(x')


@pytest.mark.parametrize(('function', 'old'), [('third', 'x'), ('first', 'x + 1'), ('Second.method', 'x + 2')])
def test_places_that_are_not_found_once_are_refused(function: str, old: str) -> None:
    with pytest.raises(ValueError, match='a fault'):
        plant(TEXT, Fault('a fault', '', function, old, '', ()))
