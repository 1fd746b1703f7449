"""Training text as tokens: the tokenizer, and sequences of examples with their weights."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from afd_testkit.accuracy.problems import Level, Problem, as_text, drill, problems
from afd_testkit.accuracy.recipe import Phase, Recipe

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, EOS = "<pad>", "<eos>"
SEPARATOR = "\n\n"  # between examples, as lm-eval writes them
IGNORED = -100
VOCABULARY = 1024  # at most; the text gives about 450
_TOKENIZER_EXAMPLES = 4000


def examples(recipe: Recipe, seed: int) -> Iterator[Problem]:
    """Training examples without end: stories and drills by chance."""
    draw = random.Random(seed)
    plain, hard = problems("train", seed), problems("train", seed + 1, levels=("hard",))
    while True:
        level: Level = "hard" if draw.random() < recipe.hard else "plain"
        if draw.random() < recipe.drills:
            yield drill(draw, level)
        else:
            yield next(hard if level == "hard" else plain)


def make_tokenizer(recipe: Recipe) -> Tokenizer:
    """Byte-level BPE over training text, each digit a token of its own; any text round-trips."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    some = itertools.islice(examples(recipe, recipe.seed), _TOKENIZER_EXAMPLES)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[PAD, "<bos>", EOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator((as_text(one) + SEPARATOR for one in some), trainer)
    return tokenizer


def batches(
    recipe: Recipe, phase: Phase, tokenizer: Tokenizer, seed: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Token ids, next-token targets (int64) and their weights (float32): [batch, tokens] each."""
    source = examples(recipe, seed)
    while True:
        rows = [_row(source, recipe, tokenizer, phase.tokens + 1) for _ in range(phase.batch)]
        ids = torch.tensor([row[0] for row in rows])
        weights = torch.tensor([row[1] for row in rows])[:, 1:]
        yield ids[:, :-1], ids[:, 1:].masked_fill(weights == 0, IGNORED), weights


def _row(
    source: Iterator[Problem], recipe: Recipe, tokenizer: Tokenizer, tokens: int
) -> tuple[list[int], list[float]]:
    """``tokens`` ids of examples one after the other, and the weight of each."""
    text, weights, encoded = "", list[float](), None
    while encoded is None or len(encoded.ids) < tokens:
        for _ in range(max(1, tokens // 64)):
            for piece, weight in parts(next(source), recipe.result_weight):
                text += piece
                weights += [weight] * len(piece)
        encoded = tokenizer.encode(text, add_special_tokens=False)
    starts = [start for start, _ in encoded.offsets[:tokens]]
    return encoded.ids[:tokens], [weights[start] for start in starts]


def parts(problem: Problem, result_weight: float) -> Iterator[tuple[str, float]]:
    """Pieces of an example with the weight of their tokens."""
    yield "Question:", 1.0  # what ends an answer for the task
    yield f" {problem.question}\nAnswer:", 0.0
    *lines, last = problem.answer.split("\n")
    glue = " "
    for line in lines:
        left, rest = line.split("=")
        result, things = rest.split(" ", 1)
        yield f"{glue}{left}=", 1.0
        yield result, result_weight
        yield f" {things}", 1.0
        glue = "\n"
    yield "\n#### ", 1.0
    yield last.removeprefix("#### "), result_weight
    yield SEPARATOR, 1.0
