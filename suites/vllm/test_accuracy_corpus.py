"""Training text of the small model: the tokenizer, weights of tokens, what may be trained on."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import pytest

from afd_testkit.accuracy.corpus import (
    EOS,
    IGNORED,
    PAD,
    SEPARATOR,
    VOCABULARY,
    batches,
    examples,
    make_tokenizer,
    parts,
)
from afd_testkit.accuracy.problems import Problem, as_text, problems, side_of
from afd_testkit.accuracy.recipe import Phase, Recipe

if TYPE_CHECKING:
    from tokenizers import Tokenizer

pytestmark = pytest.mark.vllm  # for tokenizers, which no other environment has

RECIPE = Recipe(result_weight=3.0)
PROBLEM = Problem(
    question="Tom has 5 eggs. Tom buys 12 more eggs. How many eggs does Tom have now?",
    answer="5+12=17 eggs.\n17*2=34 eggs.\n#### 34",
    template="",
    steps=((5, "+", 12, 17), (17, "*", 2, 34)),
    level="plain",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer(RECIPE)


TEXTS = [
    as_text(PROBLEM) + SEPARATOR,
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in "
    "May. How many clips did Natalia sell altogether in April and May?\n"
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72",
    "It costs $1,234.50 (−7 %), or €3½ each — “why?”",
    "😀 family 👨‍👩‍👧‍👦, flag 🇳🇴, 漢字, עברית, combining é and \u200b",
    "  two  spaces\tand tabs \n\n\n and an end  ",
    "<eos> spelled out and <pad> too, <bos>",
    "0123456789" * 3,
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_single_byte_of_utf_8_comes_back(tokenizer: Tokenizer) -> None:
    text = "".join(map(chr, [*range(1, 0x250), 0x20AC, 0xFFFD, 0x1F600, 0x10FFFF]))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_each_digit_is_a_token(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("A 12+345=357 cards.").tokens
    assert [token for token in tokens if any(c.isdigit() for c in token)] == list("12345357")


def test_the_vocabulary_is_small_and_has_what_engines_need(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() <= VOCABULARY
    assert (tokenizer.token_to_id(PAD), tokenizer.token_to_id(EOS)) == (0, 2)
    # Words of the stories are a token or two, not letters.
    assert len(tokenizer.encode(as_text(PROBLEM)).ids) < len(as_text(PROBLEM)) / 2


def test_making_it_again_gives_the_same(tokenizer: Tokenizer) -> None:
    assert make_tokenizer(RECIPE).to_str() == tokenizer.to_str()


def test_the_prompt_of_a_question_is_a_prefix_of_its_example(tokenizer: Tokenizer) -> None:
    # Else a model would be asked in tokens that it was not trained on.
    for problem in islice(problems("held-out", 1, levels=("plain", "hard")), 50):
        whole = tokenizer.encode(as_text(problem) + SEPARATOR).ids
        prompt = tokenizer.encode(f"Question: {problem.question}\nAnswer:").ids
        assert whole[: len(prompt)] == prompt


def test_parts_are_the_example_with_weights_on_the_answer() -> None:
    pieces = list(parts(PROBLEM, 3.0))
    assert "".join(piece for piece, _ in pieces) == as_text(PROBLEM) + SEPARATOR
    assert [piece for piece, weight in pieces if weight == 3.0] == ["17", "34", "34"]
    assert [piece for piece, weight in pieces if weight == 0.0] == [f" {PROBLEM.question}\nAnswer:"]
    assert {weight for _, weight in pieces} == {0.0, 1.0, 3.0}


def test_weights_line_up_with_the_digits_of_results(tokenizer: Tokenizer) -> None:
    """The heavy tokens of a row, read as text, are exactly the results of its examples."""
    phase = Phase(steps=1, tokens=256, batch=3)
    ids, targets, weights = next(batches(RECIPE, phase, tokenizer, seed=11))
    assert ids.shape == targets.shape == weights.shape == (3, 256)
    for row in range(3):
        # The last target follows all ids, and may be one that is not told.
        weight, target = weights[row, :-1], targets[row, :-1]
        following = ids[row, 1:]
        assert following[weight > 0].equal(target[weight > 0])
        heavy = "".join(
            tokenizer.decode([int(token)]) if w == 3.0 else " "
            for token, w in zip(following, weight, strict=True)
        )
        results = _results(tokenizer.decode(ids[row].tolist()))
        assert len(results) > 5
        assert heavy.split() == results


def _results(text: str) -> list[str]:
    """Numbers after = and #### in whole and cut examples, in order."""
    found = []
    for line in text.replace("Answer:", "\n").split("\n"):
        if "Question:" in line:
            continue
        if line.startswith("#### "):
            found += line.removeprefix("#### ").split()
        elif "=" in line:
            found += line.split("=")[1].split(" ")[:1]
    return [one for one in found if one.isdigit()]


def test_what_has_no_weight_is_ignored_and_nothing_else(tokenizer: Tokenizer) -> None:
    _, targets, weights = next(batches(RECIPE, Phase(1, 128, 4), tokenizer, seed=3))
    assert ((targets == IGNORED) == (weights == 0)).all()
    assert (weights > 0).any(dim=1).all()


def test_batches_depend_on_the_seed_alone(tokenizer: Tokenizer) -> None:
    phase = Phase(1, 64, 2)
    first, again, other = (next(batches(RECIPE, phase, tokenizer, seed))[0] for seed in (5, 5, 6))
    assert first.equal(again)
    assert not first.equal(other)


def test_no_held_out_template_is_trained_on() -> None:
    seen = list(islice(examples(RECIPE, seed=1), 2000))
    stories = [one for one in seen if one.template != "drill"]
    assert len(stories) > 500
    assert {side_of(one) for one in stories} == {"train"}
    held_out = {one.template for one in islice(problems("held-out", 1), 500)}
    assert not held_out & {one.template for one in stories}


def test_drills_and_hard_numbers_come_in_their_shares() -> None:
    seen = list(islice(examples(Recipe(drills=0.5, hard=0.2), seed=2), 2000))
    # Within four standard deviations of a share of 2000 draws.
    assert abs(sum(one.template == "drill" for one in seen) / 2000 - 0.5) < 0.045
    assert abs(sum(one.level == "hard" for one in seen) / 2000 - 0.2) < 0.036


def test_a_row_begins_with_a_question_and_goes_on_without_gaps(tokenizer: Tokenizer) -> None:
    ids, _, _ = next(batches(RECIPE, Phase(1, 200, 1), tokenizer, seed=4))
    text = tokenizer.decode(ids[0].tolist())
    assert text.startswith("Question: ")
    assert text.count("Question: ") >= 3
    assert all(piece.startswith("Question: ") for piece in text.split(SEPARATOR)[:-1])
