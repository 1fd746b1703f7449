"""Every fault turns every gate that names it red, on the real vLLM-Ascend."""

from __future__ import annotations

from typing import ClassVar

import pytest

from afd_testkit.faults import CONTROL
from afd_testkit.gates.catalog import GATES
from afd_testkit.gates.proof import first_red, pairs
from afd_testkit.gates.session import GateSession, Subject
from afd_testkit.models.texts import paragraphs
from afd_testkit.pool import EnginePool
from afd_testkit.results import Outcome

pytestmark = pytest.mark.ascend

SUBJECTS = [Subject("ascend", model, "float32") for model in ("deepseek-v3", "qwen3-moe")]


@pytest.fixture(scope="session")
def ascend_session(afd_engines: EnginePool) -> GateSession:
    return GateSession(
        start=lambda config: afd_engines.get(config, "ascend"), paragraphs=paragraphs()
    )


class SameEngines:
    """Proofs of ``gates``, which run on the same engines: the stock one and one that splits.

    Two engines are alive at a time, so tests that need others must not come in between.  Random
    order moves a class as a whole, and the scope of ``subject`` keeps a model's classes together.
    """

    gates: ClassVar[tuple[str, ...]]

    def test_gate_turns_red(
        self, ascend_session: GateSession, subject: Subject, gate: str, fault: str
    ) -> None:
        red, seen = first_red(ascend_session, subject, gate, fault)
        assert red is not None, [(r.variant, r.outcome, r.message) for r in seen]

    def test_gate_stays_green_under_an_injection_of_nothing(
        self, ascend_session: GateSession, subject: Subject, gate: str
    ) -> None:
        red, seen = first_red(ascend_session, subject, gate, CONTROL)
        assert red is None, (red.variant, red.message)
        assert all(result.outcome is Outcome.PASSED for result in seen)


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
    """A gated layer on the NPU, in a process of its own."""

    gates = ("routing",)


class TestExternalRouting(SameEngines):
    """The stock engine, and ones whose experts are behind a connector."""

    gates = ("external-routing",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The gates of a class, on every subject, with their faults where a test takes one."""
    if metafunc.cls is None:
        return
    gates = metafunc.cls.gates
    if "fault" in metafunc.fixturenames:
        metafunc.parametrize(("gate", "fault"), [pair for pair in pairs() if pair[0] in gates])
    else:
        metafunc.parametrize("gate", gates)
    metafunc.parametrize("subject", SUBJECTS, ids=lambda one: one.model, scope="module")


def test_no_gate_is_left_out() -> None:
    classes = SameEngines.__subclasses__()
    assert sorted(gate for one in classes for gate in one.gates) == sorted(GATES)
