"""Finds the native core that was built for this torch and this Python, or builds it, once for all processes.

A build is named by what it was made of: the sources, the version of torch, and Python's ABI. Where the name beside the
sources is the one wanted, that library is taken: a wheel or an image may hold one. Else builds lie in
:func:`~lightning_offload.user_cache.native_folder`:

* ``NAME/`` with ``_core.*.so``, renamed into place when it is whole;
* ``NAME.lock``, which who builds holds and who comes meanwhile waits for;
* ``NAME.building-*``, where a build is under way; what a killed one left is removed by the next one;
* ``NAME.failed.json`` where the build failed: others do not try for a day, unless the compiler is another. What the
  compiler said is in ``NAME.log``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from lightning_offload.runtime.native import build
from lightning_offload.runtime.native.build import BuildError
from lightning_offload.user_cache import native_folder

__all__ = ["abi", "build_in_package", "ensure", "find", "find_in_package"]

_log = logging.getLogger(__name__)
_NAME_IN_PACKAGE = "_core.json"
_PATIENCE_SECONDS = 1800.0  # that a process waits for another one to build
_FAILURE_SECONDS = 24 * 3600.0  # before a build that failed is tried again
_UNUSED_SECONDS = 90 * 24 * 3600.0  # before builds for other versions are removed


def abi() -> str:
    """Python's ABI, which names the system as well."""
    return str(sysconfig.get_config_var("SOABI"))


def _wanted() -> str:
    """The name of a build of these sources for this process, by all that it is made of."""
    digest = hashlib.sha256(repr((build.FLAGS, build.LIBRARIES, str(torch.__version__), abi())).encode())
    for path in sorted([*build.SOURCES.glob("*.cpp"), *build.SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"torch-{torch.__version__}-{digest.hexdigest()[:16]}"


def find() -> Path | None:
    """The library that is there already, beside the sources or in the cache; None where it is to be built."""
    in_package, folder = find_in_package(), native_folder()
    if in_package is not None or folder is None:
        return in_package
    found = folder / _wanted() / build.LIBRARY
    if not found.is_file():
        return None
    with contextlib.suppress(OSError):  # another user's, or read-only
        os.utime(found.parent)  # is in use
    return found


def find_in_package() -> Path | None:
    """The library beside the sources, as a wheel or an image may have it; None where it is not for this process."""
    library = build.SOURCES / build.LIBRARY
    try:
        name = json.loads((build.SOURCES / _NAME_IN_PACKAGE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return library if name == {"name": _wanted()} and library.is_file() else None


def ensure(*, renew: bool = False, retry: bool = False) -> Path:
    """The library, built if it is not there yet; who else wants it meanwhile waits.

    Args:
        renew: Build it though it is there.
        retry: Build it though that failed a while ago.

    Raises:
        BuildError: It cannot be built, or there is no place for it.
    """
    found = None if renew else find()
    if found is not None:
        return found
    folder = native_folder()
    if folder is None:
        raise BuildError("there is no home folder to build in", "name a folder by LIGHTNING_OFFLOAD_NATIVE_CACHE")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(folder / f"{_wanted()}.lock"):
            found = None if renew else find()  # another process built it meanwhile
            return found if found is not None else _build(folder, may_fail_again=renew or retry)
    except OSError as error:
        said = error.strerror or str(error)
        mend = "name a folder by LIGHTNING_OFFLOAD_NATIVE_CACHE"
        raise BuildError(f"the folder {str(folder)!r} cannot be written ({said})", mend) from error


def build_in_package() -> Path:
    """Build the library beside the sources, for a wheel or an image of the package.

    Raises:
        BuildError: It cannot be built, or that folder cannot be written.
    """
    place = build.SOURCES
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".building-") as made:
            build.compile_core(Path(made))
            (place / _NAME_IN_PACKAGE).unlink(missing_ok=True)  # at no time beside another's library
            os.replace(Path(made, build.LIBRARY), place / build.LIBRARY)
            _write(Path(made, _NAME_IN_PACKAGE), {"name": _wanted()})
            os.replace(Path(made, _NAME_IN_PACKAGE), place / _NAME_IN_PACKAGE)
    except OSError as error:
        said = error.strerror or str(error)
        raise BuildError(f"the folder {str(place)!r} cannot be written ({said})", "change its permissions") from error
    return place / build.LIBRARY


def _build(folder: Path, *, may_fail_again: bool) -> Path:
    name = _wanted()
    place, failed = folder / name, folder / f"{name}.failed.json"
    if not may_fail_again:
        _raise_failure(failed)
    for left in folder.glob(f"{name}.building-*"):  # by a build that was killed: we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    _log.info("building the native core, once for this torch and Python: it takes up to a minute")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder, prefix=f"{name}.building-") as made:
        whole = Path(made, "whole")
        whole.mkdir()
        try:
            build.compile_core(whole)
        except BuildError as error:
            raise _noted(error, failed, folder / f"{name}.log") from error
        if place.exists():  # renewed, or not whole
            os.replace(place, Path(made, "before"))
        os.replace(whole, place)
    failed.unlink(missing_ok=True)
    _log.info("built the native core in %.0f s: %s", time.monotonic() - start, place)
    _remove_unused(folder)
    return place / build.LIBRARY


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a build; a process that ends lets go of it, however it ends."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=_PATIENCE_SECONDS)
    except Timeout as error:
        why = f"another process holds {str(path)!r} for {_PATIENCE_SECONDS / 60:.0f} minutes"
        raise BuildError(why, "end that process, or remove the file") from error
    try:
        yield
    finally:
        lock.release()


# ---- failures


def _noted(error: BuildError, path: Path, log: Path) -> BuildError:
    """Leave word of a compiler's failure, and what it said; the error that names that."""
    mend = error.mend
    if not error.output:  # found out at once, and mended without a change of the compiler
        return error
    with contextlib.suppress(OSError):
        log.write_text(error.output, encoding="utf-8")
        mend = f"{mend} (its output is in {log})"
        _write(path, {"why": error.why, "mend": mend, "compiler": build.find_compiler()})
    return BuildError(error.why, mend, error.output)


def _raise_failure(path: Path) -> None:
    try:
        is_old = not 0 <= time.time() - path.stat().st_mtime <= _FAILURE_SECONDS
        failure = json.loads(path.read_text(encoding="utf-8"))
        why, mend, compiler = str(failure["why"]), str(failure["mend"]), failure["compiler"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if not is_old and compiler == build.find_compiler():
        raise BuildError(why, mend)


# ---- files


def _write(path: Path, payload: dict[str, object]) -> None:
    path.write_text(json.dumps(payload, indent=1), encoding="utf-8")


def _remove_unused(folder: Path) -> None:
    """Sources and versions come and go: what no process has loaded for long is removed."""
    with contextlib.suppress(OSError):
        for place in folder.glob("torch-*/"):
            if time.time() - place.stat().st_mtime > _UNUSED_SECONDS:
                shutil.rmtree(place, ignore_errors=True)
