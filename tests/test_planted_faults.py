"""The planted faults fit the kernels as they are; `python tests/planted_faults.py` tells whether tests catch them."""

from tests.planted_faults import FAULTS, with_fault


def test_every_fault_can_be_planted() -> None:
    for fault in FAULTS:
        with_fault(fault)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20
