"""The native core: built once, found by its name, and none where it cannot be had.

Compilers are scripts, but in one test, which compiles a file without torch's headers.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from lightning_offload import user_cache
from lightning_offload.errors import PolicyError, UnsupportedError
from lightning_offload.runtime import native
from lightning_offload.runtime.native import build, builds

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
#include <Python.h>
static PyObject* abi(PyObject*, PyObject*) { return PyLong_FromLong(1); }
static PyMethodDef methods[] = {{"abi", abi, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_core", nullptr, -1, methods};
PyMODINIT_FUNC PyInit__core() { return PyModule_Create(&module); }
"""
COMPILER = """#!/bin/sh
{first}
echo "$*" >> {log}
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then echo made > "$2"; fi
  shift
done
"""

pytestmark = pytest.mark.skipif(bool(build.why_not()), reason=f"no native core: {build.why_not()}")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for builds, sources of two small files, and a process that has not asked yet."""
    sources, cache = tmp_path / "sources", tmp_path / "cache"
    sources.mkdir()
    (sources / "core.cpp").write_text(SOURCE)
    (sources / "more.cpp").write_text("int more;\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(native, "_answer", None)
    monkeypatch.setenv("LIGHTNING_OFFLOAD_NATIVE_CACHE", str(cache))
    monkeypatch.delenv("LIGHTNING_OFFLOAD_ENGINE", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    return cache


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that makes what it is asked for at once; its log has a line for each call."""
    return compiler_of(tmp_path, monkeypatch)


def compiler_of(folder: Path, monkeypatch: pytest.MonkeyPatch, first: str = "", name: str = "compiler") -> Path:
    log, script = folder / f"{name}.log", folder / name
    script.write_text(COMPILER.format(first=first, log=log))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return log


def calls(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def test_a_real_one_is_built_and_loaded(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next process finds it; two lines tell of the build, and none where it was there."""
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler")
    caplog.set_level(logging.INFO, "lightning_offload")
    core = native.load()
    assert core is not None
    assert core.abi() == 1
    assert native.load() is core
    assert (native.why_python(), native.engine()) == ("", "native")
    first, second = caplog.messages
    assert first.startswith("building the native core, once")
    assert second.startswith("built the native core in ")
    (folder,) = [path for path in place.iterdir() if path.is_dir()]
    assert {path.name for path in folder.iterdir()} == {build.LIBRARY}
    assert folder.name.startswith(f"torch-{torch.__version__}-")
    assert builds.ensure() == folder / build.LIBRARY
    assert len(caplog.messages) == 2


def test_every_source_is_compiled_and_linked(compiler: Path) -> None:
    """A call each, and one more for all of them with torch's libraries."""
    builds.ensure()
    *compiled, linked = calls(compiler)
    assert sorted(call.split(" -c ")[1].split("/")[-1] for call in compiled) == ["core.o", "more.o"]
    assert all("-std=c++20" in call and "-fvisibility=hidden" in call for call in compiled)
    assert "core.o" in linked
    assert "more.o" in linked
    assert "-ltorch_python" in linked


def test_a_report_builds_nothing(compiler: Path) -> None:
    """Whoever asks what the engine is before a step was planned is told so."""
    assert native.engine() == "python: no step was planned yet"
    assert calls(compiler) == []


def test_other_sources_are_another_build(compiler: Path) -> None:
    """So are other headers, another torch and another Python; the same ones are the same."""
    first = builds.ensure()
    (build.SOURCES / "core.h").write_text("// new\n")
    second = builds.ensure()
    assert first != second
    assert len(calls(compiler)) == 6
    (build.SOURCES / "core.h").unlink()
    assert builds.ensure() == first
    assert len(calls(compiler)) == 6


def test_a_folder_without_the_library_is_built_over(compiler: Path) -> None:
    """Somebody has removed it."""
    made = builds.ensure()
    made.unlink()
    assert builds.find() is None
    assert builds.ensure() == made
    assert len(calls(compiler)) == 6


def test_it_is_renewed_where_that_is_asked_for(compiler: Path) -> None:
    """The file is a new one, at its place."""
    made = builds.ensure()
    made.write_text("old")
    assert builds.ensure(renew=True) == made
    assert made.read_text() == "made\n"


def test_one_beside_the_sources_goes_first(compiler: Path, place: Path) -> None:
    """As a wheel has it, if it is for this torch; else the cache is asked."""
    in_package = builds.build_in_package()
    assert in_package == build.SOURCES / build.LIBRARY
    assert builds.ensure() == builds.find_in_package() == in_package
    assert not place.exists()
    assert {path.name for path in build.SOURCES.iterdir()} == {"core.cpp", "more.cpp", "_core.json", build.LIBRARY}
    stamp = build.SOURCES / "_core.json"
    stamp.write_text(stamp.read_text().replace(str(torch.__version__), "2.0"))
    assert builds.find_in_package() is None
    assert builds.ensure().is_relative_to(place)


CHILD = """
import pathlib, sys
from lightning_offload.runtime.native import build, builds
build.SOURCES = pathlib.Path(sys.argv[1])
pathlib.Path(sys.argv[2]).touch()
print(builds.ensure())
"""


def child(name: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD, str(build.SOURCES), str(name)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_processes_at_once_build_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler waits until both have begun: the second one takes what the first one made."""
    ready = [tmp_path / "first", tmp_path / "second"]
    log = compiler_of(tmp_path, monkeypatch, first=f"until [ -e {ready[0]} ] && [ -e {ready[1]} ]; do sleep 0.05; done")
    processes = [child(name) for name in ready]
    found = {process.communicate(timeout=100)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert found == {f"{builds.find()}\n"}
    assert len(calls(log)) == 3


def test_a_build_that_is_killed_leaves_nothing(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process builds, and removes what the first one left."""
    compiler_of(tmp_path, monkeypatch, first="kill -9 $PPID")
    killed = child(tmp_path / "begun")
    killed.communicate(timeout=100)
    assert killed.returncode == -9
    assert builds.find() is None
    assert len(list(place.glob("*.building-*"))) == 1
    compiler_of(tmp_path, monkeypatch, name="another")
    made = builds.ensure()
    assert made.read_text() == "made\n"
    assert list(place.glob("*.building-*")) == []


# ---- where it cannot be had


def warned(caplog: pytest.LogCaptureFixture) -> str:
    """The one warning of a process that goes on in Python, however often it asks."""
    assert native.load() is None
    assert native.load() is None
    (message,) = caplog.messages
    assert "planned steps run in Python: " in message
    assert native.engine() == f"python: {native.why_python()}"
    assert native.why_python() in message
    return message


@pytest.mark.parametrize("chosen", [None, "no-such-compiler"])
def test_without_a_compiler(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning says what to install; nothing is left that a later process would go by."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    if chosen:
        monkeypatch.setenv("CXX", chosen)
    message = warned(caplog)
    assert native.why_python() == "no C++ compiler was found" + (f" (CXX={chosen!r})" if chosen else "")
    assert "install g++" in message
    with pytest.raises(build.BuildError):
        builds.ensure()
    assert [path for path in user_cache.native_folder().iterdir() if path.suffix != ".lock"] == []  # type: ignore[union-attr]


def test_a_compiler_that_fails(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first complaint is the reason; other processes do not try again, unless told to or with another compiler."""
    said = "echo note >&2; echo '/a/b/core.cpp:3:1: error: no such thing' >&2; echo once >> {}; exit 1"
    compiler_of(tmp_path, monkeypatch, first=said.format(tmp_path / "tries"))
    message = warned(caplog)
    assert native.why_python() == "the build failed: core.cpp:3:1: error: no such thing"
    (log,) = place.glob("*.log")
    assert str(log) in message
    assert "note\n" in log.read_text()
    tries = len(calls(tmp_path / "tries"))
    with pytest.raises(build.BuildError, match="no such thing"):
        builds.ensure()
    assert len(calls(tmp_path / "tries")) == tries
    with pytest.raises(build.BuildError, match="no such thing"):
        builds.ensure(retry=True)
    assert len(calls(tmp_path / "tries")) > tries
    compiler_of(tmp_path, monkeypatch, name="another")
    assert builds.ensure().is_file()
    assert list(place.glob("*.failed.json")) == []


def test_a_failure_is_forgotten_after_a_day(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it lacked may be there by then."""
    compiler_of(tmp_path, monkeypatch, first=f"[ -e {tmp_path / 'mended'} ] || exit 1")
    with pytest.raises(build.BuildError, match="ended with code 1"):
        builds.ensure()
    (tmp_path / "mended").touch()
    with pytest.raises(build.BuildError, match="ended with code 1"):
        builds.ensure()
    (failed,) = place.glob("*.failed.json")
    os.utime(failed, (time.time() - 25 * 3600,) * 2)
    assert builds.ensure().is_file()


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps go on in Python; the warning names the variable."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LIGHTNING_OFFLOAD_NATIVE_CACHE", str(tmp_path / "file" / "cache"))
    assert "LIGHTNING_OFFLOAD_NATIVE_CACHE" in warned(caplog)
    assert native.why_python().endswith("cannot be written (Not a directory)")
    assert calls(compiler) == []


def test_a_library_that_does_not_load(compiler: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the scripted compiler makes is none; the fix is named."""
    assert "build-native --force" in warned(caplog)
    assert native.why_python().startswith("the native core does not load: ")
    assert len(calls(compiler)) == 3


def test_one_process_of_many_warns(
    monkeypatch: pytest.MonkeyPatch, compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks above 0 are silent, and know why all the same."""
    monkeypatch.setenv("RANK", "3")
    assert native.load() is None
    assert caplog.messages == []
    assert native.why_python().startswith("the native core does not load: ")


@pytest.mark.parametrize(("version", "is_old"), [("2.10.0", True), ("2.9.1+cu128", True), ("2.11.0", False)])
def test_an_older_torch(
    version: str, is_old: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: Path
) -> None:
    """Is served in Python without a warning."""
    monkeypatch.setattr(torch, "__version__", version)
    assert build.why_not() == (f"torch {version} is older than 2.11" if is_old else "")
    if is_old:
        assert native.load() is None
        assert native.engine() == f"python: torch {version} is older than 2.11"
        assert caplog.messages == calls(compiler) == []


# ---- as it is told to


def test_python_is_chosen(monkeypatch: pytest.MonkeyPatch, compiler: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is built, and nothing is warned of."""
    monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", "python")
    assert native.load() is None
    assert native.engine() == "python: LIGHTNING_OFFLOAD_ENGINE=python"
    assert calls(compiler) == caplog.messages == []


def test_native_is_demanded(monkeypatch: pytest.MonkeyPatch, compiler: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An error says why there is none and what to do, each time; no warning says it too."""
    monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", "native")
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"'native' cannot be had: .*does not load.*build-native --force"):
            native.load()
    assert caplog.messages == []
    assert len(calls(compiler)) == 3


@pytest.mark.parametrize("value", ["fast", "Native", "1"])
def test_an_engine_that_is_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error echoes it, and says what is allowed."""
    monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", value)
    with pytest.raises(PolicyError, match=f"ENGINE='{value}' is not known: choose one of 'python', 'native'"):
        native.load()
    assert native.engine() == "python: no step was planned yet"


# ---- where


def test_where_builds_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder of its own variable, else in the user's cache, which an empty variable does not switch off."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert user_cache.native_folder() == tmp_path / "cache"
    monkeypatch.setenv("LIGHTNING_OFFLOAD_NATIVE_CACHE", "")
    monkeypatch.setenv("LIGHTNING_OFFLOAD_CACHE", str(tmp_path / "mine"))
    assert user_cache.native_folder() == tmp_path / "mine" / "native"
    monkeypatch.setenv("LIGHTNING_OFFLOAD_CACHE", "")
    assert user_cache.native_folder() == tmp_path / "xdg" / "lightning-offload" / "native"


def test_no_home_is_no_core(monkeypatch: pytest.MonkeyPatch, compiler: Path) -> None:
    """The error names the variable."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("LIGHTNING_OFFLOAD_NATIVE_CACHE", "LIGHTNING_OFFLOAD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(build.BuildError, match="no home folder to build in; name a folder by"):
        builds.ensure()
    assert calls(compiler) == []


def test_builds_that_nobody_loads_are_removed(compiler: Path, place: Path) -> None:
    """After 90 days, by the next build."""
    first = builds.ensure()
    os.utime(first.parent, (time.time() - 91 * 24 * 3600,) * 2)
    (build.SOURCES / "more.cpp").write_text("int other;\n")
    second = builds.ensure()
    assert [path for path in place.iterdir() if path.is_dir()] == [second.parent]
    assert compiler.exists()


def test_threads_ask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of first steps that begin in several threads one finds the core and the others wait: it is installed once."""
    found: list[int] = []

    def find(*, is_told: bool) -> native._Answer:
        found.append(threading.get_ident())
        time.sleep(0.05)
        return native._Answer(core=None, why="none was asked for")

    monkeypatch.setattr(native, "_found", find)
    threads = [threading.Thread(target=native.load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1
    assert native.why_python() == "none was asked for"
