"""Which topologies may split a step: start-up and planning give one answer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from afd_plugin.batch import ScheduledBatch
from afd_plugin.config import AFDConfig
from afd_plugin.decision import decide_step
from afd_plugin.topology import ONE_RANK, Topology, unsupported_sizes

pytestmark = pytest.mark.cpu

# PCP, DCP, TP, tokens sharded, whole tokens proved; what is said of it, empty where supported.
TABLE = [
    (1, 1, 1, False, False, ""),
    (2, 1, 1, False, False, "prefill_context_parallel_size is 2"),
    (1, 4, 1, False, True, "decode_context_parallel_size is 4"),
    (1, 1, 2, True, False, ""),
    (1, 1, 2, False, True, ""),
    (1, 1, 8, False, False, "tensor_parallel_size is 8"),
    (2, 1, 2, False, False, "prefill_context_parallel_size is 2, tensor_parallel_size is 2"),
]


@pytest.mark.parametrize("policy", ["token", "request"])
@pytest.mark.parametrize(("pcp", "dcp", "tp", "sharded", "proved", "detail"), TABLE)
def test_planning_follows_the_same_answer(
    pcp: int, dcp: int, tp: int, sharded: bool, proved: bool, detail: str, policy: str
) -> None:
    given = Topology(pcp, dcp, tp, tokens_sharded=sharded, whole_tokens_proved=proved)
    assert bool(unsupported_sizes(given)) == bool(detail)
    batch = ScheduledBatch(np.array([40, 60]), np.array([0, 0]))
    config = AFDConfig(async_moe_ubatching=True, async_moe_split=policy)
    evidence = decide_step(batch, config, (), given).evidence(forwards=(), completed=False)
    assert (evidence.detail or "") == detail
    assert evidence.reason == ("topology" if detail else None)
    assert evidence.cut == (None if detail else {"token": 50, "request": 40}[policy])


@pytest.mark.parametrize(("tp", "sharded", "aligned"), [(1, False, 1), (4, False, 1), (4, True, 4)])
def test_alignment(tp: int, sharded: bool, aligned: int) -> None:
    given = dataclasses.replace(ONE_RANK, tensor_parallel_size=tp, tokens_sharded=sharded)
    assert given.token_alignment == aligned
