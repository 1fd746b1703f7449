"""Process groups by the name that HCCL gives them.

Device kernels that communicate (MoE dispatch and combine, fused matmul with reduce) are told
their group by name.  The emulated backend hands out such names; ``torch.distributed`` itself
keeps the groups, so that none outlives its destruction here.
"""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from afd_testkit.npu.errors import EmulationError

_PREFIX = "emulated-hccl:"


def hccl_comm_name(group: dist.ProcessGroup) -> str:
    """The name of ``group``, the same for every call with it in this process."""
    return f"{_PREFIX}{group.group_name}"


def group_named(name: str) -> dist.ProcessGroup:
    """The group that :func:`hccl_comm_name` named; :class:`EmulationError` for any other."""
    known = {hccl_comm_name(group): group for group in c10d._world.pg_map}
    if name not in known:
        raise EmulationError(
            f"no process group is named {name!r}; known are {', '.join(sorted(known)) or 'none'}. "
            "Ask the group's backend for its name with get_hccl_comm_name(rank) in this process."
        )
    return known[name]
