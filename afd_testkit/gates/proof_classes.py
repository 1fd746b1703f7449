"""Test classes that show on an engine that its gates can fail; one class a set of engines.

A suite imports the classes named ``Test…``, gives the fixture ``proof_session`` and calls
:func:`parametrize` from its ``pytest_generate_tests``.  Two engines are alive at a time, so tests
that need others must not come in between: random order moves a class as a whole, and the scope of
``subject`` keeps the classes of a subject together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest

from afd_testkit.faults import CONTROL
from afd_testkit.gates.catalog import GATES
from afd_testkit.gates.proof import first_red, pairs
from afd_testkit.gates.session import GateSession, Subject
from afd_testkit.results import CheckResult, Outcome


class SameEngines:
    """Proofs of ``gates``, which run on the same engines: the stock one and one that splits."""

    gates: ClassVar[tuple[str, ...]]

    def test_gate_turns_red(
        self, proof_session: GateSession, subject: Subject, gate: str, fault: str
    ) -> None:
        """Some check of the gate's telling case fails under each of its faults."""
        red, seen = first_red(proof_session, subject, gate, fault)
        if red is None:
            pytest.fail(f"{gate} does not catch {fault}: {_told(seen)}", pytrace=False)

    def test_gate_stays_green_under_an_injection_of_nothing(
        self, proof_session: GateSession, subject: Subject, gate: str
    ) -> None:
        """What turns the gate red is the fault, not that one is injected."""
        _, seen = first_red(proof_session, subject, gate, CONTROL)
        if {result.outcome for result in seen} != {Outcome.PASSED}:
            pytest.fail(f"{gate} does not pass without a fault: {_told(seen)}", pytrace=False)


class TestOneStep(SameEngines):
    """Prompts that fit one step."""

    gates = ("split", "prefix-hit")


class TestChunks(SameEngines):
    """Prompts in chunks."""

    gates = ("chunked",)


class TestSmallSteps(SameEngines):
    """Batches over several steps."""

    gates = ("stability",)


class TestRouting(SameEngines):
    """A compiled engine or a gated layer; for what is in compiled code, started with the fault."""

    gates = ("routing",)


class TestExternalRouting(SameEngines):
    """The stock engine, and ones whose experts are behind a connector."""

    gates = ("external-routing",)


def parametrize(metafunc: pytest.Metafunc, subjects: Sequence[Subject]) -> None:
    """The gates of a test's class, on every subject, with their faults where a test takes one.

    Tests outside of such classes are left alone.
    """
    if metafunc.cls is None or not issubclass(metafunc.cls, SameEngines):
        return
    gates = metafunc.cls.gates
    if "fault" in metafunc.fixturenames:
        metafunc.parametrize(("gate", "fault"), [pair for pair in pairs() if pair[0] in gates])
    else:
        metafunc.parametrize("gate", gates)
    metafunc.parametrize("subject", subjects, ids=lambda one: one.model, scope="module")


def miscounted(module: Mapping[str, object], subject: Subject) -> dict[str, int]:
    """How many classes prove a gate, for each gate where that is not as it should be.

    ``module``: ``globals()`` of the suite.  Empty where one class proves each gate that
    ``subject`` gets, and none proves another.
    """
    classes = (one for one in module.values() if isinstance(one, type) and one is not SameEngines)
    times = Counter(gate for one in classes if issubclass(one, SameEngines) for gate in one.gates)
    wanted = {name: int(gate.applies(subject)) for name, gate in GATES.items()}
    return {
        gate: times[gate]
        for gate in sorted({*times, *wanted})
        if times[gate] != wanted.get(gate, 0)
    }


def _told(seen: Sequence[CheckResult]) -> list[tuple[str, str, str]]:
    return [(one.variant, one.outcome.value, one.message) for one in seen]
