"""What the Terraform providers take, read from their typed bindings for CDK Terrain.

Terraform's own registry is out of reach of many machines; the Python package index is not. The
packages `cdktn-provider-*` are generated from `terraform providers schema`, and the JavaScript
inside names every argument, nested block and attribute of every resource. They are 60 MB; what
infra/terraform uses of them is `provider_schema.json`, written by

    python tests/infra/provider_bindings.py

A test with the marker `cloud` extracts again and compares.
"""

from __future__ import annotations

import functools
import io
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # it is a script, too
from tests.infra.terraform_files import Files, used_types, used_words

PACKAGES = {
    "azurerm": "cdktn-provider-azurerm==18.9.0",
    "azapi": "cdktn-provider-azapi==1.0.0",
    "databricks": "cdktn-provider-databricks==18.11.0",
}
SCHEMA = Path(__file__).with_name("provider_schema.json")
CACHE = Path.home() / ".cache" / "raypipe" / "terraform-bindings"

# In a class: `// name - computed: …, optional: …, required: …`, or the getter of an attribute that
# only the provider sets.
COMMENT = re.compile(
    r"// (\w+) - computed: (true|false), optional: (true|false), required: (true|false)"
)
CLASS = re.compile(r"^class (\w+) extends [\w.]+ \{$(.*?)^\}$", re.M | re.S)
HCL = re.compile(
    r"^ {4,}(\w+): \{\s+value: .*\s+isBlock: (true|false),\s+type: \"(\w+)\",\s+"
    r"storageClassType: \"(\w+)\",",
    re.M,
)
FUNCTION = re.compile(r"^function (\w+)ToHclTerraform\(struct\) \{$(.*?)^\}$", re.M | re.S)
GETTER = re.compile(r"(cdktn\.Fn\.tolist\()?this\.get(\w+)Attribute\('(\w+)'\)")
MEMBER = re.compile(r"_\w+ = new ([\w.]+)\(this, \"(\w+)\"(?:, (true|false))?\)")
SIMPLE = {
    "String": "string",
    "Number": "number",
    "Boolean": "bool",
    "List": ["list", "string"],
    "NumberList": ["list", "number"],
    "StringMap": ["map", "string"],
    "BooleanMap": ["map", "bool"],
    "NumberMap": ["map", "number"],
    "AnyMap": "dynamic",
    "StringMapList": ["list", ["map", "string"]],
    "StringListMap": ["map", ["list", "string"]],
}


def wheel(requirement: str) -> Path:
    """The package's wheel, from the package index into the cache once."""
    stem = requirement.replace("-", "_").replace("==", "-")
    found = sorted(CACHE.glob(f"{stem}-*.whl"))
    if not found:
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", str(CACHE), requirement], check=True, timeout=600)
        found = sorted(CACHE.glob(f"{stem}-*.whl"))
    return found[0]


def sources(requirement: str, folders: Iterable[str]) -> dict[str, str]:
    """The JavaScript of some of a package's folders: {folder: text}."""
    wanted, texts = set(folders), dict.fromkeys(folders, "")
    with zipfile.ZipFile(wheel(requirement)) as packed:
        inner = next(name for name in packed.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(packed.read(inner))) as files:
            for member in files:
                parts = member.name.split("/")
                if parts[:2] != ["package", "lib"] or not member.name.endswith(".js"):
                    continue
                if len(parts) > 3 and parts[2] in wanted:
                    text = files.extractfile(member)
                    assert text is not None
                    # The last line is a source map, most of the file.
                    texts[parts[2]] += text.read().decode().rpartition("//# sourceMapping")[0]
    return texts


def folder(kind: str, name: str) -> str:
    """`resource azurerm_subnet` -> `subnet`; `data azurerm_subnet` -> `data-azurerm-subnet`."""
    provider, _, short = name.partition("_")
    if kind == "provider":
        return "provider"
    if name == "databricks_provider":
        return "provider-resource"
    if kind == "data":
        return f"data-{provider}-{short}".replace("_", "-")
    return short.replace("_", "-")


@functools.lru_cache(maxsize=2)
def _parts(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """The classes and the functions that write HCL: {name: body}."""
    return dict(CLASS.findall(text)), dict(FUNCTION.findall(text))


def block(text: str, class_name: str, hcl_name: str | None, words: set[str]) -> dict[str, Any]:
    """The schema of one class: {argument: {"type": …} or {"block": {…}, "nesting": …}, plus
    `required`, or `computed` for what only the provider sets}.

    Of a nested block whose name is not in `words` only that it exists is kept ("unused").
    """
    classes, functions = _parts(text)
    body = classes[class_name]
    if hcl_name is None:
        arguments = body.partition("synthesizeHclAttributes()")[2]
    else:
        arguments = functions.get(hcl_name, "")
    blocks = {
        name: (nesting, storage)
        for name, is_block, nesting, storage in HCL.findall(arguments)
        if is_block == "true"
    }
    known = {name for name, *_ in HCL.findall(arguments)}
    types: dict[str, Any] = {}
    for set_, kind, name in GETTER.findall(body):
        found = SIMPLE.get(kind, "dynamic")
        types[name] = ["set", *found[1:]] if set_ and isinstance(found, list) else found
    members = {
        name: (made.rpartition(".")[2], set_ == "true") for made, name, set_ in MEMBER.findall(body)
    }
    found: dict[str, Any] = {}
    for name, _, optional, required in COMMENT.findall(body):
        entry: dict[str, Any] = {}
        made, is_set = members.get(name, ("", False))
        inner = made.removesuffix("List").removesuffix("OutputReference")
        if f"{inner}OutputReference" in classes and made:
            lower = inner[0].lower() + inner[1:]
            used = name in words
            entry["block"] = block(text, f"{inner}OutputReference", lower, words) if used else {}
            entry |= {} if used else {"unused": True}
            many = made.endswith("List")
            entry["nesting"] = "set" if is_set else "list" if many else "single"
            if name in blocks and blocks[name][0] in ("list", "set"):
                entry["nesting"] = blocks[name][0]
                entry |= {} if many else {"max": 1}
            elif name in known and name != "timeouts":
                entry["attribute"] = True  # written `name = {…}`, not as a block
            elif name not in known:
                entry["attribute"] = True
        elif made:
            entry["type"] = SIMPLE.get(made.removesuffix("List"), "dynamic")
            if made.endswith("MapList"):
                entry["type"] = ["list", ["map", "string"]]
        else:
            entry["type"] = types.get(name, "dynamic")
        if required == "true":
            entry["required"] = True
        elif optional == "false" or name not in known:
            entry["computed"] = True
        found[name] = entry
    return found


def provider_block(text: str, words: set[str]) -> dict[str, Any]:
    """A provider's configuration: its class has no getters, only what it writes."""
    classes, functions = _parts(text)
    body = next(body for name, body in classes.items() if name.endswith("Provider"))

    def read(part: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, is_block, nesting, storage in HCL.findall(part):
            if is_block == "false":
                kinds = {"string": "string", "number": "number", "boolean": "bool"}
                lists = {"stringList": ["list", "string"], "stringMap": ["map", "string"]}
                found[name] = {"type": kinds.get(storage) or lists.get(storage, "dynamic")}
                continue
            inner = storage.removesuffix("List")
            lower = inner[0].lower() + inner[1:]
            used = name in words
            found[name] = {"block": read(functions[lower]) if used else {}, "nesting": "list"}
            found[name] |= {} if used else {"unused": True}
            if nesting == "struct":
                found[name] = {**found[name], "nesting": "single", "attribute": True}
        return found

    return read(body.partition("synthesizeHclAttributes()")[2])


def extract(used: dict[str, set[str]], words: set[str]) -> dict[str, Any]:
    """`used`: {"resource": types, "data": types} -> the schema of these, and of all providers.

    `words`: see `block`.
    """
    schema: dict[str, Any] = {"versions": {}, "provider": {}, "resource": {}, "data": {}}
    for provider, package in PACKAGES.items():
        wanted = {
            (kind, name): folder(kind, name)
            for kind in ("resource", "data")
            for name in sorted(used[kind])
            if name.partition("_")[0] == provider
        }
        texts = sources(package, [*wanted.values(), "provider"])
        versions = set()
        for (kind, name), place in wanted.items():
            text = texts[place]
            if f'static tfResourceType = "{name}"' not in text:
                raise LookupError(f"{package} knows no {kind} {name}")
            main = next(
                found
                for found, body in CLASS.findall(text)
                if f'static tfResourceType = "{name}"' in body
            )
            schema[kind][name] = block(text, main, None, words)
            versions |= set(re.findall(r"providerVersion: '([^']+)'", text))
        schema["provider"][provider] = provider_block(texts["provider"], words)
        (version,) = versions
        schema["versions"][provider] = {"package": package, "provider": version}
    return schema


def dumps(schema: dict[str, Any]) -> str:
    """One line a resource: a diff then names the resource that changed."""
    parts = []
    for section in ("versions", "provider", "resource", "data"):
        rows = [
            f"  {json.dumps(name)}: {json.dumps(entry, sort_keys=True, separators=(',', ':'))}"
            for name, entry in sorted(schema[section].items())
        ]
        parts.append(f'"{section}": {{\n' + ",\n".join(rows) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def extracted(files: Files) -> dict[str, Any]:
    """The schema of all that stands in `files`."""
    return extract(used_types(files), used_words(files))


def main() -> None:
    root = Path(__file__).parents[2] / "infra" / "terraform"
    SCHEMA.write_text(dumps(extracted(Files.read(root))), "utf-8")
    print(f"{SCHEMA}: {SCHEMA.stat().st_size / 1024:.0f} kB")


if __name__ == "__main__":
    main()
