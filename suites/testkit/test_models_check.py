"""``check_checkpoint``: each kind of broken folder is named before an engine could see it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from afd_testkit.engines.base import EngineError
from afd_testkit.models import (
    RECIPES,
    BrokenConfig,
    BrokenWeights,
    CheckpointError,
    MissingCheckpoint,
    MissingShard,
    NonFiniteWeights,
    NoWeights,
    check_checkpoint,
    ensure_model,
)

pytestmark = pytest.mark.cpu

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small sharded checkpoint: 24 float32 values and 4 integers."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["SomeModel"]}))
    save_file({"a": torch.arange(12.0), "ids": torch.arange(4)}, tmp_path / SHARDS[0])
    save_file({"b": torch.arange(12.0).reshape(3, 4)}, tmp_path / SHARDS[1])
    weight_map = {"a": SHARDS[0], "ids": SHARDS[0], "b": SHARDS[1]}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_good_folder(folder: Path) -> None:
    info = check_checkpoint(folder)
    assert info.tensors == 3
    assert info.config == {"architectures": ["SomeModel"]}
    assert info.bytes == sum((folder / shard).stat().st_size for shard in SHARDS)


def test_good_folder_without_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    assert check_checkpoint(folder).tensors == 3


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_built_in_models_are_good(tmp_path: Path, name: str) -> None:
    assert check_checkpoint(ensure_model(name, tmp_path)).tensors == len(RECIPES[name].tensors)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(MissingCheckpoint, match=r"absent does not exist; give a folder"):
        check_checkpoint(tmp_path / "absent")


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    with pytest.raises(MissingCheckpoint, match="is a file"):
        check_checkpoint(tmp_path / "model")


def _write(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content) and None


def _unlink(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def _cut(bytes_left: int) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        file = folder / SHARDS[1]
        content = file.read_bytes()
        file.write_bytes(content[:bytes_left])

    return cut


def _append(folder: Path) -> None:
    with (folder / SHARDS[1]).open("ab") as stream:
        stream.write(b"\0" * 4)


def _huge_header(folder: Path) -> None:
    (folder / SHARDS[1]).write_bytes((1 << 60).to_bytes(8, "little") + b"{}")


def _header_not_json(folder: Path) -> None:
    (folder / SHARDS[1]).write_bytes((4).to_bytes(8, "little") + b"oops")


def _drop_tensor(folder: Path) -> None:
    save_file({"other": torch.zeros(2)}, folder / SHARDS[1])


def _spoil(value: float, dtype: torch.dtype) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensor = torch.ones(3, 4, dtype=dtype)
        tensor[1, 2] = value
        tensor[2, 0] = value
        save_file({"b": tensor}, folder / SHARDS[1])

    return spoil


CASES: dict[str, tuple[Callable[[Path], None], type[CheckpointError], str]] = {
    "no config": (_unlink("config.json"), BrokenConfig, r"config\.json is missing"),
    "config not JSON": (_write("config.json", "{oops"), BrokenConfig, "cannot be read"),
    "config a list": (_write("config.json", "[1]"), BrokenConfig, "JSON list, not an object"),
    "no architecture": (_write("config.json", "{}"), BrokenConfig, "no list 'architectures'"),
    "no weights": (_unlink(INDEX, *SHARDS), NoWeights, r"no \*\.safetensors"),
    "missing shard": (_unlink(SHARDS[1]), MissingShard, f"first {SHARDS[1]}"),
    "tensor not in shard": (_drop_tensor, MissingShard, "places tensor b in"),
    "index not JSON": (_write(INDEX, "{"), BrokenWeights, "index.json cannot be read"),
    "index without map": (_write(INDEX, "{}"), BrokenWeights, "KeyError"),
    "empty file": (_cut(0), BrokenWeights, "it has 0 bytes, too few"),
    "cut in the header": (_cut(20), BrokenWeights, "the file has 20 in all"),
    "cut in the data": (_cut(-4), BrokenWeights, "header describes"),
    "bytes too many": (_append, BrokenWeights, "header describes"),
    "absurd header length": (_huge_header, BrokenWeights, "not a safetensors file"),
    "header not JSON": (_header_not_json, BrokenWeights, "header is unreadable"),
    "NaN": (_spoil(float("nan"), torch.float32), NonFiniteWeights, "tensor b in .* holds 2 val"),
    "infinity": (_spoil(float("-inf"), torch.bfloat16), NonFiniteWeights, "tensor b in"),
    "8-bit NaN": (_spoil(float("nan"), torch.float8_e4m3fn), NonFiniteWeights, "tensor b in"),
}


@pytest.mark.parametrize("case", CASES)
def test_broken_folder(folder: Path, case: str) -> None:
    spoil, error, text = CASES[case]
    spoil(folder)
    with pytest.raises(error, match=text) as caught:
        check_checkpoint(folder)
    assert isinstance(caught.value, EngineError)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("cut", range(0, 120, 6))
def test_truncation_anywhere_is_noticed(folder: Path, cut: int) -> None:
    file = folder / SHARDS[1]
    content = file.read_bytes()
    assert cut < len(content)
    file.write_bytes(content[:cut])
    with pytest.raises(BrokenWeights, match=SHARDS[1]):
        check_checkpoint(folder)
