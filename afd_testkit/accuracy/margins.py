"""How far a score may fall, by model: one table, each number with its source.

There is no override and no default floor: a floor exists only where a model's own score was
recorded.  Log-probabilities have their limits in the gates' table of tolerances; how far noise
may widen them is said here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from afd_testkit.accuracy.spec import TOKENS
from afd_testkit.gates.tolerances import Tolerance, tolerances
from afd_testkit.summary import ACCURACY

TRUNCATED_SHARE = 0.02  # of answers cut at the token limit: beyond, the limit decides the score


_MOST_NOISE = 10  # times the limit itself: noise widens it up to there


def token_limit(dtype: str, noise: float) -> tuple[Tolerance, float]:
    """The tolerance of log-probabilities, in nats, and the limit beside this ``noise``.

    Raises ``UnknownTolerance`` for another dtype than the table has.
    """
    found = tolerances(ACCURACY, dtype, "none")[TOKENS]
    # An engine that is noisier than this cannot be judged by what it says.
    return found, min(found.with_noise(noise), _MOST_NOISE * found.limit)


@dataclass(frozen=True)
class Margin:
    """``drop``: share of questions by which the score may fall.

    ``baseline``: the model's own recorded answers with so many ``shots``, right or wrong by
    question id; without them there is no floor.
    """

    drop: float
    source: str
    baseline: Mapping[str, bool] = field(default_factory=dict)
    shots: int = 5

    def floor(self, asked: Collection[str], shots: int) -> float | None:
        """The recorded score on the questions ``asked``, less the margin.

        ``None`` where it was recorded with other shots, or not for all of them.
        """
        if not asked or shots != self.shots or not all(one in self.baseline for one in asked):
            return None
        return sum(self.baseline[one] for one in asked) / len(asked) - self.drop


_FEW_FLIPS = (
    "a split changes no result in exact arithmetic, so that flips come only from rounding of near "
    "ties; 0.02 is what 183 questions without a flip show with 95 % confidence, and 1,319 "
    "questions with up to 16 broken ones"
)
#: By the name under ``_name_or_path`` or the folder of a checkpoint; "*" where none is listed.
TABLE: Mapping[str, Margin] = {
    "*": Margin(0.02, _FEW_FLIPS),
}


def small_model() -> Path:
    """The folder of the model that comes with this package."""
    return Path(__file__).parent / "small_model"


def listed(name: str) -> Margin:
    """The table's entry for the model of this name."""
    return TABLE[name if name in TABLE else "*"]


@cache
def margin_of(model: str) -> Margin:
    """The margin of the model in the folder ``model``."""
    folder = Path(model)
    if folder.resolve() == small_model().resolve():
        recorded = json.loads((folder / "baseline.json").read_text(encoding="utf-8"))
        return replace(TABLE["*"], baseline=recorded["right"], shots=recorded["shots"])
    return listed(folder.name)
