"""A workload, a model with its example inputs, captured at any batch size without running it or needing its memory."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_offload.accelerators import HOST
from lightning_offload.cli.inputs import ExampleInputs
from lightning_offload.cli.loading import describe
from lightning_offload.cli.loop import Loop
from lightning_offload.cli.steps import Target, default_input_dtype, is_lightning, step_of
from lightning_offload.errors import OffloadError, UnsupportedError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.step_graph import Accumulation, StepGraph
from lightning_offload.plugins.chunked_losses import ChunkedLosses
from lightning_offload.plugins.fake import record_fake_step

LOOP_BYTES = 64 << 10
"""What a loop keeps on the device beside the step: losses, metrics, counters."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One captured step.

    Attributes:
        graph: The step, with the persistent bytes that it does not touch.
        parameter_bytes: Parameters that are trained.
        optimizer_bytes: State of the optimizer.
    """

    graph: StepGraph
    parameter_bytes: int
    optimizer_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What to plan for, except its batch size.

    Attributes:
        target: The model.
        inputs: Its example inputs.
        dtype: What floating-point parameters, buffers and inputs are in; float32 leaves the model as it is made.
        input_dtype: Type of inputs that name none; None for the default.
        loop: How a training runs it.
    """

    target: Target
    inputs: ExampleInputs
    dtype: torch.dtype
    input_dtype: torch.dtype | None
    loop: Loop = dataclasses.field(default_factory=Loop)

    def capture(self, batch_size: int, device: DeviceSpec) -> Captured:
        """Record a step on FakeTensors.

        Args:
            batch_size: Samples in the batch.
            device: Prices the ops.

        Raises:
            UnsupportedError: The step cannot be recorded; says what the model complained about.
        """
        sizes: dict[str, int] = {}
        losses = ChunkedLosses(self.loop.chunked_loss)

        def build() -> tuple[nn.Module, Callable[[], None]]:
            model = self.target.make(self.dtype)
            inputs = self.inputs.build(batch_size, self.input_dtype or default_input_dtype(model, self.dtype))
            sizes["parameters"] = _bytes_of(p for p in model.parameters() if p.requires_grad)
            leaves: list[Any] = tree_leaves(inputs)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            sizes["known"] = _bytes_of((*model.parameters(), *model.buffers(), *tensors))
            trained = [p for p in model.parameters() if p.requires_grad]
            sizes["optimizer"] = self.loop.optimizer_bytes(model, trained, device)
            drops_late = is_lightning(model)  # gradients of the step before, which forward has beside it
            is_first_of_few = self.loop.accumulate > 1
            sizes["loop"] = LOOP_BYTES if drops_late or self.loop.loss is not None else 0
            if device.kind == HOST.type:  # where the loader's next batch lies as well
                sizes["loop"] += _bytes_of(tensors)
            sizes["old"] = sizes["parameters"] if drops_late or is_first_of_few else 0
            sizes["accumulated"] = sizes["parameters"] if is_first_of_few else 0
            losses.attach(model)
            step = step_of(model, inputs, self.loop, device)

            def in_chunks() -> None:
                with losses.scope():
                    step()

            return model, in_chunks

        graph = self._record(build, device)
        losses.begin_step()  # another one would be refused if none of this one's was in chunks
        untouched = max(0, sizes["known"] - graph.persistent_bytes)
        graph = dataclasses.replace(
            graph,
            extra_bytes=graph.extra_bytes + untouched + sizes["optimizer"] + sizes["loop"],
            old_gradient_bytes=sizes["old"],
            accumulated_bytes=sizes["accumulated"],
            accumulations=(Accumulation(added_to_bytes=sizes["accumulated"]),) if sizes["accumulated"] else (),
        )
        return Captured(graph=graph, parameter_bytes=sizes["parameters"], optimizer_bytes=sizes["optimizer"])

    def _record(self, build: Callable[[], tuple[nn.Module, Callable[[], None]]], device: DeviceSpec) -> StepGraph:
        try:
            with _quiet():
                return record_fake_step(build, device)
        except OffloadError:
            raise
        except (Exception, SystemExit) as error:
            raise UnsupportedError(
                f"a step of {self.target.text!r} on these inputs failed: {describe(error)}; check --input, or give "
                "a function that makes the inputs"
            ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is trained: libraries' advice about training is noise."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
