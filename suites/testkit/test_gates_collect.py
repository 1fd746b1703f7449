"""What is asked for and cannot be had stops the gates before they start."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

GATES = ("-p", "no:randomly", "-p", "no:cacheprovider", "--pyargs", "afd_testkit.gates")


def collect(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess(*GATES, "--collect-only", "-q", *options)


def test_an_unknown_engine(pytester: pytest.Pytester) -> None:
    result = collect(pytester, "--afd-engine=vlm")
    assert result.ret == pytest.ExitCode.USAGE_ERROR or "UsageError" in result.stdout.str()
    shown = result.stdout.str() + result.stderr.str()
    assert "'vlm' is served by no plugin; known names are ascend, reference, vllm-cpu" in shown


def test_a_folder_without_a_model(pytester: pytest.Pytester, tmp_path: Path) -> None:
    result = collect(pytester, "--afd-engine=vllm-cpu", f"--afd-model={tmp_path}")
    assert result.ret != pytest.ExitCode.OK
    shown = result.stdout.str() + result.stderr.str()
    assert "--afd-model" in shown
    assert "config.json" in shown


# Routing: of a layer with guards kept and dropped, in every dtype; on vLLM of a whole model, too,
# in float32 only.
# External routing: on vLLM in one step and in chunks, in every dtype.
@pytest.mark.parametrize(
    ("engine", "subjects", "routing"),
    [("reference", 2, 2 * 2), ("vllm-cpu", 4, 4 * 2 + 2 * 1 + 4 * 2)],
)
def test_every_gate_is_collected_for_every_subject(
    pytester: pytest.Pytester, engine: str, subjects: int, routing: int
) -> None:
    result = collect(pytester, f"--afd-engine={engine}")
    assert result.ret == pytest.ExitCode.OK
    # Nine workloads, five ratios and two same-step cases, one stability run, three chunk sizes.
    assert f"{subjects * (9 + 7 + 1 + 3) + routing} tests collected" in result.stdout.str()


def test_the_users_prompts_take_the_place_of_workloads(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "A river."}\n', encoding="utf-8")
    result = collect(pytester, "--afd-engine=reference", f"--afd-prompts={prompts}")
    assert result.ret == pytest.ExitCode.OK
    assert f"{2 * (1 + 1 + 1 + 3 + 2)} tests collected" in result.stdout.str()
