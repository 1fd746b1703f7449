"""What processes of a vLLM engine are given: checkpoint, threads, caches, place among ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from afd_testkit.engines.base import EngineConfig, EngineError
from afd_testkit.ports import hold_ports

_DP_PORTS = 16


def data_parallel_environments(config: EngineConfig) -> list[dict[str, str]]:
    """What tells each data-parallel rank of one engine who it is, in vLLM's own variables.

    vLLM uses the named port and those that follow it.
    """
    if config.data_parallel == 1:
        return [{}]
    port = str(hold_ports(_DP_PORTS, consecutive=True).release()[0])
    return [
        {
            "VLLM_DP_RANK": str(rank),
            "VLLM_DP_RANK_LOCAL": str(rank),
            "VLLM_DP_SIZE": str(config.data_parallel),
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": port,
        }
        for rank in range(config.data_parallel)
    ]


def check_common(name: str, config: EngineConfig) -> None:
    """Raise :class:`EngineError` for what no backend of vLLM can do."""
    if config.dtype not in ("float32", "bfloat16"):
        raise EngineError(
            f"{name} computes in float32 or bfloat16, not {config.dtype}; "
            "float64 is the reference engine's"
        )
    if config.step_tokens is None and config.max_step_tokens < config.max_model_len:
        raise EngineError(
            f"without chunks a step of {config.max_step_tokens} tokens cannot hold a prompt of "
            f"{config.max_model_len}; raise max_step_tokens or set step_tokens"
        )
    if config.step_tokens is not None and config.step_tokens < 1:
        raise EngineError(f"step_tokens is {config.step_tokens}; it must be at least 1")


def resolve_model(
    config: EngineConfig, cache_dir: Path, progress: Callable[[str], None]
) -> tuple[Path, dict[str, str], bool]:
    """Checked checkpoint folder, environment for its process, whether it needs AMX."""
    from afd_testkit.models import RECIPES, check_checkpoint, ensure_model, recipe

    folder = Path(config.model).expanduser()
    if config.model not in RECIPES and (folder.exists() or os.sep in config.model):
        info = check_checkpoint(folder)
        # Multi-head attention serves latent-attention models in every dtype; the CPU's MLA
        # kernels only some of them.
        latent = "kv_lora_rank" in info.config
        return info.path, {"VLLM_MLA_DISABLE": "1" if latent else "0"}, False
    made = recipe(config.model)
    if config.dtype not in made.dtypes:
        raise EngineError(
            f"model {made.name} runs in {' or '.join(made.dtypes)}, not in {config.dtype}"
        )
    path = ensure_model(made.name, cache_dir / "models", progress)
    check_checkpoint(path)
    return path, dict(made.environment), made.needs_amx


def threads_of_model(config: EngineConfig) -> int:
    """OpenMP threads of an engine.

    One for the built-in models: they gain nothing from more, and on a busy machine threads
    that wait for each other take a hundred times as long.
    """
    from afd_testkit.models import RECIPES

    return 1 if config.model in RECIPES else min(8, len(os.sched_getaffinity(0)))


def caches(config: EngineConfig, cache_dir: Path, scratch: str) -> dict[str, str]:
    """Where vLLM and the compiler keep what they make.

    Compiled code goes with the engine: what another version made must never be found again.
    """
    if not config.compiled:
        return {"VLLM_CACHE_ROOT": str(cache_dir / "vllm")}
    return {
        "VLLM_CACHE_ROOT": str(Path(scratch) / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(Path(scratch) / "inductor"),
        "TRITON_CACHE_DIR": str(Path(scratch) / "triton"),
    }
