"""The process that runs the arms, with a child that only pretends to be an engine."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from afd_testkit.accuracy import run
from afd_testkit.accuracy.run import AccuracyRunError, run_arms
from afd_testkit.accuracy.spec import Arm, ArmResult, Spec
from afd_testkit.models.errors import CheckpointError

pytestmark = pytest.mark.cpu

# Does an arm as the engine would: tells it, and leaves its file.  ``{stop}`` is what goes wrong.
CHILD = """
import json, os, pathlib, subprocess, sys, time

spec = json.loads(pathlib.Path(sys.argv[1]).read_text())
folder = pathlib.Path(spec["results"])
with (folder / "starts").open("a") as starts:
    starts.write(json.dumps([os.getpid(), dict(os.environ)]) + "\\n")
print("noise of the engine")
print("afd: starting", flush=True)
for number, arm in enumerate(spec["arms"]):
    path = folder / (arm["name"] + ".json")
    if path.exists():
        continue
    {stop}
    result = dict(arm=arm, answers=[], logprobs={}, steps=0, split_steps=0, cut_requests=0,
                  balanced_routing=0, seconds=os.getpid(), facts={})
    path.write_text(json.dumps(result))
    print("afd: did", arm["name"], flush=True)
"""
NAMES = ("unsplit", "noise", "token")


def set_config(model: Path, **values: object) -> None:
    text = json.dumps({"architectures": ["Any"], **values})
    (model / "config.json").write_text(text, encoding="utf-8")


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spec:
    (tmp_path / "model").mkdir()
    set_config(tmp_path / "model")
    save_file({"one": torch.ones(1)}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "tokenizer.json").write_text("{}", encoding="utf-8")
    # Found, but never imported.
    (tmp_path / "vllm.py").write_text("raise ImportError\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(run, "CHILD", "pretended_engine")
    arms = tuple(Arm(name, "off", 0, 0) for name in NAMES)
    return Spec(str(tmp_path / "model"), "float32", "task", str(tmp_path / "arms"), 5, arms)


@pytest.fixture
def child(tmp_path: Path) -> Callable[[str], None]:
    def write(stop: str = "pass") -> None:
        path = tmp_path / "pretended_engine.py"
        path.write_text(CHILD.replace("{stop}", stop), encoding="utf-8")

    write()
    return write


def starts(spec: Spec) -> list[tuple[int, dict[str, str]]]:
    text = (Path(spec.results) / "starts").read_text(encoding="utf-8")
    return [(pid, variables) for pid, variables in map(json.loads, text.splitlines())]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent to look does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    """A killed process may take a moment to go."""
    end = time.monotonic() + 5
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not alive(pid)


def failure(spec: Spec, silent_seconds: float = 60.0) -> str:
    with pytest.raises(AccuracyRunError) as found:
        run_arms(spec, lambda text: None, silent_seconds)
    return str(found.value)


def test_all_arms_are_run_and_read_and_progress_is_told(spec: Spec, child: Any) -> None:
    said: list[str] = []
    results = run_arms(spec, said.append)
    assert said == ["starting", "did unsplit", "did noise", "did token"]
    assert {name: result.arm for name, result in results.items()} == dict(
        zip(NAMES, spec.arms, strict=True)
    )
    log = (Path(spec.results) / "engine.log").read_text(encoding="utf-8")
    assert log.startswith("noise of the engine\nafd: starting\n")


def test_a_finished_run_is_read_again_without_an_engine(spec: Spec, child: Any) -> None:
    first = run_arms(spec, lambda text: None)
    child("raise SystemExit(7)")
    assert run_arms(spec, lambda text: None) == first
    assert len(starts(spec)) == 1


def test_a_crash_keeps_what_is_done_and_the_next_call_does_the_rest(spec: Spec, child: Any) -> None:
    child('if number == 2: print("it broke here", flush=True); os._exit(3)')
    told = failure(spec)
    assert "the engine ended with status 3; 2 of 3 arms are done, missing: token" in told
    assert "it broke here" in told
    kept = {name: ArmResult.read(Path(spec.results) / f"{name}.json") for name in NAMES[:2]}
    child()
    said: list[str] = []
    results = run_arms(spec, said.append)
    assert said == ["starting", "did token"]
    assert {name: results[name] for name in NAMES[:2]} == kept
    assert len(starts(spec)) == 2


def test_an_end_without_all_arms_is_no_success(spec: Spec, child: Any) -> None:
    child("if number == 1: break")
    assert "the engine ended early; 1 of 3 arms are done, missing: noise, token" in failure(spec)


def test_a_failure_after_the_last_arm_is_told(spec: Spec, child: Any) -> None:
    child("if number == 2: import atexit; atexit.register(os._exit, 5)")
    told = failure(spec)
    assert "status 5; 3 of 3 arms are done, missing: none" in told
    # What is left is nothing, so that the next call gives the results.
    assert set(run_arms(spec, lambda text: None)) == set(NAMES)


HELPER = 'subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"]).pid'


@pytest.mark.parametrize(
    "stop",
    [
        "time.sleep(120)",
        # Output closed, and on it goes.
        "os.close(1); os.close(2); time.sleep(120)",
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)",
    ],
    ids=["silent", "closed", "deaf"],
)
def test_silence_ends_within_the_bound_and_leaves_no_process(
    spec: Spec, child: Any, stop: str
) -> None:
    helper = Path(spec.results) / "helper"
    child(f"pathlib.Path({str(helper)!r}).write_text(str({HELPER})); {stop}")
    begin = time.monotonic()
    told = failure(spec, silent_seconds=2.0)
    assert time.monotonic() - begin < 20
    assert "the engine said nothing for 2 s and was stopped; 0 of 3 arms are done" in told
    assert gone(starts(spec)[0][0])
    assert gone(int(helper.read_text()))


def test_what_a_dead_engine_started_ends_with_it(spec: Spec, child: Any) -> None:
    # The helper holds the engine's output open beyond its end.
    helper = Path(spec.results) / "helper"
    child(f"pathlib.Path({str(helper)!r}).write_text(str({HELPER})); os._exit(4)")
    begin = time.monotonic()
    told = failure(spec, silent_seconds=2.0)
    assert time.monotonic() - begin < 20
    assert "0 of 3 arms are done" in told
    assert gone(int(helper.read_text()))


def test_speaking_now_and_then_is_not_silence(spec: Spec, child: Any) -> None:
    child('[(time.sleep(0.5), print("still here", flush=True)) for _ in range(2)]')
    # Longer than the bound in all, never in one.
    assert set(run_arms(spec, lambda text: None, silent_seconds=2.5)) == set(NAMES)


def test_an_interrupt_ends_the_engine(spec: Spec, child: Any) -> None:
    child("time.sleep(120)")

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_arms(spec, interrupt)
    assert gone(starts(spec)[0][0])


@pytest.mark.parametrize("other", [{"shots": 3}, {"asked": "other questions in the same place"}])
def test_arms_of_another_specification_are_not_mixed_in(
    spec: Spec, child: Any, other: dict[str, Any]
) -> None:
    run_arms(spec, lambda text: None)
    told = failure(replace(spec, **other))
    assert told == (
        f"{spec.results} holds arms of another specification; give an empty folder, or remove it"
    )
    assert set(run_arms(spec, lambda text: None)) == set(NAMES)


@pytest.mark.parametrize("content", ["", '{"model"', '{"other": 1}'])
def test_a_specification_that_cannot_be_read_is_another(
    spec: Spec, child: Any, content: str
) -> None:
    folder = Path(spec.results)
    folder.mkdir()
    (folder / "spec.json").write_text(content, encoding="utf-8")
    assert "holds arms of another specification" in failure(spec)


def test_without_vllm_it_says_what_to_do(
    spec: Spec, child: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_spec(name: str) -> Any:
        return None if name == "vllm" else importlib.util.find_spec(name)

    monkeypatch.setattr(
        run, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=find_spec))
    )
    told = failure(spec)
    assert "vLLM is not installed here" in told
    assert "tox -e accuracy" in told
    assert "--afd-server" in told
    assert not Path(spec.results).exists()


def test_a_folder_that_is_no_checkpoint_is_named(spec: Spec, child: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing does not exist; give a folder with config"):
        run_arms(replace(spec, model=str(tmp_path / "nothing")), lambda text: None)
    set_config(Path(spec.model), hidden_size="128")
    with pytest.raises(CheckpointError, match="says hidden_size '128'; it must be a whole number"):
        run_arms(spec, lambda text: None)
    set_config(Path(spec.model), architectures=[])
    with pytest.raises(CheckpointError, match=r"config\.json has no list 'architectures'"):
        run_arms(spec, lambda text: None)


def test_a_checkpoint_without_a_tokenizer_is_refused_before_the_engine(
    spec: Spec, child: Any
) -> None:
    (Path(spec.model) / "tokenizer.json").unlink()
    assert "has no tokenizer" in failure(spec)
    assert not Path(spec.results).exists()


@pytest.mark.parametrize(
    ("config", "disabled"),
    [
        ({}, "0"),
        ({"kv_lora_rank": 64, "qk_rope_head_dim": 64}, "1"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "0"),
    ],
    ids=["no latent attention", "small", "as the kernels want it"],
)
def test_the_engine_is_offline_and_writes_into_its_folder_only(
    spec: Spec, child: Any, config: dict[str, int], disabled: str
) -> None:
    set_config(Path(spec.model), **config)
    before = dict(os.environ)
    run_arms(spec, lambda text: None)
    assert dict(os.environ) == before
    pid, told = starts(spec)[0]
    assert pid != os.getpid()
    assert (told["HF_HUB_OFFLINE"], told["HF_DATASETS_OFFLINE"]) == ("1", "1")
    assert told["VLLM_MLA_DISABLE"] == disabled
    for name in ("VLLM_CACHE_ROOT", "HF_DATASETS_CACHE"):
        assert Path(told[name]).is_relative_to(spec.results)


def test_the_engine_is_never_imported_here(spec: Spec, child: Any) -> None:
    before = set(sys.modules)
    run_arms(spec, lambda text: None)
    assert not {name for name in set(sys.modules) - before if name.split(".")[0] == "vllm"}
