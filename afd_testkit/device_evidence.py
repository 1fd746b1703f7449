"""What of a run was emulated, and what may stand as evidence of a device.

An engine that runs on the emulated NPU says so in the facts of every run, under :data:`FACT`;
gates copy that into the facts of their checks.  Record, terminal and page all take it from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from afd_testkit.results import CheckResult, Outcome

#: The fact of a check that ran on the emulated NPU; checks that did not have none.
FACT = "emulated_npu"
#: Engines that use the NPUs of a host that has some.
DEVICE_ENGINES = frozenset({"ascend"})
#: Without it no process reaches an NPU.
DEVICE_PACKAGE = "torch-npu"
DEVICE_COMMAND = "pytest --pyargs afd_testkit.gates --afd-engine=ascend"


@dataclass(frozen=True)
class Emulation:
    """One kind of emulated NPU, in words.

    ``relaxed_limits``: kinds of kernel limits that were not enforced.  ``mla_cast``: whether the
    real code's cast of MLA prefill to bf16 was ``kept`` or ``lifted``.
    """

    soc: str
    device: str
    relaxed_limits: tuple[str, ...]
    mla_cast: str
    streams: str
    cannot_show: tuple[str, ...]

    @classmethod
    def from_fact(cls, fact: Any) -> Emulation:
        """From a fact of any form: what is not there is ``not told``, and no error.

        The record's schema holds facts to their form; whoever reads a report must learn of the
        emulation in any case.
        """
        given = fact if isinstance(fact, Mapping) else {}

        def text(name: str) -> str:
            return str(given.get(name, "not told"))

        def texts(name: str) -> tuple[str, ...]:
            value = given.get(name)
            return tuple(map(str, value)) if isinstance(value, list | tuple) else ()

        return cls(
            soc=text("soc"),
            device=text("device"),
            relaxed_limits=texts("relaxed_limits"),
            mla_cast=text("mla_cast"),
            streams=text("streams"),
            cannot_show=texts("cannot_show"),
        )

    @property
    def label(self) -> str:
        """SoC and device: ``A2 Ascend910B1``."""
        return f"{self.soc} {self.device}"


def is_emulated(facts: Mapping[str, Any]) -> bool:
    """Whether a check with these facts ran on the emulated NPU."""
    return facts.get(FACT) is not None


def distinct_facts(all_facts: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The different emulations of checks with these facts, as they are, in their order."""
    found: list[Any] = []
    for facts in all_facts:
        if is_emulated(facts) and facts[FACT] not in found:
            found.append(facts[FACT])
    return found


def emulations(checks: Iterable[CheckResult]) -> dict[Emulation, int]:
    """The different emulations of ``checks``, each with its number of checks."""
    return dict(
        Counter(
            Emulation.from_fact(check.facts[FACT]) for check in checks if is_emulated(check.facts)
        )
    )


def cannot_show(found: Iterable[Emulation]) -> tuple[str, ...]:
    """What none of these emulations can show, each once."""
    return tuple(dict.fromkeys(item for emulation in found for item in emulation.cannot_show))


def why_no_device(record: Mapping[str, Any]) -> str:
    """Why a valid record is no evidence of a device, in one sentence; empty if it is.

    Every check must have run on one.  A skipped check ran nowhere and claims nothing, but one
    that is not skipped must be there.
    """
    installed = record["versions"].get(DEVICE_PACKAGE) is not None
    places = Counter(_elsewhere(check, installed) for check in record["checks"])
    ran = [check for check in record["checks"] if check["outcome"] != Outcome.SKIPPED]
    told = [
        f"{count} {'check' if count == 1 else 'checks'} of {place}"
        for place, count in places.items()
        if place
    ]
    return "; ".join(told) if told or ran else "no check ran"


def _elsewhere(check: Mapping[str, Any], installed: bool) -> str:
    """Engine and place of a check that ran on no device; empty for others."""
    engine = f"engine {check['engine']!r}"
    if is_emulated(check["facts"]):
        return (
            f"{engine} ran on the emulated NPU ({Emulation.from_fact(check['facts'][FACT]).label})"
        )
    if check["outcome"] == Outcome.SKIPPED:
        return ""
    if check["engine"] not in DEVICE_ENGINES:
        known = ", ".join(sorted(DEVICE_ENGINES))
        return f"{engine} ran on no NPU, as only these engines can: {known}"
    return "" if installed else f"{engine} ran without {DEVICE_PACKAGE}"
