"""What is emulated, refused, enforced, and not shown: the tables of ``emulate --list``."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from afd_testkit.npu import limits, operators, stubs, tree
from afd_testkit.npu.device import EmulatedDevices
from afd_testkit.npu.settings import CANN_VERSION, CANNOT_SHOW, EmulationSettings
from afd_testkit.npu.stubs import ClosedModule

LIMITS = {
    "dtype": "the dtypes that the operator's documentation gives its kernel",
    "alignment": "block sizes and extents that must be multiples of something",
    "layout": "shapes, ranges, contiguity and storage layouts",
}

# The first pattern that is found in a name says why it is refused.
_REASONS = (
    (r"backward|_grad|apply_adam|dropout|optimizer", "training"),
    (r"quant|int4|w4a|w8a|fp8|mx|hif|antiquant|rescale", "quantized: comes later"),
    (r"workspace|infer_output|graph|capture|Graph|task_", "graph capture: runs are eager"),
    (r"ipc_|memory|alloc|MemPool|mem_pool|_stats|empty_", "the host's memory is not counted"),
    (r"\.(aclnn|cache|dim|out|value)$", "an overload that is not called"),
)
_ELSE = "no path covered here calls it"


def parts() -> Iterator[Table]:
    """The tables, in the order in which they are read."""
    yield implemented(operators.load())
    yield from refused(refused_names())
    yield enforced()
    yield not_shown()


def refused_names() -> dict[str, list[str]]:
    """By module: the names that the real one has and that are refused when they are used."""
    modules = tree.build(EmulatedDevices(EmulationSettings()))
    names: dict[str, list[str]] = {}
    for module in sorted(set(modules.values()), key=lambda one: one.__name__):
        if isinstance(module, ClosedModule) and (missing := module.refused_names()):
            names[module.__name__] = list(missing)
    compiled = stubs.known_names("_C_ascend")
    there = {name.rpartition(".")[2] for name in operators.load() if name.startswith("_C_ascend.")}
    names["torch.ops._C_ascend"] = sorted(compiled - there)
    return names


def reason(name: str) -> str:
    """Why ``name`` is refused."""
    for pattern, why in _REASONS:
        if re.search(pattern, name):
            return why
    return _ELSE


def implemented(table: Mapping[str, operators.Operator]) -> Table:
    """Every operator with a reference, by family, with where its semantics were read."""
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for operator in table.values():
        family = operator.family.partition("_")[0]
        rows[family, operator.source].append(operator.name)
    shown = _table(f"Operators with a reference: {len(table)}", "family", "operators", "source")
    last = ""
    for (family, source), names in sorted(rows.items()):
        if last and family != last:
            shown.add_section()
        shown.add_row("" if family == last else family, _lines(names), escape(source))
        last = family
    return shown


def refused(names: Mapping[str, list[str]]) -> Iterator[Table]:
    """By module, the known names that raise NotEmulated when they are called."""
    for module, some in names.items():
        grouped: dict[str, list[str]] = defaultdict(list)
        for name in some:
            grouped[reason(name)].append(name)
        shown = _table(f"{module}: {len(some)} known and refused (NotEmulated)", "why", "names")
        shown.columns[0].max_width = 24
        for why, group in sorted(grouped.items()):
            shown.add_row(f"{why} ({len(group)})", escape(", ".join(group)))
        yield shown


def enforced() -> Table:
    """The kinds of kernel limits."""
    shown = _table("Kernel limits, enforced with KernelLimit", "kind", "what", "not enforced with")
    for kind in limits.KINDS:
        shown.add_row(kind, LIMITS[kind], f"--relax {kind}")
    shown.caption = "What no result could be computed from is refused in any case."
    return shown


def not_shown() -> Table:
    """What nothing that runs here can show."""
    shown = _table("What emulation cannot show", "", "")
    shown.show_header = False
    for number, text in enumerate(CANNOT_SHOW, 1):
        shown.add_row(str(number), text)
    shown.caption = (
        f"Emulated: torch_npu {tree.TORCH_NPU_VERSION}, CANN {CANN_VERSION}. "
        "Any other name of these modules raises UnknownName."
    )
    return shown


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold", vertical="top")
    return table


def _lines(names: list[Any]) -> str:
    return escape("\n".join(sorted(names)))
