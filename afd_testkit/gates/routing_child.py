"""A gated layer's routing, compiled in a process of its own, for the gate ``routing``.

Run as ``python -m afd_testkit.gates.routing_child``: reads :class:`Order` values from its standard
input and writes an :class:`Answer` to each to its standard output, all as JSON.  In a process of
its own, because what dynamo and torch.library keep of a compilation cannot all be put back.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from afd_testkit.engines.base import EngineError

if TYPE_CHECKING:
    import torch


Guards = Literal["kept", "dropped"]


@dataclass(frozen=True)
class Order:
    """What to run.

    ``gate``: [H, E] weights of the gate.  ``inputs``: [T, H] each, T may differ.  ``calls``:
    (index of the input, whether the profile flag is set), in order, through one callable.
    ``guards``: ``kept``, or ``dropped``: what the first call compiled serves every later one.
    ``dtype``: of gate and inputs.  ``device``: of all tensors.  ``fault``: in force throughout.
    """

    gate: Sequence[Sequence[float]]
    inputs: Sequence[Sequence[Sequence[float]]]
    calls: Sequence[tuple[int, bool]]
    top_k: int
    id_dtype: str
    guards: Guards
    dtype: str = "float32"
    device: str = "cpu"
    fault: str | None = None


@dataclass(frozen=True)
class Answer:
    """What came out.

    ``ids``: [T, K] of each call.  ``graphs``: of every compilation, the names of what is in its
    graph.  ``balanced``, ``natural``: executions of the operator as it counts them itself.
    ``contract``: what torch's own check says of the registered operator, empty if it agrees.
    """

    ids: list[list[list[int]]]
    graphs: list[list[str]]
    balanced: int
    natural: int
    contract: str
    operator: str


_SECONDS = 300.0
_TAIL_LINES = 15
# Mutation as declared, no gradient, fake as real; the gate itself compares compiled with eager.
_CONTRACT = ("test_schema", "test_autograd_registration", "test_faketensor")


def ask(orders: Sequence[Order], environment: Mapping[str, str]) -> list[Answer]:
    """The answers of one new process with ``environment`` beside this one's.

    Raises :class:`EngineError` with the end of what the process said if it gives none.
    """
    finished = subprocess.run(
        [sys.executable, "-P", "-m", __name__],
        input=json.dumps([asdict(order) for order in orders]),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=_SECONDS,
        check=False,
        env={**os.environ, **environment},
    )
    if finished.returncode:
        tail = "\n".join(finished.stderr.strip().splitlines()[-_TAIL_LINES:])
        raise EngineError(
            f"the process with the gated layer ended with exit code {finished.returncode}:\n{tail}"
        )
    # What libraries print while they are imported comes before it.
    return [Answer(**answer) for answer in json.loads(finished.stdout.splitlines()[-1])]


def _compiled(layer: Any, guards: Guards, graphs: list[list[str]]) -> Any:
    """``layer`` compiled as a whole; each compilation leaves its graph's names in ``graphs``."""
    import torch
    from torch._dynamo.backends.registry import lookup_backend

    lower = lookup_backend("aot_eager")

    def backend(graph: Any, example: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return lower(graph, example)

    options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "backend": backend}
    if guards == "dropped":
        options["options"] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    return torch.compile(layer, **options)


def _contract(operator: Any, dtype: torch.dtype, device: str) -> str:
    """What ``torch.library.opcheck`` has against the operator, left natural and balanced."""
    import torch

    said = []
    for force in (False, True):
        ids = torch.full((5, 2), 3, dtype=dtype, device=device)
        found = torch.library.opcheck(
            operator, (ids, 4, force), test_utils=_CONTRACT, raise_exception=False
        )
        said += [f"{name}: {result}" for name, result in found.items() if result != "SUCCESS"]
    return "\n".join(said)


def execute(order: Order) -> Answer:
    """Register the operator, compile the layer in its first call, and make all calls."""
    import torch

    if order.device == "npu":
        importlib.import_module("torch_npu")  # makes the device known to torch

    from afd_plugin import routing
    from afd_testkit.faults import FAULTS, NoTarget

    with FAULTS[order.fault].inject(NoTarget()) if order.fault else nullcontext():
        routing.register_routing_op(routing.script_runtime())
        operator = routing.ROUTING_OP.overload
        of: dict[str, Any] = {"dtype": getattr(torch, order.dtype), "device": order.device}
        gate = torch.tensor(order.gate, **of)
        dtype: torch.dtype = {"int32": torch.int32, "int64": torch.int64}[order.id_dtype]
        experts = gate.shape[1]

        def layer(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            values, ids = torch.topk(hidden @ gate, order.top_k)
            ids = ids.to(dtype)
            operator(ids, experts, False)
            return torch.softmax(values, dim=-1), ids

        graphs: list[list[str]] = []
        run = _compiled(layer, order.guards, graphs)
        inputs = [torch.tensor(rows, **of) for rows in order.inputs]
        torch._dynamo.mark_dynamic(inputs[order.calls[0][0]], 0)
        earlier, ids = routing.routing_calls(), []
        for index, profiling in order.calls:
            with routing.profile_run() if profiling else nullcontext():
                ids.append(run(inputs[index])[1].cpu().tolist())
        calls = routing.routing_calls().since(earlier)
        # A Python function in the operator's place has no contract; its ids tell.
        checked = isinstance(operator, torch._ops.OpOverload)
        contract = _contract(operator, dtype, order.device) if checked else ""
    name = f"{routing.ROUTING_OP.namespace}.{routing.ROUTING_OP.name}.default"
    return Answer(ids, graphs, calls.balanced, calls.natural, contract, name)


def main() -> None:
    """The answers to the orders that come in."""
    import torch

    answers = []
    for order in json.load(sys.stdin):
        answers.append(asdict(execute(Order(**order))))
        torch.compiler.reset()
    sys.stdout.write("\n" + json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
