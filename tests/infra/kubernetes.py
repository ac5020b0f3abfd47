"""Kubernetes' own types, strict: the JSON schemas of 1.37 that the package kubernetes-validate
carries, read from its wheel. Its 17,000 files are not unpacked.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import uuid
import zipfile
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from tests.infra import kuberay

PACKAGE = "kubernetes-validate==1.37.0"
FOLDER = "kubernetes_validate/kubernetes-json-schema/v1.37.0-local-strict"
CACHE = Path.home() / ".cache" / "raypipe"
INSTALLS_S = 300
RESOURCES = {"cpu", "memory", "storage", "ephemeral-storage", "nvidia.com/gpu"}


def wheel(package: str) -> Path:
    """The wheel of NAME==VERSION, from the cache or the package index. Fails if it is not to be
    had: a manifest that was not checked is no manifest that passed.
    """
    folder = CACHE / package.replace("==", "-")
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}")
        get = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
        ]
        done = subprocess.run(
            [*get, "--dest", str(partial), package],
            capture_output=True,
            text=True,
            timeout=INSTALLS_S,
        )
        assert done.returncode == 0, done.stderr[-500:]
        partial.replace(folder)
    (found,) = folder.glob("*.whl")
    return found


@functools.cache
def _definitions() -> dict[str, Any]:
    with zipfile.ZipFile(wheel(PACKAGE)) as files:
        tree: dict[str, Any] = json.loads(files.read(f"{FOLDER}/_definitions.json"))
    return tree["$defs"]


@functools.cache
def _validator(kind: str) -> Draft202012Validator:
    if kind in kuberay.SPECS:
        meta = {"$ref": "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
        version = kuberay.choice("ray.io/v1")
        known = {"apiVersion": version, "kind": kuberay.TEXT, "metadata": meta}
        required = ("apiVersion", "kind", "metadata", "spec")
        schema = kuberay.fields(*required, **known, spec=kuberay.SPECS[kind])
    else:
        groups = {"CronJob": "batch.v1", "PersistentVolumeClaim": "core.v1"}
        schema = {"$ref": f"#/$defs/io.k8s.api.{groups[kind]}.{kind}", "required": ["kind", "spec"]}
    return Draft202012Validator({**schema, "$defs": _definitions()})


def problems(tree: dict[str, Any]) -> list[str]:
    """What Kubernetes' and KubeRay's schemas say against a manifest. A kind that is not known is a
    problem, too.
    """
    kind = str(tree.get("kind"))
    versions = {"CronJob": "batch/v1", "PersistentVolumeClaim": "v1"}
    if kind not in versions and kind not in kuberay.SPECS:
        return [f"kind {kind} is not known"]
    found = []
    if (version := tree.get("apiVersion")) != versions.get(kind, "ray.io/v1"):
        found.append(f"apiVersion {version} is not that of {kind}")
    for error in _validator(kind).iter_errors(tree):
        found += [f"{each.json_path}: {each.message}" for each in _deepest(error)]
    return found


def _deepest(error: Any) -> list[Any]:
    return [inner for each in error.context for inner in _deepest(each)] or [error]
