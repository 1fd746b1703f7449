"""What the vLLM engine refuses before it starts a process; needs no vLLM."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from afd_testkit.engines import _vllm_process
from afd_testkit.engines._vllm_child import Backend, ChildStart
from afd_testkit.engines.base import EngineConfig, EngineError
from afd_testkit.engines.vllm_cpu import VllmCpuEngine
from afd_testkit.models import (
    BrokenWeights,
    MissingCheckpoint,
    NonFiniteWeights,
    UnknownRecipe,
    ensure_model,
)

pytestmark = pytest.mark.cpu

GOOD = EngineConfig("qwen3-moe")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (replace(GOOD, dtype="float64"), "float32 or bfloat16, not float64"),
        (replace(GOOD, block_size=16), "block size 16 is not a multiple of 32"),
        (replace(GOOD, block_size=0), "block size 0 is not"),
        (replace(GOOD, step_tokens=0), "step_tokens is 0"),
        (replace(GOOD, max_step_tokens=1024), "1024 tokens cannot hold a prompt of 2048"),
        (replace(GOOD, model="deepseek-v3-mla"), "runs in bfloat16, not in float32"),
        (replace(GOOD, tensor_parallel=2), "one process; TP 2 was asked for"),
        (replace(GOOD, soc="A3"), "one process; on A3 was asked for"),
    ],
)
def test_configuration(tmp_path: Path, config: EngineConfig, text: str) -> None:
    with pytest.raises(EngineError, match=text):
        VllmCpuEngine(config, tmp_path)
    assert not multiprocessing.active_children()


def test_unknown_model(tmp_path: Path) -> None:
    with pytest.raises(UnknownRecipe, match="deepseek-v3"):
        VllmCpuEngine(replace(GOOD, model="llama"), tmp_path)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(MissingCheckpoint, match="does not exist"):
        VllmCpuEngine(replace(GOOD, model=str(tmp_path / "absent")), tmp_path)


def test_truncated_and_spoiled_weights(tmp_path: Path) -> None:
    folder = ensure_model("qwen3-moe", tmp_path)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, weights)
    config = replace(GOOD, model=str(folder))
    with pytest.raises(NonFiniteWeights, match=r"tensor model\.norm\.weight"):
        VllmCpuEngine(config, tmp_path)
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(BrokenWeights, match="header describes"):
        VllmCpuEngine(config, tmp_path)
    assert not multiprocessing.active_children()


def test_fresh_interpreter_where_no_fork_server_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second way of starting is taken, and said."""
    methods: list[str] = []

    def spawn(context: Any, start: object) -> tuple[str, object]:
        methods.append(context.get_start_method())
        if methods[-1] == "forkserver":
            raise ConnectionRefusedError("no such socket")
        return "process", start

    monkeypatch.setattr(_vllm_process, "_spawn", spawn)
    said: list[str] = []
    backend = Backend("vllm-cpu", "no.Worker", (), "no.preload", {})
    start = ChildStart(backend, GOOD, "model", {}, {}, False, "log", "scratch", 1, 1)
    assert _vllm_process.start_process(start, said.append) == ("process", start)
    assert methods == ["forkserver", "spawn"]
    assert said == ["no fork server (no such socket); starting a fresh interpreter (slower)"]


ORPHAN = """
import multiprocessing, os, time
from afd_testkit.engines._vllm_child import _end_with_parent

def child(pipe):
    _end_with_parent()
    pipe.send(os.getpid())
    time.sleep(60)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=child, args=(theirs,), daemon=True).start()
    print(ours.recv(), flush=True)
    time.sleep(60)
"""


def test_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
        finally:
            parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    """Whether ``pid`` exists and is no zombie that nobody has collected."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
