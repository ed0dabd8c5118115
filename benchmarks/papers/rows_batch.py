"""Largest batches: the papers' tables by bisection over recorded steps and our planner's floor.

Each GPU has the memory of the catalogue, a little less than its name says, of which tensors may take what a process
leaves them (:func:`benchmarks.papers.captures.room_bytes`), and 100 GiB of host memory to swap to, unless the system
only recomputes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.papers import captures, searches
from benchmarks.papers.captures import Family
from benchmarks.papers.figures import Figure
from benchmarks.papers.networks import NETWORKS
from examples.models import MODELS, Example
from examples.models.registry import seq2seq_example
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchClaim:
    """A largest batch that was published.

    Attributes:
        system: Whose.
        model: Name among the examples or the networks, or a length of sentences for the translation model.
        title: The model's name for people.
        gpu: Name in the catalogue.
        plain_batch_size: What the paper's own framework fits without the system; None where it is not at hand.
        batch_size: The claim.
        recomputes_only: Whether the system has no host memory to swap to, so that ours gets none.
        unknown: What is not known of the setting.
        note: What else to know.
    """

    system: str
    model: str | int
    title: str
    gpu: str
    plain_batch_size: int | None
    batch_size: int
    recomputes_only: bool = False
    unknown: str = ""
    note: str = ""

    @property
    def example(self) -> Example:
        """The network with its batch and its loss."""
        if isinstance(self.model, int):
            return seq2seq_example(length=self.model)
        return NETWORKS[self.model] if self.model in NETWORKS else MODELS[self.model]


_LRN = "the response normalisation of our model works in slices, as one kernel of a library would"
_TAKEN = "the claim's GPU, of the same nominal memory, is taken to be this one"
_SPLIT = f"TSPLIT splits the tensors of a single op, our floor is the working set of whole ops; {_TAKEN}"
_SEQUENCES = (
    "sizes are our choice: a vocabulary of 16,000 and a hidden width of 1,024, at which three source x target tensors "
    "of the attention fill 12 GB at the published plain batches 350, 90 and 20; PyTorch saves one such tensor"
)
_LSTM = "sizes are our choice: a vocabulary of 16,000, a hidden width of 1,024, sentences of 20"
_BERT = "sizes are our choice: BERT-base, 128 tokens, eager attention"

CLAIMS = (
    BatchClaim(
        system="SuperNeurons", model="alexnet", title="AlexNet", gpu="k40c",
        plain_batch_size=1408, batch_size=1792, note=_LRN,
    ),
    BatchClaim(
        system="SuperNeurons", model="vgg16", title="VGG16", gpu="k40c", plain_batch_size=80, batch_size=224
    ),
    BatchClaim(
        system="SuperNeurons", model="resnet50", title="ResNet-50", gpu="k40c", plain_batch_size=128, batch_size=384
    ),
    BatchClaim(
        system="SuperNeurons", model="resnet101", title="ResNet-101", gpu="k40c", plain_batch_size=80, batch_size=256
    ),
    BatchClaim(
        system="SuperNeurons", model="resnet152", title="ResNet-152", gpu="k40c", plain_batch_size=48, batch_size=176
    ),
    BatchClaim(
        system="SuperNeurons", model="inception-v4", title="Inception-V4", gpu="k40c",
        plain_batch_size=64, batch_size=240,
    ),
    BatchClaim(
        system="Layrub", model="alexnet", title="AlexNet", gpu="k40m",
        plain_batch_size=128, batch_size=2100, note=_LRN,
    ),
    BatchClaim(system="Layrub", model="vgg16", title="VGG16", gpu="k40m", plain_batch_size=64, batch_size=240),
    BatchClaim(system="Layrub", model="resnet34", title="ResNet-34", gpu="k40m", plain_batch_size=32, batch_size=416),
    BatchClaim(system="Layrub", model="resnet50", title="ResNet-50", gpu="k40m", plain_batch_size=32, batch_size=272),
    BatchClaim(
        system="Layrub", model="wrn-28-10", title="WRN-28-10", gpu="k40m", plain_batch_size=128, batch_size=1376
    ),
    BatchClaim(
        system="Meng et al.", model="resnet50", title="ResNet-50", gpu="m40", plain_batch_size=144, batch_size=664
    ),
    BatchClaim(
        system="Meng et al.", model="inception-v3", title="Inception-V3", gpu="m40",
        plain_batch_size=208, batch_size=548,
    ),
    *(
        BatchClaim(
            system="Meng et al.", model=f"lstm-{layers}", title=f"LSTM, {layers} layer{'s' * (layers > 1)}", gpu="m40",
            plain_batch_size=plain, batch_size=found, unknown=_LSTM,
        )
        for layers, plain, found in ((1, 1800, 3000), (4, 750, 1500), (8, 350, 900), (16, 75, 280))
    ),
    *(
        BatchClaim(
            system="Meng et al.", model=length, title=f"seq2seq, T={length}", gpu="m40",
            plain_batch_size=plain, batch_size=found, unknown=_SEQUENCES,
        )
        for length, plain, found in ((50, 350, 1100), (100, 90, 550), (200, 20, 230), (400, 2, 60))
    ),
    BatchClaim(
        system="TFLMS", model="resnet50", title="ResNet-50", gpu="p100",
        plain_batch_size=176, batch_size=832, note=_TAKEN,
    ),
    BatchClaim(system="Capuchin", model="vgg16", title="VGG16", gpu="p100", plain_batch_size=228, batch_size=350),
    BatchClaim(
        system="Capuchin", model="resnet50", title="ResNet-50", gpu="p100", plain_batch_size=190, batch_size=1014
    ),
    BatchClaim(
        system="Capuchin", model="resnet152", title="ResNet-152", gpu="p100", plain_batch_size=86, batch_size=798
    ),
    BatchClaim(
        system="Capuchin", model="inception-v3", title="Inception-V3", gpu="p100",
        plain_batch_size=160, batch_size=716,
    ),
    BatchClaim(
        system="Capuchin", model="bert-base", title="BERT", gpu="p100",
        plain_batch_size=64, batch_size=450, unknown=_BERT,
    ),
    BatchClaim(
        system="TSPLIT", model="vgg16", title="VGG16", gpu="3090", plain_batch_size=None, batch_size=661, note=_SPLIT
    ),
    BatchClaim(
        system="TSPLIT", model="resnet50", title="ResNet-50", gpu="3090",
        plain_batch_size=None, batch_size=1278, note=_TAKEN,
    ),
    BatchClaim(
        system="TSPLIT", model="resnet101", title="ResNet-101", gpu="3090",
        plain_batch_size=None, batch_size=1096, note=_TAKEN,
    ),
    BatchClaim(
        system="DTR", model="resnet1202-cifar", title="ResNet-1202", gpu="titan-x",
        plain_batch_size=64, batch_size=140, recomputes_only=True, note=_TAKEN,
    ),
)  # fmt: skip
"""All largest batches whose networks are known or can be guessed."""

QUICK_CLAIMS = tuple(claim for claim in CLAIMS if claim.model == "resnet50" and claim.gpu == "k40c")


def largest(claim: BatchClaim) -> Iterator[Figure]:
    """Return our largest batch, and what a step with the published one takes."""
    spec = captures.device(claim.gpu)
    if claim.recomputes_only:
        spec = dataclasses.replace(spec, host_memory_bytes=0)
    room = captures.room_bytes(spec)
    family = Family(claim.example, spec, (max(2, claim.batch_size // 2), claim.batch_size))
    plain, ours = searches.largest_plain_batch(family, room), searches.largest_batch(family, room)
    floor = searches.peaks(family.at(ours), spec)
    notes = [
        f"the floor is set by {floor.floor_op} and takes {floor.floor_slowdown:.1f} times as long, nothing overlapped",
        "ours recomputes, too, and swaps nothing" if claim.recomputes_only else "",
        claim.note,
    ]
    setting = f"{claim.title}, {spec.name}, {format_bytes(captures.memory_bytes(spec))}"
    yield Figure(
        system=claim.system, what="largest batch", setting=setting, unit="count", claim=claim.batch_size,
        claim_baseline=claim.plain_batch_size, ours=ours, baseline=plain, better="more", how="fake capture",
        unknown=claim.unknown, note="; ".join(filter(None, notes)),
    )  # fmt: skip
    yield from cost(claim, family, setting, room)


def cost(claim: BatchClaim, family: Family, setting: str, room: int) -> Iterator[Figure]:
    """Yield what the published batch costs under our plan, if it fits."""
    try:
        made = searches.planned(family.at(claim.batch_size), family.spec, room)
    except BudgetInfeasibleError:
        return
    yield Figure(
        system=claim.system, what=f"time added at batch {claim.batch_size}", setting=setting, unit="share", claim=None,
        ours=searches.overhead(made), better="less", how="simulation",
        note=searches.at_least(made),
    )  # fmt: skip
