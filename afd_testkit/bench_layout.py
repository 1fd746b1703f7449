"""Bytes that sharded tokens travel between a step and its stages, beside a full all-gather.

Nothing is measured: every count is read off the exchange plans that the real exchange follows,
one a rank, so it is what ``afd_plugin.exchange`` hands to all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from afd_plugin.batch import ScheduledBatch
from afd_plugin.layout import ExchangePlan, Layout, plan_exchange
from afd_plugin.plan import Unsplit, plan_split

SCHEMA = "afd-bench-layout-1"
_MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One step of one request on one TP size; bytes of one tensor, one way.

    ``exchange_bytes``, ``gather_bytes``: received over all ranks, by the exchange and where each
    rank gathers all shards and takes its rows from them.  ``busiest_exchange_bytes``: the most
    that a rank sends or receives; ``busiest_gather_bytes``: what each rank receives.
    """

    tokens: int
    tp_size: int
    cut: int
    exchange_bytes: int
    gather_bytes: int
    busiest_exchange_bytes: int
    busiest_gather_bytes: int

    @property
    def ratio(self) -> float:
        """How many times more the all-gather moves."""
        return self.gather_bytes / self.exchange_bytes


@dataclass(frozen=True)
class Report:
    """All rows, of tensors of ``hidden`` values of ``dtype_bytes`` bytes a token."""

    rows: tuple[Row, ...]
    hidden: int
    dtype_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready dictionary."""
        return {"schema": SCHEMA, **asdict(self)}


def gathered_rows(plan: ExchangePlan) -> int:
    """Rows a rank receives when it gathers the shards of all ranks instead."""
    return (plan.layout.shards - 1) * plan.batch_shard.rows


def _row(tokens: int, tp_size: int, token_bytes: int) -> Row:
    split = plan_split(ScheduledBatch([tokens]), policy="token", alignment=tp_size)
    if isinstance(split, Unsplit):
        raise ValueError(f"a step to count must be one that is split: {split.detail}")
    plans = [plan_exchange(split, Layout(tp_size, rank, True)) for rank in range(tp_size)]
    received = [sum(plan.receive_rows) for plan in plans]
    sent = [sum(plan.send_rows) for plan in plans]
    gathered = [gathered_rows(plan) for plan in plans]
    return Row(
        tokens=tokens,
        tp_size=tp_size,
        cut=split.cut,
        exchange_bytes=sum(received) * token_bytes,
        gather_bytes=sum(gathered) * token_bytes,
        busiest_exchange_bytes=max(received + sent) * token_bytes,
        busiest_gather_bytes=max(gathered) * token_bytes,
    )


def run(sizes: Sequence[int], tp_sizes: Sequence[int], hidden: int, dtype_bytes: int) -> Report:
    """Count for every number of tokens on every TP size.

    Raises :class:`ValueError` for a step that is not split, having too few tokens.
    """
    token_bytes = hidden * dtype_bytes
    rows = (_row(tokens, tp_size, token_bytes) for tokens in sizes for tp_size in tp_sizes)
    return Report(tuple(rows), hidden, dtype_bytes)


def table(report: Report) -> Table:
    """The figures for a terminal; MiB."""
    view = Table(
        title="Tokens between a step's shards and its stages' shards (MiB, one tensor, one way)",
        caption=f"{report.hidden} values of {report.dtype_bytes} bytes a token, one request, cut "
        "nearest to half.\nBusiest: what the rank with most to send or receive moves.",
    )
    for heading in ("tokens", "TP", "exchange", "all-gather", "ratio"):
        view.add_column(heading, justify="right")
    view.add_column("busiest: exchange", justify="right")
    view.add_column("all-gather", justify="right")
    last = max((row.tp_size for row in report.rows), default=0)
    for row in report.rows:
        view.add_row(
            str(row.tokens),
            str(row.tp_size),
            f"{row.exchange_bytes / _MIB:.1f}",
            f"{row.gather_bytes / _MIB:.1f}",
            f"{row.ratio:.2f}",
            f"{row.busiest_exchange_bytes / _MIB:.1f}",
            f"{row.busiest_gather_bytes / _MIB:.1f}",
            end_section=row.tp_size == last,
        )
    return view
