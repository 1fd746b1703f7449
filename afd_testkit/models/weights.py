"""Tensors of a recipe, the same bytes on every machine.

``torch.randn`` differs between instruction sets in the last bit; ``torch.randint`` draws
from the Mersenne Twister alone, so weights are integers of 16 bits times an exact
power-of-two step, then one rounded multiplication and one rounded addition.
"""

from __future__ import annotations

import hashlib
from math import sqrt
from typing import TYPE_CHECKING

from afd_testkit.models.recipes import Recipe, TensorSpec

if TYPE_CHECKING:
    import torch

_LEVELS = 1 << 16


def make_tensor(spec: TensorSpec, seed: int, dtype: str) -> torch.Tensor:
    """The tensor of ``spec``; its own generator, so the order of making is irrelevant."""
    import torch

    name_hash = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(name_hash[:7], "big"))
    drawn = torch.randint(0, _LEVELS, spec.shape, generator=generator, dtype=torch.int64)
    # Odd numbers around zero, so that the values are symmetric: (-1, 1) in steps of 2^-15.
    unit = (2 * drawn - (_LEVELS - 1)).to(torch.float32) / _LEVELS
    # A uniform variable on (-1, 1) has standard deviation 1 / sqrt(3).
    values = unit * torch.tensor(spec.std * sqrt(3.0), dtype=torch.float32)
    values = values + torch.tensor(spec.center, dtype=torch.float32)
    return values.to({"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype])


def make_tensors(recipe: Recipe) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint by name.

    The routing bias stays in float32 in every checkpoint, as in the original's.
    """
    return {
        spec.name: make_tensor(
            spec,
            recipe.seed,
            "float32" if spec.name.endswith("e_score_correction_bias") else recipe.dtype,
        )
        for spec in recipe.tensors
    }
