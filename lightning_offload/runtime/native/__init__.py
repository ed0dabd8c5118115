"""The engine of planned steps: a native core where it can be had, else Python, which gives the same bits.

:func:`load` gives the core. The first recorded or planned step of a process asks for it; nothing is built or imported
before. Where it cannot be had one warning says why, and how to mend it, and steps go on in Python. The answer is
remembered in this process and in those forked from it.

``LIGHTNING_OFFLOAD_ENGINE`` is read at each call: "python" takes no core, "native" goes on with nothing less, and empty
or unset takes what there is. Where builds lie: :mod:`~lightning_offload.runtime.native.builds`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import threading
from pathlib import Path
from types import ModuleType

from lightning_offload.errors import PolicyError, UnsupportedError

__all__ = ["engine", "import_core", "load", "why_python"]

_log = logging.getLogger(__name__)
_ENGINE = "LIGHTNING_OFFLOAD_ENGINE"
_BUILD_ANEW = "run lightning-offload build-native --force"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    core: ModuleType | None
    why: str = ""
    mend: str = ""


once = threading.RLock()
"""Held where the core is found or installed: steps may begin in several threads."""
_answer: _Answer | None = None
"""What this process found; None before it was asked."""


def load() -> ModuleType | None:
    """The core for this process, built if need be; None where steps run in Python.

    Raises:
        PolicyError: ``LIGHTNING_OFFLOAD_ENGINE`` is no engine's name.
        UnsupportedError: It is "native", and there is no core.
    """
    global _answer
    wish = os.environ.get(_ENGINE, "")
    if wish not in ("", "python", "native"):
        raise PolicyError(f"{_ENGINE}={wish!r} is not known: choose one of 'python', 'native', or leave it out")
    if wish == "python":
        return None
    if _answer is None:
        with once:
            _answer = _answer or _found(is_told=wish == "native")
    if wish == "native" and _answer.core is None:
        raise UnsupportedError(
            f"{_ENGINE}='native' cannot be had: {_answer.why}; {_answer.mend or 'choose another'}, or leave it out"
        )
    return _answer.core


def is_loaded() -> bool:
    """Whether this process has the core by now, and may use it."""
    return _answer is not None and _answer.core is not None and os.environ.get(_ENGINE) != "python"


def give_up(why: str) -> None:
    """Go on in Python from now on.

    Args:
        why: What is wrong, for reports.
    """
    global _answer
    _answer = _Answer(core=None, why=why)


def why_python() -> str:
    """Why steps run in Python, in a few words; "" where they run in the core. Builds nothing."""
    if os.environ.get(_ENGINE) == "python":
        return f"{_ENGINE}=python"
    return _answer.why if _answer is not None else "no step was planned yet"


def engine() -> str:
    """What planned steps run in, for reports: "native", or "python: " and why. Builds nothing."""
    why = why_python()
    return f"python: {why}" if why else "native"


def import_core(path: Path) -> ModuleType:
    """Import a library that was built.

    Args:
        path: The library.

    Raises:
        ImportError: It is for another torch or Python, or no such library.
    """
    spec = importlib.util.spec_from_file_location(f"{__name__}._core", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no extension module")
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    if not isinstance(core.abi(), int):
        raise ImportError(f"{path} does not tell its version")
    return core


def _found(*, is_told: bool) -> _Answer:
    """Find or build the core.

    Args:
        is_told: Whether an error tells what a warning would.
    """
    from lightning_offload.runtime.native import build, builds  # the package is imported where nothing is built

    why = build.why_not()
    if why:
        return _Answer(core=None, why=why)
    try:
        path = builds.ensure()
    except build.BuildError as error:
        answer = _Answer(core=None, why=error.why, mend=error.mend)
    except Exception as error:  # a failed build ends no training
        answer = _Answer(core=None, why=f"the build failed: {_line(error)}", mend=_BUILD_ANEW)
    else:
        try:
            return _Answer(core=import_core(path))
        except Exception as error:  # undefined symbols, a C library of another machine, a damaged file
            answer = _Answer(core=None, why=f"the native core does not load: {_line(error)}", mend=_BUILD_ANEW)
    if not is_told and os.environ.get("RANK", "0") == "0":
        _log.warning(
            "planned steps run in Python: %s; those that recompute take the host 3 to 5 times what a plain step takes, "
            "and less in the native core; to have it, %s",
            answer.why,
            answer.mend,
        )
    return answer


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
