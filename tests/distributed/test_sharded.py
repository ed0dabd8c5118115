"""Parameters that are sharded by FSDP2 come and go; they are counted as they do."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.launching import torchrun

SCRIPT = Path(__file__).with_name("sharded_checks.py")


def test_sharded_parameters(tmp_path: Path) -> None:
    """On both ranks: plain FSDP2's bits, and peaks that prediction, measurement and our own count agree on."""
    torchrun(SCRIPT, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"done0", "done1"}
