"""Remembers measured device specs between runs, one JSON file for each key in the user's cache folder.

The folder is :func:`~lightning_offload.user_cache.cache_folder`. Files are replaced atomically, so processes may share
it. A cache that cannot be read or written is as good as none: links are measured again, and a debug log says why.
Entries older than :data:`MAX_AGE_SECONDS` are measured again too, and what was observed since does not make an entry
younger: rates can only fall by observation, so the prior must be renewed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import logging
import os
import platform
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from lightning_offload.accelerators import DeviceKind, kind_of, name_of
from lightning_offload.errors import PlanError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.files import read_file
from lightning_offload.user_cache import cache_folder

_log = logging.getLogger(__name__)
_SUFFIX = ".device.json"

MAX_AGE_SECONDS = 30 * 24 * 3600.0  # of what was measured: disks age, drivers change


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpecKey:
    """What a measured spec depends on.

    Attributes:
        machine: The machine's name; home folders are shared on clusters.
        device: The device's name.
        driver: Version of its driver, "" for a CPU.
        torch: Version of torch.
        num_threads: Threads that compute on a CPU; None for other devices.
        spill_file_system: Where the disk tier is: device, mount point and type of its file system; None without one.
    """

    machine: str
    device: str
    driver: str
    torch: str
    num_threads: int | None
    spill_file_system: str | None


def key_for(device: torch.device, spill_dir: str | os.PathLike[str] | None = None) -> SpecKey:
    """The key under which a device's spec is remembered.

    Args:
        device: The device.
        spill_dir: The folder of the disk tier; None without one.
    """
    is_cpu = device.type == "cpu"
    return SpecKey(
        machine=platform.node(),
        device=name_of(device),
        driver="" if is_cpu else driver_version(kind_of(device)),
        torch=str(torch.__version__),
        num_threads=torch.get_num_threads() if is_cpu else None,
        spill_file_system=None if spill_dir is None else file_system_of(Path(spill_dir)),
    )


def load(key: SpecKey) -> DeviceSpec | None:
    """The remembered spec; None where there is none, or none that is young enough."""
    path = _path_of(key)
    entry = _read(path, key) if path is not None else None
    return entry.spec if entry is not None else None


def store(key: SpecKey, spec: DeviceSpec) -> None:
    """Remember a spec; one that replaces an entry still valid keeps that entry's age."""
    path = _path_of(key)
    if path is None:
        return
    known = _read(path, key)
    measured_at = known.measured_at if known is not None else time.time()
    entry = {"key": dataclasses.asdict(key), "measured_at": measured_at, "spec": spec.to_json()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, json.dumps(entry, indent=1))
        _remove_old(path.parent)
    except OSError as error:
        _log.debug("the measured device is not remembered: %s", error)


# ---- files


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    measured_at: float
    spec: DeviceSpec


def _path_of(key: SpecKey) -> Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    text = json.dumps(dataclasses.asdict(key), sort_keys=True)
    return folder / (hashlib.sha256(text.encode()).hexdigest()[:32] + _SUFFIX)


def _read(path: Path, key: SpecKey) -> _Entry | None:
    try:
        data: Any = json.loads(read_file(path))
        if data["key"] != dataclasses.asdict(key):
            raise ValueError("it is about another machine")
        entry = _Entry(float(data["measured_at"]), DeviceSpec.from_json(data["spec"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError, PlanError) as error:
        _log.debug("the remembered device in %s is ignored: %s", path, error)
        return None
    return entry if 0 <= time.time() - entry.measured_at <= MAX_AGE_SECONDS else None


def _replace(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _remove_old(folder: Path) -> None:
    """Machines and versions come and go, containers with each run: what nobody will read again is removed."""
    oldest = time.time() - MAX_AGE_SECONDS
    for path in folder.glob(f"*{_SUFFIX}"):
        # A file is never older than what it says.
        if path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)


# ---- parts of the key


def driver_version(kind: DeviceKind) -> str:
    """Version of the driver of a kind of device, as NVML tells; else what torch was built for.

    Args:
        kind: The kind of device.
    """
    built_for = f"torch {torch.version.cuda or torch.version.hip or ''}".strip()
    if not kind.has_nvml:
        return built_for
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # another package of that name announces its end
            nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        try:
            version = nvml.nvmlSystemGetDriverVersion()
        finally:
            nvml.nvmlShutdown()
        return version.decode() if isinstance(version, bytes) else str(version)
    except Exception as error:  # not installed, no library, no driver: NVML has an exception for each
        _log.debug("NVML does not tell the driver's version: %s", error)
        return built_for


def file_system_of(folder: Path) -> str:
    """Names the file system of a folder: device, mount point and type; the mount point where no more is known."""
    mount = Path(os.path.realpath(folder))
    while not os.path.ismount(mount) and mount != mount.parent:
        mount = mount.parent
    found = str(mount)
    try:
        for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
            fields = line.split(" ")
            # The last one mounted there is the one in use; blanks in names are octal.
            if len(fields) >= 3 and fields[1].replace("\\040", " ") == str(mount):
                found = f"{fields[0]} on {mount} type {fields[2]}"
    except OSError:
        pass
    return found
