"""Expert ids that were made even by force: where that is said, and where it is allowed.

Spread evenly, tokens go to experts that the router did not choose: what a model then answers is
not its own, and no accuracy and no benchmark may rest on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: The fact of a check, and of a step's evidence: executions of the routing operator that made
#: expert ids even.
BALANCED = "balanced_routing"
#: The gate that asks for it, to see that it ends when it should.
GATE = "routing"


def forced_count(check: Mapping[str, Any]) -> int:
    """How often the expert ids of a recorded check were made even; any odd value counts as once."""
    count = check["facts"].get(BALANCED, 0)
    return count if isinstance(count, int) and count >= 0 else 1


def why_not_natural(checks: Iterable[Mapping[str, Any]]) -> str:
    """Which recorded check would let forced balance pass for a result; empty if none does.

    Failed checks may have it, since they are no result.
    """
    for number, check in enumerate(checks):
        count = forced_count(check)
        if count and check["gate"] != GATE and check["outcome"] not in ("failed", "error"):
            return (
                f"at $.checks[{number}].facts.{BALANCED}: {count} times the expert ids of this "
                f"{check['outcome']} check were forced to be even, so that it shows nothing of "
                f"the model; only the gate {GATE!r} may do that"
            )
    return ""
