"""Text that comes with Python: the sources of modules of its standard library.

The modules are in every CPython from 3.11 on, in its library folder. Their text changes a little from version to
version, so a result is of the Python version that stands beside it.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["MODULES", "NUM_BYTES", "sequences"]

MODULES = (
    "argparse", "ast", "calendar", "cmd", "codecs", "configparser", "csv", "datetime", "decimal", "difflib", "dis",
    "doctest", "enum", "fractions", "ftplib", "functools", "gettext", "heapq", "imaplib", "inspect", "ipaddress",
    "locale", "mailbox", "optparse", "os", "pdb", "pickle", "pickletools", "platform", "plistlib", "pprint",
    "pydoc", "random", "shutil", "smtplib", "socket", "ssl", "statistics", "subprocess", "tarfile", "tempfile",
    "textwrap", "threading", "tokenize", "traceback", "turtle", "typing", "uuid", "zipfile",
)  # fmt: skip
"""Modules whose sources are the text, in this order."""

NUM_BYTES = 256
"""Different tokens: a token is a byte."""


def sequences(length: int, modules: tuple[str, ...] = MODULES) -> Tensor:
    """Cut the text into sequences of bytes.

    Args:
        length: Bytes of a sequence.
        modules: Whose sources to read; one that this Python keeps no source file of is left out.

    Returns:
        int64 tokens of shape (sequences, length); what is left at the end is dropped.

    Raises:
        FileNotFoundError: No source file was found at all.
    """
    text = b"".join(path.read_bytes() for path in map(_source, modules) if path.exists())
    if len(text) < length:
        raise FileNotFoundError(
            f"this Python has no sources of its standard library ({len(modules)} modules looked for): install them, "
            "or use a Python that comes with them"
        )
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64)
    return tokens[: len(tokens) // length * length].view(-1, length)


def _source(module: str) -> Path:
    # not by the import system, which knows no file of modules that are frozen into the interpreter
    return Path(sysconfig.get_path("stdlib"), f"{module}.py")
