"""Parameters that are sharded by FSDP2 come and go; they are counted as they do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launching import torchrun
from tests.shares import is_all

SCRIPT = Path(__file__).with_name("sharded_checks.py")


@pytest.mark.parametrize(("engine", "part"), [("native", "policies"), ("python", "cases")])
def test_sharded_parameters(engine: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On both ranks: plain FSDP2's bits, and peaks that prediction, measurement and our own count agree on."""
    if engine == "python":
        monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", "python")
    else:
        monkeypatch.delenv("LIGHTNING_OFFLOAD_ENGINE", raising=False)
    torchrun(SCRIPT, tmp_path, "all" if is_all() else part)
    assert {path.name for path in tmp_path.iterdir()} == {"done0", "done1"}
