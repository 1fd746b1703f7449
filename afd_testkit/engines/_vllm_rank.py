"""What every rank of a vLLM engine does for the adapter: observe, poison, configure, fault.

vLLM mixes :class:`ProbeExtension` into its worker (``worker_extension_cls``) and reaches all
ranks with ``collective_rpc``.  Results cross process boundaries: plain data, numpy arrays.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from afd_testkit.engines._vllm_child import describe, write_stacks_to
from afd_testkit.engines.base import EngineConfig, EngineError, RoutingSetting

EXTENSION = "afd_testkit.engines._vllm_rank.ProbeExtension"
CALL = "afd_testkit_call"


class ProbeExtension:
    """Mixed into vLLM's worker class; one method, so that no name of the worker's is taken."""

    def afd_testkit_call(self, action: str, *args: Any) -> tuple[str, Any]:
        """``("result", value)`` or ``("error", text)``: vLLM would make text of an exception,
        and lose which rank it came from."""
        try:
            holder = vars(self)
            if action == "install":
                holder["_afd_testkit_rank"] = RankProbe(self, *args)
            rank: RankProbe = holder["_afd_testkit_rank"]
            return "result", getattr(rank, action)(*(() if action == "install" else args))
        except EngineError as error:
            traceback.print_exc()
            return "error", str(error)
        except Exception as error:
            traceback.print_exc()
            return "error", describe(error)


class RankProbe:
    """One rank: its worker, its probe, and the fault that is injected now."""

    def __init__(self, worker: Any, scratch: str, config: EngineConfig) -> None:
        from afd_testkit.engines._vllm_probe import StepProbe

        self._worker = worker
        self._splits = config.worker == "afd"
        self._fault = ExitStack()
        # Workers that were started afresh, not forked, have no handler yet.
        write_stacks_to(scratch)
        self._probe = StepProbe(worker.model_runner, config, full=int(worker.rank) == 0)
        self._probe.install()

    def install(self) -> dict[str, Any]:
        """Facts of this rank, known once it is there."""
        import torch

        runner = self._worker.model_runner
        return {
            "pid": os.getpid(),
            "vocab_size": int(runner.model_config.get_vocab_size()),
            "attention": self._probe.attention_backends(),
            "kv_blocks": int(runner.kv_cache_config.num_blocks),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        }

    def held_blocks(self) -> list[int]:
        """Blocks that were held by a request since they were last poisoned."""
        return self._probe.held_blocks()

    def begin(
        self,
        names: Mapping[str, str],
        stale: Sequence[int],
        options: Mapping[str, Any],
        routing: RoutingSetting,
    ) -> None:
        """Before a run: poison ``stale`` blocks, set the worker's options, observe ``names``."""
        self._probe.poison(stale)
        if self._splits:
            self._worker.afd_take_evidence()
            self._worker.afd_configure(dict(options))
        self._probe.begin(names, routing)

    def end(self) -> Any:
        """What was seen since :meth:`begin`, with the evidence of the splitter."""
        observed = self._probe.end()
        return (
            observed.with_evidence(self._worker.afd_take_evidence()) if self._splits else observed
        )

    def start_fault(self, name: str) -> None:
        """Inject a fault of ``afd_testkit.faults`` until :meth:`end_fault`."""
        from afd_testkit.engines._vllm_faults import VllmFaultTarget
        from afd_testkit.faults import FAULTS

        target = self._fault.enter_context(VllmFaultTarget(self._worker.model_runner))
        self._fault.enter_context(FAULTS[name].inject(target))

    def end_fault(self) -> None:
        """Take the fault out."""
        self._fault.close()

    def recover(self) -> None:
        """After a failed step, forget what it left half done."""
        self._probe.abandon()
        self._worker.model_runner.execute_model_state = None
