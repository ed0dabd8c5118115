"""What holds for every test: fixed seeds, nothing left behind, GPU tests skipped where there is no GPU."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import multiprocessing
import os
import random
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import _pop_mode

from lightning_offload import MemoryPlugin, user_cache
from lightning_offload.runtime.native import build, builds
from lightning_offload.tensors.compiled_code import is_in_use
from tests.shares import examples

OURS = "lightning-offload"
"""How the names of our threads and spill files begin."""

GRACE_SECONDS = 1.0
"""How long a lane or a process that was told to end may take."""

FOREIGN_PROCESSES = ("resource_tracker", "compile_worker", "fork_server", "forkserver")
"""Helpers that Python and torch.compile start once and keep for the life of the process."""

FOREIGN_THREADS = ("ThreadPoolExecutor-",)
"""torch.compile keeps such a pool; one of ours would have our name, and an unnamed one is joined at exit."""

TESTS_PER_COLLECTION = 32
"""A collection of all that the session has loaded takes half a second."""

_num_tests = itertools.count(1)

# The native core is built once for all tests, and its warning is no test's business where there is no compiler.
os.environ.setdefault("LIGHTNING_OFFLOAD_NATIVE_CACHE", str(user_cache.native_folder() or ""))
if build.find_compiler() is None and builds.find() is None:
    os.environ.setdefault("LIGHTNING_OFFLOAD_ENGINE", "python")

os.environ["LIGHTNING_OFFLOAD_CACHE"] = ""  # tests neither read nor leave calibrations of this machine

# The same examples in every run: a failure is a change of the code, never of the dice.
hypothesis.settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, max_examples=examples(100)
)
hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked gpu, with the reason, where torch sees no CUDA device."""
    if torch.cuda.is_available():
        return
    reason = "no CUDA device" if torch.version.cuda else f"torch {torch.__version__} has no CUDA"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))


@pytest.fixture(scope="session")
def calibrations(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder that remembers what this process measured."""
    return str(tmp_path_factory.mktemp("calibrations"))


@pytest.fixture(autouse=True, scope="module")
def calibrated_once(calibrations: str) -> Iterator[None]:
    """Measure links once for a test process, and for the processes that it starts, not for each plugin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_OFFLOAD_CACHE", calibrations)
        yield


@pytest.fixture(autouse=True)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run planned steps in Python in every other test, always the same ones, and in the native core in the rest."""
    if "LIGHTNING_OFFLOAD_ENGINE" not in os.environ and zlib.crc32(request.node.nodeid.encode()) % 2:
        monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", "python")


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a mode see ops, as it does those of fake tensors: some functions call other ops under one."""
    monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", "python")


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Adapters set our logger up where the program has not: each test is a program of its own."""
    logger = logging.getLogger("lightning_offload")
    level, handlers, propagates = logger.level, list(logger.handlers), logger.propagate
    yield
    logger.setLevel(level)
    logger.handlers[:], logger.propagate = handlers, propagates


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Forget what a test has compiled: in a process that has compiled anything some things are done otherwise."""
    yield
    if is_in_use():  # the function itself: a test may still have put another in its module
        torch._dynamo.reset()
        assert not is_in_use()


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Start each test from the same random state."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - Lightning and scikit-learn read the global state
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def only_its_own_objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set aside all that there is, from the garbage collector and from budgets, and again where a plugin is made.

    So no budget counts what is left of other tests, nor of plain runs, and a collection looks at what the test has
    made alone. What tests have left in cycles is collected once for many of them.
    """
    gc.freeze()
    make = MemoryPlugin.__init__

    @functools.wraps(make)
    def make_with_the_rest_set_aside(plugin: MemoryPlugin, *args: Any, **kwargs: Any) -> None:
        gc.freeze()
        make(plugin, *args, **kwargs)

    monkeypatch.setattr(MemoryPlugin, "__init__", make_with_the_rest_set_aside)
    yield
    if next(_num_tests) % TESTS_PER_COLLECTION == 0:
        gc.unfreeze()
        gc.collect()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test after which there are more threads, hooks, modes, processes or spill files than before."""
    before = {name: look() for name, look in _LOOKS.items()}
    yield
    left = _left_behind(before)
    if left:
        # Lanes end a moment after the last reference to them goes, and a cycle may hold that one, perhaps set aside.
        gc.unfreeze()
        gc.collect()
        deadline = time.monotonic() + GRACE_SECONDS
        while (left := _left_behind(before)) and time.monotonic() < deadline:
            time.sleep(0.02)
    if left:
        _take_off_hooks(before)
    assert not left, f"the test left behind: {'; '.join(left)}"


def _take_off_hooks(before: dict[str, set[str]]) -> None:
    """Spare the tests that follow: they would fail for a reason that is not theirs."""
    while len(_dispatch_modes()) > len(before["dispatch modes"]):
        _pop_mode()
    torch._C._autograd._saved_tensors_hooks_enable()
    while _saved_tensor_hooks() - before["saved-tensor hooks"]:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for name, table in _global_hook_tables().items():
        for key, hook in list(table.items()):
            if f"{name}[{key}] {hook!r}" not in before["global hooks"]:
                del table[key]


def _left_behind(before: dict[str, set[str]]) -> list[str]:
    found = {name: sorted(look() - before[name]) for name, look in _LOOKS.items()}
    return [f"{name} {', '.join(new)}" for name, new in found.items() if new]


def _threads() -> set[str]:
    # Daemon threads of other packages (progress bars, pin memory) end on their own time; ours must be gone.
    return {
        f"{thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if thread.name.startswith(OURS) or not (thread.daemon or thread.name.startswith(FOREIGN_THREADS))
    }


def _dispatch_modes() -> set[str]:
    stack = (torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack()))
    return {f"{type(mode).__name__} ({id(mode)})" for mode in stack}


def _saved_tensor_hooks() -> set[str]:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    found = set() if hooks is None else {f"{hooks[0]!r} and {hooks[1]!r}"}
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():
        found.add("that they are disabled")
    return found


def _global_hook_tables() -> dict[str, dict[Any, Any]]:
    return {
        name: table
        for module in (torch_optimizer, nn_module)
        for name, table in vars(module).items()
        if name.startswith("_global_") and isinstance(table, dict)
    }


def _global_hooks() -> set[str]:
    tables = _global_hook_tables().items()
    return {f"{name}[{key}] {hook!r}" for name, table in tables for key, hook in table.items()}


def _processes() -> set[str]:
    found = {f"{child.name} ({child.pid})" for child in multiprocessing.active_children()}
    children = " ".join(map(_read, Path("/proc/self/task").glob("*/children")))  # Linux alone; else multiprocessing's
    for pid in children.split():
        # "pid (name) state parent ...", where the name may hold spaces and brackets
        before, _, after = _read(Path("/proc", pid, "stat")).rpartition(")")
        if not before or after.split()[0] == "Z":
            continue
        command = _read(Path("/proc", pid, "cmdline")).replace("\0", " ").strip()
        command = command or before.partition("(")[2]  # a process has no arguments for a moment after it began
        if not any(foreign in command for foreign in FOREIGN_PROCESSES):
            found.add(f"{command[:80]} ({pid})")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the thread or process ended between listing and reading
        return ""


def _spill_files() -> set[str]:
    found = {str(path) for path in Path(tempfile.gettempdir()).glob(f"{OURS}*")}
    # A spill file is unlinked while it is open, so a leaked one shows only as a descriptor.
    for link in Path("/proc/self/fd").glob("*"):
        try:
            target = os.readlink(link)
        except OSError:  # closed between listing and reading
            continue
        if OURS in Path(target).name or "/#" in target:  # "/#inode": opened without ever having a name
            found.add(f"{target} (descriptor {link.name})")
    return found


_LOOKS: dict[str, Callable[[], set[str]]] = {
    "threads": _threads,
    "dispatch modes": _dispatch_modes,
    "saved-tensor hooks": _saved_tensor_hooks,
    "global hooks": _global_hooks,
    "processes": _processes,
    "spill files": _spill_files,
}
