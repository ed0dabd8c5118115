"""The simulator's inner loops, as plain Python and, where numba is installed, compiled.

One source, two forms. The plain form runs on lists. The compiled form, the same functions through numba, runs on
arrays, some twenty to a hundred times faster. Compiling takes seconds, and the result is cached beside the package's
byte code or in the folder that ``NUMBA_CACHE_DIR`` names, from where it loads in less than one. So the compiled form
is used as soon as enough work has come together to pay for it: some where there is a cache, more where there is none.
Planning a small step neither imports numba nor waits for a compiler.

``LIGHTNING_OFFLOAD_NUMBA`` is read when this is imported: "0" never compiles, "1" compiles at once.

Both forms give the same results to the last bit.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
import os
import pathlib
import types
from collections.abc import Callable
from typing import Any

from lightning_offload.planning.kernels import clock, needs, prefetches, releases

_log = logging.getLogger(__name__)

_WISH = os.environ.get("LIGHTNING_OFFLOAD_NUMBA", "")
_MODULES = (needs, clock, releases, prefetches)  # none calls another's functions: caches go by the file
WARM_ROWS = 0 if _WISH == "1" else 2_000_000
"""Rows that plain loops go through, in all, before the compiled form is loaded from a cache: half a second."""
COLD_ROWS = 0 if _WISH == "1" else 50_000_000
"""The same before it is compiled: about as long as that takes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The loops in one form; cf. the functions of the same names.

    Attributes:
        is_compiled: Whether they want arrays rather than lists.
    """

    find_needs: Callable[..., bool]
    begin_ticks: Callable[..., None]
    copies_out_end: Callable[..., None]
    place_releases: Callable[..., None]
    place_prefetches: Callable[..., int]
    run_step: Callable[..., tuple[float, float]]
    is_compiled: bool


PLAIN = Kernels(
    find_needs=needs.find_needs,
    begin_ticks=clock.begin_ticks,
    copies_out_end=clock.copies_out_end,
    place_releases=releases.place_releases,
    place_prefetches=prefetches.place_prefetches,
    run_step=clock.run_step,
    is_compiled=False,
)


@dataclasses.dataclass(slots=True)
class _Work:
    """Rows that simulations of this process went through."""

    num_rows: int = 0


_work = _Work()


def kernels_for(num_rows: int, *, is_urgent: bool = False) -> Kernels:
    """The form to use for the next simulation.

    Args:
        num_rows: Ticks, ops and storages that it goes through.
        is_urgent: Whether a step waits for it, which must not wait for a compiler: then it does not count as work.
    """
    _work.num_rows += 0 if is_urgent else num_rows
    if _WISH == "0" or _work.num_rows <= WARM_ROWS:
        return PLAIN
    found = compiled()
    return found if found is not None and (_work.num_rows > COLD_ROWS or _is_cached(found)) else PLAIN


def expect(num_rows: int) -> None:
    """Choose as if so much work had been done: it is to come, and the compiled form is not to be loaded in its midst.

    Args:
        num_rows: Ticks, ops and storages that simulations will go through; the most that anybody expects counts.
    """
    _work.num_rows = max(_work.num_rows, num_rows)


@functools.cache
def is_compilable() -> bool:
    """Whether simulations are compiled once there is enough work; what a search may spend follows from that alone."""
    return _WISH != "0" and importlib.util.find_spec("numba") is not None


@functools.cache
def compiled() -> Kernels | None:
    """The compiled form; None where numba is not installed, or does not work."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        import numba
    except Exception as error:  # numba supports some versions of numpy only, and says so in several ways
        _log.warning("plans are made without numba, which does not import: %s", error)
        return None
    forms = {name: form for module in _MODULES for name, form in _compile(module, numba).items()}
    names = [field.name for field in dataclasses.fields(Kernels) if field.name != "is_compiled"]
    return Kernels(**{name: forms[name] for name in names}, is_compiled=True)


@functools.cache
def _is_cached(kernels: Kernels) -> bool:
    """Whether compiled code is there to be loaded; if it is out of date, one process compiles early."""
    stats = getattr(kernels.run_step, "stats", None)
    folder = getattr(stats, "cache_path", None)
    return folder is not None and any(pathlib.Path(folder).glob("clock.run_step-*.nbi"))


def _compile(module: types.ModuleType, numba: Any) -> dict[str, Any]:
    """Compiled forms of a module's functions, which call one another's; nothing is compiled before it is called."""
    scope = dict(vars(module))
    forms: dict[str, Any] = {}
    for name, function in vars(module).items():
        if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
            copy = types.FunctionType(function.__code__, scope, name)
            copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
            forms[name] = _jit(numba, copy)
    scope.update(forms)
    return forms


def _jit(numba: Any, function: types.FunctionType) -> Any:
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # there is no folder to cache in
        return numba.njit(nogil=True)(function)
