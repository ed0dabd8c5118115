"""The public surface: what can be imported from the package, and nothing by accident."""

from __future__ import annotations

import importlib.metadata

import pytest

import lightning_offload

EXPORTED = [
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


def test_all_is_pinned() -> None:
    """A public name is added or removed on purpose, by changing this list."""
    assert lightning_offload.__all__ == EXPORTED


@pytest.mark.parametrize("name", EXPORTED)
def test_every_exported_name_resolves_and_is_listed(name: str) -> None:
    """Each public name, lazy or not, can be had and shows up in dir()."""
    assert getattr(lightning_offload, name) is not None
    assert name in dir(lightning_offload)


@pytest.mark.parametrize("name", ["accelerate", "fabric", "transformers"])
def test_adapters_are_attributes(name: str) -> None:
    """An adapter can be had without importing it by its full name, and is no public name of its own."""
    assert getattr(lightning_offload, name).__name__ == f"lightning_offload.{name}"
    assert name in dir(lightning_offload)
    assert name not in lightning_offload.__all__


def test_an_unknown_name_raises_attribute_error() -> None:
    """A name that does not exist fails as on any module."""
    with pytest.raises(AttributeError, match="no attribute 'Offload'"):
        _ = lightning_offload.Offload  # type: ignore[attr-defined]


def test_version_is_the_installed_one() -> None:
    """The version in the package is the version of the distribution."""
    assert importlib.metadata.version("lightning-offload") == lightning_offload.__version__
