"""Which of the two Lightning packages is in use.

Lightning is published twice from one source: `lightning.pytorch` and `pytorch_lightning`. Their classes are
unrelated, both are often installed, and a program may import either or both. Nothing here imports one of them
unless a class of ours is asked for while neither is loaded; the caller's own import decides otherwise.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

from lightning_offload._registration import LIGHTNING_PACKAGES
from lightning_offload.errors import UnsupportedError


def loaded_packages() -> tuple[str, ...]:
    """Names the Lightning packages that the program has imported, the preferred one first."""
    return tuple(name for name in LIGHTNING_PACKAGES if name in sys.modules)


def current_package() -> str:
    """Names the Lightning package to build for: the imported one, else the first that is installed.

    Raises:
        UnsupportedError: No Lightning package is installed.
    """
    loaded = loaded_packages()
    if loaded:
        return loaded[0]
    for name in LIGHTNING_PACKAGES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return name
    raise UnsupportedError(
        f"Lightning is not installed (looked for {' and '.join(LIGHTNING_PACKAGES)}): `pip install"
        " lightning`, or use lightning_offload.MemoryPlugin, which needs no framework"
    )


def package_of(instance: object) -> str | None:
    """Names the Lightning package that the class of `instance` comes from, `None` if from neither."""
    for cls in type(instance).__mro__:
        for name in LIGHTNING_PACKAGES:
            if cls.__module__ == name or cls.__module__.startswith(f"{name}."):
                return name
    return None


def package_for(trainer: object) -> str:
    """Names the Lightning package of a Trainer; the current one where its class is from neither."""
    return package_of(trainer) or current_package()


def import_from(package: str, name: str = "") -> ModuleType:
    """Imports `package` or, with `name`, the module `package.name`."""
    return importlib.import_module(f"{package}.{name}" if name else package)


def build_class(mixin: type, name: str, base: type, **members: Any) -> type[Any]:
    """Builds a class of ours for a Lightning package.

    Args:
        mixin: What is ours of it.
        name: The public name, by which pickle and LightningCLI find the class.
        base: The package's own class.
        members: Further members, in place of the mixin's.
    """
    constructor = vars(mixin).get("__init__")
    if constructor is not None:  # Python's errors about its keywords name what the user wrote
        constructor.__qualname__ = f"{name}.__init__"
    namespace = {"__module__": "lightning_offload", "__qualname__": name, "__doc__": mixin.__doc__, **members}
    built: type[Any] = type(base)(name, (mixin, base), namespace)
    return built


def rank_zero(package: str, level: str, message: str) -> None:
    """Says `message` once per job, through Lightning's own log or warnings.

    Args:
        package: The Lightning package whose log is used.
        level: "info" or "warn".
        message: What to say.
    """
    say: Any = getattr(import_from(package, "utilities.rank_zero"), f"rank_zero_{level}")
    say(message)
