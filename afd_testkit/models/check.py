"""Reads a checkpoint before an engine does, so that what is wrong is said in one line.

Cheap checks first (folder, configuration, file sizes against headers), then one pass over
the tensors, one in memory at a time, for NaN and infinity.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afd_testkit.models.errors import (
    BrokenConfig,
    BrokenWeights,
    MissingCheckpoint,
    MissingShard,
    NonFiniteWeights,
    NoWeights,
)
from afd_testkit.strict_json import read_json

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
# The safetensors format caps its header at 100 MB; a larger length is a broken file.
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checked folder holds; ``config`` is ``config.json`` as it stands."""

    path: Path
    config: Mapping[str, Any]
    tensors: int
    bytes: int


def check_checkpoint(path: Path) -> CheckpointInfo:
    """Refuse a folder that an engine could not load, or would load into NaN.

    Raises the matching :class:`~afd_testkit.models.errors.CheckpointError`.
    """
    if not path.is_dir():
        state = "is a file, not a folder" if path.exists() else "does not exist"
        raise MissingCheckpoint(
            f"model folder {path} {state}; give a folder with config.json and *.safetensors"
        )
    config = _read_config(path)
    files = _weight_files(path)
    tensors = sum(_check_header(file) for file in files)
    _check_index(path)
    for file in files:
        _check_finite(file)
    total = sum(file.stat().st_size for file in files)
    return CheckpointInfo(path=path, config=config, tensors=tensors, bytes=total)


def _read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``; ``OSError`` or ``ValueError`` says why there is none."""
    content = read_json(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"it holds a JSON {type(content).__name__}, not an object")
    return content


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise BrokenConfig(f"{file} is missing; the folder is not a Hugging Face checkpoint")
    try:
        config = _read_json_object(file)
    except (OSError, ValueError) as error:
        raise BrokenConfig(f"{file} cannot be read: {error}; copy the checkpoint again") from error
    if not isinstance(config.get("architectures"), list) or not config["architectures"]:
        raise BrokenConfig(
            f"{file} has no list 'architectures'; an engine cannot tell which model it is"
        )
    return config


def _read_index(path: Path) -> dict[str, str] | None:
    """Tensor name to shard file, or ``None`` when the checkpoint has no index."""
    file = path / INDEX
    if not file.is_file():
        return None
    try:
        weight_map = _read_json_object(file)["weight_map"]
        return {str(name): str(shard) for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise BrokenWeights(
            f"{file} cannot be read ({type(error).__name__}: {error}); copy the checkpoint again"
        ) from error


def _weight_files(path: Path) -> list[Path]:
    weight_map = _read_index(path)
    if weight_map is None:
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise NoWeights(
                f"{path} holds no *.safetensors file; convert the checkpoint to safetensors"
            )
        return files
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (path / shard).is_file()]
    if missing:
        raise MissingShard(
            f"{path / INDEX} names {len(shards)} files, of which {len(missing)} are missing, "
            f"first {missing[0]}; copy the missing files into {path}"
        )
    return [path / shard for shard in shards]


def _header(file: Path) -> dict[str, Any]:
    """Tensor entries of a safetensors file, each with its byte range checked."""

    def broken(why: str) -> BrokenWeights:
        return BrokenWeights(f"{file} is broken: {why}; copy or make the file again")

    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise broken(f"it has {size} bytes, too few for a header length")
        length = int.from_bytes(prefix, "little")
        if length > _MAX_HEADER:
            raise broken(f"its header claims {length} bytes; it is not a safetensors file")
        if 8 + length > size:
            raise broken(f"its header claims {length} bytes, but the file has {size} in all")
        raw = stream.read(length)
    try:
        entries = json.loads(raw)
        tensors = {name: entry for name, entry in entries.items() if name != "__metadata__"}
        data_end = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise broken(f"its header is unreadable ({type(error).__name__}: {error})") from error
    if 8 + length + data_end != size:
        wanted = 8 + length + data_end
        raise broken(f"its header describes {wanted} bytes, but the file has {size}")
    return tensors


def _check_header(file: Path) -> int:
    """Number of tensors in ``file``."""
    return len(_header(file))


def _check_index(path: Path) -> None:
    """Every tensor that the index names is in the shard it names."""
    weight_map = _read_index(path)
    if weight_map is None:
        return
    held = {shard: _header(path / shard).keys() for shard in set(weight_map.values())}
    for name, shard in weight_map.items():
        if name not in held[shard]:
            raise MissingShard(
                f"{path / INDEX} places tensor {name} in {shard}, which does not hold it; "
                "copy the checkpoint again"
            )


def _check_finite(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as stored:
            for name in stored.keys():  # noqa: SIM118 - the handle is not iterable
                bad = _count_non_finite(stored.get_tensor(name))
                if bad:
                    raise NonFiniteWeights(
                        f"tensor {name} in {file} holds {bad} values that are NaN or infinite; "
                        "the checkpoint is damaged: copy or make it again"
                    )
    except SafetensorError as error:
        raise BrokenWeights(f"{file} is broken: {error}; copy or make the file again") from error


def _count_non_finite(tensor: torch.Tensor) -> int:
    import torch

    if not tensor.is_floating_point():
        return 0
    if tensor.element_size() == 1:  # 8-bit floats have no isfinite of their own
        tensor = tensor.to(torch.float32)
    return int((~torch.isfinite(tensor)).sum())
