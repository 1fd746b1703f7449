"""What is emulated: SoC, number of devices, stream checking.

Settings travel to worker processes in environment variables, so that every process that is
started under the emulation emulates the same thing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from afd_testkit.npu.errors import EmulationError

#: ``1`` in processes that run on the emulated NPU; device evidence cannot come from them.
EMULATED = "AFD_NPU_EMULATED"
#: Ascend's own variable: which of the host's devices a process sees.
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
PREFIX = "AFD_NPU_"
#: What ``torch.version.cann`` says: the version that vLLM-Ascend 0.23.0's own images install.
CANN_VERSION = "9.1.0"


#: What no run on the emulated NPU can show, and every report of one says.
CANNOT_SHOW = (
    "races and ordering faults that the stream checker does not see (all of them with it off)",
    "device precision: rounding between steps, reduction order, formats such as HF32 and NZ",
    "graph capture and replay, compiled graphs, triton kernels",
    "memory: capacity, fragmentation, what a cache could hold",
    "speed: neither kernels nor communication take the time that they take on a device",
    "limits of kernels, drivers and HCCL that their documentation does not state",
)


@dataclass(frozen=True)
class SoC:
    """A system on chip as vLLM-Ascend tells it apart.

    ``version``: what ``torch_npu.npu.get_soc_version()`` answers; vLLM-Ascend 0.23.0 takes
    220-225 for A2 and 250-255 for A3.  ``memory``: bytes of one device.
    """

    name: str
    device: str
    version: int
    memory: int


# Device names and memory as in Huawei's product pages: Atlas A2 910B1, Atlas A3 9391.
SOCS = {
    "A2": SoC("A2", "Ascend910B1", 220, 64 << 30),
    "A3": SoC("A3", "Ascend910_9391", 250, 64 << 30),
}
STREAM_MODES = ("off", "check")
# The real MLA prefill casts fp32 to bf16 (vllm_ascend/attention/mla_v1.py of 0.23.0.post1,
# `_forward_prefill`); with "lift" that cast is left out, so that its logic shows in fp32.
MLA_CASTS = ("keep", "lift")


@dataclass(frozen=True)
class EmulationSettings:
    """``soc``: ``A2`` or ``A3``.  ``devices``: how many this host shows.  ``streams``: ``off``
    or ``check``, the happens-before checker.  ``mla_cast``: ``keep`` or ``lift`` the real
    code's cast of MLA prefill to bf16."""

    soc: str = "A2"
    devices: int = 8
    streams: str = "off"
    mla_cast: str = "keep"

    def __post_init__(self) -> None:
        if self.soc not in SOCS:
            raise EmulationError(f"SoC {self.soc!r} is not emulated; choose {' or '.join(SOCS)}.")
        if self.streams not in STREAM_MODES:
            raise EmulationError(
                f"stream mode {self.streams!r} is unknown; choose {' or '.join(STREAM_MODES)}."
            )
        if self.mla_cast not in MLA_CASTS:
            raise EmulationError(
                f"mla_cast {self.mla_cast!r} is unknown; choose {' or '.join(MLA_CASTS)}."
            )
        if not 1 <= self.devices <= 64:
            raise EmulationError(f"{self.devices} devices; emulate from 1 to 64.")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> EmulationSettings:
        """The settings that ``environment`` carries, defaults for what it does not say."""
        given: dict[str, str | int] = {}
        for field in fields(cls):
            text = environment.get(PREFIX + field.name.upper())
            if text is not None:
                given[field.name] = _number(field.name, text) if field.name == "devices" else text
        return cls(**given)  # type: ignore[arg-type]

    def as_environment(self) -> dict[str, str]:
        """The variables that carry these settings to a child process."""
        carried = {
            PREFIX + field.name.upper(): str(getattr(self, field.name)) for field in fields(self)
        }
        return {EMULATED: "1", **carried}


def visible_devices(
    count: int, environment: Mapping[str, str] = os.environ
) -> tuple[int, ...] | None:
    """The devices that ``ASCEND_RT_VISIBLE_DEVICES`` names, None where it is not set.

    :class:`EmulationError` for what is no index of one of the host's ``count`` devices.
    """
    text = environment.get(VISIBLE)
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if wrong := [part for part in parts if not (part.isdecimal() and int(part) < count)]:
        raise EmulationError(
            f"{VISIBLE}={text!r} names {', '.join(wrong)}; the emulated host has the devices 0 to "
            f"{count - 1}. Name some of these, or emulate more with AFD_NPU_DEVICES (--devices)."
        )
    return tuple(map(int, parts))


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise EmulationError(
            f"{PREFIX}{name.upper()}={text!r} is no whole number; give one such as 8."
        ) from None
