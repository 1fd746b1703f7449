"""Merged outputs: logical order, structure, padding, and outputs that do not fit."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_plugin import ScheduledBatch, merge_stage_outputs, split_at
from afd_plugin.errors import StageTensorError
from afd_testkit.strategies import batches_with_cut

pytestmark = pytest.mark.cpu

PLAN = split_at(ScheduledBatch([3, 4]), 5)  # stages of 5 and 2 tokens
PADDED = split_at(ScheduledBatch([3, 4], num_input_tokens=9), 5, 4)  # 8 and 4 rows, 9 in all


def rows(start: int, count: int, width: int = 2) -> torch.Tensor:
    return torch.arange(start * width, (start + count) * width).reshape(count, width)


FIRST, SECOND = rows(1, 5), rows(6, 2)
WHOLE = rows(1, 7)


@given(
    case=batches_with_cut(max_requests=4, max_scheduled=20), alignment=st.sampled_from([1, 2, 4, 8])
)
@settings(deadline=None, derandomize=True, max_examples=100)
def test_real_tokens_in_order_then_zeros(case: Any, alignment: int) -> None:
    batch, cut = case
    plan = split_at(batch, cut, alignment)
    outputs, number = [], 0
    for tokens in (cut, batch.num_tokens - cut):
        real = list(range(number + 1, number + tokens + 1))
        number += tokens
        outputs.append(torch.tensor(real + [-1] * (-tokens % alignment)))
    merged = merge_stage_outputs(plan, outputs)
    padding = batch.num_input_tokens - batch.num_tokens
    assert merged.tolist() == [*range(1, batch.num_tokens + 1), *[0] * padding]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.bool])
def test_type_is_kept(dtype: torch.dtype) -> None:
    merged = merge_stage_outputs(PADDED, [rows(0, 8).to(dtype), rows(0, 4).to(dtype)])
    assert merged.dtype == dtype
    assert tuple(merged.shape) == (9, 2)


def test_merged_storage_is_its_own() -> None:
    first = FIRST.clone()
    merged = merge_stage_outputs(PLAN, [first, SECOND])
    first.fill_(-7)
    assert torch.equal(merged, WHOLE)


@pytest.mark.parametrize("kind", [tuple, list])
def test_sequences(kind: Any) -> None:
    merged = merge_stage_outputs(PLAN, [kind([FIRST, None]), kind([SECOND, None])])
    assert type(merged) is kind
    assert torch.equal(merged[0], WHOLE)
    assert merged[1] is None


class Output(NamedTuple):
    """A model output with names."""

    hidden: Any
    residual: Any


def test_named_tuples() -> None:
    merged = merge_stage_outputs(PLAN, [Output(FIRST, FIRST + 1), Output(SECOND, SECOND + 1)])
    assert type(merged) is Output
    assert torch.equal(merged.hidden, WHOLE)
    assert torch.equal(merged.residual, WHOLE + 1)


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_mappings_use_the_declared_axis(kind: Any) -> None:
    first = kind(hidden_states=FIRST, positions=FIRST.t(), residual=None)
    second = kind(hidden_states=SECOND, positions=SECOND.t(), residual=None)
    merged = merge_stage_outputs(PLAN, [first, second])
    assert torch.equal(merged["hidden_states"], WHOLE)
    assert torch.equal(merged["positions"], WHOLE.t())
    assert merged["residual"] is None


def test_mappings_agree_by_name_not_by_order() -> None:
    first = {"hidden_states": FIRST, "residual": FIRST + 1}
    second = {"residual": SECOND + 1, "hidden_states": SECOND}
    merged = merge_stage_outputs(PLAN, [first, second])
    assert torch.equal(merged["hidden_states"], WHOLE)
    assert torch.equal(merged["residual"], WHOLE + 1)


def test_nothing_from_either_stage() -> None:
    assert merge_stage_outputs(PLAN, [None, None]) is None
    assert merge_stage_outputs(PLAN, [(), ()]) == ()
    assert merge_stage_outputs(PLAN, [{}, {}]) == {}


def test_outputs_may_have_no_columns() -> None:
    merged = merge_stage_outputs(PADDED, [torch.zeros(8, 0), torch.zeros(4, 0)])
    assert tuple(merged.shape) == (9, 0)


def test_swapped_outputs_are_refused_where_stages_differ_in_size() -> None:
    with pytest.raises(StageTensorError, match=r"output of stage 0 has shape \(2, 2\).*5 input"):
        merge_stage_outputs(PLAN, [SECOND, FIRST])


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ([FIRST], "1 stage outputs"),
        ([FIRST, SECOND, SECOND], "3 stage outputs"),
        ([], "0 stage outputs"),
        ([FIRST, None], "output is None in stage 1 only"),
        ([None, SECOND], "output is None in stage 0 only"),
        ([(FIRST, None), (SECOND, SECOND)], "output 1 is None in stage 0 only"),
        ([(FIRST,), (SECOND, SECOND)], "1 outputs and stage 1 2"),
        ([(FIRST,), [SECOND]], "tuple, list"),
        ([(FIRST,), SECOND], "output of stage 0"),
        ([{"residual": FIRST}, (SECOND,)], "output of stage 0"),
        ([{"residual": FIRST}, {"hidden_states": SECOND}], "residual.*hidden_states"),
        ([{"residual": FIRST}, {1: SECOND}], "must agree"),
        ([{"residual": FIRST, 1: FIRST}, {"residual": SECOND}], "must agree"),
        ([{"logits": FIRST}, {"logits": SECOND}], "logits is no known stage input"),
        ([{"residual": FIRST}, {"residual": "x"}], "residual of stage 1"),
        ([{"residual": "x"}, {"residual": SECOND}], "residual is str"),
        ([{"residual": FIRST}, {"residual": SECOND[:, 0]}], "residual has shape"),
        ([{"positions": FIRST}, {"positions": SECOND}], "positions of stage 0.*axis -1"),
        (["x", "y"], "output of stage 0 is 'x'"),
        ([3, 4], "output of stage 0 is 3"),
        ([torch.tensor(1), torch.tensor(2)], "output of stage 0"),
        ([FIRST[:4], SECOND], r"output of stage 0 has shape \(4, 2\)"),
        ([FIRST, rows(6, 3)], r"output of stage 1 has shape \(3, 2\)"),
        ([FIRST, SECOND[:0]], r"output of stage 1 has shape \(0, 2\)"),
        ([FIRST, SECOND.float()], "int64 .*stage 0 and torch.float32"),
        ([FIRST, rows(6, 2, 3)], r"\(5, 2\) in stage 0 and \(2, 3\) in stage 1"),
        ([FIRST, SECOND[:, 0]], "output has shape"),
        ([FIRST, SECOND.to("meta")], "on cpu in stage 0 and .*on meta"),
    ],
)
def test_refused(outputs: Any, said: str) -> None:
    with pytest.raises(StageTensorError, match=said):
        merge_stage_outputs(PLAN, outputs)


def test_padded_stages_must_bring_their_padding() -> None:
    with pytest.raises(StageTensorError, match=r"stage 0 has shape \(5, 2\).*8 input tokens"):
        merge_stage_outputs(PADDED, [FIRST, rows(6, 4)])
