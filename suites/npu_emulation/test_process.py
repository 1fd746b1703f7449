"""Whole processes under the emulation: environment, start-up, and ``npu-smi``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from afd_testkit.device_pool import list_npus
from afd_testkit.npu import process, smi
from afd_testkit.npu.errors import EmulationError
from afd_testkit.npu.process import COMMANDS, EMULATED, STARTUP, emulated_environment
from afd_testkit.npu.settings import EmulationSettings

pytestmark = pytest.mark.cpu

SETTINGS = EmulationSettings(soc="A3", devices=3, streams="check", mla_cast="lift")


def run(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A Python process with that environment; none of them imports torch unless it says so."""
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )


def test_settings_travel_in_the_environment() -> None:
    carried = SETTINGS.as_environment()
    assert EmulationSettings.from_environment(carried) == SETTINGS
    assert carried[EMULATED] == "1"
    assert EmulationSettings.from_environment({}) == EmulationSettings()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("AFD_NPU_SOC", "A9", "SoC 'A9' is not emulated; choose A2 or A3"),
        ("AFD_NPU_DEVICES", "many", "AFD_NPU_DEVICES='many' is no whole number"),
        ("AFD_NPU_DEVICES", "0", "0 devices; emulate from 1 to 64"),
        ("AFD_NPU_DEVICES", "65", "65 devices; emulate from 1 to 64"),
        ("AFD_NPU_STREAMS", "on", "stream mode 'on' is unknown; choose off or check"),
        ("AFD_NPU_MLA_CAST", "drop", "mla_cast 'drop' is unknown; choose keep or lift"),
    ],
)
def test_bad_settings_name_what_is_allowed(name: str, value: str, says: str) -> None:
    with pytest.raises(EmulationError, match=says):
        EmulationSettings.from_environment({name: value})


def test_the_environment_adds_to_what_was_there() -> None:
    base = {"PYTHONPATH": "/mine", "PATH": "/bin", "KEPT": "yes", "TORCHDYNAMO_DISABLE": "0"}
    before = dict(base)
    made = emulated_environment(SETTINGS, base)
    assert base == before
    assert made["KEPT"] == "yes"
    assert made["PYTHONPATH"].split(os.pathsep) == [
        str(STARTUP),
        str(Path(process.__file__).parents[2]),
        "/mine",
    ]
    assert made["PATH"].split(os.pathsep) == [str(COMMANDS), "/bin"]
    assert made["TORCHDYNAMO_DISABLE"] == "0"
    assert made["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    assert EmulationSettings.from_environment(made) == SETTINGS


def test_an_environment_that_is_emulated_already_only_changes_its_settings() -> None:
    once = emulated_environment(EmulationSettings(), {"PYTHONPATH": "/mine", "PATH": "/bin"})
    again = emulated_environment(SETTINGS, once)
    for name in ("PYTHONPATH", "PATH"):
        assert set(again[name].split(os.pathsep)) == set(once[name].split(os.pathsep))
        assert again[name].split(os.pathsep)[0] == once[name].split(os.pathsep)[0]


def test_a_process_without_torch_stays_without() -> None:
    code = "import sys; print('torch' in sys.modules, 'afd_testkit.npu.install' in sys.modules)"
    ran = run(code, emulated_environment(EmulationSettings(), os.environ))
    assert (ran.stdout, ran.stderr) == ("False False\n", "")


@pytest.mark.parametrize(
    "first",
    ["install", "redirect", "stream_state", "ops.moe"],
)
def test_whatever_is_imported_first_the_emulation_is_there(first: str) -> None:
    code = (
        f"import importlib; m = importlib.import_module('afd_testkit.npu.{first}')\n"
        "import sys, torch\n"
        "from afd_testkit.npu import streams\n"
        "assert sys.modules[m.__name__] is m\n"
        "torch.npu.set_device(2)\n"
        "print(torch.zeros(1, device='npu').device, torch.npu.Stream is streams.Stream,"
        " streams.current_device_index())"
    )
    ran = run(code, emulated_environment(EmulationSettings(), os.environ))
    assert (ran.stdout, ran.stderr) == ("cpu True 2\n", "")


# In a process of its own: saving and torch.library.custom_op leave their marks in torch.
LOADED = """
import io, torch
registry = torch.serialization._package_registry
on_npu = (1, lambda storage: "npu:3", lambda storage, location: None)
for place in ([], [on_npu]):
    registry[:0] = place
    file = io.BytesIO()
    torch.save(torch.arange(3), file)
    if place:
        registry.remove(on_npu)
    for where in ("npu", "npu:1", torch.device("npu:1"), {"cpu": "npu", "npu:3": "npu:0"}, None):
        file.seek(0)
        assert torch.load(file, map_location=where).tolist() == [0, 1, 2], (place, where)
"""
CUSTOM = """
import torch

@torch.library.custom_op("afd_process::more", mutates_args=())
def more(x: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(x.shape, device="npu")

assert more(torch.ones(2)).tolist() == [2, 2]
"""


@pytest.mark.parametrize("code", [LOADED, CUSTOM], ids=["load", "custom operator"])
def test_torchs_own_ways_round_its_calls(code: str) -> None:
    emulated = run(code, emulated_environment(EmulationSettings(), os.environ))
    assert (emulated.returncode, emulated.stderr) == (0, "")
    plain = run(code, dict(os.environ))
    assert plain.returncode == 1
    assert "npu" in plain.stderr


@pytest.mark.parametrize("first", ["torch_npu", "acl", "torch_npu.npu"])
def test_what_needs_torch_may_be_imported_before_it(first: str) -> None:
    code = (
        f"import {first}\nimport torch, torch_npu\n"
        "print(torch.zeros(1, device='npu').tolist(), torch_npu.npu is torch.npu)"
    )
    ran = run(code, emulated_environment(EmulationSettings(), os.environ))
    assert (ran.stdout, ran.stderr) == ("[0.0] True\n", "")


def test_the_sitecustomize_behind_ours_is_run(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.afd_seen = __name__\n")
    base = {**os.environ, "PYTHONPATH": str(tmp_path)}
    made = emulated_environment(EmulationSettings(), base)
    ran = run("import sys; print(sys.afd_seen)", made)
    assert (ran.stdout, ran.stderr) == ("sitecustomize\n", "")


def test_two_copies_of_the_package_do_not_call_each_other(tmp_path: Path) -> None:
    """As where a checkout is the working directory of an installed package's process."""
    copy = tmp_path / "afd_testkit" / "npu" / "startup"
    shutil.copytree(STARTUP, copy)
    made = emulated_environment(EmulationSettings(), {**os.environ, "PYTHONPATH": str(copy)})
    assert str(copy) in made["PYTHONPATH"]
    ran = run("import torch, afd_testkit; print(torch.npu.device_count())", made)
    assert (ran.stdout, ran.stderr) == ("8\n", "")


def test_the_installed_package_is_used_whatever_the_working_directory_holds(tmp_path: Path) -> None:
    (tmp_path / "afd_testkit").mkdir()
    (tmp_path / "afd_testkit" / "__init__.py").write_text("raise ImportError('not this one')\n")
    ran = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.npu.device_count())"],
        env=emulated_environment(EmulationSettings(), os.environ),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.stdout, ran.stderr) == ("8\n", "")


def test_without_the_variable_nothing_is_installed() -> None:
    environment = emulated_environment(EmulationSettings(), os.environ)
    del environment[EMULATED]
    code = "import torch; print(hasattr(torch, 'npu'), torch._C._get_accelerator().type)"
    assert run(code, environment).stdout == "False cpu\n"


def test_bad_settings_end_a_process_with_their_text() -> None:
    environment = emulated_environment(EmulationSettings(), os.environ)
    ran = run("import torch", {**environment, "AFD_NPU_SOC": "A9"})
    assert ran.returncode == 1
    assert "SoC 'A9' is not emulated; choose A2 or A3." in ran.stderr


def npu_smi(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = emulated_environment(replace(SETTINGS, streams="off"), os.environ)
    return subprocess.run(
        ["npu-smi", *arguments], env=environment, capture_output=True, text=True, timeout=60
    )


def test_npu_smi_is_on_path_and_says_that_it_is_emulated() -> None:
    ran = npu_smi("info")
    assert ran.returncode == 0
    assert "emulated" in ran.stdout
    assert ran.stdout.count("Ascend910_9391  | OK") == 3


def test_our_own_probe_reads_npu_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in emulated_environment(SETTINGS, os.environ).items():
        monkeypatch.setenv(name, value)
    assert list_npus()[0] == 3


@pytest.mark.parametrize("arguments", [[], ["info", "-t", "board"], ["set"]])
def test_npu_smi_refuses_what_it_does_not_emulate(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert smi.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("usage: npu-smi info [-l]")
