"""The `if` of a search space: `model.mode == 'finetune' and train.batch_size < 64`, read with ast and never executed.

Names are config fields, of the space or of the job; beside them there are constants, lists of them, comparisons, and, or, not.
Anything else is refused when the space is read, so a YAML from elsewhere cannot call anything.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from raypipe.errors import ConfigError

ValueOf = Callable[[str], Any]  # a field's dotted name -> what it is in this trial

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, among: value in among,
    ast.NotIn: lambda value, among: value not in among,
}
_RULE = "Fields are compared with constants by ==, !=, <, <=, >, >=, in, not in, and joined by and, or, not"


@dataclass(frozen=True)
class Condition:
    """What a field's draw depends on. `owner` is the field, for messages."""

    owner: str
    text: str
    tree: ast.expr

    @classmethod
    def read(cls, owner: str, text: str) -> Condition:
        """Raises ConfigError for what is no condition."""
        try:
            tree = ast.parse(text.strip(), mode="eval").body
            list(_names(tree))
        except (SyntaxError, ValueError):
            raise ConfigError(
                f"search.space.{owner} has a condition that cannot be read",
                got=text.strip(),
                rule=_RULE,
                fix="Quote words, as in model.mode == 'finetune'",
            ) from None
        return cls(owner, text.strip(), tree)

    @property
    def names(self) -> tuple[str, ...]:
        """The fields it asks for, each once."""
        return tuple(dict.fromkeys(_names(self.tree)))

    @property
    def equated(self) -> Iterator[tuple[str, Any]]:
        """(field, constant) of every comparison that asks whether a field is some value."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Compare) and isinstance(
                node.ops[0], (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
            ):
                sides = [(_dotted(side), side) for side in (node.left, node.comparators[0])]
                for (name, _), (_, constant) in (sides, sides[::-1]):
                    if name and isinstance(constant, (ast.Constant, ast.Tuple, ast.List)):
                        found = _value(constant, lambda name: None)
                        yield from (
                            (name, value)
                            for value in (found if isinstance(found, tuple) else (found,))
                        )

    def holds(self, value_of: ValueOf) -> bool:
        try:
            return _holds(self.tree, value_of)
        except TypeError:  # None < 64
            shown = {name: value_of(name) for name in self.names}
            raise ConfigError(
                f"search.space.{self.owner} has a condition that compares what cannot be compared",
                got=shown,
                rule=self.text,
            ) from None


def _names(node: ast.AST) -> Iterator[str]:
    """The fields below a node. Raises ValueError for a node that no condition may hold."""
    if name := _dotted(node):
        yield name
        return
    known = (
        ast.BoolOp,
        ast.boolop,
        ast.UnaryOp,
        ast.Not,
        ast.USub,
        ast.Compare,
        ast.Constant,
        ast.Tuple,
        ast.List,
        ast.Load,
    )
    if not isinstance(node, known) and type(node) not in _COMPARE:
        raise ValueError(type(node).__name__)
    for below in ast.iter_child_nodes(node):
        yield from _names(below)


def _dotted(node: ast.AST) -> str:
    """`model.mode` of an attribute of a name; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    owner = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{owner}.{node.attr}" if owner and isinstance(node, ast.Attribute) else ""


def _value(node: ast.expr, value_of: ValueOf) -> Any:
    if name := _dotted(node):
        return value_of(name)
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(_value(item, value_of) for item in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, value_of)
    return node.value if isinstance(node, ast.Constant) else _holds(node, value_of)


def _holds(node: ast.expr, value_of: ValueOf) -> bool:
    if isinstance(node, ast.BoolOp):
        return (all if isinstance(node.op, ast.And) else any)(
            _holds(part, value_of) for part in node.values
        )
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _holds(node.operand, value_of)
    if isinstance(node, ast.Compare):
        values = [_value(part, value_of) for part in (node.left, *node.comparators)]
        return all(
            _COMPARE[type(op)](a, b) for op, a, b in zip(node.ops, values, values[1:], strict=False)
        )
    return bool(_value(node, value_of))
