"""Training of the small model, on a tiny recipe: it learns, balances, and is saved as it is."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from afd_testkit.accuracy import training
from afd_testkit.accuracy.corpus import EOS, SEPARATOR, batches, make_tokenizer
from afd_testkit.accuracy.problems import as_text, problems
from afd_testkit.accuracy.recipe import Phase, Recipe
from afd_testkit.accuracy.training import (
    LoadBalance,
    dense_experts,
    make_model,
    rate,
    right_answers,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

pytestmark = pytest.mark.vllm  # for transformers, which no other environment has

RECIPE = Recipe(seed=3, phases=(Phase(12, 64, 8), Phase(3, 96, 4)))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer(RECIPE)


@pytest.fixture(scope="session")
def transformers_loaded() -> None:
    """What the first model imports, by this fixture and not by a test."""
    with torch.random.fork_rng():
        make_model(300, 1)


@pytest.fixture
def draws(transformers_loaded: None) -> Iterator[None]:
    """Models draw their weights from the process's own generator, which then goes on as before."""
    with torch.random.fork_rng():
        yield


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- experts


def test_the_dense_formula_is_that_of_each_token_and_expert() -> None:
    tokens, hidden, inner, experts, chosen = 7, 6, 4, 5, 2
    module = SimpleNamespace(
        num_experts=experts,
        gate_up_proj=drawn(experts, 2 * inner, hidden, seed=1),
        down_proj=drawn(experts, hidden, inner, seed=2),
        act_fn=nn.functional.silu,
    )
    rows, weights = drawn(tokens, hidden, seed=3), drawn(tokens, chosen, seed=4)
    ids = torch.tensor([[n % experts, (n + 2) % experts] for n in range(tokens)])
    expected = torch.zeros(tokens, hidden)
    for token in range(tokens):
        for place in range(chosen):
            expert = int(ids[token, place])
            gate, up = (module.gate_up_proj[expert] @ rows[token]).split(inner)
            given = module.down_proj[expert] @ (nn.functional.silu(gate) * up)
            expected[token] += weights[token, place] * given
    torch.testing.assert_close(dense_experts(module, rows, ids, weights), expected)


# --- learning


@pytest.mark.parametrize(
    ("done", "share"), [(0.0, 0.0), (0.01, 0.5), (0.02, 1.0), (0.51, 0.5), (1.0, 0.0)]
)
def test_the_rate_warms_up_and_falls_to_zero(done: float, share: float) -> None:
    recipe = Recipe(learning_rate=0.004, warm_up=0.02)
    assert rate(recipe, done) == pytest.approx(0.004 * share)


def test_every_parameter_has_one_optimizer(draws: None) -> None:
    model = make_model(300, 1)
    held = [
        id(parameter)
        for optimizer in training.optimizers_of(model, RECIPE)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())


def test_the_loss_is_the_weighted_mean_over_answers() -> None:
    logits = drawn(2, 3, 5, seed=5)
    targets, weights = torch.tensor([[1, -100, 2], [-100, 4, 0]]), torch.zeros(2, 3)
    weights[0, 0], weights[0, 2], weights[1, 1], weights[1, 2] = 1.0, 3.0, 1.0, 1.0
    chances = logits.log_softmax(-1)
    expected = -(chances[0, 0, 1] + 3 * chances[0, 2, 2] + chances[1, 1, 4] + chances[1, 2, 0]) / 6
    model = lambda **_: SimpleNamespace(logits=logits)  # noqa: E731
    got = training._loss(model, torch.zeros(2, 3), targets, weights)
    torch.testing.assert_close(got, expected)


def test_a_few_steps_lower_the_loss(
    tokenizer: Tokenizer, draws: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Compiling takes longer than a few steps do.
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setattr(training, "_SAY_EVERY", 1)
    said: list[str] = []
    model = training.train(RECIPE, tokenizer, said.append)
    assert not model.training
    assert len(said) == RECIPE.steps == 15
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in said]
    # An untrained model is as good as a guess among all tokens.
    assert losses[0] == pytest.approx(math.log(tokenizer.get_vocab_size()), abs=0.3)
    assert losses[11] < losses[0] - 1
    held_out = next(batches(RECIPE, Phase(1, 64, 8), tokenizer, seed=99))
    with torch.no_grad():
        assert float(training._loss(model, *held_out)) < losses[0] - 1


# --- balance


class DeepseekV3TopkRouter(nn.Module):
    """Named as transformers' own: sends every token where it is told."""

    def __init__(self, ids: list[list[int]], experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.ids = torch.tensor(ids)
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return hidden, hidden, self.ids


class TwoRouters(nn.Module):
    def __init__(self, *routers: nn.Module) -> None:
        super().__init__()
        self.routers = nn.ModuleList(routers)

    def forward(self, input_ids: Tensor, use_cache: bool) -> Tensor:
        for router in self.routers:
            router(input_ids)
        return input_ids


def test_starved_experts_gain_and_crowded_ones_lose() -> None:
    # Of 8 assignments to 4 experts, 2 are even.
    crowded = DeepseekV3TopkRouter([[0, 1], [0, 1], [0, 2], [0, 2]], 4)
    even = DeepseekV3TopkRouter([[0, 1], [2, 3], [0, 1], [2, 3]], 4)
    balance = LoadBalance(TwoRouters(crowded, even), 0.25)
    for step in (1, 2):
        balance.step(torch.zeros(1, 4, dtype=torch.long))
        bias = crowded.e_score_correction_bias
        assert bias.tolist() == [-0.25 * step, 0.0, 0.0, 0.25 * step]
        assert even.e_score_correction_bias.tolist() == [0.0] * 4
    assert balance.shares == [[0.5, 0.25, 0.25, 0.0], [0.25] * 4]
    assert not crowded._forward_hooks


def test_balance_reads_the_routers_of_the_real_model(draws: None) -> None:
    model = make_model(300, 1)
    balance = LoadBalance(model, 0.001)
    ids = torch.arange(64).view(2, 32)
    balance.step(ids)
    # Two sparse layers, two experts a token.
    assert [int(count.sum()) for count in balance.counts] == [128, 128]
    moved = [m for name, m in model.named_buffers() if name.endswith("correction_bias")]
    for bias, count in zip(moved, balance.counts, strict=True):
        wanted = [0.001 * ((n < 16) - (n > 16)) for n in count.tolist()]
        assert bias.tolist() == pytest.approx(wanted)


# --- answers


class Parrot:
    """Gives the next token of each row, but for those of which a text is to be wrong."""

    def __init__(self, tokenizer: Tokenizer, wrong: dict[str, int]) -> None:
        self.tokenizer, self.wrong = tokenizer, wrong
        self.rows: list[str] = []

    def __call__(self, input_ids: Tensor, use_cache: bool) -> Any:
        text = self.tokenizer.decode(input_ids[0].tolist())
        self.rows.append(text)
        best = input_ids.roll(-1, 1)[0]
        for part, place in self.wrong.items():
            if part in text:
                best[place] = (best[place] + 1) % 100
        return SimpleNamespace(logits=nn.functional.one_hot(best, 1000)[None].float())


def test_answers_are_counted_that_are_right_word_for_word(tokenizer: Tokenizer) -> None:
    asked = list(islice(problems("held-out", 1), 6))
    shots = list(islice(problems("train", 1), 2))
    prefix = "".join(as_text(one) + SEPARATOR for one in shots)
    parrot = Parrot(tokenizer, {})
    assert right_answers(parrot, tokenizer, asked, shots) == 6
    # As the few-shot prompt would go on: what follows decides how the blank line is cut.
    assert parrot.rows == [prefix + as_text(one) + SEPARATOR + "Question:" for one in asked]

    def start(n: int) -> int:
        """The token that gives the first one of the answer."""
        prompt = f"{prefix}Question: {asked[n].question}\nAnswer:"
        return len(tokenizer.encode(prompt).ids) - 1

    wrong = {
        asked[0].question: start(0),  # the first token of the answer
        asked[1].question: -2,  # the last one, which ends the answer
        asked[2].question: start(2) - 1,  # part of the question, which nobody asks for
        asked[3].question: -1,  # what would follow
    }
    assert right_answers(Parrot(tokenizer, wrong), tokenizer, asked, shots) == 4


# --- saving


@pytest.fixture
def saved(tokenizer: Tokenizer, draws: None, tmp_path: Path) -> tuple[Any, Path]:
    model = make_model(tokenizer.get_vocab_size(), 5).eval()
    training.save(model, tokenizer, tmp_path / "model")
    return model, tmp_path / "model"


def test_a_saved_model_gives_the_same_with_rounded_weights(saved: tuple[Any, Path]) -> None:
    from transformers import AutoModelForCausalLM

    model, folder = saved
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config._experts_implementation == "dense"
    assert loaded.config._experts_implementation != "dense"
    kept = dict(loaded.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(kept[name], parameter.bfloat16().float()), name
    with torch.no_grad():
        for tensor in (*model.parameters(), *_biases(model)):
            tensor.copy_(tensor.bfloat16().float())
        ids = torch.arange(600)[None] % 400
        expected = model(input_ids=ids).logits
        # Another way through the experts, hence not to the bit.
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)


def _biases(model: nn.Module) -> list[Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")]


def test_saving_leaves_the_model_as_it_was(
    tokenizer: Tokenizer, draws: None, tmp_path: Path
) -> None:
    model = make_model(tokenizer.get_vocab_size(), 5)
    before = {name: t.clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    training.save(model, tokenizer, tmp_path)
    after = dict((*model.named_parameters(), *model.named_buffers()))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_saved_tokenizer_is_what_engines_load(
    saved: tuple[Any, Path], tokenizer: Tokenizer
) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(saved[1])
    text = "Question: Tom has 5 eggs 😀.\nAnswer: 5+1=6 eggs.\n#### 6\n\n"
    assert loaded(text)["input_ids"] == tokenizer.encode(text).ids
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.eos_token, loaded.eos_token_id) == (EOS, tokenizer.token_to_id(EOS))


def test_the_folder_has_the_files_of_a_small_checkpoint(saved: tuple[Any, Path]) -> None:
    files = {path.name: path.stat().st_size for path in saved[1].iterdir()}
    assert set(files) == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) < 8_000_000
    config = json.loads((saved[1] / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{}/full"], "is not empty; give a new folder"),
        (["{}/full/file"], "no checkpoint can be written to"),
        (["{}/new", "--threads=0"], "--threads is 0"),
        (["{}/new", f"--threads={10**20}"], "--threads is 1000"),
        (["{}/new", f"--seed={2**32}"], "--seed is 4294967296"),
        (["/proc/sys/kernel"], "is not empty"),
    ],
)
def test_what_cannot_be_trained_into_is_told_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("kept")
    with pytest.raises(SystemExit):
        training.main([one.format(tmp_path) for one in arguments])
    assert words in capsys.readouterr().err
    assert (tmp_path / "full" / "file").read_text() == "kept"
