"""``bench-links``: how fast tensors leave a device of this machine and come back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_offload.cli.devices import host_memory_bytes
from lightning_offload.cli.output import console, write_json
from lightning_offload.errors import OffloadError, UnsupportedError
from lightning_offload.units import format_bytes, format_rate, parse_bytes

if TYPE_CHECKING:
    import torch

    from lightning_offload.capture.calibrate import LinkRates

_MIN_SIZE_BYTES = 1 << 20  # less takes as long as its launch
_COPIES_AT_ONCE = 6  # device blocks and host blocks for both directions at once, on a CPU all in one memory


def bench_links(device: str | None, spill_dir: Path | None, size: str, *, as_json: bool) -> None:
    """Measure a device's links and print their rates.

    Args:
        device: What torch calls it, e.g. "cpu" or "cuda"; None for an accelerator where there is one.
        spill_dir: Folder whose disk is measured too.
        size: Bytes of one transfer, with a unit.
        as_json: Whether to print JSON in place of a table.

    Raises:
        OffloadError: An option is wrong; the message says which and what is allowed.
    """
    num_bytes = _checked_size(size)
    if spill_dir is not None:
        from lightning_offload.plugins.settings import check_spill_folder

        check_spill_folder("--spill-dir", spill_dir)
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
    memory = host_memory_bytes()
    if memory is not None and num_bytes * _COPIES_AT_ONCE > memory:
        raise UnsupportedError(
            f"--size {size!r} is too large: this machine has {format_bytes(memory)} of memory, which is enough for "
            f"transfers of {format_bytes(memory // _COPIES_AT_ONCE)}"
        )
    return num_bytes


def _checked_device(device: str | None) -> torch.device:
    import torch

    from lightning_offload.accelerators import accelerators_here
    from lightning_offload.plugins.devices import supported

    here = accelerators_here()
    compute = supported(device if device is not None else here[0].type if here else "cpu")
    num = sum(each.type == compute.type for each in here)
    if compute.type != "cpu" and (compute.index or 0) >= num:
        raise UnsupportedError(
            f"--device {device!r} is not there: torch {torch.__version__} sees {num} {compute.type.upper()} devices; "
            "use 'cpu'"
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


def _print_json(device: torch.device, num_bytes: int, rates: LinkRates) -> None:
    payload: dict[str, Any] = {"device": str(device), "num_bytes": num_bytes}
    payload |= {name: getattr(rates, name) for _, name in _ROWS}
    write_json(payload)


def _print_table(device: torch.device, num_bytes: int, rates: LinkRates) -> None:
    from lightning_offload.accelerators import name_of
    from lightning_offload.report.tables import add_row, make_table

    name = name_of(device)
    title = f"{device} ({name})" if name != str(device) else name
    table = make_table(f"Links of {title}, transfers of {format_bytes(num_bytes)}", "link", ">rate")
    for label, field in _ROWS:
        rate = getattr(rates, field)
        add_row(table, label, format_rate(rate) if rate is not None else "not measured")
    console().print(table)
