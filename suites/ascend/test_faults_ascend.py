"""Every fault turns every gate that names it red, on the real vLLM-Ascend."""

from __future__ import annotations

import pytest

from afd_testkit.faults import CONTROL
from afd_testkit.gates.catalog import GATES
from afd_testkit.gates.proof import first_red, pairs
from afd_testkit.gates.session import GateSession, Subject
from afd_testkit.models.texts import paragraphs
from afd_testkit.pool import EnginePool
from afd_testkit.results import Outcome

pytestmark = pytest.mark.ascend

# One after the other, so that their tests share engines.
SUBJECTS = [Subject("ascend", model, "float32") for model in ("deepseek-v3", "qwen3-moe")]
subjects = pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.model)


@pytest.fixture(scope="session")
def ascend_session(afd_engines: EnginePool) -> GateSession:
    return GateSession(
        start=lambda config: afd_engines.get(config, "ascend"), paragraphs=paragraphs()
    )


@pytest.mark.parametrize(("gate", "fault"), pairs())
@subjects
def test_gate_turns_red(
    ascend_session: GateSession, subject: Subject, gate: str, fault: str
) -> None:
    red, seen = first_red(ascend_session, subject, gate, fault)
    assert red is not None, [(r.variant, r.outcome, r.message) for r in seen]


@pytest.mark.parametrize("gate", list(GATES))
@subjects
def test_gate_stays_green_under_an_injection_of_nothing(
    ascend_session: GateSession, subject: Subject, gate: str
) -> None:
    red, seen = first_red(ascend_session, subject, gate, CONTROL)
    assert red is None, (red.variant, red.message)
    assert all(result.outcome is Outcome.PASSED for result in seen)
