"""``afd-testkit emulate``: its options, its refusals, its list, and what a command then sees."""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from afd_testkit import emulate
from afd_testkit.cli import main
from afd_testkit.npu import catalogue, limits, operators, stubs
from afd_testkit.npu.settings import CANNOT_SHOW, VISIBLE, EmulationSettings

pytestmark = pytest.mark.cpu

PROGRAM = """
import json, os, subprocess, sys, threading
import torch
import torch_npu

def place():
    return str(torch.zeros(2, device="npu").device)

in_thread = []
thread = threading.Thread(target=lambda: in_thread.append(place()))
thread.start()
thread.join()
child = "import torch; print(torch.zeros(2, device='npu:1').device, torch.npu.device_count())"
print(json.dumps({
    "devices": torch.npu.device_count(),
    "soc": torch.npu.get_soc_version(),
    "place": place(),
    "thread": in_thread,
    "child": subprocess.check_output([sys.executable, "-c", child], text=True).split(),
    "smi": subprocess.check_output(["npu-smi", "info"], text=True).count("| OK |"),
    "relax": os.environ["AFD_NPU_RELAX"],
    "arguments": sys.argv[1:],
}))
"""
COMMAND = [sys.executable, "-m", "afd_testkit.cli", "emulate"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=180)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a program sees, with options that are not the defaults."""
    program = tmp_path_factory.mktemp("emulate") / "program.py"
    program.write_text(PROGRAM)
    options = ["--soc=A3", "--devices=3", "--relax=dtype", "--relax", "layout"]
    ran = run(*options, "--", sys.executable, str(program), "--list", "--", "x")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_options_reach_the_command(seen: Any) -> None:
    assert seen["devices"] == seen["smi"] == 3
    assert 250 <= seen["soc"] <= 255  # vLLM-Ascend's numbers for A3
    assert seen["relax"] == "dtype,layout"


def test_the_npu_is_there_in_threads_and_children(seen: Any) -> None:
    assert seen["place"] == "cpu"
    assert seen["thread"] == ["cpu"]
    assert seen["child"] == ["cpu", "3"]


def test_arguments_behind_the_command_are_its_own(seen: Any) -> None:
    assert seen["arguments"] == ["--list", "--", "x"]


def test_a_plain_process_has_nothing_of_it() -> None:
    code = (
        "import sys, torch, importlib.util as u; "
        "print(hasattr(torch, 'npu'), u.find_spec('torch_npu'), "
        "[f for f in sys.meta_path if type(f).__module__.startswith('afd_')])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout == "False None []\n"


@pytest.mark.parametrize("status", [0, 1, 77])
def test_the_exit_status_is_the_commands(status: int) -> None:
    ran = run("--", "sh", "-c", f"echo out; echo err >&2; exit {status}")
    assert (ran.returncode, ran.stdout, ran.stderr) == (status, "out\n", "err\n")


def test_a_signal_that_ends_the_command_ends_it() -> None:
    assert run("sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    emulate.add_parser(parser.add_subparsers())
    return parser.parse_args(["emulate", *arguments])


def test_options_go_over_what_the_environment_says() -> None:
    base = {
        **EmulationSettings(soc="A3", devices=2, streams="check").as_environment(),
        limits.VARIABLE: "layout",
    }
    made = emulate.environment_for(parsed("--devices", "5", "--relax", "dtype", "--", "x"), base)
    assert EmulationSettings.from_environment(made) == EmulationSettings("A3", 5, "check", "keep")
    assert made[limits.VARIABLE] == "dtype,layout"


def test_what_is_not_said_is_the_default() -> None:
    made = emulate.environment_for(parsed("x"), {})
    assert EmulationSettings.from_environment(made) == EmulationSettings()
    assert limits.VARIABLE not in made
    assert made["AFD_NPU_EMULATED"] == "1"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no command is given; write it after --"),
        (["--"], "no command is given; write it after --"),
        (["--", "no-such-command-anywhere"], "'no-such-command-anywhere' is no command"),
        (["--devices", "0", "--", "true"], "0 devices; emulate from 1 to 64"),
    ],
)
@pytest.mark.usefixtures("no_variables")
def test_what_cannot_be_run_is_said(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["emulate", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("afd-testkit emulate: ")
    assert says in shown.err


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (limits.VARIABLE, VISIBLE, "AFD_NPU_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (limits.VARIABLE, "bogus", "names bogus; kinds are dtype, alignment, layout"),
        (VISIBLE, "5,6,99", "names 99; the emulated host has the devices 0 to 7"),
    ],
)
@pytest.mark.usefixtures("no_variables")
def test_variables_that_mean_nothing_are_said_at_once(
    name: str,
    value: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, value)
    assert main(["emulate", "--", "true"]) == 2
    assert says in capsys.readouterr().err


def test_the_package_is_the_command() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "afd_testkit", "emulate", "--", "sh", "-c", "exit 7"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "", "")


def test_a_file_that_is_no_program_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF and then nothing")
    program.chmod(0o755)
    assert main(["emulate", "--", str(program)]) == 2
    assert f"{program} cannot be run: " in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--list"], ["--", "true"]])
def test_a_missing_torch_is_said(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["emulate", *arguments]) == 2
    assert f"{sys.executable} has no torch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["--soc", "A9"], "A2"),
        (["--relax", "speed"], "alignment"),
        (["--streams", "on"], "check"),
        (["--mla-cast", "drop"], "lift"),
        (["--devices", "few"], "int"),
    ],
)
def test_options_that_mean_nothing_name_what_is_allowed(
    arguments: list[str], allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["emulate", *arguments, "--", "true"])
    assert caught.value.code == 2
    assert allowed in capsys.readouterr().err


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> str:
    """The list as it is printed into a file."""
    assert main(["emulate", "--list"]) == 0
    return capsys.readouterr().out


def test_the_list_fits_its_width(shown: str) -> None:
    assert max(map(len, shown.splitlines())) <= emulate.WIDTH


def test_the_list_has_every_operator_once_with_its_family(shown: str) -> None:
    lines = shown.splitlines()
    end = next(place for place, line in enumerate(lines) if "known and refused" in line)
    words = " ".join(lines[:end]).split()
    for name, operator in operators.load().items():
        assert words.count(name) == 1, name
        assert operator.family.partition("_")[0] in words, name


def test_the_list_has_every_refused_name(shown: str) -> None:
    words = set(shown.replace(",", " ").split())
    for module in ("torch_npu", "torch_npu.npu", "_C_ascend"):
        for name in stubs.known_names(module):
            assert name in words or f"{module}.{name}" in words or hasattr_of(module, name), name


def hasattr_of(module: str, name: str) -> bool:
    """Whether the emulation answers for it without an operator: selection, streams, memory."""
    names = catalogue.refused_names()
    return module == "torch_npu.npu" and name not in names["torch.npu"]


def test_the_list_says_what_is_enforced_and_what_cannot_be_shown(shown: str) -> None:
    flat = " ".join(shown.split())
    for kind in limits.KINDS:
        assert f"--relax {kind}" in flat
    for text in CANNOT_SHOW:
        assert " ".join(text.split()) in flat


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("npu_quant_matmul", "quantized: comes later"),
        ("npu_fast_gelu_backward", "training"),
        ("NPUGraph", "graph capture: runs are eager"),
        ("memory_snapshot", "the host's memory is not counted"),
        ("npu_mish", "no path covered here calls it"),
    ],
)
def test_reasons(name: str, why: str) -> None:
    assert catalogue.reason(name) == why
