"""Expert ids that were made even by force: where that is said, and where it is allowed.

Spread evenly, tokens go to experts that the router did not choose: what a model then answers is
not its own, and no accuracy and no benchmark may rest on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

#: The fact of a check, and of a step's evidence: executions of the routing operator that made
#: expert ids even.
BALANCED = "balanced_routing"
#: The worker's option that makes them even while it serves.
OPTION = "force_balanced_routing"
#: The gate that asks for even ids, to see that they end when they should.
GATE = "routing"
#: Its cases; and of a whole model the variant that profiles.
KEPT, DROPPED, ENGINE = "guards kept", "guards dropped", "engine"
PROFILING = "profiling"
#: Of a layer by itself one variant for each.
ID_DTYPES = ("int32", "int64")


def layer_variant(id_dtype: str) -> str:
    """How a check of a layer by itself is called."""
    return f"{id_dtype} ids"


_ASKED = frozenset(
    {(case, layer_variant(dtype)) for case in (KEPT, DROPPED) for dtype in ID_DTYPES}
    | {(ENGINE, PROFILING)}
)
# The option with any value behind it, in JSON (quoted again or not), in Python or in YAML.
_SET = re.compile(OPTION + r"""[\\"'\s]*[:=][\\"'\s]*(\w*)""")
_NO_RESULT = ("failed", "error")


def asks_for_it(gate: str, case: str, variant: str) -> bool:
    """Whether even expert ids are what a check is about; its name alone does not make it so."""
    return gate == GATE and (case, variant) in _ASKED


def forced_count(facts: Any) -> int:
    """How often the expert ids of a check with these facts were made even, wherever they say so.

    Whatever is no count, 0 or a whole number above, counts as once: it may hide any.
    """
    if isinstance(facts, Mapping):
        return sum(
            _count(value) if name == BALANCED else forced_count(value)
            for name, value in facts.items()
        )
    if isinstance(facts, list | tuple):
        return sum(map(forced_count, facts))
    return 0


def _count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 1


def why_not_natural(record: Mapping[str, Any]) -> str:
    """What in a record would let forced balance pass for a result; empty if nothing does.

    Failed checks may have it, since they are no result.
    """
    for number, check in enumerate(record["checks"]):
        if check["outcome"] in _NO_RESULT:
            continue
        count = forced_count(check["facts"])
        asked = asks_for_it(check["gate"], check["case"], check["variant"])
        if count and not (asked and not check["comparisons"] and check["profile"] is None):
            return (
                f"at $.checks[{number}].facts.{BALANCED}: {count} times the expert ids of this "
                f"{check['outcome']} check were forced to be even, so that it shows nothing of "
                f"the model; only the gate {GATE!r} may do that, in the checks that compare no "
                "results"
            )
    if all(check["outcome"] in (*_NO_RESULT, "skipped") for check in record["checks"]):
        return ""
    for name in ("configuration", "command"):
        for place, value in _settings(record[name], f"$.{name}"):
            return (
                f"at {place}: {OPTION} is {value}, so that expert ids were forced to be even and "
                "no check of this run shows anything of the model. Run it with the option off"
            )
    return ""


def _settings(tree: Any, place: str) -> Iterator[tuple[str, str]]:
    """Each place at which the option is anything but off, with its value there."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            if name == OPTION and value is not False:
                yield f"{place}.{name}", json.dumps(value)
            else:
                yield from _settings(value, f"{place}.{name}")
    elif isinstance(tree, list | tuple):
        if len(tree) == 2 and tree[0] == OPTION and tree[1] is not False:  # a (name, value) pair
            yield place, json.dumps(tree[1])
        for number, value in enumerate(tree):
            yield from _settings(value, f"{place}[{number}]")
    elif isinstance(tree, str):
        yield from ((place, told[1]) for told in _SET.finditer(tree) if told[1].lower() != "false")
