"""Makes the precision plugin that Lightning built run each training step under a `MemoryPlugin`.

Lightning wraps a training step in `precision.train_step_context()` and the backward in
`precision.backward()`, so these two are where a step begins and ends. The plugin itself is Lightning's choice
(or the user's), and others look at its type: ThroughputMonitor by `isinstance`, checkpoints by its qualified
name. A wrapper would break them, hence `graft` gives the very instance a subclass of its own class, under the
same name, and `ungraft` takes it away.

    strategy.training_step(batch)            note_inputs(batch)
      precision.train_step_context()           with memory.step(batch):
        forward_context()                        autocast, default dtype, ...
          module.training_step(batch)
    strategy.backward(loss)
      precision.backward(loss)                 with memory.backward_scope():

Under manual optimization the backward runs inside the step, where `backward_scope` is a no-op. The contexts
of validation, test and prediction are left alone. Everything happens on the thread that trains.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_offload.errors import UnsupportedError
from lightning_offload.plugins import class_swap as grafting

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.plugins.precision import Precision as _PrecisionBase
    from torch import Tensor

    from lightning_offload.plugins.memory import MemoryPlugin
else:
    _PrecisionBase = object  # the real base is the class of the plugin that is grafted on

_UNSUPPORTED = {
    "FSDPPrecision": "FSDP",
    "DeepSpeedPrecision": "DeepSpeed",
    "XLAPrecision": "XLA",
}


class OffloadPrecisionMixin(_PrecisionBase):
    """What `graft` puts in front of a precision plugin's own class."""

    grafted_attributes = ("_offload_memory", "_offload_inputs")

    _offload_memory: MemoryPlugin
    _offload_inputs: tuple[Any, ...] = ()

    def note_inputs(self, *inputs: Any) -> None:
        """Notes the inputs of the step that is about to begin; they choose its cached plan."""
        self._offload_inputs = inputs

    @override
    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """Opens a step around Lightning's own context, so that autocast and default dtype stay inside it."""
        inputs, self._offload_inputs = self._offload_inputs, ()
        step = self._offload_memory.step(*inputs)
        del inputs  # this frame lives as long as the step and must not hold the batch
        with step, super().train_step_context():
            yield

    @override
    def backward(  # type: ignore[override]  # as in Lightning: Fabric's and the Trainer's signatures differ
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Runs the plugin's backward as the backward of the last step."""
        with self._offload_memory.backward_scope():
            super().backward(tensor, model, optimizer, *args, **kwargs)


def check_supported(plugin: object) -> None:
    """Raises `UnsupportedError` if `plugin` belongs to a strategy that shards or compiles the step itself."""
    for cls in type(plugin).__mro__:
        if cls.__name__ in _UNSUPPORTED:
            raise UnsupportedError(
                f"{_UNSUPPORTED[cls.__name__]} is not supported together with OffloadStrategy (got the"
                f" precision plugin {type(plugin).__name__}): choose precision= by name, or use that strategy"
                " without offloading"
            )


def graft(plugin: Any, memory: MemoryPlugin) -> None:
    """Makes `plugin` run its training steps under `memory`, in place, until `ungraft`."""
    check_supported(plugin)
    grafting.graft(plugin, OffloadPrecisionMixin)
    plugin._offload_memory = memory


def ungraft(plugin: Any) -> None:
    """Gives `plugin` its own class back; does nothing to a plugin that is not grafted."""
    grafting.ungraft(plugin, OffloadPrecisionMixin)
