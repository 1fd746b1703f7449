"""Outcomes of two runs of the same tests, and the ledger of tests that only one of them passes."""

from __future__ import annotations

import fnmatch
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PASSED, FAILED, ERROR, SKIPPED = "passed", "failed", "error", "skipped"
ORDER = (PASSED, FAILED, ERROR, SKIPPED)
# In a record of pytest; the later one of two outcomes of a test is the one that counts.
_TAGS = {"skipped": SKIPPED, "failure": FAILED, "error": ERROR}


class LedgerError(Exception):
    """The ledger's file says something that it cannot mean."""


def read_outcomes(junit: Path) -> dict[str, str]:
    """By test, the worst outcome in pytest's junit file; a file that fails to import is a test."""
    outcomes: dict[str, str] = {}
    for name, case in _cases(junit):
        found = [_TAGS[child.tag] for child in case if child.tag in _TAGS]
        worst = max([*found, outcomes.get(name, PASSED)], key=_badness)
        outcomes[name] = worst
    return outcomes


def read_seconds(junit: Path) -> dict[str, float]:
    """By test, the seconds of the wall clock that pytest's junit file says it took."""
    seconds: Counter[str] = Counter()
    for name, case in _cases(junit):
        seconds[name] += float(case.get("time", 0))
    return dict(seconds)


def _cases(junit: Path) -> Iterator[tuple[str, ElementTree.Element]]:
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        yield "::".join(filter(None, (case.get("classname"), case.get("name")))), case


def _badness(outcome: str) -> int:
    return (PASSED, SKIPPED, FAILED, ERROR).index(outcome)


def count(outcomes: Mapping[str, str]) -> dict[str, int]:
    """How many tests have each outcome, all four named."""
    counted = Counter(outcomes.values())
    return {outcome: counted[outcome] for outcome in ORDER}


def lost(own: Mapping[str, str], emulated: Mapping[str, str]) -> dict[str, str]:
    """Tests that pass under their own mocks, and what became of them under the emulation."""
    return {
        name: emulated.get(name, "missing")
        for name, outcome in sorted(own.items())
        if outcome == PASSED and emulated.get(name) != PASSED
    }


@dataclass(frozen=True)
class Entry:
    """``tests``: a pattern of test ids (``*`` for any text).  ``reason``: why they do not pass."""

    tests: str
    reason: str

    def matches(self, name: str) -> bool:
        """Whether the entry speaks of the test ``name``; brackets in it stand for themselves."""
        return fnmatch.fnmatchcase(name, self.tests.replace("[", "[[]"))


@dataclass(frozen=True)
class Ledger:
    """``at_least``: how many tests must pass under the emulation."""

    at_least: int
    entries: tuple[Entry, ...]

    def unexplained(self, names: Sequence[str]) -> list[str]:
        """Those of ``names`` that no entry speaks of."""
        return [name for name in names if not any(e.matches(name) for e in self.entries)]

    def stale(self, names: Sequence[str]) -> list[Entry]:
        """Entries that speak of none of ``names``."""
        return [e for e in self.entries if not any(e.matches(name) for name in names)]


def read_ledger(path: Path) -> Ledger:
    """The ledger in ``path``; :class:`LedgerError` names what is wrong with it."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise LedgerError(f"{path} cannot be read: {error}") from error
    if unknown := set(content) - {"at_least", "lost"}:
        raise LedgerError(f"{path} has {', '.join(sorted(unknown))}; known are at_least, lost.")
    entries = []
    for number, table in enumerate(content.get("lost", []), 1):
        texts = {key: value for key, value in table.items() if isinstance(value, str) and value}
        if set(table) != {"tests", "reason"} or len(texts) != 2:
            raise LedgerError(
                f"{path}: entry {number} of [[lost]] has {sorted(table)}; give tests and reason, "
                "each a text."
            )
        entries.append(Entry(texts["tests"], texts["reason"]))
    at_least = content.get("at_least", 0)
    if not isinstance(at_least, int) or isinstance(at_least, bool) or at_least < 0:
        raise LedgerError(f"{path}: at_least is {at_least!r}; give a whole number.")
    return Ledger(at_least, tuple(entries))
