"""The accuracy gate as tests: ``pytest -m accuracy``, with ``--afd-model``, ``--afd-gsm8k``.

One run of lm-eval on one engine answers for all of them: the unsplit arm, the split ones, and
on the model that comes with the package the faulty ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from afd_testkit import gate_item
from afd_testkit.accuracy.faults import SENSITIVITY
from afd_testkit.accuracy.judge import GATE, NOISE, Judge
from afd_testkit.accuracy.margins import margin_of, small_model
from afd_testkit.accuracy.options import check_together
from afd_testkit.accuracy.plan import arms_of, gate_questions, small_shots
from afd_testkit.accuracy.questions import (
    Question,
    QuestionsError,
    digest,
    hub_questions,
    read_questions,
)
from afd_testkit.accuracy.run import run_arms
from afd_testkit.accuracy.servers import judge_servers, server_arms
from afd_testkit.accuracy.spec import Arm, Spec
from afd_testkit.accuracy.task import MAX_SHOTS, write_task
from afd_testkit.failure import failure_text
from afd_testkit.plugin import settings_key
from afd_testkit.results import CheckResult, Outcome
from afd_testkit.settings import HUB, Settings

pytestmark = [pytest.mark.accuracy, pytest.mark.afd_gate(GATE)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test an arm that is judged."""
    if "arm" in metafunc.fixturenames:
        settings = metafunc.config.stash[settings_key]
        if settings.servers is not None:
            judged = server_arms(settings.servers)
        else:
            judged = [arm for arm in arms_of(1, _faults(settings)) if arm.name != NOISE]
        metafunc.parametrize("arm", judged, ids=lambda arm: arm.name)


def _faults(settings: Settings) -> tuple[str, ...]:
    """Faults are tried on the model whose answers are known."""
    return () if settings.models else tuple(SENSITIVITY)


def _asked(settings: Settings) -> tuple[Sequence[Question], Sequence[Question]]:
    """Questions, and examples for their prompts."""
    if settings.gsm8k is None:
        return gate_questions(settings.questions), small_shots()
    if settings.gsm8k == HUB:
        asked, shots = hub_questions()
        return asked[: settings.questions], shots
    # The first questions are examples for the rest, as the public file has no others.
    every = read_questions(Path(settings.gsm8k))
    if len(every) <= MAX_SHOTS:
        raise QuestionsError(
            f"{settings.gsm8k} has {len(every)} questions; {MAX_SHOTS} serve as examples, so give "
            "more"
        )
    return every[MAX_SHOTS:][: settings.questions], every[:MAX_SHOTS]


@pytest.fixture(scope="session")
def accuracy_judge(
    afd_settings: Settings,
    afd_progress: Callable[[str], None],
    tmp_path_factory: pytest.TempPathFactory,
) -> Judge:
    """All arms, run once."""
    check_together(afd_settings)
    model = afd_settings.models[0] if afd_settings.models else str(small_model())
    asked, shots = _asked(afd_settings)
    if afd_settings.servers is not None:
        folders = afd_settings.cache, afd_settings.results
        return judge_servers(afd_settings.servers, asked, shots, folders, afd_progress)
    folder = tmp_path_factory.mktemp("accuracy")
    spec = Spec(
        model=model,
        dtype="float32",
        task=str(write_task(folder / "task", asked, shots)),
        results=str(folder / "arms"),
        shots=MAX_SHOTS,
        arms=arms_of(len(asked), _faults(afd_settings)),
    )
    return Judge(
        spec=spec,
        model=Path(model).name,
        margin=margin_of(model),
        questions=digest(asked),
        results=run_arms(spec, afd_progress),
    )


def test_accuracy(
    arm: Arm,
    accuracy_judge: Judge,
    afd_settings: Settings,
    record_check: Callable[[CheckResult], CheckResult],
    request: pytest.FixtureRequest,
) -> None:
    """The unsplit arm is fit, a split one answers as it does, a faulty one is seen not to."""
    again = gate_item.repeat_command(request.node, afd_settings)
    result = record_check(replace(accuracy_judge.check(arm), repeat=again))
    if result.outcome is Outcome.FAILED:
        pytest.fail(failure_text(result), pytrace=False)
