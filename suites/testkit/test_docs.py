"""Every Python example of the README and the docs runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
EXAMPLES = [
    pytest.param(page, match, id=f"{page.name}:{page.read_text()[: match.start()].count(chr(10))}")
    for page in PAGES
    for match in FENCE.finditer(page.read_text())
]


@pytest.mark.parametrize(("page", "match"), EXAMPLES)
def test_example_runs(
    page: Path, match: re.Match[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(match[1], str(page), "exec"), {"__name__": "example"})


def test_pages_with_code_were_found() -> None:
    assert {"README.md", "flow.md", "engines.md"} <= {page.name for page in PAGES}
    assert len(EXAMPLES) >= 6


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []
