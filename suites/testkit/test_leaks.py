"""The leak guard: a test that leaks is named, the next is not, honest ones are left alone."""

from __future__ import annotations

import textwrap

import pytest

pytestmark = pytest.mark.cpu

#: In the order of the file, without plugins whose import would blur the picture.
QUIET = (
    *("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"),
    *("-p", "no:xdist", "-rE"),
)
HEAD = """
import os, sys, types
from unittest.mock import MagicMock

import pytest
import torch

from afd_plugin import routing

THREADS = torch.get_num_threads()
KEPT = []  # context managers that are never left; collected, they would be
"""


def run(pytester: pytest.Pytester, *functions: str) -> pytest.RunResult:
    body = "\n".join(textwrap.dedent(text) for text in functions)
    pytester.makepyfile(test_inner=HEAD + body)
    return pytester.runpytest_inprocess(*QUIET)


#: What a test does, the entry it leaves, and what must hold again in the next test.
LEAKS = {
    "mock module": (
        'sys.modules["torch_npu"] = MagicMock()',
        "sys.modules: 'torch_npu' was added (<MagicMock*",
        '"torch_npu" not in sys.modules',
    ),
    "empty module": (
        'sys.modules["torch_npu"] = types.ModuleType("torch_npu")',
        "sys.modules: 'torch_npu' was added (a module, 'torch_npu')",
        '"torch_npu" not in sys.modules',
    ),
    "None for a module": (
        'sys.modules["torch_npu"] = None',
        "sys.modules: 'torch_npu' was added (None)",
        '"torch_npu" not in sys.modules',
    ),
    "alias": (
        'sys.modules["torch_npu"] = os',
        "sys.modules: 'torch_npu' was added (a module, 'os')",
        '"torch_npu" not in sys.modules',
    ),
    "replaced module": (
        'sys.modules["json"] = types.ModuleType("json")',
        "sys.modules: 'json' was changed from a module, 'json' to a module, 'json'",
        'sys.modules["json"].__spec__ is not None',
    ),
    "module imported anew": (
        'del sys.modules["json"]; import json',
        "sys.modules: 'json' was changed from a module, 'json' to a module, 'json'",
        'sys.modules["json"] is json',
    ),
    "removed module": (
        'del sys.modules["json"]',
        "sys.modules: 'json' was removed (it was a module, 'json')",
        '"json" in sys.modules',
    ),
    "set variable": (
        'os.environ["AFD_LEAK"] = "secret"',
        "os.environ: 'AFD_LEAK' was added (a new value)",
        '"AFD_LEAK" not in os.environ',
    ),
    "changed variable": (
        'os.environ["HOME"] += "/x"',
        "os.environ: 'HOME' was changed from its old value to a new value",
        'not os.environ["HOME"].endswith("/x")',
    ),
    "unset variable": (
        'del os.environ["HOME"]',
        "os.environ: 'HOME' was removed (it was its old value)",
        '"HOME" in os.environ',
    ),
    "torch attribute": (
        'torch.npu = MagicMock(name="npu")',
        "torch: 'npu' was added (<MagicMock*",
        'not hasattr(torch, "npu")',
    ),
    "torch function": (
        "torch.manual_seed = lambda seed: None",
        "torch: 'manual_seed' was changed from <function manual_seed*to <function *lambda*",
        'torch.manual_seed.__module__ == "torch.random"',
    ),
    "torch.cuda function": (
        "torch.cuda.is_available = lambda: True",
        "torch.cuda: 'is_available' was changed from*",
        "not torch.cuda.is_available()",
    ),
    "torch.accelerator function": (
        "del torch.accelerator.synchronize",
        "torch.accelerator: 'synchronize' was removed*",
        'hasattr(torch.accelerator, "synchronize")',
    ),
    "torch.nn.functional function": (
        "torch.nn.functional.gelu = lambda x: x",
        "torch.nn.functional: 'gelu' was changed from <built-in *gelu> to <function *lambda*",
        'torch.nn.functional.gelu.__name__ == "gelu"',
    ),
    "method added to tensors": (
        "torch.Tensor.npu = lambda self: self",
        "torch.Tensor: 'npu' was added (<function *lambda*",
        'not hasattr(torch.Tensor, "npu")',
    ),
    "property added to tensors": (
        "torch.Tensor.is_npu = property(lambda self: True)",
        "torch.Tensor: 'is_npu' was added (<property *",
        'not hasattr(torch.Tensor, "is_npu")',
    ),
    "inherited tensor method hidden": (
        "torch.Tensor.cpu = lambda self: self",
        "torch.Tensor: 'cpu' was added (<function *lambda*",
        '"cpu" not in vars(torch.Tensor) and torch.ones(1).cpu().item() == 1',
    ),
    "tensor method removed": (
        "del torch.Tensor.backward",
        "torch.Tensor: 'backward' was removed (it was <function Tensor.backward*",
        'torch.Tensor.backward.__module__ == "torch._tensor"',
    ),
    "static method of tensors": (
        "torch.Tensor.__torch_function__ = None",
        "torch.Tensor: '__torch_function__' was changed from <classmethod* to None",
        "torch.Tensor.__torch_function__.__self__ is torch.Tensor",
    ),
    "module method": (
        "torch.nn.Module.to = lambda self, *a: self",
        "torch.nn.Module: 'to' was changed from <function Module.to* to <function *lambda*",
        'torch.nn.Module.to.__name__ == "to"',
    ),
    "gradients": (
        "torch.set_grad_enabled(False)",
        "torch defaults: 'gradients' was changed from True to False",
        "torch.is_grad_enabled()",
    ),
    "deterministic with warnings": (
        'torch.set_deterministic_debug_mode("warn")',
        "torch defaults: 'deterministic' was changed from 0 to 1",
        "torch.get_deterministic_debug_mode() == 0",
    ),
    "number of threads": (
        "torch.set_num_threads(torch.get_num_threads() + 1)",
        "torch defaults: 'threads' was changed from * to *",
        "torch.get_num_threads() == THREADS",
    ),
    "default dtype": (
        "torch.set_default_dtype(torch.float64)",
        "torch defaults: 'dtype' was changed from torch.float32 to torch.float64",
        "torch.get_default_dtype() is torch.float32",
    ),
    "seed": (
        "torch.manual_seed(20240229)",
        "torch defaults: 'seed' was changed from * to 20240229",
        "torch.initial_seed() != 20240229",
    ),
    "runtime left bound": (
        "context = routing.bound_runtime(routing.script_runtime()); context.__enter__(); "
        "KEPT.append(context)",
        "afd_plugin.routing: 'bound_runtime' was changed from None to RoutingRuntime*",
        "routing._process.runtime is None",
    ),
    "profile flag left set": (
        "context = routing.profile_run(); context.__enter__(); KEPT.append(context)",
        "afd_plugin.routing: 'profile_run' was changed from False to True",
        "routing.script_runtime().in_profile_run() is False",
    ),
    "watcher left": (
        "routing._process.watchers.append(print)",  # as watch_routing does that is never left
        "afd_plugin.routing: 'watch_routing[[]0[]]' was added (<built-in function print>)",
        "routing._process.watchers == []",
    ),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_named_and_undone(pytester: pytest.Pytester, name: str) -> None:
    statement, told, restored = LEAKS[name]
    # json is imported before the test, so that it can be removed and replaced
    result = run(
        pytester,
        "import json",
        f"def test_leaky(): {statement}",
        f"def test_next(): assert {restored}",
    )
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        ["test_inner.py::test_leaky left the process changed:", f"  {told}"]
    )
    result.stdout.fnmatch_lines(["ERROR test_inner.py::test_leaky*"])
    assert "secret" not in result.stdout.str().split("left the process changed")[1]


def test_the_routing_operator_is_watched_before_it_is_imported(pytester: pytest.Pytester) -> None:
    """In a process of its own, which has not imported it yet."""
    pytester.makepyfile(
        test_inner="""
        def test_leaky():
            from afd_plugin import routing
            routing.profile_run().__enter__()
            routing._process.runtime = routing.script_runtime()
        """
    )
    result = pytester.runpytest_subprocess(*QUIET)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["  afd_plugin.routing: 'bound_runtime' was changed from None to*"])


def test_deterministic_algorithms_are_turned_off_again(pytester: pytest.Pytester) -> None:
    """In a process of its own, since it imports torch's compiler, which cannot be done twice."""
    pytester.makepyfile(
        test_inner=HEAD
        + textwrap.dedent(
            """
            def test_leaky(): torch.use_deterministic_algorithms(True)
            def test_next():
                assert not torch.are_deterministic_algorithms_enabled()
                assert not torch._inductor.config.deterministic
            """
        )
    )
    result = pytester.runpytest_subprocess(*QUIET)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        [
            "test_inner.py::test_leaky left the process changed:",
            "  torch defaults: 'deterministic' was changed from 0 to 2",
        ]
    )


def test_what_is_scoped_is_no_leak(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        def test_monkeypatch(monkeypatch):
            monkeypatch.setitem(sys.modules, "torch_npu", MagicMock())
            monkeypatch.setenv("AFD_LEAK", "1")
            monkeypatch.delenv("HOME", raising=False)
            monkeypatch.setattr(torch, "npu", MagicMock(), raising=False)
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
            monkeypatch.setattr(torch.nn.functional, "gelu", lambda x: x)
            monkeypatch.setattr(torch.Tensor, "npu", lambda self: self, raising=False)
            monkeypatch.setattr(torch.Tensor, "__torch_function__", None)
            monkeypatch.delattr(torch.Tensor, "backward")
            monkeypatch.setattr(torch.nn.Module, "to", lambda self: self)

        def test_without_gradients():
            with torch.no_grad():
                assert not torch.is_grad_enabled()

        @pytest.fixture
        def switches():
            torch.set_deterministic_debug_mode("error")
            torch.set_num_threads(THREADS + 1)
            yield
            torch.set_deterministic_debug_mode("default")
            torch.set_num_threads(THREADS)

        def test_switches(switches):
            torch.ones(3).sum()

        @pytest.fixture
        def double():
            torch.set_default_dtype(torch.float64)
            yield
            torch.set_default_dtype(torch.float32)

        def test_fixture(double):
            assert torch.ones(1).dtype is torch.float64

        def test_forked_generator():
            with torch.random.fork_rng():
                torch.manual_seed(7)

        def test_drawing_numbers():
            torch.rand(3)

        def test_routing():
            with routing.bound_runtime(routing.script_runtime()), routing.profile_run():
                with routing.watch_routing(print):
                    pass

        def test_real_imports():
            import colorsys, wave
            assert "colorsys" in sys.modules
        """,
    )
    result.assert_outcomes(passed=8)


def test_a_leaking_fixture_is_seen_at_its_test(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        @pytest.fixture
        def stub():
            sys.modules["torch_npu"] = MagicMock()

        def test_user(stub): pass
        def test_next(): assert "torch_npu" not in sys.modules
        """,
    )
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["test_inner.py::test_user left the process changed:"])


def test_leaks_of_failing_and_skipped_tests_are_named_too(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        def test_fails():
            os.environ["AFD_LEAK"] = "1"
            assert 0

        @pytest.fixture
        def broken():
            yield
            os.environ["AFD_LEAK"] = "1"
            raise ValueError("teardown broke")

        def test_breaks(broken): pass
        """,
    )
    result.assert_outcomes(passed=1, failed=1, errors=2)
    result.stdout.fnmatch_lines_random(
        [
            "test_inner.py::test_fails left the process changed:",
            "*ValueError: teardown broke",
            "*test_inner.py::test_breaks left the process changed:",
        ]
    )


def test_wide_fixtures_own_their_changes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_outer="import os\ndef test_after(): assert 'AFD_WIDE' not in os.environ"
    )
    result = run(
        pytester,
        """
        @pytest.fixture(scope="module", params=["1", "2"])
        def variable(request):
            os.environ["AFD_WIDE"] = request.param
            yield request.param
            del os.environ["AFD_WIDE"]

        @pytest.fixture(scope="session", autouse=True)
        def seeded():
            with torch.random.fork_rng():
                torch.manual_seed(1234)
                yield

        def test_one(variable): assert os.environ["AFD_WIDE"] == variable
        def test_two(variable): assert os.environ["AFD_WIDE"] == variable
        """,
    )
    result.assert_outcomes(passed=5)


def test_a_wide_fixture_that_does_not_clean_up_is_named(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        @pytest.fixture(scope="class")
        def variable():
            os.environ["AFD_WIDE"] = "1"

        class TestIt:
            def test_one(self, variable): pass
            def test_two(self, variable): pass

        def test_next(): assert "AFD_WIDE" not in os.environ
        """,
    )
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(
        ["class fixture 'variable' left the process changed:", "  os.environ: 'AFD_WIDE' *"]
    )
    result.stdout.fnmatch_lines(["ERROR test_inner.py::TestIt::test_two*"])


def test_importing_a_test_file_must_not_leak(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_a=HEAD + 'sys.modules["torch_npu"] = MagicMock()\ndef test_one(): pass',
        test_b=HEAD + 'def test_two(): assert "torch_npu" not in sys.modules',
    )
    result = pytester.runpytest_inprocess(*QUIET, "--continue-on-collection-errors")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        ["test_a.py left the process changed:", "  sys.modules: 'torch_npu' was added*"]
    )


PACKAGE = {
    # imported by a test: may register operators, patch torch, make modules without a spec
    "afd_zoo/__init__.py": """
        import sys, types, torch
        library = torch.library.Library("afd_zoo", "DEF")
        library.define("twice(Tensor x) -> Tensor")
        library.define("\\n    thrice(Tensor x) -> Tensor")
        sys.modules["afd_alias"] = sys.modules["afd_zoo"]
        sys.modules["afd_zoo.made"] = types.ModuleType("afd_zoo.made")
        def patched(): pass
        torch.cuda.afd_zoo = patched
        torch.Tensor.afd_zoo = property(lambda self: 1)
        torch.Tensor.afd_static = staticmethod(patched)

        @torch.library.custom_op("afd_zoo_custom::once", mutates_args=())
        def once(x: torch.Tensor) -> torch.Tensor:
            return x.clone()
    """,
    "vllm/__init__.py": 'import os; os.environ["TRITON_CACHE_AUTOTUNING"] = "1"',
    "vllm/forward_context.py": "_forward_context = None",
    "test_zoo.py": """
        import sys
        import torch
        KEPT = []

        def test_package():
            import afd_zoo
            import vllm.forward_context

        def test_mock():
            from unittest import mock
            torch.cuda.afd_mock = mock.MagicMock()

        def test_library():
            KEPT.append(torch.library.Library("afd_leak", "DEF"))
            KEPT[-1].define("one(Tensor x) -> Tensor")

        def test_custom():
            @torch.library.custom_op("afd_leak::two", mutates_args=())
            def two(x: torch.Tensor) -> torch.Tensor:
                return x.clone()
            KEPT.append(two)

        def test_scoped():
            with torch.library._scoped_library("afd_scoped", "DEF") as library:
                library.define("three(Tensor x) -> Tensor")

        def test_context():
            sys.modules["vllm.forward_context"]._forward_context = object()

        def test_next():
            assert sys.modules["vllm.forward_context"]._forward_context is None
    """,
}


def test_operators_and_forward_context(pytester: pytest.Pytester) -> None:
    """In a process of its own, since torch keeps operators to the end."""
    for name, text in PACKAGE.items():
        path = pytester.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    pytester.makeini("[pytest]\npythonpath = .")
    result = pytester.runpytest_subprocess(*QUIET)
    result.assert_outcomes(passed=7, errors=4)
    result.stdout.fnmatch_lines(
        [
            "test_zoo.py::test_mock left the process changed:",
            "  torch.cuda: 'afd_mock' was added*",
            "test_zoo.py::test_library left the process changed:",
            "  torch.ops: 'afd_leak::one' was added*",
            "test_zoo.py::test_custom left the process changed:",
            "  torch.ops: 'afd_leak::two' was added*",
            "test_zoo.py::test_context left the process changed:",
            "  vllm.forward_context: '_forward_context' was changed from None to <object*",
        ]
    )


def test_works_beside_randomly_and_hypothesis(pytester: pytest.Pytester) -> None:
    """Both reseed Python's and numpy's generators; torch's seed is the test's own business."""
    pytester.makepyfile(
        test_inner=HEAD
        + textwrap.dedent(
            """
            import random
            from hypothesis import given, settings, strategies as st

            @settings(max_examples=5, database=None, deadline=None)
            @given(st.integers())
            def test_property(n):
                random.seed(n)
                torch.rand(1)

            def test_leaky(): torch.manual_seed(20240229)
            """
        )
    )
    result = pytester.runpytest_inprocess("-p", "randomly", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["test_inner.py::test_leaky left the process changed:"])


def test_workers_name_the_test_as_well(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_a='import os\ndef test_one(): os.environ["AFD_LEAK"] = "1"',
        test_b='import os\ndef test_two(): assert "AFD_LEAK" not in os.environ',
    )
    result = pytester.runpytest_subprocess("-p", "no:randomly", "-p", "no:hypothesispytest", "-n1")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["test_a.py::test_one left the process changed:"])
