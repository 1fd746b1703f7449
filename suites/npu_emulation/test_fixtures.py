"""``npu_stubs`` and ``npu_device``, under the leak guard that watches every test here."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
import torch

from afd_testkit.npu.errors import EmulationConflict, NotEmulated
from afd_testkit.npu.fixtures import NpuDevice
from afd_testkit.npu.install import Emulation, emulated, installed
from afd_testkit.npu.process import emulated_environment
from afd_testkit.npu.settings import EmulationSettings

pytestmark = pytest.mark.cpu


def test_stubs_import_and_compute(npu_stubs: Emulation) -> None:
    import torch_npu

    assert torch_npu.npu.device_count() == npu_stubs.settings.devices
    with pytest.raises(NotEmulated, match=r"torch_npu\.npu_quant_matmul"):
        torch_npu.npu_quant_matmul(torch.zeros(1))
    assert not hasattr(torch_npu, "npu_of_another_version")


def test_a_device_computes_and_says_what_it_is(npu_device: NpuDevice) -> None:
    x = torch.arange(4.0).to(npu_device.device)
    assert (x * 2).cpu().tolist() == [0, 2, 4, 6]
    assert torch.npu.is_available()
    assert npu_device.name.startswith("Ascend")
    assert npu_device.emulated is (npu_device.device.type == "cpu")


def test_both_at_once_stubs_first(npu_stubs: Emulation, npu_device: NpuDevice) -> None:
    assert npu_stubs is installed()
    assert npu_device.emulated
    assert torch.zeros(1, device="npu").device.type == "cpu"


def test_both_at_once_device_first(npu_device: NpuDevice, npu_stubs: Emulation) -> None:
    assert npu_stubs is installed()
    assert torch.zeros(1, device="npu:1").device == npu_device.device


def test_the_device_goes_and_the_stubs_stay(npu_stubs: Emulation) -> None:
    with emulated() as inner:
        assert inner is npu_stubs
        assert torch.zeros(1, device="npu").device.type == "cpu"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="npu")
    assert importlib.import_module("torch_npu").npu is torch.npu
    with emulated():
        assert torch.zeros(1, device="npu").device.type == "cpu"


@pytest.mark.usefixtures("npu_stubs")
def test_other_settings_conflict_and_the_remedy_is_said() -> None:
    with (
        pytest.raises(EmulationConflict, match=r"soc='A2'.*soc='A3'.*Leave the settings out"),
        emulated(EmulationSettings(soc="A3")),
    ):
        pass


WHOLE = """
def test_stubs(npu_stubs):
    import torch_npu
    assert torch_npu.npu.device_count() == 3

def test_device(npu_device):
    assert npu_device.emulated

def test_both(npu_device, npu_stubs):
    import torch
    assert torch.zeros(1, device="npu").device.type == "cpu"

def test_by_hand():
    from afd_testkit.npu.install import emulated, installed
    with emulated() as emulation:
        assert emulation is installed()
    import torch
    assert torch.zeros(1, device="npu").device.type == "cpu"
"""


def test_in_a_process_that_is_emulated_as_a_whole(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile("import pytest\npytestmark = pytest.mark.cpu\n" + WHOLE)
    settings = EmulationSettings(devices=3)
    for name, value in emulated_environment(settings, dict(os.environ)).items():
        monkeypatch.setenv(name, value)
    ran = pytester.runpytest_subprocess("-q")
    ran.assert_outcomes(passed=4)


def test_what_a_test_leaves_on_is_an_error_behind_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch, torch.distributed as dist
        pytestmark = pytest.mark.cpu

        def test_default_device(npu_device):
            torch.set_default_device("npu")

        def test_group(npu_device, tmp_path):
            dist.init_process_group("hccl", f"file://{tmp_path}/store", rank=0, world_size=1)

        def test_they_are_off_by_now():
            assert not dist.is_initialized()
            assert not hasattr(torch, "npu")
            with torch.device("meta"):
                assert torch.zeros(1).is_meta
            assert torch.zeros(1).device.type == "cpu"
        """
    )
    ran = pytester.runpytest_subprocess("-q", "-p", "no:randomly")
    ran.assert_outcomes(passed=3, errors=2)
    ran.stdout.fnmatch_lines(["*left on *torch.set_default_device('cpu'), undone by None*"])
    ran.stdout.fnmatch_lines(["*left on *destroy_process_group()*"])


def test_nothing_is_left_by_now() -> None:
    assert not hasattr(torch, "npu")
    assert "torch_npu" not in sys.modules


def test_the_leak_guard_sees_nothing_left(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch
        pytestmark = pytest.mark.cpu

        @pytest.mark.parametrize("time", [1, 2])
        def test_stubs(npu_stubs, time):
            import torch_npu

        @pytest.mark.parametrize("time", [1, 2])
        def test_device(npu_device, time):
            import torch_npu, acl.rt
            torch.npu.set_device(1)
            assert torch.ops.npu.npu_swiglu(torch.zeros(1, 2, device="npu")).shape == (1, 1)

        def test_a_leak_would_be_seen():
            torch.npu = 1
        """
    )
    ran = pytester.runpytest_subprocess("-q", "-p", "no:randomly")
    ran.assert_outcomes(passed=5, errors=1)
    ran.stdout.fnmatch_lines(["*test_a_leak_would_be_seen left the process changed:*"])


def test_the_plugin_brings_the_fixtures_and_no_torch() -> None:
    code = (
        "import sys; import afd_testkit.plugin, afd_testkit.npu.fixtures as f; "
        "print([name for name in ('torch', 'vllm') if name in sys.modules], "
        "'npu_stubs' in vars(f), 'npu_device' in vars(f))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("[] True True\n", "")
