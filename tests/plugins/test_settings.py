"""Every wrong keyword is refused at once, with one of our errors that echoes it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_offload import MemoryPlugin
from lightning_offload.errors import (
    BudgetError,
    OffloadError,
    PlanError,
    PolicyError,
    SpillError,
    UnsupportedError,
)
from lightning_offload.plugins.settings import budget_bytes_on, check_settings

DEFAULTS: dict[str, Any] = {
    "budget": None, "policy": "auto", "tier": "auto", "host_budget": None, "spill_dir": None, "plan": None,
    "keep": (), "enabled": True, "verify": "first", "replace_checkpointing": False, "chunked_loss": False,
}  # fmt: skip

WRONG: list[tuple[str, Any, type[OffloadError]]] = [
    ("budget", "12 bananas", BudgetError),
    ("budget", "", BudgetError),
    ("budget", 0, BudgetError),
    ("budget", -5, BudgetError),
    ("budget", 12, BudgetError),
    ("budget", True, BudgetError),
    ("budget", 1.5, BudgetError),
    ("budget", 0.0, BudgetError),
    ("budget", float("nan"), BudgetError),
    ("budget", float("inf"), BudgetError),
    ("budget", [1], BudgetError),
    ("policy", "fastest", PolicyError),
    ("policy", None, PolicyError),
    ("policy", ["auto"], PolicyError),
    ("tier", "tape", PolicyError),
    ("tier", None, PolicyError),
    ("host_budget", "much", BudgetError),
    ("host_budget", 0.5, BudgetError),
    ("host_budget", 0, BudgetError),
    ("spill_dir", "/no/such/folder", SpillError),
    ("spill_dir", 5, OffloadError),
    ("plan", "/no/such/plan.json", PlanError),
    ("plan", "/", PlanError),
    ("plan", "a\0b", PlanError),
    ("plan", 5, PlanError),
    ("keep", 5, OffloadError),
    ("keep", [1, 2], OffloadError),
    ("verify", "sometimes", PolicyError),
    ("verify", True, PolicyError),
    ("replace_checkpointing", "yes", PolicyError),
    ("chunked_loss", 8, PolicyError),
    ("device", "banana", OffloadError),
    ("device", "meta", UnsupportedError),
    ("device", "mps", UnsupportedError),
    ("module", 5, OffloadError),
]


def test_wrong_keyword_is_one_of_our_errors(subtests: pytest.Subtests) -> None:
    """The constructor raises, before anything is touched, and says what was wrong."""
    for name, item, error in WRONG:
        with subtests.test(name=name):
            with pytest.raises(error) as caught:
                MemoryPlugin(**{name: item})
            assert len(str(caught.value)) > 20


@pytest.mark.parametrize("name", ["policy", "tier", "verify"])
def test_words_are_listed(name: str) -> None:
    """A wrong word is echoed with all that are allowed."""
    with pytest.raises(PolicyError, match=r"'wrong'.*choose one of '") as caught:
        MemoryPlugin(**{name: "wrong"})  # type: ignore[arg-type]
    assert "'auto'" in str(caught.value) or "'first', 'always', 'never'" in str(caught.value)


def test_unknown_keyword_is_a_type_error() -> None:
    """A mistyped keyword is Python's to refuse."""
    with pytest.raises(TypeError, match="bugdet"):
        MemoryPlugin(bugdet=1)  # type: ignore[call-arg]


def test_malformed_plan_file_is_a_plan_error(tmp_path: Path) -> None:
    """Files that hold something else are refused when the plugin is made."""
    for name, data in (("text", b"{}"), ("binary", bytes(range(256))), ("empty", b"")):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(PlanError):
            MemoryPlugin(plan=path)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_folder_that_is_not_writable(tmp_path: Path) -> None:
    """A spill folder is checked for permission."""
    tmp_path.chmod(0o500)
    with pytest.raises(SpillError, match="not writable"):
        MemoryPlugin(spill_dir=tmp_path)


def test_host_budget_without_the_host() -> None:
    """A host budget without the host tier is refused, with the fix."""
    with pytest.raises(PolicyError, match=r"^host_budget='2MiB' means nothing with tier='disk': leave it out, or"):
        MemoryPlugin(tier="disk", host_budget="2MiB")
    assert MemoryPlugin(tier="auto", host_budget="2MiB").enabled


def test_spill_folder_without_the_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A spill folder is no error with the host tier, so that the tier can be changed alone; it need not even exist."""
    with caplog.at_level(logging.INFO):
        assert MemoryPlugin(tier="host", spill_dir=tmp_path / "missing").enabled
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", f"spill_dir='{tmp_path / 'missing'}' is not used with tier='host', which has no disk")
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert MemoryPlugin(spill_dir=tmp_path).enabled
    assert not caplog.records


@pytest.mark.parametrize("tier", ["auto", "host", "disk"])
def test_tiers(tier: str) -> None:
    """Every tier that there is can be asked for; nothing is opened for that."""
    assert MemoryPlugin(tier=tier).enabled


def test_checked_settings() -> None:
    """Texts become bytes, one pattern becomes a tuple."""
    found = check_settings(**{**DEFAULTS, "host_budget": "2MiB", "keep": "head*"})
    assert (found.host_budget_bytes, found.keep, found.enabled) == (2 << 20, ("head*",), True)
    assert check_settings(**{**DEFAULTS, "keep": ["a", "b"]}).keep == ("a", "b")


def test_switch_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """LIGHTNING_OFFLOAD=0 switches off; keywords are checked all the same."""
    monkeypatch.setenv("LIGHTNING_OFFLOAD", "0")
    assert not MemoryPlugin().enabled
    with pytest.raises(PolicyError):
        MemoryPlugin(policy="fastest")
    monkeypatch.setenv("LIGHTNING_OFFLOAD", "1")
    assert MemoryPlugin().enabled
    assert not MemoryPlugin(enabled=False).enabled


def test_budget_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of whatever is given none, in bytes or as a fraction; an empty one is none."""
    monkeypatch.setenv("LIGHTNING_OFFLOAD_BUDGET", " 3 MiB ")
    assert MemoryPlugin().budget == "3 MiB"
    assert budget_bytes_on(check_settings(**DEFAULTS), torch.device("cpu")) == 3 << 20
    assert MemoryPlugin(budget="2MiB").budget == "2MiB"
    monkeypatch.setenv("LIGHTNING_OFFLOAD_BUDGET", "0.5")
    assert MemoryPlugin().budget == 0.5
    monkeypatch.setenv("LIGHTNING_OFFLOAD_BUDGET", "4194304")
    assert budget_bytes_on(check_settings(**DEFAULTS), torch.device("cpu")) == 4 << 20
    monkeypatch.setenv("LIGHTNING_OFFLOAD_BUDGET", "")
    assert MemoryPlugin().budget is None


def test_bad_budget_of_the_environment(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    """The error names the variable, its text and what is allowed; who gives a budget does not read it."""
    for text in ["12 parsecs", "1.5", "nan", "-3", "0", "12G", "12"]:
        with subtests.test(text=text):
            monkeypatch.setenv("LIGHTNING_OFFLOAD_BUDGET", text)
            with pytest.raises(BudgetError, match=f"LIGHTNING_OFFLOAD_BUDGET='{text}' is no budget: .*") as caught:
                MemoryPlugin()
            assert "12GiB" in str(caught.value) or "12B" in str(caught.value) or "GB" in str(caught.value)
            assert MemoryPlugin(budget="2MiB").budget == "2MiB"


def test_budget_on_a_cpu() -> None:
    """Bytes are bytes; no budget is none; a fraction needs a device that has memory of its own."""
    cpu = torch.device("cpu")
    assert budget_bytes_on(check_settings(**{**DEFAULTS, "budget": "3MiB"}), cpu) == 3 << 20
    assert budget_bytes_on(check_settings(**DEFAULTS), cpu) is None
    with pytest.raises(BudgetError, match="fraction"):
        budget_bytes_on(check_settings(**{**DEFAULTS, "budget": 0.5}), cpu)


@pytest.mark.parametrize(
    ("total_gib", "free_gib", "reserved_gib", "slack_gib", "expected_gib"),
    [
        (80, 78, 1, 0, 75),  # five per cent
        (80, 78, 1, 3, 72),  # and what was seen to be in pieces
        (80, 78, 1, 40, 67),  # up to a tenth
        (16, 15, 0, 0, 14),  # 1 GiB at least
        (2, 2, 0, 0, 1.5),  # and at most a quarter
        (80, 30, 10, 0, 36),  # the rest is another's
    ],
)
def test_default_budget_on_cuda(
    monkeypatch: pytest.MonkeyPatch,
    total_gib: float,
    free_gib: float,
    reserved_gib: float,
    slack_gib: float,
    expected_gib: float,
) -> None:
    """What is free or this process's, less room for what is not alive in tensors; given budgets are as they are."""
    gib, cuda = 1 << 30, torch.device("cuda", 0)
    properties = SimpleNamespace(total_memory=int(total_gib * gib))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gib * gib), int(total_gib * gib)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(reserved_gib * gib))
    slack_bytes = int(slack_gib * gib)
    assert budget_bytes_on(check_settings(**DEFAULTS), cuda, slack_bytes) == int(expected_gib * gib)
    assert budget_bytes_on(check_settings(**{**DEFAULTS, "budget": "3MiB"}), cuda, slack_bytes) == 3 << 20
    assert budget_bytes_on(check_settings(**{**DEFAULTS, "budget": 0.5}), cuda, slack_bytes) == total_gib * gib / 2


def test_properties_before_the_device_is_known() -> None:
    """A budget in bytes is known at once, a fraction only with its device."""
    memory = MemoryPlugin("4MiB", policy="all-swap", device="cpu")
    assert (memory.budget_bytes, memory.policy, memory.device) == (4 << 20, "all-swap", torch.device("cpu"))
    assert MemoryPlugin("4MiB").budget_bytes == 4 << 20
    assert MemoryPlugin(0.5).budget_bytes is None
    assert MemoryPlugin().device is None
