"""Every planted fault applies to the kernels as they are (tests/support/planted_faults.py runs them)."""

from __future__ import annotations

import builtins
import dis
from types import CodeType

from tests.support.planted_faults import FAULTS, with_fault


def undefined_names(code: CodeType, defined: set[str]) -> set[str]:
    """Return the global names that functions read and the module does not define."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname == 'LOAD_GLOBAL'} - defined
    nested = [undefined_names(const, defined) for const in code.co_consts if isinstance(const, CodeType)]
    return names.union(*nested)


def test_every_fault_can_be_planted() -> None:
    """A fault that does not compile, or reads a name that does not exist, would be caught by any test."""
    for fault in FAULTS:
        code = compile(with_fault(fault), fault.file, 'exec')
        assert not undefined_names(code, {*code.co_names, *dir(builtins)}), fault.name
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20
