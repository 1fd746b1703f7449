"""The English prose from which gates cut prompts."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources


@cache
def paragraphs() -> tuple[str, ...]:
    """The paragraphs of ``data/texts.jsonl``, in order."""
    file = resources.files("afd_testkit") / "data" / "texts.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    return tuple(str(json.loads(line)["text"]) for line in lines)
