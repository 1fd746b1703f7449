"""What can be wrong with a checkpoint.  Every message names the file and the remedy.

EngineError
└── CheckpointError
    ├── UnknownRecipe         a name that is neither a recipe nor a folder
    ├── MissingCheckpoint     no such folder
    ├── BrokenConfig          config.json absent, unreadable, or not a model's
    ├── NoWeights             no safetensors file in the folder
    ├── MissingShard          the index names a file or tensor that is not there
    ├── BrokenWeights         a safetensors file is truncated or its header is wrong
    ├── NonFiniteWeights      NaN or infinity in a tensor
    └── CacheFolderError      the cache folder cannot be written
"""

from __future__ import annotations

from afd_testkit.engines.base import EngineError


class CheckpointError(EngineError):
    """A checkpoint cannot be used as it is."""


class UnknownRecipe(CheckpointError):
    """The model is neither a built-in recipe nor an existing folder."""


class MissingCheckpoint(CheckpointError):
    """The checkpoint folder does not exist."""


class BrokenConfig(CheckpointError):
    """``config.json`` is absent or does not describe a model."""


class NoWeights(CheckpointError):
    """The folder holds no safetensors file."""


class MissingShard(CheckpointError):
    """The weight index promises a file or a tensor that is not there."""


class BrokenWeights(CheckpointError):
    """A safetensors file does not hold what its header says."""


class NonFiniteWeights(CheckpointError):
    """A tensor holds NaN or infinity."""


class CacheFolderError(CheckpointError):
    """A built-in model cannot be written to the cache folder."""
