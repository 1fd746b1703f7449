"""The real vLLM-Ascend in one process: what the adapter shows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from afd_testkit.engines.ascend import AscendEngine, real_device
from afd_testkit.engines.base import EngineConfig, EngineError, Prompt, RunResult, SplitSetting

pytestmark = pytest.mark.ascend

MakePrompt = Callable[..., Prompt]
Ask = Callable[[str, tuple[int, ...]], dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def deepseek(cache: Path) -> Iterator[AscendEngine]:
    """Latent attention; stock worker, whole prompts, no prefix cache."""
    with closing(AscendEngine(EngineConfig("deepseek-v3", block_size=128), cache)) as engine:
        yield engine


@pytest.fixture(scope="module")
def qwen(cache: Path) -> Iterator[AscendEngine]:
    """Heads of their own; stock worker, prefix cache, steps of at most 64 tokens."""
    config = EngineConfig("qwen3-moe", block_size=128, prefix_caching=True, step_tokens=64)
    with closing(AscendEngine(config, cache)) as engine:
        yield engine


def schedule(run: RunResult) -> list[list[tuple[str, int, int]]]:
    """Steps as plain values: name, computed, scheduled."""
    return [
        [(r.name, r.num_computed, r.num_scheduled) for r in step.requests] for step in run.steps
    ]


def test_it_says_what_it_is(deepseek: AscendEngine, qwen: AscendEngine) -> None:
    assert deepseek.info["attention"] == ["ASCEND_MLA"]
    assert qwen.info["attention"] == ["CUSTOM"]
    assert deepseek.versions()["vllm-ascend"] == "0.23.0.post1"
    assert deepseek.vocab_size() == 320
    told = deepseek.info.get("emulated_npu")
    assert (told is None) is real_device()
    if told is not None:
        assert told["soc"] == "A2"
        run = deepseek.run([Prompt("p", (5, 6, 7))])
        assert run.facts["emulated_npu"] == told


def test_latent_rows_are_the_normed_latents(
    deepseek: AscendEngine, make_prompt: MakePrompt, ask_transformers: Ask
) -> None:
    """64 latent columns, then 32 rotated ones, which rotation leaves as long as they were."""
    prompt = make_prompt("long", 300)
    expected = ask_transformers("deepseek-v3", prompt.token_ids)
    result = deepseek.run([make_prompt("other", 40, 900), prompt]).requests[1]
    assert [rows.shape for rows in result.kv] == [(300, 96)] * 3
    for index, rows in enumerate(result.kv):
        assert np.abs(rows[:, :64] - expected[f"latent{index}"]).max() < 1e-4
    # In layer 0 the rope part depends on the token and is rotated by the position alone.
    common = max(set(prompt.token_ids), key=prompt.token_ids.count)
    same = [i for i, token in enumerate(prompt.token_ids) if token == common]
    assert len(same) > 3
    rope = result.kv[0][same, 64:]
    lengths = np.linalg.norm(rope, axis=1)
    assert np.ptp(lengths) < 1e-4 * lengths[0]
    assert np.abs(rope[1:] - rope[0]).max(axis=1).min() > 1e-2


def test_rows_are_the_keys_and_values(
    qwen: AscendEngine, make_prompt: MakePrompt, ask_transformers: Ask
) -> None:
    qwen.reset_prefix_cache()
    prompt = make_prompt("long", 300)
    expected = ask_transformers("qwen3-moe", prompt.token_ids)
    result = qwen.run([prompt]).requests[0]
    assert result.chunks == (64, 64, 64, 64, 44)
    for index, rows in enumerate(result.kv):
        key_rows, value_rows = rows.reshape(300, 2, 2, 32).swapaxes(0, 1)
        assert np.abs(key_rows - expected[f"keys{index}"]).max() < 1e-4
        assert np.abs(value_rows - expected[f"values{index}"]).max() < 1e-4


def test_each_kv_row_belongs_to_one_position(
    deepseek: AscendEngine, make_prompt: MakePrompt
) -> None:
    """With token 50 changed, earlier rows stay; in layer 0, which sees no context, later too."""
    prompt = make_prompt("long", 200)
    tokens = list(prompt.token_ids)
    tokens[50] = tokens[50] + 1
    before = deepseek.run([prompt]).requests[0]
    after = deepseek.run([Prompt("long", tuple(tokens))]).requests[0]
    changed = [np.abs(a - b).max(axis=1) for a, b in zip(before.kv, after.kv, strict=True)]
    assert np.flatnonzero(changed[0]).tolist() == [50]
    for layer in changed[1:]:
        assert not layer[:50].any()
        assert (layer[50:] > 1e-3).all()


def test_stale_blocks_are_poisoned(deepseek: AscendEngine, make_prompt: MakePrompt) -> None:
    """300 tokens and 40 tokens held 3 + 1 blocks of 128, which the next run finds overwritten."""
    deepseek.run([make_prompt("a", 300), make_prompt("b", 40)])
    assert deepseek.run([make_prompt("a", 30)]).facts["poisoned_blocks"] == 4
    assert deepseek.run([make_prompt("a", 30)]).facts["poisoned_blocks"] == 1


def test_steps_and_passes(qwen: AscendEngine, make_prompt: MakePrompt) -> None:
    """Steps of 64: 100 = 64 + 36; the 28 left go to the next prompt; then one decode each."""
    qwen.reset_prefix_cache()
    run = qwen.run([make_prompt("a", 100, max_tokens=2), make_prompt("b", 30, 1500, max_tokens=1)])
    assert schedule(run) == [
        [("a", 0, 64)],
        [("a", 64, 36), ("b", 0, 28)],
        [("a", 100, 1), ("b", 28, 2)],
    ]
    assert [step.forward_rows for step in run.steps] == [(64,), (64,), (3,)]
    assert all(step.evidence is None for step in run.steps)


def test_a_salt_keeps_prefixes_apart(qwen: AscendEngine, make_prompt: MakePrompt) -> None:
    qwen.reset_prefix_cache()
    tokens = make_prompt("x", 140, 4000).token_ids
    assert qwen.run([Prompt("x", tokens)]).requests[0].cached_tokens == 0
    assert qwen.run([Prompt("x", tokens, cache_salt="a")]).requests[0].cached_tokens == 0
    assert qwen.run([Prompt("x", tokens, cache_salt="a")]).requests[0].cached_tokens == 128


def test_refusals_leave_it_usable(deepseek: AscendEngine, make_prompt: MakePrompt) -> None:
    prompt = make_prompt("p", 20)
    with pytest.raises(EngineError, match="stock worker cannot split"):
        deepseek.run([prompt], split=SplitSetting("token"))
    with pytest.raises(EngineError, match="unknown fault 'nonsense'"):
        deepseek.run([prompt], fault="nonsense")
    with pytest.raises(EngineError, match="token id 320"):
        deepseek.run([Prompt("p", (1, 320))])
    assert len(deepseek.run([prompt]).requests) == 1


def test_a_fault_is_taken_out_again(deepseek: AscendEngine, make_prompt: MakePrompt) -> None:
    """These act on the second stage of a split step, which a stock worker has not: no change."""
    prompts = [make_prompt("p", 50), make_prompt("q", 70, 300)]
    plain = deepseek.run(prompts)
    for fault in ("routing-table-shared", "residual-leaked"):
        for again in (deepseek.run(prompts, fault=fault), deepseek.run(prompts)):
            for one, other in zip(plain.requests, again.requests, strict=True):
                assert np.abs(one.logprobs - other.logprobs).max() < 1e-5
