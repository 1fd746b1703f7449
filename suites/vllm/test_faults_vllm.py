"""Every fault turns every gate that names it red, on the real vLLM engine."""

from __future__ import annotations

import pytest

from afd_testkit.gates.proof_classes import (
    TestChunks,
    TestExternalRouting,
    TestOneStep,
    TestRouting,
    TestSmallSteps,
    miscounted,
    parametrize,
)
from afd_testkit.gates.session import GateSession, Subject
from afd_testkit.models.texts import paragraphs
from afd_testkit.pool import EnginePool

pytestmark = pytest.mark.vllm

__all__ = [
    "TestChunks",
    "TestExternalRouting",
    "TestOneStep",
    "TestRouting",
    "TestSmallSteps",
]

SUBJECTS = [Subject("vllm-cpu", "qwen3-moe", "float32")]


@pytest.fixture(scope="session")
def proof_session(afd_engines: EnginePool) -> GateSession:
    return GateSession(
        start=lambda config: afd_engines.get(config, "vllm-cpu"), paragraphs=paragraphs()
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc, SUBJECTS)


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda one: one.model)
def test_no_gate_is_left_out(subject: Subject) -> None:
    assert miscounted(globals(), subject) == {}
