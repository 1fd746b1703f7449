"""The judge of an accuracy run, on arms made by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from afd_testkit.accuracy.judge import Judge
from afd_testkit.accuracy.margins import Margin
from afd_testkit.accuracy.spec import Arm, ArmResult, Spec
from afd_testkit.accuracy.task import Answer
from afd_testkit.results import CheckResult, Comparison, Outcome

pytestmark = pytest.mark.cpu

N, RIGHT = 200, 190
MARGIN = Margin(0.02, "the source of the margin")
NAMES = [f"q{n:03d}" for n in range(N)]
TOKENS = [-0.5, -1.0, -0.25]
FAULT = "a-fault"


def answers(
    broken: int = 0, mended: int = 0, cut: int = 0, names: Sequence[str] = NAMES
) -> tuple[Answer, ...]:
    """The first 190 questions right, but for the first ``broken``; of the rest ``mended`` right."""
    found = []
    for n, name in enumerate(names):
        right = broken <= n < RIGHT or RIGHT <= n < RIGHT + mended
        got = "4" if right else "5"
        found.append(Answer(name, f" so\n#### {got}", got, right, right, truncated=n < cut))
    return tuple(found)


def made(name: str, policy: str = "off", fault: str | None = None, **changes: object) -> ArmResult:
    split = 0 if policy == "off" else 10
    plain = ArmResult(
        arm=Arm(name, policy, N, 2, fault=fault),
        answers=answers(),
        logprobs={"q000": TOKENS, "q001": TOKENS},
        steps=12,
        split_steps=split,
        cut_requests=split,
        balanced_routing=0,
        seconds=2.5,
        facts={},
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def judge(margin: Margin = MARGIN, **changed: ArmResult) -> Judge:
    results = {
        "unsplit": made("unsplit"),
        "noise": made("noise", answers=()),
        "token": made("token", "token"),
        "fault": made("fault", "token", FAULT, answers=answers()[:100]),
        **changed,
    }
    arms = tuple(result.arm for result in results.values())
    spec = Spec("/models/small", "float32", "task", "results", 5, arms)
    return Judge(spec, "small", margin, "digest", results)


def judged(name: str, margin: Margin = MARGIN, **changed: ArmResult) -> CheckResult:
    one = judge(margin, **changed)
    return one.check(one.results[name].arm)


def token(**changes: object) -> CheckResult:
    return judged("token", token=made("token", "token", **changes))


def answered(before: tuple[Answer, ...], after: tuple[Answer, ...]) -> CheckResult:
    """The split arm, with these answers of the unsplit one and of its own."""
    return judged(
        "token",
        unsplit=made("unsplit", answers=before),
        token=made("token", "token", answers=after),
    )


def comparison(check: CheckResult, quantity: str) -> Comparison:
    return next(one for one in check.comparisons if one.quantity == quantity)


def moved(by: float, noise: float = 0.0) -> CheckResult:
    """The split arm with one log-probability moved, beside an engine with this noise."""
    arm = made("token", "token", logprobs={"q000": TOKENS, "q001": [-0.5, -1.0 + by, -0.25]})
    shaken = made("noise", answers=(), logprobs={"q000": [-0.5 - noise, -1.0, -0.25]})
    return judged("token", token=arm, noise=shaken)


# --- what passes


def test_equal_arms_pass() -> None:
    check = token()
    assert (check.outcome, check.message) == (Outcome.PASSED, "")
    assert (check.gate, check.case, check.variant) == ("accuracy", "split", "token")
    assert (check.model, check.dtype, check.seconds) == ("small", "float32", 2.5)
    assert all(one.ok for one in check.comparisons)
    assert comparison(check, "logprob").compared == 6
    assert comparison(check, "logprob").max_diff == 0.0


def test_the_facts_of_an_arm_are_its_figures() -> None:
    facts = token(answers=answers(broken=1, mended=2)).facts
    assert (facts["questions"], facts["shots"]) == (200, 5)
    assert (facts["baseline_score"], facts["score"]) == (190 / 200, 191 / 200)
    assert facts["strict_match"] == facts["flexible_extract"] == 191 / 200
    low, high = facts["interval"]
    assert low < 191 / 200 < high
    assert (facts["broken"], facts["mended"]) == (1, 2)
    # Three flips, one of them against: 2 x (1 + 3) / 8, at most 1.
    assert facts["p_value"] == pytest.approx(1.0)
    assert facts["margin"] == 0.02
    # 200 questions allow no broken one: 1 - (1 - d)^200 = 0.8.
    assert facts["detectable_drop"] == pytest.approx(1 - 0.2 ** (1 / 200))
    assert facts["questions_digest"] == "digest"
    assert (facts["steps"], facts["split_steps"], facts["balanced_routing"]) == (12, 10, 0)


def test_flips_are_shown_with_both_answers() -> None:
    flips = token(answers=answers(broken=1, mended=1)).facts["flips"]
    right, wrong = "so\n#### 4", "so\n#### 5"
    assert flips == [
        {"id": "q000", "way": "broken", "question": "", "unsplit": right, "split": wrong},
        {"id": "q190", "way": "mended", "question": "", "unsplit": wrong, "split": right},
    ]


def test_many_flips_are_counted_beyond_twenty() -> None:
    facts = token(answers=answers(broken=25)).facts
    assert (len(facts["flips"]), facts["flips_not_shown"], facts["broken"]) == (20, 5, 25)


def test_the_unsplit_arm_passes_by_itself() -> None:
    check = judged("unsplit")
    assert (check.outcome, check.message) == (Outcome.PASSED, "")
    assert (check.case, check.variant) == ("baseline", "unsplit")
    assert check.facts["strict_match"] == 190 / 200
    assert "floor" not in check.facts


# --- what is refused


def test_a_score_that_fell_fails_and_names_flips_and_bound() -> None:
    check = token(answers=answers(broken=40))
    assert check.outcome is Outcome.FAILED
    assert "0.9500 to 0.7500 (40 broken, 0 mended, p = " in check.message
    drop = comparison(check, "score drop, 95 % bound")
    assert (drop.ok, drop.limit, drop.rule) == (False, 0.02, MARGIN.source)
    # The bound lies beyond what was seen.
    assert drop.max_diff > 40 / 200


def test_noise_widens_the_limit_to_ten_times_at_most() -> None:
    check = moved(1.1e-4, 1e-3)
    assert comparison(check, "logprob").limit == pytest.approx(1e-4)
    assert check.outcome is Outcome.FAILED


def test_a_model_that_answers_nothing_right_is_no_pass() -> None:
    wrong = answers(broken=RIGHT)
    check = answered(wrong, wrong)
    assert check.outcome is Outcome.FAILED
    assert "0 of 200 right, and only those can break" in check.message


def test_too_few_questions_are_no_pass() -> None:
    few = answers()[:50]
    check = answered(few, few)
    assert check.outcome is Outcome.FAILED
    # 1 - (1 - 0.02)^n must reach 0.975: n = ln 0.025 / ln 0.98 = 182.6.
    assert "too few questions: the unsplit arm answers 50 of 50 right" in check.message
    assert "At least 183 right ones" in check.message
    assert check.facts["detectable_drop"] is None
    # No bound within its limit stands beside a failure: 1 - 0.025^(1/50) of 50.
    drop = comparison(check, "score drop, 95 % bound")
    assert drop.max_diff == pytest.approx(1 - 0.025 ** (1 / 50))
    assert drop.max_diff > drop.limit


def test_the_public_case_is_told_as_a_fall() -> None:
    """0.885 unsplit and 0.635 split of 200, which a floor once let pass."""
    before, after = (
        tuple(replace(one, strict=n < right) for n, one in enumerate(answers()))
        for right in (177, 127)
    )
    check = answered(before, after)
    assert check.outcome is Outcome.FAILED
    assert "0.8850 to 0.6350 (50 broken, 0 mended, p = 1.8e-15)" in check.message
    assert "too few" not in check.message


def test_six_broken_of_a_hundred_right_show_whatever_else_was_asked() -> None:
    names = [f"q{n:04d}" for n in range(1319)]
    before, after = (
        tuple(replace(one, strict=low <= n < 100) for n, one in enumerate(answers(names=names)))
        for low in (0, 6)
    )
    check = answered(before, after)
    drop = comparison(check, "score drop, 95 % bound")
    assert not drop.ok
    assert drop.max_diff > drop.limit


def test_answers_that_only_one_filter_still_finds_do_not_pass() -> None:
    noted = tuple(replace(one, flexible=False) for one in answers())
    check = token(answers=noted)
    assert check.outcome is Outcome.FAILED
    assert "by flexible-extract: the score went from 0.9500 to 0.0000" in check.message


def test_a_server_says_why_it_gave_no_log_probabilities() -> None:
    nothing = {"logprobs": {}, "facts": {"logprobs": "not offered by the server: HTTP 400"}}
    check = judged(
        "token",
        unsplit=made("unsplit", **nothing),
        token=made("token", "token", **nothing),
    )
    assert check.outcome is Outcome.FAILED
    assert "since not offered by the server: HTTP 400" in check.message


def test_forced_balance_is_no_evidence() -> None:
    for check in (token(balanced_routing=3), judged("unsplit", unsplit=_forced())):
        assert check.outcome is Outcome.FAILED
        assert "3 times the expert ids were forced to be even" in check.message
        assert check.facts["balanced_routing"] == 3


def _forced() -> ArmResult:
    return made("unsplit", balanced_routing=3)


@pytest.mark.parametrize(("cut", "outcome"), [(4, Outcome.PASSED), (5, Outcome.FAILED)])
def test_answers_cut_at_the_limit_may_be_two_in_a_hundred(cut: int, outcome: Outcome) -> None:
    check = token(answers=answers(cut=cut))
    assert check.outcome is outcome
    assert ("5 of 200 answers ended at the limit" in check.message) is (outcome is Outcome.FAILED)
    assert check.facts["truncated"] == cut


@pytest.mark.parametrize("generation", [{"do_sample": True}, "x"])
def test_sampling_without_seeds_is_no_evidence(generation: object) -> None:
    def outcome(seeds: dict[str, int]) -> CheckResult:
        arm = made("token", "token", facts={"generation": generation})
        one = judge(token=arm)
        return replace(one, spec=replace(one.spec, seeds=seeds)).check(arm.arm)

    assert "answers were sampled and no seed is stated" in outcome({}).message
    assert outcome({"random_seed": 1}).outcome is Outcome.PASSED


def test_an_arm_cannot_bring_its_own_figures() -> None:
    facts = {"strict_match": 1.0, "questions": 99, "seeds": {}, "split_steps": 99, "lm_eval": "x"}
    check = token(answers=answers(broken=40), facts=facts)
    assert check.facts["strict_match"] == 150 / 200
    assert check.facts["questions"] == 200
    assert check.facts["split_steps"] == 10
    assert check.facts["lm_eval"] == "x"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"answers": (*answers(), answers()[0])}, "answered twice"),
        ({"split_steps": 13}, "13 of 12 steps were split, which cannot be"),
    ],
)
def test_what_cannot_be_is_no_evidence(changes: dict[str, object], words: str) -> None:
    check = token(**changes)
    assert check.outcome is Outcome.FAILED
    assert words in check.message


def test_other_questions_are_not_compared() -> None:
    other = answers(names=[*NAMES[:-1], "another"])
    check = token(answers=other)
    assert check.outcome is Outcome.FAILED
    assert "1 only in the baseline (q199), 1 only in the arm (another)" in check.message
    assert "score" not in check.facts


def test_an_arm_without_a_split_step_shows_nothing() -> None:
    check = token(split_steps=0)
    assert check.outcome is Outcome.FAILED
    assert check.message == "no step of this arm was split; it shows nothing"


def test_an_unsplit_arm_with_split_steps_is_none() -> None:
    check = judged("unsplit", unsplit=made("unsplit", split_steps=2))
    assert check.outcome is Outcome.FAILED
    assert check.message == "2 steps of the unsplit arm were split"


def test_no_question_is_no_baseline() -> None:
    check = judged("unsplit", unsplit=made("unsplit", answers=()))
    assert check.outcome is Outcome.FAILED
    assert "no question was answered" in check.message
    other = answered((), ())
    assert other.outcome is Outcome.FAILED


def recorded(right: int) -> Margin:
    return replace(MARGIN, baseline={name: n < right for n, name in enumerate(NAMES)}, shots=5)


def test_a_score_below_the_recorded_one_less_the_margin_fails() -> None:
    # Floors of 0.975 - 0.02 = 0.955 and 0.97 - 0.02 = 0.95, and a score of 0.95.
    low, fine = judged("unsplit", recorded(195)), judged("unsplit", recorded(194))
    assert low.outcome is Outcome.FAILED
    assert "score 0.9500 is below the floor 0.9550" in low.message
    assert low.facts["floor"] == pytest.approx(0.955)
    assert fine.outcome is Outcome.PASSED
    assert comparison(low, "score").ok is False
    assert comparison(fine, "score").ok is True


def test_nothing_passes_beside_an_unsplit_arm_that_is_none() -> None:
    split, low = made("unsplit", split_steps=3), recorded(195)
    for check in (judged("token", unsplit=split), judged("token", low)):
        assert check.outcome is Outcome.FAILED
        assert "the unsplit arm is no baseline" in check.message


def test_too_few_right_answers_see_no_drop() -> None:
    nothing = tuple(replace(one, strict=False) for one in answers())
    facts = answered(nothing, nothing).facts
    assert facts["detectable_drop"] is None


def test_several_reasons_are_all_told() -> None:
    check = token(answers=answers(broken=40, cut=9), split_steps=0, balanced_routing=1)
    for words in ("forced to be even", "ended at the limit", "no step", "40 broken"):
        assert words in check.message


# --- log-probabilities


@pytest.mark.parametrize(
    ("by", "noise", "limit"),
    [(0.9e-5, 0.0, 1e-5), (1.1e-5, 0.0, 1e-5), (3.9e-5, 1e-5, 4e-5), (4.1e-5, 1e-5, 4e-5)],
)
def test_tokens_may_differ_by_the_tolerance_or_four_times_the_noise(
    by: float, noise: float, limit: float
) -> None:
    check = moved(by, noise)
    tokens = comparison(check, "logprob")
    assert tokens.max_diff == pytest.approx(by)
    assert tokens.noise == pytest.approx(noise)
    assert tokens.limit == pytest.approx(limit)
    assert tokens.tolerance == 1e-5
    assert tokens.ok is (by < limit)
    assert (check.outcome is Outcome.PASSED) is (by < limit)


def test_the_worst_token_is_named() -> None:
    check = moved(-0.5)
    assert "differ by up to 0.5 at token 1 of the answer to q001" in check.message
    worst = comparison(check, "logprob").worst
    assert worst is not None
    assert (worst.request, worst.token, worst.actual, worst.expected) == ("q001", 1, -1.5, -1.0)
    assert comparison(check, "logprob").first == worst


@pytest.mark.parametrize("odd", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_no_number_never_passes(odd: float, place: int) -> None:
    check = token(logprobs={"q000": TOKENS, "q001": [*TOKENS[:place], odd, *TOKENS[place + 1 :]]})
    assert check.outcome is Outcome.FAILED
    assert comparison(check, "logprob").max_diff == math.inf


@pytest.mark.parametrize("other", [{"foreign": TOKENS}, {"q000": TOKENS[:2]}])
def test_noise_of_other_answers_limits_nothing(other: dict[str, list[float]]) -> None:
    check = judged("token", noise=made("noise", answers=(), logprobs=other))
    assert check.outcome is Outcome.FAILED
    assert not comparison(check, "logprob").ok
    assert "the engine's own noise is no number, or of other answers" in check.message
    unseen = judged("fault", noise=made("noise", answers=(), logprobs=other))
    assert unseen.facts["seen_by"] == []


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_no_number_in_every_arm_passes_as_noise(value: float) -> None:
    odd: Mapping[str, list[float]] = {"q000": [value, -1.0, -0.25], "q001": TOKENS}
    check = judged(
        "token",
        unsplit=made("unsplit", logprobs=odd),
        noise=made("noise", answers=(), logprobs=odd),
        token=made("token", "token", logprobs=odd),
    )
    assert check.outcome is Outcome.FAILED
    assert comparison(check, "logprob").ok is False


@pytest.mark.parametrize("kept", [[], ["q000"]], ids=["none", "some"])
def test_tokens_of_fewer_answers_are_not_enough(kept: list[str]) -> None:
    check = token(logprobs=dict.fromkeys(kept, TOKENS))
    assert check.outcome is Outcome.FAILED
    assert f"2 reference answers unsplit and of {len(kept)} here" in check.message


# --- faults


def fault(by: float = 0.0, **changes: object) -> CheckResult:
    logprobs = {"q000": [-0.5 + by, -1.0, -0.25], "q001": TOKENS}
    given = {"answers": answers()[:100], "logprobs": logprobs, **changes}
    return judged("fault", fault=made("fault", "token", FAULT, **given))


@pytest.mark.parametrize(
    ("broken", "by", "seen"),
    [
        (60, 0.1, ["score", "logprob"]),
        (60, 0.0, ["score"]),
        (0, 0.1, ["logprob"]),
        # Five flips one way happen by chance once in 16 times; six once in 32.
        (5, 0.1, ["logprob"]),
        (6, 0.1, ["score", "logprob"]),
    ],
)
def test_a_fault_is_caught_by_at_least_one_signal(broken: int, by: float, seen: list[str]) -> None:
    check = fault(by, answers=answers(broken=broken)[:100])
    assert (check.outcome, check.case, check.variant) == (Outcome.PASSED, "sensitivity", "fault")
    assert check.facts["fault"] == FAULT
    assert check.facts["seen_by"] == seen
    assert check.facts["broken"] == broken
    assert check.facts["logprob_difference"] == pytest.approx(by)
    assert check.facts["logprob_limit"] == 1e-5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split_steps": 0}, "the fault never acted"),
        ({"logprobs": {"other": TOKENS}}, "log-probabilities are to be compared"),
        ({"logprobs": {}}, "log-probabilities are to be compared"),
    ],
)
def test_a_fault_that_was_not_looked_at_is_not_seen(changes: dict[str, object], words: str) -> None:
    check = judged("fault", fault=made("fault", "token", FAULT, **changes))
    assert check.outcome is Outcome.FAILED
    assert words in check.message


def test_noise_of_nothing_limits_nothing() -> None:
    check = judged("token", noise=made("noise", answers=(), logprobs={}))
    assert check.outcome is Outcome.FAILED


def test_a_fault_that_no_signal_sees_fails() -> None:
    check = fault()
    assert check.outcome is Outcome.FAILED
    assert check.message == f"neither signal saw the fault {FAULT}"
    assert check.facts["seen_by"] == []


def test_a_fault_that_mends_answers_is_not_seen_by_the_score() -> None:
    wrong = tuple(replace(one, strict=False) for one in answers()[:100])
    check = judged(
        "fault",
        unsplit=made("unsplit", answers=wrong),
        fault=made("fault", "token", FAULT, answers=answers()[:100]),
    )
    assert check.facts["mended"] == 100
    assert "score" not in check.facts["seen_by"]


def test_with_enough_questions_the_score_sees_what_the_gate_refuses() -> None:
    # Of 200 questions one broken is already more than the margin allows with 95 % confidence.
    check = fault(answers=answers(broken=1))
    assert check.facts["seen_by"] == ["score"]
