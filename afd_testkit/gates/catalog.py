"""All gates, and what they judge on which engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from afd_testkit.engines.base import ONE_PROCESS, Topology
from afd_testkit.gates import chunked, external_routing, prefix_hit, routing, split, stability
from afd_testkit.gates.session import GateSession, Subject
from afd_testkit.results import CheckResult


@dataclass(frozen=True)
class Gate:
    """A gate's name, its cases and how one case is run on one subject.

    ``applies``: whether a subject can show what the gate is about; others have no such checks.
    ``case_applies``: the same of a single case.
    """

    name: str
    cases: Callable[[GateSession], list[str]]
    run: Callable[[GateSession, Subject, str], Iterator[CheckResult]]
    applies: Callable[[Subject], bool] = lambda subject: True
    case_applies: Callable[[Subject, str], bool] = lambda subject, case: True

    def cases_of(self, session: GateSession, subject: Subject) -> list[str]:
        """The cases that ``subject`` gets."""
        if not self.applies(subject):
            return []
        return [case for case in self.cases(session) if self.case_applies(subject, case)]


# In run order: gates that share engines follow each other.
GATES: Mapping[str, Gate] = {
    gate.name: gate
    for gate in (
        Gate(split.NAME, split.cases, split.run),
        Gate(prefix_hit.NAME, prefix_hit.cases, prefix_hit.run),
        Gate(stability.NAME, stability.cases, stability.run),
        Gate(chunked.NAME, chunked.cases, chunked.run),
        Gate(routing.NAME, routing.cases, routing.run, routing.applies, routing.case_applies),
        Gate(
            external_routing.NAME,
            external_routing.cases,
            external_routing.run,
            external_routing.applies,
        ),
    )
}


class Standard(NamedTuple):
    """What an engine is judged on; ``needs`` beyond the engine's own.

    ``gates``: those that it is there for; all that apply where it names none.
    """

    model: str
    dtype: str
    needs: tuple[str, ...] = ()
    topology: Topology = ONE_PROCESS
    gates: tuple[str, ...] = ()


# By engine; first what finds most.
SUBJECTS: Mapping[str, Sequence[Standard]] = {
    "reference": (
        Standard("reference", "float64"),
        Standard("reference-sigmoid", "float64"),
    ),
    "vllm-cpu": (
        Standard("deepseek-v3", "float32"),
        Standard("qwen3-moe", "float32"),
        Standard("deepseek-v3", "bfloat16"),
        Standard("deepseek-v3-mla", "bfloat16", ("amx",)),
    ),
    "ascend": (
        Standard("deepseek-v3", "float32"),
        Standard("qwen3-moe", "float32"),
        Standard(
            "deepseek-v3",
            "float32",
            topology=Topology(tensor_parallel=2, expert_parallel=True, sequence_parallel=True),
        ),
        Standard("qwen3-moe", "float32", topology=Topology(tensor_parallel=2)),
        Standard("qwen3-moe", "float32", topology=Topology(data_parallel=2, expert_parallel=True)),
        Standard(
            "deepseek-v3",
            "float32",
            topology=Topology(tensor_parallel=2, expert_parallel=True, soc="A3"),
        ),
        # Small steps exchange tokens with the MC2 kernels there, larger ones all-to-all.
        Standard(
            "qwen3-moe",
            "float32",
            topology=Topology(data_parallel=2, expert_parallel=True, soc="A3"),
            gates=(external_routing.NAME,),
        ),
    ),
}
ENGINE_NEEDS: Mapping[str, tuple[str, ...]] = {
    "reference": ("cpu",),
    "vllm-cpu": ("vllm",),
    "ascend": ("ascend",),
}
DEFAULT_ENGINE = "vllm-cpu"


def needs_of(engine: str, model: str, dtype: str) -> tuple[str, ...]:
    """Names of the needs of one subject; another project's engine needs torch at least."""
    known = (s for s in SUBJECTS.get(engine, ()) if (s.model, s.dtype) == (model, dtype))
    more = next((standard.needs for standard in known), ())
    return (*ENGINE_NEEDS.get(engine, ("cpu",)), *more)


def gates_of(subject: Subject) -> list[Gate]:
    """The gates that ``subject`` is judged by, in run order."""
    asked = [
        standard.gates
        for standard in SUBJECTS.get(subject.engine, ())
        if (standard.model, standard.dtype, standard.topology)
        == (subject.model, subject.dtype, subject.topology)
    ]
    wanted = asked[0] if asked and asked[0] else tuple(GATES)
    return [gate for gate in GATES.values() if gate.name in wanted]


def subjects(engine: str, models: Sequence[str]) -> list[Subject]:
    """What is judged on ``engine``: its standard subjects, or the given models.

    A checkpoint directory is judged in the dtype that its config.json names, a recipe in the
    dtypes of its standard subjects.
    """
    standard = SUBJECTS.get(engine, SUBJECTS[DEFAULT_ENGINE])
    if not models:
        return [Subject(engine, each.model, each.dtype, each.topology) for each in standard]
    found = []
    for model in models:
        chosen = [(each.dtype, each.topology) for each in standard if each.model == model]
        for dtype, topology in chosen or [(checkpoint_dtype(model), ONE_PROCESS)]:
            found.append(Subject(engine, model, dtype, topology))
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
