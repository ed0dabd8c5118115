"""Makes every training forward of a model a step, for loops that are the user's own.

Accelerate, the Hugging Face Trainer and Fabric leave the training loop, or its inside, to the user: what they have
in common is that the model is called. So a step begins in a forward pre-hook of the model and its scope ends in a
forward hook; the backward that follows belongs to it however it is called. Forwards under ``no_grad`` are left
alone. A model in evaluation mode that is called with gradients is stepped too, as another kind of step.

Note [Interrupted forwards]: torch calls an ``always_call`` hook after an exception but not after a
KeyboardInterrupt, and shows it nothing of the exception. The exception is found as the one being handled. A scope
that an interrupt left open is known by the frame that opened it: it is no longer running when the next forward
begins, or when the plugin is detached, and is closed then.

Calls of a compiled model are seen by :mod:`~.compiled_models`: its hooks, compiled with the rest, do nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import threading
import weakref
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_offload.errors import PolicyError, UnsupportedError, type_of
from lightning_offload.plugins.announcing import Announcer
from lightning_offload.plugins.compiled_models import watch_calls
from lightning_offload.plugins.data_parallel import run_unseen_around_forward
from lightning_offload.plugins.memory import MemoryPlugin

_NOTHING_SEEN = (
    "an optimizer stepped, but no followed model has been called with gradients, so no memory budget is kept: call the "
    "model itself, or put `with memory.step(batch):` around what you call in its place"
)
PLUGIN_KEYWORDS = frozenset(inspect.signature(MemoryPlugin).parameters)
"""What a plugin takes, for adapters that hand it on."""


class ModuleMemoryPlugin(MemoryPlugin):
    """A :class:`MemoryPlugin` whose steps are the training forwards of the models that it follows.

    A GAN's two networks, for example, are two models of one plugin: a plugin serves a device.

    Args:
        args: Those of :class:`MemoryPlugin`.
        advice_without_steps: What to tell where an optimizer steps, but no followed model was called with gradients.
        keywords: Those of :class:`MemoryPlugin`.
    """

    def __init__(self, *args: Any, advice_without_steps: str = _NOTHING_SEEN, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._steps.misuse.advice["no step"] = advice_without_steps
        self.undo = ExitStack()
        """What a framework's adapter has to take back on :meth:`detach`."""
        self._followed: dict[int, weakref.ref[nn.Module]] = {}
        self._wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._open = _OpenScopes()
        self._thread = threading.get_ident()
        self._announcer: Announcer | None = None

    def announce(self, name: str, call: str | None = None) -> None:
        """Say what the budget is and, once it is known, the plan; the device is known, and models are followed.

        Args:
            name: What the user made, for messages.
            call: How a budget is given to that; by default as its keyword.
        """
        if self.enabled and self._announcer is None:
            self._announcer = Announcer(self, name, call)

    @property
    def num_followed(self) -> int:
        """Number of models whose forwards are steps."""
        return len(self._followed)

    def follow(self, *models: nn.Module, device: torch.device | str | None = None) -> None:
        """Attach, and make every training forward of these models a step until :meth:`detach`.

        The wrapper of DDP is looked through, and known from its first forward on. The plugin is detached when the last
        model is gone.

        Raises:
            PolicyError: One of them is not a module.
            UnsupportedError: One of them is followed already, or runs on several devices.
        """
        modules = [followable(model) for model in models]
        if not self.enabled:
            return
        with ExitStack() as undo:
            undo.callback(self._steps.losses.detach)
            self._steps.losses.attach(*modules)
            self.attach(modules[0], device)
            undo.pop_all()
        for module in modules:
            self._followed[id(module)] = weakref.ref(module)
            enter = module.register_forward_pre_hook(_Enter(self), prepend=True, with_kwargs=True)
            leave = module.register_forward_hook(_Leave(self), always_call=True)
            finalizer = weakref.finalize(module, self._forget, id(module))
            finalizer.atexit = False
            for take_back in (enter.remove, leave.remove, finalizer.detach):
                self.undo.callback(take_back)
        self.undo.callback(watch_calls(self, modules))

    @override
    def detach(self) -> None:
        if self._announcer is not None:
            self._announcer.tell_plan(self)
        self.undo.close()
        self._followed.clear()
        self._wrappers.clear()
        self._close_interrupted(None)
        super().detach()

    def is_following(self, module: nn.Module) -> bool:
        """Whether this very module, not a copy or a replica of it, is followed."""
        reference = self._followed.get(id(module))
        return reference is not None and reference() is module

    def _forget(self, key: int) -> None:
        self._followed.pop(key, None)
        if self._followed:
            return
        if threading.get_ident() == self._thread:
            self.detach()
        else:  # a garbage collection in a lane's thread, say, which detaching would wait for
            threading.Thread(target=self.detach, name="lightning-offload-detach").start()

    def enter(self, module: nn.Module, inputs: tuple[Any, Any]) -> None:
        """Open a step; called before each forward of a followed model."""
        frames = _calling(sys._getframe(2))
        self._close_interrupted(frames[0])
        if not torch.is_grad_enabled():
            return
        scope = self.stepping(module, inputs)
        del inputs
        scope.__enter__()
        self._open.scopes.append(_Scope(scope, frames, sys.exc_info()[1]))

    def stepping(self, module: nn.Module, inputs: tuple[Any, Any]) -> AbstractContextManager[Any]:
        """What surrounds a call of a followed model: a step, where gradients are on.

        Args:
            module: The model.
            inputs: Positional and keyword arguments.
        """
        if not torch.is_grad_enabled():
            return nullcontext()
        if self._announcer is not None:
            self._announcer.tell_plan(self)
        wrapper = DistributedDataParallel._get_active_ddp_module()
        if wrapper is not None and wrapper not in self._wrappers:
            self._watch(wrapper)
        key = "training" if module.training else "evaluation"
        if place := list(self._followed).index(id(module)) if id(module) in self._followed else 0:
            key = f"{key} {place}"  # another model's forwards are others, of whatever sizes
        return self._steps.step(({key: inputs},), wrapper)

    def _watch(self, wrapper: DistributedDataParallel) -> None:
        self._wrappers.add(wrapper)
        self.data_parallel.watch(wrapper)
        self.undo.callback(run_unseen_around_forward(wrapper, self.data_parallel.buckets))
        self.undo.callback(wrapper.register_forward_pre_hook(_BeforeDDP(self), prepend=True).remove)

    def before_ddp(self) -> None:
        """Called before each forward of a wrapper in which a followed model was met."""
        self._steps.before_ddp()

    def leave(self) -> None:
        """Close the step that :meth:`enter` opened; called after each forward, whether or not it raised."""
        scopes = self._open.scopes
        if scopes and sys._getframe(2) in scopes[-1].frames:  # else there are no gradients, or the plan was refused
            scopes.pop().close(sys.exc_info()[1])

    def _close_interrupted(self, frame: FrameType | None) -> None:
        """Close the scopes whose forwards no longer run, see Note [Interrupted forwards]."""
        scopes = self._open.scopes
        if not scopes:
            return
        running = set()
        frame = frame or sys._getframe(1)
        while frame is not None:
            running.add(frame)
            frame = frame.f_back
        while scopes and running.isdisjoint(scopes[-1].frames):
            scopes.pop().close(KeyboardInterrupt())


@dataclasses.dataclass(slots=True)
class _Scope:
    step: AbstractContextManager[None]
    frames: tuple[FrameType, ...]
    error_before: BaseException | None  # a model may be called while an exception is being handled

    def close(self, error: BaseException | None) -> None:
        if error is None or error is self.error_before:
            self.step.__exit__(None, None, None)
            return
        try:
            self.step.__exit__(type(error), error, error.__traceback__)
        except BaseException as told:  # torch raises the forward's own error and only warns of ours
            if told is not error:
                error.args = told.args


def _calling(frame: FrameType) -> tuple[FrameType, ...]:
    """The frames of torch's call of a module: after an exception the hooks are called from the outer one."""
    return (frame,) if frame.f_back is None else (frame, frame.f_back)


class _OpenScopes(threading.local):
    def __init__(self) -> None:
        self.scopes: list[_Scope] = []


class _Hook:
    """A hook that copies and pickles of a model, such as averaged weights, do without."""

    def __init__(self, memory: ModuleMemoryPlugin) -> None:
        self.memory = memory

    def __reduce__(self) -> tuple[Any, ...]:
        return (_NoHook, ())


class _Enter(_Hook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and self.memory.is_following(module):
            self.memory.enter(module, (args, kwargs))


class _Leave(_Hook):
    def __call__(self, module: nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling() and self.memory.is_following(module):
            self.memory.leave()


class _BeforeDDP(_Hook):
    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.memory.before_ddp()


class _NoHook:
    def __call__(self, *_: Any) -> None:
        """Do nothing."""


def trained_modules(model: object) -> list[nn.Module]:
    """The modules whose calls can be steps: a model, or those of a wrapper that is no module itself.

    Raises:
        PolicyError: It is no module, and has none that is trained among its attributes.
        UnsupportedError: One is followed already, or runs on several devices.
    """
    if isinstance(model, nn.Module):
        followable(model)
        return [model]
    attributes = vars(model) if hasattr(model, "__dict__") else {}
    found = [item for item in attributes.values() if isinstance(item, nn.Module)]
    trained = [item for item in found if any(parameter.requires_grad for parameter in item.parameters())]
    if not trained:
        raise PolicyError(
            f"model={model!r:.80} is {type_of(model)}, and no attribute of it is a module that is trained: give "
            "module=, the torch.nn.Module whose forwards are to be steps"
        )
    for item in trained:
        followable(item)
    return trained


def followable(model: object) -> nn.Module:
    """The module whose calls can be steps.

    Raises:
        PolicyError: It is not a module.
        UnsupportedError: It is followed already, or runs on several devices.
    """
    if not isinstance(model, nn.Module):
        raise PolicyError(f"model={model!r:.80} is {type_of(model)}: give a torch.nn.Module")
    if isinstance(model, nn.DataParallel):
        raise UnsupportedError(
            "torch.nn.DataParallel runs a model on several devices at once, which is not supported: start one process "
            "for each device with torchrun or `accelerate launch`"
        )
    module = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(module, nn.Module)
    if any(isinstance(hook, _Enter) and hook.memory.is_following(module) for hook in _pre_hooks(module)):
        raise UnsupportedError(
            f"this {type(module).__name__} already trains within a budget: keep the first plugin, or detach() it"
        )
    return module


def _pre_hooks(module: nn.Module) -> tuple[Any, ...]:
    return tuple(module._forward_pre_hooks.values())
