"""Every fault turns every gate that names it red, on the real vLLM-Ascend."""

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

pytestmark = pytest.mark.ascend

__all__ = [
    "TestChunks",
    "TestExternalRouting",
    "TestOneStep",
    "TestRouting",
    "TestSmallSteps",
]

SUBJECTS = [Subject("ascend", model, "float32") for model in ("deepseek-v3", "qwen3-moe")]


@pytest.fixture(scope="session")
def proof_session(afd_engines: EnginePool) -> GateSession:
    return GateSession(
        start=lambda config: afd_engines.get(config, "ascend"), paragraphs=paragraphs()
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc, SUBJECTS)


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda one: one.model)
def test_no_gate_is_left_out(subject: Subject) -> None:
    assert miscounted(globals(), subject) == {}
