"""The evidence of a run: one JSON record with a published schema, and a page beside it.

    run = RunInfo.begin(["pytest", "-m", "gate"], configuration={...}, seeds={...})
    ...                                            # gates produce CheckResult values
    files = write_run(run.end(not_run=...), checks, Path("results"))
    record = load_record(files.record)             # what a benchmark tool checks

Errors:

    EvidenceError
    ├── RecordError           a file is not a record: missing, not JSON, other version, invalid
    └── InvalidRecordError    a run produced values outside the schema: a bug in the reporter
    ResultsFolderError        the folder cannot take files (see ``results_folder``)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afd_testkit.device_evidence import DEVICE_COMMAND, distinct_facts, why_no_device
from afd_testkit.forced_balance import why_not_natural
from afd_testkit.own_code import Relation
from afd_testkit.results import CheckResult
from afd_testkit.results_folder import (
    ResultsFolderError,
    check_writable,
    free_stem,
    write_or_fall_back,
)
from afd_testkit.run_info import NotRun, RunInfo, Topology, timestamp
from afd_testkit.strict_json import read_json
from afd_testkit.summary import count_outcomes, judge, lacks_a_split_arm

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

__all__ = [
    "SCHEMA_VERSION",
    "EvidenceError",
    "InvalidRecordError",
    "NotRun",
    "RecordError",
    "ResultsFolderError",
    "RunFiles",
    "RunInfo",
    "Topology",
    "build_record",
    "check_writable",
    "load_record",
    "schema",
    "write_run",
]

SCHEMA_VERSION = 1


class EvidenceError(Exception):
    """Something about a record is wrong; the message names the file and the place in it."""


class RecordError(EvidenceError):
    """A file cannot be used as a record."""


class InvalidRecordError(EvidenceError):
    """A run's own record does not validate; ``raw`` is where it was kept all the same."""

    def __init__(self, raw: Path, problem: str) -> None:
        self.raw = raw
        super().__init__(
            f"this run's record does not fit its schema: {problem}. This is a bug in whatever "
            f"reported the value; the record as it is was kept in {str(raw)!r}"
        )


@dataclass(frozen=True)
class RunFiles:
    """What :func:`write_run` wrote; ``notices`` says what went another way than asked."""

    record: Path
    page: Path
    notices: tuple[str, ...] = ()


def build_record(run: RunInfo, checks: Sequence[CheckResult]) -> dict[str, Any]:
    """The record as plain JSON values; what JSON cannot hold becomes text (see ``_plain``)."""
    judgement = run.judge(checks)
    record = {
        "schema_version": SCHEMA_VERSION,
        "run_id": run.run_id,
        "started": run.started,
        "finished": run.finished or timestamp(datetime.now(UTC)),
        "interrupted": run.interrupted,
        "command": run.command,
        "source": asdict(run.source),
        "code": asdict(run.code),
        "versions": run.versions,
        "machine": asdict(run.machine),
        "topology": asdict(run.topology),
        "emulated_npu": [],
        "configuration": run.configuration,
        "seeds": run.seeds,
        "not_run": [asdict(item) for item in run.not_run],
        "checks": [check.as_dict() for check in checks],
        "summary": count_outcomes(checks),
        "verdict": judgement.verdict,
        "verdict_reasons": judgement.reasons,
    }
    plain: dict[str, Any] = _plain(record)
    plain["emulated_npu"] = _emulated(plain)
    return plain


def _emulated(record: Mapping[str, Any]) -> list[Any]:
    """The emulations that the checks of a record tell of, each once."""
    return distinct_facts(check["facts"] for check in record["checks"])


def _plain(value: Any) -> Any:
    """``value`` in JSON's own types.

    Floats that JSON lacks become ``"NaN"``, ``"Infinity"``, ``"-Infinity"``; numpy scalars
    become numbers, paths strings, sets sorted lists.  Any other object becomes
    ``{"not JSON": repr}`` and any other key its repr, which the schema lets pass only where
    a record is free form.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return _plain_float(float(value))
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else repr(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return [_plain(item) for item in sorted(value, key=repr)]
    return {"not JSON": repr(value)}


def _plain_float(number: float) -> float | str:
    if math.isfinite(number):
        return number
    if math.isnan(number):
        return "NaN"
    return "Infinity" if number > 0 else "-Infinity"


@cache
def schema() -> dict[str, Any]:
    """The published JSON Schema (draft 2020-12) of a record; not to be modified."""
    text = resources.files("afd_testkit").joinpath("evidence.schema.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


@cache
def _validator() -> Validator:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(schema())


def _problem(record: Any) -> str:
    """The most telling violation of the schema, with its JSON path; empty if there is none."""
    from jsonschema.exceptions import best_match

    error = best_match(_validator().iter_errors(record))
    if error is None:
        return ""
    message = error.message if len(error.message) <= 300 else error.message[:297] + "..."
    return f"at {error.json_path}: {message}"


def write_run(run: RunInfo, checks: Sequence[CheckResult], directory: Path) -> RunFiles:
    """Write the record ``afd-<run id>.json`` and the page ``afd-<run id>.html``.

    The record is written first and never depends on the page.  If ``directory`` does not
    take a file, the system's temporary folder does and ``notices`` says so.  Raises
    :class:`InvalidRecordError` after keeping an invalid record as ``*.invalid.json``, and
    :class:`ResultsFolderError` if no folder takes the files.
    """
    from afd_testkit.page import render_page

    if run.finished is None:
        run = run.end(interrupted=run.interrupted, not_run=run.not_run)
    record = build_record(run, checks)
    stem = free_stem(directory, f"afd-{run.run_id}", (".json", ".html", ".invalid.json"))
    content = _serialize(record)
    problem = _problem(record) or _contradiction(record)
    if problem:
        raw, _ = write_or_fall_back(directory, f"{stem}.invalid.json", content)
        raise InvalidRecordError(raw, problem)
    record_path, record_notice = write_or_fall_back(directory, f"{stem}.json", content)
    try:
        page = render_page(run, checks).encode("utf-8", "backslashreplace")
        page_path, page_notice = write_or_fall_back(directory, f"{stem}.html", page)
    except BaseException as error:
        error.add_note(f"the record of this run is complete: {str(record_path)!r}")
        raise
    notices = tuple(notice for notice in (record_notice, page_notice) if notice)
    return RunFiles(record_path, page_path, notices)


def _serialize(record: Mapping[str, Any]) -> bytes:
    """Strict JSON, ASCII; one line a check, so that records can be compared line by line."""
    checks = ",\n  ".join(json.dumps(check, allow_nan=False) for check in record["checks"])
    fields = (
        f" {json.dumps(key)}: "
        + (f"[\n  {checks}\n ]" if key == "checks" else json.dumps(value, allow_nan=False))
        for key, value in record.items()
    )
    return ("{\n" + ",\n".join(fields) + "\n}\n").encode("ascii")


def load_record(path: Path, *, device: bool = False) -> dict[str, Any]:
    """Read a record and check it: its schema, and that it does not contradict itself.

    No check with forced expert ids may stand for a result (see ``forced_balance``).  With
    ``device`` every check must have run on a real device; those that were skipped do not count.
    Raises :class:`RecordError` naming the file and the JSON path inside it, or what ran elsewhere.
    """
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise RecordError(f"no record at {str(path)!r}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"cannot read the record {str(path)!r}: {error}") from error
    try:
        record = read_json(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise RecordError(f"{str(path)!r} is not strict JSON: {error}") from error
    version = record.get("schema_version") if isinstance(record, dict) else None
    if isinstance(record, dict) and version != SCHEMA_VERSION:
        raise RecordError(
            f"{str(path)!r} has schema_version {version!r} (at $.schema_version); this "
            f"afd-testkit reads {SCHEMA_VERSION}. Read it with the release that wrote it"
        )
    problem = _problem(record) or _contradiction(record)
    if problem:
        raise RecordError(f"{str(path)!r} is not a valid record, {problem}")
    if device and (elsewhere := why_no_device(record)):
        raise RecordError(
            f"{str(path)!r} is no device evidence: {elsewhere}. Run `{DEVICE_COMMAND}` on a host "
            "with torch-npu and NPUs and use its record; see docs/devices.md"
        )
    loaded: dict[str, Any] = record
    return loaded


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON; records write it as the string {name!r}")


def _contradiction(record: Mapping[str, Any]) -> str:
    """Where commit, outcomes, expert ids, emulation, summary and verdict contradict each other."""
    from afd_testkit.accuracy_evidence import why_no_accuracy  # scipy, for records alone

    commit, checkout = record["source"]["commit"], record["code"]["checkout"]
    if (commit is None) != (checkout in (Relation.DIFFERS, Relation.NONE)):
        return f"at $.source.commit: {commit!r}, but $.code.checkout is {checkout!r}"
    for number, check in enumerate(record["checks"]):
        if check["outcome"] == "passed" and not all(c["ok"] for c in check["comparisons"]):
            return f"at $.checks[{number}].outcome: 'passed', but a comparison is not ok"
        for place, one in enumerate(check["comparisons"]):
            if one["ok"] and not float(one["max_diff"]) <= float(one["limit"]):
                return (
                    f"at $.checks[{number}].comparisons[{place}].ok: true, but max_diff is "
                    f"{one['max_diff']} and the limit {one['limit']}"
                )
    if why := why_not_natural(record) or why_no_accuracy(record):
        return why
    emulated = _emulated(record)
    if record["emulated_npu"] != emulated:
        return f"at $.emulated_npu: {record['emulated_npu']}, but the checks give {emulated}"
    outcomes = [check["outcome"] for check in record["checks"]]
    summary = record["summary"]
    for name, count in summary.items():
        found = len(outcomes) if name == "total" else outcomes.count(name)
        if count != found:
            return f"at $.summary.{name}: {count}, but the checks give {found}"
    verdict = judge(
        summary,
        not_run=len(record["not_run"]),
        interrupted=record["interrupted"],
        no_split_arm=lacks_a_split_arm(
            (c["gate"], c["case"], c["outcome"]) for c in record["checks"]
        ),
    ).verdict
    if record["verdict"] != verdict:
        return f"at $.verdict: {record['verdict']!r}, but the checks give {str(verdict)!r}"
    return ""
