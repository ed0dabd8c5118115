"""``build-native``: what it builds, how it prints, and how it tells of a failure."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from lightning_offload import cli
from lightning_offload.runtime import native
from lightning_offload.runtime.native import build, builds
from tests.cli.running import json_of, output_of, refused

pytestmark = pytest.mark.skipif(bool(build.why_not()), reason=f"no native core: {build.why_not()}")


@pytest.fixture(autouse=True)
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Compiling is replaced, and so is loading; the folders of what was compiled."""
    made: list[Path] = []

    def compile_core(folder: Path) -> None:
        made.append(folder)
        (folder / build.LIBRARY).write_text("made")

    sources = tmp_path / "sources"
    sources.mkdir()
    monkeypatch.setenv("LIGHTNING_OFFLOAD_NATIVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "compile_core", compile_core)
    monkeypatch.setattr(native, "import_core", lambda path: ModuleType("_core"))
    return made


def test_it_is_built_once(capsys: pytest.CaptureFixture[str], compiled: list[Path], tmp_path: Path) -> None:
    """Where it lies and how long it took; later that it is there; anew with --force."""
    out = output_of(capsys, "build-native")
    path = builds.find()
    assert path is not None
    assert path.is_relative_to(tmp_path / "cache")
    assert out.startswith(f"Built the native core for torch {torch.__version__} and cpython-")
    assert out.endswith(f": {path}\n")
    out = output_of(capsys, "build-native")
    assert out.startswith("There is the native core ")
    assert out.endswith(f", --force builds it anew: {path}\n")
    assert len(compiled) == 1
    assert output_of(capsys, "build-native", "--force").startswith("Built ")
    assert len(compiled) == 2


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The same for programs; no time where it was there."""
    found = json_of(capsys, "build-native")
    assert found["path"] == str(builds.find())
    assert found["torch"] == str(torch.__version__)
    assert found["was_built"] is True
    assert found["build_seconds"] >= 0
    again = json_of(capsys, "build-native")
    assert again == {**found, "was_built": False, "build_seconds": None}


def test_beside_the_sources(capsys: pytest.CaptureFixture[str], compiled: list[Path], tmp_path: Path) -> None:
    """Though the cache has one; then it is the one that is found."""
    output_of(capsys, "build-native")
    assert json_of(capsys, "build-native", "--in-package")["path"] == str(tmp_path / "sources" / build.LIBRARY)
    assert json_of(capsys, "build-native", "--in-package")["was_built"] is False
    assert builds.find() == tmp_path / "sources" / build.LIBRARY
    assert len(compiled) == 2


def test_a_build_that_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler said, and one line with the reason; tried again the next time."""

    def fail(folder: Path) -> None:
        raise build.BuildError("the build failed: no", "mend it", "core.cpp: no\nmore")

    monkeypatch.setattr(build, "compile_core", fail)
    for _ in range(2):
        assert cli.run(["build-native"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(
            "lightning-offload: core.cpp: no\nmore\nlightning-offload: error: the build failed: no; mend"
        )


def test_without_a_compiler(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says what to install."""

    def fail(folder: Path) -> None:
        raise build.BuildError("no C++ compiler was found", "install g++")

    monkeypatch.setattr(build, "compile_core", fail)
    assert "no C++ compiler was found; install g++" in refused(capsys, "build-native")


def test_one_that_does_not_load(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Is an error, since nobody could use it."""

    def fail(path: Path) -> ModuleType:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(native, "import_core", fail)
    assert "does not load: undefined symbol; build it anew by --force" in refused(capsys, "build-native")


def test_an_older_torch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is built for it."""
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    message = "no native core can be built here: torch 2.10.0 is older than 2.11; planned steps run in Python"
    assert message in refused(capsys, "build-native")
