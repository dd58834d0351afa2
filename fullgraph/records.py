"""What a person gives to a record's fields: the names there are, and values of the declared types.

A command line parses both. From Python anything can be given, so frozen records look here when they are made.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import numbers
import os
from collections.abc import Iterable
from types import NoneType
from typing import Any, get_args, get_type_hints

import numpy as np

_EXPECTED = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}


def flag(name: str) -> str:
    """What a field is called on the command line."""
    return "--" + name.replace("_", "-")


def check_types(record: Any) -> None:
    """Bring the fields that are declared bool, int, float or str, or one of these or None, to just that type.

    numpy's numbers become Python's and paths text. Raises ``ValueError`` naming the flag and the value for any other.
    Fields of other declared types are left alone.
    """
    for name, (kind, optional) in _plain_fields(record.__class__).items():
        value = getattr(record, name)
        if type(value) is kind or (value is None and optional):
            continue
        if kind is bool and isinstance(value, np.bool_):
            found: Any = bool(value)
        elif kind is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
            found = int(value)
        elif kind is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
            found = float(value)
        elif kind is str and isinstance(value, (str, os.PathLike)):
            found = str(os.fspath(value))
        else:
            none = " or None" if optional else ""
            raise ValueError(f"{flag(name)} is {value!r}; expected {_EXPECTED[kind]}{none}")
        object.__setattr__(record, name, found)


@functools.cache
def _plain_fields(kind: type[Any]) -> dict[str, tuple[type, bool]]:
    """Fields of one plain type, and whether they may be None."""
    found = {}
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        options = set(get_args(hints[field.name])) or {hints[field.name]}
        plain = options - {NoneType}
        if len(plain) == 1 and (only := plain.pop()) in _EXPECTED:
            found[field.name] = (only, NoneType in options)
    return found


def check_names(call: str, given: Iterable[str], record: type) -> None:
    """Raise ``TypeError`` for the first keyword of ``call`` that is no field of ``record``."""
    there = [field.name for field in dataclasses.fields(record)]
    for name in given:
        if name not in there:
            near = difflib.get_close_matches(name, there, 1)
            meant = f"did you mean {near[0]}?" if near else f"expected some of {', '.join(there)}"
            raise TypeError(f"{call}() has no option {name}; {meant}")
