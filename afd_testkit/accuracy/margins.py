"""How far a score may fall, by model: one table, each number with its source.

There is no override and no default floor: a floor exists only where a model's own score was
recorded.  Log-probabilities have their limits in the gates' table of tolerances.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

TRUNCATED_SHARE = 0.02  # of answers cut at the token limit: beyond, the limit decides the score


class UnknownMargin(LookupError):
    """No margin is known for a model."""


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


@cache
def margin_of(model: str) -> Margin:
    """The margin of the model in the folder ``model``; raises :class:`UnknownMargin`."""
    folder = Path(model)
    if folder.resolve() == small_model().resolve():
        recorded = json.loads((folder / "baseline.json").read_text(encoding="utf-8"))
        return replace(TABLE["*"], baseline=recorded["right"], shots=recorded["shots"])
    for name in (folder.name, "*"):
        if name in TABLE:
            return TABLE[name]
    raise UnknownMargin(f"no margin for {folder.name}; known: {', '.join(sorted(TABLE))}")
