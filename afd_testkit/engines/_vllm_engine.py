"""The vLLM engine inside its own process: arguments, runs, recovery after a failed step.

Imported only there.  ``_vllm_child`` owns the process and its pipe; ``_vllm_probe`` owns
what is read from each step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from afd_testkit.engines._vllm_child import ChildStart, RunRequest
from afd_testkit.engines.base import EngineError, Prompt, RunResult, SplitSetting, StepRecord

if TYPE_CHECKING:
    from afd_testkit.engines._vllm_probe import StepProbe

AFD_WORKER = "afd_plugin.workers.cpu.AFDCPUWorker"


class ChildEngine:
    """The vLLM engine of this process with its probe."""

    def __init__(self, start: ChildStart, progress: Callable[[str], None]) -> None:
        self._config = start.config
        self._model_path = start.model_path
        self._tokenizer: Any = None
        self._runs = 0
        progress("importing vLLM")
        import torch
        from vllm import EngineArgs, LLMEngine

        from afd_testkit.engines._vllm_probe import StepProbe

        torch.set_num_threads(start.threads)
        if start.needs_amx and not torch.cpu._is_amx_tile_supported():
            raise EngineError(
                f"model {start.config.model} needs a CPU with AMX for its MLA kernels, and this "
                "CPU has none; use model deepseek-v3 instead, or run on such a CPU"
            )
        progress("starting the engine")
        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**_engine_args(start)))
        self._worker: Any = self._engine.model_executor.driver_worker.worker
        self._runner: Any = self._worker.model_runner
        self._probe: StepProbe = StepProbe(self._runner)
        self._probe.install()

    def info(self) -> dict[str, Any]:
        """Facts that the parent keeps: versions, vocabulary, cache size, process id."""
        import torch

        from afd_testkit.engines._vllm_probe import stack_versions

        return {
            "pid": os.getpid(),
            "versions": stack_versions(),
            "vocab_size": int(self._runner.model_config.get_vocab_size()),
            "attention": self._probe.attention_backends(),
            "kv_blocks": int(self._runner.kv_cache_config.num_blocks),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        }

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids under the checkpoint's own tokenizer, no special token added."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(
                    self._model_path, local_files_only=True
                )
            except (OSError, ValueError) as error:
                raise EngineError(
                    f"the checkpoint {self._model_path} has no usable tokenizer ({error}); "
                    "give prompts as token_ids"
                ) from error
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return tuple(int(token) for token in encoded)

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes; refused by vLLM only while requests hold blocks."""
        if not self._engine.reset_prefix_cache():
            raise EngineError("vLLM refused to reset its prefix cache; the log says which blocks")

    def run(self, request: RunRequest) -> RunResult:
        """Submit, step until finished, and hand over what the probe saw."""
        self._runs += 1
        self._configure_split(request.split)
        outputs: dict[str, Any] = {}
        poisoned = self._probe.forget_stale_blocks(self._is_free)
        with self._fault(request.fault):
            started = time.perf_counter()
            names = self._submit(request.prompts)
            self._probe.begin(names)
            try:
                while self._engine.has_unfinished_requests():
                    for output in self._engine.step():
                        outputs[names[output.request_id]] = output
            except BaseException:
                self._recover(list(names))
                raise
            finally:
                seen = self._probe.end()
            seconds = time.perf_counter() - started
        results = tuple(
            seen.request_result(
                prompt,
                cached_tokens=int(outputs[prompt.name].num_cached_tokens),
                greedy_token=int(outputs[prompt.name].outputs[0].token_ids[0]),
            )
            for prompt in request.prompts
        )
        steps = self._with_evidence(seen.steps)
        facts = {"run": self._runs, "step_seconds": seen.seconds, "poisoned_blocks": poisoned}
        return RunResult(requests=results, steps=steps, seconds=seconds, facts=facts)

    def _is_free(self, block: int) -> bool:
        """Whether no request holds ``block`` and no prefix is cached in it."""
        manager = self._engine.engine_core.engine_core.scheduler.kv_cache_manager
        held = manager.block_pool.blocks[block]
        return not held.is_null and held.ref_cnt == 0 and held.block_hash is None

    def _submit(self, prompts: tuple[Prompt, ...]) -> dict[str, str]:
        """Queue all prompts; external request id to prompt name."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        names = {}
        for index, prompt in enumerate(prompts):
            request_id = f"{self._runs}.{index}"
            tokens = TokensPrompt(prompt_token_ids=list(prompt.token_ids))
            if prompt.cache_salt is not None:
                tokens["cache_salt"] = prompt.cache_salt
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=prompt.max_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            self._engine.add_request(request_id, tokens, sampling)
            names[request_id] = prompt.name
        return names

    def _recover(self, request_ids: list[str]) -> None:
        """After a failed step, drop its requests and caches, so that the next run is sound."""
        self._engine.abort_request(request_ids)
        self._runner.execute_model_state = None
        self.reset_prefix_cache()

    def _configure_split(self, split: SplitSetting) -> None:
        if self._config.worker != "afd":
            return
        self._worker.afd_take_evidence()
        self._worker.afd_configure(
            {
                "async_moe_ubatching": split.policy != "off",
                "async_moe_split": "request" if split.policy == "off" else split.policy,
                "async_moe_token_alignment": split.alignment,
                "async_moe_min_tokens": split.min_tokens,
            }
        )

    def _with_evidence(self, steps: tuple[StepRecord, ...]) -> tuple[StepRecord, ...]:
        if self._config.worker != "afd":
            return steps
        evidence = self._worker.afd_take_evidence()
        if len(evidence) != len(steps):
            raise EngineError(
                f"the worker recorded evidence for {len(evidence)} steps, "
                f"but {len(steps)} were executed"
            )
        return tuple(
            replace(step, evidence=dict(record))
            for step, record in zip(steps, evidence, strict=True)
        )

    def _fault(self, name: str | None) -> AbstractContextManager[None]:
        if name is None:
            return nullcontext()
        from afd_testkit.engines._vllm_probe import VllmFaultTarget
        from afd_testkit.faults import FAULTS

        if name not in FAULTS:
            raise EngineError(f"unknown fault {name!r}; known: {', '.join(sorted(FAULTS))}")
        return FAULTS[name].inject(VllmFaultTarget(self._runner))


def _engine_args(start: ChildStart) -> dict[str, Any]:
    """vLLM's arguments for an :class:`EngineConfig`."""
    config = start.config
    step_tokens = config.step_tokens or config.max_step_tokens
    args: dict[str, Any] = {
        "model": start.model_path,
        "dtype": config.dtype,
        "seed": 0,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "async_scheduling": False,
        "disable_log_stats": True,
        "block_size": config.block_size,
        "max_model_len": config.max_model_len,
        # vLLM refuses more; a step holds at least one token a request anyway.
        "max_num_seqs": min(config.max_num_seqs, step_tokens),
        "max_num_batched_tokens": step_tokens,
        "enable_chunked_prefill": config.step_tokens is not None,
        "enable_prefix_caching": config.prefix_caching,
        "kv_cache_memory_bytes": start.kv_cache_bytes,
    }
    if config.worker == "afd":
        args["worker_cls"] = AFD_WORKER
        args["additional_config"] = {"afd": {"async_moe_ubatching": True}}
    return args
