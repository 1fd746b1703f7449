"""The splitting worker on vLLM-Ascend, from inside: what stages get, and what failures leave.

``worker_inside`` looks, in processes of its own, at float32 engines on the emulated NPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from afd_plugin import ScheduledBatch, SplitPlan, plan_split
from afd_testkit.engines._vllm_child import FIXED_ENVIRONMENT
from afd_testkit.models import ensure_model
from afd_testkit.npu.limits import VARIABLE
from afd_testkit.npu.process import emulated_environment
from afd_testkit.npu.settings import EmulationSettings

pytestmark = pytest.mark.ascend

AGREEMENT = 5e-5  # float32 log-probabilities, as in test_agreement
SECONDS = 300.0
# The prompts of ``worker_inside``: 404 tokens, the middle behind token 199 of the second.
LENGTHS = (3, 200, 17, 64, 120)
MODELS = {
    "qwen3-moe": "AscendAttentionMetadataBuilder",
    "deepseek-v3": "AscendMLAMetadataBuilder",
}

Look = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def look(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Look:
    """``look(mode, model)``: the report of ``worker_inside``, made once."""
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def run(mode: str, model: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("inside")
        script, report = Path(__file__).with_name("worker_inside.py"), folder / "report.json"
        environment = {
            **emulated_environment(EmulationSettings(mla_cast="lift")),
            **FIXED_ENVIRONMENT,
            # float32, and the small latent dimensions, are beyond what the kernels take.
            VARIABLE: "alignment,dtype,layout",
            "OMP_NUM_THREADS": "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions are sent to workers
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        }
        command = [sys.executable, str(script), mode, str(ensure_model(model, cache / "models"))]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [*command, str(report)],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(SECONDS)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)  # the workers too
                process.wait()
                raise
        assert status == 0, (folder / "log").read_text()[-4000:]
        found: dict[str, Any] = json.loads(report.read_text())
        return found

    def once(mode: str, model: str) -> dict[str, Any]:
        if (mode, model) not in known:
            known[mode, model] = run(mode, model)
        return known[mode, model]

    return once


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def inside(look: Look, model: str) -> dict[str, Any]:
    """An engine of one process."""
    return look("one", model)


@pytest.fixture
def ranks(look: Look) -> dict[str, Any]:
    """Two tensor-parallel ranks with expert parallelism, under FlashComm1."""
    return look("two", "qwen3-moe")


# --- results and evidence -----------------------------------------------------------------------


def test_a_split_step_is_the_whole_step(inside: dict[str, Any]) -> None:
    """Log-probabilities of every position, over the whole vocabulary."""
    assert max(inside["noise"]) < AGREEMENT
    assert max(inside["token"]) < AGREEMENT
    assert max(inside["request"]) < AGREEMENT


def test_evidence_of_each_step(inside: dict[str, Any]) -> None:
    whole, by_token, by_request = inside["evidence"]
    assert (whole["policy"], whole["reason"], whole["stage_tokens"]) == (
        "unsplit",
        "disabled",
        [404],
    )
    assert (by_token["policy"], by_token["cut"], by_token["cuts_request"]) == (
        "token_balanced_tp",
        202,
        True,
    )
    assert by_token["stage_tokens"] == by_token["stage_input_tokens"] == [202, 202]
    # Boundaries inside: 3, 203, 220, 284.  The nearest to 202 is 203.
    assert (by_request["policy"], by_request["cut"], by_request["cuts_request"]) == (
        "request_boundary",
        203,
        False,
    )
    assert by_request["stage_tokens"] == [203, 201]
    for record in (whole, by_token, by_request):
        assert (record["num_reqs"], record["num_tokens"]) == (5, 404)
        assert record["completed"] is True
    plan = plan_split(ScheduledBatch(LENGTHS), "token")
    assert isinstance(plan, SplitPlan)
    assert by_token["digest"] == plan.digest


# --- what a stage is given ----------------------------------------------------------------------


def test_each_stage_has_its_own_metadata_context_and_mask(inside: dict[str, Any]) -> None:
    first, second = inside["look"]["stages"]
    assert (first["stage"], second["stage"]) == (0, 1)
    assert (first["state"], second["state"]) == ("PrefillNoCache", "ChunkedPrefill")
    for each in (first, second):
        assert each["tokens"] == each["rows"] == each["masked"] == 202
        assert len(each["layers"]) == inside["look"]["layers"]
    assert first["context"] != second["context"]
    assert first["globals"][-1] != second["globals"][-1]  # the MC2 mask


def test_each_stage_has_its_own_rotary_angles(look: Look) -> None:
    """Those that vLLM-Ascend keeps for the step; latent attention has them in its metadata.

    Not every model reads them: the results of the one here do not depend on it.
    """
    first, second = look("one", "qwen3-moe")["look"]["stages"]
    assert first["angles"] == second["angles"] == [True, True]
    for one, other in zip(first["globals"][:4], second["globals"][:4], strict=True):
        assert one != other


def test_one_builder_a_stage(inside: dict[str, Any], model: str) -> None:
    assert inside["builders"] == [2]
    assert inside["kinds"] == [MODELS[model]]


def test_the_steps_attention_state_copied_to_both_stages_is_wrong(look: Look) -> None:
    """Stage 1 starts behind 199 tokens of its first request, and would not look for them.

    The one request that is cut loses its context, by several units of log-probability; all
    others stay.  With the state of the stage's own content nothing differs (above).
    """
    differences = look("one", "qwen3-moe")["copied state"]
    assert differences[1] > 1
    assert max(differences[:1] + differences[2:]) < AGREEMENT


# --- what a failing stage leaves behind -----------------------------------------------------------

FAILURES = {
    "layer 0": ("layer 1 of stage 0", []),
    "layer 1": ("layer 1 of stage 1", [202]),
    "builder 0": ("builder of stage 0", []),
    "builder 1": ("builder of stage 1", []),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failing_stage(inside: dict[str, Any], case: str) -> None:
    found, (text, ran) = inside[case], FAILURES[case]
    assert (found["error"], found["notes"]) == (text, [])
    (record,) = found["evidence"]
    assert record["stage_tokens"] == ran
    assert record["completed"] is False
    assert found["state"] == dict.fromkeys(found["state"], True)
    assert found["globals kept"]  # rotary caches and slices, MC2 mask
    assert max(found["again"]) < AGREEMENT
    (again,) = found["evidence again"]
    assert (again["stage_tokens"], again["completed"]) == ([202, 202], True)


def test_nothing_is_left_between_steps(inside: dict[str, Any]) -> None:
    assert inside["state"] == dict.fromkeys(inside["state"], True)
    assert inside["buffers kept"]


# --- ranks ----------------------------------------------------------------------------------------


def test_flashcomm1_aligns_the_cut_and_pads_the_tail(ranks: dict[str, Any]) -> None:
    """105 tokens over 2 ranks: the multiple of 2 nearest to 52.5 is 52, and 53 tokens need 54."""
    assert max(ranks["token"]) < AGREEMENT
    ((first,), (second,)) = ranks["evidence"]
    assert first == second
    assert (first["policy"], first["cut"]) == ("token_balanced_tp", 52)
    assert (first["stage_tokens"], first["stage_input_tokens"]) == ([52, 53], [52, 54])
    assert first["completed"] is True


def test_layers_are_told_of_the_padding_where_the_kernel_wants_it_only(
    ranks: dict[str, Any],
) -> None:
    """53 tokens in 54 rows: the fused kernel's offsets end with the buffer, nothing else does."""
    expected = [
        {"tokens": 52, "query ends": [52], "rows": 52, "masked": 52},
        {"tokens": 53, "query ends": [53, 54], "rows": 54, "masked": 53},
    ]
    assert ranks["stages"] == [expected, expected]


def test_ranks_that_disagree_raise_on_both_with_both_plans(ranks: dict[str, Any]) -> None:
    """Rank 1 was told to align to 16: its cut would be 48, 57 tokens in 64 rows behind it."""
    plans = [
        "token_balanced_tp cut 52 of 105 tokens, stages of 52 and 53 in 52 and 54 rows, "
        "alignment 2; sharded over 2; scheduled [105], computed [0], extent 106; digest ",
        "token_balanced_tp cut 48 of 105 tokens, stages of 48 and 57 in 48 and 64 rows, "
        "alignment 16; sharded over 2; scheduled [105], computed [0], extent 106; digest ",
    ]
    assert [seen["rank"] for seen in ranks["seen"]] == [0, 1]
    for seen in ranks["seen"]:
        assert seen["kind"] == "PlanDisagreement"
        for rank, (decision, plan) in enumerate(zip(seen["decisions"], plans, strict=True)):
            assert decision.startswith(plan)
            assert f"rank {rank}: {decision}" in seen["text"]
        assert seen["seconds"] < 30  # the group's timeout, which must not be needed
    assert "the ranks decided differently" in ranks["raised"]
    assert ranks["evidence of the disagreement"] == [[], []]  # nothing ran
