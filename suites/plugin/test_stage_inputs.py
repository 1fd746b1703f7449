"""Inputs of each stage: token axis by declaration, padding, and every tensor that must not pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_plugin import ScheduledBatch, merge_stage_outputs, slice_stage_inputs, split_at
from afd_plugin.errors import AfdError, StageTensorError
from afd_plugin.stage_inputs import TOKEN_AXIS, TokenAxis
from afd_testkit.strategies import batches_with_cut

pytestmark = pytest.mark.cpu

HIDDEN = 3
# name → shape with T for the tokens; every declared input in every rank it may have.
SHAPES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "hidden_states": ("hidden_states", ("T", HIDDEN)),
    "residual": ("residual", ("T", HIDDEN)),
    "inputs_embeds": ("inputs_embeds", ("T", HIDDEN)),
    "input_ids": ("input_ids", ("T",)),
    "positions": ("positions", ("T",)),
    "positions of 3 axes": ("positions", (3, "T")),
    "llama_4_scaling": ("llama_4_scaling", ("T",)),
    "llama_4_scaling of rank 2": ("llama_4_scaling", ("T", 1)),
    "llama_4_scaling of rank 3": ("llama_4_scaling", ("T", 1, 1)),
}


def tensor(shape: tuple[Any, ...], tokens: int, extent: int) -> torch.Tensor:
    """Distinct numbers from 1 on in the real tokens, zeros in the padding."""
    axis = shape.index("T")
    sizes = [tokens if size == "T" else size for size in shape]
    real = torch.arange(1, int(np.prod(sizes)) + 1).reshape(sizes)
    sizes[axis] = extent - tokens
    return torch.cat([real, torch.zeros(sizes, dtype=real.dtype)], dim=axis)


def tokens_of(value: torch.Tensor, axis: int) -> list[Any]:
    """One nested list a token."""
    return [piece.tolist() for piece in value.unbind(axis)]


@given(
    case=batches_with_cut(max_requests=4, max_scheduled=20),
    alignment=st.sampled_from([1, 2, 4, 8]),
    padded=st.booleans(),
)
@settings(deadline=None, derandomize=True, max_examples=100)
def test_each_stage_has_its_tokens_and_then_zeros(case: Any, alignment: int, padded: bool) -> None:
    batch, cut = case
    plan = split_at(batch, cut, alignment)
    extent = batch.num_input_tokens if padded else batch.num_tokens
    for name, shape in SHAPES.values():
        axis = shape.index("T")
        whole = tensor(shape, batch.num_tokens, extent)
        before = whole.clone()
        stages = slice_stage_inputs(plan, **{name: whole})
        assert torch.equal(whole, before)
        all_tokens = tokens_of(whole, axis)
        for values, (begin, end) in zip(stages, [(0, cut), (cut, batch.num_tokens)], strict=True):
            assert list(values) == [name]
            got = tokens_of(values[name], axis)
            assert got[: end - begin] == all_tokens[begin:end]
            rows = -(-(end - begin) // alignment) * alignment
            assert len(got) == rows
            assert values[name].dtype == whole.dtype
            assert not np.any(got[end - begin :])


@given(
    case=batches_with_cut(max_requests=4, max_scheduled=20),
    alignment=st.sampled_from([1, 2, 4, 8]),
    padded=st.booleans(),
    residual=st.booleans(),
)
@settings(deadline=None, derandomize=True, max_examples=100)
def test_merging_undoes_slicing(case: Any, alignment: int, padded: bool, residual: bool) -> None:
    batch, cut = case
    plan = split_at(batch, cut, alignment)
    extent = batch.num_input_tokens if padded else batch.num_tokens
    given_inputs: dict[str, Any] = {
        name: tensor(shape, batch.num_tokens, extent).double()
        for label, (name, shape) in SHAPES.items()
        if "rank" not in label
    }
    given_inputs["residual"] = given_inputs["residual"] if residual else None
    merged = merge_stage_outputs(plan, slice_stage_inputs(plan, **given_inputs))
    assert list(merged) == list(given_inputs)
    for name, whole in given_inputs.items():
        if whole is None:
            assert merged[name] is None
            continue
        axis = TOKEN_AXIS[name][0]
        missing = batch.num_input_tokens - extent  # given without padding, merged with it
        wide = torch.movedim(whole, axis, 0)
        wide = torch.cat([wide, wide.new_zeros(missing, *wide.shape[1:])])
        assert torch.equal(torch.movedim(merged[name], axis, 0), wide)
        assert merged[name].dtype == whole.dtype


PLAN = split_at(ScheduledBatch([3, 4], num_input_tokens=8), 5)  # stages of 5 and 2 tokens
ALIGNED = split_at(ScheduledBatch([3, 4], num_input_tokens=8), 5, 4)  # rows 8 and 4


@pytest.mark.parametrize("name", TOKEN_AXIS)
def test_absent_stays_absent(name: str) -> None:
    assert slice_stage_inputs(PLAN, **{name: None}) == ({name: None}, {name: None})


def test_no_inputs() -> None:
    assert slice_stage_inputs(PLAN) == ({}, {})


def test_order_of_names_is_kept() -> None:
    values = {"residual": None, "positions": torch.arange(7), "input_ids": torch.arange(7)}
    for stage in slice_stage_inputs(PLAN, **values):
        assert list(stage) == list(values)


def test_real_tokens_win_over_what_the_padding_holds() -> None:
    ids = torch.tensor([1, 2, 3, 4, 5, 6, 7, 99])
    first, second = slice_stage_inputs(ALIGNED, input_ids=ids)
    assert first["input_ids"].tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert second["input_ids"].tolist() == [6, 7, 0, 0]


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("plan", [PLAN, ALIGNED], ids=["views", "padded"])
def test_writing_one_stage_leaves_the_other(plan: Any, stage: int) -> None:
    whole = torch.arange(1, 8)
    stages = slice_stage_inputs(plan, input_ids=whole)
    other = stages[1 - stage]["input_ids"].clone()
    stages[stage]["input_ids"].fill_(-7)
    assert torch.equal(stages[1 - stage]["input_ids"], other)


def test_non_contiguous_inputs() -> None:
    hidden = torch.arange(14).reshape(2, 7).t()
    positions = torch.arange(21).reshape(7, 3).t()
    first, second = slice_stage_inputs(ALIGNED, hidden_states=hidden, positions=positions)
    assert first["hidden_states"][:5].tolist() == hidden[:5].tolist()
    assert second["positions"].tolist() == [[15, 18, 0, 0], [16, 19, 0, 0], [17, 20, 0, 0]]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("hidden_states", torch.zeros(4, 7), r"hidden_states has shape \(4, 7\): axis 0"),
        ("hidden_states", torch.zeros(7), r"hidden_states is \(7,\); .*2 dimension"),
        ("hidden_states", torch.zeros(1, 7, 4), r"hidden_states is \(1, 7, 4\)"),
        ("hidden_states", torch.zeros(6, 4), "7 or 8 tokens"),
        ("hidden_states", torch.zeros(9, 4), "7 or 8 tokens"),
        ("hidden_states", torch.zeros(5, 4), "another step"),
        ("residual", torch.zeros(0, 4), "residual has shape"),
        ("inputs_embeds", torch.zeros(4, 8), "inputs_embeds has shape"),
        ("input_ids", torch.zeros(7, 1), "input_ids is"),
        ("input_ids", torch.tensor(7), r"input_ids is \(\)"),
        ("positions", torch.zeros(7, 3), "positions has shape .*axis -1"),
        ("positions", torch.zeros(1, 3, 7), "positions is"),
        ("llama_4_scaling", torch.zeros(1, 7), "llama_4_scaling has shape"),
        ("llama_4_scaling", torch.zeros(7, 1, 1, 1), "llama_4_scaling is"),
        ("hidden_states", "x", "hidden_states is str"),
        ("hidden_states", 3, "hidden_states is int"),
        ("input_ids", [1, 2, 3, 4, 5, 6, 7], "input_ids is list"),
        ("input_ids", np.arange(7), "input_ids is .*ndarray"),
        ("hidden", torch.zeros(7, 4), "hidden is no known stage input; known: hidden_states"),
        ("kv_cache", torch.zeros(7), "kv_cache is no known stage input"),
    ],
)
@pytest.mark.parametrize("plan", [PLAN, ALIGNED], ids=["plain", "aligned"])
def test_refused(plan: Any, name: str, value: Any, said: str) -> None:
    with pytest.raises(StageTensorError, match=said) as caught:
        slice_stage_inputs(plan, **{name: value})
    assert isinstance(caught.value, AfdError)


def test_nothing_is_guessed_from_sizes() -> None:
    square = torch.zeros(7, 7)  # both axes have the right length; the declared one is taken
    first, _ = slice_stage_inputs(PLAN, hidden_states=square, positions=square)
    assert tuple(first["hidden_states"].shape) == (5, 7)
    assert tuple(first["positions"].shape) == (7, 5)


def test_an_unknown_name_is_refused_even_when_absent() -> None:
    with pytest.raises(StageTensorError, match="intermediate_tensors is no known stage input"):
        slice_stage_inputs(PLAN, intermediate_tensors=None)


SCALING_ON_1 = {"llama_4_scaling": TOKEN_AXIS["llama_4_scaling"]._replace(axis=1)}


def test_scaling_with_its_tokens_on_axis_1() -> None:
    scaling = torch.arange(1, 15).reshape(2, 7)
    stages = slice_stage_inputs(ALIGNED, declared=SCALING_ON_1, llama_4_scaling=scaling)
    assert stages[0]["llama_4_scaling"].tolist() == [
        [1, 2, 3, 4, 5, 0, 0, 0],
        [8, 9, 10, 11, 12, 0, 0, 0],
    ]
    assert stages[1]["llama_4_scaling"].tolist() == [[6, 7, 0, 0], [13, 14, 0, 0]]
    merged = merge_stage_outputs(ALIGNED, stages, declared=SCALING_ON_1)
    assert merged["llama_4_scaling"].tolist() == [[*row, 0] for row in scaling.tolist()]
    deep = scaling.reshape(2, 7, 1)
    (first, _) = slice_stage_inputs(ALIGNED, declared=SCALING_ON_1, llama_4_scaling=deep)
    assert tuple(first["llama_4_scaling"].shape) == (2, 8, 1)


def test_a_declaration_counts_for_one_call() -> None:
    scaling = torch.zeros(2, 7)
    slice_stage_inputs(PLAN, declared=SCALING_ON_1, llama_4_scaling=scaling)
    with pytest.raises(StageTensorError, match=r"llama_4_scaling has shape .*axis 0"):
        slice_stage_inputs(PLAN, llama_4_scaling=scaling)


def test_a_declaration_can_add_an_input() -> None:
    declared = {"expert_bias": TokenAxis(1, (2,))}
    first, second = slice_stage_inputs(
        PLAN, declared=declared, expert_bias=torch.arange(7).reshape(1, 7)
    )
    assert first["expert_bias"].tolist() == [[0, 1, 2, 3, 4]]
    assert second["expert_bias"].tolist() == [[5, 6]]


def test_a_declared_axis_that_the_tensor_does_not_have() -> None:
    with pytest.raises(StageTensorError, match=r"llama_4_scaling is \(7,\); .*on axis 1"):
        slice_stage_inputs(PLAN, declared=SCALING_ON_1, llama_4_scaling=torch.zeros(7))


def test_local_means_nothing_where_tokens_are_not_sharded() -> None:
    declared = {"positions": TOKEN_AXIS["positions"]._replace(place="local")}
    positions = torch.arange(7)
    here = slice_stage_inputs(PLAN, declared=declared, positions=positions)
    assert [stage["positions"].tolist() for stage in here] == [[0, 1, 2, 3, 4], [5, 6]]


def test_what_is_sharded_by_default() -> None:
    places = {name: where.place for name, where in TOKEN_AXIS.items()}
    assert places == {
        "hidden_states": "local",
        "residual": "local",
        "inputs_embeds": "global",
        "input_ids": "global",
        "positions": "global",
        "llama_4_scaling": "global",
    }
