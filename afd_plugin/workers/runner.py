"""What every vLLM model runner needs to run a step as two stages.

Mixed into a subclass of the engine's own runner.  Of one step it decides the plan when
attention metadata is built, has the engine's builders build both stages, and runs the model
once a stage inside that stage's forward context.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.forward_context import get_forward_context
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from afd_plugin import context, decision, pipeline
from afd_plugin.batch import ScheduledBatch
from afd_plugin.compat.vllm_stages import StagePair, stage_builders, stage_forward_context
from afd_plugin.config import AFDConfig
from afd_plugin.context import AttributeSlot
from afd_plugin.decision import KVGroup, StepDecision
from afd_plugin.errors import StageTensorError
from afd_plugin.plan import SplitPlan
from afd_plugin.validation import validate_backends

# Steps whose evidence is kept until it is taken; a server that nobody asks must not grow.
EVIDENCE_STEPS = 4096


@dataclass
class _Step:
    """What is known of the step that ``execute_model`` runs now."""

    decision: StepDecision | None = None
    pairs: Mapping[str, StagePair] = field(default_factory=dict)
    forwards: list[int] = field(default_factory=list)  # rows of each pass that returned


class TwoStageRunnerMixin(GPUModelRunner):  # type: ignore[misc]
    """Overrides of ``GPUModelRunner``; ``afd_start`` is called once after construction."""

    def afd_start(self, config: AFDConfig) -> None:
        """Take the checked configuration; nothing is split before."""
        self.afd_config = config
        self._afd_step: _Step | None = None
        self._afd_evidence: deque[dict[str, Any]] = deque(maxlen=EVIDENCE_STEPS)

    def afd_take_evidence(self) -> list[dict[str, Any]]:
        """Evidence of the last steps since the previous call, at most ``EVIDENCE_STEPS``."""
        taken = list(self._afd_evidence)
        self._afd_evidence.clear()
        return taken

    def afd_backends(self) -> tuple[str, ...]:
        """Names of the attention backends that the loaded layers chose, sorted."""
        groups = (group for groups in self.attn_groups for group in groups)
        return tuple(sorted({group.backend.get_name() for group in groups}))

    def initialize_metadata_builders(self, kv_cache_config: Any, kernel_block_sizes: Any) -> None:
        """One builder a stage: builders keep buffers, which two stages may not share."""
        validate_backends(self.afd_backends(), self.afd_config)
        super().initialize_metadata_builders(kv_cache_config, kernel_block_sizes)
        for index, groups in enumerate(self.attn_groups):
            size = kernel_block_sizes[index] if index < len(kernel_block_sizes) else None
            for group in groups:
                group.create_metadata_builders(
                    self.vllm_config, self.device, size, num_metadata_builders=2
                )

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """Run one scheduled step and record what it realized."""
        step = _Step()
        completed = False
        with context.replaced(AttributeSlot(self, "_afd_step"), step):
            try:
                output = super().execute_model(scheduler_output, intermediate_tensors)
                completed = True
            finally:
                if step.decision is not None:
                    evidence = step.decision.evidence(forwards=step.forwards, completed=completed)
                    self._afd_evidence.append(evidence.as_dict())
        return output

    def _afd_batch(self, num_reqs: int) -> ScheduledBatch:
        rows = self.input_batch
        computed = rows.num_computed_tokens_cpu[:num_reqs]
        return ScheduledBatch(
            np.diff(self.query_start_loc.np[: num_reqs + 1]),
            computed,
            is_prefilling=computed < rows.num_prompt_tokens_cpu_tensor.numpy()[:num_reqs],
        )

    def _afd_kv_groups(self, slot_mappings: Mapping[int, Any]) -> list[KVGroup]:
        tables = self.input_batch.block_table.block_tables
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        return [
            KVGroup(
                table.block_size,
                table.get_numpy_array(),
                slot_mappings[index],
                window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None,
            )
            for index, (table, spec) in enumerate(zip(tables, specs, strict=True))
        ]

    def _build_attention_metadata(
        self,
        num_tokens: int,
        num_reqs: int,
        max_query_len: int,
        *,
        slot_mappings: Any = None,
        **options: Any,
    ) -> tuple[Any, Any]:
        """Decide the step's plan; of a split step build both stages' metadata.

        A split step returns no metadata for the step as a whole, so that whatever reads it
        outside of a stage fails instead of reading something wrong.
        """
        step = self._afd_step

        def build() -> tuple[Any, Any]:
            result: tuple[Any, Any] = super(TwoStageRunnerMixin, self)._build_attention_metadata(
                num_tokens, num_reqs, max_query_len, slot_mappings=slot_mappings, **options
            )
            return result

        if step is None or slot_mappings is None:
            return build()
        step.decision = decision.decide_step(
            self._afd_batch(num_reqs), self.afd_config, self._afd_kv_groups(slot_mappings)
        )
        plan = step.decision.plan
        if not isinstance(plan, SplitPlan):
            return build()
        with stage_builders(self.attn_groups, plan):
            step.pairs, _ = build()
        return {}, None

    def _model_forward(
        self,
        input_ids: Any = None,
        positions: Any = None,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """The model once, or once a stage."""
        step = self._afd_step
        whole = super()._model_forward
        if step is None or step.decision is None:
            return whole(input_ids, positions, intermediate_tensors, inputs_embeds, **model_kwargs)

        def forward(**inputs: Any) -> Any:
            output = whole(**inputs)
            step.forwards.append(inputs["positions"].shape[-1])
            return output

        inputs = {"input_ids": input_ids, "positions": positions, "inputs_embeds": inputs_embeds}
        plan = step.decision.plan
        if not isinstance(plan, SplitPlan):
            return forward(intermediate_tensors=intermediate_tensors, **inputs, **model_kwargs)
        if intermediate_tensors is not None or model_kwargs:
            raise StageTensorError(
                "the model takes intermediate_tensors or extra arguments "
                f"({', '.join(model_kwargs) or 'none'}); neither is known to split by token."
            )
        parent = get_forward_context()
        return pipeline.run_stages(
            plan,
            inputs,
            forward=lambda stage, values: forward(**values),
            scopes=lambda stage: [
                stage_forward_context(parent, step.pairs, plan.stages[stage], stage)
            ],
        )
