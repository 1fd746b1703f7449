"""``worker_cls="afd_plugin.workers.cpu.AFDCPUWorker"``: vLLM's CPU worker with split prefill."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from afd_plugin.compat.vllm import read_setup
from afd_plugin.config import AFDConfig
from afd_plugin.context import AttributeSlot, replaced
from afd_plugin.errors import UpstreamDrift
from afd_plugin.registration import register
from afd_plugin.validation import validate, validate_backends
from afd_plugin.workers.runner import TwoStageRunnerMixin


class AFDCPUModelRunner(TwoStageRunnerMixin, CPUModelRunner):  # type: ignore[misc]
    """The CPU model runner, able to run a step as two stages."""


@contextmanager
def _runner_class() -> Generator[None, None, None]:
    """``CPUWorker.init_device`` builds an :class:`AFDCPUModelRunner` inside.

    Why a patch: the worker names its runner class in the middle of ``init_device`` and offers
    no other seam; building a second runner would load the device state twice.  The signatures
    of both are pinned in ``compat.vllm``.  Remove when the worker takes its runner class from
    a method or attribute.
    """
    with replaced(AttributeSlot(cpu_worker, "CPUModelRunner"), AFDCPUModelRunner):
        yield


class AFDCPUWorker(CPUWorker):  # type: ignore[misc]
    """Refuses what is not known to be right before anything is created, then splits prefill."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        register()
        self._afd_config = AFDConfig.from_additional_config(vllm_config.additional_config)
        self._afd_setup = read_setup(vllm_config)
        validate(self._afd_setup, self._afd_config)
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
        if self._splits():
            self.model_runner.afd_start(self._afd_config)
        elif self._afd_config.async_moe_ubatching:
            raise UpstreamDrift(
                f"CPUWorker.init_device built a {type(self.model_runner).__qualname__}, not an "
                "AFDCPUModelRunner, which alone can split. Install a pinned vLLM, or turn the "
                'split off: additional_config={"afd": {"async_moe_ubatching": false}}.'
            )

    def _splits(self) -> bool:
        """Whether the runner can split; Model Runner V2 cannot, and runs with the split off."""
        return isinstance(self.model_runner, AFDCPUModelRunner)

    def afd_configure(self, options: dict[str, Any]) -> None:
        """Replace the options between steps, judged as at start-up; for tests and replays.

        Raises what start-up would raise; the earlier options then stay in force.
        """
        config = AFDConfig.from_options(options)
        validate(self._afd_setup, config)
        if self._splits():
            validate_backends(self.model_runner.afd_backends(), config)
            self.model_runner.afd_config = config
        self._afd_config = config

    def afd_take_evidence(self) -> list[dict[str, Any]]:
        """Evidence of each step since the last call (``StepEvidence.as_dict``).

        A runner that cannot split records none.
        """
        return list(self.model_runner.afd_take_evidence()) if self._splits() else []
