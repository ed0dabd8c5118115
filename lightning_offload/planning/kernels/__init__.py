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
import hashlib
import importlib.util
import inspect
import logging
import os
import pathlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from lightning_offload.planning import arrays
from lightning_offload.planning.kernels import (
    annealing,
    buffers,
    clock,
    needs,
    prefetches,
    releases,
    simulation,
    tiers,
)

_log = logging.getLogger(__name__)

_WISH = os.environ.get("LIGHTNING_OFFLOAD_NUMBA", "")
_MODULES = (needs, clock, releases, prefetches, tiers, simulation, annealing)  # each calls those before it
WARM_ROWS = 0 if _WISH == "1" else 2_000_000
"""Rows that plain loops go through, in all, before the compiled form is loaded from a cache: half a second."""
COLD_ROWS = 0 if _WISH == "1" else 50_000_000
"""The same before it is compiled: about as long as that takes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The loops in one form.

    Attributes:
        reset: Cf. :func:`.simulation.reset`.
        simulate: Cf. :func:`.simulation.simulate`.
        anneal: Cf. :func:`.annealing.anneal`.
        is_compiled: Whether they want arrays rather than lists.
    """

    reset: Callable[..., None]
    simulate: Callable[..., tuple[bool, int, int, float, float, int]]
    anneal: Callable[..., None]
    is_compiled: bool


PLAIN = Kernels(reset=simulation.reset, simulate=simulation.simulate, anneal=annealing.anneal, is_compiled=False)
_ENTRIES = ("reset", "simulate", "anneal")
_COMPILED_AS = {simulation.fill: simulation.fill_one_by_one}


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
    forms: dict[str, Any] = {}
    for module in _MODULES:
        forms |= _compiled(module, forms, numba)
    return Kernels(reset=forms["reset"], simulate=forms["simulate"], anneal=forms["anneal"], is_compiled=True)


@functools.cache
def _is_cached(kernels: Kernels) -> bool:
    """Whether compiled code is there to be loaded."""
    stats = getattr(kernels.simulate, "stats", None)
    folder = getattr(stats, "cache_path", None)
    return folder is not None and any(pathlib.Path(folder).glob(f"simulation.{_mark('simulate')}-*.nbi"))


def _compiled(module: types.ModuleType, forms: Mapping[str, Any], numba: Any) -> dict[str, Any]:
    """Compiled forms of a module's functions, which call one another and others' that are there already.

    Nothing is compiled before it is called.
    """
    scope = {**vars(module), **{name: form for name, form in forms.items() if name in vars(module)}}
    made: dict[str, Any] = {}
    for name, function in vars(module).items():
        if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
            code = _COMPILED_AS.get(function, function).__code__
            copy = types.FunctionType(code, scope, name)
            copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
            made[name] = _entry(numba, copy) if name in _ENTRIES else _inner(numba, copy)
    scope.update(made)
    return made


def _inner(numba: Any, function: types.FunctionType) -> Any:
    """A compiled form that only others call: without what Python enters it by, which takes long to compile."""
    return numba.njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


def _entry(numba: Any, function: types.FunctionType) -> Any:
    """A compiled form that is written to a cache, with all that it calls."""
    try:
        function.__qualname__ = _mark(function.__qualname__)
        return numba.njit(cache=True, nogil=True)(function)
    except (RuntimeError, OSError):  # there is no folder to cache in, or no source
        return numba.njit(nogil=True)(function)


def _mark(name: str) -> str:
    """A function's name and what tells its code, and that of all it calls, from another version's.

    A cache looks at a function's own file alone.
    """
    return f"{name}_{_digest()}"


@functools.cache
def _digest() -> str:
    digest = hashlib.sha256()
    for module in (*_MODULES, buffers, arrays, sys.modules[__name__]):
        digest.update(inspect.getsource(module).encode())
    return digest.hexdigest()[:12]
