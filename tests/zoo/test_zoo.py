"""The zoo itself: architectures of the right size, cases that are deterministic and finite."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.engine.harness import Snapshot, assert_same, run
from tests.shares import is_all, share
from tests.zoo.case import Case
from tests.zoo.cases import CASES
from tests.zoo.models.plain_conv import AlexNet, vgg19
from tests.zoo.models.resnet import resnet50, resnet152


@pytest.mark.parametrize(
    ("build", "num_parameters"),
    [(resnet50, 25_557_032), (resnet152, 60_192_808), (vgg19, 143_667_240), (AlexNet, 61_100_840)],
)
def test_parameter_counts(build: Callable[[], nn.Module], num_parameters: int) -> None:
    """The architectures have the published number of parameters."""
    with torch.device("meta"):
        model = build()
    assert sum(weight.numel() for weight in model.parameters()) == num_parameters


@pytest.mark.parametrize("case", share(CASES, 3), ids=str)
def test_cases_are_deterministic_and_finite(case: Case) -> None:
    """Two plain runs agree bit for bit, as those of the engine's tests show as well, and all values are finite."""
    first = run(case)
    if is_all():
        assert_same(first, run(case))
    for name, value in first.values.items():
        if isinstance(value, Snapshot) and (value.dtype.is_floating_point or value.dtype.is_complex):
            assert value.tensor().isfinite().all(), name
    grads = [value for name, value in first.values.items() if name.startswith("step0/grad") and value is not None]
    assert grads or case.name == "lbfgs"
