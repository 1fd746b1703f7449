"""The reference engine split in two: equal to the whole, and sensitive to a wrong split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from afd_plugin import decision, metadata, pipeline
from afd_testkit.engines.base import EngineConfig, EngineError, Prompt, RunResult, SplitSetting
from afd_testkit.engines.reference import ReferenceEngine
from afd_testkit.faults import split as split_faults

pytestmark = pytest.mark.cpu

STOCK = EngineConfig(
    model="reference",
    dtype="float64",
    block_size=4,
    max_model_len=256,
    max_step_tokens=512,
    max_num_seqs=16,
)
AFD = replace(STOCK, worker="afd")
TOKEN = SplitSetting("token")
EXACT = 1e-10


def tokens(length: int, seed: int) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(0, 300, length))


def prompts(*lengths: int) -> list[Prompt]:
    return [Prompt(f"p{i}", tokens(n, 100 + i)) for i, n in enumerate(lengths)]


def difference(left: RunResult, right: RunResult) -> float:
    """Largest difference in hidden states, log-probabilities and KV rows of two runs."""
    worst = 0.0
    for a, b in zip(left.requests, right.requests, strict=True):
        assert (a.name, a.cached_tokens, a.chunks) == (b.name, b.cached_tokens, b.chunks)
        arrays = zip((a.hidden, a.logprobs, *a.kv), (b.hidden, b.logprobs, *b.kv), strict=True)
        worst = max(worst, *(float(np.abs(x - y).max()) for x, y in arrays))
    return worst


def evidence(result: RunResult, step: int = 0) -> dict[str, Any]:
    record = result.steps[step].evidence
    assert record is not None
    return record


@pytest.mark.parametrize(
    ("lengths", "split", "stage_tokens", "stage_input_tokens", "cuts_request"),
    [
        ((220,), TOKEN, (110, 110), (110, 110), True),
        ((3, 200, 17), TOKEN, (110, 110), (110, 110), True),
        ((3, 200, 17), SplitSetting("token", alignment=8), (112, 108), (112, 112), True),
        ((64, 64), TOKEN, (64, 64), (64, 64), False),
        ((1,) * 9, TOKEN, (5, 4), (5, 4), False),
        ((1,) * 9, SplitSetting("token", alignment=2), (4, 5), (4, 6), False),
        ((105,), SplitSetting("token", alignment=4), (52, 53), (52, 56), True),
        ((3, 200, 17), SplitSetting("request"), (203, 17), (203, 17), False),
        ((5, 6, 7), SplitSetting("request", alignment=4), (11, 7), (12, 8), False),
    ],
)
def test_one_step_in_two_stages(
    lengths: tuple[int, ...],
    split: SplitSetting,
    stage_tokens: tuple[int, int],
    stage_input_tokens: tuple[int, int],
    cuts_request: bool,
) -> None:
    whole = ReferenceEngine(STOCK).run(prompts(*lengths))
    divided = ReferenceEngine(AFD).run(prompts(*lengths), split=split)
    assert difference(divided, whole) < EXACT
    assert [r.greedy_token for r in divided.requests] == [r.greedy_token for r in whole.requests]
    (step,) = divided.steps
    assert step.evidence is not None
    assert step.evidence["stage_tokens"] == stage_tokens
    assert step.evidence["stage_input_tokens"] == stage_input_tokens
    assert step.evidence["cuts_request"] is cuts_request
    assert step.evidence["completed"] is True
    assert [step.evidence for step in whole.steps] == [None]


@pytest.mark.parametrize("policy", ["token", "request"])
@pytest.mark.parametrize("step_tokens", [7, 32])
def test_chunks_hits_and_generation_in_two_stages(policy: Any, step_tokens: int) -> None:
    """Warm prefixes of 24 tokens, chunks, and decodes among the prefills."""
    shared = tokens(24, 1)
    batch = [
        Prompt("a", shared + tokens(30, 2), max_tokens=3),
        Prompt("b", tokens(5, 3), max_tokens=4),
        Prompt("c", shared + tokens(9, 4)),
    ]
    runs = []
    for config, split in ((STOCK, SplitSetting()), (AFD, SplitSetting(policy))):
        engine = ReferenceEngine(replace(config, prefix_caching=True, step_tokens=step_tokens))
        engine.run([Prompt("warm", (*shared, 0))])
        runs.append(engine.run(batch, split=split))
    whole, divided = runs
    assert [r.cached_tokens for r in divided.requests] == [24, 0, 24]
    assert difference(divided, whole) < EXACT
    policies = [evidence(divided, step)["policy"] for step in range(len(divided.steps))]
    assert len(set(policies) - {"unsplit"}) == 1


def reader_before_writer(
    config: EngineConfig, split: SplitSetting, fault: str | None = None
) -> RunResult:
    """Second step: ``r`` (2 tokens, 20 hits) in row 0 reads what ``w`` (12 tokens, row 1) writes.

    w writes its positions 12..23 as batch tokens 2..13; r reads positions up to 19, that
    is, up to batch token 9.
    """
    engine = ReferenceEngine(replace(config, prefix_caching=True, step_tokens=16, max_num_seqs=2))
    written = tokens(24, 8)
    result = engine.run(
        [
            Prompt("s", tokens(4, 9)),
            Prompt("w", written),
            Prompt("r", written[:20] + tokens(2, 10)),
        ],
        split=split,
        fault=fault,
    )
    rows = [(row.name, row.num_computed, row.num_scheduled) for row in result.steps[1].requests]
    assert rows == [("r", 20, 2), ("w", 12, 12)]
    return result


def test_the_cut_moves_behind_what_a_reader_needs() -> None:
    divided = reader_before_writer(AFD, TOKEN)
    record = evidence(divided, 1)
    assert record["hazard_action"] == "moved"
    assert record["stage_tokens"] == (10, 4)  # an even cut would be 7
    assert difference(divided, reader_before_writer(STOCK, SplitSetting())) < EXACT


@pytest.mark.parametrize(
    ("lengths", "split", "reason"),
    [
        ((40,), SplitSetting("off"), "disabled"),
        ((40,), SplitSetting("request"), "one_request"),
        ((40,), SplitSetting("token", min_tokens=41), "below_min_tokens"),
        ((3,), SplitSetting("token", alignment=4), "no_aligned_cut"),
        ((1,), TOKEN, "one_token"),
    ],
)
def test_a_step_that_stays_whole_says_why(
    lengths: tuple[int, ...], split: SplitSetting, reason: str
) -> None:
    result = ReferenceEngine(AFD).run(prompts(*lengths), split=split)
    assert evidence(result)["reason"] == reason
    assert difference(result, ReferenceEngine(STOCK).run(prompts(*lengths))) == 0.0


def test_decodes_are_not_split() -> None:
    batch = [replace(prompt, max_tokens=2) for prompt in prompts(8, 8)]
    result = ReferenceEngine(AFD).run(batch, split=TOKEN)
    assert evidence(result, 0)["policy"] == "token_balanced_tp"
    assert evidence(result, 1)["reason"] == "decode_only"


def _spoil_piece(change: Callable[[Any, Any], dict[str, Any]]) -> Callable[..., Any]:
    """``slice_metadata`` whose second piece gets ``change(parent, piece)``."""
    right = metadata.slice_metadata

    def wrong(parent: Any, plan: Any) -> tuple[Any, Any]:
        first, second = right(parent, plan)
        return first, replace(second, **change(parent, second))

    return wrong


SPOILED = {
    "computed counts of the parent": lambda parent, piece: {
        "_num_computed_tokens_cache": parent.compute_num_computed_tokens()[-piece.num_reqs :]
    },
    "lengths without the first piece": lambda parent, piece: {
        "seq_lens": piece.query_start_loc.diff(),
    },
    "slots of the first tokens": lambda parent, piece: {
        "slot_mapping": parent.slot_mapping[: piece.num_actual_tokens]
    },
    "block row of the next request": lambda parent, piece: {
        "block_table_tensor": piece.block_table_tensor.roll(1, dims=0)
    },
    "a piece taken for a decode": lambda parent, piece: {"is_prefilling": piece.is_prefilling < 0},
    "bound of a shorter sequence": lambda parent, piece: {"max_seq_len": piece.max_query_len},
}


@pytest.mark.parametrize("name", sorted(SPOILED))
def test_a_wrong_piece_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 1 of [3, 50, 17] begins at token 35, inside the second request."""
    whole = ReferenceEngine(STOCK).run(prompts(3, 50, 17))
    monkeypatch.setattr(metadata, "slice_metadata", _spoil_piece(SPOILED[name]))
    spoiled = ReferenceEngine(AFD).run(prompts(3, 50, 17), split=TOKEN)
    assert difference(spoiled, whole) > 1e-2


def greedy(result: RunResult) -> list[int]:
    return [request.greedy_token for request in result.requests]


@pytest.mark.parametrize(
    "name",
    sorted({f.name for f in split_faults.FAULTS} - {"hazard-ignored", "state-not-restored"}),
)
def test_a_fault_is_seen_in_its_run_only(name: str) -> None:
    """128 tokens: stages of 64 and 64; aligned to 12, of 60 and 68, the latter padded to 72."""
    alignment = 12 if name == "padded-length-told" else 1
    split = SplitSetting("token", alignment=alignment)
    whole = ReferenceEngine(STOCK).run(prompts(40, 50, 38))
    engine = ReferenceEngine(replace(AFD, prefix_caching=True))
    assert difference(engine.run(prompts(40, 50, 38), split=split, fault=name), whole) > 1e-2
    engine.reset_prefix_cache()  # what the faulty run wrote may be hit, as on any engine
    clean = engine.run(prompts(40, 50, 38), split=split)
    assert difference(clean, whole) < EXACT
    assert greedy(clean) == greedy(whole)


def test_an_ignored_hazard_is_seen() -> None:
    divided = reader_before_writer(AFD, TOKEN, fault="hazard-ignored")
    assert evidence(divided, 1)["stage_tokens"] == (7, 7)
    assert difference(divided, reader_before_writer(STOCK, SplitSetting())) > 1e-2


@pytest.mark.parametrize("lengths", [(50,), (3, 50, 17)])
def test_state_that_a_stage_left_behind_is_seen(lengths: tuple[int, ...]) -> None:
    """Stage 1's offsets stay in force, so the step samples from wrong rows."""
    whole = ReferenceEngine(STOCK).run(prompts(*lengths))
    engine = ReferenceEngine(AFD)
    spoiled = engine.run(prompts(*lengths), split=TOKEN, fault="state-not-restored")
    assert greedy(spoiled) != greedy(whole)
    assert greedy(engine.run(prompts(*lengths), split=TOKEN)) == greedy(whole)


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(EngineError, match=r"no fault 'typo'; known: .*hazard-ignored"):
        ReferenceEngine(AFD).run(prompts(4), fault="typo")


def _refuse(*arguments: Any) -> Any:
    raise ValueError("given up")


@pytest.mark.parametrize(
    ("module", "function"),
    [(decision, "decide_step"), (metadata, "slice_metadata"), (pipeline, "run_stages")],
)
def test_a_failed_run_leaves_a_cold_working_engine(
    module: Any, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ReferenceEngine(replace(AFD, prefix_caching=True))
    whole = ReferenceEngine(STOCK).run(prompts(40))
    with monkeypatch.context() as patch:
        patch.setattr(module, function, lambda *a, **k: _refuse())
        with pytest.raises(EngineError, match="step 0 of the run failed with ValueError: given up"):
            engine.run(prompts(40), split=TOKEN)
    again = engine.run(prompts(40), split=TOKEN)
    assert difference(again, whole) < EXACT


def test_split_numbers_that_the_plugin_refuses() -> None:
    with pytest.raises(EngineError, match="async_moe_token_alignment"):
        ReferenceEngine(AFD).run(prompts(4), split=SplitSetting("token", alignment=0))
