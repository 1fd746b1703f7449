"""``worker_cls="afd_plugin.workers.cpu.AFDCPUWorker"``: vLLM's CPU worker with split prefill."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from afd_plugin import routing
from afd_plugin.compat import vllm_experts
from afd_plugin.compat.routing import register_for, route_through_op
from afd_plugin.compat.stages import StageBuilders
from afd_plugin.compat.vllm import read_setup
from afd_plugin.compat.vllm_stages import stage_forward_context
from afd_plugin.context import AttributeSlot, replaced
from afd_plugin.decision import decide_step
from afd_plugin.registration import register
from afd_plugin.validation import validate_backends
from afd_plugin.workers.runner import TwoStageRunnerMixin
from afd_plugin.workers.worker import TwoStageWorkerMixin


class AFDCPUModelRunner(TwoStageRunnerMixin, CPUModelRunner):  # type: ignore[misc]
    """The CPU model runner, able to run a step as two stages."""

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Every layer's expert ids pass through the routing operator, then over the connector."""
        super().load_model(load_dummy_weights)
        layers = self.compilation_config.static_forward_context.values()
        route_through_op(
            (layer for layer in layers if isinstance(layer, MoERunner)),
            self.afd_config.force_balanced_routing,
        )
        self.afd_connect(vllm_experts.backends_of(layers), vllm_experts.seam)

    def profile_run(self, randomize_inputs: bool = False) -> None:
        """The routing operator is told; vLLM has no flag of its own."""
        with routing.profile_run():
            super().profile_run(randomize_inputs)

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

    def _build_attention_metadata(
        self,
        num_tokens: int,
        num_reqs: int,
        max_query_len: int,
        *,
        slot_mappings: Any = None,
        **options: Any,
    ) -> tuple[Any, Any]:
        """Decide the step's plan; of a split step build both stages' metadata."""

        def build() -> tuple[Any, Any]:
            result: tuple[Any, Any] = super(AFDCPUModelRunner, self)._build_attention_metadata(
                num_tokens, num_reqs, max_query_len, slot_mappings=slot_mappings, **options
            )
            return result

        step = self._afd_step
        if step is None or slot_mappings is None:
            return build()
        step.decision = decide_step(
            self._afd_batch(num_reqs),
            self.afd_config,
            self._afd_kv_groups(slot_mappings),
            self.afd_topology,
        )
        return self._afd_build(step, build, StageBuilders)

    def _model_forward(
        self,
        input_ids: Any = None,
        positions: Any = None,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """The model once, or once a stage."""
        whole = super()._model_forward
        step = self._afd_step
        if step is None or step.decision is None:
            return whole(input_ids, positions, intermediate_tensors, inputs_embeds, **model_kwargs)
        parent = get_forward_context()
        return self._afd_forward(
            step,
            whole,
            lambda plan, stage, inputs: [
                stage_forward_context(parent, step.pairs, plan.stages[stage], stage)
            ],
            {"input_ids": input_ids, "positions": positions, "inputs_embeds": inputs_embeds},
            {"intermediate_tensors": intermediate_tensors, **model_kwargs},
        )


@contextmanager
def _runner_class() -> Generator[None, None, None]:
    """``CPUWorker.init_device`` builds an :class:`AFDCPUModelRunner` inside.

    Why a patch: the worker names its runner class in the middle of ``init_device`` and offers
    no other seam; building a second runner would load the device state twice.  The signatures
    of both are pinned in ``compat.pinned_vllm``.  Remove when the worker takes its runner class
    from a method or attribute.
    """
    with replaced(AttributeSlot(cpu_worker, "CPUModelRunner"), AFDCPUModelRunner):
        yield


class AFDCPUWorker(TwoStageWorkerMixin, CPUWorker):  # type: ignore[misc]
    """Refuses what is not known to be right before anything is created, then splits prefill."""

    afd_runner_class = AFDCPUModelRunner

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        register()
        self.afd_prepare(vllm_config, read_setup)
        register_for(vllm_config)
        super().__init__(
            vllm_config,
            local_rank,
            rank,
            distributed_init_method,
            is_driver_worker=is_driver_worker,
        )

    def init_device(self) -> None:
        with _runner_class():
            super().init_device()
        self.afd_attach()
