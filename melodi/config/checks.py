"""One door for values, from the command line, from Python or from a file: their types and bounds.

A config says of each field which type it has; `check_types` holds it to that, so that what a JSON
file or a caller got wrong is refused here, by name, and not by a traceback hours later.
"""

import dataclasses
import math
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from melodi.config.dialects import check_keys

Config = TypeVar("Config")


def check_types(config: Any) -> None:
    """Every field has the type that its class declares; numbers are finite."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not _fits(value, field.type):
            raise ValueError(f"{field.name}={value!r} {_complaint(field.type)}")


def check_least(config: Any, **least: float) -> None:
    """The fields are at least so large; None, where it is allowed, is left alone."""
    for name, bound in least.items():
        value = getattr(config, name)
        if value is not None and value < bound:
            raise ValueError(f"{name}={value} must be at least {bound}")


def from_dict(cls: type[Config], values: Any) -> Config:
    """The config of a JSON object: no unknown field, and none missing that has no default."""
    if not isinstance(values, dict):
        raise ValueError(f"{cls.__name__} must be an object with fields, not {values!r}")
    check_keys(cls, values)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        needed = field.default is field.default_factory is dataclasses.MISSING
        if needed and field.name not in values:
            raise ValueError(f"{cls.__name__} lacks the field {field.name!r}: add it")
    return cls(**values)


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if kinds[-1] is ...:  # what is in it has checks of its own
            return isinstance(value, tuple)
        sized = isinstance(value, tuple) and len(value) == len(kinds)
        return sized and all(map(_fits, value, kinds))
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    # A bool is an int to Python, and no number to us.
    return type(value) is int if kind is int else isinstance(value, kind)


def _complaint(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"is unknown: choose one of {', '.join(get_args(kind))}"
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        return "must be a tuple" if kinds[-1] is ... else f"must be {len(kinds)} finite numbers"
    kinds = get_args(kind) or (kind,)
    words = {int: "a whole number", float: "a finite number", bool: "true or false"}
    return "must be " + " or ".join(words.get(one, _name(one)) for one in kinds)


def _name(kind: Any) -> str:
    return "null" if kind is type(None) else f"a {kind.__name__}"
