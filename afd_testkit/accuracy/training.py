"""Trains the small model that answers the problems: ``python -m afd_testkit.accuracy.training``.

DeepSeek-V3 as transformers has it, with experts computed densely (each expert for every token,
weighted by zero where it was not chosen), which at this size is faster than picking rows.
Sequences are examples in a row, as few-shot prompts are.  Loss is on answers only.
Reproducible within a tolerance, not to the bit: sums of several threads come in any order.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from afd_testkit.accuracy.corpus import EOS, IGNORED, PAD, SEPARATOR, batches, make_tokenizer
from afd_testkit.accuracy.problems import Level, Problem, as_text, problems
from afd_testkit.accuracy.recipe import Recipe, architecture
from afd_testkit.results_folder import ResultsFolderError, check_writable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SAY_EVERY = 100  # steps
_MOST_THREADS, _MOST_SEEDS = 1024, 2**32
_ASKED = 200  # held-out problems asked of the result, of each level


def dense_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """``hidden`` [N, H] through every expert, summed with ``weights`` [N, K] at ``chosen``."""
    share = hidden.new_zeros(hidden.shape[0], module.num_experts)
    share = share.scatter(1, chosen, weights.to(share.dtype))
    gate, up = torch.einsum("nh,eih->eni", hidden, module.gate_up_proj).chunk(2, dim=-1)
    inner = module.act_fn(gate) * up * share.t()[..., None]
    return torch.einsum("eni,ehi->nh", inner, module.down_proj)


def make_model(vocabulary: int, seed: int) -> nn.Module:
    """An untrained model."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("dense", dense_experts)
    config = DeepseekV3Config(**architecture(vocabulary))
    config._experts_implementation = "dense"
    config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    return DeepseekV3ForCausalLM(config)


@dataclass
class LoadBalance:
    """Moves each router's bias so that no expert starves, by ``size`` a step."""

    model: nn.Module
    size: float
    counts: list[Tensor] = field(default_factory=list)

    def step(self, ids: Tensor) -> None:
        """Look where the tokens of ``ids`` [rows, tokens] go: starved experts up, crowded down."""
        gates = [m for m in self.model.modules() if type(m).__name__ == "DeepseekV3TopkRouter"]
        self.counts = []
        hooks = [gate.register_forward_hook(self._count) for gate in gates]
        try:
            with torch.no_grad():
                self.model(input_ids=ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        for gate, count in zip(gates, self.counts, strict=True):
            gate.e_score_correction_bias += self.size * torch.sign(count.mean() - count)

    def _count(self, gate: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        count = torch.bincount(output[2].flatten(), minlength=gate.num_experts)
        self.counts.append(count.float())

    @property
    def shares(self) -> list[list[float]]:
        """Share of assignments by expert of each sparse layer, when last looked at."""
        return [[round(float(n / count.sum()), 3) for n in count] for count in self.counts]


def rate(recipe: Recipe, done: float) -> float:
    """Learning rate at the share ``done`` of the training: warm-up, then a cosine to zero."""
    if done < recipe.warm_up:
        return recipe.learning_rate * done / recipe.warm_up
    left = (done - recipe.warm_up) / (1 - recipe.warm_up)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * left))


def optimizers_of(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for matrices between hidden states, AdamW for embeddings, experts and vectors.

    Muon is what makes half an hour enough: after 200 steps the loss is half of AdamW's.  torch's
    takes matrices only, and the experts of a layer are one tensor of three dimensions.
    """
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for name, parameter in model.named_parameters():
        inner = parameter.ndim == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight"))
        (matrices if inner else rest).append(parameter)
    return [
        torch.optim.Muon(
            matrices,
            lr=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(rest, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(recipe: Recipe, tokenizer: Tokenizer, say: Callable[[str], None]) -> nn.Module:
    """All phases; the model in evaluation mode."""
    model = make_model(tokenizer.get_vocab_size(), recipe.seed)
    balance = LoadBalance(model, recipe.routing_step)
    optimizers, compiled = optimizers_of(model, recipe), torch.compile(model)
    started, step = time.monotonic(), 0
    for phase in recipe.phases:
        source = batches(recipe, phase, tokenizer, recipe.seed + step)
        for _ in range(phase.steps):
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate(recipe, step / recipe.steps)
            ids, targets, weights = next(source)
            loss = _loss(compiled, ids, targets, weights)
            model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            balance.step(ids[: max(1, len(ids) // 12)])
            if step % _SAY_EVERY == 0:
                minutes = (time.monotonic() - started) / 60
                value = float(loss.detach())
                say(f"step {step}, {minutes:.1f} min, loss {value:.4f}, experts {balance.shares}")
            step += 1
    return model.eval()


def _loss(model: Callable[..., Any], ids: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The weighted loss of one batch."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    each = nn.functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    scale = weights.flatten()
    return (each * scale).sum() / scale.sum()


def right_answers(
    model: nn.Module, tokenizer: Tokenizer, asked: Sequence[Problem], shots: Sequence[Problem]
) -> int:
    """How many of ``asked`` the model answers greedily as the reference does, word for word.

    Teacher-forced: greedy decoding gives the reference answer if and only if every one of its
    tokens is the likeliest.
    """
    right = 0
    prefix = "".join(as_text(one) + SEPARATOR for one in shots)
    for problem in asked:
        prompt = f"{prefix}Question: {problem.question}\nAnswer:"
        # What follows decides how the separator is cut into tokens, and is part of the answer.
        ids = tokenizer.encode(prefix + as_text(problem) + SEPARATOR + "Question:").ids
        start = len(tokenizer.encode(prompt).ids)
        row = torch.tensor([ids])
        with torch.no_grad():
            best = model(input_ids=row, use_cache=False).logits[0].argmax(-1)
        right += bool((best[start - 1 : -1] == row[0, start:]).all())
    return right


def save(model: nn.Module, tokenizer: Tokenizer, out: Path) -> None:
    """A checkpoint that engines load: weights in bfloat16, which computing in float32 keeps.

    ``model`` stays as it is: rounding would take its rotation frequencies along, which are not
    saved, so that it would no longer be what was saved.
    """
    saved: Any = copy.deepcopy(model).to(torch.bfloat16)
    saved.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": architecture(0)["max_position_embeddings"],
    }
    text = json.dumps(settings, indent=1) + "\n"
    (out / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (out / "generation_config.json").unlink(missing_ok=True)  # would add sampling settings


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, save, and say what was learnt."""
    from transformers import DeepseekV3ForCausalLM

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path, help="folder for the checkpoint")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    given = parser.parse_args(arguments)
    if not 1 <= given.threads <= _MOST_THREADS:
        parser.error(f"--threads is {given.threads}; give 1 to {_MOST_THREADS}")
    if not 0 <= given.seed < _MOST_SEEDS:
        parser.error(f"--seed is {given.seed}; give 0 to {_MOST_SEEDS - 1}")
    try:  # before half an hour is spent
        if given.out.exists() and any(given.out.iterdir()):
            parser.error(f"{given.out} is not empty; give a new folder")
        check_writable(given.out)
    except (OSError, ResultsFolderError) as error:
        parser.error(f"no checkpoint can be written to {given.out}: {error}")
    torch.set_num_threads(given.threads)
    recipe = Recipe(seed=given.seed)
    tokenizer = make_tokenizer(recipe)
    save(train(recipe, tokenizer, lambda text: print(text, flush=True)), tokenizer, given.out)
    model = DeepseekV3ForCausalLM.from_pretrained(given.out, dtype=torch.float32).eval()
    shots = list(islice(problems("train", recipe.seed), 5))
    levels: tuple[Level, ...] = ("plain", "hard")
    for level in levels:
        asked = list(islice(problems("held-out", recipe.seed, levels=(level,)), _ASKED))
        for count in (0, 3, 5):
            right = right_answers(model, tokenizer, asked, shots[:count])
            print(f"{level}, {count}-shot: {right}/{len(asked)} word for word", flush=True)


if __name__ == "__main__":
    main()
