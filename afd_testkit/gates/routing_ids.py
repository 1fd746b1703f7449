"""What expert ids must be, from the definitions alone: the oracle of the gate ``routing``.

T = tokens, K = experts a token, E = experts, H = hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from afd_testkit.engines.base import IdArray, RunResult

_EXPERTS = ("num_experts", "n_routed_experts")  # Qwen3-MoE's name, DeepSeek's name


def chosen_ids(run: RunResult) -> tuple[IdArray, ...]:
    """[T, K] of each execution of the routing operator in a watched run, in order."""
    return tuple(ids for step in run.steps for ids in step.expert_ids)


def why_uneven(ids: IdArray, num_experts: int) -> str:
    """Why [T, K] ``ids`` are not spread evenly over ``num_experts``; empty if they are.

    Every id is an expert, a token's experts differ, and any two experts get the same number of
    assignments or one more.
    """
    if ids.size == 0:
        return "no ids"
    if ids.min() < 0 or ids.max() >= num_experts:
        return f"ids from {ids.min()} to {ids.max()}, but experts are 0 to {num_experts - 1}"
    counts = np.bincount(ids.ravel(), minlength=num_experts)
    if counts.max() - counts.min() > 1:
        return f"assignments by expert are {counts.tolist()}, which differ by more than one"
    ordered = np.sort(ids, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return "a token has the same expert twice"
    return ""


def experts_of(model: str) -> int:
    """Routed experts of a layer of ``model`` (recipe or checkpoint folder); 0 if it has none."""
    from afd_testkit.models import RECIPES

    if model in RECIPES:
        config = dict(RECIPES[model].config)
    else:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    return next((int(config[name]) for name in _EXPERTS if name in config), 0)


@dataclass(frozen=True)
class GatedInputs:
    """A gate and inputs whose logits are exact in bfloat16, and differ within each token.

    ``gate``: [H, E]; ``inputs``: [T, H] each, with small whole numbers.  The first favours
    experts 0 and 1, the second the last two.  Sums of such numbers are exact in any order, and
    have at most eight significant bits, so that no dtype, device or compiler may find other
    experts.
    """

    gate: NDArray[np.float64]
    inputs: tuple[NDArray[np.float64], ...]
    top_k: int

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.gate.shape[1])

    def natural(self, index: int) -> IdArray:
        """[T, K] experts of the largest logits, the largest first."""
        logits = self.inputs[index] @ self.gate
        return np.argsort(-logits, axis=1)[:, : self.top_k].astype(np.int64)


def gated_inputs(tokens: Sequence[int] = (48, 33), hidden: int = 8) -> GatedInputs:
    """Eight experts, two a token; row 0 of the gate favours, the last one keeps logits apart."""
    random = np.random.default_rng(11)
    experts = 8
    gate = random.integers(-1, 2, (hidden, experts)).astype(np.float64)
    gate[0] = [6, 6, 0, 0, 0, 0, -6, -6]
    gate[-1] = np.arange(experts) / 8
    inputs = []
    for count, favour in zip(tokens, (1, -1), strict=True):
        rows = random.integers(-1, 2, (count, hidden)).astype(np.float64)
        rows[:, 0], rows[:, -1] = favour, 1
        inputs.append(rows)
    return GatedInputs(gate, tuple(inputs), top_k=2)
