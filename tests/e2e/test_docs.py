"""The documentation runs: Python blocks are executed in order, and what they print is what the page shows."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


NETWORKS = {"extraction", "network-scores", "training"}


@pytest.mark.filterwarnings("ignore::oodometer.errors.OodometerWarning")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=[pytest.mark.torch] * (page.stem in NETWORKS)) for page in PAGES],
)
def test_what_a_page_prints_is_what_it_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    printed = ""
    for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(text, f"{page.name}", "exec"), names)
            printed = out.getvalue()
        elif kind == "text" and printed:
            assert printed.strip() == text.strip()
            printed = ""


def test_the_method_cards_are_those_of_the_code() -> None:
    spec = importlib.util.spec_from_file_location("cards", ROOT / "docs" / "cards.py")
    assert spec is not None
    assert spec.loader is not None
    cards = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cards)
    written = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "methods").glob("*.md")}
    assert written == cards.pages(), "run `python docs/cards.py`"
