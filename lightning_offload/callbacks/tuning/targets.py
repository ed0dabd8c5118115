"""What a tuning changes: the batch size and the learning rate, wherever this run keeps them.

A batch size is an attribute of the model or its data, or that of the dataloaders that were passed to `fit()`, which
are then made again. Everything a user may have got wrong about them is found here, before anything is run.

A batch size that nobody keeps by its name is looked for in the keywords that a model or its data keep for their loaders
(a mapping with that entry); where there are none, the loaders of `train_dataloader()` are made again, each time it is
called. A learning rate that is nowhere is the optimizers': their groups are scaled as they are.

A name is looked for in the LightningModule, its `hparams`, the LightningDataModule and its `hparams`, and, where none
of them has it, inside nested hparams. A dotted name ("hparams.data.batch_size") is followed step by step, through
attributes and mappings. A value is set in every place that has it, and in the hparams that Lightning is about to log.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch.nn.parameter import is_lazy

from lightning_offload.callbacks.tuning.batches import all_resized, loaders_in, resized, sizes_of
from lightning_offload.callbacks.tuning.options import FinderOptions
from lightning_offload.callbacks.tuning.result import TuningResult
from lightning_offload.callbacks.tuning.trainer_facts import accumulation_of
from lightning_offload.errors import TuningError
from lightning_offload.lightning_packages import import_from, rank_zero
from lightning_offload.tuning.snapshot import RandomStates

_LOGGED = "_hparams_initial"
_USUAL_SIZE, _USUAL_RATE = "batch_size", "lr"
"""Names that a user need not have given."""


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
                if place.get() != value:
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


def places_of(root: Any, name: str) -> list[_Place]:
    """Where a named value is in hyperparameters: at its dotted name, or anywhere inside of them."""
    parts = name.split(".")
    tail = parts[1:] if parts[0] == "hparams" else parts
    found = _follow(root, tail)
    return [found] if found is not None else list(_nested(root, tail[-1]))


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
    return _Place(holder=root, key=key) if _has(root, key) else None


def _has(owner: Any, name: str) -> bool:
    try:
        getattr(owner, name)
    except Exception:  # of a property that needs what is not there yet
        return False
    return True


def _nested(root: Any, name: str, known: set[int] | None = None) -> Iterator[_Place]:
    """Places of a name inside of hparams that hold other mappings or namespaces, which may refer to one another."""
    known = set() if known is None else known
    members = root if isinstance(root, Mapping) else getattr(root, "__dict__", None)
    if not isinstance(members, Mapping) or id(root) in known:
        return
    known.add(id(root))
    for key, value in members.items():
        if key == name:
            yield _Place(holder=root, key=name)
        elif isinstance(value, Mapping) or (hasattr(value, "__dict__") and not callable(value)):
            yield from _nested(value, name, known)


def _distinct(places: Iterator[_Place]) -> list[_Place]:
    return list({id(place.holder): place for place in places}.values())


def _check_unique(name: str, places: list[_Place]) -> None:
    if len({repr(place.get()) for place in places}) > 1:
        values = ", ".join(repr(place.get()) for place in places)
        raise TuningError(
            f"the hparams have several values named {name!r} ({values}): give a dotted name, such as 'data.{name}'"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Where the values are.

    Attributes:
        package: The Lightning package in use.
        size: The attribute with the batch size; None where loaders were passed and the model has none.
        rate: The attribute with the learning rate; None where the groups are scaled as they are.
        loaders: Those passed to `fit()`; None where the model or its data make them.
        is_remade: Whether the loaders that the model or its data make are made again for another size.
        base_size: Batch size as the user configured it.
        base_rate: Learning rate as the user configured it; None without an attribute.
    """

    package: str
    size: Attribute | None
    rate: Attribute | None
    loaders: Any | None
    is_remade: bool = False
    base_size: int
    base_rate: float | None

    def set_batch_size(self, batch_size: int) -> None:
        """Set a size where the model or its data keep it; loaders are left alone."""
        if self.size is not None:
            self.size.set(batch_size)

    def load(self, trainer: Any, batch_size: int) -> None:
        """Set a size, and have the fit loop ask for loaders of it."""
        self.set_batch_size(batch_size)
        source = trainer.fit_loop._data_source
        forget_remade(trainer)
        is_other = batch_size != self.base_size
        if self.loaders is not None:
            source.instance = all_resized(self.loaders, batch_size, self.package) if is_other else self.loaders
        elif self.is_remade and is_other:
            source.dataloader = lambda: all_resized(type(source).dataloader(source), batch_size, self.package)

    def apply(self, trainer: Any, batch_size: int, rate: float | None) -> None:
        """Set a size and a rate for the coming fit."""
        self.load(trainer, batch_size)
        if self.rate is not None and rate is not None:
            self.rate.set(rate)


def with_rate_of_now(targets: Targets) -> Targets:
    """The same with the rate that another callback has set since, as Lightning's `LearningRateFinder` does."""
    return targets if targets.rate is None else dataclasses.replace(targets, base_rate=_checked_rate(targets.rate))


def forget_remade(trainer: Any) -> None:
    """Have loaders made as the model or its data make them."""
    vars(trainer.fit_loop._data_source).pop("dataloader", None)


def find_targets(trainer: Any, module: Any, package: str, options: FinderOptions) -> Targets:
    """Find what is to be tuned in a run.

    Raises:
        TuningError: There is no such attribute, or its value is no batch size or learning rate; or the model has
            parameters that its first step would initialize.
    """
    batch_arg_name, lr_arg_name = options.batch_arg_name, options.lr_arg_name
    _check_initialized(module)
    source = trainer.fit_loop._data_source
    size = find_attribute(batch_arg_name, module, trainer.datamodule)
    size = size if size is not None else _loader_keyword(batch_arg_name, module, trainer.datamodule)
    loaders = None if source.is_module() else source.instance
    if loaders is not None:
        base_size = _size_of_loaders(loaders, package)
    is_remade = loaders is None and size is None
    if is_remade:
        found = loaders_in(_made_by(source, package)) if batch_arg_name == _USUAL_SIZE and source.is_defined() else []
        if not found:
            raise TuningError(
                f"`{batch_arg_name}` is no attribute of {_names(module, trainer)} nor of their hparams: set"
                " batch_arg_name= to the name of the batch size that train_dataloader() uses, or pass a DataLoader to"
                " fit()"
            )
        base_size = _size_of_loaders(found, package)
    elif size is not None and loaders is None:
        base_size = _checked_size(batch_arg_name, size.get())
    rate = None
    if lr_arg_name is not None:
        rate = find_attribute(lr_arg_name, module, trainer.datamodule)
        if rate is None and options.lr_scaling != "none" and lr_arg_name != _USUAL_RATE:
            raise TuningError(
                f"`{lr_arg_name}` is no attribute of {_names(module, trainer)} nor of their hparams: set"
                " lr_arg_name= to the name of the learning rate, lr_arg_name=None to scale the optimizer's groups as"
                " they are, or lr_scaling='none' to leave the rate alone"
            )
    return Targets(
        package=package,
        size=size,
        rate=rate,
        loaders=loaders,
        is_remade=is_remade,
        base_size=base_size,
        base_rate=None if rate is None else _checked_rate(rate),
    )


def _loader_keyword(name: str, module: Any, datamodule: Any | None) -> Attribute | None:
    """A size among the keywords that a model or its data keep for their loaders."""
    owners = [owner for owner in (datamodule, module) if owner is not None]
    places = [
        _Place(holder=kept, key=name)
        for owner in owners
        for key, kept in vars(owner).items()
        if isinstance(kept, MutableMapping) and not key.startswith("_") and isinstance(kept.get(name), int)
    ]
    _check_unique(name, places)
    return Attribute(name=name, places=tuple(places), logged=()) if places else None


def _made_by(source: Any, package: str) -> Any:
    """The loaders that a model or its data make, which is done once more for the fit, from the same random states."""
    states = RandomStates.now()
    try:
        return import_from(package, "trainer.connectors.data_connector")._request_dataloader(source)
    finally:
        states.restore()


def _names(module: Any, trainer: Any) -> str:
    names = [type(owner).__name__ for owner in (module, trainer.datamodule) if owner is not None]
    return " and ".join(names)


def _check_initialized(module: Any) -> None:
    lazy = next((name for name, value in module.named_parameters() if is_lazy(value)), None)
    if lazy is not None:
        raise TuningError(
            f"the parameter `{lazy}` is not initialized, and the first step of a trial would do that: run one forward"
            f" in {type(module).__name__}.setup() or configure_model()"
        )


def _checked_size(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TuningError(f"`{name}` is {value!r}, a {type(value).__name__}: a batch size is an int, such as 32")
    if value < 1:
        raise TuningError(f"`{name}` is {value!r}: a batch size is an int of at least 1, such as 32")
    return value


def _checked_rate(rate: Attribute) -> float:
    value = rate.get()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TuningError(
            f"`{rate.name}` is {value!r}, a {type(value).__name__}: a learning rate is a number, such as 0.1; set"
            " lr_arg_name=None to scale the optimizer's groups as they are"
        )
    if not (math.isfinite(value) and value >= 0):
        raise TuningError(f"`{rate.name}` is {value!r}: a learning rate is finite and not negative, such as 0.1")
    return float(value)


def _size_of_loaders(loaders: Any, package: str) -> int:
    found = loaders_in(loaders)
    if not found:
        raise TuningError(
            f"the batch size of a {type(loaders).__name__} cannot be changed: pass a torch DataLoader to fit(), or"
            " build the loader in train_dataloader() from an attribute"
        )
    sizes = sizes_of(found)
    if len(set(sizes)) > 1:
        raise TuningError(f"the dataloaders have different batch sizes ({sizes}): tune one of them at a time")
    if not isinstance(sizes[0], int):
        resized(found[0], 1, package)  # raises, and says why
        raise TuningError("the dataloader has no batch_size: its data set or batch sampler makes the batches")
    size: int = sizes[0]
    resized(found[0], size, package)  # so that a loader that cannot be made again is an error now
    return size


_MARK = "_efficient_batch_size_rate"
"""Attribute of a model: the rate that a tuning has set, and the effective batch that it belongs to."""


def mark_rate(module: Any, result: TuningResult) -> None:
    """Note on a model what its rate is for, so that no other finder scales it once more."""
    setattr(module, _MARK, (result.lr, result.effective_batch_size))


def batch_of_rate(module: Any, targets: Targets) -> int | None:
    """The effective batch that a model's rate is for, where a tuning has set it; None where the user has."""
    rate, batch = getattr(module, _MARK, (None, None))
    return batch if rate is not None and rate == targets.base_rate else None


def rate_to_set(module: Any, targets: Targets, result: TuningResult) -> float | None:
    """The rate for another fit of a model that was tuned; None where the user has set one since."""
    if targets.rate is None or targets.base_rate == result.lr:
        return result.lr
    is_untouched = targets.base_rate == result.configured_lr and find_attribute(targets.rate.name, module, None) is None
    return result.lr if is_untouched else None


def warn_of_other_batch(trainer: Any, package: str, result: TuningResult) -> None:
    """Warn where a result is carried over to a run whose effective batch is another one."""
    effective = result.batch_size * trainer.world_size * accumulation_of(trainer)
    if effective != result.effective_batch_size:
        rank_zero(
            package,
            "warn",
            f"the batch size {result.batch_size} was tuned for an effective batch of {result.effective_batch_size},"
            f" which is now {effective} (other ranks or accumulation): the learning rate is not scaled again",
        )
