"""Installing the emulation, and taking all of it out again."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.library import Library
from torch.overrides import _get_current_function_mode_stack

from afd_testkit.npu import accelerator, install
from afd_testkit.npu.errors import EmulationConflict, NotEmulated
from afd_testkit.npu.finder import install_adjustments
from afd_testkit.npu.install import emulated
from afd_testkit.npu.patches import PatchSet
from afd_testkit.npu.settings import EmulationSettings

pytestmark = pytest.mark.cpu

CLOSED = ("torch_npu", "torch_npu.npu", "torch_npu.profiler", "acl.rt")
NAMESPACES = ("npu", "atb", "_C_ascend")


def state() -> dict[str, Any]:
    """Everything that an installation touches, by what it is."""
    return {
        "meta_path": list(sys.meta_path),
        "modules": sorted(
            name
            for name in sys.modules
            if name.split(".")[0] in ("torch_npu", "acl") or name == "torch.npu"
        ),
        "torch": dict(vars(torch)),
        "torch.version": dict(vars(torch.version)),
        "torch.accelerator": dict(vars(torch.accelerator)),
        "Tensor": dict(vars(torch.Tensor)),
        "Module": dict(vars(torch.nn.Module)),
        "Library.impl": Library.impl,
        "Thread.start": threading.Thread.start,
        "dist": (dist.init_process_group, dist.new_group, dist.is_hccl_available)
        if hasattr(dist, "is_hccl_available")
        else (dist.init_process_group, dist.new_group),
        "c10d": (c10d.init_process_group, c10d.new_group),
        "gloo": dict(vars(c10d.ProcessGroupGloo)),
        "modes": list(_get_current_function_mode_stack()),
        "operators": sorted(
            name for name in torch.library._defs if name.split("::")[0] in NAMESPACES
        ),
        "accelerator": torch._C._get_accelerator,
        "installed": install.installed(),
    }


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Every test here must leave all of it as it was."""
    # vars(torch) fills itself: what torch loads lazily is loaded first.
    with emulated():
        pass
    before = state()
    yield
    after = state()
    for what, value in before.items():
        assert after[what] == value, what


def test_inside_everything_is_there() -> None:
    before = state()
    with emulated() as emulation:
        for name in CLOSED:
            assert importlib.import_module(name) is sys.modules[name]
        import torch_npu

        assert torch.npu is torch_npu.npu is sys.modules["torch.npu"]
        assert install.installed() is emulation
        assert emulation.mode in _get_current_function_mode_stack()
        now = state()
        for what in ("meta_path", "Thread.start", "Library.impl", "dist", "c10d", "accelerator"):
            assert now[what] != before[what], what


def test_twice_in_one_process() -> None:
    for soc in ("A2", "A3"):
        with emulated(EmulationSettings(soc=soc)) as emulation:
            assert torch.zeros(1, device="npu").device.type == "cpu"
            assert torch.ops.npu.npu_swiglu(torch.zeros(2, 4)).shape == (2, 2)
            assert emulation.settings.soc == soc


def test_one_inside_another_is_the_same() -> None:
    with emulated(EmulationSettings(devices=2)) as outer:
        for settings in (None, EmulationSettings(devices=2)):
            with emulated(settings) as inner:
                assert inner is outer
        with emulated(device=False) as inner:
            assert inner is outer
        assert torch.zeros(1, device="npu").device.type == "cpu"


def test_a_second_installation_is_refused_and_does_no_harm() -> None:
    with emulated():
        with pytest.raises(EmulationConflict, match="installed in this process already"):
            install.install()
        assert torch.zeros(1, device="npu").device.type == "cpu"
        assert importlib.import_module("torch_npu").npu is torch.npu


def test_what_stands_in_the_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = ModuleType("torch_npu")
    monkeypatch.setitem(sys.modules, "torch_npu", stranger)
    with (
        pytest.raises(EmulationConflict, match=r"torch_npu is loaded .*afd-testkit emulate"),
        emulated(),
    ):
        pass
    assert sys.modules["torch_npu"] is stranger
    assert install.installed() is None
    monkeypatch.undo()


def test_a_failure_half_way_undoes_the_first_half(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("half way")

    with monkeypatch.context() as patched:
        patched.setattr(accelerator, "install", fail)
        with pytest.raises(OSError, match="half way"), emulated():
            pass
    with emulated():
        assert torch.zeros(1, device="npu").device.type == "cpu"


def test_an_error_inside_undoes_it_too() -> None:
    with pytest.raises(ZeroDivisionError), emulated():
        _ = 1 // 0


def test_modules_alone_leave_torch_alone() -> None:
    with emulated(device=False):
        import torch_npu

        # A row of (3, 4) has mean square 12.5.
        normal, rstd = torch_npu.npu_rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0)
        assert torch.allclose(rstd, torch.tensor([[12.5**-0.5]]))
        assert torch.allclose(normal, torch.tensor([[3.0, 4.0]]) * 12.5**-0.5)
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(1, device="npu")
        assert not hasattr(torch.ops.npu, "npu_rms_norm")
        assert _get_current_function_mode_stack() == []


# Changes and their undoing.


class Base:
    inherited = "base"


class Derived(Base):
    own = "own"


def test_a_patch_set_undoes_everything_the_last_first() -> None:
    patches, order, table = PatchSet(), [], {"a": 1}
    patches.later(lambda: order.append("first"))
    patches.attribute(Derived, "own", "new")
    patches.attribute(Derived, "own", "newer")
    patches.attribute(Derived, "inherited", "new")
    patches.entry(table, "a", 2)
    patches.entry(table, "b", 3)
    patches.later(lambda: order.append("last"))
    assert (Derived.own, Derived.inherited, table) == ("newer", "new", {"a": 2, "b": 3})
    patches.restore()
    assert (Derived.own, Derived.inherited, table) == ("own", "base", {"a": 1})
    assert "inherited" not in vars(Derived)
    assert order == ["last", "first"]
    patches.restore()
    assert order == ["last", "first"]


def test_an_error_in_one_undo_does_not_keep_the_others() -> None:
    patches, done = PatchSet(), []
    patches.later(lambda: done.append("earlier"))
    patches.later(lambda: done.remove("never there"))
    with pytest.raises(ExceptionGroup) as caught:
        patches.restore()
    assert done == ["earlier"]
    assert [type(error) for error in caught.value.exceptions] == [ValueError]


# Adjusting other modules.


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to import from; what was imported from it is forgotten again."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (file := getattr(sys.modules[name], "__file__", None)) and str(tmp_path) in file:
            del sys.modules[name]
    monkeypatch.undo()


def test_a_module_is_adjusted_once_it_has_been_executed(package: Path) -> None:
    (package / "afd_late.py").write_text("value = 1\n")
    (package / "afd_other.py").write_text("value = 1\n")
    patches, seen = PatchSet(), []

    def adjust(module: Any) -> None:
        seen.append(module.value)
        patches.attribute(module, "value", 2)

    install_adjustments(patches, {"afd_late": adjust})
    late, other = importlib.import_module("afd_late"), importlib.import_module("afd_other")
    assert (late.value, other.value, seen) == (2, 1, [1])
    assert importlib.import_module("afd_late") is late
    assert seen == [1]
    patches.restore()
    assert late.value == 1


def test_a_module_that_is_loaded_is_adjusted_at_once(package: Path) -> None:
    (package / "afd_early.py").write_text("value = 1\n")
    early = importlib.import_module("afd_early")
    patches = PatchSet()
    install_adjustments(
        patches, {"afd_early": lambda module: patches.attribute(module, "value", 2)}
    )
    assert early.value == 2
    patches.restore()
    assert early.value == 1


def fake_ascend(package: Path) -> None:
    """As much of the real package as the adjustments name."""
    for folder in ("vllm_ascend", "vllm_ascend/worker"):
        (package / folder).mkdir()
        (package / folder / "__init__.py").write_text("")
    (package / "vllm_ascend" / "_build_info.py").write_text("__device_type__ = 'A2'\n")


@pytest.mark.parametrize("soc", ["A2", "A3"])
def test_the_build_says_the_soc_that_is_emulated(package: Path, soc: str) -> None:
    fake_ascend(package)
    with emulated(EmulationSettings(soc=soc)):
        info = importlib.import_module("vllm_ascend._build_info")
        assert info.__device_type__ == soc
    assert info.__device_type__ == "A2"


def test_a_kernel_that_went_elsewhere_is_noticed(package: Path) -> None:
    fake_ascend(package)
    (package / "vllm_ascend" / "worker" / "block_table.py").write_text("")
    with (
        emulated(),
        pytest.raises(NotEmulated, match=r"block_table no longer has _compute_slot_mapping_kernel"),
    ):
        importlib.import_module("vllm_ascend.worker.block_table")


# Operators as torch.ops.


def test_operators_of_the_compiled_extension_exist_and_refuse() -> None:
    with emulated():
        x = torch.zeros(2, 3, dtype=torch.float16)
        with pytest.raises(NotEmulated, match=r"_C_ascend\.npu_hc_pre_inv_rms\(float16\[2, 3\]"):
            torch.ops._C_ascend.npu_hc_pre_inv_rms(x)


def test_registrations_for_the_device_go_to_the_host() -> None:
    with emulated(), torch.library._scoped_library("afd_install", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "PrivateUse1")
        assert torch.ops.afd_install.twice(torch.ones(2)).tolist() == [2, 2]
    with torch.library._scoped_library("afd_install", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "PrivateUse1")
        with pytest.raises(NotImplementedError):
            torch.ops.afd_install.twice(torch.ones(2))


def test_operators_without_a_reference_exist_and_refuse() -> None:
    with emulated():
        with pytest.raises(NotEmulated, match=r"npu_mish\(float16\[2, 3\]\): .* no reference"):
            torch.ops.npu.npu_mish(torch.zeros(2, 3, dtype=torch.float16))
        assert not hasattr(torch.ops.npu, "npu_of_another_version")
        # One that has a reference is that reference alone.
        assert torch.ops.npu.npu_rms_norm.overloads() == ["default"]
