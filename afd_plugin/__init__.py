"""Token-balanced two-stage prefill splitting for attention-FFN disaggregation.

Usable without vLLM; ``afd_plugin.workers`` and ``afd_plugin.compat`` need it.
"""

from afd_plugin.batch import ScheduledBatch
from afd_plugin.config import AFDConfig
from afd_plugin.decision import StepDecision, StepEvidence, decide_step
from afd_plugin.errors import AfdError
from afd_plugin.hazards import KVGroup, KVHazard, find_kv_hazard, safe_plan
from afd_plugin.merge import merge_stage_outputs
from afd_plugin.metadata import register_metadata_rules, slice_metadata
from afd_plugin.pipeline import run_stages
from afd_plugin.plan import SplitPlan, Stage, Unsplit, plan_split, split_at
from afd_plugin.stage_inputs import slice_stage_inputs

__all__ = [
    "AFDConfig",
    "AfdError",
    "KVGroup",
    "KVHazard",
    "ScheduledBatch",
    "SplitPlan",
    "Stage",
    "StepDecision",
    "StepEvidence",
    "Unsplit",
    "decide_step",
    "find_kv_hazard",
    "merge_stage_outputs",
    "plan_split",
    "register_metadata_rules",
    "run_stages",
    "safe_plan",
    "slice_metadata",
    "slice_stage_inputs",
    "split_at",
]
