"""Every gate as a test: ``pytest --pyargs afd_testkit.gates --afd-engine vllm-cpu``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from afd_testkit import gate_item
from afd_testkit.engines.base import EngineConfig, PrefillEngine
from afd_testkit.failure import failure_text
from afd_testkit.gates.catalog import DEFAULT_ENGINE, GATES, gates_of, needs_of, subjects
from afd_testkit.gates.session import GateSession, Subject
from afd_testkit.models import CheckpointError, check_checkpoint
from afd_testkit.models.texts import paragraphs
from afd_testkit.plugin import settings_key
from afd_testkit.pool import EnginePool
from afd_testkit.prompts import UserPrompt, load_prompts
from afd_testkit.results import CheckResult, Outcome
from afd_testkit.settings import BUILT_IN_ENGINES, Settings


def _user_prompts(settings: Settings) -> tuple[UserPrompt, ...]:
    return () if settings.prompts is None else load_prompts(settings.prompts)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a subject, gate and case, in an order in which engines are shared."""
    settings = metafunc.config.stash[settings_key]
    engine = settings.engine or DEFAULT_ENGINE
    _check_asked_for(metafunc.config, engine, settings)
    user = _user_prompts(settings)
    # Cases are known without an engine; a session that cannot start one is enough.
    planning = GateSession(start=_no_engine, paragraphs=(), user=user)
    parameters = []
    for subject in subjects(engine, settings.models):
        needs = [
            getattr(pytest.mark, name) for name in needs_of(engine, subject.model, subject.dtype)
        ]
        topology = subject.topology.topology_label()
        shown = "-".join(part for part in (subject.short_model, subject.dtype, topology) if part)
        for gate in gates_of(subject):
            for case in gate.cases_of(planning, subject):
                parameters.append(
                    pytest.param(
                        subject,
                        gate.name,
                        case,
                        id=f"{shown}-{gate.name}-{case}".replace(" ", "_"),
                        marks=[*needs, pytest.mark.afd_gate(gate.name)],
                    )
                )
    metafunc.parametrize(("subject", "gate", "case"), parameters)


def _check_asked_for(config: pytest.Config, engine: str, settings: Settings) -> None:
    """An engine or checkpoint that cannot be used stops the run before it starts."""
    known = sorted({name for names in config.hook.pytest_afd_engine_names() for name in names})
    if engine not in known:
        raise pytest.UsageError(
            f"--afd-engine {engine!r} is served by no plugin; known names are {', '.join(known)}."
        )
    for model in settings.models:
        # Another project's engine knows best what its checkpoints look like.
        if engine in BUILT_IN_ENGINES and Path(model).is_dir():
            try:
                check_checkpoint(Path(model))
            except CheckpointError as error:
                raise pytest.UsageError(f"--afd-model: {error}") from error


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
