"""Specification and results of arms come back from their files as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from afd_testkit.accuracy.spec import Arm, ArmResult, Spec
from afd_testkit.accuracy.task import Answer

pytestmark = pytest.mark.cpu

ARMS = (Arm("unsplit", "off", 7, 3), Arm("bad", "token", 0, 2, fault="noise", backwards=True))
SPEC = Spec("model", "float32", "task", "results", 5, ARMS, max_model_len=77)
RESULT = ArmResult(
    arm=ARMS[1],
    answers=(Answer("a", "so 😀\n#### 4", "4", strict=True, flexible=True, truncated=False),),
    logprobs={"a": [-0.1, float("nan"), float("-inf")]},
    steps=4,
    split_steps=3,
    cut_requests=2,
    balanced_routing=0,
    seconds=1.5,
    facts={"versions": {"gsm8k": 3.0}},
)


def test_a_specification_comes_back_equal(tmp_path: Path) -> None:
    SPEC.write(tmp_path / "spec.json")
    assert Spec.read(tmp_path / "spec.json") == SPEC


def test_an_arm_comes_back_equal_under_its_name(tmp_path: Path) -> None:
    RESULT.write(tmp_path)
    back = ArmResult.read(tmp_path / "bad.json")
    # NaN is the one value that does not equal itself.
    assert repr(back) == repr(RESULT)
    assert (back.arm, back.answers) == (RESULT.arm, RESULT.answers)


def test_an_arm_is_complete_or_not_there(tmp_path: Path) -> None:
    RESULT.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.json"]


def test_seeds_are_all_four_of_lm_eval_s() -> None:
    assert set(SPEC.seeds) == {
        "random_seed",
        "numpy_random_seed",
        "torch_random_seed",
        "fewshot_random_seed",
    }


def test_right_answers_are_by_question_and_filter() -> None:
    answers = (
        Answer("a", "", "1", strict=True, flexible=False, truncated=False),
        Answer("b", "", "2", strict=False, flexible=True, truncated=True),
    )
    result = ArmResult(ARMS[0], answers, {}, 0, 0, 0, 0, 0.0, {})
    assert result.right() == {"a": True, "b": False}
    assert result.right("flexible") == {"a": False, "b": True}
