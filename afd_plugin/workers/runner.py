"""What every vLLM model runner needs to run a step as two stages.

Mixed into a subclass of the engine's own runner, which overrides the engine's methods with the
signatures that its version has and calls what is here: decide the plan when attention metadata
is built, have the engine's builders build both stages, and run the model once a stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup

from afd_plugin import context, pipeline
from afd_plugin.batch import ScheduledBatch
from afd_plugin.compat.stages import StageBuilders, StagePair, stage_builders
from afd_plugin.config import AFDConfig
from afd_plugin.connectors.base import Connector
from afd_plugin.context import AttributeSlot
from afd_plugin.decision import KVGroup, StepDecision
from afd_plugin.errors import StageTensorError
from afd_plugin.plan import SplitPlan
from afd_plugin.remote_experts import ExpertsBackend, Seam, connect, make_connector, remote
from afd_plugin.routing import routing_calls
from afd_plugin.stage_inputs import StageInputs
from afd_plugin.topology import Topology

# Steps whose evidence is kept until it is taken; a server that nobody asks must not grow.
EVIDENCE_STEPS = 4096


@dataclass
class _Step:
    """What is known of the step that ``execute_model`` runs now."""

    decision: StepDecision | None = None
    pairs: Mapping[str, StagePair] = field(default_factory=dict)
    forwards: list[int] = field(default_factory=list)  # rows of each pass that returned
    rows_across_dp: tuple[Any, ...] | None = None  # by stage: [DP] rows of every DP rank


class TwoStageRunnerMixin(GPUModelRunner):  # type: ignore[misc]
    """The common part of runners; ``afd_start`` is called once after construction."""

    def afd_start(self, config: AFDConfig, topology: Topology) -> None:
        """Take the checked configuration and topology; nothing is split before."""
        self.afd_config = config
        self.afd_topology = topology
        self._afd_step: _Step | None = None
        self._afd_evidence: deque[dict[str, Any]] = deque(maxlen=EVIDENCE_STEPS)
        self._afd_connector: Connector | None = None
        self._afd_native = ExitStack()  # closing it leaves the layers as they were loaded

    def afd_connect(
        self,
        backends: Iterable[ExpertsBackend],
        seam: Seam,
    ) -> None:
        """Reach the experts of the loaded model through the configured connector, if there is one.

        ``backends``: of its layers, asked for only with a connector.  ``seam``: where the engine
        enters a layer.
        """
        self.afd_disconnect()
        connector = make_connector(self.afd_config)
        if connector is not None:
            sides = connect(backends, connector, self.afd_config)
            self._afd_native.enter_context(remote(sides, seam))
            self._afd_connector = connector

    def afd_disconnect(self) -> None:
        """The layers compute natively again; nothing to do where they do."""
        self._afd_native.close()
        self._afd_connector = None

    def afd_take_evidence(self) -> list[dict[str, Any]]:
        """Evidence of the last steps since the previous call, at most ``EVIDENCE_STEPS``."""
        taken = list(self._afd_evidence)
        self._afd_evidence.clear()
        return taken

    def afd_backends(self) -> tuple[str, ...]:
        """Names of the attention backends that the loaded layers chose, sorted."""
        groups = (group for groups in self.attn_groups for group in groups)
        return tuple(sorted({self._afd_backend_name(group) for group in groups}))

    def _afd_backend_name(self, group: AttentionGroup) -> str:
        """By what name validation knows the backend of ``group``."""
        return str(group.backend.get_name())

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """Run one scheduled step and record what it realized."""
        step = _Step()
        completed = False
        earlier = routing_calls()
        connector = self._afd_connector
        travelled = None if connector is None else connector.counts
        with context.replaced(AttributeSlot(self, "_afd_step"), step):
            try:
                output = super().execute_model(scheduler_output, intermediate_tensors)
                completed = True
            finally:
                if step.decision is not None:
                    calls = routing_calls().since(earlier)
                    evidence = step.decision.evidence(
                        forwards=step.forwards,
                        completed=completed,
                        balanced_routing=calls.balanced,
                        natural_routing=calls.natural,
                    )
                    record = evidence.as_dict()
                    if connector is not None and travelled is not None:
                        record["transfer"] = asdict(connector.counts.since(travelled))
                    self._afd_evidence.append(record)
        return output

    def _afd_batch(self, num_reqs: int, num_input_tokens: int | None = None) -> ScheduledBatch:
        rows = self.input_batch
        computed = rows.num_computed_tokens_cpu[:num_reqs]
        return ScheduledBatch(
            np.diff(self.query_start_loc.np[: num_reqs + 1]),
            computed,
            num_input_tokens=num_input_tokens,
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

    def _afd_build(
        self,
        step: _Step,
        build: Callable[[], tuple[Any, Any]],
        wrap: Callable[[Sequence[Any], SplitPlan], StageBuilders],
    ) -> tuple[Any, Any]:
        """Metadata of the step as decided: ``build``'s own, or both stages' with ``build``.

        A split step returns no metadata for the step as a whole, so that whatever reads it
        outside of a stage fails instead of reading something wrong.
        """
        if step.decision is None or not isinstance(step.decision.plan, SplitPlan):
            return build()
        plan = step.decision.plan
        with stage_builders(self.attn_groups, lambda builders: wrap(builders, plan)):
            step.pairs, _ = build()
        return {}, None

    def _afd_forward(
        self,
        step: _Step,
        whole: Callable[..., Any],
        scopes: Callable[[SplitPlan, int, StageInputs], Sequence[AbstractContextManager[Any]]],
        inputs: Mapping[str, Any],
        extra: Mapping[str, Any],
    ) -> Any:
        """The model once, or once a stage inside that stage's scopes.

        ``whole``: the runner's own forward pass, called by keyword.  ``inputs``: what is cut by
        token.  ``extra``: everything else, which must be unset in a split step.
        """

        def forward(**values: Any) -> Any:
            output = whole(**values)
            step.forwards.append(values["positions"].shape[-1])
            return output

        plan = step.decision.plan if step.decision is not None else None
        if not isinstance(plan, SplitPlan):
            return forward(**inputs, **extra)
        unknown = [name for name, value in extra.items() if value is not None]
        if unknown:
            raise StageTensorError(
                f"the model takes {', '.join(unknown)}, which is not known to split by token. "
                "Run this model with the split off."
            )
        return pipeline.run_stages(
            plan,
            inputs,
            forward=lambda stage, values: forward(**values),
            scopes=lambda stage, values: scopes(plan, stage, values),
        )
