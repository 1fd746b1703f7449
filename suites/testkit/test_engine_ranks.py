"""Several ranks' observations become one, or an error that names where they disagree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from afd_testkit.engines._vllm_adapter import merged
from afd_testkit.engines._vllm_join import LayerRows, Observation, Seen, join_layer, joined
from afd_testkit.engines.base import (
    EngineConfig,
    EngineError,
    Prompt,
    RequestResult,
    RunResult,
    ScheduledRequest,
    StepRecord,
    Topology,
    refuse_topology,
)

pytestmark = pytest.mark.cpu

# Two tokens; the columns of head h are 10 h + {1, 2} for keys, 10 h + {3, 4} for values.
TOKENS = np.array([[100.0], [200.0]])


def rank_rows(heads: list[int], total: int) -> LayerRows:
    keys = [[10 * head + 1, 10 * head + 2] for head in heads]
    values = [[10 * head + 3, 10 * head + 4] for head in heads]
    columns = np.array([*np.ravel(keys), *np.ravel(values)])
    size = 2 * len(heads)
    return LayerRows(TOKENS + columns, heads=len(heads), total=total, parts=(size, size))


@pytest.mark.parametrize(
    "spread",
    [
        [[0, 1, 2, 3]],
        [[0, 1], [2, 3]],
        [[0], [1], [2], [3]],
        [[0], [0], [1], [1], [2], [2], [3], [3]],
    ],
    ids=["one rank", "two heads a rank", "one head a rank", "two ranks a head"],
)
def test_heads_come_together_in_order(spread: list[list[int]]) -> None:
    whole = join_layer("r", 0, [rank_rows(heads, 4) for heads in spread])
    assert (whole.rows == rank_rows([0, 1, 2, 3], 4).rows).all()


def test_copies_must_be_equal() -> None:
    ranks = [rank_rows([0], 2), rank_rows([0], 2), rank_rows([1], 2), rank_rows([1], 2)]
    ranks[3].rows[1, 2] += 1e-9
    with pytest.raises(
        EngineError, match=r"request r, layer 5: ranks 2 and 3 .* token 1, column 2 "
    ):
        join_layer("r", 5, ranks)


def test_latent_rows_are_replicated() -> None:
    latent = LayerRows(TOKENS + np.arange(3), heads=1, total=1, parts=(2, 1))
    other = replace(latent, rows=latent.rows.copy())
    assert (join_layer("r", 0, [latent, other]).rows == latent.rows).all()
    other.rows[0, 0] = 0
    with pytest.raises(EngineError, match="ranks 0 and 1"):
        join_layer("r", 0, [latent, other])


def observation(**changes: object) -> Observation:
    step = StepRecord(
        requests=(ScheduledRequest("r", 0, 2),),
        evidence={"plan": "digest-a"},
        forward_rows=(1, 1),
    )
    seen = Seen(chunks=[2], first=0, end=2, kv=(rank_rows([0], 1),))
    return Observation(requests={"r": seen}, steps=[replace(step, **changes)])


def test_ranks_that_agree() -> None:
    first = joined([observation(), observation(), observation()])
    assert first.steps == observation().steps
    assert (first.requests["r"].kv[0].rows == rank_rows([0], 1).rows).all()


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        (
            {"evidence": {"plan": "digest-b"}},
            ["evidence", "digest-a", "rank 2: {'plan': 'digest-b"],
        ),
        ({"forward_rows": (2,)}, ["rows through the model", "rank 0: (1, 1)", "rank 2: (2,)"]),
        ({"requests": (ScheduledRequest("s", 0, 2),)}, ["requests", "name='r'", "name='s'"]),
    ],
    ids=["evidence", "rows", "requests"],
)
def test_steps_must_be_the_same(changes: dict[str, object], shown: list[str]) -> None:
    with pytest.raises(EngineError, match="step 0: the ranks disagree in ") as caught:
        joined([observation(), observation(), observation(**changes)])
    for text in shown:
        assert text in str(caught.value)


def test_as_many_steps_on_every_rank() -> None:
    other = observation()
    other.steps.append(other.steps[0])
    with pytest.raises(EngineError, match="rank 0 executed 1 steps, rank 1 2"):
        joined([observation(), other])


def test_evidence_must_fit_the_steps() -> None:
    with pytest.raises(EngineError, match="evidence for 2 steps, but 1 were executed"):
        observation().with_evidence([{}, {}])
    assert observation().with_evidence([{"a": 1}]).steps[0].evidence == {"a": 1}


def result(name: str) -> RequestResult:
    rows = np.zeros((1, 2))
    return RequestResult(name, (1,), 0, (1,), rows, rows, (rows,), 0)


def run(names: list[str], seconds: float) -> RunResult:
    steps = tuple(StepRecord(requests=(ScheduledRequest(name, 0, 1),)) for name in names)
    return RunResult(tuple(map(result, names)), steps, seconds, {"run": 1})


def test_data_parallel_parts_come_in_prompt_order() -> None:
    whole = merged(
        [run(["a", "c"], 1.0), run(["b"], 3.0)], [Prompt(name, (1,)) for name in ("a", "b", "c")]
    )
    assert [request.name for request in whole.requests] == ["a", "b", "c"]
    assert [(step.requests[0].name, step.data_rank) for step in whole.steps] == [
        ("a", 0),
        ("c", 0),
        ("b", 1),
    ]
    assert whole.seconds == 3.0
    assert whole.facts["data_parallel_prompts"] == [["a", "c"], ["b"]]


def test_topology_in_labels() -> None:
    assert "TP" not in EngineConfig("m").label()
    spread = EngineConfig("m", tensor_parallel=2, expert_parallel=True, soc="A3")
    assert spread.topology_label() == "TP 2 + EP on A3"
    assert "m float32, TP 2 + EP on A3, stock worker" in spread.label()
    assert EngineConfig("m", soc="A3").topology_label() == "on A3"
    assert EngineConfig("m", data_parallel=2, sequence_parallel=True).ranks == 2
    assert spread.topology() == Topology(tensor_parallel=2, expert_parallel=True, soc="A3")


def test_engines_of_one_process_refuse_more() -> None:
    refuse_topology("reference", EngineConfig("m"))
    with pytest.raises(EngineError, match="reference runs in one process; DP 2 was asked for"):
        refuse_topology("reference", EngineConfig("m", data_parallel=2))
