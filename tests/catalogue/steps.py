"""Runs one sample for a few steps, plainly or under a memory plugin, and notes every bit that it leaves."""

from __future__ import annotations

import hashlib
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_offload import MemoryPlugin
from tests.catalogue.samples import Entry, Sample, policies_of, samples_of
from tests.engine.harness import Outcome, differences
from tests.shares import is_all

NUM_STEPS = 5 if is_all() else 4
"""Recorded, verified, measured, and under the final plan, once at the least."""
MANY = 50
UNEVEN = "plain runs differ"
TRAIN_SEED = 21


def check(entry: Entry) -> None:
    """Compare an entry's samples, under each policy, with plain PyTorch.

    A warning that plain PyTorch gives as well is torch's own. Where plain runs differ (many are compared where a plan
    seems to change a bit), or plain PyTorch raises, there is nothing to compare with: the test is skipped for such
    samples, once the others have passed, and so it is for a known limit.
    """
    samples = samples_of(entry)
    left_out = [
        f"{number}: {why}"
        for number, sample in enumerate(samples)
        if (why := _why_not(number, sample, policies_of(entry)))
    ]
    if left_out:
        pytest.skip(f"{entry}, sample {'; '.join(left_out)}")
    if not samples:
        pytest.skip("torch's catalogue has no such sample")


def _why_not(number: int, sample: Sample, policies: tuple[str, ...]) -> str:
    """Why a sample cannot be compared; "" where it was, and gives the same bits."""
    if sample.limit:
        return sample.limit
    with warnings.catch_warnings(record=True) as known:
        warnings.simplefilter("always")
        try:
            plain = run_steps(sample, None)
        except (RuntimeError, NotImplementedError) as error:
            return str(error).splitlines()[0]
    for policy in policies:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            found = differences(plain, run_steps(sample, MemoryPlugin(policy=policy)))
            if found and _is_uneven(sample, plain):
                return UNEVEN
        assert not found, f"sample {number} under {policy}:\n  " + "\n  ".join(found)
        assert _texts(given) <= _texts(known)
    return ""


def _is_uneven(sample: Sample, plain: Outcome) -> bool:
    """Whether further plain runs differ: some ops read memory that nothing ever filled, or depend on where it lies."""
    in_the_way: list[Tensor] = []
    for index in range(MANY):
        in_the_way.append(torch.empty(1 + 37 * index))  # memory lies elsewhere each time
        if differences(plain, run_steps(sample, None)):
            return True
    return False


def _texts(found: list[warnings.WarningMessage]) -> set[tuple[type[Warning], str]]:
    return {(warning.category, str(warning.message)) for warning in found}


def run_steps(sample: Sample, memory: MemoryPlugin | None) -> Outcome:
    """Run a sample's steps; outputs, gradients, buffers and random state of each."""
    torch.default_generator.manual_seed(TRAIN_SEED)  # manual_seed notes the stack each time
    module, forward = sample.build()
    outcome = Outcome()
    with memory if memory is not None else nullcontext():
        for index in range(NUM_STEPS):
            with memory.step() if memory is not None else nullcontext():
                out = forward()
                loss = _loss(out, index)
                if loss is not None:
                    loss.backward()  # type: ignore[no-untyped-call]
            _note(outcome, f"step{index}", module, out, loss)
            del out, loss
            module.zero_grad(set_to_none=True)
    return outcome


def _loss(out: Any, index: int) -> Tensor | None:
    """A weighted sum of all that can be differentiated; other weights in each step."""
    generator = torch.Generator().manual_seed(index)
    terms = []
    for leaf in tree_leaves(out):
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            continue
        tensor = _dense(leaf)
        weight = torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
        term = (tensor * weight).sum()
        terms.append((term.real + term.imag if term.is_complex() else term).double())
    return torch.stack(terms).sum() if terms else None


def _dense(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.complex32:
        tensor = tensor.to(torch.complex64)
    if tensor.is_nested:
        return torch.cat([part.reshape(-1) for part in tensor.unbind()])
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _note(outcome: Outcome, name: str, module: nn.Module, out: Any, loss: Tensor | None) -> None:
    outcome.add(f"{name}/loss", loss)
    outcome.add(f"{name}/out", [_read(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)])
    for key, leaf in module.named_parameters():
        outcome.add(f"{name}/grad/{key}", _read(leaf.grad))
    outcome.add(f"{name}/buffers", {key: _read(buffer) for key, buffer in module.named_buffers()})
    outcome.add(f"{name}/rng", hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest())


def _read(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    tensor = tensor.detach()
    return torch.zeros_like(tensor) if tensor._is_zerotensor() else _dense(tensor)  # the former has no memory to read
