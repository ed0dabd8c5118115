"""Measured devices are remembered between runs, and a cache that does not work is as good as none."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_offload.accelerators import CUDA, ROCM
from lightning_offload.capture import spec_cache
from lightning_offload.capture.spec_cache import SpecKey, file_system_of, key_for, load, store
from lightning_offload.user_cache import cache_folder
from tests.graph.building import DEVICE

CPU = torch.device("cpu")
SPEC = DEVICE
DAY = 24 * 3600.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that does not exist yet."""
    chosen = tmp_path / "deep" / "cache"
    monkeypatch.setenv("LIGHTNING_OFFLOAD_CACHE", str(chosen))
    return chosen


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, to be set."""
    now = [1e9]
    monkeypatch.setattr(spec_cache, "time", types.SimpleNamespace(time=lambda: now[0]))
    return now


def key(**changes: Any) -> SpecKey:
    """A key."""
    found = SpecKey(machine="here", device="cpu", driver="", torch="2.9", num_threads=4, spill_file_system=None)
    return dataclasses.replace(found, **changes)


def files(folder: Path) -> list[Path]:
    """All that is in a folder."""
    return sorted(folder.iterdir())


# ---- remembering


def test_what_was_stored_is_loaded(folder: Path) -> None:
    """A spec survives, in one file that is whole, under its own key only."""
    assert load(key()) is None
    store(key(), SPEC)
    assert load(key()) == SPEC
    assert len(files(folder)) == 1
    for change in (
        {"machine": "there"}, {"device": "NVIDIA H200"}, {"driver": "580.1"}, {"torch": "2.10"}, {"num_threads": 2},
        {"spill_file_system": "/dev/sda1 on / type ext4"},
    ):  # fmt: skip
        assert load(key(**change)) is None


def test_a_spec_is_replaced(folder: Path) -> None:
    """The last one stored counts, and nothing else is left in the folder."""
    store(key(), SPEC)
    other = dataclasses.replace(SPEC, d2h_bytes_per_second=1.0)
    store(key(), other)
    assert load(key()) == other
    assert len(files(folder)) == 1


def test_old_entries_are_measured_again(folder: Path, clock: list[float]) -> None:
    """After 30 days an entry is as good as none; one from the future too."""
    store(key(), SPEC)
    clock[0] += 29.9 * DAY
    assert load(key()) == SPEC
    clock[0] += 0.2 * DAY
    assert load(key()) is None
    clock[0] -= 31 * DAY
    assert load(key()) is None


def test_an_update_does_not_make_an_entry_younger(folder: Path, clock: list[float]) -> None:
    """Corrected rates are measured again when the first ones would have been; then the age counts anew."""
    store(key(), SPEC)
    clock[0] += 20 * DAY
    store(key(), SPEC)
    clock[0] += 11 * DAY
    assert load(key()) is None
    store(key(), SPEC)
    clock[0] += 29 * DAY
    assert load(key()) == SPEC


def test_files_of_nobody_are_removed(folder: Path) -> None:
    """What is too old for anybody goes when something is stored; files of others stay."""
    store(key(), SPEC)
    foreign = folder / "notes.txt"
    foreign.write_text("mine")
    for path in files(folder):
        os.utime(path, (1e9, 1e9))
    store(key(machine="there"), SPEC)
    assert foreign.exists()
    assert load(key()) is None
    assert load(key(machine="there")) == SPEC
    assert len(files(folder)) == 2


# ---- caches that do not work


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "{}", '{"key": null}', "\0\xff", "[" * 100_000,
        '{"key": KEY, "measured_at": "soon", "spec": SPEC}',
        '{"key": KEY, "measured_at": NaN, "spec": SPEC}',
        '{"key": KEY, "measured_at": 1e9, "spec": "{}"}',
        '{"key": KEY, "measured_at": 1e9, "spec": 7}',
        '{"key": {"machine": "there"}, "measured_at": 1e9, "spec": SPEC}',
    ],
)  # fmt: skip
def test_a_corrupt_entry_is_ignored_and_replaced(
    text: str, folder: Path, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is in the file, nothing is raised, a debug log says so, and the next measurement replaces it."""
    caplog.set_level(logging.DEBUG)
    store(key(), SPEC)
    (path,) = files(folder)
    text = text.replace("KEY", json.dumps(dataclasses.asdict(key()))).replace("SPEC", json.dumps(SPEC.to_json()))
    path.write_text(text, encoding="latin-1")
    assert load(key()) is None
    assert "NaN" in text or "is ignored" in caplog.text
    store(key(), SPEC)
    assert load(key()) == SPEC


def test_a_folder_that_cannot_be_made_is_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where nothing can be written, nothing is remembered, and a debug log says why."""
    caplog.set_level(logging.DEBUG)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LIGHTNING_OFFLOAD_CACHE", str(tmp_path / "file" / "cache"))
    store(key(), SPEC)
    assert load(key()) is None
    assert "not remembered" in caplog.text


def test_a_write_that_fails_leaves_the_entry_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are replaced as a whole or not at all, and no temporary file stays."""
    store(key(), SPEC)

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        store(key(), dataclasses.replace(SPEC, d2h_bytes_per_second=1.0))
    assert load(key()) == SPEC
    assert len(files(folder)) == 1


def test_an_empty_setting_switches_the_cache_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read and nothing written."""
    monkeypatch.setenv("LIGHTNING_OFFLOAD_CACHE", "")
    assert cache_folder() is None
    store(key(), SPEC)
    assert load(key()) is None


# ---- where


def test_the_folder_is_the_systems_place_for_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$XDG_CACHE_HOME where it is absolute, else ~/.cache, on a Mac ~/Library/Caches; our own setting goes first."""
    monkeypatch.delenv("LIGHTNING_OFFLOAD_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "lightning-offload"
    for relative in ("", "xdg"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert cache_folder() == tmp_path / ".cache" / "lightning-offload"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == tmp_path / "Library" / "Caches" / "lightning-offload"
    monkeypatch.setenv("LIGHTNING_OFFLOAD_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"


def test_no_home_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home folder has nothing remembered."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("LIGHTNING_OFFLOAD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder() is None
    assert load(key()) is None


# ---- keys


def test_the_key_of_a_cpu(tmp_path: Path) -> None:
    """A CPU's rates depend on its threads; it has no driver."""
    found = key_for(CPU)
    assert (found.device, found.driver, found.num_threads) == ("cpu", "", torch.get_num_threads())
    assert found.spill_file_system is None
    assert type(found.torch) is str
    assert key_for(CPU, tmp_path).spill_file_system == file_system_of(tmp_path)


def test_the_key_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU goes by its name and its driver's version; the host's threads do not matter."""
    monkeypatch.setattr(spec_cache, "name_of", lambda device: "NVIDIA H200")
    monkeypatch.setitem(sys.modules, "pynvml", _nvml("580.95"))
    found = key_for(torch.device("cuda", 1))
    assert (found.device, found.driver, found.num_threads) == ("NVIDIA H200", "580.95", None)


def _nvml(version: object) -> Any:
    calls: list[str] = []

    def tell() -> object:
        if isinstance(version, Exception):
            raise version
        return version

    return types.SimpleNamespace(
        calls=calls,
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlSystemGetDriverVersion=tell,
    )


def test_the_drivers_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML tells it, as text or bytes by its version, and is shut down; where it cannot, torch's build stands in."""
    for answer in ("580.95", b"580.95"):
        nvml = _nvml(answer)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        assert spec_cache.driver_version(CUDA) == "580.95"
        assert nvml.calls == ["init", "shutdown"]
        nvml.calls.clear()
        assert spec_cache.driver_version(ROCM).startswith("torch")
        assert not nvml.calls, "a device without NVML is asked by it"
    monkeypatch.setitem(sys.modules, "pynvml", _nvml(RuntimeError("no driver")))
    assert spec_cache.driver_version(CUDA).startswith("torch")
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert spec_cache.driver_version(CUDA).startswith("torch")


def test_folders_of_one_file_system_share_its_name(tmp_path: Path) -> None:
    """It names the mount point, and a folder that does not exist has that of what is above it."""
    (tmp_path / "a").mkdir()
    assert file_system_of(tmp_path / "a") == file_system_of(tmp_path) == file_system_of(tmp_path / "none" / "such")
    if Path("/proc/self/mounts").exists():
        assert file_system_of(Path("/proc")) != file_system_of(Path("/"))
        assert " on /proc type proc" in file_system_of(Path("/proc"))
