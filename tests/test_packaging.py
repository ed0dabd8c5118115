"""The wheel holds what runs from it, and its metadata says what each feature needs.

It is built by setuptools alone, from a copy of what the sources are, without a network.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightning_offload"
BUILT = {f"lightning_offload/runtime/native/{name}" for name in ("_core.json", "_core.cpython-311-x86_64-linux-gnu.so")}
"""What `lightning-offload build-native --in-package` leaves."""

BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this checkout, in which the native core was built."""
    try:
        version = importlib.metadata.version("setuptools")  # not imported: that fails where distutils was before
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("setuptools, which builds the wheel, is not installed")
    if int(version.partition(".")[0]) < 77:
        pytest.skip(f"setuptools {version} is too old to build the wheel: it takes 77")
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for built in BUILT:
        (folder / built).write_text("built")
    (folder / "dist").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BUILD],
        cwd=folder, capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return zipfile.ZipFile(folder / "dist" / done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    """Its METADATA."""
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def test_every_file_of_the_package_is_in_it(wheel: zipfile.ZipFile) -> None:
    """The parts of the pages and the mark of typed packages among them; and nothing else is."""
    there = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    there = {name for name in there if "__pycache__" not in name}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == there | BUILT
    assert any(name.endswith(".cpp") for name in packed)
    parts = {"cli/demo.py", "py.typed", "report/page.css", "report/page.html", "report/page.js"}
    assert {f"lightning_offload/{part}" for part in parts} <= packed


def test_the_package_needs_nothing_of_the_checkout() -> None:
    """Of examples, benchmarks or tests, which are not in the wheel, the command `demo` alone names a module."""
    pattern = re.compile(r"^\s*(?:from|import) (?:examples|benchmarks|tests)\b|\bexamples\.\w", re.MULTILINE)
    found = [path for path in PACKAGE.rglob("*.py") if pattern.search(path.read_text(encoding="utf-8"))]
    assert found == [PACKAGE / "cli/demo.py"]


def test_the_command_is_installed(wheel: zipfile.ZipFile) -> None:
    """As `lightning-offload`."""
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    assert "lightning-offload = lightning_offload.cli:main" in wheel.read(name).decode()


def test_extras_bring_what_their_feature_needs(metadata: Message) -> None:
    """The demo's all that `make demo` takes; each extra that a message names exists."""
    needs = [text.partition(";") for text in metadata.get_all("Requires-Dist", [])]
    extras: dict[str, set[str]] = {extra: set() for extra in metadata.get_all("Provides-Extra", [])}
    for requirement, _, condition in needs:
        found = re.search(r'extra == "([^"]+)"', condition)
        if found is not None:
            extras[found[1]].add(re.match(r"[\w-]+", requirement)[0])  # type: ignore[index]
    assert extras["demo"] == {"plotly", "scikit-learn", "typer"}
    assert extras["plots"] == {"matplotlib"}
    sources = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    named = {name for group in re.findall(r"lightning-offload\[([\w,]+)\]", sources) for name in group.split(",")}
    assert {"cli", "plots", "report"} <= named <= set(extras)


def test_the_version_is_the_packages(metadata: Message) -> None:
    """And that of CITATION.cff."""
    from lightning_offload import __version__

    assert metadata["Version"] == __version__
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
