"""Products that are summed over ranks, on gloo with 2 and 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from afd_testkit.npu import groups
from afd_testkit.npu.errors import EmulationError, KernelLimit, NotEmulated
from afd_testkit.npu.limits import relaxed
from afd_testkit.npu.ops import communication
from afd_testkit.ranks import Rank, run_ranks

pytestmark = pytest.mark.cpu

DEPTH, WIDTH = 256, 3


def factors(rank: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What rank ``rank`` multiplies: small integers, exact in bf16."""
    generator = torch.Generator().manual_seed(rank)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(torch.bfloat16)

    return integers(rows, DEPTH), integers(DEPTH, WIDTH), integers(WIDTH)


def summed(world: int, rows: int, with_bias: bool) -> torch.Tensor:
    """int64: the sum over ranks, exact."""
    total = torch.zeros(rows, WIDTH, dtype=torch.int64)
    for rank in range(world):
        x, weight, bias = (t.long() for t in factors(rank, rows))
        total += x @ weight + (bias if with_bias else 0)
    return total


def products(rank: Rank, rows: int) -> dict[str, list[Any]]:
    x, weight, bias = factors(rank.rank, rows)
    with rank.gloo() as group:
        name = groups.hccl_comm_name(group)
        try:
            whole = communication.npu_mm_all_reduce_base(x, weight, name, bias=bias)
            deep = communication.npu_mm_all_reduce_base(x.unsqueeze(0), weight, name)
            block = communication.npu_mm_reduce_scatter_base(x, weight, name, rank.world_size)
            with relaxed("layout", "dtype"):
                wide = communication.npu_mm_reduce_scatter_base(
                    x[:, :4].contiguous().float(), weight[:4].float(), name, rank.world_size,
                    comm_mode="ai_cpu",
                )  # fmt: skip
        finally:
            del group
    return {
        "whole": whole.tolist(),
        "deep": deep[0].tolist(),
        "block": block.tolist(),
        "wide": wide.tolist(),
        "dtypes": [whole.dtype, block.dtype, wide.dtype],
    }


@pytest.mark.parametrize("world", [2, 4])
def test_products_are_summed_over_ranks(world: int) -> None:
    rows = 2 * world
    results = run_ranks(world, products, rows)
    exact = summed(world, rows, False)
    short = torch.zeros(rows, WIDTH, dtype=torch.int64)
    for rank in range(world):
        x, weight, _ = (t.long() for t in factors(rank, rows))
        short += x[:, :4] @ weight[:4]
    for rank, result in enumerate(results):
        assert result["whole"] == summed(world, rows, True).bfloat16().tolist()
        assert result["deep"] == exact.bfloat16().tolist()
        assert result["block"] == exact[2 * rank : 2 * rank + 2].bfloat16().tolist()
        assert result["wide"] == short[2 * rank : 2 * rank + 2].tolist()
        assert result["dtypes"] == [torch.bfloat16, torch.bfloat16, torch.float32]


X, W = torch.ones(2, 256).half(), torch.ones(256, 3).half()


def reduced(*args: object, **kwargs: object) -> Callable[[], object]:
    return lambda: communication.npu_mm_all_reduce_base(*args, "no group", **kwargs)  # type: ignore[arg-type]


def scattered(
    x: torch.Tensor, w: torch.Tensor, world: int = 2, **kwargs: Any
) -> Callable[[], object]:
    return lambda: communication.npu_mm_reduce_scatter_base(x, w, "no group", world, **kwargs)


LIMITS: dict[str, tuple[str, Callable[[], object]]] = {
    "reduce x1": ("dtype", reduced(X.float(), W.float())),
    "reduce x2": ("dtype", reduced(X, W.bfloat16())),
    "reduce bias": ("dtype", reduced(X, W, bias=torch.ones(3))),
    "reduce axes": ("layout", reduced(X[0], W)),
    "reduce empty": ("layout", reduced(X[:0], W)),
    "scatter input": ("dtype", scattered(X.float(), W.float())),
    "scatter ranks": ("layout", scattered(X, W, 1)),
    "scatter axes": ("layout", scattered(X.unsqueeze(1), W)),
    "scatter depth": ("layout", scattered(X[:, :8].contiguous(), W[:8])),
    "scatter transposed": ("layout", scattered(torch.ones(256, 2).half().t(), W)),
}


@pytest.mark.parametrize("case", list(LIMITS))
def test_limits_come_first_and_relaxed_the_group_is_looked_for(case: str) -> None:
    kind, call = LIMITS[case]
    with pytest.raises(KernelLimit, match=f"kind '{kind}'"):
        call()
    with relaxed(kind), pytest.raises(EmulationError, match="no process group is named"):
        call()


def test_aiv_takes_any_depth() -> None:
    with pytest.raises(EmulationError, match="no process group is named"):
        scattered(X[:, :8].contiguous(), W[:8], comm_mode="aiv")()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (reduced(X, W[:8]), r"\[2, 256\] and \[8, 3\]"),
        (reduced(X, W, bias=torch.ones(2).half()), r"bias has shape \[2\]"),
        (scattered(X[:1], W), "1 rows do not divide among 2"),
    ],
)
def test_what_has_no_result_is_refused_even_relaxed(call: Callable[[], object], says: str) -> None:
    with relaxed("layout", "alignment"), pytest.raises(KernelLimit, match=says):
        call()


REDUCE = {
    "reduce_op": "max",
    "antiquant_scale": X,
    "antiquant_offset": X,
    "x3": X,
    "dequant_scale": X,
    "pertoken_scale": X,
    "comm_quant_scale_1": X,
    "comm_quant_scale_2": X,
    "antiquant_group_size": 32,
    "comm_turn": 1,
    "group_sizes": [1],
    "y_dtype": 1,
    "x1_dtype": 1,
    "x2_dtype": 1,
    "dequant_scale_dtype": 1,
    "pertoken_scale_dtype": 1,
    "comm_quant_mode": 1,
}
SCATTER = {
    "reduce_op": "max",
    "bias": X,
    "x1_scale": X,
    "x2_scale": X,
    "comm_turn": 1,
    "output_dtype": torch.float16,
    "comm_mode": "ccu",
}


@pytest.mark.parametrize("name", list(REDUCE))
def test_what_all_reduce_does_not_emulate_is_named(name: str) -> None:
    with pytest.raises(NotEmulated, match=f"{name}="):
        reduced(X, W, **{name: REDUCE[name]})()


@pytest.mark.parametrize("name", list(SCATTER))
def test_what_reduce_scatter_does_not_emulate_is_named(name: str) -> None:
    with pytest.raises(NotEmulated, match=f"{name}="):
        scattered(X, W, **{name: SCATTER[name]})()
