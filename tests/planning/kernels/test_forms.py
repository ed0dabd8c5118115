"""When the inner loops run as plain Python, and when compiled."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from lightning_offload.planning import kernels
forms = [kernels.kernels_for(rows).is_compiled for rows in (1000, 10**7, 10**9)]
print(*forms, "numba" in sys.modules)
"""
needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")


def forms(tmp_path: object, wish: str, script: str = SCRIPT) -> list[str]:
    """What a fresh process does for a small, a middling and a large amount of work, with an empty cache."""
    environment = {**os.environ, "LIGHTNING_OFFLOAD_NUMBA": wish, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_wish_for_plain_loops_is_kept(tmp_path: object) -> None:
    """Numba is not even imported."""
    assert forms(tmp_path, "0") == ["False", "False", "False", "False"]


@needs_numba
def test_small_work_does_not_wait_for_a_compiler(tmp_path: object) -> None:
    """Without a cache only a large amount of work is worth it."""
    assert forms(tmp_path, "") == ["False", "False", "True", "True"]


@needs_numba
def test_work_to_come_counts(tmp_path: object) -> None:
    """Who expects much work has the compiled form before it begins, unless plain loops are wished for."""
    expecting = SCRIPT.replace("forms =", "kernels.expect(10**9)\nforms =")
    assert forms(tmp_path, "", expecting) == ["True", "True", "True", "True"]
    assert forms(tmp_path, "0", expecting) == ["False", "False", "False", "False"]


@needs_numba
def test_what_a_step_waits_for_does_not_wait_for_a_compiler(tmp_path: object) -> None:
    """However much of it there is; what was expected, or what others compiled, it uses."""
    urgent = SCRIPT.replace("kernels_for(rows)", "kernels_for(rows, is_urgent=True)")
    assert forms(tmp_path, "", urgent) == ["False", "False", "False", "False"]
    after = urgent.replace("forms =", "kernels.kernels_for(10**9)\nforms =")
    assert forms(tmp_path, "", after) == ["True", "True", "True", "True"]
    expecting = urgent.replace("forms =", "kernels.expect(10**9)\nforms =")
    assert forms(tmp_path, "", expecting) == ["True", "True", "True", "True"]


@needs_numba
def test_wish_for_compiled_loops_is_kept(tmp_path: object) -> None:
    """From the first simulation on."""
    assert forms(tmp_path, "1") == ["True", "True", "True", "True"]


def test_without_numba_loops_are_plain(tmp_path: object) -> None:
    """Whatever the wish: it is an extra."""
    hidden = "import importlib.util as u; real = u.find_spec\nu.find_spec = lambda n: None if n == 'numba' else real(n)"
    assert forms(tmp_path, "1", hidden + SCRIPT) == ["False", "False", "False", "False"]


@needs_numba
def test_cached_code_is_of_all_that_it_calls(tmp_path: pathlib.Path) -> None:
    """Its cache looks at one file; another version of a loop that is called from there has a cache of its own."""
    script = """
import inspect, sys
from lightning_offload.planning import kernels
from lightning_offload.planning.kernels import releases
real = inspect.getsource
if sys.argv[1:] == ["changed"]:
    inspect.getsource = lambda item: real(item) + "#" * (item is releases)
print(kernels.compiled().simulate.py_func.__qualname__, kernels.compiled().anneal.py_func.__qualname__)
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    names = [
        subprocess.run(
            [sys.executable, "-c", script, *words], env=environment, capture_output=True, text=True, check=True
        ).stdout.split()
        for words in ([], [], ["changed"])
    ]
    assert names[0] == names[1]
    assert not set(names[0]) & set(names[2])
    assert [name.split("_")[0] for name in names[0]] == ["simulate", "anneal"]
