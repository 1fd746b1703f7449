"""The reference engine against the model's formula, written again without pages or steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from afd_testkit.engines.base import EngineConfig, EngineError, Prompt, RequestResult, SplitSetting
from afd_testkit.engines.reference import RECIPES, ReferenceEngine
from afd_testkit.engines.reference_attention import PagedKVCache
from afd_testkit.engines.reference_model import ReferenceModel

pytestmark = pytest.mark.cpu

CONFIG = EngineConfig(
    model="reference",
    dtype="float64",
    block_size=4,
    max_model_len=128,
    max_step_tokens=512,
    max_num_seqs=8,
)
EXACT = 1e-10


def tokens(length: int, seed: int) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(0, 300, length))


def times(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """[..., out] of x [..., in] and matrix [out, in].  einsum runs on one thread; BLAS on a busy
    machine may take seconds for matrices of this size."""
    return np.einsum("...i,oi->...o", x, matrix)


class Dense:
    """The same network over one whole prompt: full causal matrix, one token's experts at a time.

    Nothing but the weights is taken from the engine.
    """

    def __init__(self, model: ReferenceModel) -> None:
        self.config = model.config
        self.weights = {name: np.asarray(value) for name, value in model.named_parameters()}

    def __call__(self, token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Final hidden [P, 64], log-probabilities [P, 300], KV rows a layer [P, 64]."""
        w = self.weights
        x = w["embedding"][list(token_ids)]
        kv = []
        for layer in range(3):
            prefix = f"layers.{layer}."
            mixed, rows = self.attention(prefix + "self_attn.", self.norm(x, prefix + "input_norm"))
            kv.append(rows)
            x = x + mixed
            normed = self.norm(x, prefix + "post_norm")
            x = x + np.stack([self.experts(prefix + "mlp.", row) for row in normed])
        hidden = self.norm(x, "norm")
        logits = times(hidden, w["head"])
        peak = logits.max(axis=1, keepdims=True)
        log_total = peak + np.log(np.exp(logits - peak).sum(axis=1, keepdims=True))
        return hidden, logits - log_total, kv

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean_square = np.mean(x**2, axis=1, keepdims=True)
        return x / np.sqrt(mean_square + 1e-6) * self.weights[name + ".weight"]

    def attention(self, prefix: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        w, length = self.weights, len(x)
        query = self.rotated(times(x, w[prefix + "query"]).reshape(length, 4, 16))
        key = self.rotated(times(x, w[prefix + "key"]).reshape(length, 2, 16))
        value = times(x, w[prefix + "value"]).reshape(length, 2, 16)
        full = np.einsum("ihd,jhd->hij", query, np.repeat(key, 2, axis=1)) / 4.0
        full[:, np.triu(np.ones((length, length), dtype=bool), k=1)] = -np.inf
        full = np.exp(full - full.max(axis=2, keepdims=True))
        full /= full.sum(axis=2, keepdims=True)
        mixed = np.einsum("hij,jhd->ihd", full, np.repeat(value, 2, axis=1))
        rows = np.concatenate([key.reshape(length, 32), value.reshape(length, 32)], axis=1)
        return times(mixed.reshape(length, 64), w[prefix + "output"]), rows

    @staticmethod
    def rotated(heads: np.ndarray) -> np.ndarray:
        """Component i and i + 8 as one complex number, turned by position * 10000^(-i / 8)."""
        turn = np.outer(np.arange(len(heads)), 10000.0 ** (-np.arange(8) / 8))
        turned = (heads[..., :8] + 1j * heads[..., 8:]) * np.exp(1j * turn)[:, None, :]
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def experts(self, prefix: str, row: np.ndarray) -> np.ndarray:
        w = self.weights
        logits = times(row, w[prefix + "router_weight"])
        scores = np.exp(logits) if self.config.scoring == "softmax" else 1 / (1 + np.exp(-logits))
        best = np.argsort(-scores)[:2]
        total = self.expert(row, w[prefix + "shared_gate_up"], w[prefix + "shared_down"])
        for e in best:
            out = self.expert(row, w[prefix + "expert_gate_up"][e], w[prefix + "expert_down"][e])
            total = total + scores[e] / scores[best].sum() * out
        return total

    @staticmethod
    def expert(row: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
        gate, up = times(row, gate_up[:32]), times(row, gate_up[32:])
        return times(gate / (1 + np.exp(-gate)) * up, down)


def assert_dense(result: RequestResult, engine: ReferenceEngine) -> None:
    """Everything the request reports equals the dense formula over its whole prompt."""
    hidden, logprobs, kv = Dense(engine.model)(result.token_ids)
    start = result.cached_tokens
    np.testing.assert_allclose(result.hidden, hidden[start:], rtol=0, atol=EXACT)
    np.testing.assert_allclose(result.logprobs, logprobs[start:], rtol=0, atol=EXACT)
    assert len(result.kv) == 3
    for rows, expected in zip(result.kv, kv, strict=True):
        np.testing.assert_allclose(rows, expected, rtol=0, atol=EXACT)
    assert result.greedy_token == int(logprobs[-1].argmax())
    assert sum(result.chunks) == len(result.token_ids) - start


@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize(("step_tokens", "steps"), [(1, 60), (7, 9), (32, 2), (None, 1)])
def test_every_position_matches_the_formula(
    recipe: str, step_tokens: int | None, steps: int
) -> None:
    engine = ReferenceEngine(replace(CONFIG, model=recipe, step_tokens=step_tokens))
    prompts = [Prompt(f"p{n}", tokens(n, n)) for n in (1, 33, 5, 21)]
    result = engine.run(prompts)
    assert [r.name for r in result.requests] == ["p1", "p33", "p5", "p21"]
    assert len(result.steps) == steps
    for request in result.requests:
        assert_dense(request, engine)


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_block_size_does_not_show(block_size: int) -> None:
    engine = ReferenceEngine(replace(CONFIG, block_size=block_size, step_tokens=20))
    for request in engine.run([Prompt("a", tokens(50, 1)), Prompt("b", tokens(9, 2))]).requests:
        assert_dense(request, engine)


@pytest.mark.parametrize("step_tokens", [None, 7])
@pytest.mark.parametrize("shared", [0, 20, 40, 60, 72])  # 0, 25, 50, 75, 90 % of 80
def test_prefix_hits(shared: int, step_tokens: int | None) -> None:
    engine = ReferenceEngine(replace(CONFIG, prefix_caching=True, step_tokens=step_tokens))
    prompt = tokens(80, 3)
    other_tail = tuple((token + 1) % 300 for token in prompt[shared:])
    engine.run([Prompt("warm", prompt[:shared] + other_tail)])
    (result,) = engine.run([Prompt("p", prompt)]).requests
    assert result.cached_tokens == shared
    assert_dense(result, engine)


def test_a_reset_or_another_salt_or_no_caching_is_cold() -> None:
    prompt = tokens(20, 4)
    engine = ReferenceEngine(replace(CONFIG, prefix_caching=True))

    def cached(salt: str | None = None) -> int:
        return engine.run([Prompt("p", prompt, cache_salt=salt)]).requests[0].cached_tokens

    assert [cached(), cached(), cached("s"), cached("s"), cached()] == [0, 16, 0, 16, 16]
    engine.reset_prefix_cache()
    assert cached() == 0

    engine = ReferenceEngine(CONFIG)
    assert [cached(), cached()] == [0, 0]


def test_prompt_sent_twice() -> None:
    """81 tokens, block 32: two full blocks hit, 17 tokens are computed in a row of 3 blocks."""
    engine = ReferenceEngine(replace(CONFIG, prefix_caching=True, block_size=32))
    prompt = tokens(81, 5)
    engine.run([Prompt("first", prompt)])
    result = engine.run([Prompt("second", prompt)])
    (row,) = result.steps[0].requests
    assert (row.num_computed, row.num_scheduled) == (64, 17)
    assert result.requests[0].chunks == (17,)
    assert_dense(result.requests[0], engine)


def test_cold_batch_hits_blocks_of_its_own_step() -> None:
    """704, 673 and 673 tokens sharing 672 (21 blocks of 32): the readers compute one token each."""
    engine = ReferenceEngine(
        replace(
            CONFIG, prefix_caching=True, block_size=32, max_model_len=1024, max_step_tokens=2048
        )
    )
    shared = tokens(672, 6)
    result = engine.run(
        [
            Prompt("writer", shared + tokens(32, 7)),
            Prompt("r1", (*shared, 1)),
            Prompt("r2", (*shared, 2)),
        ]
    )
    (step,) = result.steps
    facts = [(row.name, row.num_computed, row.num_scheduled) for row in step.requests]
    assert facts == [("writer", 0, 704), ("r1", 672, 1), ("r2", 672, 1)]
    uncached = ReferenceEngine(replace(engine.config, prefix_caching=False))
    alone = uncached.run([Prompt("r2", (*shared, 2))]).requests[0]
    np.testing.assert_allclose(
        result.requests[2].logprobs, alone.logprobs[672:], rtol=0, atol=EXACT
    )


def test_reader_stands_before_its_writer() -> None:
    """``s`` leaves row 0 to ``r``, which hits all five blocks that ``w``, row 1, is still filling.

    Budget 16, two requests at most.  Step 1: s 4 tokens, w 12.  Step 2: w's other 12 and r,
    22 tokens of which 20 are w's first, hence 2.
    """
    engine = ReferenceEngine(replace(CONFIG, prefix_caching=True, step_tokens=16, max_num_seqs=2))
    written = tokens(24, 8)
    result = engine.run(
        [
            Prompt("s", tokens(4, 9)),
            Prompt("w", written),
            Prompt("r", written[:20] + tokens(2, 10)),
        ]
    )
    steps = [
        [(row.name, row.num_computed, row.num_scheduled) for row in step.requests]
        for step in result.steps
    ]
    assert steps == [[("s", 0, 4), ("w", 0, 12)], [("r", 20, 2), ("w", 12, 12)]]
    for request in result.requests:
        assert_dense(request, engine)


def test_no_more_requests_in_a_step_than_allowed() -> None:
    engine = ReferenceEngine(replace(CONFIG, max_num_seqs=1))
    steps = engine.run([Prompt("a", (1, 2)), Prompt("b", (3,))]).steps
    assert [[row.name for row in step.requests] for step in steps] == [["a"], ["b"]]


def test_fresh_blocks_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without writes nothing is found, though the very same prompt ran before."""
    engine = ReferenceEngine(CONFIG)
    prompts = [Prompt("p", tokens(30, 15))]
    # The pool hands out the block that was free the longest: fill it once.
    for _ in range(engine.run(prompts).facts["kv_blocks"] // 8):
        engine.run(prompts)
    monkeypatch.setattr(PagedKVCache, "write", lambda *arguments: None)
    for rows in engine.run(prompts).requests[0].kv:
        assert not rows.any()


def test_batch_composition_does_not_show() -> None:
    engine = ReferenceEngine(CONFIG)
    prompt = Prompt("p", tokens(30, 11))
    alone = engine.run([prompt]).requests[0]
    crowd = [Prompt(f"x{n}", tokens(n, n)) for n in (1, 40, 3)]
    crowded = engine.run([crowd[0], crowd[1], prompt, crowd[2]]).requests[2]
    np.testing.assert_allclose(crowded.logprobs, alone.logprobs, rtol=0, atol=EXACT)


def test_generation_follows_the_formula() -> None:
    engine = ReferenceEngine(replace(CONFIG, step_tokens=8))
    longer, one = Prompt("g", tokens(10, 12), max_tokens=3), Prompt("o", tokens(11, 13))
    result = engine.run([longer, one])
    for request in result.requests:
        assert_dense(request, engine)
    # 8 | 2 + 6 | 1 (decode) + 5 | 1 (decode): three tokens need two decode steps.
    steps = [[(r.name, r.num_scheduled) for r in step.requests] for step in result.steps]
    assert steps == [[("g", 8)], [("g", 2), ("o", 6)], [("g", 1), ("o", 5)], [("g", 1)]]


def test_seed_decides_the_weights() -> None:
    prompt = [Prompt("p", tokens(8, 14))]

    def logprobs(seed: int) -> np.ndarray:
        return np.asarray(ReferenceEngine(CONFIG, seed=seed).run(prompt).requests[0].logprobs)

    np.testing.assert_array_equal(logprobs(1), logprobs(1))
    assert np.abs(logprobs(1) - logprobs(2)).max() > 1.0


def test_bytes_are_tokens() -> None:
    engine = ReferenceEngine(CONFIG)
    assert engine.tokenize("aé") == (97, 0xC3, 0xA9)
    assert engine.vocab_size() == 300
    assert set(engine.versions()) == {"afd-testkit", "numpy", "torch"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "float32"}, ["'float32'", "'float64'"]),
        ({"model": "llama"}, ["'llama'", "reference, reference-sigmoid"]),
        ({"block_size": 0}, ["block_size is 0"]),
        ({"step_tokens": 0}, ["step_tokens is 0"]),
    ],
)
def test_bad_configuration(change: dict[str, object], said: list[str]) -> None:
    with pytest.raises(EngineError) as caught:
        ReferenceEngine(replace(CONFIG, **change))
    assert all(part in str(caught.value) for part in said)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (Prompt("empty", ()), ["'empty'", "no tokens", "1 to 127"]),
        (Prompt("high", (0, 300)), ["'high'", "token 300 at position 1", "0 to 299"]),
        (Prompt("low", (-1,)), ["'low'", "token -1 at position 0"]),
        (Prompt("long", (0,) * 128), ["'long'", "128 tokens", "max_model_len 128"]),
        (Prompt("more", (0,) * 120, max_tokens=9), ["'more'", "129 in all"]),
        (Prompt("none", (0,), max_tokens=0), ["'none'", "0 tokens"]),
    ],
)
def test_bad_prompt(prompt: Prompt, said: list[str]) -> None:
    engine = ReferenceEngine(CONFIG)
    with pytest.raises(EngineError) as caught:
        engine.run([Prompt("fine", (1, 2)), prompt])
    assert all(part in str(caught.value) for part in said)


def _split_on_stock(engine: ReferenceEngine) -> None:
    engine.run([Prompt("p", (1,))], split=SplitSetting("token"))


def _same_name(engine: ReferenceEngine) -> None:
    engine.run([Prompt("p", (1,)), Prompt("p", (2,))])


def _after_close(engine: ReferenceEngine) -> None:
    engine.close()
    engine.close()
    engine.run([Prompt("p", (1,))])


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (_split_on_stock, "worker='afd'"),
        (_same_name, "2 prompts are named 'p'"),
        (_after_close, "was closed"),
    ],
)
def test_bad_use(use: Callable[[ReferenceEngine], None], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        use(ReferenceEngine(CONFIG))
