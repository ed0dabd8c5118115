"""Calls of compiled models, for who makes each forward of a model a step.

A module's hooks are no use there: they are compiled with the rest, and a graph break at each would cost more than the
memory is worth. What is outside of the compiled code is called in one of two ways:

- The wrapper that ``torch.compile(model)`` returned. Its class has another ``__call__`` while models are followed, so
  it does not matter which came first, nor who compiled: Accelerate, the Hugging Face Trainer and Fabric compile late.
- What ``model.compile()`` left in the model. It is put into an object of ours, when the model is followed or, since
  ``torch.compile`` is watched, when it is compiled later.

A compiled model that contains one that is followed is called in its place.

Shortfalls: of a model that was compiled in place before the one inside it was followed, calls are not seen, nor is a
wrapper where ``torch.compile`` was taken from torch before, and is used for the first time in the process after.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn

__all__ = ["Follower", "watch_calls"]

_IN_PLACE = "_compiled_call_impl"


class Follower(Protocol):
    """Makes calls of some models steps."""

    def is_following(self, module: nn.Module) -> bool:
        """Whether calls of this module are steps."""

    def stepping(self, module: nn.Module, inputs: tuple[Any, Any]) -> AbstractContextManager[Any]:
        """Surrounds a call of a followed module; inputs are its positional and its keyword arguments."""


class _Watch:
    """Watches the calls of compiled models while anybody follows one."""

    def __init__(self) -> None:
        self.followers: list[weakref.ref[Follower]] = []
        self._undo = ExitStack()
        self._found: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()

    def add(self, follower: Follower) -> None:
        if not self.followers:
            self._undo.callback(self._replace(torch, "compile", _watching(torch.compile)))
            self.see_wrappers()
        self.followers.append(weakref.ref(follower))
        self._found.clear()

    def remove(self, follower: Follower) -> None:
        self.followers = [known for known in self.followers if known() not in (None, follower)]
        self._found.clear()
        if not self.followers:
            self._undo.close()

    def see_wrappers(self) -> None:
        """Have the calls of wrappers come by, once there can be any."""
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        if dynamo is None or getattr(dynamo.OptimizedModule.__call__, "is_watching", False):
            return
        wrapper = dynamo.OptimizedModule
        call = wrapper.__call__

        @functools.wraps(call)
        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _watch.around(self._orig_mod, (args, kwargs)):
                return call(self, *args, **kwargs)

        watched.is_watching = True  # type: ignore[attr-defined]
        self._undo.callback(self._replace(wrapper, "__call__", watched))

    @staticmethod
    def _replace(owner: Any, name: str, new: Any) -> Callable[[], None]:
        is_own, old = name in vars(owner), getattr(owner, name)
        setattr(owner, name, new)

        def restore() -> None:
            if getattr(owner, name) is not new:  # somebody has put another around it
                return
            if is_own:
                setattr(owner, name, old)
            else:
                delattr(owner, name)

        return restore

    def around(self, module: nn.Module, inputs: tuple[Any, Any]) -> AbstractContextManager[Any]:
        """What surrounds a call of a compiled module."""
        if torch.compiler.is_compiling() or not self.followers:
            return nullcontext()
        found = self.followed_in(module)
        return found[0].stepping(found[1], inputs) if found is not None else nullcontext()

    def followed_in(self, module: nn.Module) -> tuple[Follower, nn.Module] | None:
        """Who follows a module, or the first one in it that is followed, and that module."""
        if module not in self._found:
            followers = [follower for follower in (known() for known in self.followers) if follower is not None]
            found = ((f, part) for part in module.modules() for f in followers if f.is_following(part))
            follower, part = next(found, (None, None))
            self._found[module] = (weakref.ref(follower), weakref.ref(part)) if part is not None else None
        known = self._found[module]
        if known is None:
            return None
        follower, part = known[0](), known[1]()
        return (follower, part) if follower is not None and part is not None else None


_watch = _Watch()


class _Call:
    """What ``model.compile()`` left in a model, with what surrounds a call of that.

    Attributes:
        compiled: What it left.
    """

    def __init__(self, module: nn.Module, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        module = self._module()
        with _watch.around(module, (args, kwargs)) if module is not None else nullcontext():
            return self.compiled(*args, **kwargs)


def _watching(compile_: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_)
    def watched(*args: Any, **kwargs: Any) -> Any:
        made = compile_(*args, **kwargs)
        if not _watch.followers:
            return made
        _watch.see_wrappers()
        model = args[0] if args else kwargs.get("model")
        if isinstance(model, MethodType) and model.__name__ == "_call_impl" and isinstance(model.__self__, nn.Module):
            return _Call(model.__self__, made) if _watch.followed_in(model.__self__) is not None else made
        return made

    return watched


def watch_calls(follower: Follower, modules: list[nn.Module]) -> Callable[[], None]:
    """Surround the calls of models that are compiled, or will be.

    Args:
        follower: What is around each.
        modules: The models that it follows.

    Returns:
        What ends it.
    """
    _watch.add(follower)
    for module in modules:
        compiled = vars(module).get(_IN_PLACE)
        if compiled is not None and not isinstance(compiled, _Call):
            vars(module)[_IN_PLACE] = _Call(module, compiled)
    references = [weakref.ref(module) for module in modules]

    def end() -> None:
        for module in (reference() for reference in references):
            compiled = vars(module).get(_IN_PLACE) if module is not None else None
            if module is not None and isinstance(compiled, _Call):
                vars(module)[_IN_PLACE] = compiled.compiled
        _watch.remove(follower)

    return end
