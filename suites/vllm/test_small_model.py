"""The model that answers, on vLLM's latent-attention kernels and by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from afd_testkit.accuracy.margins import small_model
from afd_testkit.accuracy.plan import easy_and_right, few_shot_prompt, gate_questions, small_shots
from afd_testkit.accuracy.widen import widen

pytestmark = pytest.mark.vllm

SHOTS = small_shots()[:5]
INSIDE = Path(__file__).parent / "answers_inside.py"


def test_widened_model_answers_on_latent_attention_kernels(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    asked = easy_and_right(8)
    tokenizer = AutoTokenizer.from_pretrained(small_model(), local_files_only=True)
    prompts = [tokenizer.encode(few_shot_prompt(one, SHOTS)) for one in asked]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    wide = widen(small_model(), tmp_path / "wide")
    environment = {
        **os.environ,
        "VLLM_MLA_DISABLE": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CACHE_ROOT": str(tmp_path / "vllm"),
        "OMP_NUM_THREADS": "1",
    }
    files = [str(tmp_path / name) for name in ("prompts.json", "answers.json")]
    ended = subprocess.run(
        [sys.executable, str(INSIDE), str(wide), *files],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    answered = json.loads((tmp_path / "answers.json").read_text())
    assert answered["backends"] == ["CPU_MLA"]
    got = [tokenizer.decode(tokens) for tokens in answered["tokens"]]
    for one, text in zip(asked, got, strict=True):
        assert text.startswith(f" {one.answer}\n\n")


def test_widened_model_is_the_same_function(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wide = widen(small_model(), tmp_path / "wide")
    tokenizer = AutoTokenizer.from_pretrained(small_model(), local_files_only=True)
    ids = torch.tensor([tokenizer.encode(few_shot_prompt(gate_questions()[0], SHOTS))])
    with torch.no_grad():
        small, large = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
            for folder in (small_model(), wide)
        )
    difference = (small.log_softmax(-1) - large.log_softmax(-1)).abs().max()
    assert float(difference) < 5e-5


def test_load_of_experts_is_the_routers_own_and_uneven() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_model(), local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(small_model(), dtype=torch.float32).eval()
    routers = [each for each in model.modules() if type(each).__name__ == "DeepseekV3TopkRouter"]
    counts = [torch.zeros(8, dtype=torch.int64) for _ in routers]

    def count(place: int) -> object:
        def hook(_router: object, _inputs: object, output: tuple[torch.Tensor, ...]) -> None:
            counts[place] += torch.bincount(output[2].flatten(), minlength=8)

        return hook

    for place, router in enumerate(routers):
        router.register_forward_hook(count(place))
    with torch.no_grad():
        for one in gate_questions(20):
            model(torch.tensor([tokenizer.encode(few_shot_prompt(one, SHOTS))]))
    assert len(routers) == 2
    for each in counts:
        assert int(each.min()) > 0, "an expert that nothing goes to"
        assert float(each.max() / each.float().mean()) > 1.1, "as even as if it were forced"
