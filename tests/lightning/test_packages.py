"""Both Lightning packages, in every order of import: each order is a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS, NEW, OLD = "lightning_offload", "lightning.pytorch", "pytorch_lightning"


@pytest.mark.parametrize(
    "names",
    [(OURS, NEW, OLD), (OLD, NEW, OURS), (OLD, OURS)],
    ids=["ours first", "ours last", "one package"],
)
def test_import_orders(names: tuple[str, ...]) -> None:
    """The name, the class and the monitor work with every package imported, whatever came first."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    script = Path(__file__).with_name("fit_with.py")
    done = subprocess.run(
        [sys.executable, script, *names],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # each Trainer ended up with the strategy of its own package
    packages = [name for name in names if name != OURS]
    assert done.stdout.splitlines() == [f"{name} {name}.strategies.single_device" for name in packages]


def test_subclass_for_the_other_package() -> None:
    """A user's subclass cannot change sides, and the error says what to do."""
    code = """
import lightning.pytorch, lightning_offload, pytorch_lightning
class Mine(lightning_offload.OffloadStrategy): pass
try:
    pytorch_lightning.Trainer(strategy=Mine("1GiB"), accelerator="cpu", logger=False)
except lightning_offload.UnsupportedError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Mine is a subclass of the strategy for lightning.pytorch" in done.stdout
