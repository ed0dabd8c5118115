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
from benchmarks.papers import captures
from lightning_offload.planning.policies import PUBLISHED

_GIB = 1 << 30
_QUICK_CAP_BYTES = 24 << 20
_BUDGETS = ("h=0.5", "h=0.25", "peak=checkpoint per block", "peak=selective checkpoint")
"""Of contests: the last two compare at equal memory."""

_CHECKPOINTS = PEERS[:2]
_REFUSED_BY = {"vgg19": PEERS[1]}
"""Peers that cannot run a model: selective checkpointing keeps results of convolutions, which VGG's ReLUs write."""
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
    """Finds the largest size, of a batch or in depth: the case's job is run with one after the other.

    Attributes:
        limit_bytes: What a step may need.
        first: The size to begin with.
        varies: The job's argument that is the size.
        compared_with: Key of the case that searches the same without management.
        config: Settings, ready for JSON.
    """

    limit_bytes: int
    first: int
    compared_with: str
    varies: str = "batch_size"
    config: Mapping[str, Any]

    def job(self, job: Job, size: int) -> Job:
        """Return the job of one trial."""
        return dataclasses.replace(job, arguments={**job.arguments, self.varies: size})


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
    searches = [
        _search(model, cap_bytes, is_managed, quick=quick)
        for cap_bytes in ((_QUICK_CAP_BYTES,) if quick else (16 * _GIB, 12 * _GIB))
        for model in ("resnet50", "resnet152")
        for is_managed in (False, True)
    ]
    cases = [
        Case(key="links", title="links", seconds=25, job=_job("links:measure")),
        _overhead("resnet50", 45),
        _overhead("gpt2-medium", 90),
        _activation_share(),
        _at_equal_memory("gpt2-medium", precision="bf16", batch_size=16),
        *(setting.case() for setting in SETTINGS),
        *(_depths(is_managed, quick=quick) for is_managed in (False, True)),
        _timeline("resnet152", "activations=0.4", 95),
        _timeline("gpt2-medium", "h=0.5", 75, precision="bf16", batch_size=16),
        *map(_contest, _BY_VALUE),
        *searches,
        Case(key="links-disk", title="links-disk", seconds=30, job=_job("links:measure_disk")),
        _contest("gpt2-medium", precision="bf16", batch_size=16),
    ]
    return [dataclasses.replace(case, job=dataclasses.replace(case.job, device=device, quick=quick)) for case in cases]


def _job(function: str, *, environment: Mapping[str, str] | None = None, **arguments: Any) -> Job:
    """A job of a module of this package, on whatever device."""
    return Job(
        function=f"benchmarks.gpu.{function}", device="", arguments=arguments, environment=environment or {}
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A step that a paper has figures of.

    Attributes:
        key: Of the case, without what all have.
        title: What its rows are called.
        network: Name of the network.
        batch_size: Samples in the batch.
        policies: Who plans within the cap: the paper's own first.
        seconds: What it is expected to take.
        gpu: Name in the catalogue of the card whose memory is the cap; empty where that is given.
        cap_bytes: It.
        cap_share: It, as a share of plain training's own peak.
    """

    key: str
    title: str
    network: str
    batch_size: int
    policies: tuple[str, ...]
    seconds: float
    gpu: str = ""
    cap_bytes: int | None = None
    cap_share: float | None = None

    def case(self) -> Case:
        """The case."""
        job = _job(
            "paper:within_cap", environment=_EXPANDABLE, title=self.title, network=self.network,
            batch_size=self.batch_size, policies=list(self.policies), cap_share=self.cap_share,
            cap_bytes=card_bytes(self.gpu) if self.gpu else self.cap_bytes,
        )  # fmt: skip
        return Case(key=f"paper-{self.key}", title=self.title, seconds=self.seconds, job=job)


def card_bytes(gpu: str) -> int:
    """What a process may have on a card of the catalogue beside its context."""
    return captures.memory_bytes(captures.device(gpu)) - captures.CONTEXT_BYTES


SETTINGS = (
    Setting(
        key="accudnn-resnet152", title="AccUDNN, ResNet-152, b=140", network="resnet152", batch_size=140,
        cap_bytes=8 * _GIB, policies=("accudnn", "auto"), seconds=150,
    ),
    Setting(
        key="vdnn-vgg16", title="vDNN, VGG-16, b=256", network="vgg16", batch_size=256, gpu="gtx-titan-x",
        policies=("vdnn-dyn", "auto"), seconds=120,
    ),
    Setting(
        key="hascoet-vgg19", title="Hascoet et al., VGG-19, b=64, 35% less memory", network="vgg19", batch_size=64,
        cap_share=0.65, policies=("cpu-offload", "auto"), seconds=90,
    ),
    Setting(
        key="superneurons-1920", title="SuperNeurons, ResNet-1920, b=16", network="resnet-1920", batch_size=16,
        gpu="k40c", policies=("auto",), seconds=400,
    ),
    Setting(
        key="superneurons-2500", title="SuperNeurons, ResNet-2500, b=1", network="resnet-2500", batch_size=1,
        gpu="k40c", policies=("auto",), seconds=400,
    ),
    Setting(
        key="meng-resnet50", title="Meng et al., ResNet-50, b=664", network="resnet50", batch_size=664, gpu="m40",
        policies=("swap-out-in", "auto"), seconds=200,
    ),
    Setting(
        key="meng-seq2seq-400", title="Meng et al., seq2seq, T=400, b=60", network="seq2seq-400", batch_size=60,
        gpu="m40", policies=("swap-out-in", "auto"), seconds=200,
    ),
    Setting(
        key="policies-resnet152", title="ResNet-152, b=64, every policy", network="resnet152", batch_size=64,
        gpu="k40c", policies=(*PUBLISHED, "auto"), seconds=540,
    ),
)  # fmt: skip
"""The most valuable first."""

_EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def _depths(is_managed: bool, *, quick: bool) -> Case:
    """Return the search for the deepest residual network of a batch of 16 in the memory of a K40c."""
    cap_bytes = _QUICK_CAP_BYTES // 2 if quick else card_bytes("k40c")
    kind = "managed" if is_managed else "plain"
    key = "paper-superneurons-depth"
    job = _job(
        "paper:depth", environment=_EXPANDABLE, cap_bytes=cap_bytes, batch_size=16, is_managed=is_managed
    )  # fmt: skip
    search = Search(
        limit_bytes=cap_bytes, first=4 if quick else 1920 if is_managed else 500, varies="depth",
        compared_with=f"{key}-plain" if is_managed else "", config=_capped(cap_bytes),
    )  # fmt: skip
    title = f"SuperNeurons, deepest ResNet, b=16, {cap_bytes / _GIB:.1f} GiB, {kind}"
    return Case(key=f"{key}-{kind}", title=title, seconds=300 if is_managed else 60, job=job, search=search)


def _capped(cap_bytes: int) -> dict[str, Any]:
    return {"cap_bytes": cap_bytes, "optimizer": "SGD with momentum", "allocator": "expandable segments"}


def chosen(cases: Sequence[Case], patterns: Sequence[str]) -> list[Case]:
    """Return the cases that match any of the patterns; all without patterns.

    Raises:
        ValueError: If a pattern matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(case.key, pattern) for case in cases):
            raise ValueError(f"no case matches {pattern!r}; the cases are {', '.join(case.key for case in cases)}")
    return [case for case in cases if not patterns or any(fnmatchcase(case.key, p) for p in patterns)]


_BY_VALUE = ("resnet50", "gpt2-medium", "resnet152", "bert-large", "vgg19", "vit-large")


def _overhead(model: str, seconds: float) -> Case:
    job = _job(
        "contest:contest", model=model, title=MODELS[model], budgets=[_ROOMY], peers=[], goals={_ROOMY: 1.01},
        num_rounds=30,
    )  # fmt: skip
    title = f"{MODELS[model]}, budget fits the plain step"
    return Case(key=f"overhead-{model}", title=title, seconds=seconds, job=job)


def _activation_share() -> Case:
    share = "activations=0.4"
    job = _job(
        "contest:contest", model="resnet152", title="ResNet-152", budgets=[share], peers=[], goals={share: 1.08},
        num_rounds=15,
    )  # fmt: skip
    title = "ResNet-152, 40% of its activation bytes"
    return Case(key="activations-resnet152", title=title, seconds=50, job=job)


def _timeline(
    model: str, budget: str, seconds: float, *, precision: str = "fp32", batch_size: int | None = None
) -> Case:  # fmt: skip
    suffix = "" if precision == "fp32" else f" {precision}"
    title = f"{MODELS[model]}{suffix}"
    job = _job(
        "timeline:timeline", model=model, title=title, budget=budget, num_rounds=10, precision=precision,
        batch_size=batch_size,
    )  # fmt: skip
    key = f"timeline-{model}{suffix.replace(' ', '-')}"
    return Case(key=key, title=f"{title}, taken apart", seconds=seconds, job=job)


def _at_equal_memory(model: str, *, precision: str, batch_size: int) -> Case:
    """Return a contest with both kinds of checkpoints alone, at what each needs: the shortest one that is fair."""
    title = f"{MODELS[model]} {precision}, equal memory"
    job = _job(
        "contest:contest", model=model, title=title, budgets=[f"peak={name}" for name in _CHECKPOINTS],
        peers=list(_CHECKPOINTS), num_rounds=8, precision=precision, batch_size=batch_size,
    )  # fmt: skip
    return Case(key=f"equal-{model}-{precision}", title=title, seconds=180, job=job)


def _contest(model: str, *, precision: str = "fp32", batch_size: int | None = None) -> Case:
    """Return a contest; in half precision a batch is larger, so that the device computes for as long as usual."""
    suffix = "" if precision == "fp32" else f" {precision}"
    title, refused = f"{MODELS[model]}{suffix}", _REFUSED_BY.get(model)
    budgets, peers = [b for b in _BUDGETS if b != f"peak={refused}"], [p for p in PEERS if p != refused]
    job = _job(
        "contest:contest", model=model, title=title, budgets=budgets, peers=peers, num_rounds=8,
        precision=precision, batch_size=batch_size,
    )  # fmt: skip
    key = f"contest-{model}{suffix.replace(' ', '-')}"
    return Case(key=key, title=title, seconds=150 if precision == "fp32" else 340, job=job)


def _search(model: str, cap_bytes: int, is_managed: bool, *, quick: bool) -> Case:
    gib = cap_bytes / _GIB
    cap = f"{cap_bytes >> 20}MiB" if quick else f"{gib:.0f}GiB"
    kind = "managed" if is_managed else "plain"
    key = f"batch-{model}-{cap}"
    job = _job(
        "max_batch:trial", environment=_EXPANDABLE, model=model, cap_bytes=cap_bytes, is_managed=is_managed
    )  # fmt: skip
    search = Search(
        limit_bytes=cap_bytes, first=4 if quick else round(_FIRST_BATCH[model, is_managed] * gib / 12),
        compared_with=f"{key}-plain" if is_managed else "", config=_capped(cap_bytes),
    )  # fmt: skip
    title = f"{MODELS[model]}, largest batch in {cap}, {kind}"
    return Case(key=f"{key}-{kind}", title=title, seconds=30, job=job, search=search)
