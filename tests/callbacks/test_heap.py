"""While trials run, the garbage collector and the counting of memory have nothing to do with what was there before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

JOB = Path(__file__).with_name("heap_job.py")
ROOT = JOB.parents[2]


def test_peaks_are_the_same_and_nothing_stays_frozen() -> None:
    """In a process of its own: the tests' fixtures freeze objects themselves."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LIGHTNING_OFFLOAD_CACHE": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(JOB)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    aside, usual = json.loads(done.stdout.splitlines()[-1])
    both = aside["peaks"].keys() & usual["peaks"].keys()
    assert len(both) >= 2
    assert all(aside["peaks"][size] == usual["peaks"][size] for size in both)
    assert len(set(aside["peaks"].values())) > 1
    assert min(aside["trials"]) > 0
    assert aside["run"] == 0
    assert aside["after"] == 0
    assert set(usual["trials"]) == {0}
