"""One step's decision, and evidence that can be written down."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_plugin import AFDConfig, KVGroup, ScheduledBatch, SplitPlan, Unsplit, decide_step
from afd_plugin.errors import KVLayoutError
from afd_plugin.hazards import hazard_in
from afd_testkit.strategies import PagedBatch, paged_batches

pytestmark = pytest.mark.cpu

TOKEN = AFDConfig(async_moe_ubatching=True, async_moe_split="token")
# Request 0 hits block 1, which request 1 writes as its first block; six tokens.
READER_FIRST = KVGroup(4, np.array([[1, 2], [1, 3]]), np.array([8, 9, 4, 5, 6, 7]))
STEP = ScheduledBatch([2, 4], [4, 0])


def config(**options: Any) -> AFDConfig:
    return AFDConfig(async_moe_ubatching=True, **options)


def test_off_means_unsplit_whatever_the_arrays() -> None:
    decision = decide_step(STEP, AFDConfig(), [KVGroup(0, None, None)])
    assert isinstance(decision.plan, Unsplit)
    assert decision.plan.reason == "disabled"
    assert decision.hazard is None


def test_off_record() -> None:
    batch = ScheduledBatch([2, 4], [4, 0], num_input_tokens=8)
    record = (
        decide_step(batch, AFDConfig(), [])
        .evidence(
            forwards=[batch.num_input_tokens],
            completed=True,
            balanced_routing=3,
            natural_routing=2,
        )
        .as_dict()
    )
    assert record == {
        "policy": "unsplit",
        "num_reqs": 2,
        "num_tokens": 6,
        "stage_tokens": (6,),
        "stage_input_tokens": (8,),
        "cut": None,
        "cuts_request": False,
        "imbalance": None,
        "digest": None,
        "hazard": None,
        "hazard_action": None,
        "reason": "disabled",
        "detail": "async_moe_ubatching is off",
        "completed": True,
        "balanced_routing": 3,
        "natural_routing": 2,
    }


def test_split_record() -> None:
    batch = ScheduledBatch([1, 104], num_input_tokens=112)
    decision = decide_step(batch, config(async_moe_split="token", async_moe_token_alignment=8), [])
    assert isinstance(decision.plan, SplitPlan)
    record = decision.evidence(forwards=decision.planned_rows, completed=False).as_dict()
    assert record == {
        "policy": "token_balanced_tp",
        "num_reqs": 2,
        "num_tokens": 105,
        "stage_tokens": (56, 49),
        "stage_input_tokens": (56, 56),
        "cut": 56,
        "cuts_request": True,
        "imbalance": 2 * 56 / 105,
        "digest": decision.plan.digest,
        "hazard": None,
        "hazard_action": None,
        "reason": None,
        "detail": None,
        "completed": False,
        "balanced_routing": 0,
        "natural_routing": 0,
    }


def test_options_reach_the_plan() -> None:
    batch = ScheduledBatch([5, 4])
    by_request = decide_step(batch, config(), []).plan
    assert isinstance(by_request, SplitPlan)
    assert (by_request.policy, by_request.cut) == ("request_boundary", 5)
    aligned = decide_step(
        batch, config(async_moe_split="token", async_moe_token_alignment=3), []
    ).plan
    assert isinstance(aligned, SplitPlan)
    assert (aligned.policy, aligned.cut) == ("token_balanced_tp", 6)
    small = decide_step(batch, config(async_moe_min_tokens=10), []).plan
    assert isinstance(small, Unsplit)
    assert small.reason == "below_min_tokens"


def test_a_moved_cut_is_recorded_with_its_hazard() -> None:
    # Writer slots 4..7 are tokens 2..5; the reader starts at 0: cuts 1..5 all part them.
    longer = ScheduledBatch([2, 6], [4, 0])
    group = KVGroup(4, np.array([[1, 2], [1, 3]]), np.array([8, 9, 4, 5, 6, 7, 12, 13]))
    decision = decide_step(longer, TOKEN, [group])
    assert isinstance(decision.plan, SplitPlan)
    assert decision.plan.cut == 6
    assert decision.hazard is not None
    assert (decision.hazard.reader, decision.hazard.writer_token) == (0, 4)
    record = decision.evidence(forwards=decision.planned_rows, completed=True)
    assert record.hazard_action == "moved"
    assert record.hazard == str(decision.hazard)
    assert record.stage_tokens == (6, 2)
    assert record.reason is None


def test_no_safe_cut_is_recorded_with_its_hazard() -> None:
    decision = decide_step(STEP, TOKEN, [READER_FIRST])
    assert isinstance(decision.plan, Unsplit)
    assert decision.plan.reason == "kv_hazard"
    record = decision.evidence(forwards=decision.planned_rows, completed=True)
    assert record.hazard_action == "unsplit"
    assert record.hazard is not None
    assert record.hazard in str(record.detail)
    assert record.stage_tokens == (6,)
    assert record.policy == "unsplit"


def test_f1_the_step_is_never_run_as_first_planned() -> None:
    hit = list(range(1, 22))
    rows = np.array([[*hit, 30], [*hit, 31], [*hit, 40]])
    computed, scheduled = [672, 672, 0], [17, 17, 704]

    def decide(order: list[int], **options: Any) -> Any:
        slots = [
            int(rows[r, p // 32]) * 32 + p % 32
            for r in order
            for p in range(computed[r], computed[r] + scheduled[r])
        ]
        batch = ScheduledBatch([scheduled[r] for r in order], [computed[r] for r in order])
        return decide_step(batch, config(**options), [KVGroup(32, rows[order], np.array(slots))])

    moved = decide([0, 1, 2], async_moe_split="token")
    assert moved.plan.cut == 706
    assert moved.evidence(forwards=moved.planned_rows, completed=True).hazard_action == "moved"
    assert (
        "request 0 reads position 335"
        in moved.evidence(forwards=moved.planned_rows, completed=True).hazard
    )
    unsplit = decide([0, 1, 2], async_moe_split="request")
    assert unsplit.plan.reason == "kv_hazard"
    assert (
        unsplit.evidence(forwards=unsplit.planned_rows, completed=True).hazard_action == "unsplit"
    )
    aligned = decide([0, 1, 2], async_moe_split="token", async_moe_token_alignment=64)
    # Only 706 … 737 are safe, and no multiple of 64 is among them.
    assert aligned.plan.reason == "kv_hazard"
    safe = decide([2, 0, 1], async_moe_split="token")
    assert safe.plan.cut == 369
    assert safe.hazard is None


@pytest.mark.parametrize("policy", ["token", "request"])
def test_a_layout_that_does_not_fit_is_an_error_not_a_whole_step(policy: Any) -> None:
    with pytest.raises(KVLayoutError, match="slot_mapping has 3 slots"):
        decide_step(STEP, config(async_moe_split=policy), [KVGroup(4, [[1, 2], [1, 3]], [8, 9, 4])])


@given(
    paged=paged_batches(),
    policy=st.sampled_from(["token", "request"]),
    alignment=st.sampled_from([1, 2, 4, 8]),
    completed=st.booleans(),
)
@settings(deadline=None, derandomize=True, max_examples=100)
def test_whatever_is_decided_is_safe_and_says_so(
    paged: PagedBatch, policy: Any, alignment: int, completed: bool
) -> None:
    group = KVGroup(paged.block_size, paged.block_tables, paged.slot_mapping)
    decision = decide_step(
        paged.batch,
        config(async_moe_split=policy, async_moe_token_alignment=alignment),
        [group],
    )
    record = decision.evidence(forwards=decision.planned_rows, completed=completed).as_dict()
    assert json.loads(json.dumps(record))["completed"] is completed
    assert sum(record["stage_tokens"]) == record["num_tokens"] == paged.batch.num_tokens
    assert (record["hazard"] is None) == (record["hazard_action"] is None)
    if isinstance(decision.plan, SplitPlan):
        assert hazard_in(decision.plan, [group]) is None
        assert len(record["stage_tokens"]) == 2
        assert record["hazard_action"] in (None, "moved")
        assert record["reason"] is None
    else:
        assert record["stage_tokens"] == (paged.batch.num_tokens,)
        assert record["reason"] == decision.plan.reason
        assert (record["hazard_action"] == "unsplit") == (record["reason"] == "kv_hazard")


def test_evidence_counts_the_forward_passes_that_returned() -> None:
    batch = ScheduledBatch([9])
    config = AFDConfig(
        async_moe_ubatching=True, async_moe_split="token", async_moe_token_alignment=4
    )
    decision = decide_step(batch, config, [])
    assert decision.planned_rows == (4, 8)

    whole = decision.evidence(forwards=[4, 8], completed=True)
    assert (whole.stage_tokens, whole.stage_input_tokens) == ((4, 5), (4, 8))
    assert whole.completed

    half = decision.evidence(forwards=[4], completed=False)
    assert (half.stage_tokens, half.stage_input_tokens) == ((4,), (4,))

    # A runner that ran the step whole although a split was planned has not completed it.
    unsplit = decision.evidence(forwards=[9], completed=True)
    assert unsplit.stage_input_tokens == (9,)
    assert not unsplit.completed


def test_a_hazard_of_the_second_kv_group_alone_decides() -> None:
    # Group 0 shares nothing; in group 1 request 0 hits block 1, which request 1 writes.
    clean = KVGroup(4, np.array([[5, 6, 0], [7, 8, 9]]), np.array([24, 25, 28, 29, 30, 31, 32, 33]))
    shared = KVGroup(4, np.array([[1, 2], [1, 3]]), np.array([8, 9, 4, 5, 6, 7, 12, 13]))
    longer = ScheduledBatch([2, 6], [4, 0])
    assert decide_step(longer, TOKEN, [clean]).hazard is None

    moved = decide_step(longer, TOKEN, [clean, shared])
    assert isinstance(moved.plan, SplitPlan)
    # Half of 8 is cut 4; tokens 2 to 5 write what request 0 reads, so 6 is the nearest safe cut.
    assert moved.plan.cut == 6
    assert moved.hazard is not None
    assert (moved.hazard.reader, moved.hazard.writer, moved.hazard.slot) == (0, 1, 6)
    evidence = moved.evidence(forwards=moved.planned_rows, completed=True)
    assert evidence.hazard_action == "moved"

    clean = KVGroup(4, np.array([[5, 6], [7, 8]]), np.array([24, 25, 28, 29, 30, 31]))
    unsplit = decide_step(STEP, TOKEN, [clean, READER_FIRST])
    assert isinstance(unsplit.plan, Unsplit)
    assert unsplit.plan.reason == "kv_hazard"
    assert unsplit.hazard is not None
