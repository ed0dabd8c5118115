"""What of a step's saved tensors never comes to its hooks is counted, and brought to them where torch can."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils import checkpoint

from lightning_offload.runtime import nested_hooks
from lightning_offload.runtime.nested_hooks import NestedSaves, noticing

Caching: Any = checkpoint._CachingTorchDispatchMode


def _pack(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def _resolve() -> Any:
    """Stands in for torch's own look at the hooks around a checkpoint, which 2.13 does not have."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _mode(respect: bool | None) -> Any:
    """A selective checkpoint's mode as torch 2.14 and later prepare it before they enter it."""
    mode = Caching(lambda *_: True, {})
    mode.respect_saved_tensors_hooks = respect
    return mode


@pytest.fixture
def torch_214(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch can pass what a selective checkpoint caches to the hooks around it."""
    monkeypatch.setattr(nested_hooks, "_resolve", _resolve)


@pytest.mark.usefixtures("torch_214")
@pytest.mark.parametrize("said", [None, True, False])
def test_selective_checkpoint_is_told_to_respect_our_hooks(said: bool | None) -> None:
    """Unless the model has said what it wants; and no longer than the step is open."""
    with saved_tensors_hooks(_pack, _unpack), noticing(NestedSaves(), _pack):
        with _mode(said) as mode:
            pass
        assert mode.respect_saved_tensors_hooks is (said is not False)
        with save_on_cpu(), _mode(said) as mode:
            pass
        assert mode.respect_saved_tensors_hooks is said
    with saved_tensors_hooks(_pack, _unpack), _mode(said) as mode:
        pass
    assert mode.respect_saved_tensors_hooks is said


def test_hooks_of_another_thread_are_not_counted() -> None:
    """A step is open in one thread; what others save is their own."""
    nested = NestedSaves()

    def save() -> None:
        with save_on_cpu():
            torch.ones(3, requires_grad=True).sin()

    with noticing(nested, _pack):
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()
        assert nested.num_tensors == {}
        save()
    assert nested.num_tensors == {"save_on_cpu": 1}
    assert nested.num_bytes == {"save_on_cpu": 12}


def test_hooks_of_the_model_are_left_as_they_were() -> None:
    """Hooks that were entered in a step are the same objects, with the same functions, afterwards."""
    hooks = saved_tensors_hooks(_pack, _unpack)
    nested = NestedSaves()
    with noticing(nested, _unpack), hooks:
        torch.ones(3, requires_grad=True).sin()
    assert hooks.pack_hook is _pack
    assert nested.num_tensors == {"_pack": 1}


@pytest.mark.parametrize("calls", [list, lambda items: dict(enumerate(items))], ids=["up to torch 2.11", "later"])
def test_what_a_selective_checkpoint_caches_is_counted(calls: Any) -> None:
    """However torch keeps it, and once for each call."""
    nested = NestedSaves()

    def cached(num_elements: int) -> Any:
        return types.SimpleNamespace(val=torch.ones(num_elements))

    mode = _mode(None)
    mode.storage |= {"mm": calls([cached(2), (cached(3), None)]), "sin": calls([cached(4)])}
    with saved_tensors_hooks(_pack, _unpack), noticing(nested, _pack), mode:
        pass
    assert nested.num_tensors == {nested_hooks.SELECTIVE: 3}
    assert nested.num_bytes == {nested_hooks.SELECTIVE: 36}
