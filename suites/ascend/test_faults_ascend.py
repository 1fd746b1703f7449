"""Every fault turns every gate that names it red, on the real vLLM-Ascend."""

from __future__ import annotations

import pytest

from afd_testkit.gates import proof_classes
from afd_testkit.gates.session import GateSession, Subject
from afd_testkit.models.texts import paragraphs
from afd_testkit.pool import EnginePool

pytestmark = pytest.mark.ascend

SUBJECTS = [Subject("ascend", model, "float32") for model in ("deepseek-v3", "qwen3-moe")]


@pytest.fixture(scope="session")
def proof_session(afd_engines: EnginePool) -> GateSession:
    return GateSession(
        start=lambda config: afd_engines.get(config, "ascend"), paragraphs=paragraphs()
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    proof_classes.parametrize(metafunc, SUBJECTS)


class TestOneStep(proof_classes.OneStep):
    """Prompts that fit one step."""


class TestChunks(proof_classes.Chunks):
    """Prompts in chunks."""


class TestSmallSteps(proof_classes.SmallSteps):
    """Batches over several steps."""


class TestRouting(proof_classes.Routing):
    """A gated layer on the NPU, in a process of its own."""


class TestExternalRouting(proof_classes.ExternalRouting):
    """The stock engine, and ones whose experts are behind a connector."""


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda one: one.model)
def test_no_gate_is_left_out(subject: Subject) -> None:
    assert proof_classes.miscounted(globals(), subject) == {}
