"""Greedy answers of a checkpoint on vLLM's CPU engine, in a process of its own.

    python answers_inside.py MODEL_FOLDER PROMPTS.json OUT.json

``PROMPTS.json``: lists of token ids; ``OUT.json``: the attention backend, and 40 tokens for each.
Whether latent attention has kernels of its own is up to ``VLLM_MLA_DISABLE``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


def main(model: str, prompts: str, out: str) -> None:
    """One engine, all prompts."""
    engine = LLM(
        model=model,
        dtype="float32",
        block_size=16,  # the only one that the latent kernels take
        max_model_len=512,
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
    )
    core = engine.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    backends = {group.backend.get_name() for groups in runner.attn_groups for group in groups}
    answered = engine.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in json.loads(Path(prompts).read_text())],
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    tokens = [list(one.outputs[0].token_ids) for one in answered]
    Path(out).write_text(json.dumps({"backends": sorted(backends), "tokens": tokens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
