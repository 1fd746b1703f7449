"""What is known of a run apart from its checks: gathered when it starts, completed when it ends."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from afd_testkit.own_code import Code, identify
from afd_testkit.provenance import Machine, Source, read_machine, read_source, read_versions
from afd_testkit.results import CheckResult
from afd_testkit.summary import Judgement, count_outcomes, judge, lacks_a_split_arm


@dataclass(frozen=True)
class NotRun:
    """A selected gate item that did not run, why, and the command that would run it."""

    item: str
    reason: str
    command: str = ""


@dataclass(frozen=True)
class Topology:
    """Ranks of tensor, data, expert and pipeline parallelism."""

    tp: int = 1
    dp: int = 1
    ep: int = 1
    pp: int = 1


@dataclass(frozen=True)
class RunInfo:
    """Everything about a run but its checks.  Timestamps are UTC, ``finished`` set at the end."""

    run_id: str
    started: str
    command: tuple[str, ...]
    source: Source
    code: Code
    versions: Mapping[str, str | None]
    machine: Machine
    configuration: Mapping[str, Any] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    topology: Topology = Topology()
    not_run: tuple[NotRun, ...] = ()
    interrupted: bool = False
    finished: str | None = None

    @classmethod
    def begin(
        cls,
        command: Sequence[str],
        *,
        configuration: Mapping[str, Any] | None = None,
        seeds: Mapping[str, int] | None = None,
        topology: Topology = Topology(),
        versions: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> RunInfo:
        """A run that starts now, in ``directory`` (the current one), on this machine.

        ``versions`` adds to the installed versions that are read here.
        """
        now = datetime.now(UTC)
        source, code = identify(*read_source(directory or Path.cwd()))
        return cls(
            run_id=f"{now:%Y%m%dT%H%M%S}-{os.getpid()}-{secrets.token_hex(4)}",
            started=timestamp(now),
            command=tuple(command),
            source=source,
            code=code,
            versions=read_versions(versions),
            machine=read_machine(),
            configuration=dict(configuration or {}),
            seeds=dict(seeds or {}),
            topology=topology,
        )

    def end(
        self,
        *,
        interrupted: bool = False,
        not_run: Sequence[NotRun] = (),
        versions: Mapping[str, str] | None = None,
    ) -> RunInfo:
        """The same run, finished now; ``versions`` adds what engines said of themselves."""
        return replace(
            self,
            finished=timestamp(datetime.now(UTC)),
            interrupted=interrupted,
            not_run=tuple(not_run),
            versions={**self.versions, **(versions or {})},
        )

    def judge(self, checks: Sequence[CheckResult]) -> Judgement:
        """The verdict on this run with these checks."""
        return judge(
            count_outcomes(checks),
            not_run=len(self.not_run),
            interrupted=self.interrupted,
            no_split_arm=lacks_a_split_arm((c.gate, c.case, c.outcome) for c in checks),
        )


def timestamp(moment: datetime) -> str:
    """``moment`` in UTC as ISO 8601 with milliseconds and a ``Z``."""
    utc = moment.astimezone(UTC)
    return f"{utc:%Y-%m-%dT%H:%M:%S}.{utc.microsecond // 1000:03d}Z"
