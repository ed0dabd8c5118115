"""What the GPU suite measures, the most valuable first.

The seconds of a case are what it is expected to take on a data-centre GPU, the start of its process included.
They decide whether it is started before the minutes are over; how long it may take at most follows from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from benchmarks.gpu.contest import PEERS
from benchmarks.gpu.process import Job

_GIB = 1 << 30
_QUICK_CAP_BYTES = 24 << 20
_BUDGETS = ("h=0.5", "h=0.25", "peak=checkpoint per block", "peak=selective checkpoint")
"""Of contests: the last two compare at equal memory."""

_CHECKPOINTS = PEERS[:2]
_ROOMY = "fits"
MODELS = {
    "resnet50": "ResNet-50",
    "resnet152": "ResNet-152",
    "vgg19": "VGG-19",
    "gpt2-medium": "GPT-2 medium",
    "bert-large": "BERT-large",
    "vit-large": "ViT-L",
}
"""Titles of the models, by name."""

_FIRST_BATCH = {("resnet50", False): 120, ("resnet50", True): 400, ("resnet152", False): 60, ("resnet152", True): 200}
"""Where to begin the search in 12 GiB, under management or plainly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Finds the largest batch: the case's job is run with one size after the other.

    Attributes:
        limit_bytes: What a step may need.
        first: The size to begin with.
        compared_with: Key of the case that searches the same without management.
        config: Settings, ready for JSON.
    """

    limit_bytes: int
    first: int
    compared_with: str
    config: Mapping[str, Any]

    def job(self, job: Job, batch_size: int) -> Job:
        """Return the job of one trial."""
        return dataclasses.replace(job, arguments={**job.arguments, "batch_size": batch_size})


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to measure.

    Attributes:
        key: Its name on the command line and in the result file.
        title: What its rows are called if it fails, or if it is a search.
        seconds: What it, or one trial of its search, is expected to take.
        job: What is run.
        search: How, if it is a search.
    """

    key: str
    title: str
    seconds: float
    job: Job
    search: Search | None = None


def all_cases(device: str, *, quick: bool) -> list[Case]:
    """Return every case, the most valuable first."""
    contests = [_contest(model, device, quick) for model in _by_value()]
    mixed = _contest("gpt2-medium", device, quick, precision="bf16", batch_size=16)
    equal = _at_equal_memory("gpt2-medium", device, quick, precision="bf16", batch_size=16)
    searches = [
        _search(model, cap_bytes, is_managed, device, quick)
        for cap_bytes in ((_QUICK_CAP_BYTES,) if quick else (16 * _GIB, 12 * _GIB))
        for model in ("resnet50", "resnet152")
        for is_managed in (False, True)
    ]
    return [
        _links("links", "measure", 25, device, quick),
        _overhead("resnet50", 45, device, quick),
        _overhead("gpt2-medium", 90, device, quick),
        _activation_share(device, quick),
        equal,
        _timeline("resnet152", "activations=0.4", 95, device, quick),
        _timeline("gpt2-medium", "h=0.5", 75, device, quick, precision="bf16", batch_size=16),
        *contests,
        *searches,
        _links("links-disk", "measure_disk", 30, device, quick),
        mixed,
    ]


def chosen(cases: Sequence[Case], patterns: Sequence[str]) -> list[Case]:
    """Return the cases that match any of the patterns; all without patterns.

    Raises:
        ValueError: If a pattern matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(case.key, pattern) for case in cases):
            raise ValueError(f"no case matches {pattern!r}; the cases are {', '.join(case.key for case in cases)}")
    return [case for case in cases if not patterns or any(fnmatchcase(case.key, p) for p in patterns)]


def _by_value() -> list[str]:
    return ["resnet50", "gpt2-medium", "resnet152", "bert-large", "vgg19", "vit-large"]


def _links(key: str, function: str, seconds: float, device: str, quick: bool) -> Case:
    job = Job(function=f"benchmarks.gpu.links:{function}", device=device, quick=quick)
    return Case(key=key, title=key, seconds=seconds, job=job)


def _overhead(model: str, seconds: float, device: str, quick: bool) -> Case:
    title = f"{MODELS[model]}, budget fits the plain step"
    arguments = {
        "model": model, "title": MODELS[model], "budgets": [_ROOMY], "peers": [], "goals": {_ROOMY: 1.01},
        "num_rounds": 30,
    }  # fmt: skip
    job = Job(function="benchmarks.gpu.contest:contest", device=device, quick=quick, arguments=arguments)
    return Case(key=f"overhead-{model}", title=title, seconds=seconds, job=job)


def _activation_share(device: str, quick: bool) -> Case:
    title = "ResNet-152, 40% of its activation bytes"
    arguments = {
        "model": "resnet152", "title": "ResNet-152", "budgets": ["activations=0.4"], "peers": [],
        "goals": {"activations=0.4": 1.08}, "num_rounds": 15,
    }  # fmt: skip
    job = Job(function="benchmarks.gpu.contest:contest", device=device, quick=quick, arguments=arguments)
    return Case(key="activations-resnet152", title=title, seconds=50, job=job)


def _timeline(
    model: str,
    budget: str,
    seconds: float,
    device: str,
    quick: bool,
    *,
    precision: str = "fp32",
    batch_size: int | None = None,
) -> Case:
    suffix = "" if precision == "fp32" else f" {precision}"
    arguments = {
        "model": model, "title": f"{MODELS[model]}{suffix}", "budget": budget, "num_rounds": 10,
        "precision": precision, "batch_size": batch_size,
    }  # fmt: skip
    job = Job(function="benchmarks.gpu.timeline:timeline", device=device, quick=quick, arguments=arguments)
    key = f"timeline-{model}{suffix.replace(' ', '-')}"
    return Case(key=key, title=f"{MODELS[model]}{suffix}, taken apart", seconds=seconds, job=job)


def _at_equal_memory(model: str, device: str, quick: bool, *, precision: str, batch_size: int) -> Case:
    """Return a contest with both kinds of checkpoints alone, at what each needs: the shortest one that is fair."""
    title = f"{MODELS[model]} {precision}, equal memory"
    arguments = {
        "model": model, "title": title, "budgets": [f"peak={name}" for name in _CHECKPOINTS],
        "peers": list(_CHECKPOINTS), "num_rounds": 8, "precision": precision, "batch_size": batch_size,
    }  # fmt: skip
    job = Job(function="benchmarks.gpu.contest:contest", device=device, quick=quick, arguments=arguments)
    return Case(key=f"equal-{model}-{precision}", title=title, seconds=180, job=job)


def _contest(model: str, device: str, quick: bool, *, precision: str = "fp32", batch_size: int | None = None) -> Case:
    """Return a contest; in half precision a batch is larger, so that the device computes for as long as usual."""
    suffix = "" if precision == "fp32" else f" {precision}"
    title = f"{MODELS[model]}{suffix}"
    arguments = {
        "model": model, "title": title, "budgets": list(_BUDGETS), "peers": list(PEERS), "num_rounds": 8,
        "precision": precision, "batch_size": batch_size,
    }  # fmt: skip
    job = Job(function="benchmarks.gpu.contest:contest", device=device, quick=quick, arguments=arguments)
    return Case(
        key=f"contest-{model}{suffix.replace(' ', '-')}",
        title=title,
        seconds=150 if precision == "fp32" else 340,
        job=job,
    )


def _search(model: str, cap_bytes: int, is_managed: bool, device: str, quick: bool) -> Case:
    gib = cap_bytes / _GIB
    cap = f"{cap_bytes >> 20}MiB" if quick else f"{gib:.0f}GiB"
    kinds = {False: "plain", True: "managed"}
    key = f"batch-{model}-{cap}"
    first = 4 if quick else round(_FIRST_BATCH[model, is_managed] * gib / 12)
    arguments = {"model": model, "cap_bytes": cap_bytes, "is_managed": is_managed}
    job = Job(
        function="benchmarks.gpu.max_batch:trial", device=device, quick=quick, arguments=arguments,
        environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    )  # fmt: skip
    search = Search(
        limit_bytes=cap_bytes,
        first=first,
        compared_with=f"{key}-plain" if is_managed else "",
        config={"cap_bytes": cap_bytes, "optimizer": "SGD with momentum", "allocator": "expandable segments"},
    )
    title = f"{MODELS[model]}, largest batch in {cap}, {kinds[is_managed]}"
    return Case(key=f"{key}-{kinds[is_managed]}", title=title, seconds=30, job=job, search=search)
