"""Terraform's files as python-hcl2 reads them, in a form that can be walked.

python-hcl2 hands out a parse tree. `parse` makes a Body of it: arguments and blocks, with
expressions as a few small classes that keep the word and the line of every name. What it does not
understand raises Unreadable; nothing is left out silently.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hcl2.api import parses_to_tree
from lark import Token, Tree
from lark.exceptions import LarkError


class Unreadable(Exception):
    """This text is no HCL, or uses a part of it that the checker does not know."""


@dataclass(frozen=True)
class Name:
    """The first word of a reference: `var`, `each`, a resource's type, a `for` variable."""

    word: str
    line: int
    at: int


@dataclass(frozen=True)
class Get:
    base: Any
    word: str
    line: int
    at: int


@dataclass(frozen=True)
class Index:
    base: Any
    key: Any


@dataclass(frozen=True)
class Splat:
    """`base[*].a.b`: `each` is the rest of the reference, on an Element."""

    base: Any
    rest: Any


@dataclass(frozen=True)
class Element:
    """What a splat goes over."""


@dataclass(frozen=True)
class Call:
    word: str
    arguments: tuple[Any, ...]
    line: int
    at: int


@dataclass(frozen=True)
class For:
    variables: tuple[str, ...]
    over: Any
    key: Any  # None: a list
    value: Any
    condition: Any
    grouped: bool


@dataclass(frozen=True)
class Object:
    """`items`: (key, value, line, at). A plain word as key is a Literal."""

    items: tuple[tuple[Any, Any, int, int], ...]


@dataclass(frozen=True)
class Tuple:
    items: tuple[Any, ...]


@dataclass(frozen=True)
class Literal:
    """A number, string without parts, true, false or null."""

    value: Any


@dataclass(frozen=True)
class Text:
    """A string with expressions inside."""

    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Choice:
    condition: Any
    yes: Any
    no: Any


@dataclass(frozen=True)
class Operation:
    operands: tuple[Any, ...]
    logical: bool


@dataclass(frozen=True)
class Argument:
    name: str
    value: Any
    line: int
    at: int


@dataclass(frozen=True)
class Block:
    type: str
    labels: tuple[str, ...]
    body: Body
    line: int
    at: int
    labels_at: tuple[int, ...]


@dataclass(frozen=True)
class Body:
    arguments: tuple[Argument, ...]
    blocks: tuple[Block, ...]

    def get(self, name: str) -> Any:
        """The expression of an argument, None without it."""
        return next((found.value for found in self.arguments if found.name == name), None)

    def all(self, type_: str) -> list[Block]:
        return [found for found in self.blocks if found.type == type_]


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Body:
    try:
        tree = parses_to_tree(text)
    except LarkError as error:
        raise Unreadable(str(error).strip().splitlines()[0]) from error
    return _body(tree.children[0])


def _tokens(node: Any) -> Iterator[Token]:
    if isinstance(node, Token):
        yield node
    else:
        for child in node.children:
            yield from _tokens(child)


def _first(node: Any) -> Token:
    return next(_tokens(node))


def _kids(tree: Tree, *without: str) -> list[Any]:
    """A rule's children, without comments and punctuation."""
    return [
        child
        for child in tree.children
        if not (isinstance(child, Tree) and child.data == "new_line_or_comment")
        and not (isinstance(child, Token) and child.type in without)
    ]


def _word(tree: Any) -> tuple[str, int, int]:
    token = _first(tree)
    return str(token), token.line or 0, token.start_pos or 0


def _body(tree: Tree) -> Body:
    arguments, blocks = [], []
    for child in _kids(tree):
        if child.data == "attribute":
            name, _, value = child.children
            word, line, at = _word(name)
            arguments.append(Argument(word, expression(value), line, at))
        elif child.data == "block":
            *heads, body = _kids(child, "LBRACE", "RBRACE")
            word, line, at = _word(heads[0])
            labels = tuple("".join(_tokens(label)).strip('"') for label in heads[1:])
            places = tuple(
                _word(label)[2] + (label.data == "string" if isinstance(label, Tree) else 0)
                for label in heads[1:]
            )
            blocks.append(Block(word, labels, _body(body), line, at, places))
        else:
            raise Unreadable(f"line {_word(child)[1]}: {child.data} is not known here")
    return Body(tuple(arguments), tuple(blocks))


def expression(node: Any) -> Any:
    """One of the classes above."""
    if isinstance(node, Token):
        raise Unreadable(f"line {node.line}: {node!s} stands where an expression should")
    kids = _kids(node)
    kind = node.data
    if kind == "expr_term":
        inner = _kids(node, "LPAR", "RPAR")
        if len(inner) != 1:
            raise Unreadable(f"line {_word(node)[1]}: a term of {len(inner)} parts")
        return expression(inner[0])
    if kind == "identifier":
        return Name(*_word(node))
    if kind in ("int_lit", "float_lit"):
        return Literal(float("".join(_tokens(node))))
    if kind == "literal_value":
        return Literal(json.loads(_word(node)[0]))
    if kind == "string":
        return _string(node)
    if kind in ("heredoc_template", "heredoc_template_trim"):
        return _heredoc(_first(node))
    if kind == "get_attr_expr_term":
        return Get(expression(kids[0]), *_word(kids[1].children[-1]))
    if kind == "index_expr_term":
        return Index(expression(kids[0]), _key(kids[1]))
    if kind in ("attr_splat_expr_term", "full_splat_expr_term"):
        rest: Any = Element()
        for step in _kids(kids[1])[1:]:
            if step.data == "get_attr":
                rest = Get(rest, *_word(step.children[-1]))
            else:
                rest = Index(rest, _key(step))
        return Splat(expression(kids[0]), rest)
    if kind == "function_call":
        names = [kid for kid in kids if isinstance(kid, Tree) and kid.data == "identifier"]
        found = [kid for kid in kids if isinstance(kid, Tree) and kid.data == "arguments"]
        given = _kids(found[0], "COMMA", "ELLIPSIS") if found else []
        _, line, at = _word(names[0])
        word = "::".join(_word(name)[0] for name in names)
        return Call(word, tuple(expression(one) for one in given), line, at)
    if kind in ("for_tuple_expr", "for_object_expr"):
        return _for(node)
    if kind == "tuple":
        return Tuple(tuple(expression(kid) for kid in _kids(node, "LSQB", "RSQB", "COMMA")))
    if kind == "object":
        return Object(tuple(_item(kid) for kid in _kids(node, "LBRACE", "RBRACE", "COMMA")))
    if kind == "conditional":
        condition, yes, no = (expression(kid) for kid in _kids(node, "QMARK", "COLON"))
        return Choice(condition, yes, no)
    if kind in ("binary_op", "unary_op"):
        operands, logical = [], False
        for kid in kids:
            if isinstance(kid, Token):
                logical |= str(kid) == "!"
            elif kid.data == "binary_term":
                operator, operand = _kids(kid)
                logical |= str(_first(operator)) not in "+-*/%"
                operands.append(expression(operand))
            else:
                operands.append(expression(kid))
        return Operation(tuple(operands), logical)
    raise Unreadable(f"line {_word(node)[1]}: {kind} is not known here")


def _key(step: Tree) -> Any:
    if step.data == "short_index":
        return Literal(float(str(step.children[-1])))
    return expression(_kids(step, "LSQB", "RSQB")[0])


def _item(tree: Tree) -> tuple[Any, Any, int, int]:
    key, _, value = _kids(tree)
    _, line, at = _word(key)
    inner = key.children[0]
    # A bare word is the key itself; (word) would be a reference.
    if isinstance(inner, Tree) and inner.data == "expr_term":
        plain = _kids(inner)
        if len(plain) == 1 and plain[0].data == "identifier":
            return Literal(_word(plain[0])[0]), expression(value), line, at
        if plain and isinstance(plain[0], Tree) and plain[0].data == "string":
            at += 1
        return expression(inner), expression(value), line, at
    return Literal(_word(key)[0]), expression(value), line, at


def _for(tree: Tree) -> For:
    parts = _kids(tree, "LSQB", "RSQB", "LBRACE", "RBRACE", "ELLIPSIS", "FOR_OBJECT_ARROW")
    intro = _kids(parts[0], "FOR", "IN", "COMMA", "COLON")
    *variables, over = intro
    condition = None
    if isinstance(parts[-1], Tree) and parts[-1].data == "for_cond":
        condition = expression(_kids(parts.pop(), "IF")[0])
    values = [expression(part) for part in parts[1:]]
    return For(
        tuple(_word(one)[0] for one in variables),
        expression(over),
        values[0] if len(values) == 2 else None,
        values[-1],
        condition,
        any(isinstance(kid, Token) and kid.type == "ELLIPSIS" for kid in tree.children),
    )


def _string(tree: Tree) -> Any:
    parts: list[Any] = []
    for part in tree.children:
        if isinstance(part, Token):
            continue  # the quotes
        inner = part.children[0]
        if isinstance(inner, Token):
            parts.append(Literal(_unescaped(str(inner))))
        elif inner.data == "interpolation":
            parts.append(expression(_kids(inner, "INTERP_START", "RBRACE")[0]))
        else:
            raise Unreadable(f"line {_word(inner)[1]}: %{{…}} inside a string is not checked")
    if all(isinstance(part, Literal) for part in parts):
        return Literal("".join(part.value for part in parts))
    return Text(tuple(parts))


def _unescaped(text: str) -> str:
    text = text.replace("$${", "${").replace("%%{", "%{")
    return text.replace('\\"', '"').replace("\\\\", "\\") if "\\" in text else text


def _heredoc(token: Token) -> Any:
    """Its text is one token to python-hcl2: cut the expressions out and read each."""
    lines = str(token).splitlines(keepends=True)
    begin = (token.start_pos or 0) + len(lines[0])
    text = "".join(lines[1:-1])
    parts: list[Any] = []
    place = 0
    while place < len(text):
        if text.startswith(("$${", "%%{"), place):
            place += 3
        elif text.startswith("%{", place):
            raise Unreadable(f"line {token.line}: %{{…}} inside a heredoc is not checked")
        elif text.startswith("${", place):
            end = _closing(text, place + 2, token.line or 0)
            inner = text[place + 2 : end].strip("~")
            line = (token.line or 0) + 1 + text.count("\n", 0, place)
            offset = begin + place + 2 + text[place + 2 : end].index(inner)
            parts.append(_moved(inner, line, offset))
            place = end + 1
        else:
            place += 1
    return Text(tuple(parts)) if parts else Literal(text)


def _closing(text: str, place: int, line: int) -> int:
    depth, quoted = 1, False
    while place < len(text):
        letter = text[place]
        if letter == "\\" and quoted:
            place += 1
        elif letter == '"':
            quoted = not quoted
        elif letter in "{}" and not quoted:
            depth += 1 if letter == "{" else -1
            if depth == 0:
                return place
        place += 1
    raise Unreadable(f"line {line}: a ${{ in a heredoc is never closed")


def _moved(text: str, line: int, at: int) -> Any:
    """The expression `text`, whose names stand at `line` and from position `at` on."""
    start = "x = ("
    try:
        tree = parses_to_tree(f"{start}{text})")
    except LarkError as error:
        raise Unreadable(f"line {line}: {str(error).strip().splitlines()[0]}") from error
    for token in _tokens(tree):
        token.line = line
        token.start_pos = (token.start_pos or 0) - len(start) + at
    (argument,) = _kids(tree.children[0])
    return expression(argument.children[2])


def children(node: Any) -> Iterator[Any]:
    """The expressions directly inside an expression."""
    if isinstance(node, Get):
        yield node.base
    elif isinstance(node, Index):
        yield from (node.base, node.key)
    elif isinstance(node, Splat):
        yield from (node.base, node.rest)
    elif isinstance(node, Call):
        yield from node.arguments
    elif isinstance(node, For):
        yield from filter(None, (node.over, node.key, node.value, node.condition))
    elif isinstance(node, Object):
        for key, value, *_ in node.items:
            yield from (key, value)
    elif isinstance(node, Tuple):
        yield from node.items
    elif isinstance(node, Text):
        yield from node.parts
    elif isinstance(node, Choice):
        yield from (node.condition, node.yes, node.no)
    elif isinstance(node, Operation):
        yield from node.operands


def walk(node: Any) -> Iterator[Any]:
    """An expression and all inside it."""
    yield node
    for child in children(node):
        yield from walk(child)


def expressions(body: Body) -> Iterator[Any]:
    """Every expression of a body and of the blocks inside it."""
    for argument in body.arguments:
        yield argument.value
    for block in body.blocks:
        yield from expressions(block.body)


def literal(node: Any) -> Any:
    """The Python value of an expression without references: str, float, bool, None, list or dict.

    Raises Unreadable where it has references.
    """
    if isinstance(node, Literal):
        return node.value
    if isinstance(node, Tuple):
        return [literal(item) for item in node.items]
    if isinstance(node, Object):
        return {literal(key): literal(value) for key, value, *_ in node.items}
    raise Unreadable("a plain value is needed here")


@dataclass
class Files:
    """All text files below a folder: {path relative to it: text}."""

    root: Path
    texts: dict[str, str]
    data: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path) -> Files:
        found = {}
        for path in sorted(root.rglob("*")):
            if path.is_file() and ".terraform" not in path.relative_to(root).parts:
                found[path.relative_to(root).as_posix()] = path.read_text("utf-8")
        return cls(
            root,
            {name: text for name, text in found.items() if name.endswith((".tf", ".tf.json"))},
            {name: text for name, text in found.items() if not name.endswith((".tf", ".tf.json"))},
        )

    def having(self, name: str, text: str) -> Files:
        """The same tree with another text in one file."""
        if name in self.data:
            return Files(self.root, self.texts, {**self.data, name: text})
        return Files(self.root, {**self.texts, name: text}, self.data)


def used_words(tree: Files) -> set[str]:
    """Types of nested blocks, and all words of references."""
    found: set[str] = set()

    def add(body: Body) -> None:
        for block in body.blocks:
            found.update([block.type, *(block.labels if block.type == "dynamic" else ())])
            add(block.body)

    for text in tree.texts.values():
        add(parse(text))
        for outer in expressions(parse(text)):
            found.update(node.word for node in walk(outer) if isinstance(node, Get))
    return found


def used_types(tree: Files) -> dict[str, set[str]]:
    """{"resource": types, "data": types} that stand in a tree."""
    found: dict[str, set[str]] = {"resource": set(), "data": set()}
    for text in tree.texts.values():
        for block in parse(text).blocks:
            if block.type in found:
                found[block.type].add(block.labels[0])
    return found
