"""Waivers as data: which failure is known, why, and whose it is.

A TOML file of ``[[waiver]]`` tables with ``match``, ``reason``, ``issue``, ``owner`` and
optionally ``expires`` (a date).  ``match`` is a glob: with ``::`` over test ids, without over
check ids (``gate/engine/model/dtype/case/variant``).  A waived test must fail, a waived check
must fail, and an entry must match something; otherwise the session fails.
"""

from __future__ import annotations

import datetime
import fnmatch
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from afd_testkit.results import CheckResult

_WANTED = ("match", "reason", "issue", "owner")


@dataclass(frozen=True)
class Waiver:
    """One entry; ``issue`` is a number or an address."""

    match: str
    reason: str
    issue: str
    owner: str
    expires: datetime.date | None = None

    @property
    def is_for_test(self) -> bool:
        """Whether ``match`` is over test ids; check ids never hold ``::``."""
        return "::" in self.match

    def covers(self, name: str) -> bool:
        """Whether ``name`` (a test id or a check id) is meant.  Brackets are literal, as they
        are in the ids of parametrized tests; ``*`` and ``?`` are wild."""
        return fnmatch.fnmatchcase(name, self.match.replace("[", "[[]"))

    def expired(self, today: datetime.date) -> bool:
        """Whether the waiver no longer counts: from the day after ``expires``."""
        return self.expires is not None and today > self.expires

    def label(self) -> str:
        """For messages."""
        return f"waiver {self.match!r} (issue {self.issue}, owner {self.owner})"


def check_id(result: CheckResult) -> str:
    """The name of a check, over which the ledger matches; a topology stands behind the dtype."""
    topology = (result.topology,) if result.topology else ()
    subject = (result.engine, result.model, result.dtype, *topology)
    return "/".join((result.gate, *subject, result.case, result.variant))


def load_ledger(path: Path) -> tuple[Waiver, ...]:
    """The entries of ``path``; :class:`pytest.UsageError` names the entry that is malformed."""
    # Imported here: a session without a ledger does not pay for the parser.
    import tomllib

    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # TOML and UTF-8 errors are ValueErrors
        raise pytest.UsageError(f"ledger {path} cannot be read: {error}") from error
    entries = data.pop("waiver", [])
    if data or not isinstance(entries, list):
        found = ", ".join(sorted(data)) or "waiver, which is no list"
        raise pytest.UsageError(f"ledger {path}: only [[waiver]] tables are allowed, not {found}.")
    return tuple(_waiver(entry, f"ledger {path}, entry {n}") for n, entry in enumerate(entries, 1))


def _waiver(entry: Any, where: str) -> Waiver:
    if not isinstance(entry, dict):
        raise pytest.UsageError(f"{where} is no table; write [[waiver]] above it.")
    if unknown := sorted(entry.keys() - {*_WANTED, "expires"}):
        raise pytest.UsageError(
            f"{where}: unknown key {unknown[0]!r}; allowed are {', '.join(_WANTED)}, expires."
        )
    for key in _WANTED:
        value = entry.get(key)
        if not isinstance(value, str) or not value.strip():
            raise pytest.UsageError(f"{where}: {key} is {value!r}; give a non-empty string.")
    expires = entry.get("expires")
    if expires is not None and type(expires) is not datetime.date:
        raise pytest.UsageError(f"{where}: expires is {expires!r}; give a date, 2026-01-31.")
    return Waiver(**entry)
