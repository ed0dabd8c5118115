"""The comparison of two saved runs sees a single flipped bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from examples.demo import compare as compare_module
from examples.demo.compare import compare, main, same_bits
from examples.demo.program import DemoError, compare_in_process
from examples.demo.state import GROUPS, load_state, save_state
from tests.shares import is_all


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A saved run of two steps of a small network with BatchNorm."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(2):
        loss = module(torch.randn(5, 4)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    path = tmp_path / "plain.pt"
    save_state(path, losses, module, optimizer)
    return path


def flip_bit(source: Path, target: Path, group: str) -> str:
    """Copy a saved state with the lowest bit of one tensor's last element flipped; returns the tensor's name."""
    state = torch.load(source, weights_only=True)
    name = list(state[group])[-1]
    tensor = state[group][name].clone()
    tensor.reshape(-1).view(torch.uint8)[-tensor.element_size()] ^= 1
    state[group][name] = tensor
    torch.save(state, target)
    return name


def test_every_group_is_saved(saved: Path):
    """Losses, weights, statistics, optimizer and random state all hold tensors."""
    state = load_state(saved)
    assert {group: len(tensors) for group, tensors in state.items()} == {
        "losses": 2,
        "weights": 4,
        "statistics": 3,
        "optimizer": 4,
        "random": 2 if torch.cuda.is_available() else 1,
    }


def test_same_state_is_identical(saved: Path):
    """A state compared with itself is identical in every part."""
    verdict = compare(load_state(saved), load_state(saved))
    assert verdict["identical"] is True
    assert all(verdict[group] is True for group in GROUPS)
    assert verdict["first_difference"] is None


@pytest.mark.parametrize("group", GROUPS)
def test_one_flipped_bit_is_seen(saved: Path, tmp_path: Path, group: str):
    """One bit in one tensor of any part makes that part, and the whole, different."""
    other = tmp_path / "other.pt"
    name = flip_bit(saved, other, group)
    verdict = compare(load_state(saved), load_state(other))
    assert verdict["identical"] is False
    assert [part for part in GROUPS if not verdict[part]] == [group]
    assert verdict["first_difference"] == f"{group}: {name} differs"


def test_separate_process_sees_one_flipped_bit(saved: Path, tmp_path: Path):
    """The process that the demo starts says the same as the function; of what is identical it does in `test_demo`."""
    other = tmp_path / "other.pt"
    flip_bit(saved, other, "statistics")
    assert not is_all() or compare_in_process(saved, saved)["identical"] is True
    assert compare_in_process(saved, other)["identical"] is False


def test_separate_process_that_cannot_compare_is_an_error(saved: Path, tmp_path: Path):
    """A missing state is one clear error, not a verdict."""
    with pytest.raises(DemoError, match=r"status 2: cannot compare .*missing\.pt"):
        compare_in_process(saved, tmp_path / "missing.pt")


def test_missing_tensor_is_a_difference(saved: Path):
    """A tensor that only one run has is named."""
    state = load_state(saved)
    del state["weights"]["0.bias"]
    verdict = compare(load_state(saved), state)
    assert verdict["weights"] is False
    assert verdict["first_difference"] == "weights: 0.bias is in one run only"


def test_empty_part_proves_nothing(saved: Path):
    """A part without tensors is never called identical."""
    states = [load_state(saved), load_state(saved)]
    for state in states:
        state["losses"].clear()
    assert compare(*states)["identical"] is False


def test_bits_are_compared_not_values():
    """Equal nans are equal; zeros of different sign, other dtypes and other shapes are not."""
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))
    assert same_bits(torch.ones(3, 2).t(), torch.ones(2, 3))


def test_exit_status_tells_the_verdict(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """0 is identical, 1 different, 2 no comparison; the last line is JSON where there is a verdict."""
    other = tmp_path / "other.pt"
    flip_bit(saved, other, "losses")
    assert main([str(saved), str(saved)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["identical"] is True
    assert main([str(saved), str(other)]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["identical"] is False
    assert main([str(saved)]) == 2
    other.write_bytes(b"no state")
    assert main([str(saved), str(other)]) == 2
    assert "cannot compare" in capsys.readouterr().err


def test_comparison_does_not_know_the_library():
    """Nothing of the library under test is imported for the verdict."""
    assert not [name for name in vars(compare_module) if "offload" in name]
