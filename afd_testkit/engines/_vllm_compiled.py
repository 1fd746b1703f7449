"""What an engine's process notes of compilations: how many there were, and what they hold."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from torch.fx import Graph

_BUILT_IN = re.compile(r"<built-in (?:function|method) (\w+)")


class GraphNotes:
    """Counts what the compiler's backend is given, from :meth:`install` on.

    The backend stays the one that vLLM chose: its passes over each graph begin here.
    """

    def __init__(self) -> None:
        self.calls: list[Counter[str]] = []  # of each compilation: calls in its graph, by name

    def install(self) -> None:
        """For the rest of this process."""
        from torch._inductor import config

        config.pre_grad_custom_pass = self._note

    def _note(self, graph: Graph) -> None:
        called = (str(node.target) for node in graph.nodes if node.op == "call_function")
        self.calls.append(Counter(_short(name) for name in called))

    def facts(self) -> dict[str, Any]:
        """For the facts of a run."""
        return {"compiled_calls": [dict(sorted(calls.items())) for calls in self.calls]}


def _short(target: str) -> str:
    """``<built-in method topk of type object at 0x7f..>`` as ``topk``; operators as they are."""
    found = _BUILT_IN.match(target)
    return found.group(1) if found else target
