"""``npu_stubs`` and ``npu_device``, under the leak guard that watches every test here."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from afd_testkit.npu.errors import EmulationConflict, NotEmulated
from afd_testkit.npu.fixtures import NpuDevice
from afd_testkit.npu.install import Emulation, emulated

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


@pytest.mark.usefixtures("npu_stubs")
def test_both_at_once_are_refused() -> None:
    with pytest.raises(EmulationConflict), emulated():
        pass


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
