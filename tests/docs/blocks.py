"""The blocks of code in README.md and docs, and what these say is printed.

What follows a block of Python as a block of text is what it prints. `<!-- figures vary -->` before it: but for the
numbers, which are those of one run, and lines of a report that are there where something is swapped, or where the plan
is not final yet. A line of three dots in a block of a terminal stands for lines left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"(<!-- figures vary -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_AT_TIMES = re.compile(r"│ (State|Waiting for copies|Host memory, most in use|Replans|Replays that differed) ")
_OF_THIS_MACHINE = re.compile(r"[│┃] Engine ")
_NUMBER = re.compile(r"[+-]?\d[\d.,]*( ?([KMGT]i)?B| [mu]?s|%)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block.

    Attributes:
        line: Of its first line in the page.
        language: What stands behind the fence; "" where nothing does.
        text: What is between the fences.
        is_exact: Whether numbers in it are the same in each run.
    """

    line: int
    language: str
    text: str
    is_exact: bool


def name_of(page: Path) -> str:
    """A page's path from the root of the checkout."""
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(line=text.count("\n", 0, found.start(3)) + 1, language=found[2], text=found[3], is_exact=found[1] is None)
        for found in _BLOCK.finditer(text)
    ]


def commands_of(page: Path) -> Iterator[str]:
    """The commands that a page shows, as they are typed, comments and what they print left out."""
    for block in blocks_of(page):
        if block.language == "sh":
            lines = block.text
        elif block.language == "console":
            lines = "".join(re.findall(r"^\$ (.*?(?:\\\n.*?)*\n)", block.text, re.MULTILINE))
        else:
            continue
        for line in lines.replace("\\\n", " ").splitlines():
            for command in re.split(r"&&|\|", line.split("  #")[0].split(" # ")[0]):
                if command.strip():
                    yield command.strip()


def shown(text: str, *, is_exact: bool) -> str:
    """A text as it is compared: without space at the ends of lines; if it is not exact, without numbers too."""
    lines = [line.rstrip() for line in text.strip().splitlines()]
    if is_exact:
        return "\n".join(lines)
    lines = [line for line in lines if not (_AT_TIMES.match(line) or _OF_THIS_MACHINE.match(line))]
    return "\n".join(re.sub(r"[\s━─]+", " ", _NUMBER.sub("0", line)) for line in lines)
