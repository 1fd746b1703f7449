"""Engines that die, are interrupted, or cannot start: said at once, and the next one works."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from afd_testkit.engines.base import EngineConfig, EngineDied, EngineError, Prompt
from afd_testkit.engines.vllm_cpu import VllmCpuEngine
from afd_testkit.models import ensure_model
from afd_testkit.settings import Settings

pytestmark = pytest.mark.vllm

SHORT = Prompt("short", tuple(range(10, 40)))
# Some seconds of work: far more than the delays below.
LONG = [Prompt(f"p{i}", tuple(range(10 + i, 210 + i)) * 10) for i in range(40)]


@pytest.fixture(scope="module")
def cache(afd_settings: Settings) -> Path:
    return afd_settings.cache


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _send_soon(pid: int, number: signal.Signals, delay: float = 0.3) -> list[float]:
    """Send a signal from another thread; the list receives the time when it was sent."""
    sent: list[float] = []

    def send() -> None:
        time.sleep(delay)
        sent.append(time.monotonic())
        os.kill(pid, number)

    threading.Thread(target=send, daemon=True).start()
    return sent


def test_engine_killed_in_the_middle_of_a_run(cache: Path) -> None:
    engine = VllmCpuEngine(EngineConfig("qwen3-moe"), cache)
    sent = _send_soon(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="killed by SIGKILL") as caught:
        engine.run(LONG)
    assert time.monotonic() - sent[0] < 2
    assert str(engine.log_path) in str(caught.value)
    assert "KV cache size" in engine.log_path.read_text()
    with pytest.raises(EngineDied, match="start a new one"):
        engine.run([SHORT])
    engine.close()
    engine.close()
    with closing(VllmCpuEngine(EngineConfig("qwen3-moe"), cache)) as fresh:
        assert fresh.pid != engine.pid
        assert len(fresh.run([SHORT]).requests) == 1


def test_engine_killed_between_runs(cache: Path) -> None:
    with closing(VllmCpuEngine(EngineConfig("qwen3-moe"), cache)) as engine:
        first = engine.run([SHORT])
        os.kill(engine.pid, signal.SIGSEGV)
        started = time.monotonic()
        with pytest.raises(EngineDied, match="killed by SIGSEGV") as caught:
            engine.run([SHORT])
        assert time.monotonic() - started < 2
        # The end of the log says where Python was when it crashed.
        assert "Fatal Python error: Segmentation fault" in str(caught.value)
        assert "_vllm_child.py" in str(caught.value)
        assert first.requests[0].logprobs.shape[0] == 30


def test_interrupt_stops_the_engine(cache: Path) -> None:
    """Ctrl-C in the middle of a run: it surfaces here, and no process is left behind."""
    engine = VllmCpuEngine(EngineConfig("qwen3-moe"), cache)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        os.kill(engine.pid, signal.SIGINT)  # the terminal sends it to both; the child stays
        assert len(engine.run([SHORT]).requests) == 1
        _send_soon(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            engine.run(LONG)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not _is_running(engine.pid)
    with pytest.raises(EngineDied):
        engine.run([SHORT])


def test_architecture_that_vllm_does_not_know(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "strange"
    shutil.copytree(ensure_model("qwen3-moe", cache / "models"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["StrangeForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="StrangeForCausalLM") as caught:
        VllmCpuEngine(EngineConfig(str(folder)), cache)
    assert not isinstance(caught.value, EngineDied)


def test_own_checkpoint_folder_and_close(cache: Path, tmp_path: Path) -> None:
    """A checkpoint of the user's; its process says where it is and ends when it is closed."""
    folder = tmp_path / "mine"
    shutil.copytree(ensure_model("qwen3-moe", cache / "models"), folder)
    said: list[str] = []
    with closing(VllmCpuEngine(EngineConfig(str(folder)), cache, said.append)) as engine:
        assert engine.run([SHORT]).requests[0].logprobs.shape == (30, 320)
        assert _is_running(engine.pid)
    assert not _is_running(engine.pid)
    assert any("ready after" in line for line in said)
