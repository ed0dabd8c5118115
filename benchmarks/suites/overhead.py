"""What memory management costs in time: with nothing to do, at half of what can be saved, and per op.

The peers, PyTorch's per-block checkpointing and `save_on_cpu`, run on the same model and are there for reading;
where their peak lies between the floor and the plain peak is given as `share_of_savings_kept` (1 is the plain
peak, 0 the smallest feasible budget).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from rich.progress import Progress

from benchmarks import environment, workloads
from benchmarks.pairs import PairedTimes, quartiles, ratio_of, time_pairs
from benchmarks.results import Measurements, Options, Row
from benchmarks.workloads import Workload
from examples.demo.tracker import peak_tracker
from lightning_offload import MemoryPlugin

if TYPE_CHECKING:
    from lightning_offload.plugins.report_data import Report

TITLE = "Step time against plain PyTorch"
FITS_GOAL = 1.03
HALF_GOAL = 1.15
_MAX_WARMUP_STEPS = 12
_NUM_PLAIN_WARMUP_STEPS = 2
_TINY_ELEMENTS = 32
_SMALL_ELEMENTS = 1 << 15  # 128 KiB: large enough to be planned
_Context = Callable[[], AbstractContextManager[object]]
