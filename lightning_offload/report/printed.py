"""Results that print as tables: by ``print``, by rich, and in a notebook.

A result derives from :class:`Printed` and says in ``__rich__`` what is shown of it; the rest follows from that. Rich is
imported when something is shown, not before.
"""

from __future__ import annotations

import abc
import io
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

__all__ = ["Printed", "PrintedTables"]

_HTML_WIDTH = 100  # characters
_PRE = (
    "<pre style=\"white-space:pre;overflow-x:auto;line-height:normal;font-family:Menlo,'DejaVu Sans Mono',consolas,"
    "'Courier New',monospace\">{code}</pre>"
)


class Printed(abc.ABC):
    """A result that shows itself as tables; its ``repr`` stays the one that programs and tests read."""

    __slots__ = ()

    @abc.abstractmethod
    def __rich__(self) -> RenderableType:
        """What is shown of it, by ``rich.print`` and in all that follows here."""

    def __str__(self) -> str:
        """The same as text without colours and blanks at the ends of lines.

        Lines are as wide as the terminal, 80 characters where there is none; boxes are drawn in ASCII where standard
        output is no Unicode.
        """
        from rich.console import Console

        file = _Lines()
        console = Console(file=file, color_system=None, highlight=False, force_jupyter=False)
        console.print(self.__rich__())
        lines = "\n".join(line.rstrip() for line in file.getvalue().rstrip().split("\n"))
        return lines.encode(file.encoding, errors="replace").decode(file.encoding)

    def _repr_html_(self) -> str:
        """The same as a block of HTML, for a notebook; names of the user's are text in it."""
        from rich.console import Console

        console = Console(file=io.StringIO(), width=_HTML_WIDTH, record=True, highlight=False, force_jupyter=False)
        console.print(self.__rich__())
        return console.export_html(inline_styles=True, code_format=_PRE)


class PrintedTables(Printed):
    """Several things that rich can show, one below the other."""

    __slots__ = ("_parts",)

    def __init__(self, *parts: RenderableType) -> None:
        self._parts = parts

    def __rich__(self) -> Group:
        """All of them."""
        from rich.console import Group

        return Group(*self._parts)


class _Lines(io.StringIO):
    """Text for standard output: tells rich its encoding."""

    @property
    def encoding(self) -> str:  # type: ignore[override]  # of a text file it can be written, which nobody does
        return getattr(sys.stdout, "encoding", None) or "utf-8"
