"""Which NPUs a run may use: nodes, npu-smi, and the caller's ASCEND_RT_VISIBLE_DEVICES."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from afd_testkit import device_pool, devices
from afd_testkit.device_pool import (
    EMULATED,
    VISIBLE,
    Device,
    Host,
    VisibleDevicesError,
    choose,
    find_devices,
    find_host,
    is_emulated,
    list_npus,
    visible_numbers,
    why_too_few,
)

pytestmark = pytest.mark.cpu

EIGHT = Host(tuple(range(8)), "eight made up")


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (EMULATED, VISIBLE):
        monkeypatch.delenv(name, raising=False)


def unasked() -> tuple[int, str]:
    raise AssertionError("npu-smi is asked though there are nodes")


def test_nodes_are_counted_by_number(tmp_path: Path) -> None:
    for name in ("davinci10", "davinci2", "davinci_manager", "davinci3x", "devmm_svm"):
        (tmp_path / name).touch()
    assert find_host(tmp_path, unasked) == Host((2, 10), f"{tmp_path}/davinci*")


def test_npu_smi_is_asked_where_no_node_is(tmp_path: Path) -> None:
    (tmp_path / "davinci_manager").touch()
    assert find_host(tmp_path, lambda: (3, "it said so")).numbers == (0, 1, 2)
    none = find_host(tmp_path, lambda: (0, "npu-smi is not on PATH"))
    assert none == Host((), f"no {tmp_path}/davinci0 or higher; npu-smi is not on PATH")


SMI = """\
	Total Count                    : 2

	NPU ID                         : 0
	Product Name                   : made up, Chip Count : 9
	Chip Count                     : 2

	NPU ID                         : 5
	Chip Count                     : 1
"""


@pytest.mark.parametrize(
    ("script", "count", "said"),
    [
        (f"cat <<'END'\n{SMI}END\n", 3, "`npu-smi info -l`"),
        ("echo no driver; exit 3", 0, "`npu-smi info -l` ended with status 3"),
        ('[ "$*" = "info -l" ] || echo "Chip Count : 4"', 0, "`npu-smi info -l`"),
    ],
    ids=["chips", "fails", "arguments"],
)
def test_npu_smi_counts_chips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, count: int, said: str
) -> None:
    program = tmp_path / "npu-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert list_npus() == (count, said)


def test_without_npu_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_npus() == (0, "npu-smi is not on PATH")


@pytest.mark.parametrize(
    ("numbers", "text", "expected"),
    [
        # a host: the variable speaks of node numbers
        (range(8), None, [(n, n) for n in range(8)]),
        (range(8), "4,5,6", [(4, 4), (5, 5), (6, 6)]),
        (range(8), "6,4", [(4, 4), (6, 6)]),
        # a container that was given nodes 4 and 5: CANN numbers them 0 and 1
        ((4, 5), None, [(4, 0), (5, 1)]),
        ((4, 5), "1", [(5, 1)]),
        ((4, 5), "4,5", [(4, 4), (5, 5)]),
        ((), "0", []),
        ((), None, []),
    ],
)
def test_the_variable_chooses(
    numbers: range, text: str | None, expected: list[tuple[int, int]]
) -> None:
    environment = {} if text is None else {VISIBLE: text}
    found = find_devices(lambda: Host(tuple(numbers), ""), environment)
    assert [tuple(device) for device in found] == expected


@pytest.mark.parametrize("text", ["", "4, 5", "4;5", "4,", ",4", "-1", "4,-1", "0-3", "a", "4,4"])
def test_senseless_values_are_refused(text: str) -> None:
    with pytest.raises(VisibleDevicesError) as caught:
        visible_numbers(text)
    message = str(caught.value)
    assert message.startswith(f"ASCEND_RT_VISIBLE_DEVICES={text!r}; allowed are distinct device")
    assert "as in 4,5,6" in message
    assert "unset the variable" in message


def test_absent_devices_are_refused_by_number() -> None:
    with pytest.raises(VisibleDevicesError, match=r"names 8, 11, which are not among .* 0, 1, 2,"):
        choose(EIGHT, "7,8,11")
    with pytest.raises(VisibleDevicesError, match="names 2, which is not among the devices 4, 5"):
        choose(Host((4, 5), ""), "2,5")


@pytest.mark.parametrize(
    ("amount", "host", "text", "why"),
    [
        (8, EIGHT, None, None),
        (9, EIGHT, None, "9 NPU devices are needed, found 8"),
        (2, EIGHT, "4,5", None),
        (3, EIGHT, "4,5", f"3 NPU devices are needed, found 2 of 8 through {VISIBLE}='4,5'"),
        (1, Host((), "nothing there"), None, "1 NPU device is needed, found none (nothing there)"),
    ],
)
def test_too_few_devices_are_told_with_counts(
    amount: int, host: Host, text: str | None, why: str | None
) -> None:
    environment = {} if text is None else {VISIBLE: text}
    assert why_too_few(amount, lambda: host, environment) == why


def test_a_bad_value_is_the_reason_of_the_skip() -> None:
    why = why_too_few(1, lambda: EIGHT, {VISIBLE: "all"})
    assert why is not None
    assert why.startswith("ASCEND_RT_VISIBLE_DEVICES='all'; allowed are")


def find_torch_npu(name: str) -> ModuleSpec | None:
    return ModuleSpec(name, None) if name == "torch_npu" else None


def test_an_emulated_npu_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "davinci0").touch()
    monkeypatch.setattr(importlib.util, "find_spec", find_torch_npu)
    assert devices._npu(1, tmp_path) is None
    monkeypatch.setenv(EMULATED, "1")
    why = "the NPU of this process is emulated, and evidence of devices needs a real one"
    assert devices._npu(1, tmp_path) == why
    assert devices._npu(1, tmp_path, given=[Device(0, 0)]) == why


def test_the_emulation_is_known_by_its_own_variable() -> None:
    # device_pool keeps a copy, since the emulation's modules import torch.
    from afd_testkit.npu import settings

    assert device_pool.EMULATED == settings.EMULATED
    assert is_emulated(settings.EmulationSettings().as_environment())
    assert not is_emulated({EMULATED: "0"})
    assert not is_emulated({})


def test_devices_from_a_hook_need_no_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    given = [Device(3, 0), Device(4, 1)]
    assert devices._npu(2, given=given) is None
    assert devices._npu(3, given=given) == "3 NPU devices are needed, given 2"
