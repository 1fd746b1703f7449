"""Runs the two stages of a plan in the declared order and merges what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from afd_plugin import context, merge, stage_inputs
from afd_plugin.plan import SplitPlan
from afd_plugin.stage_inputs import StageInputs

Forward = Callable[[int, StageInputs], Any]
Scopes = Callable[[int, StageInputs], Sequence[AbstractContextManager[Any]]]


def _no_scopes(stage: int, inputs: StageInputs) -> Sequence[AbstractContextManager[Any]]:
    return ()


def run_stages(
    plan: SplitPlan,
    inputs: Mapping[str, Any],
    forward: Forward,
    scopes: Scopes = _no_scopes,
) -> Any:
    """Split ``inputs``, run stage 0 and then stage 1, and merge their outputs.

    ``inputs``: as for ``slice_stage_inputs``.  ``forward(stage, inputs)`` runs one stage and
    returns what ``merge_stage_outputs`` takes.  ``scopes(stage, inputs)``: context managers that
    hold the stage's state (forward context and the like); they are left before the other stage
    starts, after success and after an error alike, and the error surfaces as it was raised.
    """
    outputs = []
    for stage, values in enumerate(stage_inputs.slice_stage_inputs(plan, **inputs)):
        with context.stage_scope(stage, scopes(stage, values)):
            outputs.append(forward(stage, values))
    return merge.merge_stage_outputs(plan, outputs)
