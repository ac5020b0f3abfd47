"""What an expression of Terraform gives: its shape. And every name in it that does not exist.

A shape is Scalar, Sequence, Mapping or Record (an object or a resource), or ANY where nobody can
know before an apply. `Reader.shape` finds the shape of an expression, and reports a reference to
what is not there: a variable, local, output, resource, attribute, key of an object, function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.infra import terraform_files as files


@dataclass(frozen=True)
class Any_:
    """Not known before an apply, or null."""


@dataclass(frozen=True)
class Scalar:
    kind: str = "string"  # or number, bool


@dataclass(frozen=True)
class Sequence:
    """A list or tuple; `unordered`: a set, which has no first element."""

    element: Any
    unordered: bool = False


@dataclass(frozen=True)
class Mapping_:
    element: Any


@dataclass(frozen=True)
class Record:
    """`fields`: {name: shape}. `what` names it in a message. `optional`: those of an object type
    that may be left out.
    """

    fields: Mapping[str, Any]
    what: str = "this object"
    optional: frozenset[str] = frozenset()


ANY, STRING, NUMBER, BOOL = Any_(), Scalar(), Scalar("number"), Scalar("bool")

# Terraform 1.11's functions and what they give. `terraform metadata functions` is the source; a
# test compares where Terraform is on the PATH.
STRINGS = """abspath base64encode base64gzip base64sha256 base64sha512 basename bcrypt chomp
cidrhost cidrnetmask cidrsubnet csvdecode dirname file filebase64 filebase64sha256
filebase64sha512 filemd5 filesha1 filesha256 filesha512 format formatdate indent
join jsonencode lower md5 pathexpand replace rsadecrypt sha1 sha256 sha512 strrev
substr templatefile templatestring textencodebase64 textdecodebase64 timeadd
timestamp title trim trimprefix trimspace trimsuffix upper urlencode uuid uuidv5
yamlencode base64decode plantimestamp tostring"""
NUMBERS = """abs ceil floor index length log max min parseint pow signum sum timecmp tonumber"""
BOOLS = (
    """alltrue anytrue can contains endswith fileexists issensitive startswith strcontains tobool"""
)
OTHERS = """chunklist coalesce coalescelist compact concat distinct element ephemeralasnull
fileset flatten formatlist jsondecode keys lookup matchkeys merge nonsensitive one
range regex regexall reverse sensitive setintersection setproduct setsubtract
setunion slice sort split tolist tomap toset transpose try values yamldecode
zipmap cidrsubnets"""
FUNCTIONS = frozenset(f"{STRINGS} {NUMBERS} {BOOLS} {OTHERS}".split())


def same(shapes: list[Any]) -> Any:
    """The shape of all of these, or ANY where they differ."""
    known = [shape for shape in shapes if shape != ANY]
    if not known:
        return ANY
    first = known[0]
    if all(isinstance(shape, Scalar) for shape in known):
        return first if len(set(known)) == 1 else STRING
    if all(isinstance(shape, Sequence) for shape in known):
        element = same([shape.element for shape in known])
        return Sequence(element, all(shape.unordered for shape in known))
    if all(isinstance(shape, Mapping_) for shape in known):
        return Mapping_(same([shape.element for shape in known]))
    if all(isinstance(shape, Record) for shape in known):
        if len({frozenset(shape.fields) for shape in known}) != 1:
            return ANY
        return Record(
            {name: same([shape.fields[name] for shape in known]) for name in first.fields},
            first.what,
        )
    return ANY


def elements(shape: Any) -> Any:
    """The shape of what `for` and `for_each` go over."""
    if isinstance(shape, (Sequence, Mapping_)):
        return shape.element
    if isinstance(shape, Record):
        return same(list(shape.fields.values()))
    return ANY


def of_json(value: Any) -> Any:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, (int, float)):
        return NUMBER
    if isinstance(value, list):
        return Sequence(same([of_json(one) for one in value]))
    if isinstance(value, dict):
        return Record({name: of_json(one) for name, one in value.items()})
    return STRING if isinstance(value, str) else ANY


def of_type(expression: Any, complain: Callable[[int, str], None]) -> Any:
    """The shape of a variable's `type`."""
    if isinstance(expression, files.Name):
        known = {"string": STRING, "number": NUMBER, "bool": BOOL, "any": ANY}
        if expression.word not in known:
            complain(expression.line, f"there is no type {expression.word}")
        return known.get(expression.word, ANY)
    if isinstance(expression, files.Call):
        given = expression.arguments
        if expression.word in ("list", "set") and len(given) == 1:
            return Sequence(of_type(given[0], complain), expression.word == "set")
        if expression.word == "map" and len(given) == 1:
            return Mapping_(of_type(given[0], complain))
        if expression.word == "optional" and len(given) in (1, 2):
            return of_type(given[0], complain)
        if expression.word == "tuple" and isinstance(given[0], files.Tuple):
            return Sequence(same([of_type(one, complain) for one in given[0].items]))
        if expression.word == "object" and len(given) == 1 and isinstance(given[0], files.Object):
            fields, optional = {}, set()
            for key, value, *_ in given[0].items:
                fields[key.value] = of_type(value, complain)
                if isinstance(value, files.Call) and value.word == "optional":
                    optional.add(key.value)
            return Record(fields, "this object", frozenset(optional))
        complain(expression.line, f"there is no type {expression.word}(…) of this form")
    else:
        complain(0, "a type is string, number, bool, list(…), set(…), map(…) or object({…})")
    return ANY


def of_schema(entry: Mapping[str, Any]) -> Any:
    """The shape of an argument, nested block or attribute of a provider's schema."""
    if "block" in entry:
        if entry.get("unused"):
            return ANY
        inner = Record({name: of_schema(one) for name, one in entry["block"].items()})
        nesting = entry["nesting"]
        return inner if nesting == "single" else Sequence(inner, nesting == "set")

    def plain(type_: Any) -> Any:
        if isinstance(type_, list):
            element = plain(type_[1])
            return Mapping_(element) if type_[0] == "map" else Sequence(element, type_[0] == "set")
        return {"string": STRING, "number": NUMBER, "bool": BOOL}.get(type_, ANY)

    return plain(entry["type"])


@dataclass(frozen=True)
class Scope:
    """What names mean at one place beside those of the module: `for` variables, each, count, the
    iterators of dynamic blocks.
    """

    names: Mapping[str, Any] = field(default_factory=dict)

    def knowing(self, names: Mapping[str, Any]) -> Scope:
        return replace(self, names={**self.names, **names})


@dataclass
class Reader:
    """`root(word, rest)` gives the shape of a module's own names: var, local, module, data, …"""

    root: Callable[[files.Name], Any]
    complain: Callable[[int, str], None]
    read_json: Callable[[Any], Any]

    def shape(self, node: Any, scope: Scope) -> Any:
        if isinstance(node, files.Literal):
            return of_json(node.value)
        if isinstance(node, files.Text):
            for part in node.parts:
                found = self.shape(part, scope)
                if len(node.parts) > 1 and isinstance(found, (Sequence, Mapping_, Record)):
                    self.complain(_line(part), f"{_said(part)} is no text to put into a string")
            return STRING if len(node.parts) > 1 else self.shape(node.parts[0], scope)
        if isinstance(node, files.Name):
            return scope.names[node.word] if node.word in scope.names else self.root(node)
        if isinstance(node, files.Get):
            return self.member(self.shape(node.base, scope), node)
        if isinstance(node, files.Index):
            return self.item(self.shape(node.base, scope), node, scope)
        if isinstance(node, files.Splat):
            inner = scope.knowing({"[*]": elements(self.shape(node.base, scope))})
            return Sequence(self.shape(node.rest, inner))
        if isinstance(node, files.Element):
            return scope.names["[*]"]
        if isinstance(node, files.Call):
            return self.call(node, scope)
        if isinstance(node, files.For):
            return self.loop(node, scope)
        if isinstance(node, files.Tuple):
            return Sequence(same([self.shape(item, scope) for item in node.items]))
        if isinstance(node, files.Object):
            return self.object(node, scope)
        if isinstance(node, files.Choice):
            self.shape(node.condition, scope)
            return same([self.shape(node.yes, scope), self.shape(node.no, scope)])
        if isinstance(node, files.Operation):
            for operand in node.operands:
                self.shape(operand, scope)
            return BOOL if node.logical else NUMBER
        raise TypeError(node)

    def member(self, base: Any, node: files.Get) -> Any:
        if isinstance(base, Record):
            if node.word in base.fields:
                return base.fields[node.word]
            self.complain(node.line, f"{base.what} has no {node.word}: {_said(node)}")
        elif isinstance(base, Mapping_):
            return base.element
        elif isinstance(base, (Scalar, Sequence)):
            kind = "a list" if isinstance(base, Sequence) else f"a {base.kind}"
            self.complain(node.line, f"{_said(node.base)} is {kind} and has no {node.word}")
        return ANY

    def item(self, base: Any, node: files.Index, scope: Scope) -> Any:
        self.shape(node.key, scope)
        key = node.key.value if isinstance(node.key, files.Literal) else None
        if isinstance(base, Record) and isinstance(key, str):
            if key in base.fields:
                return base.fields[key]
            self.complain(_line(node.base), f"{base.what} has no {key}: {_said(node.base)}")
        elif isinstance(base, (Sequence, Mapping_)):
            if isinstance(base, Sequence) and base.unordered:
                self.complain(_line(node.base), f"{_said(node.base)} is a set: it has no [{key}]")
            if isinstance(base, Sequence) and isinstance(key, str):
                self.complain(
                    _line(node.base), f'{_said(node.base)} is a list and has no key "{key}"'
                )
            return base.element
        elif isinstance(base, Record):
            return elements(base)
        elif isinstance(base, Scalar):
            self.complain(_line(node.base), f"{_said(node.base)} is no list to take a part of")
        return ANY

    def object(self, node: files.Object, scope: Scope) -> Any:
        fields: dict[str, Any] = {}
        open_ = False
        for key, value, line, _ in node.items:
            found = self.shape(value, scope)
            if isinstance(key, files.Literal):
                if key.value in fields:
                    self.complain(line, f"the key {key.value} stands twice in one object")
                fields[str(key.value)] = found
            else:
                self.shape(key, scope)
                open_ = True
                fields[f"({len(fields)})"] = found
        return Mapping_(same(list(fields.values()))) if open_ else Record(fields)

    def loop(self, node: files.For, scope: Scope) -> Any:
        over = self.shape(node.over, scope)
        element = elements(over)
        inner = scope.knowing(_variables(node.variables, over, element))
        if node.condition is not None:
            self.shape(node.condition, inner)
        value = self.shape(node.value, inner)
        if node.key is None:
            return Sequence(value)
        self.shape(node.key, inner)
        return Mapping_(Sequence(value) if node.grouped else value)

    def call(self, node: files.Call, scope: Scope) -> Any:
        given = [self.shape(one, scope) for one in node.arguments]
        word = node.word
        if word not in FUNCTIONS:
            self.complain(node.line, f"Terraform has no function {word}")
            return ANY
        if word == "jsondecode":
            return self.read_json(node.arguments[0])
        if word in STRINGS.split():
            return STRING
        if word in NUMBERS.split():
            return NUMBER
        if word in BOOLS.split():
            return BOOL
        if word == "merge":
            return _merged(given)
        if word in ("toset", "tolist", "distinct", "sort", "reverse", "compact", "slice"):
            return Sequence(elements(given[0]), word == "toset")
        if word in ("concat", "setunion", "setintersection", "setsubtract"):
            return Sequence(same([elements(one) for one in given]), word != "concat")
        if word in ("keys", "split", "regexall", "formatlist", "fileset", "cidrsubnets"):
            return Sequence(STRING, word == "fileset")
        if word == "values":
            return Sequence(elements(given[0]))
        if word == "flatten":
            return Sequence(_flat(given[0]))
        if word in ("one", "element", "lookup"):
            return elements(given[0])
        if word == "tomap":
            return given[0]
        if word in ("try", "coalesce"):
            return same(given)
        return ANY


def _variables(names: tuple[str, ...], over: Any, element: Any) -> dict[str, Any]:
    key = NUMBER if isinstance(over, Sequence) else STRING
    return {names[0]: element} if len(names) == 1 else {names[0]: key, names[1]: element}


def _flat(shape: Any) -> Any:
    return _flat(shape.element) if isinstance(shape, Sequence) else shape


def _merged(given: list[Any]) -> Any:
    if all(isinstance(one, Record) for one in given):
        return Record({name: shape for one in given for name, shape in one.fields.items()})
    return Mapping_(same([elements(one) for one in given]))


def _line(node: Any) -> int:
    return next((one.line for one in files.walk(node) if hasattr(one, "line")), 0)


def _said(node: Any) -> str:
    """A reference as it is written."""
    if isinstance(node, files.Name):
        return node.word
    if isinstance(node, files.Get):
        return f"{_said(node.base)}.{node.word}"
    if isinstance(node, files.Index):
        key = node.key.value if isinstance(node.key, files.Literal) else "…"
        return f"{_said(node.base)}[{int(key) if isinstance(key, float) else key}]"
    if isinstance(node, files.Splat):
        return f"{_said(node.base)}[*]"
    return "…"


line_of, said = _line, _said


def misfit(shape: Any, wanted: Any) -> str | None:
    """Why a value of `shape` cannot be given where `wanted` is asked for, or None.

    Terraform converts scalars into each other, tuples into lists and sets, objects into maps.
    """
    if ANY in (shape, wanted):
        return None
    if isinstance(wanted, Scalar):
        return None if isinstance(shape, Scalar) else f"a {wanted.kind} is needed"
    if isinstance(wanted, Sequence):
        if not isinstance(shape, Sequence):
            return "a list is needed"
        return misfit(shape.element, wanted.element)
    if isinstance(wanted, Mapping_):
        if isinstance(shape, Mapping_):
            return misfit(shape.element, wanted.element)
        if not isinstance(shape, Record):
            return "a map is needed"
        found = (misfit(one, wanted.element) for one in shape.fields.values())
        return next(filter(None, found), None)
    if isinstance(shape, Record):
        # Terraform drops a key that it does not know without a word: an optional one that is
        # misspelt would be lost.
        extra = sorted(set(shape.fields) - set(wanted.fields))
        if extra:
            return f"this object takes no {', '.join(extra)}"
        missing = sorted(set(wanted.fields) - wanted.optional - set(shape.fields))
        if missing:
            return f"this object lacks {', '.join(missing)}"
        found = (misfit(one, wanted.fields[name]) for name, one in shape.fields.items())
        return next(filter(None, found), None)
    return None if isinstance(shape, Mapping_) else "an object is needed"
