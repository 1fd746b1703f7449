"""One step's decision, and the evidence of what was then really run.

Every runner, real or reference, asks here, so that they decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from afd_plugin import hazards
from afd_plugin.batch import ScheduledBatch
from afd_plugin.config import AFDConfig
from afd_plugin.hazards import KVGroup, KVHazard
from afd_plugin.plan import SplitPlan, Unsplit, plan_split
from afd_plugin.topology import ONE_RANK, Topology, unsupported_sizes

__all__ = ["KVGroup", "StepDecision", "StepEvidence", "decide_step"]


@dataclass(frozen=True)
class StepEvidence:
    """What one step realized; token counts are real tokens unless said otherwise.

    ``policy``: that of the plan, or ``"unsplit"``.  ``stage_tokens`` and
    ``stage_input_tokens`` (rows of the buffers, padding included): one entry a stage that ran,
    counted where the model was called.
    ``hazard``: the dependency that the first plan had; ``hazard_action``: ``"moved"`` or
    ``"unsplit"``.  ``reason``: why the step was not split.  ``completed``: whether the
    step returned, after exactly the forward passes that were planned.
    ``balanced_routing``, ``natural_routing``: executions of the routing operator that made the
    expert ids even, or left them as the router chose.
    """

    policy: str
    num_reqs: int
    num_tokens: int
    stage_tokens: tuple[int, ...]
    stage_input_tokens: tuple[int, ...]
    cut: int | None = None
    cuts_request: bool = False
    imbalance: float | None = None
    digest: str | None = None
    hazard: str | None = None
    hazard_action: str | None = None
    reason: str | None = None
    detail: str | None = None
    completed: bool = False
    balanced_routing: int = 0
    natural_routing: int = 0

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready dictionary."""
        return asdict(self)


@dataclass(frozen=True)
class StepDecision:
    """The plan that may be run, and the hazard that changed it, if any."""

    plan: SplitPlan | Unsplit
    hazard: KVHazard | None = None

    @property
    def planned_rows(self) -> tuple[int, ...]:
        """Rows (padding included) of each forward pass that the plan asks for."""
        if isinstance(self.plan, Unsplit):
            return (self.plan.batch.num_input_tokens,)
        return tuple(stage.num_input_tokens for stage in self.plan.stages)

    def _as_planned(self, ran: tuple[int, ...]) -> bool:
        """Whether those passes ran that were planned.

        Of a whole step the engine alone decides the padding, after the plan was made.
        """
        if isinstance(self.plan, Unsplit):
            return len(ran) == 1 and ran[0] >= self.plan.batch.num_tokens
        return ran == self.planned_rows

    def evidence(
        self,
        *,
        forwards: Sequence[int],
        completed: bool,
        balanced_routing: int = 0,
        natural_routing: int = 0,
    ) -> StepEvidence:
        """The record of this step once it has run, or failed to.

        ``forwards``: rows of each forward pass that returned, counted where the model was
        called.  ``completed``: whether the step returned; it counts only if the passes are
        those that were planned.  The others are taken over as they are.
        """
        plan, batch = self.plan, self.plan.batch
        hazard = None if self.hazard is None else str(self.hazard)
        ran = tuple(int(rows) for rows in forwards)
        completed = completed and self._as_planned(ran)
        if isinstance(plan, Unsplit):
            return StepEvidence(
                policy="unsplit",
                num_reqs=batch.num_reqs,
                num_tokens=batch.num_tokens,
                stage_tokens=(batch.num_tokens,) if ran else (),
                stage_input_tokens=ran,
                hazard=hazard,
                hazard_action=None if hazard is None else "unsplit",
                reason=plan.reason,
                detail=plan.detail,
                completed=completed,
                balanced_routing=balanced_routing,
                natural_routing=natural_routing,
            )
        return StepEvidence(
            policy=plan.policy,
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            stage_tokens=tuple(stage.num_tokens for stage in plan.stages[: len(ran)]),
            stage_input_tokens=ran,
            cut=plan.cut,
            cuts_request=plan.cuts_request,
            imbalance=plan.imbalance,
            digest=plan.digest,
            hazard=hazard,
            hazard_action=None if hazard is None else "moved",
            completed=completed,
            balanced_routing=balanced_routing,
            natural_routing=natural_routing,
        )


def decide_step(
    batch: ScheduledBatch,
    config: AFDConfig,
    kv_groups: Sequence[KVGroup],
    topology: Topology = ONE_RANK,
) -> StepDecision:
    """Plan a step, look for hazards in every KV-cache group, and move the cut or give it up.

    ``topology``: as the runtime has it in this step; where it does not support a split the step
    runs whole.

    Raises :class:`~afd_plugin.errors.KVLayoutError` when a group does not fit the batch.
    """
    if not config.async_moe_ubatching:
        return StepDecision(Unsplit(batch, "disabled", "async_moe_ubatching is off"))
    if sizes := unsupported_sizes(topology):
        detail = ", ".join(f"{name} is {size}" for name, size in sizes.items())
        return StepDecision(Unsplit(batch, "topology", detail))
    plan = plan_split(
        batch,
        policy=config.async_moe_split,
        alignment=config.async_moe_token_alignment,
        min_tokens=config.async_moe_min_tokens,
    )
    if isinstance(plan, Unsplit):
        return StepDecision(plan)
    hazard = hazards.hazard_in(plan, kv_groups)
    if hazard is None:
        return StepDecision(plan)
    moved = hazards.safe_plan(plan, kv_groups)
    if moved is None:
        return StepDecision(Unsplit(batch, "kv_hazard", f"no safe cut: {hazard}"), hazard)
    return StepDecision(moved, hazard)
