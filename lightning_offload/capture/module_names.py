"""Names the module that is running, from the Python stack: no hook on any module, so none to take off."""

from __future__ import annotations

import sys
from types import FrameType

import torch

_CALL_IMPL = torch.nn.Module._call_impl.__code__


class ModuleNames:
    """Qualified names of a model's modules, learnt from its root or from the outermost module found running."""

    def __init__(self, root: torch.nn.Module | None) -> None:
        self._names: dict[int, str] = {}
        if root is not None:
            self._learn(root)

    def _learn(self, root: torch.nn.Module) -> None:
        for name, module in root.named_modules():
            self._names.setdefault(id(module), name)

    def current(self) -> str:
        """Qualified name of the innermost running module, "" outside of any."""
        frame: FrameType | None = sys._getframe(1)
        innermost: torch.nn.Module | None = None
        while frame is not None:
            if frame.f_code is _CALL_IMPL:
                module = frame.f_locals.get("self")
                if innermost is None:
                    innermost = module
                if innermost is not None and id(innermost) in self._names:
                    return self._names[id(innermost)]
                outermost = module
            frame = frame.f_back
        if innermost is None or not isinstance(outermost, torch.nn.Module):
            return ""
        self._learn(outermost)
        return self._names.get(id(innermost), type(innermost).__name__)
