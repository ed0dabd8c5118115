"""The user's folder for what outlives a process: measured devices, and the runtime's native core.

It is ``$LIGHTNING_OFFLOAD_CACHE``, else ``lightning-offload`` in the system's place for caches.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

__all__ = ["cache_folder", "native_folder"]

_log = logging.getLogger(__name__)
_FOLDER = "LIGHTNING_OFFLOAD_CACHE"
_NATIVE_FOLDER = "LIGHTNING_OFFLOAD_NATIVE_CACHE"


def cache_folder() -> Path | None:
    """The folder; None where the user wants no cache (an empty variable), or has no home."""
    chosen = os.environ.get(_FOLDER)
    if chosen == "":
        return None
    return _expanded(chosen) if chosen is not None else _usual()


def native_folder() -> Path | None:
    """Where the native core is built: ``$LIGHTNING_OFFLOAD_NATIVE_CACHE``, else ``native`` in the folder.

    An empty ``LIGHTNING_OFFLOAD_CACHE`` stands for no measurements of other runs. The core is none, and takes long to
    build: it goes to the usual place then. None where the user has no home.
    """
    chosen = os.environ.get(_NATIVE_FOLDER)
    if chosen:
        return _expanded(chosen)
    general = cache_folder() or _usual()
    return general / "native" if general is not None else None


def _usual() -> Path | None:
    general = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        elif os.path.isabs(general):  # the specification has relative ones ignored
            base = Path(general)
        else:
            base = Path.home() / ".cache"
    except RuntimeError as error:
        _log.debug("nothing is kept between runs: %s", error)
        return None
    return base / "lightning-offload"


def _expanded(text: str) -> Path | None:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        _log.debug("nothing is kept between runs: %s", error)
        return None
