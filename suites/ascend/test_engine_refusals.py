"""What the Ascend engine refuses before it starts a process, and what it says of emulation."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest

from afd_testkit.engines import ascend
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


@pytest.mark.parametrize("real", [True, False])
def test_one_place_decides_between_device_and_emulation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, real: bool
) -> None:
    """On devices nothing is emulated, nothing relaxed, and no opened device is forked."""
    monkeypatch.setattr(ascend, "real_device", lambda: real)
    engine = object.__new__(AscendEngine)
    backend, variables = engine.backend(GOOD), engine.environment(GOOD)
    assert ("emulated_npu" in backend.facts) is not real
    assert (backend.preload is None) is real
    assert ("AFD_NPU_EMULATED" in variables) is not real
    assert variables["VLLM_WORKER_MULTIPROC_METHOD"] == ("spawn" if real else "fork")


def test_data_parallel_ranks_differ_in_their_rank_alone() -> None:
    engine = object.__new__(AscendEngine)
    assert engine.rank_environments(GOOD) == [{}]
    first, second = engine.rank_environments(replace(GOOD, data_parallel=2, expert_parallel=True))
    assert (first["VLLM_DP_RANK"], second["VLLM_DP_RANK"]) == ("0", "1")
    differing = {name for name in first if first[name] != second[name]}
    assert differing == {"VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL"}
    assert first["VLLM_DP_SIZE"] == "2"
