"""`oodometer list`: the cards of the detectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from rich.table import Table
from rich.text import Text

from oodometer.cli import OK, _terminal
from oodometer.detectors import Card, get, names

ABOUT = """
Every detector with what it needs, its parameters, its published search grid and
its named variants; with a name, one card in full.

example:
  oodometer list
  oodometer list knn vim
  oodometer list --json | jq '.[].name'
"""


@dataclass
class Options:
    """What to show, and how."""

    detectors: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME …]")] = ()
    """Show these cards in full (default: a table of all)."""
    json: bool = False
    """Print JSON instead of text."""


def main(arguments: list[str]) -> int:
    """Print the table, or the cards asked for."""
    options = _terminal.parse(Options, arguments, command="list", about=ABOUT)
    cards = [get(name).card for name in options.detectors or names()]
    if options.json:
        _terminal.write_json([facts(card) for card in cards])
    elif options.detectors:
        for card in cards:
            _print_card(card)
    else:
        _print_table(cards)
    return OK


def facts(card: Card) -> dict[str, Any]:
    """A card as plain data."""
    return {
        "name": card.name,
        "aliases": card.aliases,
        "title": card.title,
        "description": card.description,
        "equation": card.equation,
        "cite": card.cite,
        "needs": card.needs,
        "cost": card.cost,
        "parameters": [
            {"name": p.name, "default": p.default, "range": p.range, "choices": p.choices, "meaning": p.doc}
            for p in card.parameters
        ],
        "grid": card.grid,
        "variants": card.variants,
    }


def _print_table(cards: list[Card]) -> None:
    table = _terminal.plain_table()
    table.add_column("detector", style="bold", no_wrap=True)
    table.add_column("needs", max_width=16)
    table.add_column("cost", no_wrap=True)
    table.add_column("what it is · parameters", ratio=1)
    for card in cards:
        parameters = " ".join(f"{p.name}={_value(p.default)}" for p in card.parameters)
        what = Text(card.title)
        if parameters:
            what.append(f"\n{parameters}", style="dim")
        table.add_row(card.name, " ".join(sorted(card.needs)), card.cost, what)
    advice = Text(f"\n{len(cards)} detectors. `oodometer list NAME` explains one in full.", "dim")
    _terminal.show(table, advice)


def _print_card(card: Card) -> None:
    rows = {
        "equation": card.equation,
        "paper": card.cite,
        "needs": ", ".join(sorted(card.needs)),
        "cost": card.cost,
        "aliases": ", ".join(card.aliases),
        **{f"grid {name}": _listed(values) for name, values in card.grid.items()},
        **{f"preset {name}": _settings(values) for name, values in card.variants.items()},
    }
    parts: list[Any] = [Text.assemble((card.name, "bold"), "  ", card.title)]
    if card.description:
        parts.append(Text(card.description))
    parts.append(_two_columns({name: text for name, text in rows.items() if text}))
    if card.parameters:
        parts.append(_parameters(card))
    _terminal.show(*parts, Text(f"try: oodometer score … --detector {_example(card)}\n", "dim"))


def _two_columns(rows: dict[str, str]) -> Table:
    table = _terminal.plain_table()
    table.show_header = False
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, text in rows.items():
        table.add_row(f"  {name}", Text(text))
    return table


def _parameters(card: Card) -> Table:
    table = _terminal.plain_table()
    for title in ("  parameter", "default", "range", "meaning"):
        table.add_column(title, header_style="dim", no_wrap=title == "  parameter")
    for p in card.parameters:
        table.add_row(f"  {p.name}", Text(_value(p.default)), Text(p.range), Text(p.doc))
    return table


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _listed(values: tuple[Any, ...]) -> str:
    return ", ".join(map(_value, values))


def _settings(values: Any) -> str:
    return ", ".join(f"{name}={_value(value)}" for name, value in values.items()) or "the defaults"


def _example(card: Card) -> str:
    """A detector argument with one value of the grid, as the user would type it."""
    for name, values in card.grid.items():
        if values:
            return f"{card.name}:{name}={_value(values[-1])}"
    return card.name
