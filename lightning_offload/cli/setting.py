"""Options that planning commands share, checked before any work is done: device, budget, batch size, workload."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_offload.cli.options import PlanOptions
from lightning_offload.cli.output import note
from lightning_offload.errors import BudgetError, PlanError, UnsupportedError
from lightning_offload.graph import catalog
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.files import read_file
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.planner import check_policy
from lightning_offload.report.tables import budget_text
from lightning_offload.units import format_bytes, resolve_budget, resolve_host_budget

if TYPE_CHECKING:
    from lightning_offload.cli.workload import Workload


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Options of a step to plan, understood.

    Attributes:
        options: As they were given.
        workload: The model and its inputs.
        device: Where it is to run.
        budget_bytes: Peak of device memory allowed; None for no limit.
    """

    options: PlanOptions
    workload: Workload
    device: DeviceSpec
    budget_bytes: int | None

    @property
    def budget_text(self) -> str:
        """The budget for a person, as it was typed."""
        return budget_text(self.budget_bytes, self.options.budget)

    @property
    def header(self) -> dict[str, Any]:
        """What was asked for, for JSON."""
        return {
            "target": self.options.target,
            "inputs": list(self.options.inputs or ()),
            "batch_size": self.options.batch_size,
            "dtype": catalog.check_dtype(self.options.dtype),
            "precision": self.options.precision,
            "accumulate": self.options.accumulate,
            "loss": self.options.loss,
            "chunked_loss": self.options.chunked_loss,
            "optimizer": self.workload.loop.optimizer,
            "device": self.device.name,
            "device_bytes": self.device.memory_bytes,
        }


def check_options(options: PlanOptions) -> Checked:
    """Understand what a command was given: the cheap checks first, the model's import last.

    Raises:
        OffloadError: One is wrong; the message says which and what is allowed.
    """
    if options.batch_size < 1:
        raise UnsupportedError(
            f"--batch-size {options.batch_size} is not positive: give the samples in a batch, from 1"
        )
    if options.accumulate < 1:
        raise UnsupportedError(f"--accumulate {options.accumulate} is not positive: give micro-batches of an update")
    check_policy(options.policy)
    dtype = catalog.check_dtype(options.dtype)
    device = find_device(options.device, _computed_in(options.precision, dtype))
    host_bytes = resolve_host_budget(options.host_budget, "--host-budget")
    device = dataclasses.replace(device, host_memory_bytes=host_bytes)
    budget = _budget("--budget", options.budget, device.memory_bytes)
    if budget is not None and device.memory_bytes is not None and budget > device.memory_bytes:
        note(f"--budget {options.budget} is more than {device.name} has, {format_bytes(device.memory_bytes)}")
    workload = _workload(options, dtype)
    return Checked(
        options=options,
        workload=workload,
        device=device,
        budget_bytes=budget if budget is not None else device.memory_bytes,
    )


def _computed_in(precision: str | None, dtype: catalog.DType) -> catalog.DType:
    """The type whose rates the device is priced at."""
    mixed: dict[str | None, catalog.DType] = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}
    return mixed.get(precision, dtype)


def _workload(options: PlanOptions, dtype: catalog.DType) -> Workload:
    import torch

    from lightning_offload.cli import loop
    from lightning_offload.cli.inputs import parse_dtype, parse_inputs
    from lightning_offload.cli.steps import find_target
    from lightning_offload.cli.workload import Workload

    if options.optimizer not in (None, loop.CONFIGURED, *loop.STATE_COPIES):
        known = ", ".join((*loop.STATE_COPIES, loop.CONFIGURED))
        raise UnsupportedError(f"--optimizer {options.optimizer!r} is not known: choose one of {known}")
    autocast, loss = loop.parse_precision(options.precision), loop.parse_loss(options.loss)
    input_dtype = parse_dtype(options.input_dtype, "--input-dtype") if options.input_dtype is not None else None
    inputs = parse_inputs(options.inputs or ())
    target = find_target(options.target)
    chunked_loss = options.chunked_loss or False
    own = loop.CONFIGURED if loop.is_configured(target.found) else loop.USUAL
    return Workload(
        target=target,
        inputs=inputs,
        dtype=getattr(torch, catalog.stored_dtype(dtype)),
        input_dtype=input_dtype,
        loop=loop.Loop(
            autocast=autocast,
            accumulate=options.accumulate,
            loss=loss,
            chunked_loss=chunked_loss in ("True", "true") or chunked_loss,
            optimizer=options.optimizer or own,
        ),
    )


def find_device(name: str | None, dtype: str) -> DeviceSpec:
    """The device of a name, of a file written by ``DeviceSpec.to_json``, or of this machine.

    Raises:
        OffloadError: There is none of that name, the file is malformed, or this machine has no GPU that is known.
    """
    if name is None:
        return _device_here(dtype)
    if name.endswith(".json"):
        return _device_of(Path(name))
    return catalog.device_spec(name, dtype=dtype)


def _device_of(path: Path) -> DeviceSpec:
    try:
        spec = DeviceSpec.from_json(read_file(path))
    except PlanError as error:
        raise type(error)(f"--device {str(path)!r}: {error}") from None
    except (OSError, ValueError) as error:
        raise UnsupportedError(f"--device {str(path)!r} cannot be read: {error}") from None
    if not spec.flops_per_second or not spec.memory_bytes_per_second:
        raise UnsupportedError(
            f"--device {str(path)!r} has no flops_per_second or memory_bytes_per_second, which price the ops: add them"
        )
    return spec


def _device_here(dtype: str) -> DeviceSpec:
    from lightning_offload.accelerators import accelerators_here, name_of, total_bytes_of

    choices = f"give --device, one of {', '.join(catalog.names())}"
    here = accelerators_here()
    if not here:
        raise UnsupportedError(f"this machine has no GPU to plan for: {choices}")
    name = name_of(here[0])
    try:
        spec = catalog.device_spec(name, dtype=dtype)
    except UnsupportedError:
        raise UnsupportedError(f"this machine's {name!r} is not in the catalogue: {choices}") from None
    return dataclasses.replace(spec, memory_bytes=total_bytes_of(here[0]))


def _budget(option: str, text: str | None, device_bytes: int | None) -> int | None:
    try:
        return resolve_budget(text, device_bytes=device_bytes)
    except BudgetError as error:
        raise BudgetError(f"{option}: {error}") from None


def kept_storages(graph: StepGraph, patterns: Sequence[str] | None) -> frozenset[int]:
    """Storages saved by modules whose names match a pattern; none without patterns.

    Raises:
        UnsupportedError: A pattern matches no module that saves anything.
    """
    patterns = patterns or ()
    modules = {save.module for save in graph.saves}
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(module, pattern) for module in modules):
            some = ", ".join(repr(module) for module in sorted(modules)[:6])
            raise UnsupportedError(f"--keep {pattern!r} matches no module that saves a tensor; there are {some}, ...")
    return graph.storages_saved_in(patterns)
