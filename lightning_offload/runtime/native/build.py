"""Compiles the native core: all C++ files of this folder, each by a call of the compiler, and one that links them.

The flags are few, since all time goes into torch's headers: a file that includes ``torch/csrc/autograd`` takes 15
seconds whatever it does, one with ``ATen/core/Tensor.h`` two. torch's own ``cpp_extension`` is not imported.
"""

from __future__ import annotations

import importlib.machinery
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from lightning_offload.errors import UnsupportedError

__all__ = ["FLAGS", "LIBRARY", "SOURCES", "BuildError", "compile_core", "find_compiler", "why_not"]

SOURCES = Path(__file__).resolve().parent
"""Where the C++ files lie."""

LIBRARY = f"_core{importlib.machinery.EXTENSION_SUFFIXES[0]}"
"""The name of the file that Python imports."""

FLAGS = ("-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-DAT_PER_OPERATOR_HEADERS")
LIBRARIES = ("-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10")
COMPILERS = ("c++", "g++", "clang++")

_OLDEST_TORCH = (2, 11)
_JOBS = 2  # a compiler takes up to a gigabyte
_SECONDS = 900.0  # by then it hangs
_LINE = 120  # characters of what the compiler said, in a message


class BuildError(UnsupportedError):
    """The native core cannot be had.

    Args:
        why: What is wrong, for a report.
        mend: What to do about it, as a command to the user.
        output: What the compiler said.
    """

    def __init__(self, why: str, mend: str, output: str = "") -> None:
        super().__init__(why, mend, output)
        self.why = why
        self.mend = mend
        self.output = output

    def __str__(self) -> str:
        return f"{self.why}; {self.mend}"


def why_not() -> str:
    """Why the core is not for this torch or system, whatever is installed; "" if it is."""
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    oldest = ".".join(map(str, _OLDEST_TORCH))
    if version is None or tuple(map(int, version.groups())) < _OLDEST_TORCH:
        return f"torch {torch.__version__} is older than {oldest}"
    if sys.platform != "linux":
        return f"there is no native core for {sys.platform}"
    return ""


def find_compiler() -> list[str] | None:
    """The command of the compiler: that of CXX, else the first of those usual; None where there is none."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [[name] for name in COMPILERS]:
        if shutil.which(command[0]) is not None:
            return command
    return None


def compile_core(folder: Path) -> None:
    """Compile and link the core.

    Args:
        folder: Where :data:`LIBRARY` goes, and what is made on the way to it: an empty one.

    Raises:
        BuildError: There is no compiler, no Python.h, or the compiler fails.
        OSError: The folder cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        chosen = os.environ.get("CXX", "")
        named = f" (CXX={chosen!r})" if chosen else ""
        raise BuildError(f"no C++ compiler was found{named}", "install g++, or name a compiler by CXX")
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").is_file():
        raise BuildError(f"there is no Python.h in {include}", "install Python's headers (python3-dev)")

    def compiled(source: Path) -> str:
        made = str(folder / f"{source.stem}.o")
        _run([*compiler, *_flags(include), "-c", str(source), "-o", made])
        return made

    with ThreadPoolExecutor(_JOBS) as pool:
        objects = list(pool.map(compiled, sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)))
    libraries = [f"-L{_torch_folder() / 'lib'}", *LIBRARIES]
    _run([*compiler, "-shared", "-s", *objects, *libraries, "-o", str(folder / LIBRARY)])
    for made in objects:
        os.unlink(made)


def _flags(include: str) -> list[str]:
    headers = _torch_folder() / "include"
    return [
        *FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{SOURCES}",
        *("-isystem", str(headers)),
        *("-isystem", str(headers / "torch/csrc/api/include")),
        *("-isystem", include),
    ]


def _torch_folder() -> Path:
    return Path(torch.__file__).resolve().parent


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=_SECONDS,
            stdin=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the build failed: {error}"[:_LINE], _MEND, shlex.join(command)) from error
    if done.returncode:
        text = done.stderr or done.stdout
        said = _first_error(text) or f"{command[0]} ended with code {done.returncode}"
        raise BuildError(f"the build failed: {said}", _MEND, f"{shlex.join(command)}\n{text}")


_MEND = "mend what the compiler says, then run lightning-offload build-native"


def _first_error(text: str) -> str:
    """The line of a compiler's output that says what is wrong, its file without a folder."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    wrong = [line for line in lines if re.search(r"error|undefined|cannot|killed", line, re.IGNORECASE)]
    line = (wrong or lines or [""])[0]
    line = re.sub(r"^/\S*/(?=[^/\s]+:)", "", line)
    return line if len(line) <= _LINE else f"{line[: _LINE - 3]}..."
