"""The source of a `file:` model, packed with its weights.

A `file:` factory is the user's own module. Without it a package is weights that nothing can load.
With a module of the same name on the reader's path, it would be another model. So the package holds
the module, and every module of the user's own that it imports. Their bytes are hashed in the
manifest, as weights are, and loading imports them from these bytes, never from the reader's path.

This is code that runs. `Package` runs it only if the manifest was checked against a seal that came
from outside the package.

What is found: modules that are imported by name, also inside functions. What is not: names computed
at run time, data files, compiled modules. `packing.build` builds the model once from what it packs,
so that a missing one is found at once. It also lets it predict once without these modules: they can
be imported while the model is built, and not later.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions
from importlib.util import find_spec, spec_from_loader
from pathlib import Path, PurePosixPath
from types import CodeType
from typing import Any

import torch

from raypipe.errors import DataError, one_line
from raypipe.models.providers import resolve

FOLDER = "code/"  # of a package
_INIT = "__init__.py"
# sys.modules is one for all threads.
_one_at_a_time = threading.RLock()


def collect(module: str) -> dict[str, bytes]:
    """The files of a module and of the user's modules that it imports: {path: source}.

    Raises DataError for a module without Python source.
    """
    installed = packages_distributions()
    top = module.partition(".")[0]
    files: dict[str, bytes] = {}
    # From the factory's module along its imports, each module once.
    waiting = [module]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)

        # The factory's own top package is packed, even where it is installed.
        first = name.partition(".")[0]
        if first != top and _is_library(first, installed):
            continue
        # A parent is imported before its module.
        parent = name.rpartition(".")[0]
        if parent:
            waiting.append(parent)
        found = _source(name)
        if found is None:
            if name == module:
                raise _no_source(module)
            continue
        path, source = found
        files[path] = source
        waiting += _imports(source, path, name)
    return files


def libraries(files: Mapping[str, bytes]) -> list[str]:
    """Installed distributions that a package's own code imports, sorted; [] where it has none."""
    code = _code_of(files)
    if not code:
        return []
    installed = packages_distributions()
    own = {path.partition("/")[0].removesuffix(".py") for path in code}
    needed: set[str] = set()
    for path, source in code.items():
        for name in _imports(source, path, _name_of(path)):
            first = name.partition(".")[0]
            if first not in own | {"raypipe"}:
                needed.update(installed.get(first, ()))
    return sorted(needed)


@contextmanager
def importable(files: Mapping[str, bytes]) -> Iterator[None]:
    """Inside the block, imports of packed modules come from the package's files, and only from
    them. Afterwards the names mean again what they meant before.

    files: of a package. Without code among them, nothing changes.
    """
    code = _code_of(files)
    if not code:
        yield
        return
    own = {path.partition("/")[0].removesuffix(".py") for path in code}
    with _one_at_a_time:
        before = _take(own)
        finder = _Finder(code, own)
        sys.meta_path.insert(0, finder)
        # It keeps factories by name.
        resolve.cache_clear()
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            resolve.cache_clear()
            _take(own)
            sys.modules.update(before)


def require_alone(files: Mapping[str, bytes], factory: str, predict: Callable[[], object]) -> None:
    """Raise DataError if `predict` fails where packed modules cannot be imported any more, as on a
    machine that has the package alone.

    files: of a package. predict: of a model that was built inside `importable`.
    """
    try:
        with _gone(files), torch.inference_mode():
            predict()
    except Exception as e:  # the user's code raises anything
        raise DataError(
            f"The model cannot predict with its package alone: {one_line(e)}",
            got=factory,
            rule="Modules of your own can be imported while the model is built from its package, "
            "and not when it predicts",
            fix="Import them at the top of the file, not inside forward()",
        ) from e


@contextmanager
def _gone(files: Mapping[str, bytes]) -> Iterator[None]:
    own = {path.partition("/")[0].removesuffix(".py") for path in _code_of(files)}
    with _one_at_a_time:
        before = _take(own)
        finder = _Gone(own)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            sys.modules.update(before)


class _Gone(MetaPathFinder):
    """Modules of these top packages do not exist."""

    def __init__(self, own: set[str]) -> None:
        self._own = own

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self._own:
            raise ModuleNotFoundError(f"{name} is imported when the model predicts", name=name)
        return None


class _Finder(MetaPathFinder):
    """Finds modules in a package's files; other modules of the same top packages do not exist."""

    def __init__(self, code: Mapping[str, bytes], own: set[str]) -> None:
        self._code = code
        self._own = own

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._own:
            return None
        stem = name.replace(".", "/")
        for file, is_package in ((f"{stem}/{_INIT}", True), (f"{stem}.py", False)):
            if file in self._code:
                return spec_from_loader(name, _Loader(self._code[file], is_package, file))
        # A folder of modules needs no __init__.py.
        if any(file.startswith(f"{stem}/") for file in self._code):
            return spec_from_loader(name, _Loader(b"", True))
        raise ModuleNotFoundError(
            f"the model package holds no module {name!r}: "
            "its factory must import it by name, from Python source",
            name=name,
        )


class _Loader(InspectLoader):
    def __init__(self, source: bytes, is_package: bool, file: str = "<nothing>") -> None:
        self._source = source
        self._is_package = is_package
        self._file = file

    def get_code(self, fullname: str) -> CodeType:
        # With the file's name: a traceback then says where the user's code failed.
        return self.source_to_code(self._source, self._file)

    def get_source(self, fullname: str) -> str:
        return self._source.decode("utf-8")

    def is_package(self, fullname: str) -> bool:
        return self._is_package


def _take(own: set[str]) -> dict[str, Any]:
    """Remove the modules of these top packages from sys.modules, and return them."""
    names = [name for name in sys.modules if name.partition(".")[0] in own]
    return {name: sys.modules.pop(name) for name in names}


def _code_of(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The packed code among a package's files, by its path below the folder of code."""
    return {
        name.removeprefix(FOLDER): source
        for name, source in files.items()
        if name.startswith(FOLDER)
    }


def _is_library(top: str, installed: Mapping[str, Any]) -> bool:
    """Does another way than packing provide this top-level name?"""
    return top in sys.stdlib_module_names or top in installed or top == "raypipe"


def _source(name: str) -> tuple[str, bytes] | None:
    """The path of a module, as a package keeps it, and its source; None where it has none."""
    try:
        spec = find_spec(name)
    except (ImportError, AttributeError, ValueError):
        # `from package import name`: name is no module.
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    stem = name.replace(".", "/")
    is_package = spec.submodule_search_locations is not None
    path = f"{stem}/{_INIT}" if is_package else f"{stem}.py"
    try:
        return path, Path(spec.origin).read_bytes()
    except OSError:  # in a zip
        return None


def _imports(source: bytes, path: str, name: str) -> list[str]:
    """All modules that a source may import; names that are no modules may be among them."""
    package = name if path.endswith(_INIT) else name.rpartition(".")[0]
    found: list[str] = []
    try:
        tree = ast.parse(source)
    except SyntaxError:
        # The import of this module will say so, if anybody imports it.
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                # One dot is the package itself, each further one its parent.
                parts = package.split(".")
                above = ".".join(parts[: len(parts) - node.level + 1])
                base = f"{above}.{base}".strip(".")
            found.append(base)
            found += [f"{base}.{alias.name}" for alias in node.names if alias.name != "*"]
    return found


def _name_of(path: str) -> str:
    """a/b/__init__.py -> a.b; a/b.py -> a.b"""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _no_source(module: str) -> DataError:
    return DataError(
        "The model's module cannot be packed with its weights",
        got=module,
        rule="A package holds the Python source of a file: factory, so that others can load it",
        fix="Put the factory into a .py file",
    )
