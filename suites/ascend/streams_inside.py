"""Generate with streams checked, in a process of its own; prints what was found as JSON.

    python streams_inside.py kept|dropped MODEL_FOLDER

``dropped``: ``Stream.wait_stream`` does nothing, as if whoever wrote the caller had forgotten it.
"""

from __future__ import annotations

import json
import sys

import torch  # the emulated NPU is installed with it
from vllm import LLM, SamplingParams

from afd_testkit.npu.errors import StreamHazard
from afd_testkit.npu.streams import Stream


def main(mode: str, model: str) -> None:
    if mode == "dropped":
        Stream.wait_stream = lambda self, stream: None  # type: ignore[method-assign]
    engine = LLM(
        model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        async_scheduling=True,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=512,
        block_size=128,
        dtype="float32",
    )
    prompts = [{"prompt_token_ids": list(range(5, 5 + count))} for count in (3, 17, 40)]
    sampling = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, detokenize=False)
    found = ""
    try:
        engine.generate(prompts, sampling, use_tqdm=False)
    except StreamHazard as hazard:
        found = str(hazard)
    print(json.dumps({"npu": torch.npu.device_count(), "hazard": found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
