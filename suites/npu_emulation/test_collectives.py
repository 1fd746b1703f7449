"""HCCL by name, gloo in fact: on two ranks, each a process of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from afd_testkit.npu import collectives, groups
from afd_testkit.npu.errors import EmulationError
from afd_testkit.npu.install import emulated
from afd_testkit.ranks import Rank, run_ranks

pytestmark = pytest.mark.cpu

SECONDS = 120.0


def exchange(rank: Rank, backend: str) -> dict[str, Any]:
    """What both ranks see of the collectives that the Ascend path uses."""
    with emulated():
        import torch_npu
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL

        torch.npu.set_device(rank.rank)
        dist.init_process_group(
            backend,
            init_method=rank.init_method,
            rank=rank.rank,
            world_size=rank.world_size,
            device_id=torch.device("npu", rank.rank),
        )
        try:
            options = ProcessGroupHCCL.Options()
            options.hccl_config = {"group_name": "pair"}
            pair = dist.new_group([0, 1], backend="hccl", pg_options=options)
            mine = torch.full((2,), float(rank.rank + 1), device="npu")
            total = mine.clone()
            dist.all_reduce(total, group=pair)
            parts = [torch.empty(2, device="npu") for _ in range(2)]
            dist.all_gather(parts, mine, group=pair)
            joined = torch.empty(4, device=f"npu:{rank.rank}")
            dist.all_gather_into_tensor(joined, mine, group=pair)
            sent = torch.arange(3.0) + 10 * rank.rank
            # Rank 0 keeps one row and sends two; rank 1 keeps two and sends one.
            splits = [1, 2]
            received = torch.empty(2 if rank.rank == 0 else 4)
            theirs = [1, 1] if rank.rank == 0 else [2, 2]
            dist.all_to_all_single(received, sent, theirs, splits, group=pair)
            dist.barrier(group=pair)
            name = pair._get_backend(torch.device("npu")).get_hccl_comm_name(rank.rank)
            return {
                "backend": dist.get_backend(pair),
                "available": dist.is_hccl_available(),
                "total": total.tolist(),
                "parts": [part.tolist() for part in parts],
                "joined": joined.tolist(),
                "received": received.tolist(),
                "name": name,
                "found": groups.group_named(name) is pair,
                "device": torch_npu.npu.current_device(),
            }
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["hccl", "cpu:gloo,npu:hccl"])
def test_collectives_over_what_is_called_hccl(backend: str) -> None:
    results = run_ranks(2, exchange, backend, timeout=SECONDS)
    for rank, seen in enumerate(results):
        assert seen["backend"] == "gloo"
        assert seen["available"] is True
        assert seen["total"] == [3, 3]
        assert seen["parts"] == [[1, 1], [2, 2]]
        assert seen["joined"] == [1, 1, 2, 2]
        assert seen["found"] is True
        assert seen["device"] == rank
    assert results[0]["received"] == [0, 10]
    assert results[1]["received"] == [1, 2, 11, 12]
    assert results[0]["name"] == results[1]["name"]


def test_a_group_that_no_one_made_has_no_name() -> None:
    with pytest.raises(EmulationError, match=r"'emulated-hccl:none'.*get_hccl_comm_name"):
        groups.group_named("emulated-hccl:none")


def test_a_backend_of_no_group_has_no_name() -> None:
    with pytest.raises(EmulationError, match="no process group of this process"):
        collectives._comm_name(object(), 0)


def test_a_group_is_made_by_torch_alone() -> None:
    with pytest.raises(EmulationError, match=r"new_group\(backend='hccl'\)"):
        collectives.ProcessGroupHCCL("store", 0, 2)


def gather_ragged(rank: Rank) -> list[list[float]]:
    """Rank r contributes r + 2 elements of value r; the parts are views of one tensor."""
    with emulated(), rank.gloo():
        whole = torch.zeros(5, device="npu")
        parts = list(torch.tensor_split(whole, [2]))
        mine = torch.full((rank.rank + 2,), float(rank.rank), device="npu")
        dist.all_gather(parts, mine)
        return [part.tolist() for part in parts] + [whole.tolist()]


def test_parts_of_different_sizes_are_gathered() -> None:
    """As HCCL does, and as vLLM-Ascend's exchange of experts needs for odd numbers of tokens."""
    expected = [[0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0, 1.0]]
    assert run_ranks(2, gather_ragged, timeout=SECONDS) == [expected, expected]
