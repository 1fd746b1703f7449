"""Whether a split run answers as well as an unsplit one, from the same questions asked of both.

Scores near each other say little; the questions that flipped say all that there is to know.
Two statements are made.  Exact McNemar test: how probable are flips this one-sided if the split
changes nothing.  Non-inferiority: with 95 % confidence the score fell by less than a margin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, log

from scipy.optimize import brentq
from scipy.stats import binom, binomtest

CONFIDENCE = 0.95
POWER = 0.8


class NotPaired(ValueError):
    """The arms did not answer the same questions."""


class Judgement(StrEnum):
    """What the figures allow to say."""

    PASSED = "passed"
    FAILED = "failed"
    TOO_FEW = "too few questions"


def upper_bound(count: int, n: int) -> float:
    """Largest share that ``count`` of ``n`` is compatible with: Clopper-Pearson, one tail 2.5 %."""
    return float(binomtest(count, n).proportion_ci(CONFIDENCE, method="exact").high)


def lower_bound(count: int, n: int) -> float:
    """Smallest such share."""
    return float(binomtest(count, n).proportion_ci(CONFIDENCE, method="exact").low)


@dataclass(frozen=True)
class Paired:
    """Two arms on the same ``n`` questions.

    ``broken``: right in the baseline and wrong in the arm; ``mended``: the other way round.
    ``correct``: right answers of the baseline.  Raises ``ValueError`` for counts that cannot be.
    """

    n: int
    correct: int
    broken: tuple[str, ...]
    mended: tuple[str, ...]

    def __post_init__(self) -> None:
        broken, mended = len(self.broken), len(self.mended)
        if not (self.n > 0 and broken <= self.correct and mended <= self.n - self.correct):
            raise ValueError(
                f"{broken} broken and {mended} mended cannot be where {self.correct} of {self.n} "
                "were right"
            )

    @property
    def baseline_score(self) -> float:
        """Share of right answers of the baseline."""
        return self.correct / self.n

    @property
    def score(self) -> float:
        """Share of right answers of the arm."""
        return (self.correct - len(self.broken) + len(self.mended)) / self.n

    @property
    def p_value(self) -> float:
        """Exact McNemar test, two-sided: the chance of flips at least this one-sided."""
        flips = len(self.broken) + len(self.mended)
        return 1.0 if flips == 0 else float(binomtest(len(self.broken), flips, 0.5).pvalue)

    @property
    def lowest_difference(self) -> float:
        """Lower 95 % bound of (arm - baseline).

        Two Clopper-Pearson bounds of 97.5 % each, of the shares mended and broken; together they
        hold with at least 95 % whatever the two shares have to do with each other (Bonferroni).
        """
        return lower_bound(len(self.mended), self.n) - upper_bound(len(self.broken), self.n)

    def judge(self, margin: float) -> Judgement:
        """``passed`` only where the score fell by less than ``margin`` with 95 % confidence.

        Only an answer that is right can break: with fewer right ones in the baseline than
        questions are needed for a run without a flip to say so, nothing passes.  ``failed`` then
        where the flips alone show a fall: more broken than mended, with a McNemar p below 5 %.
        """
        if self.correct < fewest_questions(margin):
            fell = len(self.broken) > len(self.mended) and self.p_value < 1 - CONFIDENCE
            return Judgement.FAILED if fell else Judgement.TOO_FEW
        return Judgement.PASSED if self.lowest_difference > -margin else Judgement.FAILED


def paired(baseline: Mapping[str, bool], arm: Mapping[str, bool]) -> Paired:
    """Right answers by question id of both arms.  Raises :class:`NotPaired`."""
    if not baseline:
        raise NotPaired("no question was answered; give at least one")
    lost, new = sorted(baseline.keys() - arm.keys()), sorted(arm.keys() - baseline.keys())
    if lost or new:
        raise NotPaired(
            f"the arms answered different questions: {len(lost)} only in the baseline "
            f"({', '.join(lost[:3])}), {len(new)} only in the arm ({', '.join(new[:3])}). "
            "Run both on one list."
        )
    return Paired(
        n=len(baseline),
        correct=sum(baseline.values()),
        broken=tuple(sorted(q for q, right in baseline.items() if right and not arm[q])),
        mended=tuple(sorted(q for q, right in baseline.items() if not right and arm[q])),
    )


def fewest_questions(margin: float) -> int:
    """Questions from which on a run without a flip passes ``margin``: 0.025 = (1 - margin)^n."""
    _check_margin(margin)
    n = max(1, ceil(log((1 - CONFIDENCE) / 2) / log(1 - margin)))
    while upper_bound(0, n) >= margin:
        n += 1
    return n


def detectable_drop(n: int, margin: float) -> float | None:
    """Smallest true drop that ``n`` questions refuse with a chance of 80 %, if none is mended.

    ``None`` where so few questions cannot pass at all.
    """
    _check_margin(margin)
    if n < fewest_questions(margin):
        return None
    # The first that does not pass, since each one more is worse; n of n never do.
    allowed = next(k for k in range(n + 1) if upper_bound(k, n) >= margin) - 1
    return float(brentq(lambda drop: binom.sf(allowed, n, drop) - POWER, 1e-9, 1 - 1e-9))


def _check_margin(margin: float) -> None:
    if not 0 < margin < 1:
        raise ValueError(f"the margin is {margin}; it must be a share between 0 and 1")
