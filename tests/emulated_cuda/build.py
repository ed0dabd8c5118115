"""Builds the emulated device into the user's cache folder, once for each version of torch and of the sources.

A build goes to a folder of its own, which is renamed when it is complete: two builds at once do no harm, and one that
was interrupted leaves nothing that is taken for whole.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
MODULES = HERE / "on_path"
"""What Python finds in the folder of a build: the module, and what imports it into every process."""

FIRST = "accelerator"
"""The source whose library is loaded before torch."""

FLAGS = ("-std=c++20", "-fPIC", "-O1", "-fvisibility=hidden", "-DAT_PER_OPERATOR_HEADERS")
COMPILERS = ("g++", "clang++", "c++")


class BuildError(RuntimeError):
    """The compiler or the linker failed; says what it said."""


def why_not() -> str | None:
    """Why the device cannot be built for this interpreter; None if it can."""
    if sys.platform != "linux":
        return "it needs Linux"
    if torch.version.cuda or torch.version.hip:
        return f"torch {torch.__version__} has devices of its own: make test-gpu"
    if find_compiler() is None:
        return f"no C++20 compiler ({os.environ.get('CXX') or ', '.join(COMPILERS)})"
    return None


def find_compiler() -> str | None:
    """The first compiler that takes C++20; CXX names one."""
    for name in (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS:
        if shutil.which(name) is None:
            continue
        command = [name, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
        if subprocess.run(command, input=b"#include <concepts>\n", capture_output=True, check=False).returncode == 0:
            return name
    return None


def build(num_jobs: int) -> Path:
    """The folder of the device for this interpreter's torch, built if it is not there yet.

    Args:
        num_jobs: Compilers at a time.

    Raises:
        BuildError: It could not be built.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++20 compiler")
    folder = _cache() / f"{torch.__version__}-{_digest(compiler)}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as made:
        whole = Path(made) / "whole"
        _build_into(whole, compiler, num_jobs)
        try:
            whole.rename(folder)
        except OSError:  # another build came first
            if not folder.exists():
                raise
    return folder


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "lightning-offload" / "emulated_cuda"


def _digest(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    digest = hashlib.sha256(repr((compiler, version, _flags())).encode())
    for path in sorted([*SOURCES.iterdir(), *MODULES.glob("*.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _flags() -> list[str]:
    return [*FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]


def _build_into(folder: Path, compiler: str, num_jobs: int) -> None:
    objects = folder / "objects"
    objects.mkdir(parents=True)
    home = Path(torch.__file__).parent
    includes = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]

    def compiled(source: Path) -> Path:
        made = objects / f"{source.stem}.o"
        _run([compiler, *_flags(), *([] if source.stem == FIRST else includes), "-c", str(source), "-o", str(made)])
        return made

    with ThreadPoolExecutor(num_jobs) as pool:
        made = list(pool.map(compiled, sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)))
    first = [path for path in made if path.stem == FIRST]
    rest = [path for path in made if path.stem != FIRST]
    libraries = [f"-L{home / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", "-lpthread"]
    _run([compiler, "-shared", "-s", "-o", str(folder / "libemulated_cuda_first.so"), *map(str, first)])
    _run([compiler, "-shared", "-s", "-o", str(folder / "libemulated_cuda.so"), *map(str, rest), *libraries])
    shutil.rmtree(objects)
    for module in MODULES.glob("*.py"):
        shutil.copyfile(module, folder / module.name)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
