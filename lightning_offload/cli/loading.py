"""Finds what a command line names by ``MODULE:ATTRIBUTE``, with errors of one line for all that can be wrong."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from typing import Any

from lightning_offload.errors import UnsupportedError

_EXAMPLE = "write MODULE:ATTRIBUTE, such as torch.nn:Transformer"


def load_attribute(text: str, what: str) -> Any:
    """Import a module and take an attribute of it.

    Args:
        text: ``package.module:name``, ``package.module:Class.name`` or ``file.py:name``; the current directory is
            searched first.
        what: What it is meant to be, for messages.

    Raises:
        UnsupportedError: Malformed, not there, or its import failed.
    """
    name, separator, attribute = text.partition(":")
    if not separator or not name or not attribute or ":" in attribute:
        raise UnsupportedError(f"{what} {text!r} is not understood: {_EXAMPLE}")
    found = _import(name, what)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UnsupportedError(_no_attribute(found, part, text, what))
        found = getattr(found, part)
    return found


def check_callable(target: Any, text: str, what: str) -> None:
    """Check that something can be called without arguments.

    Raises:
        UnsupportedError: It has parameters that need one.
    """
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # some of C have none
        return
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in optional]
    if needed:
        raise UnsupportedError(
            f"{what} {text!r} needs the arguments {', '.join(needed)}: name a function without required arguments, "
            "which calls it"
        )


def _import(name: str, what: str) -> Any:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return _import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == name or name.startswith(f"{missing}."):
            raise UnsupportedError(
                f"{what}: there is no module {missing!r} in {here!r} or among the installed packages; {_EXAMPLE}"
            ) from None
        raise UnsupportedError(f"{what}: importing {name!r} failed: {error}; install what it needs") from error
    except (Exception, SystemExit) as error:
        raise UnsupportedError(f"{what}: importing {name!r} failed: {describe(error)}") from error


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickling look it up
    spec.loader.exec_module(module)
    return module


def _no_attribute(owner: Any, part: str, text: str, what: str) -> str:
    public = [name for name in dir(owner) if not name.startswith("_")]
    close = difflib.get_close_matches(part, public, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(public[:12])}"
    name = getattr(owner, "__name__", type(owner).__name__)
    return f"{what} {text!r}: {name!r} has no attribute {part!r}; {hint}"


def describe(error: BaseException) -> str:
    """An exception of somebody else's in one line: its type and the first line that says something."""
    if isinstance(error, SystemExit):
        return f'it ends the program by sys.exit({error.code!r}); guard what runs with `if __name__ == "__main__":`'
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
