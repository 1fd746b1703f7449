"""What another project tests with afd-testkit: its operator, and the routing operator."""

from dataclasses import replace

import pytest
import torch
from scaled_add import SCALED_ADD

from afd_plugin.routing import ROUTING_OP, bound_runtime, script_runtime
from afd_testkit.library import OpCase, OpContractBroken, assert_op_contract

pytestmark = pytest.mark.cpu

CASES = [
    OpCase("odd rows", (torch.zeros(7, 3), torch.ones(7, 3), 0.5)),
    OpCase("no rows", (torch.zeros(0, 3), torch.ones(0, 3), 0.5)),
    OpCase("half precision", (torch.zeros(4).half(), torch.ones(4).half(), 2.0)),
    OpCase("every second column", (torch.zeros(4, 6)[:, ::2], torch.ones(4, 3), 2.0)),
]


def test_values(op_library):
    op = op_library.register(SCALED_ADD)
    out = torch.tensor([1.0, 2.0])
    op(out, torch.tensor([10.0, 20.0]), 0.5)
    assert out.tolist() == [6.0, 12.0]


def test_contract(op_library):
    op_library.register(SCALED_ADD)
    assert_op_contract(SCALED_ADD, CASES)


def test_the_contract_finds_a_mutation_that_is_not_declared(op_library):
    wrong = replace(SCALED_ADD, mutates=())
    op_library.register(wrong)
    with pytest.raises(OpContractBroken, match="arguments afterwards"):
        assert_op_contract(wrong, CASES[:1], backends=["aot_eager"])


def test_the_production_operator(op_library):
    """The very definition that workers register; a script's context variable is its flag."""
    op_library.register(ROUTING_OP)
    ids = torch.zeros(7, 2, dtype=torch.int32)
    with bound_runtime(script_runtime()):
        assert_op_contract(ROUTING_OP, [OpCase("forced", (ids, 8, True))], backends=["aot_eager"])


def test_nothing_is_left():
    assert not SCALED_ADD.is_registered
    assert not ROUTING_OP.is_registered
