"""Every planted fault applies to the kernels as they are (tests/support/planted_faults.py runs them)."""

from tests.support.planted_faults import FAULTS, with_fault


def test_every_fault_can_be_planted() -> None:
    for fault in FAULTS:
        with_fault(fault)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20
