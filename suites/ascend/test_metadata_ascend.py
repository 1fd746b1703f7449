"""Slicing vLLM-Ascend's own metadata: field by field, and through its real builders.

Expected values come from a list of single tokens, each with its request, position and slot;
a stage is a part of that list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from afd_plugin import ScheduledBatch, SplitPlan, slice_metadata, split_at
from afd_plugin.compat.known import RULES_0_23_0, RULES_ASCEND_0_23_0_POST1
from afd_plugin.errors import MissingFieldRule, RefusedField, StaleFieldRule

ConfigMaker = Callable[..., Any]
InForce = Callable[[Any], AbstractContextManager[None]]

pytestmark = [pytest.mark.ascend, pytest.mark.usefixtures("ascend_loaded")]

BLOCK = 128


@dataclass(frozen=True)
class Step:
    """A step by tokens; the fields are per request, but the state and the padded extent."""

    scheduled: tuple[int, ...]
    computed: tuple[int, ...]
    prefilling: tuple[bool, ...]
    state: str = "ChunkedPrefill"
    extent: int | None = None

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """(request, position) of each token of the step, in order."""
        return [
            (request, self.computed[request] + i)
            for request, count in enumerate(self.scheduled)
            for i in range(count)
        ]

    @property
    def rows(self) -> int:
        """Rows of the step's buffers."""
        return len(self.tokens) if self.extent is None else self.extent

    def plan(self, cut: int, alignment: int = 1) -> SplitPlan:
        batch = ScheduledBatch(
            self.scheduled,
            self.computed,
            is_prefilling=self.prefilling,
            num_input_tokens=self.extent,
        )
        return split_at(batch, cut, alignment)


# A decode, a later chunk, a fresh prompt, a prompt's last single token.
MIXED = Step((1, 9, 5, 1), (40, 64, 0, 31), (False, True, True, True))
FRESH = Step((3, 200, 17), (0, 0, 0), (True, True, True), "PrefillNoCache")
A1 = Step((3, 200, 17), (0, 64, 0), (True, True, True))
A3 = Step((8,), (24,), (True,))
PADDED = Step((13, 92), (0, 0), (True, True), "PrefillNoCache", extent=112)
STEPS = {"mixed": MIXED, "fresh": FRESH, "A1": A1, "A3": A3, "padded": PADDED}


def state(name: str) -> Any:
    from vllm_ascend.attention.attention_v1 import AscendAttentionState

    return AscendAttentionState[name]


def block_row(request: int, width: int = 4) -> list[int]:
    """Block ids of a request: no two requests share one."""
    return [1 + request * width + i for i in range(width)]


def slot(request: int, position: int) -> int:
    """Where a token's keys go: in its request's own block row."""
    return block_row(request)[position // BLOCK] * BLOCK + position % BLOCK


def sentinels(step: Step, padding_row: bool = False) -> dict[str, Any]:
    """One value a field of the class, all distinct; with a last request that holds the padding."""
    extra, requests, tokens = int(padding_row), len(step.scheduled), step.tokens
    starts = [sum(step.scheduled[:i]) for i in range(requests + 1)] + [step.rows] * extra
    lengths = [c + s for c, s in zip(step.computed, step.scheduled, strict=True)] + [0] * extra
    computed = [*step.computed] + [0] * extra
    positions = [position for _, position in tokens] + [0] * (step.rows - len(tokens))

    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def each(base: int) -> list[int]:
        return [base + row for row in range(requests + extra)]

    return {
        "query_start_loc": ints(starts),
        "query_start_loc_cpu": ints(starts),
        "seq_lens": ints(lengths),
        "num_reqs": requests + extra,
        "num_actual_tokens": len(tokens),
        "max_query_len": max(step.scheduled),
        "max_seq_len": max(lengths),
        "block_table_tensor": ints([block_row(r) for r in range(requests + extra)]),
        "slot_mapping": ints([slot(*token) for token in tokens]),
        "causal": True,
        "logits_indices_padded": None,
        "num_logits_indices": None,
        "encoder_seq_lens": ints(each(5000)),
        "encoder_seq_lens_cpu": np.array(each(6000), dtype=np.int32),
        "dcp_local_seq_lens": None,
        "dcp_local_seq_lens_cpu": None,
        "positions": torch.tensor(positions),
        "is_prefilling": torch.tensor([*step.prefilling, *[False] * extra]),
        "seq_lens_cpu_upper_bound": ints(lengths),
        "_seq_lens_cpu": ints(lengths),
        "_num_computed_tokens_cpu": ints(computed),
        "_num_computed_tokens_cache": ints(each(11000)),
        "seq_lens_cpu": ints(lengths),
        "num_computed_tokens_cpu": ints(computed),
        "decode_token_per_req": 1,
        "actual_seq_lengths_q": [],
        "positions_cpu": None,
        "attn_state": state(step.state),
        "graph_pad_size": -1,
        "num_input_tokens": step.rows,
        "prefill_context_parallel_metadata": None,
        "kvcomp_metadata": None,
    }


# Fields that a stage cannot derive, each with a value that vLLM-Ascend would give it.
REFUSED: dict[str, Any] = {
    "logits_indices_padded": torch.tensor([0, 9, 9]),
    "num_logits_indices": 2,
    "dcp_local_seq_lens": torch.tensor([21, 37, 3, 16]),
    "dcp_local_seq_lens_cpu": torch.tensor([21, 37, 3, 16]),
    "decode_token_per_req": 2,
    "actual_seq_lengths_q": [1, 10, 15, 16],
    "positions_cpu": torch.arange(16),
    "graph_pad_size": 16,
    "prefill_context_parallel_metadata": "set below",
    "kvcomp_metadata": "set below",
}
UNSET = {"decode_token_per_req": 1, "actual_seq_lengths_q": [], "graph_pad_size": -1}


def state_of(step: Step, mine: list[tuple[int, int]], rows: list[int]) -> str:
    """From the definition: context is what lies before a request's first token of the stage."""
    firsts = {row: min(p for request, p in mine if request == row) for row in rows}
    if not any(firsts.values()):
        return "PrefillNoCache"
    if len(mine) == len(rows) and not any(step.prefilling[row] for row in rows):
        return "DecodeOnly"
    return "ChunkedPrefill"


def expected(step: Step, parent: dict[str, Any], begin: int, end: int, rows: int) -> dict[str, Any]:
    """Every field of the stage with tokens ``begin`` to ``end`` in ``rows`` rows."""
    mine = step.tokens[begin:end]
    requests = sorted({request for request, _ in mine})
    counts = [sum(request == row for request, _ in mine) for row in requests]
    ends = [1 + max(p for request, p in mine if request == row) for row in requests]
    firsts = [min(p for request, p in mine if request == row) for row in requests]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]

    def of_rows(name: str) -> list[Any]:
        return [parent[name].tolist()[row] for row in requests]

    lengths = ("seq_lens", "seq_lens_cpu_upper_bound", "_seq_lens_cpu", "seq_lens_cpu")
    return {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "num_reqs": len(requests),
        "num_actual_tokens": len(mine),
        "max_query_len": max(counts),
        "max_seq_len": max(ends),
        "block_table_tensor": [block_row(row) for row in requests],
        "slot_mapping": [slot(*token) for token in mine],
        "causal": True,
        "encoder_seq_lens": of_rows("encoder_seq_lens"),
        "encoder_seq_lens_cpu": of_rows("encoder_seq_lens_cpu"),
        "positions": [position for _, position in mine],
        "is_prefilling": [step.prefilling[row] for row in requests],
        "attn_state": state(state_of(step, mine, requests)),
        "num_input_tokens": rows,
        **dict.fromkeys(lengths, ends),
        **dict.fromkeys(("_num_computed_tokens_cpu", "num_computed_tokens_cpu"), firsts),
        **{name: UNSET.get(name) for name in REFUSED},
        "_num_computed_tokens_cache": None,  # a private cache starts empty
    }


def metadata(step: Step, padding_row: bool = False, **changes: Any) -> Any:
    from vllm_ascend.attention.utils import AscendCommonAttentionMetadata

    return AscendCommonAttentionMetadata(**{**sentinels(step, padding_row), **changes})


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value


def values(piece: Any) -> dict[str, Any]:
    return {field.name: plain(getattr(piece, field.name)) for field in dataclasses.fields(piece)}


# --- B1: every field --------------------------------------------------------------------------


@pytest.mark.parametrize("padding_row", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_every_field_at_every_kind_of_cut(name: str, padding_row: bool) -> None:
    step = STEPS[name]
    total, alignment = len(step.tokens), 8 if step.extent else 1
    cuts = range(1, total) if total < 50 else (1, 3, 4, 56, 96, total - 1)
    given = sentinels(step, padding_row)
    for cut in cuts:
        plan = step.plan(cut, alignment)
        parent = metadata(step, padding_row)
        stages = slice_metadata(parent, plan)
        for piece, (begin, end) in zip(stages, [(0, cut), (cut, total)], strict=True):
            rows = -(-(end - begin) // alignment) * alignment
            assert type(piece) is type(parent)
            assert values(piece) == expected(step, given, begin, end, rows), cut
        # Nothing of the parent was written.
        assert values(parent) == {field: plain(value) for field, value in given.items()}


def test_this_suite_knows_every_field() -> None:
    """A field of the class without a sentinel here would not be judged at all."""
    from vllm_ascend.attention.utils import AscendCommonAttentionMetadata

    fields = {field.name for field in dataclasses.fields(AscendCommonAttentionMetadata)}
    given = sentinels(MIXED)
    assert set(given) == fields == set(expected(MIXED, given, 0, 4, 4))
    assert fields == set(RULES_0_23_0) | set(RULES_ASCEND_0_23_0_POST1)
    unset = {name for name, value in given.items() if value is None}
    assert unset | set(UNSET) == set(REFUSED)
    own = [repr(plain(value)) for name, value in given.items() if name not in REFUSED]
    # By definition: offsets twice, lengths four times, computed counts twice, tokens as rows.
    assert len(set(own)) == len(own) - 1 - 3 - 1 - 1


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_cannot_be_derived_is_refused(name: str) -> None:
    from vllm_ascend.attention.utils import AscendPrefillContextParallelMetadata
    from vllm_ascend.worker.kvcomp_utils import KVCompMetaData

    made = {
        "prefill_context_parallel_metadata": AscendPrefillContextParallelMetadata(),
        "kvcomp_metadata": object.__new__(KVCompMetaData),
    }
    value = made.get(name, REFUSED[name])
    with pytest.raises(RefusedField, match=rf"field {name} is set, but .* must be unset\. \w+"):
        slice_metadata(metadata(MIXED, **{name: value}), MIXED.plan(6))


def test_fields_keep_their_kind_and_type() -> None:
    parent = metadata(MIXED)
    for piece in slice_metadata(parent, MIXED.plan(6)):
        for field in dataclasses.fields(parent):
            before, after = getattr(parent, field.name), getattr(piece, field.name)
            if after is not None:
                assert type(after) is type(before), field.name
            if isinstance(after, torch.Tensor | np.ndarray):
                assert after.dtype == before.dtype, field.name


def test_a_subclass_field_without_a_rule_is_named() -> None:
    from vllm_ascend.attention.utils import AscendCommonAttentionMetadata

    extended = dataclasses.make_dataclass(
        "Extended", [("kv_scale_table", Any, None)], bases=(AscendCommonAttentionMetadata,)
    )
    with pytest.raises(MissingFieldRule, match=r"Extended has field.* kv_scale_table\."):
        slice_metadata(extended(**sentinels(MIXED)), MIXED.plan(6))


@pytest.mark.parametrize("name", ["attn_state", "seq_lens_cpu", "num_input_tokens"])
def test_a_field_that_the_class_has_lost_is_named(name: str) -> None:
    """Another class under the pinned name, as an upgrade would bring it."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    own = [each for each in RULES_ASCEND_0_23_0_POST1 if each not in (name, "positions")]
    shrunk = dataclasses.make_dataclass(
        "AscendCommonAttentionMetadata",
        [(each, Any, None) for each in own],
        bases=(CommonAttentionMetadata,),
        namespace={"__module__": "vllm_ascend.attention.utils"},
    )
    with pytest.raises(StaleFieldRule, match=name):
        slice_metadata(shrunk(*[None] * 9), MIXED.plan(6))


# --- public cases -----------------------------------------------------------------------------


def test_a1_a2_computed_counts_advance_and_positions_stay() -> None:
    first, second = slice_metadata(metadata(A1), A1.plan(110))
    assert second.query_start_loc.tolist() == [0, 93, 110]
    for name in ("seq_lens", "seq_lens_cpu", "_seq_lens_cpu", "seq_lens_cpu_upper_bound"):
        assert getattr(first, name).tolist() == [3, 171]
        assert getattr(second, name).tolist() == [264, 17]
    for name in ("num_computed_tokens_cpu", "_num_computed_tokens_cpu"):
        assert getattr(second, name).tolist() == [171, 0]
    assert second.compute_num_computed_tokens().tolist() == [171, 0]
    assert first.max_seq_len == 171
    assert second.positions[0].item() == 171


def test_a3_pieces_of_a_chunk() -> None:
    first, second = slice_metadata(metadata(A3), A3.plan(4))
    assert (first.seq_lens_cpu.item(), first.num_computed_tokens_cpu.item()) == (28, 24)
    assert (second.seq_lens_cpu.item(), second.num_computed_tokens_cpu.item()) == (32, 28)


CASES_C = {
    "C1": ((105,), 8, 56, (56, 49), (56, 56)),
    "C2": ((1, 1068), 2, 534, (534, 535), (534, 536)),
}


@pytest.mark.parametrize("name", CASES_C)
def test_c_padding_is_never_told_to_attention(name: str) -> None:
    scheduled, alignment, cut, real, physical = CASES_C[name]
    total, many = sum(scheduled), len(scheduled)
    extent = -(-total // alignment) * alignment
    step = Step(scheduled, (0,) * many, (True,) * many, "PrefillNoCache", extent)
    wide = torch.zeros(many, 10, dtype=torch.int32)
    slots = torch.arange(total, dtype=torch.int32)
    parent = dataclasses.replace(metadata(A3), **_counts(step), block_table_tensor=wide)
    parent.slot_mapping = slots
    stages = slice_metadata(parent, step.plan(cut, alignment))
    for piece, tokens, rows in zip(stages, real, physical, strict=True):
        assert (piece.num_actual_tokens, piece.num_input_tokens) == (tokens, rows)
        assert piece.query_start_loc_cpu[-1].item() == tokens == len(piece.positions)
        assert piece.max_query_len <= tokens == len(piece.slot_mapping)


def _counts(step: Step) -> dict[str, Any]:
    """The fields that count, for a step longer than the block rows here."""
    tokens, lengths = len(step.tokens), torch.tensor(step.scheduled, dtype=torch.int32)
    starts = torch.tensor([0, *np.cumsum(step.scheduled)], dtype=torch.int32)
    nothing = torch.zeros_like(lengths)
    return {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts.clone(),
        "num_reqs": len(step.scheduled),
        "num_actual_tokens": tokens,
        "max_query_len": max(step.scheduled),
        "max_seq_len": max(step.scheduled),
        "positions": torch.tensor([p for _, p in step.tokens] + [0] * (step.rows - tokens)),
        "is_prefilling": torch.tensor(step.prefilling),
        "attn_state": state(step.state),
        "num_input_tokens": step.rows,
        "encoder_seq_lens": None,
        "encoder_seq_lens_cpu": None,
        **{
            name: lengths.clone()
            for name in ("seq_lens", "seq_lens_cpu", "_seq_lens_cpu", "seq_lens_cpu_upper_bound")
        },
        **{
            name: nothing.clone()
            for name in ("num_computed_tokens_cpu", "_num_computed_tokens_cpu")
        },
    }


# --- the real builders ------------------------------------------------------------------------


@pytest.fixture(params=["qwen3-moe", "deepseek-v3"], ids=["heads", "latent"])
def builders(
    request: pytest.FixtureRequest,
    make_config: ConfigMaker,
    in_force: InForce,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Sequence[Any]]:
    """Two of the real builders that the platform chooses for the model.

    The angles of position p are p (cosine) and p + 0.5 (sine), so that each token of a result
    says which position it was made for.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
    from vllm_ascend.attention.attention_v1 import AscendAttentionMetadataBuilder
    from vllm_ascend.attention.mla_v1 import AscendMLAMetadataBuilder
    from vllm_ascend.ops import rotary_embedding

    config = make_config(request.param)
    # The layer of latent attention, of which vLLM's part of the builder reads this alone.
    config.compilation_config.static_forward_context["layer"] = SimpleNamespace(
        prefill_backend=None
    )
    places = torch.arange(512.0)[:, None].expand(512, 8)
    monkeypatch.setattr(rotary_embedding, "_cos_cache", places.clone())
    monkeypatch.setattr(rotary_embedding, "_sin_cache", places + 0.5)
    for name in ("_cos_mla", "_sin_mla"):
        monkeypatch.setattr(rotary_embedding, name, torch.full((512, 1, 1, 8), -1.0))
    shape = {"block_size": BLOCK, "head_size": 96, "dtype": torch.float32, "num_kv_heads": 1}
    spec, kind = (
        (FullAttentionSpec(**shape), AscendAttentionMetadataBuilder)
        if request.param == "qwen3-moe"
        else (MLAAttentionSpec(**shape), AscendMLAMetadataBuilder)
    )
    with in_force(config):
        yield [kind(spec, ["layer"], config, torch.device("npu:0")) for _ in range(2)]


def build(builders: Sequence[Any], step: Step, plan: SplitPlan, **options: Any) -> tuple[Any, Any]:
    """Both stages' metadata as the worker has them built."""
    from afd_plugin.compat.ascend_stages import AscendStageBuilders, StageCaches

    own = AscendStageBuilders(builders, plan, StageCaches(), pad=options.pop("pad", False))
    pair = own.build(0, metadata(step, **options))
    return pair.built


@dataclass(frozen=True)
class Piece:
    """What the tokens of a stage say; rows of ``requests`` in order."""

    mine: list[tuple[int, int]]
    requests: list[int]
    queries: list[int]
    firsts: list[int]
    ends: list[int]

    @property
    def decodes(self) -> int:
        """Leading requests of one token, which vLLM-Ascend's builders take for decodes."""
        return next((i for i, count in enumerate(self.queries) if count > 1), len(self.queries))


def piece_of(step: Step, begin: int, end: int) -> Piece:
    mine = step.tokens[begin:end]
    requests = sorted({request for request, _ in mine})
    places = [[p for request, p in mine if request == row] for row in requests]
    return Piece(
        mine,
        requests,
        [len(p) for p in places],
        [p[0] for p in places],
        [p[-1] + 1 for p in places],
    )


# A step, a cut, and the states of both stages, by hand.
BUILT: dict[str, tuple[Step, int, tuple[str, str]]] = {
    "fresh, cut inside": (FRESH, 110, ("PrefillNoCache", "ChunkedPrefill")),
    "fresh, cut at a boundary": (FRESH, 203, ("PrefillNoCache", "PrefillNoCache")),
    "prefix hit": (A1, 110, ("ChunkedPrefill", "ChunkedPrefill")),
    "prefix hit without chunked prefill": (
        dataclasses.replace(A1, state="PrefillCacheHit"),
        3,
        ("PrefillNoCache", "PrefillCacheHit"),
    ),
    "chunk": (A3, 4, ("ChunkedPrefill", "ChunkedPrefill")),
    "a decode in front": (MIXED, 6, ("ChunkedPrefill", "ChunkedPrefill")),
    "a decode alone": (MIXED, 1, ("DecodeOnly", "ChunkedPrefill")),
    "a single token starts stage 1": (MIXED, 9, ("ChunkedPrefill", "ChunkedPrefill")),
    "a single token ends stage 0": (MIXED, 11, ("ChunkedPrefill", "ChunkedPrefill")),
}


@pytest.mark.parametrize("name", BUILT)
def test_each_stages_metadata(builders: Sequence[Any], name: str) -> None:
    """What every layer is told of a stage, in both kinds of attention."""
    step, cut, states = BUILT[name]
    stages = build(builders, step, step.plan(cut))
    spans = [(0, cut), (cut, len(step.tokens))]
    for built, span, wanted in zip(stages, spans, states, strict=True):
        piece = piece_of(step, *span)
        assert built.attn_state is state(wanted)
        assert built.num_actual_tokens == len(piece.mine)
        assert built.slot_mapping.tolist() == [slot(*token) for token in piece.mine]
        assert (built.num_decodes, built.num_prefills) == (
            piece.decodes,
            len(piece.requests) - piece.decodes,
        )
        assert built.num_decode_tokens == piece.decodes
        assert built.query_start_loc.tolist() == [0, *np.cumsum(piece.queries).tolist()]
        check = _check_latent if _latent(built) else _check_heads
        check(built, piece)


def _latent(built: Any) -> bool:
    from vllm_ascend.attention.mla_v1 import AscendMLAMetadata

    return isinstance(built, AscendMLAMetadata)


def _check_heads(built: Any, piece: Piece) -> None:
    assert built.actual_seq_lengths_q == np.cumsum(piece.queries).tolist()
    assert built.seq_lens_list == built.seq_lens.tolist() == piece.ends
    assert built.block_tables.tolist() == [block_row(request) for request in piece.requests]
    assert built.max_query_len == max(piece.queries)


def _check_latent(built: Any, piece: Piece) -> None:
    decodes = piece.decodes
    if decodes == 0:
        assert built.decode is None
    else:
        assert built.decode.seq_lens_list == piece.ends[:decodes]
        assert built.decode.input_positions.tolist() == piece.firsts[:decodes]
        rows = [block_row(request) for request in piece.requests[:decodes]]
        assert built.decode.block_table.tolist() == rows
        _check_angles(built.decode, piece.firsts[:decodes])
    if decodes == len(piece.requests):
        assert built.prefill is None
        return
    prefill = built.prefill
    assert prefill.query_lens.tolist() == piece.queries[decodes:]
    assert prefill.max_seq_lens == max(piece.ends[decodes:])
    positions = [position for _, position in piece.mine[decodes:]]
    assert prefill.input_positions.tolist() == positions
    rows = [block_row(request) for request in piece.requests[decodes:]]
    assert prefill.block_table.tolist() == rows
    _check_angles(prefill, positions)
    context = piece.firsts[decodes:]
    if not any(context):
        assert prefill.chunked_context is None
        return
    # What is gathered from the KV cache before the stage's own tokens: all that is before them.
    assert prefill.chunked_context.chunk_seq_lens.sum(dim=0).tolist() == context
    assert sum(prefill.chunked_context.seq_tot) == sum(context)


def _check_angles(part: Any, positions: list[int]) -> None:
    assert part.cos.flatten(1)[:, 0].tolist() == positions
    assert part.sin.flatten(1)[:, 0].tolist() == [position + 0.5 for position in positions]


# --- two stages at the same time --------------------------------------------------------------

DECODES = Step((1, 1, 1, 6), (40, 50, 60, 0), (False, False, False, True))


@pytest.mark.parametrize("builders", ["deepseek-v3"], indirect=True, ids=["latent"])
def test_rotary_angles_of_two_stages_of_decodes_are_apart(builders: Sequence[Any]) -> None:
    """Both stages are built before either runs; vLLM-Ascend keeps the angles in one buffer."""
    first, second = build(builders, DECODES, DECODES.plan(2))
    assert first.decode.cos.flatten(1)[:, 0].tolist() == [40, 50]
    assert first.decode.sin.flatten(1)[:, 0].tolist() == [40.5, 50.5]
    assert second.decode.cos.flatten(1)[:, 0].tolist() == [60]
    stores = {
        tensor.untyped_storage().data_ptr()
        for stage in (first, second)
        for tensor in (stage.decode.cos, stage.decode.sin)
    }
    assert len(stores) == 4


@pytest.mark.parametrize("builders", ["deepseek-v3"], indirect=True, ids=["latent"])
def test_without_buffers_of_their_own_stage_0_reads_the_angles_of_stage_1(
    builders: Sequence[Any],
) -> None:
    """Why the buffers exist; when this fails, vLLM-Ascend has been mended and they may go."""
    from afd_plugin.compat.stages import StageBuilders

    first, _ = StageBuilders(builders, DECODES.plan(2)).build(0, metadata(DECODES)).built
    assert first.decode.cos.flatten(1)[:, 0].tolist() == [60, 50]


@pytest.mark.parametrize("builders", ["deepseek-v3"], indirect=True, ids=["latent"])
def test_the_steps_own_buffers_are_untouched_and_put_back(builders: Sequence[Any]) -> None:
    from vllm_ascend.ops import rotary_embedding

    own = rotary_embedding._cos_mla, rotary_embedding._sin_mla
    build(builders, DECODES, DECODES.plan(2))
    assert rotary_embedding._cos_mla is own[0]
    assert rotary_embedding._sin_mla is own[1]
    assert (own[0] == -1).all()
    builders[1].build = _fail
    with pytest.raises(KeyError, match="builder of stage 1"):
        build(builders, DECODES, DECODES.plan(2))
    assert rotary_embedding._cos_mla is own[0]


def _fail(*given: Any, **options: Any) -> None:
    raise KeyError("builder of stage 1")


# --- padding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("builders", ["qwen3-moe"], indirect=True, ids=["heads"])
def test_padding_of_a_stage_is_a_request_without_context(builders: Sequence[Any]) -> None:
    """105 tokens in multiples of 8, cut at 56: the kernel's offsets must end with the buffer.

    Stage 0 is full; stage 1 has 49 tokens in 56 rows, its requests and a last one of 7.
    """
    plan = PADDED.plan(56, alignment=8)
    first, second = build(builders, PADDED, plan, padding_row=True, pad=True)
    assert first.actual_seq_lengths_q == [13, 56]
    assert first.seq_lens_list == [13, 43]
    assert second.actual_seq_lengths_q == [49, 56]
    assert second.seq_lens_list == [92, 0]
    assert second.block_tables.tolist() == [block_row(1), [0] * 4]
    # Nothing is written for padding, and nothing but real tokens counts.
    assert (first.num_actual_tokens, second.num_actual_tokens) == (56, 49)
    assert len(second.slot_mapping) == 49
    assert second.slot_mapping.tolist() == [slot(1, p) for p in range(43, 92)]


@pytest.mark.parametrize("builders", ["qwen3-moe"], indirect=True, ids=["heads"])
def test_without_it_the_offsets_end_with_the_real_tokens(builders: Sequence[Any]) -> None:
    _, second = build(builders, PADDED, PADDED.plan(56, alignment=8), padding_row=True)
    assert second.actual_seq_lengths_q == [49]
    assert second.seq_lens_list == [92]


def test_a_full_stage_gets_no_padding_request() -> None:
    from afd_plugin.compat.ascend_stages import with_padding_request

    first, second = slice_metadata(metadata(PADDED), PADDED.plan(56, alignment=8))
    assert with_padding_request(first) is first
    before = values(second)
    padded = with_padding_request(second)
    assert values(second) == before
    assert padded.num_reqs == 2
    assert padded.query_start_loc.tolist() == padded.query_start_loc_cpu.tolist() == [0, 49, 56]
    assert padded.num_computed_tokens_cpu.tolist() == [43, 0]
    assert padded.is_prefilling.tolist() == [True, False]
