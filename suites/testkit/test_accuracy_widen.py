"""Checkpoints that cannot be widened, and that refusing one writes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from afd_testkit.accuracy.widen import CannotWiden, widen
from afd_testkit.models.errors import CheckpointError

pytestmark = pytest.mark.cpu

LATENT, ROTARY = 4, 64
WEIGHTS = {
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.ones(LATENT + ROTARY, 3),
    "model.layers.0.self_attn.kv_a_layernorm.weight": torch.ones(LATENT),
    "model.layers.0.self_attn.kv_b_proj.weight": torch.ones(6, LATENT),
    "model.layers.0.self_attn.o_proj.weight": torch.ones(3, 6),
}
Maker = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path) -> Maker:
    def make(weights: dict[str, torch.Tensor] = WEIGHTS, **changes: object) -> Path:
        folder = tmp_path / "source"
        folder.mkdir()
        config = {"architectures": ["X"], "kv_lora_rank": LATENT, "qk_rope_head_dim": ROTARY}
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        save_file(weights, folder / "model.safetensors")
        return folder

    return make


def test_the_latent_is_filled_with_zeros_and_the_rest_stays(made: Maker, tmp_path: Path) -> None:
    out = widen(made(), tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert (config["kv_lora_rank"], config["dtype"]) == (512, "float32")
    found = load_file(out / "model.safetensors")
    down, norm, up, other = (found[name] for name in WEIGHTS)
    scale = (512 / LATENT) ** 0.5
    assert down.shape == (512 + ROTARY, 3)
    assert torch.equal(down[:LATENT], torch.full((LATENT, 3), scale))
    assert not down[LATENT:512].any()
    assert torch.equal(down[512:], torch.ones(ROTARY, 3))
    assert torch.allclose(norm[:LATENT], torch.full((LATENT,), 1 / scale))
    assert not norm[LATENT:].any()
    assert up.shape == (6, 512)
    assert torch.equal(up[:, :LATENT], torch.ones(6, LATENT))
    assert not up[:, LATENT:].any()
    assert torch.equal(other, torch.ones(3, 6))


@pytest.mark.parametrize("latent", [0, -5, True, None, "4", 4.0, 513])
def test_a_latent_that_is_no_size_is_refused(made: Maker, tmp_path: Path, latent: object) -> None:
    with pytest.raises(CannotWiden, match="kv_lora_rank"):
        widen(made(kv_lora_rank=latent), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_rotary_values_are_refused(made: Maker, tmp_path: Path) -> None:
    with pytest.raises(CannotWiden, match="qk_rope_head_dim 32"):
        widen(made(qk_rope_head_dim=32), tmp_path / "out")


@pytest.mark.parametrize("latent", [2, 8])
def test_a_configuration_that_contradicts_the_weights_is_refused(
    made: Maker, tmp_path: Path, latent: int
) -> None:
    with pytest.raises(CannotWiden, match="as the configuration says"):
        widen(made(kv_lora_rank=latent), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_without_a_latent_are_refused(made: Maker, tmp_path: Path) -> None:
    plain = {"model.layers.0.self_attn.q_proj.weight": torch.ones(3, 3)}
    with pytest.raises(CannotWiden, match="no weight of a latent attention"):
        widen(made(plain), tmp_path / "out")


def test_a_folder_that_is_there_is_not_overwritten(made: Maker) -> None:
    source = made()
    before = (source / "config.json").read_text()
    with pytest.raises(CannotWiden, match="is there already"):
        widen(source, source)
    assert (source / "config.json").read_text() == before


def test_weights_in_another_file_are_refused(made: Maker, tmp_path: Path) -> None:
    source = made()
    (source / "model.safetensors").rename(source / "other.safetensors")
    with pytest.raises(CannotWiden, match=r"in other\.safetensors; put them into one"):
        widen(source, tmp_path / "out")


@pytest.mark.parametrize("name", ["extra.safetensors", "model.safetensors.index.json"])
def test_weights_in_more_files_are_refused(made: Maker, tmp_path: Path, name: str) -> None:
    source = made()
    if name.endswith("json"):
        names = dict.fromkeys(WEIGHTS, "model.safetensors")
        (source / name).write_text(json.dumps({"weight_map": names}))
    else:
        save_file(WEIGHTS, source / name)
    with pytest.raises(CannotWiden, match="put them into one"):
        widen(source, tmp_path / "out")


LAST = "model.layers.0.self_attn.kv_b_proj.weight"
NORM = "model.layers.0.self_attn.kv_a_layernorm.weight"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({LAST: None}, "kv_b_proj.weight is missing"),
        ({LAST: torch.ones(6, LATENT, dtype=torch.int8)}, "before quantization"),
        ({LAST: torch.ones(LATENT)}, "were to be along axis 1 of 2"),
        ({NORM: torch.tensor(1.0)}, "were to be along axis 0 of 1"),
        ({f"{LAST}_scale": torch.ones(1)}, "in a way that is not known here"),
        ({LAST.replace("layers.0", "layers.1"): torch.ones(6, LATENT)}, "is missing"),
    ],
)
def test_weights_that_are_not_known_are_refused(
    made: Maker, tmp_path: Path, changed: dict[str, torch.Tensor | None], words: str
) -> None:
    given = {name: value for name, value in {**WEIGHTS, **changed}.items() if value is not None}
    with pytest.raises(CannotWiden, match=words):
        widen(made(given), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_inside_of_the_source_is_refused(made: Maker) -> None:
    source = made()
    with pytest.raises(CannotWiden, match="inside of"):
        widen(source, source / "wide")


def test_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        widen(tmp_path / "none", tmp_path / "out")
