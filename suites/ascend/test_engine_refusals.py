"""What the Ascend engine refuses before it starts a process, and what it says of emulation."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from afd_testkit.engines import _vllm_adapter, ascend
from afd_testkit.engines._vllm_child import ChildStart
from afd_testkit.engines.ascend import AscendEngine
from afd_testkit.engines.base import EngineConfig, EngineError

pytestmark = pytest.mark.cpu

GOOD = EngineConfig("qwen3-moe", block_size=128)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtype": "float64"}, "ascend computes in float32 or bfloat16, not float64"),
        ({"block_size": 32}, "block size 32 is not 128"),
        ({"max_step_tokens": 1024}, "1024 tokens cannot hold a prompt of 2048"),
        ({"soc": "A5"}, "SoC 'A5' is unknown; choose A2 or A3"),
        ({"tensor_parallel": 0}, "tensor_parallel is 0; it must be at least 1"),
        ({"data_parallel": -1}, "data_parallel is -1; it must be at least 1"),
        ({"tensor_parallel": 8, "data_parallel": 4}, "needs 32 processes; at most 16"),
        ({"expert_parallel": True}, "expert_parallel needs several ranks"),
        ({"sequence_parallel": True, "expert_parallel": True, "data_parallel": 2}, "tensor_par"),
        ({"sequence_parallel": True, "tensor_parallel": 2}, "and expert_parallel=True"),
        ({"model": "deepseek-v3-mla"}, "runs in bfloat16, not in float32"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_configuration(tmp_path: Path, changes: dict[str, object], text: str) -> None:
    with pytest.raises(EngineError, match=text):
        AscendEngine(replace(GOOD, **changes), tmp_path)  # type: ignore[arg-type]
    assert not multiprocessing.active_children()


def test_emulation_says_what_is_relaxed_and_lifted() -> None:
    """float32 needs the limit on dtypes relaxed and the real cast to bfloat16 left out."""
    told = ascend.emulation(replace(GOOD, soc="A3"))
    assert told["soc"] == "A3"
    assert "dtype" in told["relaxed_limits"]
    assert told["mla_cast"] == "lifted"
    told = ascend.emulation(replace(GOOD, dtype="bfloat16"))
    assert "dtype" not in told["relaxed_limits"]
    assert told["mla_cast"] == "kept"
    assert any("graph capture" in limit for limit in told["cannot_show"])


@pytest.mark.parametrize(
    ("changes", "cast", "relaxed"),
    [
        ({}, "lift", {"alignment", "dtype"}),
        ({"dtype": "bfloat16"}, "keep", {"alignment"}),
    ],
)
def test_variables_carry_what_is_said(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], cast: str, relaxed: set[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("AFD_NPU_")]:
        monkeypatch.delenv(name)
    variables = ascend.emulation_variables(replace(GOOD, **changes))  # type: ignore[arg-type]
    assert variables["AFD_NPU_EMULATED"] == "1"
    assert variables["AFD_NPU_SOC"] == "A2"
    assert variables["AFD_NPU_MLA_CAST"] == cast
    assert set(variables["AFD_NPU_RELAX"].split(",")) == relaxed


class Recorded(Exception):
    """Carries what processes would have been started with."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[ChildStart]]:
    """What an engine would start its processes with; none is started."""
    starts: list[ChildStart] = []

    class Recorder:
        def __init__(self, start: ChildStart, *_: object) -> None:
            shutil.rmtree(start.scratch)
            starts.append(start)

        def wait_ready(self) -> None:
            raise Recorded

        def kill(self) -> None:
            return None

    def start(**changes: object) -> list[ChildStart]:
        starts.clear()
        with pytest.raises(Recorded):
            AscendEngine(replace(GOOD, **changes), tmp_path)  # type: ignore[arg-type]
        return list(starts)

    monkeypatch.setattr(_vllm_adapter, "EngineProcess", Recorder)
    return start


@pytest.mark.parametrize("real", [True, False])
def test_one_place_decides_between_device_and_emulation(
    monkeypatch: pytest.MonkeyPatch, started: Callable[..., list[ChildStart]], real: bool
) -> None:
    """On devices nothing is emulated, nothing relaxed, and no opened device is forked."""
    for name in [name for name in os.environ if name.startswith("AFD_NPU_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(ascend, "real_device", lambda: real)
    [start] = started()
    assert ("emulated_npu" in start.backend.facts) is not real
    assert (start.backend.preload is None) is real
    assert ("AFD_NPU_EMULATED" in start.environment) is not real
    assert start.environment["VLLM_WORKER_MULTIPROC_METHOD"] == ("spawn" if real else "fork")


@pytest.mark.parametrize("changes", [{"soc": "A3"}, {"dtype": "bfloat16"}])
def test_what_the_fork_server_does_not_emulate_starts_afresh(
    started: Callable[..., list[ChildStart]],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
) -> None:
    monkeypatch.setattr(ascend, "real_device", lambda: False)
    [start] = started(**changes)
    assert start.backend.preload is None


def test_data_parallel_ranks_differ_in_their_rank_alone(
    started: Callable[..., list[ChildStart]],
) -> None:
    [alone] = started()
    assert not any(name.startswith("VLLM_DP_") for name in alone.environment)
    first, second = (s.environment for s in started(data_parallel=2, expert_parallel=True))
    assert (first["VLLM_DP_RANK"], second["VLLM_DP_RANK"]) == ("0", "1")
    assert {name for name in first if first[name] != second[name]} == {
        "VLLM_DP_RANK",
        "VLLM_DP_RANK_LOCAL",
    }
    assert first["VLLM_DP_SIZE"] == "2"


def test_parallelism_reaches_vllm(started: Callable[..., list[ChildStart]]) -> None:
    [start] = started(tensor_parallel=2, expert_parallel=True, sequence_parallel=True)
    assert start.engine_args["tensor_parallel_size"] == 2
    assert start.engine_args["enable_expert_parallel"] is True
    assert start.engine_args["additional_config"] == {"enable_flashcomm1": True}
