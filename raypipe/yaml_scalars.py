"""YAML as it was written: whether `12`, `yes` or `2026-11-01` is text depends on who reads it.

YAML turns `version: 2026-11-01` into a date, `flag: yes` into a boolean, `site: 01` into 1 and
`batch: 12:30` into 750. A field that holds text wants the characters. So plain scalars keep both,
and the types of the configuration decide: text where a field admits text and not the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from yaml.constructor import ConstructorError

NUMBERS = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:bool"


@dataclass(frozen=True)
class Written:
    """A scalar that YAML takes for a number, a boolean or a date, and its characters."""

    value: Any
    text: str


class _Loader(yaml.SafeLoader):
    pass


def _number(loader: _Loader, node: yaml.ScalarNode) -> Any:
    text = str(node.value)
    if ":" in text:  # 12:30 is no number of base 60
        return text
    if re.fullmatch(r"[-+]?0[0-9_]+", text):  # 010 is ten to everybody but YAML 1.1
        return Written(int(text.replace("_", "")), text)
    try:
        return Written(yaml.SafeLoader.yaml_constructors[node.tag](loader, node), text)
    except (ValueError, KeyError):  # !!int x
        kind = node.tag.rpartition(":")[2]
        raise ConstructorError(None, None, f"{text!r} is no {kind}", node.start_mark) from None


def _date(loader: _Loader, node: yaml.ScalarNode) -> str:
    return str(node.value)


for _tag in NUMBERS:
    _Loader.add_constructor(_tag, _number)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _date)


def read(text: str) -> Any:
    """YAML whose plain scalars are `Written`. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)


def settle(kind: Any, node: Any) -> Any:
    """`node` with every `Written` decided by the type annotation `kind` that it is read for."""
    kinds = _options(kind)
    if isinstance(node, Written):
        return node.text if _wants_text(kinds, node.value) else node.value
    if isinstance(node, dict):
        return {_key(kinds, k): settle(_below(kinds, k), v) for k, v in node.items()}
    if isinstance(node, list):
        return [settle(_item(kinds, at), below) for at, below in enumerate(node)]
    return node


def _options(kind: Any) -> list[Any]:
    """`Annotated[int | str | None, …]` -> int, str."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _options(get_args(kind)[0])
    if origin in (Union, UnionType):
        return [o for k in get_args(kind) for o in _options(k)]
    return [] if kind in (None, NoneType) else [kind]


def _wants_text(kinds: list[Any], value: Any) -> bool:
    if Any in kinds or not kinds:
        return False
    fitting = {bool: (bool,), int: (int, float), float: (float,)}[type(value)]
    literals = [a for k in kinds if get_origin(k) is Literal for a in get_args(k)]
    if any(k in fitting for k in kinds) or any(a is value or a == value for a in literals):
        return False
    # pydantic would take `seed: yes` for 1; the characters make it say what it wants
    return (
        value is True or value is False or str in kinds or any(isinstance(a, str) for a in literals)
    )


def _key(kinds: list[Any], key: Any) -> Any:
    """A key as its mapping wants it; a section's keys are names."""
    if not isinstance(key, Written):
        return key
    if any(isinstance(k, type) and issubclass(k, BaseModel) for k in kinds):
        return key.text
    held = [get_args(k)[0] for k in kinds if get_origin(k) is dict]
    return settle(held[0], key) if held else key.value


def _below(kinds: list[Any], key: Any) -> Any:
    name = key.text if isinstance(key, Written) else key
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            for attribute, field in kind.model_fields.items():
                if name in (attribute, field.alias):
                    return field.annotation
        elif get_origin(kind) is dict:
            return get_args(kind)[1]
    return Any


def _item(kinds: list[Any], at: int) -> Any:
    for kind in kinds:
        inside = get_args(kind)
        if get_origin(kind) in (list, set, frozenset) and inside:
            return inside[0]
        if get_origin(kind) is tuple and inside:
            return inside[0] if inside[-1] is Ellipsis else inside[min(at, len(inside) - 1)]
    return Any
