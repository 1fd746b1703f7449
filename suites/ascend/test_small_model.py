"""The model that answers, widened, on the real vLLM-Ascend."""

from __future__ import annotations

from pathlib import Path

import pytest

from afd_testkit.accuracy.margins import small_model
from afd_testkit.accuracy.plan import easy_and_right, few_shot_prompt, small_shots
from afd_testkit.accuracy.questions import Question
from afd_testkit.accuracy.widen import widen
from afd_testkit.engines.base import EngineConfig, Policy, Prompt, SplitSetting
from afd_testkit.pool import EnginePool

pytestmark = pytest.mark.ascend


def _said(question: Question) -> str:
    """What the model says to a question that it answers right: then it begins another one."""
    return f" {question.answer}\n\nQuestion:"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return widen(small_model(), tmp_path_factory.mktemp("widened") / "afd-small")


@pytest.mark.parametrize("policy", ["off", "token"])
def test_widened_model_answers(afd_engines: EnginePool, wide: Path, policy: Policy) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(wide, local_files_only=True)
    asked = easy_and_right(6)
    prompts = [
        Prompt(
            one.id,
            tuple(tokenizer.encode(few_shot_prompt(one, small_shots()[:5]))),
            max_tokens=len(tokenizer.encode(_said(one))),
        )
        for one in asked
    ]
    config = EngineConfig(model=str(wide), block_size=128, worker="afd")
    result = afd_engines.get(config, "ascend").run(prompts, split=SplitSetting(policy))
    assert any(len(step.forward_rows) == 2 for step in result.steps) == (policy != "off")
    for one, got in zip(asked, result.requests, strict=True):
        assert tokenizer.decode(got.generated) == _said(one)
