"""Every gate as a test: ``pytest --pyargs afd_testkit.gates --afd-engine vllm-cpu``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from afd_testkit import gate_item
from afd_testkit.engines.base import EngineConfig, PrefillEngine
from afd_testkit.failure import failure_text
from afd_testkit.gates.catalog import DEFAULT_ENGINE, GATES, needs_of, subjects
from afd_testkit.gates.session import GateSession, Subject
from afd_testkit.models.texts import paragraphs
from afd_testkit.plugin import settings_key
from afd_testkit.pool import EnginePool
from afd_testkit.prompts import UserPrompt, load_prompts
from afd_testkit.results import CheckResult, Outcome
from afd_testkit.settings import Settings


def _user_prompts(settings: Settings) -> tuple[UserPrompt, ...]:
    return () if settings.prompts is None else load_prompts(settings.prompts)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a subject, gate and case, in an order in which engines are shared."""
    settings = metafunc.config.stash[settings_key]
    engine = settings.engine or DEFAULT_ENGINE
    user = _user_prompts(settings)
    # Cases are known without an engine; a session that cannot start one is enough.
    planning = GateSession(start=_no_engine, paragraphs=(), user=user)
    parameters = []
    for subject in subjects(engine, settings.models):
        needs = [
            getattr(pytest.mark, name) for name in needs_of(engine, subject.model, subject.dtype)
        ]
        for gate in GATES.values():
            for case in gate.cases(planning):
                parameters.append(
                    pytest.param(
                        subject,
                        gate.name,
                        case,
                        id=f"{subject.short_model}-{subject.dtype}-{gate.name}-{case}".replace(
                            " ", "_"
                        ),
                        marks=[*needs, pytest.mark.afd_gate(gate.name)],
                    )
                )
    metafunc.parametrize(("subject", "gate", "case"), parameters)


def _no_engine(config: EngineConfig) -> PrefillEngine:
    raise LookupError(f"no engine may start while tests are collected ({config})")


@pytest.fixture(scope="session")
def gate_session(
    afd_engines: EnginePool,
    afd_settings: Settings,
    afd_progress: Callable[[str], None],
) -> GateSession:
    """Engines and baselines, shared by all gates."""
    engine = afd_settings.engine or DEFAULT_ENGINE
    return GateSession(
        start=lambda config: afd_engines.get(config, engine),
        paragraphs=paragraphs(),
        user=_user_prompts(afd_settings),
        progress=afd_progress,
    )


def test_gate(
    subject: Subject,
    gate: str,
    case: str,
    gate_session: GateSession,
    afd_settings: Settings,
    record_check: Callable[[CheckResult], CheckResult],
    request: pytest.FixtureRequest,
) -> None:
    """The checks of one case of one gate; all of them run, then the first bad one is shown."""
    again = gate_item.repeat_command(request.node, afd_settings)
    judged = [
        record_check(replace(result, repeat=again))
        for result in GATES[gate].run(gate_session, subject, case)
    ]
    bad = [result for result in judged if result.outcome in (Outcome.FAILED, Outcome.ERROR)]
    if bad:
        more = f"\n({len(bad)} of {len(judged)} checks of this case)" if len(bad) > 1 else ""
        pytest.fail(failure_text(bad[0]) + more, pytrace=False)
