"""The real vLLM-Ascend agrees with transformers, in float32, over the whole vocabulary.

On the emulated NPU; every topology computes prompts whole, in chunks and behind cached
prefixes, and decodes its own greedy tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from afd_testkit.engines.ascend import AscendEngine
from afd_testkit.engines.base import EngineConfig, Prompt, RequestResult

pytestmark = pytest.mark.ascend

# Requirement of the project.  Both sides compute in float32, in different orders; latent
# attention sums over more terms than attention with heads of their own.
AGREEMENT = 5e-5
STEP = 256  # tokens: longer batches are chunked

TOPOLOGIES: dict[str, dict[str, object]] = {
    "one process": {},
    "TP 2": {"tensor_parallel": 2},
    "TP 2 + EP": {"tensor_parallel": 2, "expert_parallel": True},
    "TP 2 + EP on A3": {"tensor_parallel": 2, "expert_parallel": True, "soc": "A3"},
    "TP 2 + EP + SP": {
        "tensor_parallel": 2,
        "expert_parallel": True,
        "sequence_parallel": True,
    },
    "DP 2 + EP": {"data_parallel": 2, "expert_parallel": True},
}
# How vLLM-Ascend exchanges tokens between experts, by topology: what it must really have used.
COMMUNICATION = {
    "TP 2 + EP": {"ALLGATHER"},
    "TP 2 + EP on A3": {"ALLTOALL", "MC2"},
}
SUBJECTS = [(model, name) for model in ("deepseek-v3", "qwen3-moe") for name in TOPOLOGIES]


@pytest.fixture(scope="module", params=SUBJECTS, ids=lambda subject: f"{subject[0]}-{subject[1]}")
def engine(request: pytest.FixtureRequest, cache: Path) -> Iterator[AscendEngine]:
    """One engine a model and topology; chunks and prefix cache serve all tests."""
    model, name = request.param
    config = EngineConfig(
        model,
        block_size=128,
        prefix_caching=True,
        step_tokens=STEP,
        max_model_len=1024,
        **TOPOLOGIES[name],
    )
    assert config.topology_label() in (name, "")
    with closing(AscendEngine(config, cache)) as started:
        yield started


def difference(result: RequestResult, expected: np.ndarray) -> float:
    """Largest difference of log-probabilities at computed prompt positions and decoded ones."""
    prompt, first = len(result.token_ids), result.cached_tokens
    assert result.logprobs.shape == (prompt - first, 320)
    worst = np.abs(result.logprobs - expected[first:prompt]).max()
    if result.decode_logprobs is None or not len(result.decode_logprobs):
        return float(worst)
    decoded = expected[prompt : prompt + len(result.decode_logprobs)]
    assert decoded.shape == result.decode_logprobs.shape
    return float(max(worst, np.abs(result.decode_logprobs - decoded).max()))


@pytest.fixture
def check(
    engine: AscendEngine, ask_transformers: Callable[..., dict[str, np.ndarray]]
) -> Callable[[RequestResult], None]:
    """Compare a request with transformers, its own greedy tokens as what follows the prompt."""

    def compare(result: RequestResult) -> None:
        expected = ask_transformers(engine.config.model, result.token_ids + result.generated)
        assert difference(result, expected["logprobs"]) < AGREEMENT
        last = expected["logprobs"][len(result.token_ids) - 1 : -1].argmax(axis=1)
        assert result.generated == tuple(last.tolist())

    return compare


def test_prefill_and_decode(
    engine: AscendEngine,
    check: Callable[[RequestResult], None],
    make_prompt: Callable[..., Prompt],
) -> None:
    """Odd lengths, a prompt of one token, and five decoded tokens behind each."""
    lengths = [3, 77, 1, 120]
    prompts = [
        make_prompt(f"p{i}", n, 500 * i, max_tokens=6, cache_salt="prefill")
        for i, n in enumerate(lengths)
    ]
    run = engine.run(prompts)
    assert {request.chunks for request in run.requests} == {(n,) for n in lengths}
    for request in run.requests:
        assert len(request.generated) == 6
        assert request.decode_logprobs is not None
        assert request.decode_logprobs.shape == (5, 320)
        check(request)
    config = engine.config
    assert run.facts["flash_comm"] == ["on" if config.sequence_parallel else "off"]
    wanted = COMMUNICATION.get(config.topology_label())
    assert wanted is None or set(run.facts["moe_communication"]) <= wanted


def test_a_long_odd_step(
    cache: Path,
    make_prompt: Callable[..., Prompt],
    ask_transformers: Callable[..., dict[str, np.ndarray]],
) -> None:
    """Beyond what MC2 takes, experts exchange all to all; 601 tokens divide over no ranks."""
    config = EngineConfig("qwen3-moe", block_size=128, **TOPOLOGIES["TP 2 + EP on A3"])
    prompt = make_prompt("odd", 601)
    with closing(AscendEngine(config, cache)) as engine:
        run = engine.run([prompt])
    assert run.facts["moe_communication"] == ["ALLTOALL"]
    expected = ask_transformers("qwen3-moe", prompt.token_ids)["logprobs"]
    assert difference(run.requests[0], expected) < AGREEMENT


def test_chunks(
    engine: AscendEngine,
    check: Callable[[RequestResult], None],
    make_prompt: Callable[..., Prompt],
) -> None:
    """A prompt in several steps; its chunks end inside KV blocks."""
    ranks = engine.config.data_parallel
    prompts = [make_prompt(f"p{i}", 601 + i, 900 * i, cache_salt="chunks") for i in range(ranks)]
    for request in engine.run(prompts).requests:
        assert request.chunks == (256, 256, len(request.token_ids) - 512)
        check(request)


def test_prefix_hit(
    engine: AscendEngine,
    check: Callable[[RequestResult], None],
    make_prompt: Callable[..., Prompt],
) -> None:
    """Behind one cached block of 128 tokens; a prompt without a hit stands beside them."""
    engine.reset_prefix_cache()
    ranks = engine.config.data_parallel
    shared = make_prompt("shared", 150, 3000).token_ids
    first = [Prompt(f"first{i}", shared) for i in range(ranks)]
    assert [request.cached_tokens for request in engine.run(first).requests] == [0] * ranks
    hits = [
        Prompt(f"hit{i}", shared + make_prompt("rest", 30, 100 * i).token_ids, max_tokens=3)
        for i in range(ranks)
    ]
    run = engine.run([*hits, *(make_prompt(f"other{i}", 41, 4400 + i) for i in range(ranks))])
    assert [request.cached_tokens for request in run.requests] == [128] * ranks + [0] * ranks
    for request in run.requests:
        check(request)
