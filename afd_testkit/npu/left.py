"""What code inside an emulation that ends may leave on in torch; it is turned off with it."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Left:
    """What was on when this was made; :meth:`clear` turns off what has come since."""

    def __init__(self) -> None:
        self._device = _default_device()
        self._groups = _has_groups()

    def clear(self) -> list[str]:
        """Turn it off; what it was, each with the call that should have turned it off."""
        left = []
        if (device := _default_device()) != self._device:
            torch.set_default_device(self._device)
            left.append(f"torch.set_default_device({str(device)!r}), undone by None")
        if _has_groups() and not self._groups:
            dist.destroy_process_group()
            left.append("torch.distributed's process groups, undone by destroy_process_group()")
        return left


def _default_device() -> torch.device | None:
    """What ``torch.set_default_device`` was told in this thread; None where it was not."""
    context = vars(torch._GLOBAL_DEVICE_CONTEXT).get("device_context")
    return None if context is None else context.device


def _has_groups() -> bool:
    return bool(dist.is_available() and dist.is_initialized())
