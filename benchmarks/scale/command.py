"""What many devices make of a planned step, by a simulated exchange of gradients; nothing is measured.

One device's step is planned with the memory of DistributedDataParallel's buckets counted, since that is how it runs on
several. Like ``max-batch``, a step does not take less than the host needs to launch its ops, 5 us each.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.scale.cluster import Cluster, ClusterStep, StepProfile, profile_step, scaling
from benchmarks.scale.collectives import Choice, check_algorithm
from benchmarks.scale.gradients import BUCKET_BYTES, gradients_of
from benchmarks.scale.interconnects import Interconnect, interconnect, usual_interconnects
from lightning_offload.cli.commands import EPILOG
from lightning_offload.cli.max_batch import LAUNCH_SECONDS
from lightning_offload.cli.options import JsonOption, PlanOptions, planning
from lightning_offload.cli.output import console, progress, say, write_json
from lightning_offload.cli.plan import planned, state_of
from lightning_offload.cli.setting import Checked, check_options
from lightning_offload.errors import BudgetError, UnsupportedError
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.report.plan_view import overhead, predictions
from lightning_offload.report.scale import format_share
from lightning_offload.report.tables import add_row, make_table, two_columns
from lightning_offload.units import format_bytes, format_rate, format_seconds, parse_bytes

if TYPE_CHECKING:
    from lightning_offload.cli.workload import Captured

_MAX_DEVICES = 1 << 20
_MEBIBYTE = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What was asked for beside the step of one device.

    Attributes:
        devices: How many train, ascending.
        intra: Link of a device to the others of its node; None for what machines with the device have.
        inter: Link of a network card; None for the same.
        per_node: Devices of a node.
        nics: Network cards of a node; None for one a device.
        algorithm: How gradients are exchanged.
        accumulation: Micro-batches of one update.
        bucket_bytes: What fills a bucket; None for DDP's own.
        overlap: Whether the exchange overlaps backward.
    """

    devices: tuple[int, ...]
    intra: Interconnect | None
    inter: Interconnect | None
    per_node: int
    nics: int | None
    algorithm: Choice
    accumulation: int
    bucket_bytes: int | None
    overlap: bool

    def cluster(self, device: str) -> Cluster:
        """The cluster of a device."""
        intra, inter = usual_interconnects(device)
        return Cluster(
            intra=self.intra or intra, inter=self.inter or inter,
            devices_per_node=self.per_node, nics_per_node=self.nics,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What there is to show."""

    plan: MemoryPlan
    profile: StepProfile
    cluster: Cluster
    rows: tuple[ClusterStep, ...]


def build_app() -> typer.Typer:
    """The application, which is one command."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(epilog=EPILOG)(_scale)
    return app


@planning(without=("chunked_loss", "accumulate"))
def _scale(
    options: PlanOptions,
    devices: Annotated[
        str, typer.Option(metavar="N,N,...", help="How many devices train, ascending; dots go on by the same ratio.")
    ] = "1,2,4,...,1024",
    intra: Annotated[
        str | None,
        typer.Option(
            metavar="LINK",
            help="Between devices of a node: nvlink2 to nvlink5, pcie3 to pcie5, or a rate such as 25GB/s. "
            "[default: what the device's machines have]",
        ),
    ] = None,
    inter: Annotated[
        str | None,
        typer.Option(
            metavar="LINK",
            help="Between nodes, of one network card: edr100, hdr200, ndr400, 10gbe, 25gbe, 100gbe, or a rate. "
            "[default: the same]",
        ),
    ] = None,
    per_node: Annotated[int, typer.Option(metavar="N", help="Devices of a node.")] = 8,
    nics: Annotated[
        int | None, typer.Option(metavar="N", help="Network cards of a node. [default: one a device]")
    ] = None,
    algorithm: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How gradients are exchanged: ring, tree, auto (the cheaper), binary-tree (Caffe's), server.",
        ),
    ] = "auto",
    accumulate: Annotated[int, typer.Option(metavar="N", help="Micro-batches of one update.")] = 1,
    bucket_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="DDP's bucket_cap_mb. [default: 25MiB, the first one 1MiB]")
    ] = None,
    no_overlap: Annotated[
        bool, typer.Option("--no-overlap", help="Exchange all gradients at once after backward.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate data-parallel training on many devices, gradients exchanged as DistributedDataParallel does."""
    asked = _Asked(
        per_node=_positive("--per-node", per_node),
        nics=None if nics is None else _positive("--nics", nics),
        accumulation=_positive("--accumulate", accumulate),
        intra=None if intra is None else interconnect(intra),
        inter=None if inter is None else interconnect(inter),
        devices=parse_devices(devices),
        algorithm=check_algorithm(algorithm),
        bucket_bytes=None if bucket_size is None else _bucket_bytes(bucket_size),
        overlap=not no_overlap,
    )
    checked = check_options(options)  # imports the model, so it is last
    with progress(f"capturing a step of {options.target}") as tell:
        captured = checked.workload.capture(options.batch_size, checked.device)
        gradient_bytes = sum(gradient.num_bytes for gradient in gradients_of(captured.graph))
        graph = dataclasses.replace(captured.graph, extra_bytes=captured.graph.extra_bytes + gradient_bytes)
        captured = dataclasses.replace(captured, graph=graph)
        tell(f"planning {len(graph.ops)} ops")
        plan = planned(checked, graph)
        profile = profile_step(
            graph, plan, checked.device, batch_size=options.batch_size, bucket_bytes=asked.bucket_bytes
        )
        profile = profile.lasting(max(profile.step_seconds, LAUNCH_SECONDS * len(graph.ops)))
        cluster = asked.cluster(checked.device.name)
        rows = scaling(
            profile, cluster, asked.devices, accumulation=accumulate, algorithm=asked.algorithm, overlap=asked.overlap
        )
    found = _Found(plan=plan, profile=profile, cluster=cluster, rows=rows)
    if as_json:
        write_json(_payload(checked, captured, asked, found))
    else:
        _print(checked, asked, found)


def parse_devices(text: str) -> tuple[int, ...]:
    """Numbers of devices: "1,8,32", or "1,2,4,...,1024", where the last two before the dots set the ratio.

    Raises:
        UnsupportedError: Not such a list, not in ascending order, or the dots never come to the last one.
    """
    wrong = UnsupportedError(
        f"--devices {text!r} is no list of numbers: write 1,8,64 or 1,2,4,...,1024, ascending from 1 to {_MAX_DEVICES}"
    )
    numbers: list[int] = []
    parts = [part.strip() for part in text.split(",")]
    is_going_on = False
    for part in parts:
        if part == "..." and len(numbers) >= 2 and not is_going_on:
            is_going_on = True
            continue
        if not part.isdecimal() or not 1 <= int(part) <= _MAX_DEVICES or (numbers and int(part) <= numbers[-1]):
            raise wrong
        if is_going_on:
            numbers += _between(numbers[-2], numbers[-1], int(part), text)
            is_going_on = False
        numbers.append(int(part))
    if is_going_on:
        raise wrong
    return tuple(numbers)


def _between(one: int, two: int, last: int, text: str) -> list[int]:
    ratio, rest = divmod(two, one)
    found = []
    while not rest and (two := two * ratio) < last:
        found.append(two)
    if rest or two != last:
        raise UnsupportedError(f"--devices {text!r}: the dots do not lead to {last}: each number is a multiple of the "
                               "one before, and the last one follows too")  # fmt: skip
    return found


def _positive(option: str, number: int) -> int:
    if number < 1:
        raise UnsupportedError(f"{option} {number} is not positive: give 1 or more")
    return number


def _bucket_bytes(text: str) -> int:
    try:
        num_bytes = parse_bytes(text)
    except BudgetError as error:
        raise BudgetError(f"--bucket-size: {error}") from None
    if not num_bytes:
        raise BudgetError(f"--bucket-size {text!r} holds nothing: give a size such as 25MiB")
    if text.strip().isdecimal() and num_bytes < _MEBIBYTE:
        raise BudgetError(
            f"--bucket-size {text} is ambiguous, it may mean bytes or DDP's MiB: write {text}B or {text}MiB"
        )
    return num_bytes


def _payload(checked: Checked, captured: Captured, asked: _Asked, found: _Found) -> dict[str, Any]:
    payload: dict[str, Any] = {"simulated": True} | checked.header | predictions(found.plan) | state_of(captured)
    return payload | {
        "step_seconds": found.profile.step_seconds,
        "gradient_bytes": found.profile.gradient_bytes,
        "bucket_cap_bytes": asked.bucket_bytes or BUCKET_BYTES,
        "num_buckets": len(found.profile.buckets),
        "intra": _link_entry(found.cluster.intra),
        "inter": _link_entry(found.cluster.inter),
        "devices_per_node": found.cluster.devices_per_node,
        "nics_per_node": found.cluster.nics_per_node or found.cluster.devices_per_node,
        "algorithm": asked.algorithm,
        "accumulation": asked.accumulation,
        "overlap": asked.overlap,
        "scaling": [dataclasses.asdict(row) | {"algorithms": list(row.algorithms)} for row in found.rows],
    }


def _link_entry(link: Interconnect) -> dict[str, Any]:
    entry = dataclasses.asdict(link)
    entry["sources"] = [entry.pop("source"), entry.pop("latency_source")]
    return entry


def _print(checked: Checked, asked: _Asked, found: _Found) -> None:
    options = checked.options
    title = (
        f"{options.target}, batch {options.batch_size} a device, {options.dtype} on {checked.device.name}: simulated"
    )
    say(title, style="bold")
    console().print(two_columns(_about(checked, asked, found)))
    names = ("devices", "batch", "samples/s", "efficiency", "exchange", "exposed")
    table = make_table("", *(f">{name}" for name in names))
    for row in found.rows:
        add_row(
            table,
            f"{row.num_devices:,}",
            f"{row.effective_batch:,}",
            f"{row.samples_per_second:,.1f}",
            f"{100 * row.efficiency:.2f}%",
            _time(row.exchange_seconds),
            _time(row.exposed_seconds),
        )
    console().print(table)
    say(_how(asked, found.rows))
    say("Simulated: equal devices without stragglers, and data that keeps up. Efficiency is against as many alone.")


def _about(checked: Checked, asked: _Asked, found: _Found) -> list[tuple[str, str]]:
    plan, profile, cluster = found.plan, found.profile, found.cluster
    devices = _count(cluster.devices_per_node, "device")
    cards = _count(cluster.nics_per_node or cluster.devices_per_node, "card")
    rows = [
        (
            "one device",
            f"{format_seconds(profile.step_seconds)} a step ({format_share(overhead(plan))} for the budget)",
        ),
        ("peak", f"{format_bytes(plan.predicted_peak_bytes)} of {checked.budget_text}, with DDP's buckets"),
        ("gradients", f"{format_bytes(profile.gradient_bytes)} in {_count(len(profile.buckets), 'bucket')}"),
        ("within a node", f"{cluster.intra.title}, {format_rate(cluster.intra.bytes_per_second)} a device, {devices}"),
        (
            "between nodes",
            f"{cluster.inter.title}, {format_rate(cluster.inter.bytes_per_second)} a card, {cards} a node",
        ),
    ]
    if asked.accumulation > 1:
        rows.append(("update", f"after {asked.accumulation} micro-batches"))
    if profile.copies and (cluster.intra.uses_host_link or cluster.inter.uses_host_link):
        rows.append(("contention", "the exchange waits for swaps where both go over the host's link"))
    return rows


def _count(num: int, what: str) -> str:
    return f"{num} {what}{'' if num == 1 else 's'}"


def _how(asked: _Asked, rows: Sequence[ClusterStep]) -> str:
    parts = []
    for names, group in itertools.groupby(rows, key=lambda row: row.algorithms):
        if names:
            parts.append(f"{' and '.join(names)} from {next(group).num_devices:,} devices")
    how = ", ".join(parts) or "nothing to exchange on one device"
    return f"Exchange: {how}; {'overlapping backward' if asked.overlap else 'after backward, all at once'}."


def _time(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "-"
