"""Known-bad variants of what gates judge, by name; see ``base`` for what a fault is."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

from afd_testkit.faults import external, routing, split
from afd_testkit.faults.base import Fault, FaultTarget, NoTarget

__all__ = ["CONTROL", "CONTROLS", "FAULTS", "Fault", "FaultTarget", "NoTarget"]

# The control: an injection that changes nothing, under which every gate must stay green.
CONTROL = "control"
# All injections that must change nothing.
CONTROLS = (CONTROL, *(external.interruption(step) for step in external.STEPS))

FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(CONTROL, "nothing is wrong", (), lambda target: nullcontext()),
        *split.FAULTS,
        *routing.FAULTS,
        *external.FAULTS,
    )
}
