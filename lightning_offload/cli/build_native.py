"""``build-native``: builds the native core of planned steps ahead of the first one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lightning_offload.cli.output import note, progress, say, write_json
from lightning_offload.errors import UnsupportedError
from lightning_offload.units import format_seconds


def build_native(*, renew: bool, in_package: bool, as_json: bool) -> None:
    """Build the core unless it is there, and print where it lies.

    Args:
        renew: Whether to build it though it is there.
        in_package: Whether to build it beside the package's sources, and not in the user's cache.
        as_json: Whether to print JSON in place of a line.

    Raises:
        UnsupportedError: It cannot be built, or does not load.
    """
    made = _built(renew=renew, in_package=in_package)
    if as_json:
        write_json(made)
        return
    for_what = f"the native core for torch {made['torch']} and {made['abi']}"
    if made["was_built"]:
        say(f"Built {for_what} in {format_seconds(made['build_seconds'])}: {made['path']}")
    else:
        say(f"There is {for_what} already, --force builds it anew: {made['path']}")


def _built(*, renew: bool, in_package: bool) -> dict[str, Any]:
    """Where the core lies, what it is for, whether it was built now and how long that took; None where it was there."""
    import torch

    from lightning_offload.runtime import native
    from lightning_offload.runtime.native import build, builds

    reason = build.why_not()
    if reason:
        raise UnsupportedError(f"no native core can be built here: {reason}; planned steps run in Python")
    path, seconds = None, None
    if not renew:
        path = builds.find_in_package() if in_package else builds.find()
    if path is None:
        start = time.monotonic()
        path = _compiled(in_package=in_package, renew=renew)
        seconds = time.monotonic() - start
    try:
        native.import_core(path)
    except ImportError as error:
        raise UnsupportedError(f"{str(path)!r} does not load: {error}; build it anew by --force") from error
    return {
        "path": str(path),
        "torch": str(torch.__version__),
        "abi": builds.abi(),
        "was_built": seconds is not None,
        "build_seconds": seconds,
    }


def _compiled(*, in_package: bool, renew: bool) -> Path:
    from lightning_offload.runtime.native import build, builds

    with progress("building the native core"):
        try:
            return builds.build_in_package() if in_package else builds.ensure(renew=renew, retry=True)
        except build.BuildError as error:
            if error.output:
                note(error.output)
            raise
