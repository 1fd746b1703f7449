"""Looks at the splitting worker from inside its engine's process, and makes it fail.

    python worker_inside.py one|two MODEL_FOLDER REPORT.json

``one``: an engine in this very process.  ``two``: two tensor-parallel ranks under FlashComm1.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm import LLM, SamplingParams

from afd_plugin import register_metadata_rules, rules
from afd_plugin.compat.known import RULES_ASCEND_0_23_0_POST1
from afd_plugin.context import current_stage
from afd_plugin.metadata import unregister_metadata_rules

TOKEN = {"async_moe_ubatching": True, "async_moe_split": "token"}
REQUEST = {"async_moe_ubatching": True, "async_moe_split": "request"}
OFF = {"async_moe_ubatching": False}
# 404 tokens; half of them lie behind token 199 of the second prompt.
LENGTHS = (3, 200, 17, 64, 120)
ROTARY = ("_cos", "_sin", "_cos_slice", "_sin_slice", "_cos_mla", "_sin_mla")
SAMPLING = SamplingParams(
    max_tokens=1, temperature=0, prompt_logprobs=-1, logprobs=-1, detokenize=False
)


class StageFailed(Exception):
    """What is raised inside a stage."""


def start(model: str, **arguments: Any) -> LLM:
    """An engine with the splitting worker."""
    options = {"afd": TOKEN, **arguments.pop("additional_config", {})}
    return LLM(
        model,
        worker_cls="afd_plugin.workers.npu.AFDNPUWorker",
        additional_config=options,
        skip_tokenizer_init=True,
        enforce_eager=True,
        async_scheduling=False,
        dtype="float32",
        block_size=128,
        max_model_len=512,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
        max_logprobs=-1,
        seed=0,
        **arguments,
    )


def prompts(lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"prompt_token_ids": torch.randint(5, 200, (length,), generator=generator).tolist()}
        for length in lengths
    ]


def log_probabilities(llm: LLM, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """[length, vocabulary] of each prompt, the first generated token's in the last row."""
    found = []
    for output in llm.generate(prompts(lengths), SAMPLING, use_tqdm=False):
        rows = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
        found.append(torch.tensor([[row[token].logprob for token in sorted(row)] for row in rows]))
    return found


def worst(one: list[torch.Tensor], other: list[torch.Tensor]) -> list[float]:
    """Largest difference in each prompt."""
    return [(a - b).abs().max().item() for a, b in zip(one, other, strict=True)]


class Inside:
    """One engine in this process, and what of it may be looked at."""

    def __init__(self, model: str) -> None:
        self._alive: list[Any] = []
        self.llm = start(model)
        self.worker = self.llm.llm_engine.model_executor.driver_worker.worker
        self.runner = self.worker.model_runner
        self.groups = [group for groups in self.runner.attn_groups for group in groups]
        self.builders = [list(group.metadata_builders) for group in self.groups]

    def run(self, options: dict[str, Any]) -> list[torch.Tensor]:
        self.worker.afd_configure(options)
        return log_probabilities(self.llm, LENGTHS)

    def globals(self) -> list[int]:
        """Which objects the modules of vLLM-Ascend hold for the step that runs."""
        from vllm_ascend import ascend_forward_context
        from vllm_ascend.ops import rotary_embedding

        objects = [
            *(vars(rotary_embedding)[name] for name in ROTARY),
            ascend_forward_context._reserved_mc2_mask,
        ]
        self._alive += objects  # the next one must not be made in the place of one that is gone
        return [id(each) for each in objects]

    def state(self) -> dict[str, bool]:
        """What must hold between steps, after success and after failure."""
        from vllm import forward_context

        return {
            "no forward context": forward_context._forward_context is None,
            "no step": self.runner._afd_step is None,
            "no stage": current_stage() is None,
            "own builders": all(
                group.metadata_builders == own
                for group, own in zip(self.groups, self.builders, strict=True)
            ),
        }

    def buffers(self) -> dict[str, int]:
        """Buffers that stay the same objects whatever runs; views of a step are not among them."""
        names = [name for name in ROTARY if "slice" not in name] + ["mask"]
        kept = [
            place
            for place, name in zip(self.globals(), [*ROTARY, "mask"], strict=True)
            if name in names
        ]
        return dict(zip(names, kept, strict=True))

    @contextmanager
    def failing_layer(self, stage: int) -> Iterator[None]:
        """The second decoder layer raises in ``stage``."""

        def hook(module: Any, args: Any) -> None:
            if current_stage() == stage:
                raise StageFailed(f"layer 1 of stage {stage}")

        handle = self.runner.model.model.layers[1].register_forward_pre_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def failing_builder(self, stage: int) -> Iterator[None]:
        """The metadata builder of ``stage`` raises."""
        builder = self.builders[0][stage]

        def build(*args: Any, **kwargs: Any) -> None:
            raise StageFailed(f"builder of stage {stage}")

        builder.build = build
        try:
            yield
        finally:
            del builder.build

    def failure(self, fault: Callable[[], Any]) -> dict[str, Any]:
        """A run in which ``fault`` holds: its error, evidence and the state it leaves."""
        raised: BaseException | None = None
        self.worker.afd_take_evidence()
        around: dict[str, list[int]] = {}
        forward = self.runner._model_forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            # Here and not around the step: the runner itself sets what the whole step needs.
            around["before"] = self.globals()
            try:
                return forward(*args, **kwargs)
            finally:
                around["after"] = self.globals()

        self.runner._model_forward = watched
        try:
            with fault():
                self.run(TOKEN)
        except StageFailed as error:
            raised = error
        finally:
            del self.runner._model_forward
        evidence = self.worker.afd_take_evidence()
        state = self.state()
        engine = self.llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        self.runner.execute_model_state = None
        again = worst(self.run(TOKEN), self.whole)
        return {
            "error": None if raised is None else str(raised),
            "notes": list(getattr(raised, "__notes__", [])),
            "evidence": evidence,
            "state": state,
            "globals kept": around.get("before") == around.get("after"),
            "again": again,
            "evidence again": self.worker.afd_take_evidence(),
        }

    @staticmethod
    def angles(positions: torch.Tensor) -> list[bool] | None:
        """Whether the cosines and sines kept for the step are those of ``positions``."""
        from vllm_ascend.ops import rotary_embedding

        if rotary_embedding._cos_slice is None:  # latent attention
            return None
        cos, sin = rotary_embedding._cos_sin_cache[positions].chunk(2, dim=-1)
        return [
            torch.equal(kept[0, :, 0, : half.shape[-1]], half)
            for kept, half in (
                (rotary_embedding._cos_slice, cos),
                (rotary_embedding._sin_slice, sin),
            )
        ]

    def look(self) -> dict[str, Any]:
        """What each stage of one split step is given."""
        from vllm.forward_context import get_forward_context
        from vllm_ascend import ascend_forward_context

        seen: list[dict[str, Any]] = []

        def hook(module: Any, args: Any) -> None:
            context = get_forward_context()
            first = next(iter(context.attn_metadata.values()))
            mask = vars(context).get("mc2_mask")
            seen.append(
                {
                    "stage": current_stage(),
                    "state": first.attn_state.name,
                    "tokens": first.num_actual_tokens,
                    "rows": context.num_tokens,
                    "masked": None if mask is None else int(mask.sum()),
                    "layers": sorted(context.attn_metadata),
                    "globals": self.globals(),
                    "angles": self.angles(args[0]),
                    "context": id(context),
                    # Alive, so that no id is used twice.
                    "kept": (context, ascend_forward_context._reserved_mc2_mask),
                }
            )

        handle = self.runner.model.model.layers[0].register_forward_pre_hook(hook)
        try:
            self.run(TOKEN)
        finally:
            handle.remove()
        for each in seen:
            del each["kept"]
        return {"stages": seen, "layers": len(self.runner.model.model.layers)}

    def report(self) -> dict[str, Any]:
        """Everything, in one engine."""
        self.whole = self.run(OFF)
        self.worker.afd_take_evidence()
        buffers = self.buffers()
        found: dict[str, Any] = {
            "noise": worst(self.run(OFF), self.whole),
            "token": worst(self.run(TOKEN), self.whole),
            "request": worst(self.run(REQUEST), self.whole),
            "evidence": self.worker.afd_take_evidence(),
            "builders": [len({id(builder) for builder in own}) for own in self.builders],
            "kinds": sorted({type(b).__name__ for own in self.builders for b in own}),
            "state": self.state(),
            "look": self.look(),
            "copied state": self.copied_state(),
        }
        for stage in (0, 1):
            found[f"layer {stage}"] = self.failure(lambda s=stage: self.failing_layer(s))
            found[f"builder {stage}"] = self.failure(lambda s=stage: self.failing_builder(s))
        found["buffers kept"] = self.buffers() == buffers
        return found

    def copied_state(self) -> list[float]:
        """The difference when both stages are given the step's attention state."""
        from vllm_ascend.attention.utils import AscendCommonAttentionMetadata

        wrong = {**RULES_ASCEND_0_23_0_POST1, "attn_state": rules.carried}
        register_metadata_rules(AscendCommonAttentionMetadata, wrong)
        try:
            return worst(self.run(TOKEN), self.whole)
        finally:
            unregister_metadata_rules(AscendCommonAttentionMetadata)


# --- two ranks: these run in the workers, to which they are sent --------------------------------


def configure(worker: Any, options: list[dict[str, Any]]) -> int:
    """Each rank gets its own options."""
    worker.afd_configure(options[worker.rank])
    return int(worker.rank)


def watch(worker: Any) -> None:
    """Remember what ``execute_model`` raises on this rank, and when."""
    run = worker.model_runner.execute_model

    def watched(*args: Any, **kwargs: Any) -> Any:
        begun = time.monotonic()
        try:
            return run(*args, **kwargs)
        except Exception as error:
            worker.seen = {
                "rank": worker.rank,
                "kind": type(error).__name__,
                "text": str(error),
                "decisions": list(vars(error).get("decisions", ())),
                "seconds": time.monotonic() - begun,
            }
            raise

    worker.model_runner.execute_model = watched


def note_stages(worker: Any) -> None:
    """Remember what each stage's layers are told of its tokens and of its padding."""
    from vllm.forward_context import get_forward_context

    worker.stages = []

    def hook(module: Any, args: Any) -> None:
        context = get_forward_context()
        if current_stage() is None:
            return
        first = next(iter(context.attn_metadata.values()))
        worker.stages.append(
            {
                "tokens": first.num_actual_tokens,
                "query ends": first.actual_seq_lengths_q,
                "rows": context.num_tokens,
                "masked": int(context.mc2_mask.sum()),
            }
        )

    worker.model_runner.model.model.layers[0].register_forward_pre_hook(hook)


def _stages(worker: Any) -> list[dict[str, Any]]:
    stages: list[dict[str, Any]] = worker.stages
    return stages


def two_ranks(model: str) -> dict[str, Any]:
    """Alignment from FlashComm1, then ranks that disagree."""
    llm = start(
        model,
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        additional_config={"enable_flashcomm1": True},
    )
    llm.collective_rpc(configure, args=([OFF, OFF],))
    whole = log_probabilities(llm, (105,))
    llm.collective_rpc("afd_take_evidence")
    llm.collective_rpc(configure, args=([TOKEN, TOKEN],))
    llm.collective_rpc(note_stages)
    split = log_probabilities(llm, (105,))
    found: dict[str, Any] = {
        "token": worst(split, whole),
        "evidence": llm.collective_rpc("afd_take_evidence"),
        "stages": llm.collective_rpc(_stages),
    }
    llm.collective_rpc(watch)
    llm.collective_rpc(configure, args=([TOKEN, {**TOKEN, "async_moe_token_alignment": 16}],))
    try:
        log_probabilities(llm, (105,))
    except Exception as error:
        found["raised"] = f"{type(error).__name__}: {error}"
    found["seen"] = llm.collective_rpc(_seen)
    found["evidence of the disagreement"] = llm.collective_rpc("afd_take_evidence")
    return found


def _seen(worker: Any) -> dict[str, Any]:
    seen: dict[str, Any] = worker.seen
    return seen


def main(mode: str, model: str, out: str) -> None:
    """Look, and write the report."""
    report = Inside(model).report() if mode == "one" else two_ranks(model)
    with open(out, "w", encoding="utf-8") as file:
        json.dump(report, file)
    sys.stdout.flush()
    # Nothing is left to save; taking engine and interpreter apart would take seconds.
    if mode == "one":
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
