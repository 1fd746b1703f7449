"""Faults for the sensitivity of accuracy: what each changes, where, and that nothing stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from afd_plugin import context, merge, metadata, stage_inputs
from afd_testkit.accuracy.faults import SENSITIVITY, UnknownFault, fault
from afd_testkit.faults import CONTROL

pytestmark = pytest.mark.cpu

TOKENS, HIDDEN, EXPERTS = 6, 5, 4
IDS = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [1, 3]])
OWN = [name for name in SENSITIVITY if SENSITIVITY[name].gates == ()]


class Layer(nn.Module):
    """A decoder layer that keeps the positions it was given."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.mlp = nn.utils.skip_init(nn.Linear, HIDDEN, HIDDEN, bias=False)
        self.mlp.weight.data = torch.randn(HIDDEN, HIDDEN, generator=draw)
        self.seen: list[Tensor] = []

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> Tensor:
        self.seen.append(positions)
        return hidden_states + self.mlp(hidden_states)


class Router:
    """As an engine's: a method of the class gives weights and ids."""

    def select_experts(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full(IDS.shape, 0.5), IDS.clone()


class Target:
    """Two layers and two routers of an engine."""

    def __init__(self) -> None:
        self.layers = [Layer(1), Layer(2)]
        self.routers = [Router(), Router()]

    def decoder_layers(self) -> Sequence[Any]:
        return self.layers

    def moe_routers(self) -> Sequence[Any]:
        return self.routers

    def state(self) -> list[Any]:
        """All that a fault may have changed."""
        modules = [module for layer in self.layers for module in layer.modules()]
        hooks = [dict(hook) for m in modules for hook in (m._forward_hooks, m._forward_pre_hooks)]
        functions = (
            metadata.slice_metadata,
            stage_inputs.slice_stage_inputs,
            merge.merge_stage_outputs,
        )
        return [*hooks, *(dict(vars(router)) for router in self.routers), *functions]


def run(target: Target, stage: int | None, *, named: bool = False) -> dict[str, Any]:
    """What layers see and give, and what routers choose, in this stage."""
    positions, hidden = torch.arange(TOKENS), torch.arange(TOKENS * HIDDEN).view(TOKENS, HIDDEN)
    for layer in target.layers:
        layer.seen.clear()
    arguments: dict[str, Any] = {
        "positions": positions,
        "hidden_states": hidden.float() + 1,
        "residual": None,
    }
    scope = nullcontext() if stage is None else context.stage_scope(stage)
    with torch.no_grad(), scope:
        outputs = [
            layer(**arguments) if named else layer(*arguments.values()) for layer in target.layers
        ]
        ids = [router.select_experts(hidden)[1] for router in target.routers]
    return {"positions": [s for layer in target.layers for s in layer.seen], "ids": ids} | {
        "outputs": outputs
    }


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(
        torch.equal(a, b) for key in first for a, b in zip(first[key], second[key], strict=True)
    )


def experts(target: Target) -> Tensor:
    """What the last layer's experts give without a fault."""
    hidden = torch.arange(TOKENS * HIDDEN).view(TOKENS, HIDDEN).float() + 1
    with torch.no_grad():
        return target.layers[-1].mlp(hidden)


def test_there_are_eight_faults_of_different_kind_and_each_says_what_it_is() -> None:
    assert len(SENSITIVITY) >= 8
    assert len({one.what for one in SENSITIVITY.values()}) == len(SENSITIVITY)
    assert {"positions-off-by-one", "last-experts-dropped", "noise-10-percent"} <= set(SENSITIVITY)


@pytest.mark.parametrize("name", SENSITIVITY)
def test_nothing_of_a_fault_stays(name: str) -> None:
    target = Target()
    before = target.state()
    with SENSITIVITY[name].inject(target):
        assert target.state() != before
    assert target.state() == before


@pytest.mark.parametrize("name", SENSITIVITY)
def test_nothing_of_a_fault_stays_after_an_error(name: str) -> None:
    target = Target()
    before = target.state()
    with pytest.raises(ZeroDivisionError), SENSITIVITY[name].inject(target):
        raise ZeroDivisionError
    assert target.state() == before


@pytest.mark.parametrize("name", SENSITIVITY)
def test_a_step_that_is_not_split_is_not_touched(name: str) -> None:
    target = Target()
    expected = run(target, None)
    with SENSITIVITY[name].inject(target):
        assert same(run(target, None), expected)


@pytest.mark.parametrize("name", OWN)
def test_a_split_step_is(name: str) -> None:
    target = Target()
    expected = [run(target, stage) for stage in (0, 1)]
    with SENSITIVITY[name].inject(target):
        got = [run(target, stage) for stage in (0, 1)]
    assert not all(map(same, got, expected))


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    ("name", "by"), [("positions-off-by-one", 1), ("positions-off-by-four", 4)]
)
def test_positions_of_stage_1_are_moved_in_every_layer(name: str, by: int, named: bool) -> None:
    target = Target()
    with SENSITIVITY[name].inject(target):
        first, second = run(target, 0, named=named), run(target, 1, named=named)
    assert all(torch.equal(seen, torch.arange(TOKENS)) for seen in first["positions"])
    assert all(torch.equal(seen, torch.arange(TOKENS) + by) for seen in second["positions"])
    assert len(second["positions"]) == 2


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "last-experts-dropped": lambda given: given * 0,
    "expert-rows-off-by-one": lambda given: given[[5, 0, 1, 2, 3, 4]],
    "experts-in-bfloat16": lambda given: given.bfloat16().float(),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("stage", [0, 1])
def test_the_last_layer_s_experts_give_something_else(name: str, stage: int) -> None:
    target = Target()
    fine = run(target, stage)["outputs"]
    with SENSITIVITY[name].inject(target):
        got = run(target, stage)["outputs"]
    assert torch.equal(got[0], fine[0])
    given = experts(target)
    torch.testing.assert_close(got[1], fine[1] - given + CHANGES[name](given))


def test_noise_is_a_tenth_of_what_experts_give_and_the_same_every_time() -> None:
    target = Target()
    wide = torch.ones(400, HIDDEN)
    with SENSITIVITY["noise-10-percent"].inject(target), torch.no_grad(), context.stage_scope(0):
        noisy, again = target.layers[-1].mlp(wide), target.layers[-1].mlp(wide)
    with torch.no_grad():
        relative = noisy / target.layers[-1].mlp(wide) - 1
    assert torch.equal(noisy, again)
    # 2000 draws: their deviation is within 5 % of 0.1, their mean within 0.01 of 0.
    assert float(relative.std()) == pytest.approx(0.1, rel=0.1)
    assert abs(float(relative.mean())) < 0.01


def test_stage_1_goes_to_the_neighbours_of_its_experts_in_the_first_sparse_layer() -> None:
    target = Target()
    with SENSITIVITY["next-expert"].inject(target):
        first, second = run(target, 0)["ids"], run(target, 1)["ids"]
    assert torch.equal(first[0], IDS)
    assert torch.equal(second[0], (IDS + 1) % EXPERTS)
    assert torch.equal(second[1], IDS)


def test_faults_are_found_by_name_and_so_is_the_injection_of_nothing() -> None:
    target = Target()
    for name in SENSITIVITY:
        assert fault(name).name == name
    expected = run(target, 1)
    with fault(CONTROL).inject(target):
        assert same(run(target, 1), expected)


def test_an_unknown_fault_lists_the_known() -> None:
    with pytest.raises(UnknownFault, match="'no-such-fault'; known: ") as found:
        fault("no-such-fault")
    for name in (*SENSITIVITY, CONTROL):
        assert name in str(found.value)
