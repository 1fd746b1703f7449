"""Looks at the splitting worker from inside its engine's process, and makes stages fail.

Run by ``test_worker_vllm`` in a process of the fork server, by path; the global ``arguments``
holds a ``ChildStart``, prompts, and the file for what was found (JSON).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from afd_plugin.context import current_stage
from afd_testkit.engines._vllm_child import (
    FIXED_ENVIRONMENT,
    ChildStart,
    RunRequest,
    _end_with_parent,
    _log_to,
)
from afd_testkit.engines.base import Prompt, RunResult, SplitSetting

BAD_OPTIONS = {
    "unknown": {"async_moe_ubatching": True, "async_moe_spilt": "token"},
    "type": {"async_moe_ubatching": True, "async_moe_min_tokens": "8"},
    "value": {"async_moe_ubatching": True, "async_moe_num_ubatches": 3},
    "refused": {"async_moe_ubatching": True, "compute_gate_on_attention": True},
    "no mapping": ["token"],
}
TOKEN = SplitSetting("token")


class StageFailed(Exception):
    """What the tests raise inside a stage."""


class Inside:
    """The engine, and what of it may be looked at."""

    def __init__(self, start: ChildStart, prompts: Sequence[Prompt]) -> None:
        # Imports vLLM, so only once the environment is set.
        from afd_testkit.engines._vllm_engine import ChildEngine

        self.engine = ChildEngine(start, print)
        self.prompts = tuple(prompts)
        self.worker = self.engine._engine.model_executor.driver_worker.worker
        self.runner = self.worker.model_runner
        self.groups = [group for groups in self.runner.attn_groups for group in groups]
        self.builders = [list(group.metadata_builders) for group in self.groups]

    def run(self, split: SplitSetting = TOKEN) -> RunResult:
        self.engine.reset_prefix_cache()
        return self.engine.run(RunRequest(self.prompts, split, None))

    def state(self) -> dict[str, bool]:
        """What must hold between steps, after success and after failure."""
        from vllm import forward_context

        return {
            "no forward context": forward_context._forward_context is None,
            "no step": self.runner._afd_step is None,
            "no stage": current_stage() is None,
            "own builders": all(
                len(group.metadata_builders) == len(own)
                and all(a is b for a, b in zip(group.metadata_builders, own, strict=True))
                for group, own in zip(self.groups, self.builders, strict=True)
            ),
        }

    def failure(self, fault: Callable[[], Any]) -> dict[str, Any]:
        """A run in which ``fault`` holds: its error, evidence and the state it leaves."""
        raised: BaseException | None = None
        with fault():
            try:
                self.run()
            except StageFailed as error:
                raised = error
        evidence = self.worker.afd_take_evidence()
        state = self.state()
        again = self.run()
        return {
            "error": None if raised is None else str(raised),
            "notes": list(getattr(raised, "__notes__", [])),
            "evidence": evidence,
            "state": state,
            "same_again": self.same(again, self.reference),
            "evidence_again": [step.evidence for step in again.steps],
        }

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

    @contextmanager
    def failing_head(self) -> Iterator[None]:
        """The model's head raises, when both stages have returned."""

        def compute_logits(hidden_states: Any) -> None:
            raise StageFailed("head")

        self.runner.model.compute_logits = compute_logits
        try:
            yield
        finally:
            del self.runner.model.compute_logits

    @staticmethod
    def same(one: RunResult, other: RunResult) -> bool:
        """Equal to the last bit: log-probabilities, hidden states, KV rows, tokens."""
        return all(
            (a.logprobs == b.logprobs).all()
            and (a.hidden == b.hidden).all()
            and all((x == y).all() for x, y in zip(a.kv, b.kv, strict=True))
            and a.greedy_token == b.greedy_token
            for a, b in zip(one.requests, other.requests, strict=True)
        )

    def look(self) -> dict[str, Any]:
        """What each stage of one split step is given."""
        from vllm.forward_context import get_forward_context

        built: list[list[Any]] = []
        seen: list[tuple[int | None, Any]] = []
        originals = [(b, b.build) for own in self.builders for b in own]

        def watched(index: int, build: Callable[..., Any]) -> Callable[..., Any]:
            def watch(prefix: int, common: Any, **kwargs: Any) -> Any:
                built.append([index, int(common.num_actual_tokens)])
                return build(prefix, common, **kwargs)

            return watch

        def hook(module: Any, args: Any) -> None:
            seen.append((current_stage(), get_forward_context()))

        whole_step: list[Any] = []
        forward = self.runner._model_forward

        def watched_forward(**inputs: Any) -> Any:
            whole_step.append(get_forward_context().attn_metadata)
            return forward(**inputs)

        self.runner._model_forward = watched_forward
        handle = self.runner.model.model.layers[0].register_forward_pre_hook(hook)
        for index, (builder, build) in enumerate(originals):
            builder.build = watched(index, build)
        try:
            self.run()
        finally:
            del self.runner._model_forward
            handle.remove()
            for builder, _ in originals:
                del builder.build
        (first, one), (second, two) = seen
        layers = sorted(one.attn_metadata)
        return {
            "stages": [first, second],
            "metadata_of_the_whole_step": whole_step,
            "built": built,
            "layers": layers,
            "layers_of_model": sorted(self.runner.kv_cache_config.kv_cache_groups[0].layer_names),
            "contexts_differ": one is not two,
            "metadata_differ": all(
                one.attn_metadata[layer] is not two.attn_metadata[layer] for layer in layers
            ),
            "tokens": [
                [context.attn_metadata[layer].num_actual_tokens for layer in layers]
                for context in (one, two)
            ],
            "slots": [len(context.slot_mapping[layers[0]]) for context in (one, two)],
        }

    def bad_options(self) -> dict[str, Any]:
        """Each refused set of options: the error, and whether the old options still hold."""
        found = {}
        self.worker.afd_configure({"async_moe_ubatching": True, "async_moe_split": "token"})
        before = self.worker._afd_config
        for name, options in BAD_OPTIONS.items():
            try:
                self.worker.afd_configure(options)
            except Exception as error:
                found[name] = {
                    "error": type(error).__name__,
                    "text": str(error),
                    "kept": self.worker._afd_config is before and self.runner.afd_config is before,
                }
        return found

    def report(self) -> dict[str, Any]:
        """Everything, in one engine."""
        self.reference = self.run(SplitSetting("off"))
        found: dict[str, Any] = {
            "builders": [len({id(builder) for builder in own}) for own in self.builders],
            "kinds": sorted({type(b).__name__ for own in self.builders for b in own}),
            "state_after_success": self.state(),
            "look": self.look(),
            "bad_options": self.bad_options(),
            "head": self.failure(self.failing_head),
        }
        for stage in (0, 1):
            found[f"layer {stage}"] = self.failure(lambda s=stage: self.failing_layer(s))
            found[f"builder {stage}"] = self.failure(lambda s=stage: self.failing_builder(s))
        return found


def main(start: ChildStart, prompts: Sequence[Prompt], out: str) -> None:
    """Start the engine of this process, look, and write the report."""
    _log_to(start.log_path)
    _end_with_parent()
    tempfile.tempdir = start.scratch
    os.environ.update({**FIXED_ENVIRONMENT, **start.environment})
    os.environ["OMP_NUM_THREADS"] = str(start.threads)
    report = Inside(start, prompts).report()
    with open(out, "w", encoding="utf-8") as file:
        json.dump(report, file)
    # Nothing is left to save; taking engine and interpreter apart would take seconds.
    os._exit(0)


if __name__ == "__main__":
    main(*globals()["arguments"])
