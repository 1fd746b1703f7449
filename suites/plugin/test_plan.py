"""Plans against a brute force over every cut, public cases, determinism and refusals."""

from __future__ import annotations

import hashlib
import json
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from afd_plugin import ScheduledBatch, SplitPlan, Unsplit, plan_split, split_at
from afd_plugin.errors import PlanError
from afd_testkit.strategies import batches, batches_with_cut

pytestmark = pytest.mark.cpu

examples = settings(deadline=None, derandomize=True, max_examples=100)


# --- oracles, from the definitions ------------------------------------------------------


def best(candidates: list[int], tokens: int) -> int | None:
    """The candidate nearest to half of the tokens, the later one of two that are as near."""
    half = Fraction(tokens, 2)
    return min(candidates, key=lambda cut: (abs(cut - half), -cut), default=None)


def token_cut(scheduled: list[int], alignment: int) -> int | None:
    tokens = sum(scheduled)
    return best([c for c in range(1, tokens) if c % alignment == 0], tokens)


def request_cut(scheduled: list[int]) -> int | None:
    """The boundary whose two sides differ least, the later one of two that differ as much."""
    found: tuple[int, int] | None = None
    for count in range(1, len(scheduled)):
        left, right = sum(scheduled[:count]), sum(scheduled[count:])
        if found is None or abs(left - right) <= found[0]:
            found = (abs(left - right), left)
    return None if found is None else found[1]


def owners(scheduled: list[int]) -> list[int]:
    return [request for request, count in enumerate(scheduled) for _ in range(count)]


def rounded_up(tokens: int, alignment: int) -> int:
    while tokens % alignment:
        tokens += 1
    return tokens


def check_stages(plan: SplitPlan, cut: int, alignment: int) -> None:
    """Everything that a plan says, from its cut alone."""
    scheduled = plan.batch.num_scheduled_tokens.tolist()
    owner = owners(scheduled)
    assert plan.cut == cut
    assert plan.alignment == alignment
    for stage, (begin, end) in zip(plan.stages, [(0, cut), (cut, len(owner))], strict=True):
        assert stage.token_slice == slice(begin, end)
        assert stage.request_slice == slice(owner[begin], owner[end - 1] + 1)
        assert stage.num_tokens == end - begin > 0
        assert stage.num_input_tokens == rounded_up(end - begin, alignment)
    assert plan.cuts_request == (owner[cut - 1] == owner[cut])
    larger = max(cut, len(owner) - cut)
    assert plan.imbalance == pytest.approx(larger / (len(owner) / 2), abs=1e-12)
    assert 1.0 <= plan.imbalance < 2.0


def whole_numbers(plan: SplitPlan) -> None:
    """Plain Python integers throughout: a plan goes into JSON and between ranks."""
    parts = [plan.cut, plan.alignment]
    for stage in plan.stages:
        parts += [stage.num_tokens, stage.num_input_tokens]
        parts += [stage.token_slice.start, stage.token_slice.stop]
        parts += [stage.request_slice.start, stage.request_slice.stop]
    assert {type(part) for part in parts} == {int}
    assert type(plan.cuts_request) is bool
    json.dumps(parts)


# --- policies ---------------------------------------------------------------------------


@given(batch=batches(), alignment=st.one_of(st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 90)))
@examples
def test_token_policy(batch: ScheduledBatch, alignment: int) -> None:
    assume(not batch.is_decode_only)
    plan = plan_split(batch, policy="token", alignment=alignment)
    cut = token_cut(batch.num_scheduled_tokens.tolist(), alignment)
    if cut is None:
        assert isinstance(plan, Unsplit)
        assert plan.reason == ("one_token" if batch.num_tokens == 1 else "no_aligned_cut")
        assert str(batch.num_tokens) in plan.detail or plan.reason == "one_token"
    else:
        assert isinstance(plan, SplitPlan)
        assert plan.policy == "token_balanced_tp"
        check_stages(plan, cut, alignment)
        whole_numbers(plan)
        assert plan.stages[0].num_input_tokens == plan.stages[0].num_tokens  # no padding there


@given(batch=batches(), alignment=st.integers(1, 16))
@examples
def test_request_policy(batch: ScheduledBatch, alignment: int) -> None:
    assume(not batch.is_decode_only)
    plan = plan_split(batch, policy="request", alignment=alignment)
    cut = request_cut(batch.num_scheduled_tokens.tolist())
    if cut is None:
        assert isinstance(plan, Unsplit)
        assert plan.reason == ("one_token" if batch.num_tokens == 1 else "one_request")
    else:
        assert isinstance(plan, SplitPlan)
        assert plan.policy == "request_boundary"
        check_stages(plan, cut, alignment)
        whole_numbers(plan)
        assert plan.cuts_request is False


@given(case=batches_with_cut(), alignment=st.integers(1, 16))
@examples
def test_given_cut(case: tuple[ScheduledBatch, int], alignment: int) -> None:
    batch, cut = case
    plan = split_at(batch, cut, alignment)
    assert plan.policy == "given"
    check_stages(plan, cut, alignment)
    whole_numbers(plan)


def test_every_cut_of_a_small_step() -> None:
    batch = ScheduledBatch([1, 3, 1, 1, 4])
    for cut in range(1, 10):
        for alignment in range(1, 12):
            check_stages(split_at(batch, cut, alignment), cut, alignment)


def test_request_is_the_default_policy() -> None:
    plan = plan_split(ScheduledBatch([5, 6]))
    assert isinstance(plan, SplitPlan)
    assert (plan.policy, plan.cut) == ("request_boundary", 5)


@pytest.mark.parametrize(
    ("tokens", "alignment", "cut"),
    [(2, 1, 1), (3, 1, 2), (5, 1, 3), (6, 2, 4), (12, 4, 8), (6, 4, 4), (7, 6, 6), (16, 8, 8)],
)
def test_ties_go_to_the_later_cut(tokens: int, alignment: int, cut: int) -> None:
    plan = plan_split(ScheduledBatch([tokens]), policy="token", alignment=alignment)
    assert isinstance(plan, SplitPlan)
    assert plan.cut == cut


@pytest.mark.parametrize(
    ("scheduled", "cut"), [([2, 4, 2], 6), ([1, 1, 1], 2), ([5, 5], 5), ([1, 8, 1], 9)]
)
def test_ties_go_to_the_later_boundary(scheduled: list[int], cut: int) -> None:
    plan = plan_split(ScheduledBatch(scheduled), policy="request")
    assert isinstance(plan, SplitPlan)
    assert plan.cut == cut


@given(batch=batches(padding=False), extra=st.integers(0, 100))
@examples
def test_padding_of_the_step_never_moves_the_cut(batch: ScheduledBatch, extra: int) -> None:
    padded = ScheduledBatch(
        batch.num_scheduled_tokens,
        batch.num_computed_tokens,
        is_prefilling=batch.is_prefilling,
        num_input_tokens=batch.num_tokens + extra,
    )
    for policy in ("token", "request"):
        bare, wide = (plan_split(b, policy=policy, alignment=4) for b in (batch, padded))
        assert type(bare) is type(wide)
        if isinstance(bare, SplitPlan) and isinstance(wide, SplitPlan):
            assert bare.stages == wide.stages


# --- limits of size ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["token", "request"])
def test_the_largest_step(policy: Any) -> None:
    tokens = 2**31 - 1
    batch = ScheduledBatch(np.array([2**30, 2**30 - 1], dtype=np.int32))
    plan = plan_split(batch, policy=policy, alignment=8)
    assert isinstance(plan, SplitPlan)
    assert plan.cut == 2**30
    assert [stage.num_tokens for stage in plan.stages] == [2**30, tokens - 2**30]
    assert plan.stages[1].num_input_tokens == 2**30


def test_the_most_requests() -> None:
    batch = ScheduledBatch(np.ones(65_536, dtype=np.int32))
    for policy in ("token", "request"):
        plan = plan_split(batch, policy=policy)
        assert isinstance(plan, SplitPlan)
        assert plan.cut == 32_768
        assert plan.stages[1].request_slice == slice(32_768, 65_536)


# --- reasons not to split ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "options", "reason", "said"),
    [
        (ScheduledBatch([1]), {"policy": "token"}, "one_token", "one"),
        (ScheduledBatch([1]), {"policy": "request"}, "one_token", "one"),
        (ScheduledBatch([9]), {"policy": "request"}, "one_request", "9 tokens"),
        (ScheduledBatch([3]), {"policy": "token", "alignment": 4}, "no_aligned_cut", "4"),
        (ScheduledBatch([4]), {"policy": "token", "alignment": 4}, "no_aligned_cut", "4"),
        (ScheduledBatch([1, 1], [5, 6]), {"policy": "token"}, "decode_only", "2 requests"),
        (ScheduledBatch([1], [5]), {"policy": "request"}, "decode_only", "1 requests"),
        (ScheduledBatch([4, 5]), {"min_tokens": 10}, "below_min_tokens", "9"),
        (
            ScheduledBatch([4, 4], [9, 9], is_prefilling=[False, False]),
            {"policy": "token"},
            "decode_only",
            "2 requests",
        ),
    ],
)
def test_reason(batch: ScheduledBatch, options: Any, reason: str, said: str) -> None:
    plan = plan_split(batch, **options)
    assert isinstance(plan, Unsplit)
    assert plan.batch is batch
    assert plan.reason == reason
    assert said in plan.detail


def test_min_tokens_counts_real_tokens() -> None:
    batch = ScheduledBatch([4, 5], num_input_tokens=64)
    assert isinstance(plan_split(batch, min_tokens=10), Unsplit)
    assert isinstance(plan_split(batch, min_tokens=9), SplitPlan)


def test_a_last_prompt_token_known_to_be_one_is_split() -> None:
    batch = ScheduledBatch([1, 1], [5, 6], is_prefilling=[True, False])
    assert isinstance(plan_split(batch, policy="token"), SplitPlan)


# --- public cases -----------------------------------------------------------------------


def test_c1_padding_belongs_to_the_last_stage() -> None:
    plan = plan_split(ScheduledBatch([105]), policy="token", alignment=8)
    assert isinstance(plan, SplitPlan)
    assert plan.cut == 56
    assert [stage.num_tokens for stage in plan.stages] == [56, 49]
    assert [stage.num_input_tokens for stage in plan.stages] == [56, 56]
    assert [stage.num_input_tokens // 8 for stage in plan.stages] == [7, 7]


def test_c2_attention_sees_real_tokens_only() -> None:
    plan = plan_split(ScheduledBatch([1, 1068]), policy="token", alignment=2)
    assert isinstance(plan, SplitPlan)
    assert plan.cut == 534
    assert [stage.num_tokens for stage in plan.stages] == [534, 535]
    assert [stage.num_input_tokens for stage in plan.stages] == [534, 536]


def test_c3_cut_on_real_tokens() -> None:
    plan = plan_split(ScheduledBatch([5], num_input_tokens=16), policy="token")
    assert isinstance(plan, SplitPlan)
    assert [stage.num_tokens for stage in plan.stages] == [3, 2]
    one = plan_split(ScheduledBatch([1], num_input_tokens=16), policy="token")
    assert isinstance(one, Unsplit)
    assert one.reason == "one_token"
    three = plan_split(ScheduledBatch([3], num_input_tokens=16), policy="token", alignment=4)
    assert isinstance(three, Unsplit)
    assert three.reason == "no_aligned_cut"


def test_d2_no_stage_is_longer_than_its_tokens_need() -> None:
    batch = ScheduledBatch([38, 2], num_input_tokens=112)
    plan = plan_split(batch, policy="token", alignment=2)
    assert isinstance(plan, SplitPlan)
    assert [stage.num_tokens for stage in plan.stages] == [20, 20]
    assert [stage.num_input_tokens for stage in plan.stages] == [20, 20]
    by_request = plan_split(batch, policy="request", alignment=2)
    assert isinstance(by_request, SplitPlan)
    assert [stage.num_input_tokens for stage in by_request.stages] == [38, 2]


# --- determinism ------------------------------------------------------------------------


def test_digest_of_one_plan_written_out_by_hand() -> None:
    batch = ScheduledBatch([3, 200, 17], [0, 64, 0], num_input_tokens=224)
    by_hand = hashlib.sha256(
        b"afd-plan-1:given:110:2:224:"
        + struct.pack("<3q", 3, 200, 17)
        + struct.pack("<3q", 0, 64, 0)
        + bytes([0b11100000])
    )
    assert split_at(batch, 110, 2).digest == by_hand.hexdigest()


FORMS = (
    list,
    lambda v: np.array(v, dtype=np.int32),
    lambda v: np.array(v, dtype=np.uint16),
    lambda v: torch.tensor(v, dtype=torch.int64),
)


@given(batch=batches(), forms=st.tuples(st.sampled_from(FORMS), st.sampled_from(FORMS)))
@examples
def test_digest_is_of_the_integers_not_of_their_form(
    batch: ScheduledBatch, forms: tuple[Any, Any]
) -> None:
    assume(batch.num_tokens > 1)
    other = ScheduledBatch(
        forms[0](batch.num_scheduled_tokens.tolist()),
        forms[1](batch.num_computed_tokens.tolist()),
        is_prefilling=batch.is_prefilling.tolist(),
        num_input_tokens=batch.num_input_tokens,
    )
    first, second = split_at(batch, 1), split_at(other, np.int32(1), np.int64(1))
    assert first.digest == second.digest
    assert first == second
    assert hash(first) == hash(second)


@given(data=st.data(), case=batches_with_cut(max_requests=4))
@examples
def test_digest_differs_when_any_integer_differs(
    data: st.DataObject, case: tuple[ScheduledBatch, int]
) -> None:
    batch, cut = case
    values: dict[str, Any] = {
        "scheduled": batch.num_scheduled_tokens.tolist(),
        "computed": batch.num_computed_tokens.tolist(),
        "flags": batch.is_prefilling.tolist(),
        "extent": batch.num_input_tokens + 1,
        "cut": cut,
        "alignment": 2,
    }

    def plan() -> SplitPlan:
        rebuilt = ScheduledBatch(
            values["scheduled"],
            values["computed"],
            is_prefilling=values["flags"],
            num_input_tokens=values["extent"],
        )
        return split_at(rebuilt, values["cut"], values["alignment"])

    before = plan()
    name = data.draw(st.sampled_from(sorted(values)))
    if name in ("extent", "alignment"):
        values[name] += 1
    elif name == "cut":
        values[name] = data.draw(st.integers(1, batch.num_tokens - 1))
        assume(values[name] != cut)
    else:
        request = data.draw(st.integers(0, batch.num_reqs - 1))
        old = values[name][request]
        values[name][request] = (not old) if name == "flags" else old + 1
    after = plan()
    assert before.digest != after.digest
    assert before != after


def test_digest_differs_between_policies_at_the_same_cut() -> None:
    batch = ScheduledBatch([4, 4])
    plans = [plan_split(batch, "token"), plan_split(batch, "request"), split_at(batch, 4)]
    digests = {plan.digest for plan in plans if isinstance(plan, SplitPlan)}
    assert len(digests) == 3


def test_moving_tokens_between_neighbours_changes_the_digest() -> None:
    plans = {split_at(ScheduledBatch(s, c), 2).digest for s, c in [
        ([2, 3], [0, 0]), ([3, 2], [0, 0]), ([2, 3], [1, 0]), ([2, 3], [0, 1]), ([5], [0]),
    ]}  # fmt: skip
    assert len(plans) == 5


def test_a_plan_is_no_other_thing() -> None:
    plan = split_at(ScheduledBatch([4]), 2)
    assert plan != plan.digest
    assert plan != Unsplit(plan.batch, "x", "y")


@pytest.mark.parametrize("policy", ["token", "request", "given"])
def test_moved_keeps_all_but_the_cut(policy: Any) -> None:
    batch = ScheduledBatch([4, 4, 4])
    plan = split_at(batch, 5, 3) if policy == "given" else plan_split(batch, policy, 3)
    assert isinstance(plan, SplitPlan)
    moved = plan.moved(4)
    assert moved.policy == plan.policy
    check_stages(moved, 4, 3)


# --- refusals ---------------------------------------------------------------------------

BATCH = ScheduledBatch([300])


@pytest.mark.parametrize(
    "policy", ["", "tokens", "TOKEN", "given", "request_boundary", None, 1, True, b"token"]
)
def test_unknown_policy(policy: Any) -> None:
    with pytest.raises(PlanError, match=r"policy is .*'request', 'token'") as caught:
        plan_split(BATCH, policy=policy)
    assert repr(policy) in str(caught.value)


@pytest.mark.parametrize("policy", [["token"], {}, {"token"}], ids=str)
def test_unhashable_policy(policy: Any) -> None:
    with pytest.raises(PlanError, match="policy is"):
        plan_split(BATCH, policy=policy)


NOT_WHOLE = [0, -1, 1.5, 2.0, True, False, "2", None, float("nan"), [2], np.float64(2), np.bool_(1)]


@pytest.mark.parametrize("value", NOT_WHOLE, ids=repr)
@pytest.mark.parametrize("name", ["alignment", "min_tokens"])
def test_numbers_that_must_be_whole_and_positive(name: str, value: Any) -> None:
    with pytest.raises(PlanError, match=f"{name} is .*1 or more") as caught:
        plan_split(BATCH, policy="token", **{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", NOT_WHOLE, ids=repr)
def test_alignment_of_a_given_cut(value: Any) -> None:
    with pytest.raises(PlanError, match="alignment is"):
        split_at(BATCH, 10, alignment=value)


@pytest.mark.parametrize("cut", [0, 300, 301, -1, -299, 2**40, np.int64(300)])
def test_cut_outside_of_the_step(cut: Any) -> None:
    with pytest.raises(PlanError, match=rf"cut is {int(cut)}; .*\(0, 300\)"):
        split_at(BATCH, cut)


@pytest.mark.parametrize(
    "cut", [1.0, True, "1", None, [1], float("nan"), torch.tensor(1)], ids=repr
)
def test_cut_that_is_no_whole_number(cut: Any) -> None:
    with pytest.raises(PlanError, match=r"cut is .*whole number"):
        split_at(BATCH, cut)


def test_a_single_token_has_no_cut() -> None:
    with pytest.raises(PlanError, match=r"\(0, 1\)"):
        split_at(ScheduledBatch([1]), 1)


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint64])
def test_alignment_of_a_numpy_kind(kind: Any) -> None:
    for policy in ("token", "request"):
        batch = ScheduledBatch([150, 151])
        plan = plan_split(batch, policy=policy, alignment=kind(100), min_tokens=kind(100))
        assert isinstance(plan, SplitPlan)
        check_stages(plan, {"token": 200, "request": 150}[policy], 100)
        whole_numbers(plan)


@pytest.mark.parametrize("alignment", [np.uint8(128), np.int32(2**30), 2**30, 2**62])
def test_an_alignment_whose_double_overflows_its_kind(alignment: Any) -> None:
    plan = plan_split(ScheduledBatch([100]), policy="token", alignment=alignment)
    assert isinstance(plan, Unsplit)
    assert plan.reason == "no_aligned_cut"
