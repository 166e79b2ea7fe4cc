"""Writes `docs/methods/`: one page a detector and an index, from the cards in the code (`python docs/cards.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oodometer.detectors import Card, Parameter, get, names

FOLDER = Path(__file__).parent / "methods"
COSTS = {
    "elementwise": "a pass over the rows",
    "head": "a product with the classifier's head",
    "classes": "a whitening and a product with the class means",
    "subspace": "an eigendecomposition and a projection",
    "search": "a product with the whole training bank",
}


def pages() -> dict[str, str]:
    """File names and their content."""
    cards = [get(name).card for name in names()]
    return {"index.md": index(cards)} | {f"{card.name}.md": page(card) for card in cards}


def index(cards: list[Card]) -> str:
    """All detectors in one table."""
    rows = [
        [f"[{card.name}]({card.name}.md)", card.title, ", ".join(f"`{need}`" for need in sorted(card.needs)), card.cost]
        for card in cards
    ]
    return (
        "# Methods\n\nEvery detector gives one score a row, **higher = more out of distribution**. "
        "`oodometer list NAME` prints the same cards.\n\n" + table(["detector", "what it is", "reads", "cost"], rows)
    )


def page(card: Card) -> str:
    """One card in full."""
    facts = [
        ["reads", ", ".join(f"`{need}`" for need in sorted(card.needs))],
        ["cost", f"{card.cost}: {COSTS[card.cost]}"],
        ["paper", f"`{card.cite}`"],
        *([["also called", ", ".join(f"`{alias}`" for alias in card.aliases)]] if card.aliases else []),
    ]
    parts = [
        f"# {card.name}\n\n{card.title}",
        card.description,
        f"Score: {card.equation}",
        table(["", ""], facts),
        "## Parameters\n\n" + parameters(card) if card.parameters else "It has no parameters.",
        "## Published search grid\n\n" + grid(card) if card.grid else "",
        "## Published variants\n\n" + variants(card) if card.variants else "",
        f"## Use\n\n```python\nscores = oodometer.create({card.name!r}).fit(train).score(test)\n```\n\n"
        f"```bash\noodometer score --train train.npz --test test.npz --detector {card.name} --out scores\n```",
    ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def parameters(card: Card) -> str:
    return table(
        ["parameter", "default", "allowed", "meaning"],
        [[f"`{p.name}`", f"`{shown(p.default)}`", escaped(allowed(p)), escaped(p.doc)] for p in card.parameters],
    )


def allowed(parameter: Parameter) -> str:
    return parameter.range or parameter.kind


def grid(card: Card) -> str:
    return table(["parameter", "values"], [[f"`{k}`", ", ".join(map(shown, v))] for k, v in card.grid.items()])


def variants(card: Card) -> str:
    rows = [
        [f"`preset={name!r}`", ", ".join(f"`{k}={v!r}`" for k, v in params.items()) or "the defaults"]
        for name, params in card.variants.items()
    ]
    return table(["preset", "what it sets"], rows)


def table(titles: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def escaped(text: str) -> str:
    return text.replace("|", r"\|")


def shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Write the pages; pages of detectors that no longer exist are removed."""
    FOLDER.mkdir(exist_ok=True)
    wanted = pages()
    for path in FOLDER.glob("*.md"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
