"""The gate ``routing``: its oracles, and the compiled layer that it judges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from afd_testkit.engines.base import EngineConfig, EngineError, Topology
from afd_testkit.engines.reference import ReferenceEngine
from afd_testkit.gates.catalog import GATES, subjects
from afd_testkit.gates.routing_child import Order, ask
from afd_testkit.gates.routing_ids import experts_of, gated_inputs, why_uneven
from afd_testkit.gates.session import GateSession, Subject
from afd_testkit.results import CheckResult, Outcome

pytestmark = pytest.mark.cpu

SUBJECT = Subject("reference", "reference", "float64")
GATE = GATES["routing"]
CALLS = ((0, True), (0, False), (1, False), (1, True), (0, False))


def session(fault: str | None = None) -> GateSession:
    def start(config: EngineConfig) -> ReferenceEngine:
        raise LookupError(f"a layer needs no engine ({config})")

    return GateSession(start=start, paragraphs=(), fault=fault)


def checks(case: str, fault: str | None = None, subject: Subject = SUBJECT) -> list[CheckResult]:
    return list(GATE.run(session(fault), subject, case))


@pytest.mark.parametrize("case", ["guards kept", "guards dropped"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_shipped_operator_passes(case: str, dtype: str) -> None:
    found = checks(case, subject=Subject("vllm-cpu", "qwen3-moe", dtype))
    assert [(c.variant, c.outcome, c.message) for c in found] == [
        ("int32 ids", Outcome.PASSED, ""),
        ("int64 ids", Outcome.PASSED, ""),
    ]
    for check in found:
        assert check.facts == {"balanced_routing": 2, "natural_routing": 3, "compilations": 1}


# What each fault does to the five calls of one callable: which first one is wrong, and how.
@pytest.mark.parametrize(
    ("case", "fault", "said"),
    [
        # A guard on the flag compiles anew; without it the first call's branch is taken for good.
        ("guards kept", "profile-branch-in-python", "2 compilations for 5 calls"),
        ("guards dropped", "profile-branch-in-python", "call 1 (serving, input 0)"),
        ("guards dropped", "mutation-not-declared", "not defined as mutable but was mutated"),
        ("guards dropped", "balanced-while-serving", "call 1 (serving, input 0)"),
        ("guards kept", "ids-out-of-range", "ids from 0 to 9, but experts are 0 to 7"),
    ],
)
def test_how_a_fault_shows(case: str, fault: str, said: str) -> None:
    [first, second] = checks(case, fault)
    assert (first.outcome, second.outcome) == (Outcome.FAILED, Outcome.FAILED)
    assert said in first.message


def test_a_fault_shows_in_bfloat16_as_well() -> None:
    subject = Subject("vllm-cpu", "qwen3-moe", "bfloat16")
    for check in checks("guards dropped", "profile-branch-in-python", subject):
        assert check.outcome is Outcome.FAILED
        assert "call 1 (serving, input 0)" in check.message


def test_a_layer_is_computed_in_the_dtype_that_is_asked_for() -> None:
    """In bfloat16 the third logit is not told from the second, and top-k takes another expert."""
    order = Order(
        gate=[[1.0, 256.0, 257.0]],
        inputs=[[[1.0]]],
        calls=((0, False),),
        top_k=1,
        id_dtype="int64",
        guards="kept",
    )
    [exact, rounded] = ask([order, replace(order, dtype="bfloat16")], {})
    assert exact.ids == [[[2]]]
    assert rounded.ids == [[[1]]]


def test_an_undeclared_mutation_is_lost_in_compiled_code() -> None:
    """That ``opcheck`` refuses it is no formality: the compiler drops the call."""
    given = gated_inputs()
    order = Order(
        gate=given.gate.tolist(),
        inputs=[rows.tolist() for rows in given.inputs],
        calls=CALLS,
        top_k=given.top_k,
        id_dtype="int32",
        guards="kept",
        fault="mutation-not-declared",
    )
    [answer] = ask([order], {})
    assert "test_schema" in answer.contract
    assert answer.balanced == 0
    assert answer.ids[0] == given.natural(0).tolist()


def test_a_process_that_fails_says_why() -> None:
    given = gated_inputs()
    order = Order(
        gate=given.gate.tolist(),
        inputs=[given.inputs[0].tolist()],
        calls=((0, False),),
        top_k=given.top_k,
        id_dtype="float8",
        guards="kept",
    )
    with pytest.raises(EngineError, match="exit code 1") as failed:
        ask([order], {})
    assert "KeyError: 'float8'" in str(failed.value)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([[0, 1], [2, 3]], ""),
        ([[0, 1], [2, 3], [0, 1]], ""),
        ([[3, 0], [1, 2], [2, 1]], ""),
        ([[0, 1], [0, 1]], "differ by more than one"),
        ([[0, 1], [2, 4]], "ids from 0 to 4"),
        ([[0, 1], [2, -1]], "ids from -1 to 2"),
        ([[0, 0], [1, 2], [3, 1]], "the same expert twice"),
        (np.zeros((0, 2)), "no ids"),
    ],
)
def test_what_is_even_over_four_experts(ids: object, said: str) -> None:
    found = why_uneven(np.array(ids, dtype=np.int64), 4)
    assert said in found
    assert bool(found) is bool(said)


def test_logits_of_the_gated_inputs_are_exact_and_differ() -> None:
    given = gated_inputs()
    for index, rows in enumerate(given.inputs):
        logits = rows @ given.gate
        # Eighths below 2**5 have at most 8 bits, whatever the order of the sum.
        assert np.array_equal(logits * 8, np.round(logits * 8))
        assert np.abs(logits).max() < 2**5
        assert all(len(set(row)) == given.num_experts for row in logits.tolist())
        for row, chosen in zip(logits.tolist(), given.natural(index).tolist(), strict=True):
            assert chosen == sorted(range(8), key=lambda expert: -row[expert])[:2]
        assert "differ by more than one" in why_uneven(given.natural(index), given.num_experts)
    assert given.natural(0)[:33].tolist() != given.natural(1).tolist()


@pytest.mark.parametrize(
    ("subject", "cases"),
    [
        (SUBJECT, ["guards kept", "guards dropped"]),
        (Subject("vllm-cpu", "qwen3-moe", "float32"), ["guards kept", "guards dropped", "engine"]),
        (Subject("vllm-cpu", "qwen3-moe", "bfloat16"), ["guards kept", "guards dropped"]),
        (Subject("vllm-cpu", "some/checkpoint", "bfloat16"), ["guards kept", "guards dropped"]),
        (Subject("ascend", "qwen3-moe", "float32"), ["guards kept", "guards dropped"]),
        (Subject("ascend", "qwen3-moe", "float32", Topology(tensor_parallel=2)), []),
    ],
)
def test_which_cases_a_subject_gets(subject: Subject, cases: list[str]) -> None:
    assert GATE.cases_of(session(), subject) == cases


def test_every_shipped_engine_has_a_subject_for_it() -> None:
    for engine in ("reference", "vllm-cpu", "ascend"):
        assert any(GATE.cases_of(session(), subject) for subject in subjects(engine, ()))


@pytest.mark.parametrize(("model", "experts"), [("qwen3-moe", 8), ("deepseek-v3", 8)])
def test_experts_of_the_recipes(model: str, experts: int) -> None:
    assert experts_of(model) == experts


@pytest.mark.parametrize(
    "changes",
    [{"compiled": True}, {"start_fault": "mutation-not-declared"}, {"afd": (("connector", "x"),)}],
)
def test_the_reference_engine_refuses_what_it_would_ignore(changes: dict[str, object]) -> None:
    config = EngineConfig(model="reference", dtype="float64", worker="afd")
    with pytest.raises(EngineError, match="compiles nothing"):
        ReferenceEngine(replace(config, **changes))  # type: ignore[arg-type]
