"""The `if` of a search space: `model.mode == 'finetune' and train.batch_size < 64`.

A condition may name config fields, of the space or of the job. Beside them it may have constants,
lists of constants, comparisons, and, or, not. Python's `ast` reads it and nothing executes it:
anything else is refused when the space is read, so a YAML from elsewhere cannot call anything.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from raypipe.errors import ConfigError

ValueOf = Callable[[str], Any]  # a dotted field -> its value in a trial

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, members: value in members,
    ast.NotIn: lambda value, members: value not in members,
}
_EQUALITY = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
_OTHERS = (  # what a condition may contain beside fields and the comparisons above
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
_RULE = (
    "Fields are compared with constants by ==, !=, <, <=, >, >=, in, not in,"
    " and joined by and, or, not"
)


@dataclass(frozen=True)
class Condition:
    """When a branch of a field is drawn."""

    owner: str
    """The field, for messages."""

    text: str

    tree: ast.expr

    @classmethod
    def read(cls, owner: str, text: str) -> Condition:
        """Raises ConfigError if `text` is not a condition."""
        try:
            # Walk the whole tree once, so that a forbidden node is found now.
            tree = ast.parse(text.strip(), mode="eval").body
            list(_fields(tree))
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
        """The fields that it names, each once."""
        return tuple(dict.fromkeys(_fields(self.tree)))

    @property
    def equated(self) -> Iterator[tuple[str, Any]]:
        """(field, constant) of every comparison by ==, !=, in or not in; one pair per member."""
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], _EQUALITY):
                continue
            left, right = node.left, node.comparators[0]
            # The constant may stand on either side.
            for field, constant in ((left, right), (right, left)):
                name = _dotted(field)
                if name and isinstance(constant, (ast.Constant, ast.Tuple, ast.List)):
                    for value in _members(constant):
                        yield name, value

    def holds(self, value_of: ValueOf) -> bool:
        """Is it true in a trial? Raises ConfigError if it compares None or a word by <."""
        try:
            return _truth(self.tree, value_of)
        except TypeError:
            shown = {name: value_of(name) for name in self.names}
            raise ConfigError(
                f"search.space.{self.owner} has a condition that compares what cannot be compared",
                got=shown,
                rule=self.text,
            ) from None


def _fields(node: ast.AST) -> Iterator[str]:
    """The fields below a node. Raises ValueError for a node that no condition may contain."""
    name = _dotted(node)
    if name:
        yield name
        return
    if not isinstance(node, _OTHERS) and type(node) not in _COMPARE:
        raise ValueError(type(node).__name__)
    for below in ast.iter_child_nodes(node):
        yield from _fields(below)


def _dotted(node: ast.AST) -> str:
    """The field that a node names, such as model.mode; "" for any other node."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def _members(constant: ast.expr) -> tuple[Any, ...]:
    """The values of a list, or the one value of a constant. A field in a list counts as None."""
    value = _value(constant, lambda name: None)
    return value if isinstance(value, tuple) else (value,)


def _value(node: ast.expr, value_of: ValueOf) -> Any:
    """What an operand of a comparison is in a trial."""
    name = _dotted(node)
    if name:
        return value_of(name)
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(_value(item, value_of) for item in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, value_of)
    return _truth(node, value_of)


def _truth(node: ast.expr, value_of: ValueOf) -> bool:
    """Is a condition, or a part of one, true in a trial?"""
    if isinstance(node, ast.BoolOp):
        parts = (_truth(part, value_of) for part in node.values)
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _truth(node.operand, value_of)
    if isinstance(node, ast.Compare):
        operands = [_value(part, value_of) for part in (node.left, *node.comparators)]
        # 1 < a < 3 compares neighbours.
        for comparison, (left, right) in zip(node.ops, pairwise(operands), strict=True):
            if not _COMPARE[type(comparison)](left, right):
                return False
        return True
    return bool(_value(node, value_of))
