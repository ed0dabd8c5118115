"""Declares the commands to Typer: each takes its options and hands them to the file of its name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lightning_offload._version import __version__
from lightning_offload.cli.options import JsonOption, PlanOptions, planning
from lightning_offload.cli.output import say

EPILOG = (
    "Exit codes: 0 done, 1 Typer is not installed or the demo failed, 2 bad input, 3 no plan meets the budget (the "
    "message names the smallest that one meets), 130 interrupted. Errors are one line on standard error."
)


def build_app() -> typer.Typer:
    """The application with all of its commands."""
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback(epilog=EPILOG)(_about)
    app.command("demo", epilog=EPILOG)(_demo)
    app.command("plan", epilog=EPILOG)(_plan)
    app.command("max-batch", epilog=EPILOG)(_max_batch)
    app.command("compare", epilog=EPILOG)(_compare)
    app.command("explain", epilog=EPILOG)(_explain)
    app.command("devices", epilog=EPILOG)(_devices)
    app.command("bench-links", epilog=EPILOG)(_bench_links)
    app.command("build-native", epilog=EPILOG)(_build_native)
    return app


def _print_version(is_asked: bool) -> None:
    if is_asked:
        say(f"lightning-offload {__version__}")
        raise typer.Exit


def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train unmodified PyTorch models within a memory budget."""


def _demo(
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Keep the figures, a page of the plan and both trained states there. [default: nothing is kept]",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a ResNet-50 on digits here, plain and in half of the memory that can be saved, and compare bit by bit.

    A minute or two. The digits are scikit-learn's; nothing is downloaded.
    """
    from lightning_offload.cli.demo import demo

    code = demo(output, as_json=as_json)
    if code:
        raise typer.Exit(code)


@planning()
def _plan(
    options: PlanOptions,
    output: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the plan, for MemoryPlugin(plan=FILE). [default: nothing is written]"),
    ] = None,
    graph: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write the captured step, which `explain` takes names from; '' for nowhere. "
            "[default: beside the plan: plan.graph.json beside plan.json]",
        ),
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots (HTML).")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto or chrome://tracing (JSON).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan a training step for a device that need not be there: nothing is run, no memory is needed.

    The loss is the model's own, if it returns one, else the sum of its outputs.
    """
    from lightning_offload.cli.output import check_writable
    from lightning_offload.cli.plan import Outputs, plan_step
    from lightning_offload.graph.files import sibling_graph

    plan_path = Path(output) if output else None
    check_writable("--output", plan_path)
    default = sibling_graph(plan_path) if plan_path is not None else None
    graph_path = default if graph is None else Path(graph) if graph else None
    plan_step(options, Outputs(plan=plan_path, graph=graph_path, report=report, trace=trace), as_json=as_json)


@planning(without=("batch_size", "accumulate"))
def _max_batch(
    options: PlanOptions,
    limit: Annotated[int, typer.Option(metavar="N", help="The largest batch size to try.")] = 1 << 16,
    tolerance: Annotated[
        float, typer.Option(metavar="SHARE", help="Throughput that the efficient batch size may lose.")
    ] = 0.03,
    only_max: Annotated[
        bool, typer.Option("--only-max", help="Leave out throughput, which takes longest to search.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the largest batch that fits, and the smallest that trains about as fast as any."""
    from lightning_offload.cli.max_batch import max_batch

    max_batch(options, limit=limit, tolerance=tolerance, only_max=only_max, as_json=as_json)


@planning(without=("accumulate", "policy"))
def _compare(options: PlanOptions, as_json: JsonOption = False) -> None:
    """Plan with every policy and show the results side by side."""
    from lightning_offload.cli.compare import compare

    compare(options, as_json=as_json)


@planning(only=("target", "inputs", "input_dtype", "batch_size", "device", "dtype"))
def _explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan, as `plan --output` writes it.")],
    graph: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The step that it is for. [default: beside the plan, as plan.graph.json]"),
    ] = None,
    target: Annotated[
        str | None, typer.Option("--model", metavar="MODULE:ATTRIBUTE", help="Capture the step again, of this model.")
    ] = None,
    *,
    options: PlanOptions,
    show_all: Annotated[
        bool, typer.Option("--all", help="List each module and storage, not groups of modules and the costliest.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what a plan does: totals from its file alone, names and sizes where its step is at hand.

    With its step, also what sets the smallest feasible budget and what would lower it, predicted.
    """
    from lightning_offload.cli.explain import explain
    from lightning_offload.errors import UnsupportedError

    if target is None and options.inputs:
        raise UnsupportedError("--input means nothing without --model: leave it out, or give the model")
    if target is not None and graph is not None:
        raise UnsupportedError("--graph and --model both give the step: leave one out")
    explain(plan, graph, options, has_model=target is not None, is_whole=show_all, as_json=as_json)


def _devices(as_json: JsonOption = False) -> None:
    """List the devices that can be planned for, with their figures, and those of this machine."""
    from lightning_offload.cli.devices import devices

    devices(as_json=as_json)


def _bench_links(
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.", metavar="DEVICE")
    ] = None,
    spill_dir: Annotated[Path | None, typer.Option(help="Folder whose disk is measured too.", metavar="DIR")] = None,
    size: Annotated[str, typer.Option(help="Bytes of one transfer.", metavar="SIZE")] = "256MiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, rates in bytes per second.")] = False,
) -> None:
    """Measure how fast tensors leave the device and come back."""
    from lightning_offload.cli.links import bench_links

    bench_links(device, spill_dir, size, as_json=as_json)


def _build_native(
    force: Annotated[bool, typer.Option("--force", help="Build it anew though it is there.")] = False,
    in_package: Annotated[
        bool,
        typer.Option("--in-package", help="Build it beside the package's sources, for a wheel or an image."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Build the native core of planned steps now, for the torch and Python at hand; the first planned step does else.

    It needs a C++ compiler. Without the core planned steps run in Python.
    """
    from lightning_offload.cli.build_native import build_native

    build_native(renew=force, in_package=in_package, as_json=as_json)
