"""Gates on a data-parallel engine: every rank runs every prompt, and none may differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from afd_testkit.engines.base import (
    EngineConfig,
    Prompt,
    RequestResult,
    RunResult,
    ScheduledRequest,
    SplitSetting,
    StepRecord,
    Topology,
)
from afd_testkit.gates.check import Check
from afd_testkit.gates.every_rank import RANK_DIFFERENCE, EveryRank
from afd_testkit.gates.realized import Requirement
from afd_testkit.gates.session import GateSession, Subject

pytestmark = pytest.mark.cpu

TWO = Topology(data_parallel=2, expert_parallel=True)
PROMPTS = (Prompt("a", (1, 2)), Prompt("b", (3,)))


class TwoRanks:
    """Deals prompts out in turn, as data-parallel engines do; rank 1 is off by ``error``."""

    name = "two"
    config = EngineConfig("m", data_parallel=2)

    def __init__(self, error: float = 0.0) -> None:
        self.error = error
        self.seen: list[list[str]] = []

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        split: SplitSetting = SplitSetting(),  # noqa: B008
        fault: str | None = None,
    ) -> RunResult:
        self.seen = [[prompt.name for prompt in prompts[rank::2]] for rank in range(2)]
        steps = [
            StepRecord(
                requests=tuple(
                    ScheduledRequest(p.name, 0, len(p.token_ids)) for p in prompts[rank::2]
                ),
                forward_rows=(sum(len(p.token_ids) for p in prompts[rank::2]),),
                data_rank=rank,
            )
            for rank in range(2)
        ]
        return RunResult(
            tuple(self._request(prompt, i % 2) for i, prompt in enumerate(prompts)),
            tuple(steps),
            1.0,
        )

    def _request(self, prompt: Prompt, rank: int) -> RequestResult:
        rows = np.full((len(prompt.token_ids), 2), rank * self.error)
        count = len(prompt.token_ids)
        return RequestResult(prompt.name, prompt.token_ids, 0, (count,), rows, rows, (rows,), 0)


def test_every_rank_gets_every_prompt() -> None:
    engine = TwoRanks()
    result = EveryRank(engine).run(PROMPTS)  # type: ignore[arg-type]
    assert engine.seen == [["a", "b"], ["a@1", "b@1"]]
    assert [request.name for request in result.requests] == ["a", "b"]
    rows = [[row.name for row in step.requests] for step in result.steps]
    assert rows == [["a", "b"], ["a", "b"]]
    assert [step.data_rank for step in result.steps] == [0, 1]
    assert result.facts[RANK_DIFFERENCE] == 0


@pytest.mark.parametrize(("error", "fails"), [(0.0, False), (9e-6, False), (2e-5, True)])
def test_a_rank_that_differs_fails_the_check(error: float, fails: bool) -> None:
    """The float32 tolerance is 1e-5."""
    session = GateSession(start=lambda config: TwoRanks(error), paragraphs=())  # type: ignore
    subject = Subject("two", "m", "float32", TWO)
    check = Check(session, "split", subject, "case", "variant")
    engine = session.stock(subject)
    if fails:
        with pytest.raises(Requirement, match="ranks ran the same prompts; they differ by 2e-05"):
            check.run(engine, PROMPTS, SplitSetting())
    else:
        check.run(engine, PROMPTS, SplitSetting())
    assert check.facts[RANK_DIFFERENCE] == error


def test_one_rank_is_left_alone() -> None:
    engine = TwoRanks()
    session = GateSession(start=lambda config: engine, paragraphs=())  # type: ignore
    assert session.stock(Subject("two", "m", "float32")) is engine


def test_a_subject_says_its_engine_and_alignment() -> None:
    spread = replace(TWO, tensor_parallel=4, sequence_parallel=True)
    subject = Subject("ascend", "m", "float32", spread)
    config = subject.config(worker="afd")
    assert (config.block_size, config.worker, config.topology()) == (128, "afd", spread)
    assert subject.realized(SplitSetting("token", 6)) == SplitSetting("token", 12)
    plain = Subject("vllm-cpu", "m", "float32")
    assert plain.config().block_size == 32
    assert plain.realized(SplitSetting("token", 6)) == SplitSetting("token", 6)
