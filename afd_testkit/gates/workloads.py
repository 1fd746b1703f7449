"""The batches that gates run: shapes of steps that splitting is known to trip over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from afd_testkit.engines.base import PrefillEngine, Prompt
from afd_testkit.prompts import UserPrompt

USER = "user-prompts"

# Prompt lengths (tokens) of each workload, in submission order.
LENGTHS: Mapping[str, tuple[int, ...]] = {
    "one-long": (600,),
    "equal": (150, 150, 150, 150),
    "unequal": (3, 200, 17, 64, 120),
    # Half of all tokens is a request boundary, and a multiple of every alignment used.
    "boundary-on-request": (128, 128),
    "many-one-token": (1,) * 64,
    "bimodal": (8, 300, 8, 8, 8, 300, 8, 8),
    "heavy-tailed": (5, 9, 411, 12, 14, 21, 180, 33, 58, 97),
    "long-among-short": (7, 11, 500, 5, 9, 13),
    "seeded-random": tuple(int(n) for n in np.random.default_rng(20260).integers(1, 160, 12)),
}


class Corpus:
    """Prose as tokens of one engine's model, from which prompts are cut; no two start alike."""

    def __init__(self, engine: PrefillEngine, paragraphs: Sequence[str]) -> None:
        self._tokens = engine.tokenize("\n".join(paragraphs))

    def cut(self, place: int, length: int) -> tuple[int, ...]:
        """``length`` tokens from ``place`` on; the text repeats where it ends."""
        size = len(self._tokens)
        return tuple(self._tokens[(place + i) % size] for i in range(length))

    def prompts(
        self, lengths: Sequence[int], *, offset: int = 0, prefix: str = "r", max_tokens: int = 1
    ) -> tuple[Prompt, ...]:
        """One prompt a length, from different places of the text."""
        return tuple(
            Prompt(
                name=f"{prefix}{i}",
                token_ids=self.cut(offset + 397 * i, length),
                max_tokens=max_tokens,
            )
            for i, length in enumerate(lengths)
        )


def user_prompts(engine: PrefillEngine, given: Sequence[UserPrompt]) -> tuple[Prompt, ...]:
    """The user's own prompts under this engine's tokenizer."""
    return tuple(
        Prompt(
            name=prompt.name,
            token_ids=engine.tokenize(prompt.text)
            if prompt.token_ids is None and prompt.text is not None
            else tuple(prompt.token_ids or ()),
        )
        for prompt in given
    )
