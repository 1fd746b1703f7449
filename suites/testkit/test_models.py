"""Built-in models: the same bytes everywhere, complete or not at all, remade when damaged."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from afd_testkit.models import (
    RECIPES,
    CacheFolderError,
    UnknownRecipe,
    ensure_model,
    find_damage,
    paragraphs,
    recipe,
    remove_model,
)
from afd_testkit.models.maker import WEIGHTS
from afd_testkit.models.recipes import TensorSpec
from afd_testkit.models.tokens import BYTE_OFFSET, SPECIALS, byte_tokens, tokenizer_files
from afd_testkit.models.weights import make_tensor

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every built-in model, made once."""
    cache = tmp_path_factory.mktemp("models")
    return {name: ensure_model(name, cache) for name in RECIPES}


def test_making_twice_gives_the_same_bytes(made: dict[str, Path], tmp_path: Path) -> None:
    for name, first in made.items():
        second = ensure_model(name, tmp_path)
        assert second.name == first.name
        files = sorted(path.name for path in first.iterdir())
        assert sorted(path.name for path in second.iterdir()) == files
        for file in files:
            assert (first / file).read_bytes() == (second / file).read_bytes(), f"{name}/{file}"


def test_weights_follow_their_definition() -> None:
    """Odd multiples of 2^-16 drawn by the Mersenne Twister, scaled and shifted in float32."""
    spec = TensorSpec("some.weight", (5, 3), std=0.5, center=1.0)
    seed = int.from_bytes(hashlib.sha256(b"42/some.weight").digest()[:7], "big")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 65536, (5, 3), generator=generator).numpy()
    unit = ((2 * drawn - 65535) / 65536).astype(np.float32)
    expected = unit * np.float32(0.5 * 3**0.5) + np.float32(1.0)
    np.testing.assert_array_equal(make_tensor(spec, 42, "float32").numpy(), expected)


def test_weights_have_the_scale_that_the_recipe_says() -> None:
    tensor = make_tensor(TensorSpec("w", (400, 250), std=0.3, center=-2.0), 7, "float32").double()
    # 100,000 draws: the mean is good to 0.3 / sqrt(1e5), the deviation to better than 1 %.
    assert float(tensor.mean()) == pytest.approx(-2.0, abs=0.005)
    assert float(tensor.std()) == pytest.approx(0.3, rel=0.01)


def test_content_is_pinned(made: dict[str, Path]) -> None:
    """Another machine or library must give these very weights: results are compared across
    machines.  A new recipe version brings a new number here."""
    pinned = {
        "deepseek-v3": "24560417040ed1be",
        "deepseek-v3-mla": "cdee60c2803243ad",
        "qwen3-moe": "df7a69af134622d4",
    }
    digests = {}
    for name, folder in made.items():
        digest = hashlib.sha256()
        for tensor_name, tensor in sorted(load_file(folder / WEIGHTS).items()):
            digest.update(tensor_name.encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        digests[name] = digest.hexdigest()[:16]
    assert digests == pinned


def test_folder_name_follows_content() -> None:
    names = {made.folder for made in RECIPES.values()}
    assert len(names) == len(RECIPES)
    for made in RECIPES.values():
        assert made.folder == f"{made.name}-v{made.version}-{made.digest[:12]}"


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3-mla"])
def test_deepseek_has_every_part_of_the_architecture(made: dict[str, Path], name: str) -> None:
    config = json.loads((made[name] / "config.json").read_text())
    weights = load_file(made[name] / WEIGHTS)
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["rope_scaling"]["type"] == "yarn"
    assert config["scoring_func"] == "sigmoid"
    assert config["topk_method"] == "noaux_tc"
    layers, experts = config["num_hidden_layers"], config["n_routed_experts"]
    sparse = [i for i in range(layers) if f"model.layers.{i}.mlp.gate.weight" in weights]
    assert sparse == list(range(1, layers))
    assert len(sparse) >= 2
    for layer in sparse:
        prefix = f"model.layers.{layer}.mlp"
        assert weights[f"{prefix}.gate.e_score_correction_bias"].shape == (experts,)
        assert f"{prefix}.shared_experts.down_proj.weight" in weights
        assert f"{prefix}.experts.{experts - 1}.up_proj.weight" in weights
    attention = "model.layers.0.self_attn"
    rope, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    down = weights[f"{attention}.kv_a_proj_with_mqa.weight"]
    assert down.shape == (rank + rope, config["hidden_size"])
    assert weights[f"{attention}.q_a_layernorm.weight"].shape == (config["q_lora_rank"],)


def test_mla_model_has_the_sizes_of_the_kernels(made: dict[str, Path]) -> None:
    config = json.loads((made["deepseek-v3-mla"] / "config.json").read_text())
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (512, 64)
    weights = load_file(made["deepseek-v3-mla"] / WEIGHTS)
    kinds = {
        tensor.dtype for name, tensor in weights.items() if "e_score_correction_bias" not in name
    }
    assert kinds == {torch.bfloat16}


def test_qwen3_moe_is_sparse_in_every_layer(made: dict[str, Path]) -> None:
    config = json.loads((made["qwen3-moe"] / "config.json").read_text())
    weights = load_file(made["qwen3-moe"] / WEIGHTS)
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    for layer in range(config["num_hidden_layers"]):
        gate = weights[f"model.layers.{layer}.mlp.gate.weight"]
        assert gate.shape == (config["num_experts"], config["hidden_size"])


def test_intact_model_is_kept(tmp_path: Path) -> None:
    said: list[str] = []
    folder = ensure_model("qwen3-moe", tmp_path, said.append)
    before = (folder / WEIGHTS).stat().st_mtime_ns
    assert ensure_model("qwen3-moe", tmp_path, said.append) == folder
    assert (folder / WEIGHTS).stat().st_mtime_ns == before
    assert [text.partition(" ")[0] for text in said] == ["making"]


def _truncate(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


def _flip(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (folder / WEIGHTS).write_bytes(content)


def _lose_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _break_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_truncate, "bytes instead of"),
        (_flip, "another content"),
        (_lose_tokenizer, "tokenizer.json is missing"),
        (_break_manifest, "manifest.json is unreadable"),
    ],
)
def test_damaged_model_is_remade_and_said(tmp_path: Path, damage, reason: str) -> None:
    folder = ensure_model("qwen3-moe", tmp_path)
    good = (folder / WEIGHTS).read_bytes()
    damage(folder)
    assert reason in (find_damage(folder) or "")
    said: list[str] = []
    assert ensure_model("qwen3-moe", tmp_path, said.append) == folder
    assert find_damage(folder) is None
    assert (folder / WEIGHTS).read_bytes() == good
    assert len(said) == 1
    assert "damaged" in said[0]
    assert reason in said[0]
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_makers_at_the_same_time_agree(tmp_path: Path) -> None:
    folders: list[Path] = []
    gate = threading.Barrier(4)

    def make() -> None:
        gate.wait()
        folders.append(ensure_model("qwen3-moe", tmp_path))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 4
    assert len(set(folders)) == 1
    assert find_damage(folders[0]) is None
    assert [path.name for path in tmp_path.iterdir()] == [folders[0].name]


def test_removed_model_is_made_again(tmp_path: Path) -> None:
    folder = ensure_model("qwen3-moe", tmp_path)
    remove_model("qwen3-moe", tmp_path)
    assert not folder.exists()
    remove_model("qwen3-moe", tmp_path)
    assert ensure_model("qwen3-moe", tmp_path) == folder


def test_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownRecipe, match=r"deepseek-v3.*qwen3-moe"):
        ensure_model("gpt-5", tmp_path)


def test_cache_folder_that_is_a_file(tmp_path: Path) -> None:
    blocked = tmp_path / "cache"
    blocked.write_text("")
    with pytest.raises(CacheFolderError, match="cannot write model qwen3-moe"):
        ensure_model("qwen3-moe", blocked)


def test_byte_tokens_are_bytes() -> None:
    assert byte_tokens("A\n") == (BYTE_OFFSET + 65, BYTE_OFFSET + 10)
    assert byte_tokens("é") == (BYTE_OFFSET + 0xC3, BYTE_OFFSET + 0xA9)
    assert byte_tokens("") == ()


def test_tokenizer_vocabulary_is_complete() -> None:
    vocabulary = tokenizer_files()["tokenizer.json"]["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(len(SPECIALS) + 256))
    # Fixed points of the byte-level alphabet: letters are themselves, a space is U+0120.
    assert vocabulary["A"] == BYTE_OFFSET + 65
    assert vocabulary["\u0120"] == BYTE_OFFSET + 32
    assert max(vocabulary.values()) < recipe("deepseek-v3").config["vocab_size"]


def test_paragraphs_are_enough_for_the_longest_prompt() -> None:
    texts = paragraphs()
    assert len(texts) >= 20
    assert len(set(texts)) == len(texts)
    assert sum(len(byte_tokens(text)) for text in texts) >= 8192
