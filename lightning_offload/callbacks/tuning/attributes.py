"""Where a model or its data keep a value such as the batch size, and how it is read and set.

A name is looked for in the LightningModule, its `hparams`, the LightningDataModule and its `hparams`, and, where none
of them has it, inside nested hparams. A dotted name ("hparams.data.batch_size") is followed step by step, through
attributes and mappings. A value is set in every place that has it, and in the hparams that Lightning is about to log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from lightning_offload.errors import TuningError

__all__ = ["Attribute", "find_attribute"]

_LOGGED = "_hparams_initial"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A value in an object: under a key of a mapping, or an attribute."""

    holder: Any
    key: str

    def get(self) -> Any:
        return self.holder[self.key] if isinstance(self.holder, Mapping) else getattr(self.holder, self.key)

    def set(self, value: Any) -> None:
        if isinstance(self.holder, MutableMapping):
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """A named value of a model or its data.

    Attributes:
        name: As the user gave it.
        places: Where it is; the first one is read.
        logged: Copies of it among the hparams that Lightning logs.
    """

    name: str
    places: tuple[_Place, ...]
    logged: tuple[_Place, ...]

    def get(self) -> Any:
        """Read the value."""
        return self.places[0].get()

    def set(self, value: Any) -> None:
        """Set the value wherever it is.

        Raises:
            TuningError: It cannot be set.
        """
        for place in (*self.places, *self.logged):
            try:
                place.set(value)
            except Exception as error:
                raise TuningError(
                    f"`{self.name}` of {type(place.holder).__name__} cannot be set to {value!r} ({error}): make it a"
                    " plain attribute or an entry of hparams"
                ) from error


def find_attribute(name: str, module: Any, datamodule: Any | None) -> Attribute | None:
    """Find a value by name; None where there is none.

    Raises:
        TuningError: Nested hparams have several values of that name.
    """
    owners = [owner for owner in (module, datamodule) if owner is not None]
    parts = name.split(".")
    roots = [root for owner in owners for root in (owner, _hparams(owner)) if root is not None]
    places = _distinct(place for root in roots if (place := _follow(root, parts)) is not None)
    if not places:
        places = _distinct(place for owner in owners for place in _nested(_hparams(owner), name))
        _check_unique(name, places)
    if not places:
        return None
    tail = parts[1:] if parts[0] == "hparams" else parts
    initial = [vars(owner)[_LOGGED] for owner in owners if vars(owner).get(_LOGGED)]
    logged = [place for root in initial if (place := _follow(root, tail)) is not None]
    logged += [place for root in initial if len(parts) == 1 for place in _nested(root, name)]
    return Attribute(name=name, places=tuple(places), logged=tuple(_distinct(iter(logged))))


def _hparams(owner: Any) -> Any | None:
    # not through the property, which makes empty hparams where there are none
    return vars(owner).get("_hparams") or vars(owner).get("hparams")


def _follow(root: Any, parts: list[str]) -> _Place | None:
    for part in parts[:-1]:
        root = root.get(part) if isinstance(root, Mapping) else getattr(root, part, None)
        if root is None:
            return None
    key = parts[-1]
    if isinstance(root, Mapping):
        return _Place(holder=root, key=key) if key in root else None
    return _Place(holder=root, key=key) if hasattr(root, key) else None


def _nested(root: Any, name: str) -> Iterator[_Place]:
    """Places of a name inside of hparams that hold other mappings or namespaces."""
    members = root if isinstance(root, Mapping) else getattr(root, "__dict__", None)
    if not isinstance(members, Mapping):
        return
    for key, value in members.items():
        if key == name:
            yield _Place(holder=root, key=name)
        elif isinstance(value, Mapping) or (hasattr(value, "__dict__") and not callable(value)):
            yield from _nested(value, name)


def _distinct(places: Iterator[_Place]) -> list[_Place]:
    return list({id(place.holder): place for place in places}.values())


def _check_unique(name: str, places: list[_Place]) -> None:
    if len({repr(place.get()) for place in places}) > 1:
        values = ", ".join(repr(place.get()) for place in places)
        raise TuningError(
            f"the hparams have several values named {name!r} ({values}): give a dotted name, such as 'data.{name}'"
        )
