"""The accuracy gate as tests: ``pytest -m accuracy``, with ``--afd-model``, ``--afd-gsm8k``.

One run of lm-eval on one engine answers for all of them: the unsplit arm, the split ones, and
on the model that comes with the package the faulty ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from afd_testkit import gate_item
from afd_testkit.accuracy.judge import NOISE, Judge
from afd_testkit.accuracy.margins import margin_of, small_model
from afd_testkit.accuracy.options import OptionsError, check_together
from afd_testkit.accuracy.plan import arms_of, gate_questions, small_shots
from afd_testkit.accuracy.questions import (
    Question,
    QuestionsError,
    digest,
    first,
    hub_questions,
    read_questions,
)
from afd_testkit.accuracy.run import AccuracyRunError, run_arms
from afd_testkit.accuracy.server_protocol import ServerError
from afd_testkit.accuracy.servers import judge_servers, server_arms
from afd_testkit.accuracy.spec import BASELINE, Arm, Spec
from afd_testkit.accuracy.task import MAX_SHOTS, write_task
from afd_testkit.accuracy.verdict import fewest_questions
from afd_testkit.engines.base import EngineError
from afd_testkit.failure import failure_text
from afd_testkit.plugin import settings_key
from afd_testkit.results import CheckResult, Outcome
from afd_testkit.settings import HUB, Settings
from afd_testkit.summary import ACCURACY

_SHOWN = 200  # characters

pytestmark = [pytest.mark.accuracy, pytest.mark.afd_gate(ACCURACY)]


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
    if settings.models:
        return ()
    from afd_testkit.accuracy.faults import SENSITIVITY  # torch, which servers are asked without

    return tuple(SENSITIVITY)


def _asked(settings: Settings) -> tuple[Sequence[Question], Sequence[Question]]:
    """Questions, and examples for their prompts."""
    if settings.gsm8k is None:
        return first(gate_questions(), settings.questions), small_shots()
    if settings.gsm8k == HUB:
        asked, shots = hub_questions()
        return first(asked, settings.questions), shots
    # The first questions are examples for the rest, as the public file has no others.
    every = read_questions(Path(settings.gsm8k))
    if len(every) <= MAX_SHOTS:
        raise QuestionsError(
            f"{settings.gsm8k} has {len(every)} questions; {MAX_SHOTS} serve as examples, so give "
            "more"
        )
    return first(every[MAX_SHOTS:], settings.questions), every[:MAX_SHOTS]


@dataclass
class _Refused:
    """Why there is no judge: told in full to the first test that asks, and shortly to the rest."""

    error: Exception
    told: bool = False

    def to_tell(self) -> str:
        text = f"{type(self.error).__name__}: {self.error}"
        if self.told:
            return f"{text.splitlines()[0][:_SHOWN]} (as the first of these tests tells)"
        self.told = True
        return text


@pytest.fixture(scope="session")
def accuracy_run(
    afd_settings: Settings,
    afd_progress: Callable[[str], None],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Judge | _Refused:
    """All arms that the selected tests judge, run once."""
    judged = {
        item.callspec.id
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test_accuracy.__name__
    }
    try:
        check_together(afd_settings)
        return _run(afd_settings, judged, afd_progress, tmp_path_factory.mktemp("accuracy"))
    except (OptionsError, QuestionsError, ServerError, AccuracyRunError, EngineError) as error:
        return _Refused(error)


@pytest.fixture
def accuracy_judge(accuracy_run: Judge | _Refused) -> Judge:
    """The judge of all arms, or why there is none."""
    if isinstance(accuracy_run, _Refused):
        pytest.fail(accuracy_run.to_tell(), pytrace=False)
    return accuracy_run


def _run(
    settings: Settings, judged: Collection[str], say: Callable[[str], None], folder: Path
) -> Judge:
    """``judged``: names of arms; the unsplit one and its noise are run beside them."""
    model = settings.models[0] if settings.models else str(small_model())
    asked, shots = _asked(settings)
    margin = margin_of(model)
    if len(asked) < (least := fewest_questions(margin.drop)):
        say(
            f"accuracy: {len(asked)} questions are too few to pass; {least} that the model knows "
            f"can show a drop below {margin.drop}"
        )
    if settings.servers is not None:
        folders = settings.cache, settings.results
        return judge_servers(settings.servers, asked, shots, folders, say)
    spec = Spec(
        model=model,
        dtype="float32",
        task=str(write_task(folder / "task", asked, shots)),
        results=str(folder / "arms"),
        shots=MAX_SHOTS,
        arms=tuple(
            arm
            for arm in arms_of(len(asked), _faults(settings))
            if arm.name in {BASELINE, NOISE, *judged}
        ),
        asked=digest([*asked, *shots]),
    )
    return Judge(
        spec=spec,
        model=Path(model).name,
        margin=margin,
        questions=digest(asked),
        results=run_arms(spec, say),
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
