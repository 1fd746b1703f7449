"""Shows that a gate can fail: runs one telling case of it with a fault injected.

Used by this project's suites on the shipped engines, and by anyone who brings an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from afd_testkit.faults import FAULTS
from afd_testkit.gates.catalog import GATES
from afd_testkit.gates.session import GateSession, Subject
from afd_testkit.results import CheckResult

# The case of each gate in which its faults show; exceptions by (gate, fault).
_CASE: Mapping[str, str] = {
    "split": "unequal",
    "prefix-hit": "50 %",
    "chunked": "chunks of 100",
    "stability": "interleaved",
}
_CASE_OF: Mapping[tuple[str, str], str] = {
    ("split", "stage-1-from-stage-0-metadata"): "equal",
    ("prefix-hit", "hazard-ignored"): "same-step, no safe cut",
}


def pairs() -> list[tuple[str, str]]:
    """(gate, fault) for every gate that a fault must turn red, gate by gate."""
    return sorted((gate, fault.name) for fault in FAULTS.values() for gate in fault.gates)


def run_with_fault(
    session: GateSession, subject: Subject, gate: str, fault: str
) -> list[CheckResult]:
    """Results of the gate's telling case with ``fault`` in every run under test.

    Baselines are shared with ``session`` and stay without fault.
    """
    faulty = replace(session, fault=fault)
    case = _CASE_OF.get((gate, fault), _CASE[gate])
    return list(GATES[gate].run(faulty, subject, case))
