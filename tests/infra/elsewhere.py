"""What is wrong with a file of infra/ray: `problems(path, text)` names each.

Fields go through the schemas that the makers publish: Kubernetes' and KubeRay's (kubernetes.py),
Kubeflow Trainer's models, Ray's launcher schema with AWS' and Azure's own parameters, Anyscale's
JobConfig. Then come names that refer to something: volumes, claims, secrets and their keys, ports,
variables, options of `ray start`, raypipe's commands and settings.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, get_args

import click
import tomllib
import typer
import yaml
from pydantic import BaseModel, ValidationError

from raypipe.cluster.connect import ENV
from raypipe.config import load
from raypipe.errors import RaypipeError
from raypipe.job import Job
from raypipe.main import app as raypipe_app
from tests.infra import kubernetes

ROOT = Path(__file__).parents[2]
RAY = ROOT / "infra" / "ray"
EXAMPLE = ROOT / "jobs" / "configs" / "solar.yaml"
README = (RAY / "README.md").read_text("utf-8")
PLACEHOLDER = re.compile(r"\$\{([A-Z][A-Z0-9_]*):\?([^{}]*)\}")
MADE = re.compile(
    r"kubectl create (secret generic|configmap) ([\w-]+)((?: +\\\n)?(?: +--from-\S+)+)"
)
ANYSCALE = "anyscale==0.26.112"
# Variables that a file may set, beside those that raypipe sets itself.
VARIABLES = {
    *ENV,
    "RAYPIPE_SERVE_TOKEN",
    "RAY_JOB_STOP_WAIT_TIME_S",
    "MLFLOW_TRACKING_TOKEN",
}
VALUES = {
    "RAYPIPE_VERB": "train",
    "RAYPIPE_IMAGE": "registry.example/raypipe@sha256:" + "0" * 64,
    "RAYPIPE_SERVER_IMAGE": "registry.example/raypipe-server:1",
    "RAYPIPE_STORAGE_CLASS": "shared",
    "RAYPIPE_WHEEL_DIR": "dist",
    "RAYPIPE_AMI": "ami-0123456789abcdef0",
    "RAYPIPE_RESOURCE_GROUP": "raypipe-ray",
    "RAYPIPE_CONFIG_DIR": "mine",
    "AWS_REGION": "eu-central-1",
    "AZURE_LOCATION": "westeurope",
    "ANYSCALE_COMPUTE": "gpu:1",
}


def files() -> list[Path]:
    """All YAML files of infra/ray but the runtime environment, which tests/test_infra.py checks."""
    found = sorted([*RAY.rglob("*.yaml"), *RAY.rglob("*.yml")])
    return [path for path in found if path.name != "runtime_env.yaml"]


def problems(path: Path, text: str) -> list[str]:
    """What is wrong with a file of this path and text; none if it is right."""
    found = [
        f"placeholder {name} is not in the README"
        for name, _ in PLACEHOLDER.findall(text)
        if f"`{name}`" not in README
    ]
    text = PLACEHOLDER.sub(lambda placed: VALUES.get(placed[1], "unset"), text)
    found += [f"{left} is no placeholder" for left in re.findall(r"\$\{[^}]*\}?", text)]
    try:
        trees = [tree for tree in yaml.safe_load_all(text) if tree is not None]
    except yaml.YAMLError as e:
        return [*found, f"not YAML: {e}"]
    check = {
        "kuberay": _kubernetes,
        "kubeflow": _train_job,
        "launcher": _launcher,
        "anyscale": _anyscale,
        "ray": _conda,
    }[path.parent.name]
    for tree in trees:
        found += check(tree)
    return found if trees else [*found, "no document"]


def _kubernetes(tree: dict[str, Any]) -> list[str]:
    found = kubernetes.problems(tree)
    if found:
        return found  # the rest takes the fields for right
    for pod in _pods(tree):
        found += _pod(pod)
    spec = tree.get("spec")
    spec = spec if isinstance(spec, dict) else {}
    if "entrypoint" in spec:
        found += command(shlex.split(spec["entrypoint"]))
    if "runtimeEnvYAML" in spec:
        found += _runtime_env(yaml.safe_load(spec["runtimeEnvYAML"]))
    if "serveConfigV2" in spec:
        found += _serve_config(yaml.safe_load(spec["serveConfigV2"]), tree)
    for key in ("submissionMode", "concurrencyPolicy"):
        known = {*kubernetes.kuberay.SUBMISSION_MODES, "Allow", "Forbid", "Replace"}
        if spec.get(key, "Allow") not in known:
            found.append(f"{key} {spec[key]} is not known")
    return found + list(_quantities(tree)) + list(_ray_start_params(tree)) + list(_secrets(tree))


def _pods(tree: Any) -> Iterator[dict[str, Any]]:
    """Each pod's specification, at any depth."""
    if isinstance(tree, dict):
        if "containers" in tree and isinstance(tree["containers"], list):
            yield tree
        for value in tree.values():
            yield from _pods(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _pods(value)


def _pod(pod: dict[str, Any]) -> Iterator[str]:
    """References inside a pod, and what every pod of raypipe keeps to."""
    volumes = {volume.get("name"): volume for volume in pod.get("volumes", [])}
    mounted = set()
    names = [port.get("name") for box in pod["containers"] for port in box.get("ports", [])]
    for container in pod["containers"]:
        for mount in container.get("volumeMounts", []):
            mounted.add(mount.get("name"))
            if mount.get("name") not in volumes:
                yield f"volumeMount {mount.get('name')}: no such volume"
        for kind in ("readinessProbe", "livenessProbe"):
            port = container.get(kind, {}).get("httpGet", {}).get("port")
            if isinstance(port, str) and port not in names:
                yield f"{kind} asks port {port}: no such port"
        for variable in container.get("env", []):
            if variable.get("name") not in VARIABLES:
                yield f"variable {variable.get('name')} is not known"
        if "args" in container:
            yield from command(container["args"])
        context = container.get("securityContext", {})
        if context.get("allowPrivilegeEscalation") is not False:
            yield f"{container.get('name')}: allowPrivilegeEscalation is not false"
        if context.get("readOnlyRootFilesystem") is not True:
            yield f"{container.get('name')}: readOnlyRootFilesystem is not true"
        if context.get("capabilities") != {"drop": ["ALL"]}:
            yield f"{container.get('name')}: capabilities are not dropped"
    for name in sorted(str(name) for name in set(volumes) - mounted):
        yield f"volume {name} is mounted nowhere"
    for name, volume in volumes.items():
        if (claim := volume.get("persistentVolumeClaim", {}).get("claimName")) not in (
            None,
            _claim(),
        ):
            yield f"volume {name}: no claim {claim}"
        if (config := volume.get("configMap", {}).get("name")) not in (None, *_made("configmap")):
            yield f"volume {name}: no configmap {config}"
    security = pod.get("securityContext", {})
    if security.get("runAsNonRoot") is not True or security.get("runAsUser") != 1000:
        yield "a pod may run as root: runAsNonRoot, runAsUser"
    if security.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "a pod without seccompProfile RuntimeDefault"


@functools.cache
def _claim() -> str:
    tree = yaml.safe_load(PLACEHOLDER.sub("x", (RAY / "kuberay" / "storage.yaml").read_text()))
    return str(tree["metadata"]["name"])


@functools.cache
def _made(kind: str) -> dict[str, set[str]]:
    """The secrets or config maps that the README's commands make, with their keys."""
    made = {}
    for found, name, options in MADE.findall(README):
        if found.startswith(kind):
            made[name] = set(re.findall(r"--from-(?:file|literal)=([\w.]+)=", options))
    return made


def _secrets(tree: Any) -> Iterator[str]:
    """References to a Secret that no command of the README makes, or to a key that it has not."""
    made = _made("secret")
    if isinstance(tree, dict):
        for key in ("secretKeyRef", "secretRef"):
            if isinstance(secret := tree.get(key), dict):
                if secret.get("name") not in made:
                    yield f"{key}: no secret {secret.get('name')}"
                elif not secret.get("optional") and secret.get("key") not in (
                    None,
                    *made[secret["name"]],
                ):
                    yield f"{key}: secret {secret['name']} has no key {secret['key']}"
        if isinstance(name := tree.get("secretName"), str) and name not in made:
            yield f"secretName: no secret {name}"
    for value in (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    ):
        yield from _secrets(value)


def _quantities(tree: Any) -> Iterator[str]:
    """Names of resources: a misspelt one would be a resource that no node has."""
    if isinstance(tree, dict):
        for key in ("requests", "limits"):
            for name in tree.get(key) or {}:
                if name not in kubernetes.RESOURCES:
                    yield f"{key}: no resource {name}"
    for value in (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    ):
        yield from _quantities(value)


def _ray_start_params(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        for name in tree.get("rayStartParams") or {}:
            if f"--{name}" not in _ray_start_options():
                yield f"rayStartParams: `ray start` has no option {name}"
    for value in (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    ):
        yield from _ray_start_params(value)


@functools.cache
def _ray_start_options() -> set[str]:
    from ray.scripts.scripts import start

    return {option for parameter in start.params for option in parameter.opts}


def _runtime_env(tree: dict[str, Any]) -> Iterator[str]:
    from ray.runtime_env import RuntimeEnv

    for name in set(tree) - set(RuntimeEnv.known_fields):
        yield f"runtime environment: unknown field {name}"
    for name in tree.get("env_vars", {}):
        if name not in VARIABLES:
            yield f"runtime environment: variable {name} is not known"


def _serve_config(tree: dict[str, Any], manifest: dict[str, Any]) -> Iterator[str]:
    """Ray Serve's own schema, the import path, its arguments, and the port of the service."""
    from ray.serve.schema import ServeDeploySchema

    from raypipe.work.ray_service import ServiceArgs

    # Ray Serve drops what it does not know.
    yield from _unknown(ServeDeploySchema, tree, "serveConfigV2")
    try:
        config = ServeDeploySchema(**tree)
    except (ValidationError, TypeError) as e:
        yield f"serveConfigV2: {e}"
        return
    for application in config.applications:
        module, _, name = application.import_path.partition(":")
        try:
            getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as e:
            yield f"import_path {application.import_path}: {e}"
        try:
            args = ServiceArgs.model_validate(application.args)
        except ValidationError as e:
            yield f"args: {e}"
            continue
        yield from _settings(args.config, list(args.overrides))
        settings = dict(override.split("=", 1) for override in args.overrides)
        head, *_ = _pods(manifest["spec"]["rayClusterConfig"]["headGroupSpec"])
        ports = [port.get("name") for port in head["containers"][0].get("ports", [])]
        if "serve" not in ports:
            yield f"the head has no port serve, of which KubeRay makes the service: {ports}"
        for pod in _pods(manifest):
            for port in (port for box in pod["containers"] for port in box.get("ports", [])):
                if port.get("name") == "serve" and str(port["containerPort"]) != settings.get(
                    "serve.port"
                ):
                    yield f"port serve is {port['containerPort']}, not serve.port"


def command(words: list[str]) -> list[str]:
    """What is wrong with a command line of raypipe: its verb, options, settings."""
    program, *rest = words
    if program == "raypipe":
        line = rest
    elif program in _scripts():
        line = [program.removeprefix("raypipe-"), *rest]
    else:
        return [f"{program} is no command of raypipe"]
    group = typer.main.get_command(raypipe_app)
    try:
        with click.Context(group, info_name="raypipe") as context:
            verb, found, arguments = group.resolve_command(context, line)  # type: ignore[attr-defined]
            given = found.make_context(verb, arguments, parent=context)
    except (click.ClickException, click.exceptions.Exit, Exception) as e:
        return [f"{' '.join(words)}: {getattr(e, 'message', None) or e}"]
    config = given.params.get("config")
    return list(_settings(str(config), given.params.get("overrides") or []))


def _settings(config: str, overrides: list[str]) -> Iterator[str]:
    if Path(config).name != "config.yaml":
        yield f"{config} is not the config.yaml that the README makes"
    if "/" in config and not config.startswith("/etc/raypipe/"):
        yield f"{config} is not where the configuration is mounted"
    try:
        load(Job, EXAMPLE, overrides)
    except RaypipeError as e:
        yield f"{' '.join(overrides)}: {e}"


@functools.cache
def _scripts() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return set(project["scripts"])


def _train_job(tree: dict[str, Any]) -> list[str]:
    """Kubeflow Trainer's models keep what they do not know, so fields are compared first."""
    from kubeflow_trainer_api import models

    if (of := (tree.get("apiVersion"), tree.get("kind"))) != (
        "trainer.kubeflow.org/v1alpha1",
        "TrainJob",
    ):
        return [f"apiVersion and kind {of} are not those of a TrainJob"]
    found = list(_unknown(models.TrainerV1alpha1TrainJob, tree, "$"))
    try:
        models.TrainerV1alpha1TrainJob.from_dict(tree)
    except ValidationError as e:
        found.append(str(e))
    if found:
        return found
    spec = tree.get("spec", {})
    trainer = spec.get("trainer", {})
    found += command([*trainer.get("command", []), *trainer.get("args", [])] or ["nothing"])
    # The runtime that Trainer installs has one job `node` with one container `node`.
    if spec.get("runtimeRef", {}).get("name") != "torch-distributed":
        found.append(f"no runtime {spec.get('runtimeRef', {}).get('name')}")
    for pod in _pods(tree):
        found += _pod(pod)
    boxes = [box for pod in _pods(tree) for box in pod["containers"]]
    found += [f"no container {box.get('name')}" for box in boxes if box.get("name") != "node"]
    # Trainer refuses variables of this container in a patch: they belong to trainer.env.
    found += [f"{box['name']} has env in a patch" for box in boxes if "env" in box]
    for variable in trainer.get("env", []):
        if variable.get("name") not in VARIABLES:
            found.append(f"variable {variable.get('name')} is not known")
    jobs = [job for job in _named(tree, "replicatedJobs") if job.get("name") != "node"]
    found += [f"no replicated job {job.get('name')}" for job in jobs]
    return found + list(_quantities(tree)) + list(_secrets(tree))


def _named(tree: Any, key: str) -> Iterator[Any]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == key:
                yield from value
            yield from _named(value, key)
    elif isinstance(tree, list):
        for value in tree:
            yield from _named(value, key)


def _unknown(model: type[BaseModel], tree: Any, path: str) -> Iterator[str]:
    """Fields of `tree` that the model does not have, at any depth."""
    if not isinstance(tree, dict):
        yield f"{path}: {model.__name__} is no {type(tree).__name__}"
        return
    known = {field.alias or name: field for name, field in model.model_fields.items()}
    for name, value in tree.items():
        if name not in known:
            yield f"{path}: {model.__name__} has no field {name}"
            continue
        inner = _model_of(known[name].annotation)
        if inner is not None:
            for at, each in enumerate(value if isinstance(value, list) else [value]):
                yield from _unknown(inner, each, f"{path}.{name}[{at}]")


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        # A model without fields stands for a value of any type, as a quantity.
        wraps = {"actual_instance", "one_of_schemas"} & set(annotation.model_fields)
        return None if wraps or not annotation.model_fields else annotation
    # In a mapping the names are the user's.
    if getattr(annotation, "__origin__", None) is dict:
        return None
    found = [inner for each in get_args(annotation) if (inner := _model_of(each)) is not None]
    return found[0] if found else None


def _launcher(tree: dict[str, Any]) -> list[str]:
    """Ray's own launcher: its schema, defaults, and the cloud's own parameters."""
    from jsonschema.exceptions import ValidationError as SchemaError
    from ray.autoscaler._private.util import prepare_config, validate_config

    provider = tree.get("provider") or {}
    kind = provider.get("type")
    known = {"type", "cache_stopped_nodes"}
    known |= {"aws": {"region"}, "azure": {"location", "resource_group"}}.get(str(kind), set())
    found = [f"provider {kind} has no {name}" for name in sorted(set(provider) - known)]
    found += [f"provider {kind} needs {name}" for name in sorted(known - set(provider))]
    types = tree.get("available_node_types") or {}
    if (head := tree.get("head_node_type")) not in types:
        found.append(f"head_node_type {head} is none of {sorted(types)}")
    try:
        # It prints what it fills in.
        with (
            Path(os.devnull).open("w") as nowhere,
            redirect_stdout(nowhere),
            redirect_stderr(nowhere),
        ):
            validate_config(prepare_config(json.loads(json.dumps(tree))))
    except (SchemaError, ValueError, RuntimeError, KeyError) as e:
        found.append(getattr(e, "message", None) or repr(e))
    if found:
        return found
    for name, node in types.items():
        config = node.get("node_config") or {}
        found += _aws_node(name, config) if kind == "aws" else _azure_node(name, config)
        unknown = sorted(set(node.get("resources") or {}) - {"CPU", "GPU"})
        found += [f"{name}: no resource {resource}" for resource in unknown]
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        lines = [part for line in tree.get(key) or [] for part in line.split(";")]
        starts = [line for line in lines if " ray start" in line]
        found += [] if starts else [f"{key} starts no Ray"]
        for word in (word for line in starts for word in shlex.split(line)):
            option = word.partition("=")[0]
            if option.startswith("--") and option not in _ray_start_options():
                found.append(f"`ray start` has no option {option}")
        for line in starts:
            name, _, value = line.split(" ray start")[0].strip().rpartition("=")
            if (name, value) != ("RAY_AUTH_MODE", "token"):
                found.append(f"{key}: Ray starts without RAY_AUTH_MODE=token: {name}={value}")
    return found


def _aws_node(name: str, config: dict[str, Any]) -> Iterator[str]:
    """What botocore's model of EC2 RunInstances says, which the launcher calls with this."""
    import botocore.loaders
    import botocore.model
    import botocore.validate

    global_model = _ec2()
    shape = global_model.operation_model("RunInstances").input_shape
    given = {"MinCount": 1, "MaxCount": 1, **config}
    report = botocore.validate.ParamValidator().validate(given, shape)
    if report.has_errors():
        yield f"{name}: {report.generate_report()}"
    market = config.get("InstanceMarketOptions", {})
    if market and market.get("MarketType") not in ("spot", "capacity-block"):
        yield f"{name}: no market {market.get('MarketType')}"


@functools.cache
def _ec2() -> Any:
    import botocore.loaders
    import botocore.model

    return botocore.model.ServiceModel(
        botocore.loaders.Loader().load_service_model("ec2", "service-2")
    )


def _azure_node(name: str, config: dict[str, Any]) -> Iterator[str]:
    """The parameters of the ARM template that Ray deploys with this."""
    import ray.autoscaler._private._azure as azure

    template = json.loads((Path(azure.__path__[0]) / "azure-vm-template.json").read_text())
    # The launcher puts these into the template's resources itself.
    known = {*template["parameters"], "billingProfile", "availability_zone"}
    for key in set(config) - {"azure_arm_parameters"}:
        yield f"{name}: node_config has no {key}"
    given = config.get("azure_arm_parameters") or {}
    for key in sorted(set(given) - known):
        yield f"{name}: the ARM template has no parameter {key}"
    for key in set(given.get("billingProfile") or {}) - {"maxPrice"}:
        yield f"{name}: billingProfile has no {key}"


def _anyscale(tree: dict[str, Any]) -> list[str]:
    """Anyscale's JobConfig, in an environment of its own: its package brings half a cloud."""
    script = """import json, sys
from anyscale.job.models import JobConfig
try:
    JobConfig.from_dict(json.load(sys.stdin))
except Exception as e:
    print(f"{type(e).__name__}: {e}")
"""
    python = environment(ANYSCALE) / "bin" / "python"
    done = subprocess.run(
        [str(python), "-c", script],
        input=json.dumps(tree),
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = [done.stdout.strip()] if done.stdout.strip() else []
    if done.returncode:
        found.append(done.stderr[-300:])
    found += command(shlex.split(str(tree.get("entrypoint", "nothing"))))
    found += [
        f"variable {name} is not known"
        for name in tree.get("env_vars") or {}
        if name not in VARIABLES
    ]
    return found


def environment(package: str) -> Path:
    """A virtual environment with one package, made once. Fails if it cannot be made."""
    home = kubernetes.CACHE / package.replace("==", "-env-")
    if not home.exists():
        partial = home.with_name(f"{home.name}.{uuid.uuid4().hex[:8]}")
        subprocess.run([sys.executable, "-m", "venv", str(partial)], check=True, timeout=120)
        pip = [str(partial / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
        done = subprocess.run([*pip, package], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-500:]
        partial.replace(home)
    return home


def _conda(tree: dict[str, Any]) -> Iterator[str]:
    """environment.yml: conda's own keys, and what its pip section names."""
    for key in set(tree) - {"name", "channels", "dependencies"}:
        yield f"environment.yml has no {key}"
    for item in tree.get("dependencies") or []:
        if isinstance(item, dict):
            for key in set(item) - {"pip"}:
                yield f"dependencies have no {key}"
            for line in item.get("pip") or []:
                option, _, file = line.partition(" ")
                if option != "--requirement" or not (RAY / file).is_file():
                    yield f"pip: {line} is not --requirement and a file"
        elif not re.fullmatch(r"(python=3\.1[123]|pip)", item):
            yield f"conda: {item} is not among python and pip"
    if tree.get("channels") != ["conda-forge"] or not tree.get("dependencies"):
        yield "environment.yml: channels, dependencies"
