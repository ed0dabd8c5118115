"""How fast bytes leave the device and come back, through the package's own lanes and by plain copies."""

from __future__ import annotations

import torch
from rich.progress import Progress

from benchmarks import environment
from benchmarks.gpu.links import measure, measure_disk
from benchmarks.results import Measurements, Options, together

TITLE = "Links"


def run(options: Options, progress: Progress) -> Measurements:
    """Measure the links of one device; see `benchmarks.gpu.links`."""
    device = torch.device(options.device) if options.device is not None else environment.device()
    task = progress.add_task("links", total=2)
    parts = {}
    for name, part in {"host": measure, "disk": measure_disk}.items():
        parts[name] = part(device, quick=options.quick)
        progress.advance(task)
    return together(parts)
