"""What commands print: JSON or tables on standard output, progress and notes on standard error."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from rich.console import Console

Tell = Callable[[str], None]
"""Says what is being done now."""


def console() -> Console:
    """A console on standard output as it is now; names of modules and files are no markup."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def say(text: str, *, style: str | None = None) -> None:
    """A line on standard output, which the terminal may break but we do not."""
    console().print(text, style=style, soft_wrap=True)


def write_json(payload: Mapping[str, Any]) -> None:
    """Print a payload as indented JSON."""
    sys.stdout.write(json.dumps(payload, indent=2) + "\n")


def note(text: str) -> None:
    """A line on standard error that is no error."""
    sys.stderr.write(f"lightning-offload: {text}\n")


@contextlib.contextmanager
def progress(what: str) -> Iterator[Tell]:
    """A spinner on standard error with what is being done; silent where that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(what) as status:
        yield lambda text: status.update(text)


def write_file(option: str, path: Path, text: str) -> None:
    """Write a text file.

    Raises:
        UnsupportedError: It cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UnsupportedError(
            f"{option} {str(path)!r} cannot be written: {error.strerror or error}; name another file"
        ) from None


def check_writable(option: str, path: Path | None) -> None:
    """Check that a file can be written, before the work is done.

    Raises:
        UnsupportedError: Its folder does not exist, or it is a folder itself.
    """
    if path is None:
        return
    try:
        is_folder, is_in_folder = path.is_dir(), path.absolute().parent.is_dir()
    except OSError as error:  # of a folder on the way there, or of the name
        raise UnsupportedError(
            f"{option} {str(path)!r} cannot be written: {error.strerror}; name another file"
        ) from None
    if is_folder or not is_in_folder:
        what = "is a folder" if is_folder else f"lies in {str(path.parent)!r}, which is no folder"
        raise UnsupportedError(f"{option} {str(path)!r} {what}: name a file in a folder that exists")
