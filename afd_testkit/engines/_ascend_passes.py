"""How vLLM-Ascend sends a pass through the model: read from its forward context of that pass.

The runtime decides for each forward; what the configuration asks for is only a wish.
"""

from __future__ import annotations

from typing import Any

from vllm.forward_context import get_forward_context

from afd_testkit.engines.base import EngineConfig, EngineError


def way_of_pass() -> dict[str, str]:
    """How experts exchange tokens, and whether tokens are spread over TP ranks (FlashComm1)."""
    context: Any = get_forward_context()
    return {
        "moe_communication": "none"
        if context.moe_comm_type is None
        else context.moe_comm_type.name,
        "flash_comm": "on" if context.flash_comm_v1_enabled else "off",
    }


def check_pass(config: EngineConfig, rows: int) -> None:
    """:class:`EngineError` where tokens are not spread as ``config`` says."""
    spread = bool(get_forward_context().flash_comm_v1_enabled)
    if spread != config.sequence_parallel:
        raise EngineError(
            f"sequence_parallel is {config.sequence_parallel}, but a pass of {rows} rows ran with "
            f"FlashComm1 {'on' if spread else 'off'}"
        )
