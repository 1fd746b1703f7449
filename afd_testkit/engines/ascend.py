"""The real vLLM-Ascend: on the NPUs of this host where there are any, else on the emulated NPU.

The code is the same for both.  What an emulated run cannot show is written into ``info`` and
into the facts of every run.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from afd_testkit.device_pool import is_emulated, why_too_few
from afd_testkit.engines._vllm_adapter import VllmEngine
from afd_testkit.engines._vllm_child import Backend
from afd_testkit.engines._vllm_environment import data_parallel_environments
from afd_testkit.engines.base import BLOCK_SIZES, EngineConfig, EngineError, Topology
from afd_testkit.npu.limits import VARIABLE
from afd_testkit.npu.process import emulated_environment
from afd_testkit.npu.settings import CANNOT_SHOW, SOCS, EmulationSettings

# The one size that vLLM-Ascend 0.23.0's attention backends name (get_supported_kernel_block_sizes).
BLOCK_SIZE = BLOCK_SIZES["ascend"]
MOST_RANKS = 16


def real_device() -> bool:
    """Whether engines run on this host's NPUs; otherwise on the emulated one."""
    installed = importlib.util.find_spec("torch_npu") is not None
    return installed and not is_emulated() and why_too_few(1) is None


def relaxed_limits(config: EngineConfig) -> list[str]:
    """Kinds of kernel limits that are not enforced in an emulated run of ``config``.

    The small models' dimensions are beyond the kernels' alignment.  float32 is beyond their
    dtypes; comparing in it shows the logic without rounding.  With spread tokens vLLM-Ascend
    describes padding as a request without keys, which the documented layout does not have.
    """
    kinds = ["alignment"]
    if config.dtype == "float32":
        kinds.append("dtype")
    if config.sequence_parallel:
        kinds.append("layout")
    return kinds


def emulation(config: EngineConfig, streams: str = "off") -> dict[str, Any]:
    """What is emulated for ``config``, as records show it."""
    soc = SOCS[config.soc]
    return {
        "soc": soc.name,
        "device": soc.device,
        "relaxed_limits": relaxed_limits(config),
        "mla_cast": "lifted" if config.dtype == "float32" else "kept",
        "streams": "checked" if streams == "check" else "unchecked",
        "cannot_show": list(CANNOT_SHOW),
    }


class AscendEngine(VllmEngine):
    """A :class:`~afd_testkit.engines.base.PrefillEngine` on vLLM-Ascend 0.23.0.post1."""

    name = "ascend"

    def __init__(
        self,
        config: EngineConfig,
        cache_dir: Path,
        progress: Callable[[str], None] | None = None,
        *,
        streams: str = "off",
        **limits: Any,
    ) -> None:
        """``streams``: ``check`` watches the order of accesses on the emulated NPU's streams."""
        if streams == "check" and real_device():
            raise EngineError(
                "streams are checked on the emulated NPU only, and this host has real ones; leave "
                "--afd-npu-streams=check out, or run where there is no NPU"
            )
        self._streams = streams
        super().__init__(config, cache_dir, progress, **limits)

    def check_config(self, config: EngineConfig) -> None:
        """Blocks that the attention backends take, and a topology that exists, not compiled."""
        if config.compiled:
            raise EngineError(
                "vLLM-Ascend compiles and captures graphs for real devices only, which these "
                "engines do not cover; leave compiled out, or use the engine vllm-cpu"
            )
        if config.block_size != BLOCK_SIZE:
            raise EngineError(
                f"block size {config.block_size} is not {BLOCK_SIZE}, the only one that "
                "vLLM-Ascend's attention backends support; set block_size=128"
            )
        if config.soc not in SOCS:
            raise EngineError(f"SoC {config.soc!r} is unknown; choose {' or '.join(SOCS)}")
        for name in ("tensor_parallel", "data_parallel"):
            if getattr(config, name) < 1:
                raise EngineError(f"{name} is {getattr(config, name)}; it must be at least 1")
        if config.ranks > MOST_RANKS:
            raise EngineError(
                f"{config.topology_label()} needs {config.ranks} processes; at most {MOST_RANKS} "
                "are supported"
            )
        if config.expert_parallel and config.ranks == 1:
            raise EngineError("expert_parallel needs several ranks; raise tensor_parallel")
        if config.sequence_parallel and (config.tensor_parallel == 1 or not config.expert_parallel):
            raise EngineError(
                "sequence_parallel spreads tokens over tensor-parallel ranks, and vLLM-Ascend "
                "does so for sparse models only where experts are spread, too; set "
                "tensor_parallel=2 or more and expert_parallel=True"
            )

    def backend(self, config: EngineConfig) -> Backend:
        """vLLM-Ascend's NPU worker; from a fork server where the NPU is emulated as an A2."""
        if real_device():
            preload, facts = None, {}
        else:
            # What the fork server emulates is fixed when it starts.
            asked = config.soc, config.dtype, self._streams
            usual = asked == (Topology.soc, EngineConfig.dtype, "off")
            preload = "afd_testkit.engines._ascend_preload" if usual else None
            facts = {"emulated_npu": emulation(config, self._streams)}
        return Backend(
            name=self.name,
            afd_worker="afd_plugin.workers.npu.AFDNPUWorker",
            versioned=(
                "vllm-ascend",
                "vllm-cpu",
                "vllm",
                "torch",
                "torch-npu",
                "transformers",
                "numpy",
                "afd-testkit",
            ),
            preload=preload,
            facts=facts,
        )

    def environment(self, config: EngineConfig) -> dict[str, str]:
        """The emulation where there is no device; forked workers only where nothing is open."""
        variables = {"VLLM_MLA_DISABLE": "0"}
        if real_device():
            return {**variables, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        return {
            **variables,
            **emulation_variables(config, self._streams),
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        }

    def rank_environments(self, config: EngineConfig) -> list[dict[str, str]]:
        """Who each data-parallel rank is."""
        return data_parallel_environments(config)

    def engine_args(self, config: EngineConfig) -> dict[str, Any]:
        """How the model is spread; chunked prefill is on also where every prompt fits a step.

        Without it vLLM-Ascend's latent attention has no context in prefill: a cached prefix, or
        the first piece of a cut request, is silently left out.
        """
        return {
            "enable_chunked_prefill": True,
            "tensor_parallel_size": config.tensor_parallel,
            "enable_expert_parallel": config.expert_parallel,
            "additional_config": {"enable_flashcomm1": config.sequence_parallel},
        }


def emulation_variables(config: EngineConfig, streams: str = "off") -> dict[str, str]:
    """What puts a process and its children under the emulation, beside this process's own."""
    settings = EmulationSettings(
        soc=config.soc,
        devices=max(config.ranks, 8),
        streams=streams,
        mla_cast="lift" if config.dtype == "float32" else "keep",
    )
    wanted = {**emulated_environment(settings), VARIABLE: ",".join(relaxed_limits(config))}
    return {name: value for name, value in wanted.items() if os.environ.get(name) != value}
