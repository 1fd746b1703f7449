"""Process groups by the name that HCCL gives them.

Device kernels that communicate (MoE dispatch and combine, fused matmul with reduce) are told
their group by name.  The emulated backend hands out such names and finds the group again here.
"""

from __future__ import annotations

import torch.distributed as dist

from afd_testkit.npu.errors import EmulationError

_GROUPS: dict[str, dist.ProcessGroup] = {}


def hccl_comm_name(group: dist.ProcessGroup) -> str:
    """The name of ``group``, the same for every call with it in this process."""
    name = f"emulated-hccl:{group.group_name}"
    _GROUPS[name] = group
    return name


def group_named(name: str) -> dist.ProcessGroup:
    """The group that :func:`hccl_comm_name` named; :class:`EmulationError` for any other."""
    if name not in _GROUPS:
        known = ", ".join(sorted(_GROUPS)) or "none"
        raise EmulationError(
            f"no process group is named {name!r}; known are {known}. Ask the group's backend for "
            "its name with get_hccl_comm_name(rank) in this process."
        )
    return _GROUPS[name]


def forget_groups() -> None:
    """Forget every name."""
    _GROUPS.clear()
