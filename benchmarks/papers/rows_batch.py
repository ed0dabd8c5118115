"""Largest batches: the papers' tables by bisection over recorded steps and our planner's floor.

Each GPU has the memory of the catalogue, a little less than its name says, and 100 GiB of host memory to swap to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.papers import captures, searches
from benchmarks.papers.captures import Family
from benchmarks.papers.figures import Figure
from examples.models import MODELS, Example
from examples.models.registry import seq2seq_example
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchClaim:
    """A largest batch that was published.

    Attributes:
        system: Whose.
        model: Name among the examples, or a length of sentences for the translation model.
        title: The model's name for people.
        gpu: Name in the catalogue.
        batch_size: The claim.
        note: What to know.
    """

    system: str
    model: str | int
    title: str
    gpu: str
    batch_size: int
    note: str = ""


_LRN = "the response normalisation of our model works in slices, as one kernel of a library would"
_TAKEN = "the claim's GPU, of the same nominal memory, is taken to be this one"
_SPLIT = f"TSPLIT splits the tensors of a single op, our floor is the working set of whole ops; {_TAKEN}"
_SEQUENCES = (
    "sizes are our choice: a vocabulary of 16,000 and a hidden width of 1,024, at which three source x target tensors "
    "of the attention fill 12 GB at the published plain batches 350, 90 and 20; PyTorch saves one such tensor"
)

CLAIMS = (
    BatchClaim(system="SuperNeurons", model="alexnet", title="AlexNet", gpu="k40c", batch_size=1792, note=_LRN),
    BatchClaim(system="SuperNeurons", model="vgg16", title="VGG16", gpu="k40c", batch_size=224),
    BatchClaim(system="SuperNeurons", model="resnet50", title="ResNet-50", gpu="k40c", batch_size=384),
    BatchClaim(system="SuperNeurons", model="resnet101", title="ResNet-101", gpu="k40c", batch_size=256),
    BatchClaim(system="SuperNeurons", model="resnet152", title="ResNet-152", gpu="k40c", batch_size=176),
    BatchClaim(system="Layrub", model="alexnet", title="AlexNet", gpu="k40m", batch_size=2100, note=_LRN),
    BatchClaim(system="Layrub", model="vgg16", title="VGG16", gpu="k40m", batch_size=240),
    BatchClaim(system="Layrub", model="resnet50", title="ResNet-50", gpu="k40m", batch_size=272),
    BatchClaim(system="Meng et al.", model="resnet50", title="ResNet-50", gpu="m40", batch_size=664),
    BatchClaim(system="TFLMS", model="resnet50", title="ResNet-50", gpu="p100", batch_size=832, note=_TAKEN),
    BatchClaim(system="Capuchin", model="vgg16", title="VGG16", gpu="p100", batch_size=350),
    BatchClaim(system="Capuchin", model="resnet50", title="ResNet-50", gpu="p100", batch_size=1014),
    BatchClaim(system="Capuchin", model="resnet152", title="ResNet-152", gpu="p100", batch_size=798),
    BatchClaim(system="TSPLIT", model="vgg16", title="VGG16", gpu="3090", batch_size=661, note=_SPLIT),
    BatchClaim(system="TSPLIT", model="resnet50", title="ResNet-50", gpu="3090", batch_size=1278, note=_TAKEN),
    BatchClaim(system="TSPLIT", model="resnet101", title="ResNet-101", gpu="3090", batch_size=1096, note=_TAKEN),
    BatchClaim(system="DTR", model="resnet1202-cifar", title="ResNet-1202", gpu="titan-x", batch_size=140, note=_TAKEN),
    BatchClaim(system="Meng et al.", model=50, title="seq2seq, T=50", gpu="m40", batch_size=1100, note=_SEQUENCES),
    BatchClaim(system="Meng et al.", model=100, title="seq2seq, T=100", gpu="m40", batch_size=550, note=_SEQUENCES),
    BatchClaim(system="Meng et al.", model=200, title="seq2seq, T=200", gpu="m40", batch_size=230, note=_SEQUENCES),
    BatchClaim(system="Meng et al.", model=400, title="seq2seq, T=400", gpu="m40", batch_size=60, note=_SEQUENCES),
)
"""All largest batches; those of GANs, Inception and multi-layer LSTMs need models that are not among the examples."""

QUICK_CLAIMS = tuple(claim for claim in CLAIMS if claim.model == "resnet50" and claim.gpu == "k40c")


def largest(claim: BatchClaim) -> Iterator[Figure]:
    """Return our largest batch, and what a step with the published one takes."""
    spec = captures.device(claim.gpu)
    budget = captures.memory_bytes(spec)
    family = Family(_example(claim), spec, (max(2, claim.batch_size // 2), claim.batch_size))
    plain, ours = searches.largest_plain_batch(family, budget), searches.largest_batch(family, budget)
    floor = searches.peaks(family.at(ours), spec)
    notes = [
        f"PyTorch without offloading: {plain}",
        f"the floor is set by {floor.floor_op} and takes {floor.floor_slowdown:.1f} times as long, nothing overlapped",
        claim.note,
    ]
    setting = f"{claim.title}, {spec.name}, {format_bytes(budget)}"
    yield Figure(
        system=claim.system, what="largest batch", setting=setting, unit="count", claim=claim.batch_size,
        ours=ours, better="more", how="fake capture",
        note="; ".join(filter(None, notes)),
    )  # fmt: skip
    yield from cost(claim, family, setting, budget)


def cost(claim: BatchClaim, family: Family, setting: str, budget: int) -> Iterator[Figure]:
    """Yield what the published batch costs under our plan, if it fits."""
    try:
        made = searches.planned(family.at(claim.batch_size), family.spec, budget)
    except BudgetInfeasibleError:
        return
    yield Figure(
        system=claim.system, what=f"time added at batch {claim.batch_size}", setting=setting, unit="share", claim=None,
        ours=searches.overhead(made), better="less", how="simulation",
        note=searches.at_least(made),
    )  # fmt: skip


def _example(claim: BatchClaim) -> Example:
    return seq2seq_example(length=claim.model) if isinstance(claim.model, int) else MODELS[claim.model]
