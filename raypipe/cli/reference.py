"""The reference of all settings, from their docstrings: for the docs, the terminal and editors.

python -m raypipe.cli.reference           writes docs/config.md, jobs/configs/schema.json and the
                                          columns of Azure Monitor's tables for Terraform
python -m raypipe.cli.reference --check   fails if they are out of date; `make check` runs it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from raypipe.errors import ConfigError, nearest
from raypipe.job import Job
from raypipe.monitor import streams

PAGE = Path("docs/config.md")
SCHEMA = Path("jobs/configs/schema.json")
REQUIRED, DEFAULTS = "required", "default: as below"
WRITE = "python -m raypipe.cli.reference"
HEAD = """# Configuration

Every verb takes one YAML file and `section.key=value` on the command line. A verb reads the
sections that it needs. An unknown key is an error. The resolved configuration is saved with each
run.

Values on the command line are YAML, too: `search.refit=null`, `table.where={{split: train}}`. If
YAML would read a text as something else, quote it for YAML and for the shell:
`run.name='"line #3"'`.

`raypipe config SECTION` prints a section of this page. To let your editor complete the keys, run
`raypipe config --schema > schema.json`, and put `# yaml-language-server: $schema=schema.json` at
the top of your YAML file in the same folder.

This page is made from the docstrings of the settings: `{write}`.
"""


@dataclass(frozen=True)
class Setting:
    """One key as people read it."""

    name: str
    kind: str
    default: str
    text: str


def sections() -> list[str]:
    """The sections of a configuration, in the order of the YAML that is saved with a run."""
    return list(Job.model_fields)


def settings(section: str) -> list[Setting]:
    """The keys of a section, and of the sections inside it. Raises ConfigError for another name."""
    if section not in Job.model_fields:
        raise ConfigError(f"There is no section {section!r}", fix=nearest(section, sections()))
    return list(_settings(section, Job.model_fields[section]))


def _settings(name: str, field: FieldInfo) -> Iterator[Setting]:
    inner = _section_of(field.annotation)
    # The outermost sections are headings of the page, not keys.
    if inner is None or _is_optional(field.annotation) or "." in name:
        yield Setting(name, kind_of(field), _default(field), _one_paragraph(field.description))
    if inner is None:
        return
    for attribute, below in inner.model_fields.items():
        yield from _settings(f"{name}.{below.alias or attribute}", below)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, if it holds one."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _is_optional(annotation: Any) -> bool:
    return NoneType in get_args(annotation)


def _one_paragraph(text: str | None) -> str:
    return " ".join((text or "").split())


def kind_of(field: FieldInfo) -> str:
    """The type and the range in plain words: `number, 0 to 1`, `auto or integer, from 1`."""
    return _with_range(_words(field.annotation), field.metadata)


def _with_range(words: str, metadata: list[Any]) -> str:
    low, high = _bounds(metadata)
    if low and high:
        return f"{words}, {low} to {high}"
    if low:
        # "above 0" needs no "from".
        return f"{words}, {low}" if low.startswith("above") else f"{words}, from {low}"
    return f"{words}, to {high}" if high else words


def _bounds(metadata: list[Any]) -> tuple[str, str]:
    low = high = ""
    for rule in metadata:
        for name in ("ge", "gt"):
            if getattr(rule, name, None) is not None:
                low = f"{'above ' if name == 'gt' else ''}{_number(getattr(rule, name))}"
        for name in ("le", "lt"):
            if getattr(rule, name, None) is not None:
                high = f"{'below ' if name == 'lt' else ''}{_number(getattr(rule, name))}"
    return low, high


def _number(bound: float) -> str:
    """A bound with all its digits: `:g` would show 2**32 as 4.29497e+09."""
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


NAMES = {bool: "true or false", int: "integer", float: "number", str: "text", Any: "any value"}


def _words(annotation: Any) -> str:
    """An annotation in plain words."""
    if annotation in NAMES:
        return NAMES[annotation]
    if annotation is None or annotation is NoneType:
        return "null"
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _with_range(_words(members[0]), list(members[1:]))
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_words(member) for member in members))
    if origin is Literal:
        return " or ".join(
            f"`{json.dumps(m) if m is not None else 'null'}`".replace('"', "") for m in members
        )
    if origin in (list, set, frozenset):
        return f"list of {_words(members[0])}"
    if origin is tuple:
        if members[-1] is Ellipsis:
            return f"list of {_words(members[0])}"
        return f"[{', '.join(_words(member) for member in members)}]"
    if origin is dict:
        return f"mapping of {_words(members[0])} to {_words(members[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return str(getattr(annotation, "__name__", annotation))


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return REQUIRED
    value = field.get_default(call_default_factory=True)
    # Its keys follow one by one.
    if isinstance(value, BaseModel):
        return DEFAULTS
    if isinstance(value, tuple):
        value = list(value)
    text = json.dumps(value, default=_plain)
    return text.strip('"') if isinstance(value, str) and value else text


def page() -> str:
    """docs/config.md."""
    parts = [HEAD.format(write=WRITE)]
    for section in sections():
        text = _one_paragraph(Job.model_fields[section].description)
        keys = settings(section)
        # A section that is a single key has its text there.
        parts.append(f"## {section}\n" if keys[0].name == section else f"## {section}\n\n{text}\n")
        for setting in keys:
            default = f"; default `{setting.default}`"
            if setting.default in (REQUIRED, DEFAULTS):
                default = f"; {setting.default}"
            parts.append(f"`{setting.name}`\n: {setting.kind}{default}\n\n  {setting.text}\n")
    return "\n".join(parts)


def schema() -> dict[str, Any]:
    """A JSON schema of a configuration file, for editors.

    It takes what raypipe takes: numbers and booleans where text is meant, and a file without the
    settings that the command line brings.
    """
    made = Job.model_json_schema(by_alias=True)
    # The table may come from the command line.
    made.pop("required", None)
    made["title"] = "raypipe configuration"
    return _relaxed(made)  # type: ignore[no-any-return]


def _relaxed(node: Any) -> Any:
    """Text fields take scalars too, and docstrings lose their line breaks."""
    if isinstance(node, list):
        return [_relaxed(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    relaxed = {key: _relaxed(inner) for key, inner in node.items() if key != "title"}
    if node.get("type") == "string" and "enum" not in node and "const" not in node:
        relaxed["type"] = ["string", "number", "boolean"]
    if isinstance(node.get("description"), str):
        relaxed["description"] = _one_paragraph(node["description"])
    # The command line may set what a section of the file lacks.
    relaxed.pop("required", None)
    return relaxed


def files() -> dict[Path, str]:
    """The generated files, by path from the repository's root."""
    made = json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"
    return {PAGE: page(), SCHEMA: made, streams.FILE: streams.as_json()}


def main(arguments: list[str]) -> int:
    """Write the files, or with --check say which are out of date. Returns the exit code."""
    stale = []
    for path, text in files().items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        # Compared as text: a change of a docstring counts.
        stale.append(str(path))
        if "--check" not in arguments:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if "--check" not in arguments or not stale:
        return 0
    print(f"Out of date: {', '.join(stale)}. Write them again: {WRITE}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
