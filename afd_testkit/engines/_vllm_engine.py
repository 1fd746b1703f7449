"""The vLLM engine inside its own process: arguments, runs, recovery after a failed step.

Imported only there.  ``_vllm_child`` owns the process and its pipe, ``_vllm_rank`` what each
rank does, ``_vllm_probe`` what is read from each step, ``_vllm_join`` how ranks become one.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from afd_testkit.engines import _vllm_join
from afd_testkit.engines._vllm_child import ChildStart, RunRequest
from afd_testkit.engines._vllm_rank import CALL, EXTENSION
from afd_testkit.engines.base import EngineError, Prompt, RunResult, SplitSetting

if TYPE_CHECKING:
    from afd_testkit.engines._vllm_compiled import GraphNotes
    from afd_testkit.faults import Fault


class ChildEngine:
    """The vLLM engine of this process, and the probes on its ranks."""

    def __init__(self, start: ChildStart, progress: Callable[[str], None]) -> None:
        self._start = start
        self._tokenizer: Any = None
        self._runs = 0
        progress("importing vLLM")
        import torch
        from vllm import EngineArgs, LLMEngine

        torch.set_num_threads(start.threads)
        if start.needs_amx and not torch.cpu._is_amx_tile_supported():
            raise EngineError(
                f"model {start.config.model} needs a CPU with AMX for its MLA kernels, and this "
                "CPU has none; use model deepseek-v3 instead, or run on such a CPU"
            )
        self._compiled: GraphNotes | None = None
        if start.config.compiled:
            from afd_testkit.engines._vllm_compiled import GraphNotes

            self._compiled = GraphNotes()
            self._compiled.install()
        if start.config.start_fault is not None:
            _inject_for_good(start.config.start_fault)
        progress("starting the engine")
        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**_engine_args(start)))
        self._ranks = self._all("install", start.scratch, start.config)
        self._facts = self._start_facts()

    def info(self) -> dict[str, Any]:
        """Facts that the parent keeps: versions, vocabulary, cache size, process ids."""
        from afd_testkit.engines._vllm_probe import stack_versions

        workers = {child.name: child.pid for child in multiprocessing.active_children()}
        return {
            **self._ranks[0],
            **self._start.backend.facts,
            "pid": os.getpid(),
            "workers": workers,
            "versions": stack_versions(self._start.backend.versioned),
        }

    def _all(self, action: str, *args: Any) -> list[Any]:
        """The answers of all ranks; :class:`EngineError` naming those that cannot give one."""
        answers = self._engine.collective_rpc(CALL, args=(action, *args))
        failed = [
            text if len(answers) == 1 else f"rank {rank}: {text}"
            for rank, (kind, text) in enumerate(answers)
            if kind == "error"
        ]
        if failed:
            raise EngineError("\n".join(failed))
        return [value for _, value in answers]

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids under the checkpoint's own tokenizer, no special token added."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(
                    self._start.model_path, local_files_only=True
                )
            except (OSError, ValueError) as error:
                raise EngineError(
                    f"the checkpoint {self._start.model_path} has no usable tokenizer ({error}); "
                    "give prompts as token_ids"
                ) from error
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return tuple(int(token) for token in encoded)

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes; refused by vLLM only while requests hold blocks."""
        if not self._engine.reset_prefix_cache():
            raise EngineError("vLLM refused to reset its prefix cache; the log says which blocks")

    def run(self, request: RunRequest) -> RunResult:
        """Submit, step until finished, and hand over what the probes saw."""
        self._runs += 1
        outputs: dict[str, Any] = {}
        stale = [block for block in self._all("held_blocks")[0] if self._is_free(block)]
        with self._fault(request.fault):
            started = time.perf_counter()
            names = self._submit(request.prompts)
            try:
                self._all("begin", names, stale, self._options(request), request.routing)
                while self._engine.has_unfinished_requests():
                    for output in self._engine.step():
                        outputs[names[output.request_id]] = output
                seen = _vllm_join.joined(self._all("end"))
            except BaseException:
                self._recover(list(names))
                raise
            seconds = time.perf_counter() - started
        results = tuple(
            _vllm_join.request_result(
                seen.requests.get(prompt.name),
                prompt,
                cached_tokens=int(outputs[prompt.name].num_cached_tokens),
                generated=tuple(int(t) for t in outputs[prompt.name].outputs[0].token_ids),
            )
            for prompt in request.prompts
        )
        facts = {
            "run": self._runs,
            "step_seconds": seen.seconds,
            "poisoned_blocks": len(stale),
            **{name: sorted(ways) for name, ways in seen.ways.items()},
            **self._facts,
            **({} if self._compiled is None else self._compiled.facts()),
            **self._start.backend.facts,
        }
        return RunResult(requests=results, steps=tuple(seen.steps), seconds=seconds, facts=facts)

    def _options(self, request: RunRequest) -> Mapping[str, Any]:
        """What the splitting worker is told for a run: how to split, and what never changes."""
        return {**_split_options(request.split), **dict(self._start.config.afd)}

    def _start_facts(self) -> dict[str, Any]:
        """Executions of the routing operator while the engine started, which profiles the model."""
        if self._start.config.worker != "afd":
            return {}
        from afd_plugin.routing import routing_calls

        calls = routing_calls()
        return {"start_balanced_routing": calls.balanced, "start_natural_routing": calls.natural}

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
        self._all("recover")
        self.reset_prefix_cache()

    @contextmanager
    def _fault(self, name: str | None) -> Generator[None, None, None]:
        """The fault ``name`` on every rank inside."""
        if name is None:
            yield
            return
        _known_fault(name)
        self._all("start_fault", name)
        try:
            yield
        finally:
            self._all("end_fault")


def _known_fault(name: str) -> Fault:
    """The fault of this name; :class:`EngineError` where there is none."""
    from afd_testkit.faults import FAULTS

    if name not in FAULTS:
        raise EngineError(f"unknown fault {name!r}; known: {', '.join(sorted(FAULTS))}")
    return FAULTS[name]


# Faults that were injected for as long as this process lives; collected, they would be undone.
_injected: list[AbstractContextManager[None]] = []


def _inject_for_good(name: str) -> None:
    """The fault ``name`` in this process from now on, before there is an engine to touch."""
    from afd_testkit.faults import NoTarget

    fault = _known_fault(name)
    if not fault.at_start:
        raise EngineError(
            f"the fault {name!r} is one of single runs; give it to run(), not to the start"
        )
    injected = fault.inject(NoTarget())
    injected.__enter__()
    _injected.append(injected)


def _split_options(split: SplitSetting) -> Mapping[str, Any]:
    """``split`` as the splitting worker is told."""
    return {
        "async_moe_ubatching": split.policy != "off",
        "async_moe_split": "request" if split.policy == "off" else split.policy,
        "async_moe_token_alignment": split.alignment,
        "async_moe_min_tokens": split.min_tokens,
    }


def _engine_args(start: ChildStart) -> dict[str, Any]:
    """vLLM's arguments for an :class:`EngineConfig`."""
    config = start.config
    step_tokens = config.step_tokens or config.max_step_tokens
    args: dict[str, Any] = {
        "model": start.model_path,
        "dtype": config.dtype,
        "seed": 0,
        "enforce_eager": not config.compiled,
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
        "worker_extension_cls": EXTENSION,
        **start.engine_args,
    }
    if config.worker == "afd":
        args["worker_cls"] = start.backend.afd_worker
        more = start.engine_args.get("additional_config", {})
        args["additional_config"] = {
            **more,
            "afd": {"async_moe_ubatching": True, **dict(config.afd)},
        }
    return args
