"""What the gate ``routing`` needs of a compiled vLLM engine, and that the engine leaves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from afd_testkit.engines.base import EngineConfig, EngineError, Prompt, RoutingSetting, SplitSetting
from afd_testkit.engines.vllm_cpu import VllmCpuEngine
from afd_testkit.gates.routing_ids import why_uneven
from afd_testkit.settings import Settings

pytestmark = pytest.mark.vllm

CONFIG = EngineConfig(
    model="qwen3-moe", worker="afd", compiled=True, afd=(("async_moe_ubatching", False),)
)
# Of the recipe: every layer is sparse, eight experts, two a token.
LAYERS, EXPERTS, TOP_K = 3, 8, 2
PROMPTS = (Prompt("a", tuple(range(3, 40))), Prompt("b", (7, 9, 11, 13, 15)))
ROWS = 37 + 5


@pytest.fixture(scope="module")
def compiled(
    afd_settings: Settings, afd_progress: Callable[[str], None]
) -> Iterator[VllmCpuEngine]:
    engine = VllmCpuEngine(CONFIG, Path(afd_settings.cache), afd_progress)
    scratch = Path(engine._processes[0]._start.scratch)
    yield engine
    engine.close()
    assert not scratch.exists(), "compiled code was left behind"


def test_it_is_compiled_once_while_profiled_and_follows_the_flag(compiled: VllmCpuEngine) -> None:
    profiled = compiled.run(PROMPTS, routing=RoutingSetting(profiling=True, watch=True))
    served = compiled.run(PROMPTS, routing=RoutingSetting(watch=True))
    again = compiled.run(PROMPTS, routing=RoutingSetting(profiling=True, watch=True))
    for result, balanced in ((profiled, LAYERS), (served, 0), (again, LAYERS)):
        [step] = result.steps
        assert step.evidence is not None
        assert [ids.shape for ids in step.expert_ids] == [(ROWS, TOP_K)] * LAYERS
        assert step.evidence["balanced_routing"] == balanced
        assert step.evidence["natural_routing"] == LAYERS - balanced
        assert [why_uneven(ids, EXPERTS) == "" for ids in step.expert_ids] == [
            bool(balanced)
        ] * LAYERS
        [graph] = result.facts["compiled_calls"]
        assert graph["vllm.afd_balance_routing_ids_.default"] == LAYERS
        assert graph["topk"] == LAYERS
        assert result.facts["start_balanced_routing"] == LAYERS
        assert result.facts["start_natural_routing"] == 0
    assert np.array_equal(profiled.requests[0].logprobs, again.requests[0].logprobs)
    assert not np.array_equal(profiled.requests[0].logprobs, served.requests[0].logprobs)


def test_ids_are_kept_only_where_they_are_asked_for(compiled: VllmCpuEngine) -> None:
    assert compiled.run(PROMPTS).steps[0].expert_ids == ()


def test_it_does_not_split(compiled: VllmCpuEngine) -> None:
    with pytest.raises(EngineError, match="started with the split off"):
        compiled.run(PROMPTS, split=SplitSetting("token"))


@pytest.mark.parametrize(
    ("fault", "said"),
    [("no-such", "unknown fault 'no-such'"), ("merge-swapped", "is one of single runs")],
)
def test_a_fault_that_cannot_be_there_from_the_start(
    afd_settings: Settings, fault: str, said: str
) -> None:
    config = replace(CONFIG, compiled=False, start_fault=fault)
    with pytest.raises(EngineError, match=said):
        VllmCpuEngine(config, Path(afd_settings.cache))


def test_what_is_compiled_lies_where_it_goes_with_the_engine(
    compiled: VllmCpuEngine, afd_settings: Settings
) -> None:
    scratch = Path(compiled._processes[0]._start.scratch)
    assert any((scratch / "vllm" / "torch_compile_cache").rglob("model"))
    assert not (Path(afd_settings.cache) / "vllm" / "torch_compile_cache").exists()


def test_a_branch_in_python_is_compiled_in_for_good(
    afd_settings: Settings, afd_progress: Callable[[str], None]
) -> None:
    """The trap itself, on vLLM's own way of compiling: without the operator nothing is natural."""
    config = replace(CONFIG, start_fault="profile-branch-in-python")
    engine = VllmCpuEngine(config, Path(afd_settings.cache), afd_progress)
    try:
        profiled = engine.run(PROMPTS, routing=RoutingSetting(profiling=True))
        served = engine.run(PROMPTS)
    finally:
        engine.close()
    [graph] = served.facts["compiled_calls"]
    assert "vllm.afd_balance_routing_ids_.default" not in graph
    for one, other in zip(profiled.requests, served.requests, strict=True):
        assert np.array_equal(one.logprobs, other.logprobs)
