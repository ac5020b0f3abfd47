"""Whether a tree of Terraform modules is sound, without Terraform and without its providers.

`check(tree, schema)` lists what `terraform validate` would refuse, and a little that it would let
pass: an unused variable, one without description, a key that an object type does not know. The
arguments of resources come from the providers' typed bindings (provider_bindings.py).

What cannot be read is a finding of its own: no file is skipped.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.infra import terraform_files as files
from tests.infra import terraform_shapes as shapes
from tests.infra.terraform_files import Block, Body, Files
from tests.infra.terraform_shapes import ANY, NUMBER, STRING, Record, Scope, Sequence

TOP = {
    "data": 2,
    "locals": 0,
    "module": 1,
    "output": 1,
    "provider": 1,
    "resource": 2,
    "terraform": 0,
    "variable": 1,
}
META = ("count", "for_each", "provider", "depends_on")
LIFECYCLE = ("create_before_destroy", "prevent_destroy", "ignore_changes", "replace_triggered_by")
CONDITION = ("condition", "error_message")
# Of `backend "azurerm"`, as Terraform 1.11 documents it.
BACKEND = [
    "access_key",
    "client_id",
    "client_id_file_path",
    "client_secret",
    "client_secret_file_path",
    "container_name",
    "environment",
    "key",
    "lookup_blob_endpoint",
    "metadata_host",
    "msi_endpoint",
    "oidc_request_token",
    "oidc_request_url",
    "oidc_token",
    "oidc_token_file_path",
    "resource_group_name",
    "sas_token",
    "snapshot",
    "storage_account_name",
    "subscription_id",
    "tenant_id",
    "use_aks_workload_identity",
    "use_azuread_auth",
    "use_cli",
    "use_msi",
    "use_oidc",
]
SOURCES = {
    "azapi": "Azure/azapi",
    "azurerm": "hashicorp/azurerm",
    "databricks": "databricks/databricks",
}
# Bodies of azapi are checked by Azure's own schema at plan; here by what its reference names.
AZAPI = {
    "Microsoft.OperationalInsights/workspaces/tables": {
        "properties": {
            "plan": None,
            "retentionInDays": None,
            "totalRetentionInDays": None,
            "schema": {
                "name": None,
                "description": None,
                "displayName": None,
                "columns": {
                    "name": None,
                    "type": None,
                    "description": None,
                    "displayName": None,
                    "dataTypeHint": None,
                },
            },
        }
    }
}
AZAPI_NEEDS = {
    "Microsoft.OperationalInsights/workspaces/tables": [
        ("properties", "schema", "name"),
        ("properties", "schema", "columns"),
    ]
}


@dataclass(frozen=True, order=True)
class Finding:
    """`line` 0: the file as a whole."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


@dataclass
class Module:
    """One folder of files."""

    folder: str
    bodies: dict[str, Body] = field(default_factory=dict)
    called: bool = False

    def blocks(self, type_: str) -> Iterator[tuple[str, Block]]:
        for file, body in self.bodies.items():
            for block in body.blocks:
                if block.type == type_ and len(block.labels) == TOP[type_]:
                    yield file, block

    def named(self, type_: str) -> dict[str, tuple[str, Block]]:
        return {block.labels[0]: (file, block) for file, block in self.blocks(type_)}


def check(tree: Files, schema: Mapping[str, Any]) -> list[Finding]:
    """All findings, by file and line."""
    return Checker(tree, schema).run()


class Checker:
    def __init__(self, tree: Files, schema: Mapping[str, Any]) -> None:
        self.tree, self.schema = tree, schema
        self.found: set[Finding] = set()
        self.modules: dict[str, Module] = {}
        self.shapes: dict[tuple[str, str, str], Any] = {}
        self.busy: set[tuple[str, str, str]] = set()

    def say(self, file: str, line: int, message: str) -> None:
        self.found.add(Finding(file, line, message))

    def run(self) -> list[Finding]:
        for file, text in self.tree.texts.items():
            module = self.modules.setdefault(
                posixpath.dirname(file), Module(posixpath.dirname(file))
            )
            try:
                module.bodies[file] = files.parse(text)
            except files.Unreadable as error:
                self.say(file, 0, f"cannot be read: {error}")
        for module in self.modules.values():
            for _, block in module.blocks("module"):
                called = self.modules.get(self.source(module, block) or "")
                if called is not None:
                    called.called = True
        for module in self.modules.values():
            Check(self, module).run()
        return sorted(self.found)

    def source(self, module: Module, block: Block) -> str | None:
        """The folder that a module block names."""
        try:
            source = files.literal(block.body.get("source"))
        except files.Unreadable:
            return None
        if not isinstance(source, str) or not source.startswith(("./", "../")):
            return None
        return posixpath.normpath(posixpath.join(module.folder, source))


class Check:
    """One module's checks."""

    def __init__(self, whole: Checker, module: Module) -> None:
        self.whole, self.module, self.schema = whole, module, whole.schema
        self.variables = module.named("variable")
        self.outputs = module.named("output")
        self.calls = module.named("module")
        self.locals: dict[str, tuple[str, files.Argument]] = {}
        self.used: dict[str, set[str]] = {"var": set(), "local": set()}
        for file, block in module.blocks("locals"):
            for argument in block.body.arguments:
                self.locals.setdefault(argument.name, (file, argument))
        self.things: dict[tuple[str, str, str], tuple[str, Block]] = {}
        for kind in ("resource", "data"):
            for file, block in module.blocks(kind):
                self.things.setdefault((kind, *block.labels), (file, block))
        self.required = self.requirements()
        self.file = ""

    # What a name means

    def reader(self, file: str) -> shapes.Reader:
        return shapes.Reader(
            self.root, lambda line, message: self.whole.say(file, line, message), self.json
        )

    def shape(self, file: str, node: Any, scope: Scope) -> Any:
        before, self.file = self.file, file
        try:
            return self.reader(file).shape(node, scope)
        finally:
            self.file = before

    def root(self, name: files.Name) -> Any:
        word = name.word
        if word == "var":
            return Lazy(dict.fromkeys(self.variables, self.variable), "var")
        if word == "local":
            return Lazy(dict.fromkeys(self.locals, self.local), "local")
        if word == "module":
            return Lazy(dict.fromkeys(self.calls, self.output), "module")
        if word == "data":
            return Record(
                {
                    kind: self.of_type("data", kind)
                    for (what, kind, _) in self.things
                    if what == "data"
                },
                "data",
            )
        if word == "path":
            return Record(dict.fromkeys(("module", "root", "cwd"), STRING), "path")
        if word == "terraform":
            return Record({"workspace": STRING}, "terraform")
        if any(what == "resource" and kind == word for (what, kind, _) in self.things):
            return self.of_type("resource", word)
        if word in ("each", "count", "self"):
            self.whole.say(self.file, name.line, f"{word} means nothing here")
        else:
            self.whole.say(self.file, name.line, f"nothing here is called {word}")
        return ANY

    def of_type(self, what: str, kind: str) -> Any:
        names = [name for (w, k, name) in self.things if (w, k) == (what, kind)]
        return Lazy(
            {name: lambda name: self.thing(what, kind, name) for name in names},
            f"{'data ' if what == 'data' else ''}{kind}",
        )

    def once(self, kind: str, name: str, line: int, make: Any) -> Any:
        key = (self.module.folder, kind, name)
        if key in self.whole.busy:
            self.say(line, f"{kind}.{name} needs itself")
            return ANY
        if key not in self.whole.shapes:
            self.whole.busy.add(key)
            self.whole.shapes[key] = make()
            self.whole.busy.discard(key)
        return self.whole.shapes[key]

    def variable(self, name: str) -> Any:
        _, block = self.variables[name]
        type_ = block.body.get("type")
        return ANY if type_ is None else shapes.of_type(type_, lambda *_: None)

    def local(self, name: str) -> Any:
        file, argument = self.locals[name]
        return self.once(
            "local", name, argument.line, lambda: self.shape(file, argument.value, Scope())
        )

    def output(self, name: str) -> Any:
        """The outputs of a called module."""
        _, block = self.calls[name]
        child = self.whole.modules.get(self.whole.source(self.module, block) or "")
        if child is None:
            return ANY
        inside = Check(self.whole, child)
        outputs = {
            key: (lambda key, at=file, of=output: inside.value(at, of))
            for key, (file, output) in inside.outputs.items()
        }
        found = Lazy(outputs, f"module {name}")
        if block.body.get("count") is not None:
            return Sequence(found)
        return shapes.Mapping_(found) if block.body.get("for_each") is not None else found

    def value(self, file: str, output: Block) -> Any:
        expression = output.body.get("value")
        if expression is None:
            return ANY
        return self.once(
            "output", output.labels[0], output.line, lambda: self.shape(file, expression, Scope())
        )

    def instance(self, what: str, kind: str) -> Any:
        """One resource of a type."""
        key = (what, kind, "")
        if key not in self.whole.shapes:
            entry = self.schema[what][kind]
            record = Record({name: shapes.of_schema(one) for name, one in entry.items()}, kind)
            self.whole.shapes[key] = record
        return self.whole.shapes[key]

    def thing(self, what: str, kind: str, name: str) -> Any:
        _, block = self.things[(what, kind, name)]
        if kind not in self.schema[what]:
            return ANY
        record = self.instance(what, kind)
        if block.body.get("count") is not None:
            return Sequence(record)
        return shapes.Mapping_(record) if block.body.get("for_each") is not None else record

    def json(self, node: Any) -> Any:
        """The shape of jsondecode(file("${path.module}/NAME")): that of the file itself."""
        if isinstance(node, files.Call) and node.word == "file" and len(node.arguments) == 1:
            text = node.arguments[0]
            if isinstance(text, files.Text) and shapes.said(text.parts[0]) == "path.module":
                name = "".join(str(part.value) for part in text.parts[1:])
                place = posixpath.normpath(posixpath.join(self.module.folder, name.lstrip("/")))
                if place not in self.whole.tree.data:
                    self.whole.say(self.file, node.line, f"there is no file {name}")
                    return ANY
                try:
                    return shapes.of_json(json.loads(self.whole.tree.data[place]))
                except ValueError as error:
                    self.whole.say(place, 0, f"cannot be read: {error}")
        return ANY

    # The checks

    def run(self) -> None:
        for file, body in self.module.bodies.items():
            self.file = file
            for argument in body.arguments:
                self.say(argument.line, f"{argument.name} stands outside of a block")
            for block in body.blocks:
                if block.type not in TOP:
                    self.say(block.line, f"Terraform has no block {block.type}")
                elif len(block.labels) != TOP[block.type]:
                    self.say(block.line, f"{block.type} takes {TOP[block.type]} names")
                else:
                    self.once_only(block.body)
                    getattr(self, f"see_{block.type}")(block)
            self.names(body)
        self.twice()
        self.all_used()
        self.providers_there()

    def say(self, line: int, message: str) -> None:
        self.whole.say(self.file, line, message)

    def once_only(self, body: Body) -> None:
        seen = set()
        for argument in body.arguments:
            if argument.name in seen:
                self.say(argument.line, f"{argument.name} is given twice")
            seen.add(argument.name)
        for block in body.blocks:
            self.once_only(block.body)

    def twice(self) -> None:
        seen: set[tuple[str, ...]] = set()
        for file, body in self.module.bodies.items():
            for block in body.blocks:
                name = (block.type, *block.labels)
                if block.type == "provider":
                    alias = block.body.get("alias")
                    name = (*name, str(alias.value) if isinstance(alias, files.Literal) else "")
                if name in seen and block.type != "locals":
                    self.whole.say(file, block.line, f"{' '.join(name)} stands twice")
                seen.add(name)
        named: set[str] = set()
        for file, block in self.module.blocks("locals"):
            for argument in block.body.arguments:
                if argument.name in named:
                    self.whole.say(file, argument.line, f"local.{argument.name} stands twice")
                named.add(argument.name)

    def names(self, body: Body, inside: str = "") -> None:
        """Notes which variables and locals are used: by an expression, never by a comment."""
        for argument in body.arguments:
            for node in files.walk(argument.value):
                if not (isinstance(node, files.Get) and isinstance(node.base, files.Name)):
                    continue
                if node.base.word in self.used and node.word != inside:
                    self.used[node.base.word].add(node.word)
        for block in body.blocks:
            # A variable that only its own validation reads is not used.
            own = block.labels[0] if block.type == "variable" and block.labels else inside
            self.names(block.body, own)

    def all_used(self) -> None:
        for name, (file, block) in self.variables.items():
            if name not in self.used["var"]:
                self.whole.say(file, block.line, f"the variable {name} is never used")
        for name, (file, argument) in self.locals.items():
            if name not in self.used["local"]:
                self.whole.say(file, argument.line, f"local.{name} is never used")

    def only(
        self, body: Body, arguments: tuple[str, ...] | list[str], blocks: Any, at: str
    ) -> None:
        for argument in body.arguments:
            if argument.name not in arguments:
                self.say(argument.line, f"{at} takes no argument {argument.name}")
        for block in body.blocks:
            if block.type not in blocks:
                self.say(block.line, f"{at} takes no block {block.type}")

    def needs(self, block: Block, names: tuple[str, ...], at: str) -> None:
        for name in names:
            if block.body.get(name) is None:
                self.say(block.line, f"{at} needs {name}")

    def conditions(self, blocks: list[Block], scope: Scope) -> None:
        for block in blocks:
            self.only(block.body, CONDITION, (), block.type)
            self.needs(block, CONDITION, block.type)
            for argument in block.body.arguments:
                self.shape(self.file, argument.value, scope)

    def see_variable(self, block: Block) -> None:
        (name,) = block.labels
        at = f"variable {name}"
        known = ("type", "description", "default", "nullable", "sensitive", "ephemeral")
        self.only(block.body, known, ("validation",), at)
        self.needs(block, ("type", "description"), at)
        type_ = block.body.get("type")
        wanted = ANY if type_ is None else shapes.of_type(type_, self.say)
        default = block.body.get("default")
        if default is not None:
            why = shapes.misfit(self.shape(self.file, default, Scope()), wanted)
            if why:
                self.say(block.line, f"{at}: its default does not fit: {why}")
        description = block.body.get("description")
        if isinstance(description, files.Literal) and len(str(description.value)) < 10:
            self.say(block.line, f"{at}: its description says nothing")
        self.conditions(block.body.all("validation"), Scope())
        for inner in block.body.all("validation"):
            condition = inner.body.get("condition")
            if condition is not None and name not in _variables_of(condition):
                self.say(inner.line, f"{at}: a validation does not look at var.{name}")

    def see_output(self, block: Block) -> None:
        (name,) = block.labels
        at = f"output {name}"
        known = ("value", "description", "sensitive", "ephemeral", "depends_on")
        self.only(block.body, known, ("precondition",), at)
        self.needs(block, ("value", "description"), at)
        self.value(self.file, block)
        self.depends(block.body)
        self.conditions(block.body.all("precondition"), Scope())

    def see_locals(self, block: Block) -> None:
        self.only(block.body, [one.name for one in block.body.arguments], (), "locals")
        for argument in block.body.arguments:
            self.local(argument.name)

    def see_terraform(self, block: Block) -> None:
        self.only(block.body, ("required_version",), ("required_providers", "backend"), "terraform")
        self.needs(block, ("required_version",), "terraform")
        for inner in block.body.all("required_providers"):
            for argument in inner.body.arguments:
                self.requirement(argument)
        for inner in block.body.all("backend"):
            if inner.labels != ("azurerm",):
                self.say(inner.line, f"the backend {' '.join(inner.labels)} is not azurerm")
            self.only(inner.body, BACKEND, (), "backend azurerm")
            if self.module.called:
                self.say(inner.line, "a module has no backend of its own")
            for argument in inner.body.arguments:
                for node in files.walk(argument.value):
                    if isinstance(node, files.Name):
                        self.say(argument.line, "a backend takes no references")

    def requirement(self, argument: files.Argument) -> None:
        name = argument.name
        given = {}
        if isinstance(argument.value, files.Object):
            given = {key.value: value for key, value, *_ in argument.value.items}
        for key in given:
            if key not in ("source", "version", "configuration_aliases"):
                self.say(argument.line, f"required_providers.{name} takes no {key}")
        if name not in SOURCES:
            self.say(argument.line, f"no provider of this project is called {name}")
            return
        source, version = given.get("source"), given.get("version")
        if not isinstance(source, files.Literal) or source.value != SOURCES[name]:
            self.say(argument.line, f"the source of {name} is {SOURCES[name]}")
        checked = self.schema["versions"][name]["provider"]
        lower = f">= {'.'.join(checked.split('.')[:2])}, < {int(checked.split('.')[0]) + 1}"
        if not isinstance(version, files.Literal) or version.value != lower:
            self.say(
                argument.line,
                f"the version of {name} must be '{lower}': {checked} is what was checked",
            )

    def requirements(self) -> dict[str, list[str]]:
        """{provider: its configuration_aliases, as written}."""
        found: dict[str, list[str]] = {}
        for _, block in self.module.blocks("terraform"):
            for inner in block.body.all("required_providers"):
                for argument in inner.body.arguments:
                    found[argument.name] = []
                    if isinstance(argument.value, files.Object):
                        for key, value, *_ in argument.value.items:
                            if key == files.Literal("configuration_aliases"):
                                found[argument.name] = [shapes.said(one) for one in value.items]
        return found

    def configured(self) -> set[str]:
        """Provider configurations that this module has: `azurerm`, `databricks.account`."""
        found = set()
        if self.module.called:
            for name, aliases in self.required.items():
                found.update(aliases or [name])
            return found
        for _, block in self.module.blocks("provider"):
            alias = block.body.get("alias")
            found.add(
                f"{block.labels[0]}.{alias.value}"
                if isinstance(alias, files.Literal)
                else block.labels[0]
            )
        return found

    def providers_there(self) -> None:
        """Each provider that a module asks for is used by it, and the other way round."""
        used = {kind.partition("_")[0] for (_, kind, _) in self.things}
        for file, block in self.module.blocks("module"):
            self.file = file
            given = block.body.get("providers")
            if isinstance(given, files.Object):
                used |= {shapes.said(value).partition(".")[0] for _, value, *_ in given.items}
            child = self.whole.modules.get(self.whole.source(self.module, block) or "")
            if child is not None and given is None:
                used |= set(Check(self.whole, child).required)
        for file, block in self.module.blocks("terraform"):
            for name in self.required:
                if name not in used:
                    self.whole.say(file, block.line, f"the provider {name} is never used")
            for name in used - set(self.required):
                self.whole.say(file, block.line, f"required_providers lacks {name}")
        if not any(self.module.blocks("terraform")):
            self.whole.say(f"{self.module.folder}/terraform.tf", 0, "no terraform block")

    def see_provider(self, block: Block) -> None:
        (name,) = block.labels
        if self.module.called:
            self.say(block.line, f"provider {name} is configured inside a module")
        entry = self.schema["provider"].get(name)
        if entry is None:
            self.say(block.line, f"there is no provider {name}")
            return
        self.filled(block.body, entry, f"provider {name}", Scope(), ())

    def see_module(self, block: Block) -> None:
        (name,) = block.labels
        at = f"module {name}"
        folder = self.whole.source(self.module, block)
        child = self.whole.modules.get(folder or "")
        if child is None:
            given = ", ".join(argument.name for argument in block.body.arguments)
            self.say(block.line, f"{at}: no source that is a folder of modules here, in: {given}")
            return
        inside = Check(self.whole, child)
        for inner in block.body.blocks:
            self.say(inner.line, f"{at} takes no block {inner.type}")
        scope = self.instances(block.body)
        self.depends(block.body)
        for argument in block.body.arguments:
            if argument.name in ("source", *META):
                continue
            if argument.name == "providers":
                self.handed(argument, inside, at)
            elif argument.name not in inside.variables:
                self.say(argument.line, f"{at} has no variable {argument.name}")
            else:
                given = self.shape(self.file, argument.value, scope)
                why = shapes.misfit(given, inside.variable(argument.name))
                if why:
                    self.say(argument.line, f"{at}: {argument.name}: {why}")
                self.telling(argument, at)
        for variable, (_, declared) in inside.variables.items():
            if declared.body.get("default") is None and block.body.get(variable) is None:
                self.say(block.line, f"{at} needs the variable {variable}")
        if block.body.get("providers") is None:
            # A provider with an alias is never handed on by itself.
            here = {one for one in self.configured() if "." not in one}
            missing = inside.configured() - here
            for lacking in sorted(missing):
                self.say(block.line, f"{at} needs the provider {lacking}")

    def handed(self, argument: files.Argument, inside: Check, at: str) -> None:
        if not isinstance(argument.value, files.Object):
            self.say(argument.line, f"{at}: providers is a map")
            return
        given = set()
        for key, value, line, _ in argument.value.items:
            word = key.value if isinstance(key, files.Literal) else shapes.said(key)
            given.add(word)
            if word not in inside.configured():
                self.say(line, f"{at} asks for no provider {word}")
            if shapes.said(value) not in self.configured():
                self.say(line, f"there is no provider {shapes.said(value)}")
        for lacking in sorted(inside.configured() - given):
            self.say(argument.line, f"{at} needs the provider {lacking}")

    def see_data(self, block: Block) -> None:
        self.see_resource(block)

    def see_resource(self, block: Block) -> None:
        kind, name = block.labels
        at = f"{kind}.{name}"
        entry = self.schema[block.type].get(kind)
        if entry is None:
            self.say(
                block.line,
                f"no provider here has the {block.type} {kind}. If one has: "
                "python tests/infra/provider_bindings.py reads it from the bindings",
            )
            return
        scope = self.instances(block.body)
        self.depends(block.body)
        self.provided(block, kind)
        extra: list[Block] = []
        for inner in block.body.all("lifecycle"):
            extra.append(inner)
            self.only(inner.body, LIFECYCLE, ("precondition", "postcondition"), "lifecycle")
            checks = inner.body.all("precondition")
            self.conditions(checks, scope)
            own = scope.knowing({"self": self.instance(block.type, kind)})
            self.conditions(inner.body.all("postcondition"), own)
            for argument in inner.body.arguments:
                self.lifecycle(argument, entry, at)
        self.filled(block.body, entry, at, scope, (*META, "lifecycle"))
        if kind == "azapi_resource":
            self.azapi(block, at)

    def lifecycle(self, argument: files.Argument, entry: Mapping[str, Any], at: str) -> None:
        if argument.name in ("create_before_destroy", "prevent_destroy"):
            if argument.value not in (files.Literal(True), files.Literal(False)):
                self.say(argument.line, f"{at}: {argument.name} must be true or false, written out")
        elif argument.name == "ignore_changes" and isinstance(argument.value, files.Tuple):
            for item in argument.value.items:
                first = next(node for node in files.walk(item) if isinstance(node, files.Name))
                if first.word not in entry:
                    self.say(argument.line, f"{at} has no {first.word} to ignore")
        elif argument.name == "replace_triggered_by":
            self.shape(self.file, argument.value, Scope())

    def provided(self, block: Block, kind: str) -> None:
        given = block.body.get("provider")
        wanted = shapes.said(given) if given is not None else kind.partition("_")[0]
        line = shapes.line_of(given) if given is not None else block.line
        if wanted.partition(".")[0] != kind.partition("_")[0]:
            self.say(line, f"{kind} is no resource of the provider {wanted}")
        elif wanted not in self.configured():
            self.say(line, f"there is no provider {wanted}")

    def instances(self, body: Body) -> Scope:
        """The scope inside a resource or module: with `each` or `count` where it has them."""
        count, each = body.get("count"), body.get("for_each")
        if count is not None and each is not None:
            self.say(shapes.line_of(count), "count and for_each exclude each other")
        if count is not None:
            why = shapes.misfit(self.shape(self.file, count, Scope()), NUMBER)
            if why:
                self.say(shapes.line_of(count), f"count: {why}")
            return Scope({"count": Record({"index": NUMBER}, "count")})
        if each is not None:
            over = self.shape(self.file, each, Scope())
            if isinstance(over, (shapes.Scalar,)):
                self.say(shapes.line_of(each), "for_each needs a map or a set")
            if isinstance(over, Sequence) and not over.unordered:
                self.say(shapes.line_of(each), "for_each takes no list: toset(…)")
            element = shapes.elements(over)
            return Scope({"each": Record({"key": STRING, "value": element}, "each")})
        return Scope()

    def depends(self, body: Body) -> None:
        given = body.get("depends_on")
        if given is None:
            return
        if not isinstance(given, files.Tuple):
            self.say(shapes.line_of(given), "depends_on is a list")
            return
        for item in given.items:
            self.shape(self.file, item, Scope())
            first = next((one for one in files.walk(item) if isinstance(one, files.Name)), None)
            if first is None or first.word in ("var", "local", "path", "each", "terraform"):
                self.say(shapes.line_of(given), "depends_on names resources and modules only")

    def filled(
        self,
        body: Body,
        entry: Mapping[str, Any],
        at: str,
        scope: Scope,
        meta: tuple[str, ...],
    ) -> None:
        """The arguments and nested blocks of one body against its schema."""
        for argument in body.arguments:
            name = argument.name
            if name in meta:
                continue
            known = entry.get(name)
            given = self.shape(self.file, argument.value, scope)
            if known is None or (name == "id" and meta):
                self.say(argument.line, f"{at} takes no argument {name}")
            elif known.get("computed"):
                self.say(argument.line, f"{at}: {name} is set by the provider only")
            elif "block" in known and not known.get("attribute"):
                self.say(argument.line, f"{at}: {name} is a block: no = after it")
            else:
                wanted = shapes.of_schema(known)
                why = shapes.misfit(given, wanted) or _wrong_literal(argument.value, wanted)
                if why:
                    self.say(argument.line, f"{at}: {name}: {why}")
                self.telling(argument, at)
        counts: dict[str, int] = {}
        for block in body.blocks:
            if block.type in meta:
                continue
            name, inner, inner_scope = block.type, block.body, scope
            if name == "dynamic":
                found = self.dynamic(block, at, scope)
                if found is None:
                    continue
                name, inner, inner_scope = found
            known = entry.get(name)
            if known is None or "block" not in known or known.get("attribute"):
                why = "takes no block" if known is None else "takes as an argument, with =,"
                self.say(block.line, f"{at} {why} {name}")
                continue
            if known.get("computed"):
                self.say(block.line, f"{at}: {name} is set by the provider only")
            if known.get("unused"):
                self.say(
                    block.line,
                    f"{at}: what {name} takes is not in the extract: "
                    "python tests/infra/provider_bindings.py",
                )
                continue
            counts[name] = counts.get(name, 0) + 1
            if known.get("max") == 1 and counts[name] == 2:
                self.say(block.line, f"{at} takes one block {name}")
            self.filled(inner, known["block"], f"{at}.{name}", inner_scope, ())
        null = files.Literal(None)
        given_names = {one.name for one in body.arguments if one.value != null} | set(counts)
        for name, known in entry.items():
            if known.get("required") and name not in given_names:
                line = body.arguments[0].line if body.arguments else 0
                self.say(line, f"{at} needs {name}")

    def dynamic(self, block: Block, at: str, scope: Scope) -> tuple[str, Body, Scope] | None:
        if len(block.labels) != 1:
            self.say(block.line, f"{at}: dynamic takes the name of a block")
            return None
        (name,) = block.labels
        allowed = ("for_each", "iterator", "labels")
        self.only(block.body, allowed, ("content",), f'{at}.dynamic "{name}"')
        over, contents = block.body.get("for_each"), block.body.all("content")
        if over is None or len(contents) != 1:
            self.say(block.line, f'{at}: dynamic "{name}" needs for_each and content')
            return None
        found = self.shape(self.file, over, scope)
        if isinstance(found, shapes.Scalar):
            self.say(shapes.line_of(over), f'{at}: dynamic "{name}": for_each needs many')
        iterator = block.body.get("iterator")
        word = iterator.word if isinstance(iterator, files.Name) else name
        each = Record({"key": STRING, "value": shapes.elements(found)}, f"the iterator {word}")
        return name, contents[0].body, scope.knowing({word: each})

    def telling(self, argument: files.Argument, at: str) -> None:
        """An argument that ends in _id or _name gets something that is called so: what Terraform
        takes for any text, and Azure refuses only at the end of an apply.
        """
        ending = re.search(r"_(id|name)$", argument.name)
        node = argument.value
        while isinstance(node, files.Index):
            node = node.base
        if not ending or not isinstance(node, files.Get):
            return
        roots = [one.word for one in files.walk(node) if isinstance(one, files.Name)]
        # nat_gateway_id is the id of an azurerm_nat_gateway, never of a public address.
        stem = argument.name.removesuffix("_id")
        meant = {kind for kind in self.schema["resource"] if kind.endswith(f"_{stem}")}
        if node.word == "id" and meant and roots[0] in self.schema["resource"]:
            if roots[0] not in meant:
                said = shapes.said(argument.value)
                self.say(argument.line, f"{at}: {argument.name} gets {said}, of a {roots[0]}")
            return
        if node.word in ("key", "value") or node.word in argument.name:
            return
        if argument.name == "service_principal_name":
            return  # Databricks wants the application id there
        wanted = {"id": r"(^|_)ids?$", "name": r"(^|_)names?$"}[ending[1]]
        if not re.search(wanted, node.word) and roots[:1] != ["local"]:
            self.say(
                argument.line, f"{at}: {argument.name} gets {shapes.said(node)}, no {ending[1]}"
            )

    def azapi(self, block: Block, at: str) -> None:
        try:
            kind, _, version = str(files.literal(block.body.get("type"))).partition("@")
        except files.Unreadable:
            self.say(block.line, f"{at}: its type must be written out")
            return
        for name in ("name", "parent_id", "body"):
            if block.body.get(name) is None:
                self.say(block.line, f"{at} needs {name}")
        if block.body.get("schema_validation_enabled") not in (None, files.Literal(True)):
            self.say(block.line, f"{at}: Azure's own check of the body is switched off")
        if kind not in AZAPI:
            self.say(block.line, f"{at}: the checker knows no body of {kind}")
            return
        if not re.fullmatch(r"20\d\d-\d\d-\d\d", version):
            self.say(block.line, f"{at}: {version} is no version of an API")
        found: set[tuple[str, ...]] = set()
        self.keys(block.body.get("body"), AZAPI[kind], (), found, at)
        for path in AZAPI_NEEDS[kind]:
            if path not in found:
                self.say(block.line, f"{at}: its body needs {'.'.join(path)}")

    def keys(self, node: Any, known: Any, path: tuple[str, ...], found: Any, at: str) -> None:
        while isinstance(node, files.For):
            node = node.value
        if isinstance(node, files.Tuple):
            for item in node.items:
                self.keys(item, known, path, found, at)
        if not isinstance(node, files.Object):
            return
        for key, value, line, _ in node.items:
            word = str(key.value) if isinstance(key, files.Literal) else shapes.said(key)
            if known is None or word not in known:
                self.say(line, f"{at}: {'.'.join(path) or 'its body'} takes no {word}")
                continue
            found.add((*path, word))
            self.keys(value, known[word], (*path, word), found, at)


class Lazy(Record):
    """A Record whose fields are looked at when they are asked for: modules name each other."""

    def __init__(self, makers: Mapping[str, Any], what: str) -> None:
        super().__init__(_Made(makers), what)


class _Made(dict[str, Any]):
    def __init__(self, makers: Mapping[str, Any]) -> None:
        super().__init__(makers)

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)(name)

    def values(self) -> Any:  # type: ignore[override]
        return [self[name] for name in self]

    def items(self) -> Any:  # type: ignore[override]
        return [(name, self[name]) for name in self]


def _variables_of(node: Any) -> set[str]:
    return {
        one.word
        for one in files.walk(node)
        if isinstance(one, files.Get)
        and isinstance(one.base, files.Name)
        and one.base.word == "var"
    }


def _wrong_literal(node: Any, wanted: Any) -> str | None:
    """`"yes"` for a bool, `"ten"` for a number."""
    if not isinstance(node, files.Literal) or not isinstance(wanted, shapes.Scalar):
        return None
    value = node.value
    if wanted.kind == "bool" and value not in (True, False, None, "true", "false"):
        return "true or false is needed"
    if wanted.kind == "number" and (
        isinstance(value, bool)
        or (isinstance(value, str) and not re.fullmatch(r"-?\d+(\.\d+)?", value))
    ):
        return "a number is needed"
    return None
