"""What one process of an accuracy run is told, and what it leaves behind, as JSON.

A run is a list of arms on one engine: the same questions under another way of splitting, or with
a fault injected.  Every arm leaves a file when it is done, so that what is finished is kept
whatever happens later.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from afd_testkit.accuracy.task import Answer
from afd_testkit.strict_json import read_json

BASELINE = "unsplit"
SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
UNSEEN = "unseen"  # the policy of an arm behind a server
BEHIND_A_SERVER = "server"  # the engine of such arms
#: Quantities that are compared: right answers, the bound of their drop, reference answers' tokens.
SCORE, BOUND, TOKENS = "score", "score drop, 95 % bound", "logprob"
SENSITIVITY_CASE = "sensitivity"


def default_seeds() -> dict[str, int]:
    """lm-eval's four seeds where nobody states others."""
    return dict.fromkeys(SEEDS, 1234)


@dataclass(frozen=True)
class Arm:
    """``policy``: ``off``, ``request`` or ``token``, or ``unseen`` behind a server.

    ``fault``: what is injected, if anything.
    ``questions``: how many are answered, the first ones; 0 asks none.  ``teacher_forced``: of how
    many the reference answer's log-probabilities are taken.  ``backwards``: those are run in
    reverse order, so that steps hold other batches: what differs then is the engine's own noise.
    """

    name: str
    policy: str
    questions: int
    teacher_forced: int
    fault: str | None = None
    backwards: bool = False


@dataclass(frozen=True)
class Spec:
    """``task``: folder with the task's files.  ``seeds``: lm-eval's four, by name.

    ``asked``: digest of what those files hold, so that two of other questions differ.
    """

    model: str
    dtype: str
    task: str
    results: str
    shots: int
    arms: tuple[Arm, ...]
    asked: str = ""
    max_model_len: int = 1024
    max_step_tokens: int = 2048
    max_num_seqs: int = 64
    kv_cache_bytes: int = 256 << 20
    seeds: dict[str, int] = field(default_factory=default_seeds)

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Spec:
        """The inverse of :meth:`write`."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**data, "arms": tuple(Arm(**arm) for arm in data["arms"])})


def _all_of(kind: type, **types: dict[str, Any]) -> dict[str, Any]:
    """JSON Schema of an object with the fields of ``kind``, all of them and no other."""
    names = [one.name for one in fields(kind)]
    return {
        "type": "object",
        "required": names,
        "additionalProperties": False,
        "properties": {name: types.get(name, {}) for name in names},
    }


@dataclass(frozen=True)
class ArmResult:
    """What an arm gave.

    ``logprobs``: by question id, of each token of the reference answer after the same prompt, in
    nats.  ``steps``, ``split_steps``, ``cut_requests``: from the worker's own evidence.
    ``balanced_routing``: executions of the routing operator with ids that were not the router's.
    """

    arm: Arm
    answers: tuple[Answer, ...]
    logprobs: dict[str, list[float]]
    steps: int
    split_steps: int
    cut_requests: int
    balanced_routing: int
    seconds: float
    facts: dict[str, Any]

    def write(self, folder: Path) -> None:
        """As ``<name>.json``; complete or not at all."""
        path = folder / f"{self.arm.name}.json"
        half = path.with_suffix(".part")
        half.write_text(json.dumps(asdict(self)), encoding="utf-8")
        half.replace(path)

    @classmethod
    def read(cls, path: Path) -> ArmResult:
        """The inverse of :meth:`write`.  Raises ``OSError``, and ``ValueError`` for other files."""
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import best_match

        data = read_json(path.read_text(encoding="utf-8"))
        error = best_match(Draft202012Validator(_SHAPE).iter_errors(data))
        if error is not None:
            raise ValueError(f"it is no arm's result: at {error.json_path}, {error.message[:200]}")
        if not 0 <= data["seconds"] < _LONGEST:
            raise ValueError(f"it is no arm's result: at $.seconds, {data['seconds']!r:.60}")
        try:
            logprobs = {name: [float(v) for v in vs] for name, vs in data["logprobs"].items()}
        except OverflowError as error:
            raise ValueError(f"it is no arm's result: at $.logprobs, {error}") from error
        return cls(
            **{
                **data,
                "logprobs": logprobs,
                "arm": Arm(**data["arm"]),
                "answers": tuple(Answer(**one) for one in data["answers"]),
            }
        )

    def right(self, by: str = "strict") -> dict[str, bool]:
        """By question id, whether the answer is right by the filter ``strict`` or ``flexible``."""
        return {one.id: getattr(one, by) for one in self.answers}


_LONGEST = 1e9  # seconds
_TEXT, _YES_OR_NO, _SECONDS = {"type": "string"}, {"type": "boolean"}, {"type": "number"}
_COUNT = {"type": "integer", "minimum": 0}
_COUNTED = ("steps", "split_steps", "cut_requests", "balanced_routing")
_SHAPE = _all_of(
    ArmResult,
    arm=_all_of(
        Arm,
        name=_TEXT,
        policy=_TEXT,
        questions=_COUNT,
        teacher_forced=_COUNT,
        fault={"type": ["string", "null"]},
        backwards=_YES_OR_NO,
    ),
    answers={
        "type": "array",
        "items": _all_of(
            Answer,
            **dict.fromkeys(("id", "text", "got", "question"), _TEXT),
            **dict.fromkeys(("strict", "flexible", "truncated"), _YES_OR_NO),
        ),
    },
    logprobs={
        "type": "object",
        "additionalProperties": {"type": "array", "items": {"type": "number"}},
    },
    **dict.fromkeys(_COUNTED, _COUNT),
    seconds=_SECONDS,
    facts={"type": "object"},
)
