"""Tensor-parallel ranks: all are observed; one that hangs or dies is named, and nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from afd_testkit.engines.ascend import AscendEngine
from afd_testkit.engines.base import EngineConfig, EngineDied, Prompt

pytestmark = pytest.mark.ascend

CONFIG = EngineConfig("qwen3-moe", block_size=128, tensor_parallel=2)
MakePrompt = Callable[..., Prompt]


def is_running(pid: int) -> bool:
    """Whether ``pid`` exists and is no zombie that nobody has collected."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def processes_of(engine: AscendEngine) -> list[int]:
    """The engine's process and its workers, all of them running."""
    pids = [engine.pid, *engine.info["workers"].values()]
    assert len(pids) == 3
    assert all(map(is_running, pids))
    return pids


def wait_gone(pids: list[int], seconds: float = 10) -> list[int]:
    """The processes that still run when the time is over."""
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if is_running(pid)]


@pytest.fixture
def tp2(cache: Path) -> Iterator[AscendEngine]:
    """An engine that a test may ruin; a run may take 20 s."""
    with closing(AscendEngine(CONFIG, cache, run_seconds=20)) as engine:
        yield engine


def test_heads_of_both_ranks_and_a_rank_that_is_killed(
    tp2: AscendEngine,
    make_prompt: MakePrompt,
    ask_transformers: Callable[[str, tuple[int, ...]], dict[str, np.ndarray]],
) -> None:
    """Each rank holds one of the two KV heads; the rows have both, as transformers has them."""
    prompt = make_prompt("p", 150)
    expected = ask_transformers("qwen3-moe", prompt.token_ids)
    result = tp2.run([prompt]).requests[0]
    for index, rows in enumerate(result.kv):
        key_rows, value_rows = rows.reshape(150, 2, 2, 32).swapaxes(0, 1)
        assert np.abs(key_rows - expected[f"keys{index}"]).max() < 1e-4
        assert np.abs(value_rows - expected[f"values{index}"]).max() < 1e-4

    pids = processes_of(tp2)
    victim = tp2.info["workers"]["VllmWorker-1"]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(EngineDied, match=rf"VllmWorker-1 \(pid {victim}\)") as caught:
        tp2.run([prompt])
    assert str(tp2.log_path) in str(caught.value)
    assert wait_gone(pids) == []


def test_a_rank_that_hangs(tp2: AscendEngine, make_prompt: MakePrompt) -> None:
    """A stopped rank cannot show its stack; the others show where they wait for it."""
    tp2.run([make_prompt("p", 40)])
    pids = processes_of(tp2)
    victim = tp2.info["workers"]["VllmWorker-1"]
    os.kill(victim, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(EngineDied, match="no answer in 20 s and was killed") as caught:
        tp2.run([make_prompt("p", 40)])
    assert time.monotonic() - started < 40
    text = str(caught.value)
    assert f"--- VllmWorker-1 (pid {victim}), stopped by a signal" in text
    parts = text.split("--- ")
    shown = {part.split(" ", 1)[0]: part for part in parts[1:]}
    assert "_vllm_engine.py" in shown["engine"]
    assert "multiproc_executor.py" in shown["VllmWorker-0"]
    assert wait_gone(pids) == []


ORPHANS = """
import os, signal, sys
from pathlib import Path
from afd_testkit.engines.ascend import AscendEngine
from afd_testkit.engines.base import EngineConfig

if __name__ == "__main__":
    config = EngineConfig("qwen3-moe", block_size=128, tensor_parallel=2)
    engine = AscendEngine(config, Path(sys.argv[1]))
    print(engine.pid, *engine.info["workers"].values(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_process_outlives_a_killed_caller(cache: Path, tmp_path: Path) -> None:
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    ran = subprocess.run(
        [sys.executable, script, cache],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=300,
    )
    assert ran.returncode == -signal.SIGKILL
    pids = [int(word) for word in ran.stdout.split()]
    assert len(pids) == 3
    assert wait_gone(pids) == []
