"""What SECURITY.md says: what is read and written, with which modes; JSON alone, no pickle, no network."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import io
import json
import os
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from lightning_offload import MemoryPlugin, PlanError, accelerate, cli
from lightning_offload.capture import spec_cache
from lightning_offload.graph import files
from lightning_offload.graph.catalog import device_spec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.plugins import data_parallel
from lightning_offload.runtime.spill_file import SpillFile
from lightning_offload.user_cache import cache_folder
from tests.adapters.conftest import no_accelerator_state as no_accelerator_state
from tests.cli.running import SMALL
from tests.graph.building import DEVICE
from tests.plugins.training import net, rows, train_step
from tests.report.steps import MIXED, SIX, plan_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
NEVER = {
    "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "socket", "ssl", "http", "urllib",
    "urllib3", "requests", "httpx", "ftplib", "smtplib", "xmlrpc", "subprocess", "webbrowser", "code", "pty",
}  # fmt: skip


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((ROOT / "lightning_offload").rglob("*.py")):
        yield str(path.relative_to(ROOT / "lightning_offload")), ast.parse(path.read_text(encoding="utf-8"))


def test_nothing_imports_what_it_must_not() -> None:
    """No pickle and no network in any file of the package, and other programs in the native core's build alone."""
    found = set()
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found.update((name, alias.name.partition(".")[0]) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.add((name, (node.module or "").partition(".")[0]))
    assert len(found) > 500
    assert sorted(each for each in found if each[1] in NEVER) == [
        ("runtime/native/build.py", "subprocess"),
    ]


def test_nothing_runs_text() -> None:
    """Neither eval nor exec but once, no torch.load and torch.save, and no shell."""
    found = set()
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in {
                    "eval",
                    "exec",
                    "compile",
                    "__import__",
                    "torch.load",
                    "torch.save",
                    "os.system",
                    "os.popen",
                }:
                    found.add((name, called))
    assert found == {("runtime/environment.py", "eval")}


def test_the_environment_that_is_read() -> None:
    """Every variable is on the page."""
    text = "\n".join(ast.unparse(tree) for _, tree in sources())
    read = set(re.findall(r"environ(?:\.get\(|\[)'([A-Z_]+)'", text))
    read |= {name for name in re.findall(r"'([A-Z][A-Z_]{5,})'", text) if name.startswith("LIGHTNING_OFFLOAD")}
    read |= set(data_parallel._LOCAL_SIZES)
    assert len(read) >= 5
    assert sorted(name for name in read if f"`{name}`" not in PAGE) == []


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of more than 100 bytes are too large."""
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 100)


@pytest.mark.usefixtures("small_limit")
def test_files_that_are_too_large(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Are refused wherever files are read, with the limit; a remembered device is measured anew."""
    path = tmp_path / "large.json"
    path.write_text(plan_of(SIX, MIXED).to_json())
    with pytest.raises(PlanError, match=r"large\.json' cannot be read: it has more than 100 B"):
        MemoryPlugin(plan=path)
    for arguments in (["explain", str(path)], ["plan", *SMALL[:5], "--device", str(path)]):
        assert cli.run(arguments) == 2
        assert "it has more than 100 B, the most that is read" in capsys.readouterr().err
    monkeypatch.setenv("LIGHTNING_OFFLOAD_CACHE", str(tmp_path / "cache"))
    key = spec_cache.key_for(torch.device("cpu"))
    spec_cache.store(key, dataclasses.replace(DEVICE, kind="cpu"))
    assert spec_cache.load(key) is None
    (tmp_path / accelerate.PLANS_FILE).write_text(" " * 101)
    accelerator = Accelerator(cpu=True)
    with accelerate.prepare_offload(accelerator, net(), "1GiB") as memory, pytest.warns(UserWarning, match="100 B"):
        accelerate._load_plans(memory, tmp_path / accelerate.PLANS_FILE)


def test_the_limit_on_the_page() -> None:
    """Is that of the code, and larger than any step's file by far."""
    assert f"more than {files.MAX_FILE_BYTES >> 20} MiB is refused" in PAGE


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_spill_file_is_nobody_elses(tmp_path: Path) -> None:
    """It has no name, and its owner alone may read it."""
    file = SpillFile(str(tmp_path))
    try:
        file.resize(1 << 16)
        assert list(tmp_path.iterdir()) == []
        assert stat.S_IMODE(os.fstat(file._fd).st_mode) == 0o600
        assert not os.get_inheritable(file._fd)
    finally:
        file.close()


def test_what_is_remembered_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One JSON file a key, readable by its owner; none with an empty variable."""
    monkeypatch.setenv("LIGHTNING_OFFLOAD_CACHE", str(tmp_path / "cache"))
    key = spec_cache.key_for(torch.device("cpu"))
    spec_cache.store(key, dataclasses.replace(DEVICE, kind="cpu"))
    (path,) = (tmp_path / "cache").iterdir()
    assert mode_of(path) == 0o600
    json.loads(path.read_text())
    monkeypatch.setenv("LIGHTNING_OFFLOAD_CACHE", "")
    assert cache_folder() is None


def test_files_that_were_asked_for_follow_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan, step, page and trace; nothing else is written."""
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o027)
    try:
        arguments = ["--output", "p.json", "--report", "r.html", "--trace", "t.json"]
        assert cli.run(["plan", *SMALL, *arguments]) == 0
    finally:
        os.umask(before)
    assert {path.name: mode_of(path) for path in tmp_path.iterdir()} == dict.fromkeys(
        ("p.json", "p.graph.json", "r.html", "t.json"), 0o640
    )
    page = Path("r.html").read_text(encoding="utf-8")
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\';' in page


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning, training, reporting and looking at devices open no socket."""

    class Refused(socket.socket):
        def __init__(self, *args: object, **kwargs: object) -> None:
            raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", Refused)
    monkeypatch.setattr(socket, "create_connection", Refused)
    monkeypatch.setattr(socket, "getaddrinfo", Refused)
    monkeypatch.chdir(tmp_path)
    assert cli.run(["plan", *SMALL, "--output", "p.json", "--report", "r.html"]) == 0
    assert cli.run(["explain", "p.json"]) == 0
    assert cli.run(["devices"]) == 0
    model = net()
    with MemoryPlugin("1GiB", policy="all-swap", module=model) as memory:
        for _ in range(4):
            train_step(model, rows(32), memory)
    memory.report().save_html(tmp_path / "page.html")


def test_a_plugins_state_is_plain_data() -> None:
    """JSON can hold it, and torch loads it without running anything."""
    model = net()
    with MemoryPlugin("1GiB", policy="all-swap", module=model) as memory:
        for _ in range(4):
            train_step(model, rows(32), memory)
    state = memory.state_dict()
    assert json.loads(json.dumps(state)) == state
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state


def test_a_plan_holds_names_and_numbers_alone() -> None:
    """Of what is in a plan and a step every text is short, and none is a tensor's."""
    longest = max(len(text) for text in re.findall(r'"([^"]*)"', SIX.to_json() + plan_of(SIX, MIXED).to_json()))
    assert longest < 200
    with pytest.raises(PlanError, match="unknown fields"):
        MemoryPlan.from_json(plan_of(SIX, MIXED).to_json().replace('"policy"', '"run": "rm", "policy"', 1))


def test_a_foreign_plan_is_refused_before_a_step_runs_under_it(caplog: pytest.LogCaptureFixture) -> None:
    """With the plan of another step training does not run under it, and one line says so."""
    model = net()
    made = plan_of(SIX, MIXED)
    with MemoryPlugin(plan=made, module=model) as memory:
        train_step(model, rows(32), memory)  # is recorded
        train_step(model, rows(32), memory)
        assert memory.phase == "verifying"
        assert memory.report().budget_bytes == made.budget_bytes
    (message,) = caplog.messages
    assert "is for another step than the recorded one" in message


def test_the_citation_is_of_this_version() -> None:
    """Version and licence are the package's."""
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    found = dict(re.findall(r"^([a-z-]+): ([^\n>]+)$", text, re.MULTILINE))
    assert found["version"] == importlib.metadata.version("lightning-offload")
    assert found["license"] == "Apache-2.0"
    assert found["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= {*found, *re.findall(r"^([a-z]+):$", text, re.MULTILINE)}


def test_the_device_specs_of_the_catalogue_are_json() -> None:
    """What `--device FILE.json` takes is what it wrote."""
    assert json.loads(device_spec("t4").to_json())["lightning_offload"] == "device_spec"
