"""Train unmodified PyTorch models within a memory budget, bit for bit.

The public names, in ``__all__``. Importing this package imports neither torch nor Lightning and does not
touch CUDA: classes and functions are imported when they are first used. The strategies register with
``lightning.pytorch`` and ``pytorch_lightning`` when those are imported, before or after this package. The adapters are
its modules ``accelerate``, ``fabric`` and ``transformers``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_offload import _registration
from lightning_offload._version import __version__ as __version__
from lightning_offload.errors import (
    BudgetError,
    BudgetInfeasibleError,
    OffloadError,
    PlanError,
    PolicyError,
    ReplayError,
    ReportFileError,
    SpillError,
    StaleInputError,
    TuningError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from lightning_offload.callbacks import EfficientBatchSizeFinder, OffloadMonitor
    from lightning_offload.losses import chunked_linear_cross_entropy
    from lightning_offload.plugins.memory import MemoryPlugin
    from lightning_offload.strategies import DDPOffloadStrategy, OffloadStrategy


__all__ = [
    "BudgetError",
    "BudgetInfeasibleError",
    "DDPOffloadStrategy",
    "EfficientBatchSizeFinder",
    "MemoryPlugin",
    "OffloadError",
    "OffloadMonitor",
    "OffloadStrategy",
    "PlanError",
    "PolicyError",
    "ReplayError",
    "ReportFileError",
    "SpillError",
    "StaleInputError",
    "TuningError",
    "UnsupportedError",
    "__version__",
    "chunked_linear_cross_entropy",
]

_ADAPTERS = ("accelerate", "fabric", "transformers")  # modules named after the libraries that they need
_LAZY_MODULES = {
    "DDPOffloadStrategy": "lightning_offload.strategies",
    "EfficientBatchSizeFinder": "lightning_offload.callbacks",
    "MemoryPlugin": "lightning_offload.plugins.memory",
    "OffloadMonitor": "lightning_offload.callbacks",
    "OffloadStrategy": "lightning_offload.strategies",
    "chunked_linear_cross_entropy": "lightning_offload.losses",
}


def __getattr__(name: str) -> Any:
    if name in _ADAPTERS:
        return importlib.import_module(f"lightning_offload.{name}")
    # Not cached: which class a Lightning name stands for depends on the Lightning package in use.
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ADAPTERS})


_registration.install()
