"""The process of one job: `python -m benchmarks.gpu.child JOB OUTPUT`, started by process.py.

JOB is a job as JSON; what its function returns is written to the file OUTPUT when all is done.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_offload.accelerators import indexed


def main(arguments: list[str]) -> int:
    """Do the job that the command line holds; returns the exit status."""
    job, output = json.loads(arguments[0]), Path(arguments[1])
    module, name = job["function"].split(":")
    device = indexed(torch.device(job["device"]))  # most of torch.cuda takes no "cuda" without a number
    if device.type == "cuda":
        torch.cuda.set_device(device)
    result = getattr(importlib.import_module(module), name)(device, quick=job["quick"], **job["arguments"])
    unfinished = output.with_suffix(".part")
    unfinished.write_text(json.dumps(_plain(result)), encoding="utf-8")
    unfinished.replace(output)
    # A figure is a figure: whatever goes wrong while libraries are torn down must not take it back.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _plain(result: Any) -> Any:
    return dataclasses.asdict(result) if dataclasses.is_dataclass(result) else result


if __name__ == "__main__":
    main(sys.argv[1:])
