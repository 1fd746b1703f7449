"""Adding the experts' results row by row, against the documented formula."""

from __future__ import annotations

import pytest
import torch

from afd_testkit.npu.errors import KernelLimit, NotEmulated
from afd_testkit.npu.limits import KINDS, relaxed
from afd_testkit.npu.ops.moe_finalize import npu_moe_finalize_routing

pytestmark = pytest.mark.cpu

ROWS, TOP_K, WIDTH, EXPERTS = 3, 2, 4, 5


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


VALUES = normal(ROWS * TOP_K, WIDTH)
SKIP1, SKIP2 = normal(ROWS, WIDTH, seed=1), normal(ROWS, WIDTH, seed=2)
BIAS = normal(EXPERTS, WIDTH, seed=3)
SCALES = normal(ROWS, TOP_K, seed=4)
PLACES = torch.tensor([4, 0, 2, 1, 5, 3], dtype=torch.int32)
CHOSEN = torch.tensor([[0, 3], [4, 1], [2, 2]], dtype=torch.int32)


def finalized(**changed: torch.Tensor | int | None) -> torch.Tensor:
    given = {
        "expanded_permuted_rows": VALUES,
        "skip1": SKIP1,
        "skip2": SKIP2,
        "bias": BIAS,
        "scales": SCALES,
        "expanded_src_to_dst_row": PLACES,
        "export_for_source_row": CHOSEN,
        **changed,
    }
    return npu_moe_finalize_routing(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("full", [False, True])
def test_finalize_is_its_formula(full: bool) -> None:
    bare: dict[str, None] = dict.fromkeys(("skip1", "skip2", "bias", "export_for_source_row"))
    got = finalized(**({} if full else bare))
    for i in range(ROWS):
        for column in range(WIDTH):
            exact = (SKIP1[i, column] + SKIP2[i, column]).item() if full else 0.0
            for j in range(TOP_K):
                value = VALUES[PLACES[j * ROWS + i], column].item()
                if full:
                    value += BIAS[CHOSEN[i, j], column].item()
                exact += SCALES[i, j].item() * value
            assert got[i, column].item() == pytest.approx(exact, abs=1e-5)


def test_without_scales_it_reorders() -> None:
    got = npu_moe_finalize_routing(VALUES, None, None, None, None, PLACES, None)
    assert torch.equal(got, VALUES[[4, 0, 2, 1, 5, 3]])


def test_no_rows_give_no_rows() -> None:
    got = npu_moe_finalize_routing(
        VALUES[:0].half(), SKIP1[:0].half(), None, None, SCALES[:0].half(), PLACES[:0], None
    )
    assert (got.shape, got.dtype) == ((0, WIDTH), torch.float16)


@pytest.mark.parametrize(
    ("kind", "changed", "says"),
    [
        ("layout", {"skip1": None}, "skip2 is given without skip1"),
        ("layout", {"expanded_permuted_rows": normal(7, WIDTH)}, "has 7 rows for 6 entries"),
        ("dtype", {"skip1": SKIP1.half()}, "skip1 is float16"),
        ("dtype", {"bias": BIAS.half()}, "bias is float16"),
        ("dtype", {"scales": SCALES.half()}, "scales is float16"),
    ],
)
def test_limits_and_their_relaxation(
    kind: str, changed: dict[str, torch.Tensor | None], says: str
) -> None:
    with pytest.raises(KernelLimit, match=f"{says}.*kind '{kind}'"):
        finalized(**changed)
    with relaxed(kind):
        assert finalized(**changed).shape == (ROWS, WIDTH)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"export_for_source_row": None}, "without export_for_source_row"),
        ({"expanded_permuted_rows": VALUES.double()}, "expanded_permuted_rows is float64"),
        ({"expanded_permuted_rows": VALUES[0]}, r"expanded_permuted_rows has shape \[4\]"),
        ({"expanded_src_to_dst_row": PLACES.float()}, "expanded_src_to_dst_row is float32"),
        ({"expanded_src_to_dst_row": PLACES.long()}, "expanded_src_to_dst_row is int64"),
        ({"expanded_src_to_dst_row": PLACES - 1}, r"holds \[3, -1, 1"),
        ({"expanded_src_to_dst_row": PLACES + 1}, "there are 6 rows"),
        ({"expanded_src_to_dst_row": PLACES.view(3, 2)}, r"expanded_src_to_dst_row \[3, 2\]"),
        ({"expanded_src_to_dst_row": PLACES[:5]}, r"scales has shape \[3, 2\] for 5"),
        ({"scales": SCALES[0]}, r"scales has shape \[2\]"),
        ({"skip1": SKIP1.expand(5, ROWS, WIDTH)}, r"skip1 has shape \[5, 3, 4\]"),
        ({"skip1": SKIP1[:1]}, r"skip1 has shape \[1, 4\]"),
        ({"skip2": SKIP2[:, :1]}, r"skip2 has shape \[3, 1\]"),
        ({"bias": BIAS[:, :1]}, r"bias has shape \[5, 1\]"),
        ({"bias": BIAS[0]}, r"bias has shape \[4\]"),
        ({"bias": BIAS[:4]}, "there are 4 rows of bias"),
        ({"export_for_source_row": CHOSEN - 1}, "export_for_source_row holds"),
        ({"export_for_source_row": CHOSEN[:1]}, r"export_for_source_row has shape \[1, 2\]"),
        ({"export_for_source_row": CHOSEN.long()}, "export_for_source_row is int64"),
    ],
)
def test_what_has_no_result_is_refused_even_relaxed(
    changed: dict[str, torch.Tensor | None], says: str
) -> None:
    with relaxed(*KINDS), pytest.raises(KernelLimit, match=says):
        finalized(**changed)


def test_other_modes_have_no_reference() -> None:
    with pytest.raises(NotEmulated, match="drop_pad_mode=1"):
        finalized(drop_pad_mode=1)
