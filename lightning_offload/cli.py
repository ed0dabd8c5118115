"""The command line, ``lightning-offload COMMAND``: the top layer, a thin face on what the layers below do.

Protocol: a command is a function that is given its options, prints its result to standard output and returns; each
``_add_...`` function declares one with its options to Typer, and :data:`_COMMANDS` lists them. What the user got wrong
is raised as an :class:`~lightning_offload.errors.OffloadError` and ends as one line on standard error and exit code
2. This module imports neither Typer nor torch before a command needs them; annotations are evaluated where a
command is declared, so that Typer's options can stand in them.
"""

# No `from __future__ import annotations`: Typer reads the annotations of commands, which name a local import.

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lightning_offload.errors import OffloadError, SpillError, UnsupportedError
from lightning_offload.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch
    import typer

    from lightning_offload.capture.calibrate import LinkRates

_BAD_INPUT = 2
_NOT_INSTALLED = 1
_MIN_SIZE_BYTES = 1 << 20
_COPIES_AT_ONCE = 6  # device blocks and host blocks for both directions at once, on a CPU all in one memory


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        arguments: What follows the program's name; by default what the process was given.
    """
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0, or 2 for what the user can mend, bad input above all; 1 without Typer.
    """
    try:
        import typer
    except ImportError:
        return _complain("the command line needs typer: pip install 'lightning-offload[cli]'", _NOT_INSTALLED)
    command = typer.main.get_command(build_app())
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        code = command.main(arguments, prog_name="lightning-offload", standalone_mode=False)
    except OffloadError as error:
        return _complain(str(error), _BAD_INPUT)
    except (typer.Abort, KeyboardInterrupt):
        return _complain("aborted", 130)
    except Exception as error:
        # What Typer finds wrong is an exception of the click within it, or of the one beside older versions of it.
        if not hasattr(error, "format_message"):
            raise
        return _complain(error.format_message(), _BAD_INPUT)
    return code if isinstance(code, int) else 0


def build_app() -> "typer.Typer":
    """The application with all of its commands."""
    import typer

    app = typer.Typer(
        help="Train unmodified PyTorch models within a memory budget.",
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def group() -> None:
        """With a callback, commands go by their names even while there is only one."""

    for add in _COMMANDS:
        add(app)
    return app


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"lightning-offload: error: {' '.join(message.split())}\n")
    return code


# ---- bench-links


def _add_bench_links(app: "typer.Typer") -> None:
    import typer

    @app.command("bench-links")
    def command(
        device: Annotated[
            str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.", metavar="DEVICE")
        ] = None,
        spill_dir: Annotated[
            Path | None, typer.Option(help="Folder whose disk is measured too.", metavar="DIR")
        ] = None,
        size: Annotated[str, typer.Option(help="Bytes of one transfer.", metavar="SIZE")] = "256MiB",
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON, rates in bytes per second.")] = False,
    ) -> None:
        """Measure how fast tensors leave the device and come back."""
        bench_links(device, spill_dir, size, as_json=as_json)


def bench_links(device: str | None, spill_dir: Path | None, size: str, *, as_json: bool) -> None:
    """Measure a device's links and print their rates.

    Args:
        device: "cpu" or "cuda"; None for CUDA where there is one.
        spill_dir: Folder whose disk is measured too.
        size: Bytes of one transfer, with a unit.
        as_json: Whether to print JSON in place of a table.

    Raises:
        OffloadError: An option is wrong; the message says which and what is allowed.
    """
    num_bytes = _checked_size(size)
    if spill_dir is not None:
        _check_folder(spill_dir)
    compute = _checked_device(device)
    from lightning_offload.plugins import devices

    try:
        rates = devices.measure_rates(compute, spill_dir=spill_dir, num_bytes=num_bytes)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, OffloadError):
            raise
        raise UnsupportedError(f"transfers of {format_bytes(num_bytes)} failed on {compute}: {error}") from error
    if as_json:
        _print_json(compute, num_bytes, rates)
    else:
        _print_table(compute, num_bytes, rates)


def _checked_size(size: str) -> int:
    try:
        num_bytes = parse_bytes(size)
    except OffloadError as error:
        raise type(error)(f"--size {error}") from None
    if num_bytes < _MIN_SIZE_BYTES:
        raise UnsupportedError(f"--size {size!r} measures latencies, not rates: give at least '1MiB', better '256MiB'")
    memory = _host_memory_bytes()
    if memory is not None and num_bytes * _COPIES_AT_ONCE > memory:
        raise UnsupportedError(
            f"--size {size!r} is too large: this machine has {format_bytes(memory)} of memory, which is enough for "
            f"transfers of {format_bytes(memory // _COPIES_AT_ONCE)}"
        )
    return num_bytes


def _host_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on every system
        return None


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise SpillError(f"--spill-dir {str(folder)!r} is no folder: create it, or name one that exists")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SpillError(f"--spill-dir {str(folder)!r} is not writable: change its permissions, or name another")


def _checked_device(device: str | None) -> "torch.device":
    import torch

    from lightning_offload.plugins.devices import supported

    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    compute = supported(device if device is not None else "cuda" if num_cuda else "cpu")
    if compute.type == "cuda" and (compute.index or 0) >= num_cuda:
        raise UnsupportedError(
            f"--device {device!r} is not there: torch {torch.__version__} sees {num_cuda} CUDA devices; use 'cpu'"
        )
    return compute


_ROWS = (
    ("device to host", "d2h_bytes_per_second"),
    ("host to device", "h2d_bytes_per_second"),
    ("device to host, both at once", "both_d2h_bytes_per_second"),
    ("host to device, both at once", "both_h2d_bytes_per_second"),
    ("disk write", "disk_write_bytes_per_second"),
    ("disk read", "disk_read_bytes_per_second"),
)


def _print_json(device: "torch.device", num_bytes: int, rates: "LinkRates") -> None:
    payload: dict[str, Any] = {"device": str(device), "num_bytes": num_bytes}
    payload |= {name: getattr(rates, name) for _, name in _ROWS}
    sys.stdout.write(json.dumps(payload, indent=2) + "\n")


def _print_table(device: "torch.device", num_bytes: int, rates: "LinkRates") -> None:
    from rich.console import Console
    from rich.table import Table

    from lightning_offload.capture.calibrate import device_name

    name = device_name(device)
    title = f"{device} ({name})" if name != str(device) else name
    table = Table("link", title=f"Links of {title}, transfers of {format_bytes(num_bytes)}")
    table.add_column("rate", justify="right")
    for label, field in _ROWS:
        rate = getattr(rates, field)
        table.add_row(label, f"{format_bytes(int(rate))}/s" if rate is not None else "not measured")
    Console().print(table)


_COMMANDS: tuple[Callable[["typer.Typer"], None], ...] = (_add_bench_links,)


if __name__ == "__main__":
    main()
