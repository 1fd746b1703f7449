"""Two stages in order, each within its own scopes, whatever goes wrong and wherever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_plugin import ScheduledBatch, run_stages, split_at
from afd_plugin.context import current_stage
from afd_plugin.errors import StageTensorError, StateRestoreError
from afd_testkit.strategies import batches_with_cut

pytestmark = pytest.mark.cpu

PLAN = split_at(ScheduledBatch([3, 4]), 5)
IDS = torch.arange(1, 8)


class World:
    """Global state that each stage replaces, and a log of what happened."""

    def __init__(self) -> None:
        self.context: Any = "step"
        self.log: list[str] = []
        self.leave_error: dict[int, BaseException] = {}
        self.enter_error: dict[int, BaseException] = {}
        self.forward_error: dict[int, BaseException] = {}

    @contextmanager
    def scope(self, stage: int) -> Iterator[None]:
        before = self.context
        if stage in self.enter_error:
            raise self.enter_error[stage]
        self.context = f"stage {stage}"
        self.log.append(f"enter {stage}")
        try:
            yield
        finally:
            self.context = before
            self.log.append(f"leave {stage}")
            if stage in self.leave_error:
                raise self.leave_error[stage]

    def scopes(self, stage: int, inputs: Any = None) -> list[Any]:
        return [self.scope(stage)]

    def forward(self, stage: int, inputs: Any) -> Any:
        assert self.context == f"stage {stage}"
        assert current_stage() == stage
        self.log.append(f"run {stage} {inputs['input_ids'].tolist()}")
        if stage in self.forward_error:
            raise self.forward_error[stage]
        return inputs["input_ids"] * 10

    def run(self, **inputs: Any) -> Any:
        return run_stages(PLAN, inputs or {"input_ids": IDS}, self.forward, self.scopes)

    def untouched(self) -> bool:
        return self.context == "step" and current_stage() is None


@pytest.fixture
def world() -> World:
    return World()


def test_order(world: World) -> None:
    assert world.run().tolist() == [10, 20, 30, 40, 50, 60, 70]
    assert world.log == [
        "enter 0",
        "run 0 [1, 2, 3, 4, 5]",
        "leave 0",
        "enter 1",
        "run 1 [6, 7]",
        "leave 1",
    ]
    assert world.untouched()


def test_without_scopes() -> None:
    seen: list[Any] = []

    def forward(stage: int, inputs: Any) -> Any:
        seen.append((stage, current_stage()))
        return inputs["input_ids"]

    assert torch.equal(run_stages(PLAN, {"input_ids": IDS}, forward), IDS)
    assert seen == [(0, 0), (1, 1)]


ERRORS = [ValueError("boom"), KeyboardInterrupt(), SystemExit(1)]
# Python itself turns a StopIteration that leaves a generator scope into another error.
FAILURES = [(where, error) for where in ("enter", "forward", "leave") for error in ERRORS]
FAILURES.append(("forward", StopIteration(2)))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(
    ("where", "error"), FAILURES, ids=[f"{where}-{type(e).__name__}" for where, e in FAILURES]
)
def test_an_error_surfaces_and_state_is_back(
    world: World, where: str, stage: int, error: BaseException
) -> None:
    getattr(world, f"{where}_error")[stage] = error
    # A restore that fails on its own is its own kind of error: the state is not known any more.
    kind = StateRestoreError if where == "leave" else type(error)
    with pytest.raises(kind) as caught:
        world.run()
    if where == "leave":
        assert type(error).__name__ in str(caught.value)
    else:
        assert caught.value is error
    assert world.untouched()
    assert sum("enter" in line for line in world.log) == sum("leave" in line for line in world.log)
    if stage == 0:
        assert not any(line.endswith(" 1") or "run 1" in line for line in world.log)


@pytest.mark.parametrize("stage", [0, 1])
def test_forward_and_restore_both_fail(world: World, stage: int) -> None:
    world.forward_error[stage] = KeyError("forward")
    world.leave_error[stage] = OSError("stuck")
    with pytest.raises(KeyError, match="forward") as caught:
        world.run()
    assert caught.value.__notes__ == ["and state could not be put back: OSError('stuck')"]
    assert world.untouched()


@pytest.mark.parametrize("stage", [0, 1])
def test_scopes_that_cannot_be_made(world: World, stage: int) -> None:
    def scopes(index: int, inputs: Any) -> list[Any]:
        if index == stage:
            raise LookupError("no metadata")
        return world.scopes(index)

    with pytest.raises(LookupError, match="no metadata"):
        run_stages(PLAN, {"input_ids": IDS}, world.forward, scopes)
    assert world.untouched()


def test_an_error_while_slicing_enters_nothing(world: World) -> None:
    with pytest.raises(StageTensorError, match="input_ids"):
        world.run(input_ids=IDS[:3])
    assert world.log == []
    assert world.untouched()


def test_an_error_while_merging_comes_after_both_stages(world: World) -> None:
    def forward(stage: int, inputs: Any) -> Any:
        world.forward(stage, inputs)
        return "nonsense"

    with pytest.raises(StageTensorError, match="output of stage 0 is 'nonsense'"):
        run_stages(PLAN, {"input_ids": IDS}, forward, world.scopes)
    assert [line for line in world.log if "leave" in line] == ["leave 0", "leave 1"]
    assert world.untouched()


def test_a_second_run_after_a_failed_one(world: World) -> None:
    world.forward_error[1] = ValueError("boom")
    with pytest.raises(ValueError, match="boom"):
        world.run()
    world.forward_error.clear()
    assert world.run().tolist() == [10, 20, 30, 40, 50, 60, 70]


def test_scopes_of_the_second_stage_are_made_after_the_first_is_left(world: World) -> None:
    def scopes(stage: int, inputs: Any) -> list[Any]:
        world.log.append(f"scopes {stage} in {world.context!r}")
        return world.scopes(stage)

    run_stages(PLAN, {"input_ids": IDS}, world.forward, scopes)
    assert "scopes 1 in 'step'" in world.log
    assert world.log.index("leave 0") < world.log.index("scopes 1 in 'step'")


@given(
    case=batches_with_cut(max_requests=4, max_scheduled=20), alignment=st.sampled_from([1, 2, 4, 8])
)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_a_token_wise_model_does_not_notice_the_split(case: Any, alignment: int) -> None:
    batch, cut = case
    plan = split_at(batch, cut, alignment)
    hidden = torch.arange(batch.num_tokens * 2, dtype=torch.float64).reshape(-1, 2) + 1
    positions = torch.arange(3 * batch.num_tokens).reshape(3, -1)

    def model(hidden_states: Any, positions: Any, residual: Any) -> Any:
        assert residual is None
        return hidden_states * 3 + positions.sum(0)[:, None], hidden_states.sum(1)

    inputs = {"hidden_states": hidden, "positions": positions, "residual": None}
    merged = run_stages(plan, inputs, lambda stage, values: model(**values))
    whole = model(**inputs)
    for got, expected in zip(merged, whole, strict=True):
        assert torch.equal(got[: batch.num_tokens], expected)
        assert got.shape[0] == batch.num_input_tokens
        assert not got[batch.num_tokens :].any()
