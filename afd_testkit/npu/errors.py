"""What the emulated NPU refuses.

EmulationError
├── NotEmulated               a known name of the Ascend stack that has no reference here
│   └── UnknownName           a name that the pinned Ascend stack does not have (AttributeError)
├── KernelLimit               arguments that the device's kernel does not take
├── EmulationConflict         something else stands where the emulation must be installed
└── StreamHazard              an access that no event, wait or synchronize orders
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class EmulationError(Exception):
    """Base of everything that the emulated NPU raises on its own account."""


class NotEmulated(EmulationError, NotImplementedError):
    """A name that exists on a device and has no reference implementation here."""


class UnknownName(NotEmulated, AttributeError):
    """A name that the pinned Ascend stack does not have."""


class KernelLimit(EmulationError, ValueError):
    """Arguments outside of what the documentation says that the kernel takes."""


class EmulationConflict(EmulationError):
    """The emulation cannot be installed beside what this process already has."""


class StreamHazard(EmulationError):
    """Two accesses to one storage, at least one of them a write, that nothing orders."""


def describe_value(value: object) -> str:
    """One argument, short: a tensor as ``float32[3, 4]``, other values by their repr."""
    # Imported here: these errors are raised before torch is loaded, too.
    import torch

    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        layout = "" if value.is_contiguous() else f" strides {list(value.stride())}"
        return f"{dtype}{list(value.shape)}{layout}"
    if isinstance(value, list | tuple):
        inner = ", ".join(describe_value(item) for item in value[:8])
        return f"[{inner}{', …' if len(value) > 8 else ''}]"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def describe_call(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """The call as it was made, tensors as dtype and shape."""
    given = [describe_value(value) for value in args]
    given += [f"{key}={describe_value(value)}" for key, value in kwargs.items()]
    return f"{name}({', '.join(given)})"
