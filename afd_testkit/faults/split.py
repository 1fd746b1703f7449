"""Known-bad variants of a split run: what gates must catch, as code that injects it.

A fault changes the splitter's own functions, or what it is given of the engine, for the time
of one run, and puts everything back.  None is subtle on purpose: each was seen in this field,
and each gives wrong numbers without an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from afd_plugin import context, hazards, merge, metadata, stage_inputs
from afd_plugin.plan import SplitPlan
from afd_testkit.faults.base import Fault, FaultTarget, patched

Change = Callable[[Any, SplitPlan, Any, Any], tuple[Any, Any]]


def _metadata_fault(change: Change) -> Callable[[FaultTarget], AbstractContextManager[None]]:
    """``change(parent, plan, first, second)`` gives the metadata that the stages then get."""

    def make(slice_metadata: Any) -> Any:
        def faulty(parent: Any, plan: SplitPlan) -> tuple[Any, Any]:
            return change(parent, plan, *slice_metadata(parent, plan))

        return faulty

    return lambda target: patched(metadata, "slice_metadata", make)


def _owed(plan: SplitPlan) -> int:
    """Tokens of the cut request that stage 0 has computed; 0 for a cut at a boundary."""
    if not plan.cuts_request:
        return 0
    start = plan.batch.query_start_loc[plan.stages[1].request_slice.start]
    return plan.cut - int(start)


# All names under which metadata classes carry sequence lengths and computed tokens.
_LENGTHS = frozenset(
    {
        "seq_lens",
        "seq_lens_cpu",
        "_seq_lens_cpu",
        "seq_lens_cpu_upper_bound",
        "num_computed_tokens_cpu",
        "_num_computed_tokens_cpu",
    }
)
_POSITIONS = frozenset({"positions", "positions_cpu"})


def _computed_not_advanced(
    parent: Any, plan: SplitPlan, first: Any, second: Any
) -> tuple[Any, Any]:
    told = {}
    for each in dataclasses.fields(second):
        # Which of them a metadata builder reads differs from backend to backend.
        if each.name in _LENGTHS and (value := getattr(second, each.name)) is not None:
            told[each.name] = value.clone()
            told[each.name][0] -= _owed(plan)
    return first, dataclasses.replace(second, **told)


def _padded_length(parent: Any, plan: SplitPlan, first: Any, second: Any) -> tuple[Any, Any]:
    stage = plan.stages[1]
    extra = stage.num_input_tokens - stage.num_tokens
    offsets = second.query_start_loc.clone()
    offsets[-1] += extra
    slots = torch.cat([second.slot_mapping, second.slot_mapping.new_full((extra,), -1)])
    told = dataclasses.replace(
        second,
        query_start_loc=offsets,
        query_start_loc_cpu=offsets.clone(),
        num_actual_tokens=stage.num_input_tokens,
        max_query_len=second.max_query_len + extra,
        slot_mapping=slots,
    )
    return first, told


def _slots_not_cut(parent: Any, plan: SplitPlan, first: Any, second: Any) -> tuple[Any, Any]:
    own = second.slot_mapping.shape[0]
    return first, dataclasses.replace(second, slot_mapping=parent.slot_mapping[:own])


def _wrong_block_row(parent: Any, plan: SplitPlan, first: Any, second: Any) -> tuple[Any, Any]:
    begin = plan.stages[1].request_slice.start
    count = second.block_table_tensor.shape[0]
    rows = (torch.arange(count) + begin + 1) % plan.batch.num_reqs
    return first, dataclasses.replace(
        second, block_table_tensor=parent.block_table_tensor[: plan.batch.num_reqs][rows]
    )


def _stage_0_twice(parent: Any, plan: SplitPlan, first: Any, second: Any) -> tuple[Any, Any]:
    # Only where the sizes agree: elsewhere a kernel would read outside of its buffers.
    if first.num_actual_tokens != second.num_actual_tokens:
        return first, second
    return first, dataclasses.replace(first)


@contextmanager
def _rebased_positions(target: FaultTarget) -> Generator[None, None, None]:
    """In the stage's inputs, and in its metadata where a backend takes positions from there."""

    def rebased(positions: Any, plan: SplitPlan) -> Any:
        starts = plan.batch.query_start_loc
        end = int(starts[plan.stages[1].request_slice.start + 1]) - plan.cut
        positions = positions.clone()
        positions[..., :end] -= _owed(plan)
        return positions

    def make(slice_stage_inputs: Any) -> Any:
        def faulty(plan: SplitPlan, **inputs: Any) -> Any:
            first, second = slice_stage_inputs(plan, **inputs)
            return first, {**second, "positions": rebased(second["positions"], plan)}

        return faulty

    def change(parent: Any, plan: SplitPlan, first: Any, second: Any) -> tuple[Any, Any]:
        told = {
            each.name: rebased(value, plan)
            for each in dataclasses.fields(second)
            if each.name in _POSITIONS and (value := getattr(second, each.name)) is not None
        }
        return first, dataclasses.replace(second, **told)

    with (
        patched(stage_inputs, "slice_stage_inputs", make),
        _metadata_fault(change)(target),
    ):
        yield


def _swapped_merge(target: FaultTarget) -> AbstractContextManager[None]:
    def make(merge_stage_outputs: Any) -> Any:
        def faulty(plan: SplitPlan, outputs: Any) -> Any:
            merged = merge_stage_outputs(plan, outputs)
            real, cut = plan.batch.num_tokens, plan.cut
            return torch.cat([merged[cut:real], merged[:cut], merged[real:]])

        return faulty

    return patched(merge, "merge_stage_outputs", make)


@contextmanager
def _state_kept(target: FaultTarget) -> Generator[None, None, None]:
    """Nothing is put back during the run; after it everything is, for the next one."""
    kept: list[tuple[context.StateSlot, Any]] = []

    def make(replaced: Any) -> Any:
        @contextmanager
        def faulty(slot: context.StateSlot, value: Any) -> Generator[None, None, None]:
            kept.append((slot, slot.get()))
            slot.set(value)
            yield

        return faulty

    try:
        with patched(context, "replaced", make):
            yield
    finally:
        for slot, value in reversed(kept):
            slot.set(value)


def _hazard_ignored(target: FaultTarget) -> AbstractContextManager[None]:
    return patched(hazards, "hazard_in", lambda original: lambda plan, groups: None)


@contextmanager
def _residual_leaked(target: FaultTarget) -> Generator[None, None, None]:
    """Stage 1 finds in its residual buffer of the second layer what stage 0 left there."""
    left: list[torch.Tensor] = []

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stage = context.current_stage()
        named = "residual" in kwargs
        residual = kwargs["residual"] if named else args[2]
        if stage == 0:
            left[:] = [residual.clone()]
        elif stage == 1 and left:
            rows = min(left[0].shape[0], residual.shape[0])
            leaked = residual.clone()
            leaked[:rows] = left[0][:rows]
            if named:
                kwargs = {**kwargs, "residual": leaked}
            else:
                args = (*args[:2], leaked, *args[3:])
        return args, kwargs

    handle = target.decoder_layers()[1].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _routing_shared(target: FaultTarget) -> Generator[None, None, None]:
    """Stage 1 uses the expert ids that stage 0 left in the table of each layer."""

    def make(select_experts: Any) -> Any:
        table: list[torch.Tensor] = []

        def faulty(*args: Any, **kwargs: Any) -> Any:
            weights, ids = select_experts(*args, **kwargs)
            stage = context.current_stage()
            if stage == 0:
                table[:] = [ids.clone()]
            elif stage == 1 and table:
                rows = torch.arange(ids.shape[0]) % table[0].shape[0]
                ids = table[0][rows]
            return weights, ids

        return faulty

    with ExitStack() as stack:
        for router in target.moe_routers():
            stack.enter_context(patched(router, "select_experts", make))
        yield


FAULTS: Sequence[Fault] = (
    Fault(
        "computed-not-advanced",
        "the second piece of a cut request does not count what the first piece computed",
        ("split", "chunked", "stability", "prefix-hit"),
        _metadata_fault(_computed_not_advanced),
    ),
    Fault(
        "positions-rebased",
        "the second piece's positions start where its request did",
        ("split", "chunked", "stability", "prefix-hit"),
        _rebased_positions,
    ),
    Fault(
        "padded-length-told",
        "attention is told the padded length of stage 1 instead of the real one",
        ("split", "chunked", "stability"),
        _metadata_fault(_padded_length),
    ),
    Fault(
        "slot-mapping-not-cut",
        "stage 1 writes its keys and values to the slots of stage 0",
        ("split", "chunked", "prefix-hit", "stability"),
        _metadata_fault(_slots_not_cut),
    ),
    Fault(
        "merge-swapped",
        "outputs are merged with stage 1 first",
        ("split", "chunked", "prefix-hit", "stability"),
        _swapped_merge,
    ),
    Fault(
        "block-row-of-wrong-request",
        "stage 1 reads through its neighbours' block rows",
        ("split", "chunked", "prefix-hit", "stability"),
        _metadata_fault(_wrong_block_row),
    ),
    Fault(
        "state-not-restored",
        "state that a stage or a split step set stays set",
        ("stability", "chunked"),
        _state_kept,
    ),
    Fault(
        "hazard-ignored",
        "a step is cut between a reader and its writer",
        ("prefix-hit",),
        _hazard_ignored,
    ),
    Fault(
        "stage-1-from-stage-0-metadata",
        "both stages get the metadata of stage 0",
        ("split",),
        _metadata_fault(_stage_0_twice),
    ),
    Fault(
        "residual-leaked",
        "a residual of stage 0 is left in the buffer that stage 1 reads",
        ("split", "chunked", "prefix-hit", "stability"),
        _residual_leaked,
    ),
    Fault(
        "routing-table-shared",
        "both stages use one table of expert ids",
        ("split", "chunked", "prefix-hit", "stability"),
        _routing_shared,
    ),
)
