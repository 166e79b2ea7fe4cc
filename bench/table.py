"""A Markdown table printed line by line, as its rows are measured."""

from __future__ import annotations


class Table:
    """Prints its header at once and every row when it comes."""

    def __init__(self, *titles: str) -> None:
        self._notes: list[str] = []
        self._line(titles)
        self._line("---" for _ in titles)

    def row(self, *cells: str) -> None:
        self._line(cells)

    def note(self, text: str) -> None:
        print(f"<!-- {text} -->", flush=True)

    def _line(self, cells: object) -> None:
        print("| " + " | ".join(cells) + " |", flush=True)  # type: ignore[call-overload]
