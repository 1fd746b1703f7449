"""Every fault turns every gate that names it red, on the reference engine."""

from __future__ import annotations

import pytest

from afd_testkit.faults import CONTROLS, FAULTS
from afd_testkit.gates import proof_classes
from afd_testkit.gates.catalog import GATES
from afd_testkit.gates.session import GateSession, Subject
from afd_testkit.models.texts import paragraphs
from afd_testkit.pool import EnginePool
from afd_testkit.results import Outcome

pytestmark = pytest.mark.cpu

SUBJECT = Subject("reference", "reference", "float64")


@pytest.fixture(scope="session")
def proof_session(afd_engines: EnginePool) -> GateSession:
    return GateSession(
        start=lambda config: afd_engines.get(config, "reference"),
        paragraphs=paragraphs(),
        rounds=4,
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    proof_classes.parametrize(metafunc, [SUBJECT])


class TestOneEngine(proof_classes.SameEngines):
    """An engine of this kind is cheap: all gates that it gets."""

    gates = tuple(gate for gate in GATES if GATES[gate].applies(SUBJECT))


def test_no_gate_is_left_out() -> None:
    assert proof_classes.miscounted(globals(), SUBJECT) == {}


@pytest.mark.parametrize("gate", list(GATES))
def test_every_gate_has_at_least_three_faults(gate: str) -> None:
    assert sum(gate in fault.gates for fault in FAULTS.values()) >= 3


def test_every_fault_is_caught_by_a_known_gate() -> None:
    for fault in FAULTS.values():
        assert (fault.gates == ()) is (fault.name in CONTROLS)
        assert set(fault.gates) <= set(GATES)


@pytest.mark.parametrize(
    ("gate", "case"),
    [
        ("split", "unequal"),
        ("split", "equal"),
        ("split", "many-one-token"),
        ("split", "boundary-on-request"),
        ("prefix-hit", "50 %"),
        ("prefix-hit", "0 %"),
        ("prefix-hit", "same-step, cut moved"),
        ("prefix-hit", "same-step, no safe cut"),
        ("chunked", "chunks of 100"),
        ("stability", "interleaved"),
        ("routing", "guards kept"),
        ("routing", "guards dropped"),
    ],
)
def test_gate_is_green_without_a_fault(proof_session: GateSession, gate: str, case: str) -> None:
    results = list(GATES[gate].run(proof_session, SUBJECT, case))
    assert results
    assert [(r.variant, r.message) for r in results if r.outcome is not Outcome.PASSED] == []
