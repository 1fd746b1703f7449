"""Shows that a gate can fail: runs one telling case of it with a fault injected.

Used by this project's suites on the shipped engines, and by anyone who brings an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from afd_testkit.faults import FAULTS
from afd_testkit.gates.catalog import GATES
from afd_testkit.gates.session import GateSession, Subject
from afd_testkit.results import CheckResult, Outcome

# The case of each gate in which its faults show; exceptions by (gate, fault).
_CASE: Mapping[str, str] = {
    "split": "unequal",
    "prefix-hit": "50 %",
    "chunked": "chunks of 100",
    "stability": "interleaved",
    "routing": "guards dropped",
    "external-routing": "one step",
}
# The same by (gate, engine), where an engine has a more telling case.
_CASE_ON: Mapping[tuple[str, str], str] = {("routing", "vllm-cpu"): "engine"}
_CASE_OF: Mapping[tuple[str, str], str] = {
    ("split", "stage-1-from-stage-0-metadata"): "equal",
    ("prefix-hit", "hazard-ignored"): "same-step, no safe cut",
    # Experts' kernels are given these ids: outside of a real model nothing else breaks.
    ("routing", "ids-out-of-range"): "guards dropped",
}


def pairs(subject: Subject | None = None) -> list[tuple[str, str]]:
    """(gate, fault) for every gate that a fault must turn red, gate by gate.

    With a ``subject``, of the gates that it gets.
    """
    return sorted(
        (gate, fault.name)
        for fault in FAULTS.values()
        for gate in fault.gates
        if subject is None or GATES[gate].applies(subject)
    )


def first_red(
    session: GateSession, subject: Subject, gate: str, fault: str
) -> tuple[CheckResult | None, list[CheckResult]]:
    """The first failed check of the gate's telling case under ``fault``, and all up to it.

    ``None`` when every check stays green: the gate does not catch the fault.  Baselines are
    shared with ``session`` and stay without fault.
    """
    usual = _CASE_ON.get((gate, subject.engine), _CASE[gate])
    case = _CASE_OF.get((gate, fault), usual)
    seen: list[CheckResult] = []
    for result in GATES[gate].run(replace(session, fault=fault), subject, case):
        seen.append(result)
        if result.outcome is Outcome.FAILED:
            return result, seen
    return None, seen
