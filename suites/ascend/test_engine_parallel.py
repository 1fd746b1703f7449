"""Ranks: all are observed and decide alike; one that hangs or dies is named; nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afd_testkit.engines._vllm_child import RunRequest
from afd_testkit.engines.ascend import AscendEngine
from afd_testkit.engines.base import EngineConfig, EngineDied, EngineError, Prompt, SplitSetting

pytestmark = pytest.mark.ascend

CONFIG = EngineConfig("qwen3-moe", block_size=128, tensor_parallel=2)
DATA_PARALLEL = EngineConfig(
    "qwen3-moe", worker="afd", block_size=128, data_parallel=2, expert_parallel=True
)
# Of case H1: steps of at least 32 tokens are split.
THRESHOLD = SplitSetting("token", min_tokens=32)
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


@pytest.fixture
def dp2(cache: Path) -> Iterator[AscendEngine]:
    """Two data-parallel ranks; a rank that waits for the other in vain is stopped after 60 s."""
    with closing(AscendEngine(DATA_PARALLEL, cache, run_seconds=60)) as engine:
        yield engine


def test_h1_data_parallel_ranks_come_to_one_decision(
    dp2: AscendEngine, make_prompt: MakePrompt
) -> None:
    """40 tokens beside one token, and beside nothing: run whole, since the other cannot split."""

    def reasons(*lengths: int) -> list[tuple[int, str | None, tuple[int, ...]]]:
        prompts = [make_prompt(f"p{i}", n, 100 * i) for i, n in enumerate(lengths)]
        steps = dp2.run(prompts, split=THRESHOLD).steps
        found = [(step.data_rank, step.evidence or {}, step.forward_rows) for step in steps]
        assert all(evidence["completed"] for _, evidence, _ in found)
        return [(rank, evidence["reason"], rows) for rank, evidence, rows in found]

    assert reasons(40, 1) == [(0, "other_rank_whole", (40,)), (1, "one_token", (1,))]
    assert reasons(40) == [(0, "other_rank_whole", (40,))]
    assert reasons(40, 33) == [(0, None, (20, 20)), (1, None, (17, 16))]


def ask_each(engine: AscendEngine, *requests: RunRequest) -> list[Any]:
    """What each data-parallel rank answers to a request of its own, errors too."""
    answers: list[Any] = []
    for process, request in zip(engine._processes, requests, strict=True):
        process.send("run", request)
    for process in engine._processes:
        try:
            answers.append(process.receive())
        except EngineError as error:
            answers.append(error)
    return answers


@pytest.mark.parametrize(
    ("odd", "plan", "options"),
    [
        (
            replace(THRESHOLD, min_tokens=64),
            "whole, below_min_tokens: 40 real tokens are fewer than 64; scheduled [40]",
            "async_moe_token_alignment 1, async_moe_min_tokens 64",
        ),
        (
            replace(THRESHOLD, alignment=16),
            "token_balanced_tp cut 16 of 40 tokens, stages of 16 and 24 in 16 and 32 rows",
            "async_moe_token_alignment 16, async_moe_min_tokens 32",
        ),
    ],
    ids=["another threshold", "another cut"],
)
def test_h1_data_parallel_ranks_that_disagree_raise_on_both_with_both_plans(
    dp2: AscendEngine, make_prompt: MakePrompt, odd: SplitSetting, plan: str, options: str
) -> None:
    """Rank 1 decides by other options: no rank runs the step, and both go on afterwards."""
    pids = [process.info["pid"] for process in dp2._processes]
    requests = [
        RunRequest((make_prompt(f"p{rank}", 40, 100 * rank),), split, None)
        for rank, split in enumerate((THRESHOLD, odd))
    ]
    begun = time.monotonic()
    first, second = ask_each(dp2, *requests)
    assert time.monotonic() - begun < 30  # the group's timeout, which must not be needed
    for process, error in zip(dp2._processes, (first, second), strict=True):
        assert type(error) is EngineError
        # vLLM's executor hands on the text alone; the class is in what the worker has logged.
        assert "PlanDisagreement: the ranks decided differently" in process.log_path.read_text()
        lines = str(error).splitlines()
        assert "the ranks decided differently, so that none runs this step" in lines[0]
        assert lines[1].startswith(
            "  rank 0: votes on the split: token_balanced_tp cut 20 of 40 tokens, stages of 20 and "
            "20 in 20 and 20 rows"
        )
        assert lines[1].endswith("async_moe_token_alignment 1, async_moe_min_tokens 32")
        assert lines[2].startswith(f"  rank 1: votes on the split: {plan}")
        assert options in lines[2]
    steps = dp2.run([p for each in requests for p in each.prompts], split=THRESHOLD).steps
    assert [(step.data_rank, step.forward_rows) for step in steps] == [(0, (20, 20)), (1, (20, 20))]
    assert all(map(is_running, pids))
    dp2.close()
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
