"""``worker_cls="afd_plugin.workers.npu.AFDNPUWorker"``: vLLM-Ascend's worker with split prefill."""

from __future__ import annotations

import struct
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed import get_dp_group, get_tensor_model_parallel_rank, get_tp_group
from vllm.forward_context import get_forward_context
from vllm.v1.worker.utils import AttentionGroup
from vllm_ascend.utils import enable_sp
from vllm_ascend.worker import worker as worker_module
from vllm_ascend.worker.model_runner_v1 import NPUModelRunner
from vllm_ascend.worker.worker import NPUWorker

from afd_plugin.agreement import AgreementGroup, agree_on_plan, agree_on_split, withdraw
from afd_plugin.compat import ascend_experts
from afd_plugin.compat.ascend import builder_path, check_drift, read_setup
from afd_plugin.compat.ascend_stages import AscendStageBuilders, StageCaches, stage_scopes
from afd_plugin.compat.routing import register_for
from afd_plugin.config import DECIDES_STEPS, AFDConfig
from afd_plugin.context import AttributeSlot, replaced
from afd_plugin.decision import StepDecision, decide_step
from afd_plugin.layout import Layout
from afd_plugin.plan import SplitPlan
from afd_plugin.remote_experts import agree_on_placement
from afd_plugin.topology import Topology
from afd_plugin.validation import validate_backends
from afd_plugin.workers.runner import TwoStageRunnerMixin
from afd_plugin.workers.worker import TwoStageWorkerMixin

_ROWS = struct.Struct("<qq")  # of stage 0 and of stage 1


class AFDNPUModelRunner(TwoStageRunnerMixin, NPUModelRunner):  # type: ignore[misc]
    """The NPU model runner, able to run a step as two stages."""

    def afd_start(self, config: AFDConfig, topology: Topology) -> None:
        """Take the checked configuration, and meet the other ranks of the TP and DP groups."""
        super().afd_start(config, topology)
        self._afd_caches = StageCaches()
        self._afd_tp = _agreement("tp", get_tp_group())
        self._afd_dp = _agreement("dp", get_dp_group())
        for group in (self._afd_tp, self._afd_dp):
            if group is not None:
                agree_on_placement(group, config)

    def load_model(self) -> None:
        """Where there is a connector, the experts of every layer are reached through it."""
        super().load_model()
        layers = self.compilation_config.static_forward_context.values()
        force = self.afd_config.force_balanced_routing
        backends = ascend_experts.backends_of(layers, force_balance=force)
        self.afd_connect(backends, ascend_experts.seam)

    def _afd_backend_name(self, group: AttentionGroup) -> str:
        return builder_path(group.backend)

    def initialize_attn_backend(self, kv_cache_config: Any) -> None:
        """One builder a stage: builders keep buffers, which two stages may not share."""
        super().initialize_attn_backend(kv_cache_config)
        validate_backends(self.afd_backends(), self.afd_config)
        for group in (group for groups in self.attn_groups for group in groups):
            group.create_metadata_builders(
                self.vllm_config, self.device, None, num_metadata_builders=2
            )

    def _afd_layout(self) -> Layout:
        """How this step holds its tokens: sharded over the TP ranks while FlashComm1 is on."""
        return Layout(
            get_tp_group().world_size, get_tensor_model_parallel_rank(), enable_sp(self.vllm_config)
        )

    def _afd_decide(self, num_reqs: int, num_input_tokens: int) -> StepDecision:
        """The plan of this step, on which all ranks of the TP group agree.

        Raises subclasses of :class:`~afd_plugin.errors.AgreementError` on every rank.
        """
        layout = self._afd_layout()
        topology = replace(self.afd_topology, tokens_sharded=layout.sharded)
        alignment = lcm(self.afd_config.async_moe_token_alignment, topology.token_alignment)
        tables = self.input_batch.block_table.block_tables
        try:
            decision = decide_step(
                self._afd_batch(num_reqs, num_input_tokens),
                replace(self.afd_config, async_moe_token_alignment=alignment),
                self._afd_kv_groups(
                    {index: table.slot_mapping.gpu for index, table in enumerate(tables)}
                ),
                topology,
            )
        except Exception as error:
            if self._afd_tp is not None:
                withdraw(self._afd_tp, error)
            raise
        if self._afd_tp is not None:
            agree_on_plan(self._afd_tp, decision.plan, layout)
        return decision

    def _sync_metadata_across_dp(
        self,
        num_tokens: int,
        is_draft_model: bool = False,
        cudagraph_mode: Any = CUDAGraphMode.NONE,
        allow_dp_padding: bool = False,
    ) -> Any:
        """Where the DP ranks meet in every step, idle ones too: all split their step, or none."""
        agreed = super()._sync_metadata_across_dp(
            num_tokens, is_draft_model, cudagraph_mode, allow_dp_padding
        )
        if self._afd_dp is not None and not is_draft_model:
            self._afd_agree_across_dp(self._afd_dp, num_tokens)
        return agreed

    def _afd_agree_across_dp(self, group: AgreementGroup, num_input_tokens: int) -> None:
        """Decide this rank's step and bring it in line with the others'."""
        step = self._afd_step
        terms = self.afd_config.described(DECIDES_STEPS)
        if step is None:  # an idle rank runs along with a dummy step
            agree_on_split(group, None, terms)
            return
        try:
            decision = self._afd_decide(self.input_batch.num_reqs, num_input_tokens)
        except Exception as error:
            withdraw(group, error)
            raise
        plan = agree_on_split(group, decision.plan, terms)
        step.decision = decision if plan is None else replace(decision, plan=plan)
        if isinstance(plan, SplitPlan):
            # Experts' communication needs the rows of every rank in each stage.
            mine = _ROWS.pack(*(stage.num_input_tokens for stage in plan.stages))
            rows = [_ROWS.unpack(given) for given in group.gather(mine)]
            step.rows_across_dp = tuple(
                torch.tensor(stage, dtype=torch.int32) for stage in zip(*rows, strict=True)
            )

    def _build_attention_metadata(
        self,
        num_tokens: int,
        num_reqs: int,
        max_query_len: int,
        num_tokens_padded: int | None = None,
        **options: Any,
    ) -> tuple[Any, Any]:
        """Decide the step's plan; of a split step build both stages' metadata."""

        def build() -> tuple[Any, Any]:
            result: tuple[Any, Any] = super(AFDNPUModelRunner, self)._build_attention_metadata(
                num_tokens, num_reqs, max_query_len, num_tokens_padded, **options
            )
            return result

        step = self._afd_step
        if step is None:
            return build()
        if step.decision is None:
            step.decision = self._afd_decide(num_reqs, num_tokens_padded or num_tokens)
        # As the runner pads a whole step: with sharded tokens, but for MLA.
        pad = enable_sp(self.vllm_config) and not self.model_config.use_mla
        return self._afd_build(
            step,
            build,
            lambda builders, plan: AscendStageBuilders(builders, plan, self._afd_caches, pad=pad),
        )

    def _model_forward(
        self,
        num_tokens_padded: int,
        input_ids: Any = None,
        positions: Any = None,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """The model once, or once a stage."""
        forward = super()._model_forward
        step = self._afd_step
        if step is None or step.decision is None:
            return forward(
                num_tokens_padded,
                input_ids,
                positions,
                intermediate_tensors,
                inputs_embeds,
                **model_kwargs,
            )
        parent = get_forward_context()

        def whole(**inputs: Any) -> Any:
            return forward(inputs["positions"].shape[-1], **inputs)

        return self._afd_forward(
            step,
            whole,
            lambda plan, stage, inputs: stage_scopes(
                self,
                parent,
                step.pairs,
                plan.stages[stage],
                stage,
                inputs=inputs,
                caches=self._afd_caches,
                rows_across_dp=step.rows_across_dp and step.rows_across_dp[stage],
            ),
            {"input_ids": input_ids, "positions": positions, "inputs_embeds": inputs_embeds},
            {"intermediate_tensors": intermediate_tensors, **model_kwargs},
        )


def _agreement(kind: str, group: Any) -> AgreementGroup | None:
    """The ranks of one of the engine's groups, on a group of their own; ``None`` for one rank."""
    if group.world_size == 1:
        return None
    return AgreementGroup(
        dist.distributed_c10d._get_default_store(),
        group.rank_in_group,
        group.world_size,
        name=f"{kind}/{'-'.join(map(str, group.ranks))}",
    )


@contextmanager
def _runner_class() -> Generator[None, None, None]:
    """``NPUWorker.init_device`` builds an :class:`AFDNPUModelRunner` inside.

    Why a patch: the worker names its runner class in the middle of ``init_device`` and offers
    no other seam.  The name and the signatures are pinned in ``compat.pinned_ascend``.  Remove
    when the worker takes its runner class from a method or attribute.
    """
    with replaced(AttributeSlot(worker_module, "NPUModelRunner"), AFDNPUModelRunner):
        yield


class AFDNPUWorker(TwoStageWorkerMixin, NPUWorker):  # type: ignore[misc]
    """Refuses what is not known to be right before anything is created, then splits prefill."""

    afd_runner_class = AFDNPUModelRunner

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
        **kwargs: Any,
    ) -> None:
        check_drift()
        self.afd_prepare(vllm_config, read_setup)
        register_for(vllm_config)
        super().__init__(
            vllm_config,
            local_rank,
            rank,
            distributed_init_method,
            is_driver_worker=is_driver_worker,
            **kwargs,
        )

    def init_device(self) -> None:
        with _runner_class():
            super().init_device()
        self.afd_attach()
