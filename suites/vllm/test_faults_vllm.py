"""Every fault turns every gate that names it red, on the real vLLM engine."""

from __future__ import annotations

import pytest

from afd_testkit.gates.proof import first_red, pairs
from afd_testkit.gates.session import GateSession, Subject
from afd_testkit.models.texts import paragraphs
from afd_testkit.pool import EnginePool

pytestmark = pytest.mark.vllm

SUBJECT = Subject("vllm-cpu", "qwen3-moe", "float32")


@pytest.fixture(scope="session")
def vllm_session(afd_engines: EnginePool) -> GateSession:
    return GateSession(
        start=lambda config: afd_engines.get(config, "vllm-cpu"), paragraphs=paragraphs()
    )


@pytest.mark.parametrize(("gate", "fault"), pairs())
def test_gate_turns_red(vllm_session: GateSession, gate: str, fault: str) -> None:
    red, seen = first_red(vllm_session, SUBJECT, gate, fault)
    assert red is not None, [(r.variant, r.outcome, r.message) for r in seen]
