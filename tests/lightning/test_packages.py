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
    """The name, the class and the monitor work with every package imported, whatever came first.

    So do what `fit_with` checks beside: that registering is lazy, subclasses, and the tuner.
    """
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
