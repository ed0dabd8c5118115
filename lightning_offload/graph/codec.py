"""JSON for frozen dataclasses: a header with a schema version, rows as lists, everything checked on loading.

Protocol: ``encode(obj)`` writes one dataclass as a JSON object; ``encode_rows(rows)`` writes many of one class
as lists in field order, which keeps a graph of 10^4 ops readable in a few MB. ``decode`` and ``decode_rows``
check the type of every field and raise :class:`~lightning_offload.errors.PlanError` naming the field; they
build plain data and never execute anything.

A field that was added after files had been written carries :data:`ADDED` as its metadata, stands after all that
were there before, and may be missing: it then has its default. No other field may.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from lightning_offload.errors import PlanError

_LIMIT = 1 << 63  # of whole numbers
SCHEMA_VERSION = 1

ADDED: Final[Mapping[str, bool]] = types.MappingProxyType({"added": True})
"""Metadata of a dataclass field that older files do not have."""

T = TypeVar("T")


_TYPES: dict[type[Any], dict[str, Any]] = {}


def _field_types(cls: type[Any]) -> dict[str, Any]:
    """Types of a dataclass's fields, in order."""
    if cls not in _TYPES:
        hints = typing.get_type_hints(cls)
        _TYPES[cls] = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    return _TYPES[cls]


def _added_fields(cls: type[Any]) -> set[str]:
    """Names of the fields that a file may leave out."""
    return {field.name for field in dataclasses.fields(cls) if "added" in field.metadata}


def encode(obj: Any) -> dict[str, Any]:
    """Write one frozen dataclass as a JSON object of its fields."""
    return {name: getattr(obj, name) for name in _field_types(type(obj))}


def encode_rows(rows: tuple[Any, ...]) -> list[list[Any]]:
    """Write dataclasses of one class as lists in field order."""
    return [[getattr(row, name) for name in _field_types(type(row))] for row in rows]


def decode(cls: type[T], data: Any, *, where: str) -> T:
    """Read one dataclass from a JSON object.

    Raises:
        PlanError: A field is missing (and not one that was added later), unknown or of the wrong type.
    """
    if not isinstance(data, dict):
        raise PlanError(f"{where}: expected an object, got {type(data).__name__}")
    fields = _field_types(cls)
    unknown = set(data) - set(fields)
    missing = set(fields) - set(data) - _added_fields(cls)
    if unknown or missing:
        raise PlanError(f"{where}: unknown fields {sorted(unknown)}, missing fields {sorted(missing)}")
    return cls(**{name: _check(fields[name], data[name], f"{where}.{name}") for name in fields if name in data})


def decode_rows(cls: type[T], rows: Any, *, where: str) -> tuple[T, ...]:
    """Read dataclasses of one class from lists in field order.

    Raises:
        PlanError: A row has the wrong length, or a field the wrong type.
    """
    if not isinstance(rows, list):
        raise PlanError(f"{where}: expected a list of rows, got {type(rows).__name__}")
    fields = _field_types(cls)
    least = len(fields) - len(_added_fields(cls))
    return tuple(_decode_row(cls, fields, least, row, f"{where}[{i}]") for i, row in enumerate(rows))


def _decode_row(cls: type[T], fields: dict[str, Any], least: int, row: Any, where: str) -> T:
    if not isinstance(row, list) or not least <= len(row) <= len(fields):
        raise PlanError(f"{where}: expected {len(fields)} fields {list(fields)}, got {row!r:.80}")
    pairs = zip(fields.items(), row, strict=False)  # what was added later stands at the end
    return cls(**{name: _check(kind, item, f"{where}.{name}") for (name, kind), item in pairs})


def _check(kind: Any, item: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin is tuple:
        if not isinstance(item, (list, tuple)):
            raise PlanError(f"{where}: expected a list, got {item!r:.60}")
        inner = typing.get_args(kind)[0]
        return tuple(_check(inner, part, f"{where}[{i}]") for i, part in enumerate(item))
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(kind)
        if item is None and type(None) in options:
            return None
        return _check(next(option for option in options if option is not type(None)), item, where)
    if origin is typing.Literal:
        if item not in typing.get_args(kind):
            raise PlanError(f"{where}: {item!r:.60} is none of {list(typing.get_args(kind))}")
        return item
    if kind is float and isinstance(item, int) and abs(item) < 1 << 53 and not isinstance(item, bool):
        return float(item)
    if kind is int and type(item) is int and not -_LIMIT <= item < _LIMIT:
        raise PlanError(f"{where}: {item!r:.60} is beyond 63 bits")
    if type(item) is not kind or (kind is float and not math.isfinite(item)):
        raise PlanError(f"{where}: expected {kind.__name__}, got {item!r:.60}")
    return item


def dumps(kind: str, payload: dict[str, Any]) -> str:
    """Write a payload with its header (what it is, and the schema version)."""
    return json.dumps({"lightning_offload": kind, "schema": SCHEMA_VERSION, **payload}, separators=(",", ":"))


def loads(kind: str, text: str) -> dict[str, Any]:
    """Read a payload written by :func:`dumps`.

    Raises:
        PlanError: The text is no JSON, holds something else, or has another schema version.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"not a {kind} file: invalid JSON ({error})") from None
    if not isinstance(data, dict) or data.get("lightning_offload") != kind:
        raise PlanError(f'not a {kind} file: expected a JSON object with "lightning_offload": "{kind}"')
    if data.get("schema") != SCHEMA_VERSION:
        raise PlanError(
            f"the {kind} file has schema {data.get('schema')!r}, this version reads schema {SCHEMA_VERSION}; "
            "record the step again with this version"
        )
    return {key: item for key, item in data.items() if key not in ("lightning_offload", "schema")}
