"""Margins by model, and floors that only a recorded score gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from afd_testkit.accuracy.margins import TABLE, Margin, margin_of
from afd_testkit.accuracy.verdict import Judgement, Paired, fewest_questions

pytestmark = pytest.mark.cpu

RECORDED = Margin(0.05, "why", baseline={"a": True, "b": True, "c": True, "d": False}, shots=5)


def test_the_floor_is_the_recorded_score_of_what_was_asked_less_the_margin() -> None:
    assert RECORDED.floor(["a", "b", "c", "d"], 5) == pytest.approx(0.70)
    assert RECORDED.floor(["a", "d"], 5) == pytest.approx(0.45)


@pytest.mark.parametrize(
    ("asked", "shots"), [(["a"], 3), (["a", "new"], 5), ([], 5)], ids=["shots", "new", "none"]
)
def test_there_is_no_floor_for_what_was_not_recorded(asked: list[str], shots: int) -> None:
    assert RECORDED.floor(asked, shots) is None


def test_there_is_no_default_floor() -> None:
    assert Margin(0.05, "why").floor(["a"], 5) is None


def test_every_margin_has_its_source() -> None:
    for margin in TABLE.values():
        assert 0 < margin.drop < 1
        assert margin.source


def test_what_the_source_says_of_the_common_margin_is_so() -> None:
    margin = TABLE["*"]
    assert "183 questions without a flip" in margin.source
    assert fewest_questions(margin.drop) == 183
    assert "1,319 questions with up to 16 broken" in margin.source
    for broken, judgement in ((16, Judgement.PASSED), (17, Judgement.FAILED)):
        flipped = tuple(f"q{n}" for n in range(broken))
        assert Paired(1319, 1200, flipped, ()).judge(margin.drop) is judgement


def test_a_model_that_is_not_listed_has_the_common_margin(tmp_path: Path) -> None:
    assert margin_of(str(tmp_path / "no-such-model")) == TABLE["*"]
