"""HCCL on a host: gloo carries what the device's fabric would.

``torch.distributed`` is asked for ``hccl`` by name; inside the emulation that name means gloo,
and HCCL's options are checked for their type and dropped.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from afd_testkit.npu import groups
from afd_testkit.npu.errors import EmulationError, NotEmulated
from afd_testkit.npu.patches import PatchSet


class HCCLOptions:
    """``ProcessGroupHCCL.Options``: the attributes that vLLM-Ascend sets."""

    def __init__(self) -> None:
        self.hccl_config: dict[str, Any] = {}
        self.is_high_priority_stream = False
        self._timeout: Any = None
        self.global_ranks_in_group: list[int] = []
        self.group_id = ""


class ProcessGroupHCCL:
    """Only its options exist; a group is made with ``torch.distributed.new_group``."""

    Options = HCCLOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise EmulationError(
            "ProcessGroupHCCL is made by torch.distributed; use new_group(backend='hccl')."
        )


def _gloo_name(backend: object) -> object:
    """``hccl`` anywhere in a backend's name (``cpu:gloo,npu:hccl`` too) becomes gloo."""
    return "gloo" if backend is not None and "hccl" in str(backend).lower() else backend


def _with_gloo(make: Any, backend_position: int) -> Any:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if "backend" in kwargs:
            kwargs = {**kwargs, "backend": _gloo_name(kwargs["backend"])}
        elif len(args) > backend_position:
            place = backend_position
            args = (*args[:place], _gloo_name(args[place]), *args[place + 1 :])
        if isinstance(kwargs.get("pg_options"), HCCLOptions):
            kwargs = {**kwargs, "pg_options": None}
        # Binds a group to an accelerator at once; gloo has none.
        kwargs.pop("device_id", None)
        return make(*args, **kwargs)

    return made


def _comm_name(backend: Any, rank: int, init_comm: bool = True) -> str:
    """``get_hccl_comm_name``: the name under which kernels find this group."""
    for group in c10d._world.pg_map:
        if isinstance(group, dist.ProcessGroup) and _backend_of(group) == backend:
            return groups.hccl_comm_name(group)
    raise EmulationError("the backend belongs to no process group of this process.")


def _backend_of(group: dist.ProcessGroup) -> Any:
    return group._get_backend(torch.device("cpu"))


def _ragged(all_gather: Any) -> Any:
    """``all_gather`` that, as HCCL's, takes parts of different sizes, which gloo does not."""

    @functools.wraps(all_gather)
    def gathered(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if len({part.shape for part in tensor_list}) <= 1:
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        if async_op:
            raise NotEmulated(
                "all_gather of parts of different sizes with async_op=True; without it works."
            )
        tensor_list[dist.get_rank(group)].copy_(tensor)
        for rank, part in enumerate(tensor_list):
            dist.broadcast(part, group=group, group_src=rank)
        return None

    return gathered


def install(patches: PatchSet) -> None:
    """HCCL is available, and is gloo."""
    gather = _ragged(c10d.all_gather)
    start = _with_gloo(c10d.init_process_group, backend_position=0)
    subgroup = _with_gloo(c10d.new_group, backend_position=2)
    for module in (dist, c10d):
        patches.attribute(module, "init_process_group", start)
        patches.attribute(module, "new_group", subgroup)
        patches.attribute(module, "all_gather", gather)
    patches.attribute(dist, "is_hccl_available", lambda: True)
    patches.attribute(c10d.ProcessGroupGloo, "get_hccl_comm_name", _comm_name)
