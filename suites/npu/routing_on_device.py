"""The routing operator on ``npu``: eager, compiled, and inside a captured graph.

Run as ``python routing_on_device.py PART...`` in a process of its own, with a real device or under
``afd-testkit emulate``; prints one line of JSON.  Expert ids are chosen by scores that are a
permutation of 0 to 7 in each row, so that which two are largest is known without computing.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch_npu  # noqa: F401

from afd_plugin.routing import (
    ROUTING_OP,
    balance_routing_ids_,
    profile_run,
    register_routing_op,
    routing_calls,
    script_runtime,
)
from afd_testkit.device_pool import is_emulated
from afd_testkit.library import OPCHECKS, OpCase, assert_op_contract

EXPERTS, TOKENS = 8, 16
DEVICE = torch.device("npu:0")


def scores(first: int) -> torch.Tensor:
    """[TOKENS, EXPERTS]: every token wants expert ``first`` most and then the next one."""
    row = [0.0] * EXPERTS
    for place in range(EXPERTS):
        row[(first + place) % EXPERTS] = float(EXPERTS - 1 - place)
    return torch.tensor([row] * TOKENS)


def wanted(first: int) -> list[list[int]]:
    """What :func:`scores` asks for."""
    return [[first, (first + 1) % EXPERTS]] * TOKENS


def route(logits: torch.Tensor) -> torch.Tensor:
    """As a gated layer: top-2 of the scores, int32, through the operator."""
    ids = torch.topk(logits, 2, dim=-1).indices.to(torch.int32)
    torch.ops.vllm.afd_balance_routing_ids_(ids, EXPERTS, False)
    return ids


def is_even(ids: list[list[int]]) -> bool:
    """Every expert is wanted by as many tokens as every other."""
    counts = Counter(expert for row in ids for expert in row)
    return counts == dict.fromkeys(range(EXPERTS), TOKENS * 2 // EXPERTS)


def eager() -> dict[str, Any]:
    """Both dtypes, both branches, and a view whose neighbours must stay."""
    told: dict[str, Any] = {}
    for dtype in (torch.int32, torch.int64):
        sent = torch.tensor(wanted(3), dtype=dtype)
        ids = sent.to(DEVICE)
        balance_routing_ids_(ids, EXPERTS)
        told[f"{dtype} live"] = bool(torch.equal(ids.cpu(), sent))
        balance_routing_ids_(ids, EXPERTS, force_balance=True)
        told[f"{dtype} forced"] = is_even(ids.cpu().tolist())
        base = torch.full((TOKENS, 4), -1, dtype=dtype).to(DEVICE)
        balance_routing_ids_(base[:, ::2], EXPERTS, force_balance=True)
        there = base.cpu()
        told[f"{dtype} strided"] = is_even(there[:, ::2].tolist()) and bool(
            (there[:, 1::2] == -1).all()
        )
        balance_routing_ids_(torch.empty(0, 2, dtype=dtype).to(DEVICE), EXPERTS, True)
    return told


def compiled() -> dict[str, Any]:
    """Compiled while profiling, then live with two inputs, then profiling again; one graph."""
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    layer = torch.compile(route, backend=backend, fullgraph=True)
    ids = []
    for profiling, first in ((True, 0), (False, 3), (False, 6), (True, 3)):
        with profile_run(profiling):
            ids.append(layer(scores(first).to(DEVICE)).cpu().tolist())
    told = {
        "profiled": is_even(ids[0]),
        "live": ids[1:3] == [wanted(3), wanted(6)],
        "profiled again": is_even(ids[3]),
        "graphs": len(graphs),
        "top-k inside": any("topk" in target for target in graphs[0]),
    }
    full = torch.full((7, 4), 3, dtype=torch.int32)
    cases = [
        OpCase("forced, odd rows", (full[:, :2].contiguous().to(DEVICE), EXPERTS, True)),
        OpCase("forced, no rows", (full[:0, :2].contiguous().to(DEVICE), EXPERTS, True)),
        OpCase("forced, int64", (full[:, :2].long().to(DEVICE), EXPERTS, True)),
        OpCase("forced, strided", (full.to(DEVICE)[:, ::2], EXPERTS, True)),
        OpCase("live", (full[:, :2].contiguous().to(DEVICE), EXPERTS, False)),
    ]
    # Its last check asks for the random state of the accelerator, which the emulation has not.
    checks = OPCHECKS[:-1] if is_emulated() else OPCHECKS
    assert_op_contract(ROUTING_OP, cases, backends=("aot_eager",), opchecks=checks)
    return told


def captured() -> dict[str, Any]:
    """A graph captured with the flag cleared, replayed over one static buffer with two inputs."""
    static = scores(0).to(DEVICE)
    for _ in range(3):  # what allocates and initializes happens before the capture
        route(static)
    torch.npu.synchronize()
    calls = routing_calls()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        out = route(static)
    told: dict[str, Any] = {"operator ran while capturing": routing_calls().since(calls).natural}
    for name, first in (("first", 3), ("second", 6)):
        static.copy_(scores(first).to(DEVICE))
        graph.replay()
        torch.npu.synchronize()
        told[name] = out.cpu().tolist() == wanted(first)
    return told


PARTS = {part.__name__: part for part in (eager, compiled, captured)}

if __name__ == "__main__":
    register_routing_op(script_runtime())
    torch.npu.set_device(DEVICE)
    results = {name: PARTS[name]() for name in sys.argv[1:]}
    print(json.dumps(results | {"device": torch.npu.get_device_name(0)}))
