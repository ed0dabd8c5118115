"""Where a report goes: a file that is there in full or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from lightning_offload.errors import ReportFileError

__all__ = ["check_path", "write_text"]


def check_path(path: str | os.PathLike[str], suffixes: tuple[str, ...]) -> Path:
    """Check that a report can be written, before the work of making it.

    Args:
        path: Where to; links are followed.
        suffixes: The allowed extensions, the usual one first.

    Returns:
        The path that will be written.

    Raises:
        ReportFileError: Wrong extension, no file that can be written, or a folder that cannot.
    """
    given = Path(path)
    name = str(given)
    if given.is_dir():
        raise ReportFileError(f"{name!r} is a folder: name a file in it, such as {str(given / f'plan{suffixes[0]}')!r}")
    if given.suffix.lower() not in suffixes:
        fix = str(given.with_suffix(suffixes[0])) if given.name else f"plan{suffixes[0]}"
        raise ReportFileError(f"{name!r} must end in {' or '.join(suffixes)}: write to {fix!r}")
    target = Path(os.path.realpath(given))
    if target.exists() and not target.is_file():
        raise ReportFileError(f"{name!r} is no regular file: name another")
    folder = target.parent
    if not folder.is_dir():
        raise ReportFileError(f"{name!r} is in the folder {str(folder)!r}, which does not exist: create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ReportFileError(f"{name!r} is in the folder {str(folder)!r}, which is not writable: name another")
    return target


def write_text(target: Path, text: str) -> None:
    """Write a file under another name and rename it, so that readers see all of it or what was there before.

    Raises:
        ReportFileError: The disk is full, or the folder went away.
    """
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        why = error.strerror or str(error)
        raise ReportFileError(f"{str(target)!r} cannot be written ({why}): free space there or name another") from error
