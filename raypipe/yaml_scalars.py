"""YAML scalars that keep their characters until the config's types decide what they are.

YAML turns `version: 2026-11-01` into a date, `flag: yes` into a boolean, `site: 01` into 1 and
`batch: 12:30` into 750. A field that holds text needs the characters. So `read` keeps both, and
`resolve` picks one by the type of the field: text if the field allows text and not the other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from yaml.constructor import ConstructorError

NUMBERS = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:bool"


@dataclass(frozen=True)
class Scalar:
    """A value that YAML reads as a number or a boolean, and its characters in the file."""

    value: Any
    text: str


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse a key that stands twice: YAML would take the last one in silence.

        Here, before `<<` adds the keys of another mapping, which may be set again.
        """
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                problem = f"the key {key.value!r} stands in line {lines[key.value]} and again"
                raise ConstructorError(None, None, problem, key.start_mark)
            lines[key.value] = line
        return node


def _number_or_boolean(loader: _Loader, node: yaml.ScalarNode) -> Scalar | str:
    """A Scalar of the value that YAML 1.1 reads, but for two forms that people mean otherwise."""
    text = str(node.value)
    # YAML 1.1 reads 12:30 as a number of base 60.
    if ":" in text:
        return text
    # YAML 1.1 reads 010 as octal; people mean ten.
    if re.fullmatch(r"[-+]?0[0-9_]+", text):
        return Scalar(int(text.replace("_", "")), text)
    try:
        return Scalar(yaml.SafeLoader.yaml_constructors[node.tag](loader, node), text)
    except (ValueError, KeyError):
        # For example `!!int x`.
        kind = node.tag.rpartition(":")[2]
        raise ConstructorError(None, None, f"{text!r} is no {kind}", node.start_mark) from None


def _date(loader: _Loader, node: yaml.ScalarNode) -> str:
    return str(node.value)


for _tag in NUMBERS:
    _Loader.add_constructor(_tag, _number_or_boolean)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _date)


def read(text: str) -> Any:
    """YAML with numbers and booleans as `Scalar`. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)


def ignored(text: str) -> str:
    """What stands behind the value in `text`, as a comment does; "" if nothing does."""
    node = yaml.compose(text, Loader=_Loader)
    return text[node.end_mark.index if node is not None else 0 :].strip()


def quoted(text: str) -> str:
    """A text as YAML on one line; `read` gives back the same text.

    JSON would do but for letters beyond 16 bits: it writes them as two escapes, which YAML takes
    for two letters.
    """
    return str(yaml.safe_dump(text, default_style='"', width=float("inf"))).rstrip("\n")


def resolve(annotation: Any, node: Any) -> Any:
    """`node` with every `Scalar` replaced by its value or its text, as `annotation` asks."""
    kinds = _options(annotation)
    if isinstance(node, Scalar):
        return node.text if _wants_text(kinds, node.value) else node.value
    if isinstance(node, dict):
        resolved = {}
        for key, below in node.items():
            resolved[_key(kinds, key)] = resolve(_value_annotation(kinds, key), below)
        return resolved
    if isinstance(node, list):
        return [resolve(_item_annotation(kinds, i), item) for i, item in enumerate(node)]
    return node


def dotted(annotation: Any, place: Sequence[str | int]) -> str:
    """A place of a pydantic error as the name of a setting: ("train", "lr", "float") is train.lr.

    pydantic names the member of a union that a value did not fit.
    """
    names, kinds = [], _options(annotation)
    rest = list(place)
    while rest:
        part = rest.pop(0)
        names.append(str(part))
        if isinstance(part, int):
            kinds = _options(_item_annotation(kinds, part))
        else:
            kinds = _options(_value_annotation(kinds, part))
        if len(kinds) > 1 and rest:
            rest.pop(0)
    return ".".join(names)


def _options(annotation: Any) -> list[Any]:
    """The types that an annotation allows: `Annotated[int | str | None, …]` -> int, str."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _options(get_args(annotation)[0])
    if origin in (Union, UnionType):
        options: list[Any] = []
        for member in get_args(annotation):
            options += _options(member)
        return options
    return [] if annotation in (None, NoneType) else [annotation]


def _wants_text(kinds: list[Any], value: Any) -> bool:
    """Should a field of these types get the characters instead of the value?"""
    if Any in kinds or not kinds:
        return False
    # The value, if a type or a literal accepts it.
    accepting = {bool: (bool,), int: (int, float), float: (float,)}[type(value)]
    if any(kind in accepting for kind in kinds):
        return False
    literals = _literals(kinds)
    if any(literal is value or literal == value for literal in literals):
        return False
    # The text of a boolean in any case: pydantic would take `seed: yes` for 1. Given the
    # characters, it names the type that the field needs.
    if value is True or value is False:
        return True
    return str in kinds or any(isinstance(literal, str) for literal in literals)


def _literals(kinds: list[Any]) -> list[Any]:
    """The values of all `Literal` types."""
    values: list[Any] = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            values += get_args(kind)
    return values


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _key(kinds: list[Any], key: Any) -> Any:
    """A mapping's key: text in a section, else by the type of the dict's keys."""
    if not isinstance(key, Scalar):
        return key
    if any(_is_model(kind) for kind in kinds):
        return key.text
    for kind in kinds:
        if get_origin(kind) is dict:
            return resolve(get_args(kind)[0], key)
    return key.value


def _value_annotation(kinds: list[Any], key: Any) -> Any:
    """The annotation of the value below `key` in a section or dict; Any if unknown."""
    name = key.text if isinstance(key, Scalar) else key
    for kind in kinds:
        if _is_model(kind):
            for attribute, field in kind.model_fields.items():
                if name in (attribute, field.alias):
                    return field.annotation
        elif get_origin(kind) is dict:
            return get_args(kind)[1]
    return Any


def _item_annotation(kinds: list[Any], i: int) -> Any:
    """The annotation of item `i` of a list, set or tuple; Any if unknown."""
    for kind in kinds:
        members = get_args(kind)
        if not members:
            continue
        if get_origin(kind) in (list, set, frozenset):
            return members[0]
        if get_origin(kind) is tuple:
            if members[-1] is Ellipsis:
                return members[0]
            return members[min(i, len(members) - 1)]
    return Any
