"""Small models with the real architectures, made from fixed seeds, and checks of any checkpoint."""

from afd_testkit.models.check import CheckpointInfo, check_checkpoint
from afd_testkit.models.errors import (
    BrokenConfig,
    BrokenWeights,
    CacheFolderError,
    CheckpointError,
    MissingCheckpoint,
    MissingShard,
    NonFiniteWeights,
    NoWeights,
    UnknownRecipe,
)
from afd_testkit.models.maker import ensure_model, find_damage, remove_model
from afd_testkit.models.recipes import RECIPES, Recipe, recipe
from afd_testkit.models.texts import paragraphs
from afd_testkit.models.tokens import BYTE_OFFSET, byte_tokens

__all__ = [
    "BYTE_OFFSET",
    "RECIPES",
    "BrokenConfig",
    "BrokenWeights",
    "CacheFolderError",
    "CheckpointError",
    "CheckpointInfo",
    "MissingCheckpoint",
    "MissingShard",
    "NoWeights",
    "NonFiniteWeights",
    "Recipe",
    "UnknownRecipe",
    "byte_tokens",
    "check_checkpoint",
    "ensure_model",
    "find_damage",
    "paragraphs",
    "recipe",
    "remove_model",
]
