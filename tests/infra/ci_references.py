"""What a CI template names, against what there is: inputs, outputs, variables, files and commands.

Linters know the syntax: actionlint and the JSON schemas. None of them knows this repository, and
none reads Azure DevOps's references. Each problem names the word that nothing has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

# Inputs of the actions at the pinned commits, as their action.yml has them.
ACTIONS = {
    "actions/checkout": {"persist-credentials", "ref", "fetch-depth", "path"},
    "actions/setup-python": {"python-version", "cache"},
    "actions/upload-artifact": {"name", "path", "if-no-files-found", "retention-days"},
    "azure/login": {"client-id", "tenant-id", "subscription-id"},
    "databricks/setup-cli": {"version"},
    "hashicorp/setup-terraform": {"terraform_version", "terraform_wrapper"},
}
STAGES = {"sit", "uat", "prod"}
# Of a runner.
GITHUB_ENV = {"RUNNER_TEMP", "GITHUB_OUTPUT"}
AZURE_NAMES = {"Build.Reason", "Build.SourceBranch", "Build.SourceBranchName"}
AZURE_NAMES |= {"Agent.TempDirectory", "System.AccessToken"}
# Keys of Azure DevOps that the templates use: its schema finds another one, and names none.
AZURE_KEYS = {"trigger", "branches", "include", "pool", "vmImage", "stages", "stage", "jobs", "job"}
AZURE_KEYS |= {"displayName", "dependsOn", "condition", "deployment", "environment", "variables"}
AZURE_KEYS |= {"group", "name", "value", "strategy", "runOnce", "deploy", "steps", "script", "env"}
AZURE_KEYS |= {"checkout", "persistCredentials", "task", "inputs", "publish", "artifact", "type"}
AZURE_KEYS |= {"template", "parameters", "values", "default", "timeoutInMinutes"}
AZURE_KEYS |= {"workingDirectory", "versionSpec", "azureSubscription", "scriptType"}
AZURE_KEYS |= {"scriptLocation", "addSpnToEnvironment", "inlineScript"}
# AzureCLI@2 with addSpnToEnvironment.
AZURE_ENV = {"idToken", "servicePrincipalId", "tenantId", "AGENT_TEMPDIRECTORY"}
FUNCTIONS = {"and", "or", "not", "eq", "ne", "succeeded", "failed", "always"}
# What a tool reads from its environment by itself.
READ = {"DATABRICKS_AUTH_TYPE", "DATABRICKS_HOST", "DATABRICKS_CLIENT_ID", "SYSTEM_ACCESSTOKEN"}
READ |= {"ARM_USE_OIDC", "ARM_CLIENT_ID", "ARM_TENANT_ID", "ARM_SUBSCRIPTION_ID", "ARM_OIDC_TOKEN"}
READ |= {"AZURE_USE_AZURE_CLI"}
AUTH = {"github-oidc", "azure-devops-oidc", "azure-cli"}
BUNDLE = {"validate", "deploy", "run", "summary", "destroy"}
TERRAFORM = {"fmt", "init", "validate", "plan", "apply", "output", "destroy"}


@dataclass(frozen=True)
class Repository:
    """What the templates may name: targets of make, verbs, jobs and variables of the bundle, and
    outputs of infra/ci/model.py."""

    root: Path
    targets: frozenset[str]
    verbs: frozenset[str]
    jobs: frozenset[str]
    variables: frozenset[str]
    outputs: frozenset[str] = frozenset({"exists", "name", "version"})

    @classmethod
    def read(cls, root: Path, verbs: frozenset[str]) -> Repository:
        bundle = root / "infra" / "databricks"
        jobs: set[str] = set()
        for file in bundle.glob("resources/*.yml"):
            jobs |= set(yaml.safe_load(file.read_text("utf-8"))["resources"].get("jobs", {}))
        variables = yaml.safe_load((bundle / "databricks.yml").read_text("utf-8"))["variables"]
        made = re.findall(r"^([a-z][\w-]*):", (root / "Makefile").read_text("utf-8"), re.M)
        return cls(root, frozenset(made), verbs, frozenset(jobs), frozenset(variables))


# Commands


def commands(script: str, folder: str, here: Repository) -> list[str]:
    """Parts of a script that do not exist: a target, verb, job, stage, path or subcommand."""
    found = []
    script = script.replace("\\\n", " ")
    for line in script.splitlines():
        for target in re.findall(r"\bmake ([\w-]+)", line):
            found += [] if target in here.targets else [f"make {target}"]
        verb = re.match(r"\s*raypipe ([\w-]+)", line)
        if verb and verb[1] not in here.verbs:
            found.append(f"raypipe {verb[1]}")
        bundle = re.search(r"databricks (\w+) ([\w-]+)(.*)", line)
        if bundle:
            found += _bundle(*bundle.groups(), here)
        terraform = re.search(r'terraform -chdir="?([^"\s]+)"? (\S+)', line)
        if terraform:
            folders = [terraform[1]]
            if "$STAGE" in terraform[1]:
                folders = [terraform[1].replace("$STAGE", stage) for stage in sorted(STAGES)]
            found += [f"folder {one}" for one in folders if not (here.root / one).is_dir()]
            if terraform[2] not in TERRAFORM:
                found.append(f"terraform {terraform[2]}")
        elif re.match(r"\s*terraform\b", line):
            found.append(f"terraform without -chdir: {line.strip()}")
        for path in re.findall(
            r"(?<![\w$./-])((?:\.\./|infra/|jobs/)[\w./-]+\.(?:py|txt|yaml))", line
        ):
            if not (here.root / folder / path).is_file():
                found.append(f"file {path}")
        known = (
            r"\s*(make|raypipe|databricks|terraform|python|git|sudo|set|export|printf|if|fi|-)\b"
        )
        if line.strip() and not line.startswith("  ") and not re.match(known, line):
            found.append(f"command {line.split()[0]}")
    return found


def _bundle(group: str, verb: str, rest: str, here: Repository) -> list[str]:
    if group != "bundle" or verb not in BUNDLE:
        return [f"databricks {group} {verb}"]
    words = rest.replace('"', "").split()
    options = [word for word in words if word.startswith("--")]
    known = {"--target", "--strict", "--output", "--params"}
    found = [f"option {one}" for one in options if one not in known]
    if verb == "run":
        job = words[words.index("--target") + 2] if "--target" in words else "no target"
        found += [] if job in here.jobs else [f"job {job}"]
    return found


def _env(name: str, used: set[str], here: Repository) -> list[str]:
    if name.startswith("BUNDLE_VAR_"):
        is_known = name.removeprefix("BUNDLE_VAR_") in here.variables
    else:
        is_known = name in READ or name in used
    return [] if is_known else [f"env {name}"]


def _shell(script: str) -> set[str]:
    """The environment variables that a script reads, and the login that it sets."""
    return set(re.findall(r"(?<!\\)\$\{?([A-Za-z_]\w*)", script))


# GitHub Actions


def github(files: Mapping[str, str], here: Repository) -> list[str]:
    """Problems of the workflows in `files` (name to text)."""
    found: list[str] = []
    trees = {name: yaml.load(text, yaml.BaseLoader) for name, text in files.items()}
    told = set(re.findall(r"\b[A-Z][A-Z_]{3,}\b", " ".join(_comments(t) for t in files.values())))
    for name, tree in trees.items():
        for key, job in tree["jobs"].items():
            where = f"{name}: {key}: "
            made = _github_job(name, job, trees, here)
            made += _github_names(files[name], tree, job, told)
            found += [where + one for one in dict.fromkeys(made)]
    return found


def _comments(text: str) -> str:
    return " ".join(re.findall(r"#(.*)", text))


def _github_job(
    name: str, job: dict[str, Any], trees: Mapping[str, Any], here: Repository
) -> list[str]:
    found: list[str] = []
    if "uses" in job:
        called = job["uses"].removeprefix("./.github/workflows/")
        if called == job["uses"] or called not in trees:
            return [f"workflow {job['uses']}"]
        wants = (trees[called]["on"]["workflow_call"] or {}).get("inputs", {})
        given = job.get("with", {})
        found += [f"input {one}" for one in set(given) - set(wants)]
        needed = {one for one, spec in wants.items() if spec.get("required") == "true"}
        found += [f"missing input {one}" for one in needed - set(given)]
        if given.get("stage", "sit") not in STAGES:
            found.append(f"stage {given['stage']}")
        return found
    folder = job.get("defaults", {}).get("run", {}).get("working-directory", "")
    if not (here.root / folder).is_dir():
        found.append(f"folder {folder}")
    for stage in job.get("strategy", {}).get("matrix", {}).get("stage", ()):
        found += [] if stage in STAGES else [f"stage {stage}"]
    scripts = [step["run"] for step in job["steps"] if "run" in step]
    used: set[str] = set().union(*map(_shell, scripts)) if scripts else set()
    env = job.get("env", {})
    found += [f"${one}" for one in used - set(env) - GITHUB_ENV]
    for one, value in env.items():
        found += _env(one, used, here)
        if one == "DATABRICKS_AUTH_TYPE" and value not in AUTH:
            found.append(f"login {value}")
    for step in job["steps"]:
        if "uses" in step:
            action, _, version = step["uses"].partition("@")
            if not re.fullmatch(r"[0-9a-f]{40}", version):
                found.append(f"not pinned: {step['uses']}")
            if action not in ACTIONS:
                found.append(f"action {action}")
            for one in set(step.get("with", {})) - ACTIONS.get(action, set()):
                found.append(f"input {one}")
        found += commands(step.get("run", ""), folder, here)
    return found


def _github_names(
    text: str, tree: dict[str, Any], job: dict[str, Any], told: set[str]
) -> list[str]:
    """References in ${{ … }} and in conditions."""
    found: list[str] = []
    triggers = tree["on"] if isinstance(tree["on"], dict) else {}
    inputs: set[str] = set()
    for one in triggers.values():
        inputs |= set(one.get("inputs", {})) if isinstance(one, dict) else set()
    steps = {step["id"] for step in job.get("steps", ()) if "id" in step}
    matrix = set(job.get("strategy", {}).get("matrix", {}))
    for scope, name, *more in _expressions(job):
        if scope == "inputs" and name not in inputs:
            found.append(f"inputs.{name}")
        elif scope == "vars" and name not in told:
            # What an environment has to have is told in a comment.
            found.append(f"vars.{name}")
        elif scope == "matrix" and name not in matrix:
            found.append(f"matrix.{name}")
        elif scope == "steps":
            outputs = {"exists", "name", "version"}
            if name not in steps or more[:1] != ["outputs"] or more[1] not in outputs:
                found.append(f"steps.{name}.{'.'.join(more)}")
        elif scope not in ("inputs", "vars", "matrix", "steps", "github", "secrets"):
            found.append(f"{scope}.{name}")
        if scope == "secrets":
            found.append(f"a secret: {name}")
    return found


def _expressions(node: Any, key: str = "") -> Iterator[list[str]]:
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _expressions(value, name)
    elif isinstance(node, list):
        for one in node:
            yield from _expressions(one, key)
    elif isinstance(node, str):
        texts = re.findall(r"\$\{\{(.*?)\}\}", node)
        texts += [node] if key == "if" else []
        for text in texts:
            text = re.sub(r"'[^']*'", "", text)
            for match in re.findall(r"[A-Za-z_][\w-]*(?:\.[\w-]+)+", text):
                yield match.split(".")


# Azure DevOps


def azure(files: Mapping[str, str], here: Repository) -> list[str]:
    """Problems of a pipeline and its templates in `files` (path below its folder to text)."""
    trees = {name: yaml.load(text, yaml.BaseLoader) for name, text in files.items()}
    # What a variable group has to have is told in a comment.
    told = set(re.findall(r"\b[a-z]+(?:[A-Z]\w*)?\b", " ".join(map(_comments, files.values()))))
    found: list[str] = []
    for name, tree in trees.items():
        made = keys(files[name])
        made += _azure_references(name, tree, trees, told)
        for job in _jobs(tree):
            steps = [*_expanded(job["steps"], Path(name).parent, trees)]
            made += _azure_job({**job, "steps": steps}, here)
        if "stages" in tree:
            names = [one["stage"] for one in tree["stages"]]
            for stage in tree["stages"]:
                needs = stage.get("dependsOn", [])
                for one in [needs] if isinstance(needs, str) else needs:
                    made += [] if one in names else [f"dependsOn {one}"]
        found += [f"{name}: {one}" for one in dict.fromkeys(made)]
    return found


def keys(text: str) -> list[str]:
    """Keys of a pipeline or template that are unknown."""
    tree = yaml.load(text, yaml.BaseLoader)
    return [f"key {key}" for key in _keys(tree) if key not in AZURE_KEYS]


def _keys(node: Any) -> Iterator[str]:
    """All keys, but names that a template chooses itself: of parameters and of the environment."""
    if isinstance(node, dict):
        for key, value in node.items():
            if not key.startswith("${{"):
                yield key
            is_free = key == "env" or (key == "parameters" and isinstance(value, dict))
            yield from () if is_free else _keys(value)
    elif isinstance(node, list):
        for one in node:
            yield from _keys(one)


def _jobs(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Jobs of a pipeline or a template; the steps of a template are one, without variables."""
    if "steps" in tree:
        yield {"steps": tree["steps"], "variables": [{"name": "stage"}]}
    for stage in tree.get("stages", [tree]):
        for job in stage.get("jobs", ()):
            if "template" in job:
                continue
            steps = job.get("steps")
            if steps is None:
                steps = job["strategy"]["runOnce"]["deploy"]["steps"]
            yield {"steps": steps, "variables": job.get("variables", [])}


def _expanded(steps: list[Any], folder: Path, trees: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Steps, with those of templates in their places."""
    for step in steps:
        path = (folder / step["template"]).as_posix() if "template" in step else ""
        yield from trees.get(path, {}).get("steps", []) if path else [step]


def _flat(steps: list[Any]) -> Iterator[dict[str, Any]]:
    """Steps, and those behind ${{ if … }}."""
    for step in steps:
        behind = [value for key, value in step.items() if key.startswith("${{")]
        if behind:
            yield from _flat(behind[0])
        else:
            yield step


def _azure_job(job: dict[str, Any], here: Repository) -> list[str]:
    found: list[str] = []
    steps = list(_flat(job["steps"]))
    defined = {one["name"]: one.get("value", "") for one in job["variables"] if "name" in one}
    groups = [one["group"] for one in job["variables"] if "group" in one]
    for group in groups:
        stage = group.removeprefix("raypipe-")
        if stage not in STAGES and stage != "${{ parameters.stage }}":
            found.append(f"group {group}")
    if defined.get("stage", "sit") not in STAGES | {"${{ parameters.stage }}", ""}:
        found.append(f"stage {defined['stage']}")
    used: set[str] = set()
    for step in steps:
        inline = step.get("inputs", {}).get("inlineScript", "")
        script = step.get("script", "") + inline
        used |= _shell(inline) | set(re.findall(r"\$\((\w[\w.]*)\)", script))
        folder = step.get("workingDirectory", "")
        if not (here.root / folder).is_dir():
            found.append(f"folder {folder}")
        found += commands(script, folder, here)
        for login in re.findall(r"DATABRICKS_AUTH_TYPE=(\S+)", script):
            found += [] if login in AUTH else [f"login {login}"]
        for one in re.findall(r"\b([A-Z][A-Z_]+)=", inline):
            found += _env(one, used, here)
        for one in step.get("env", {}):
            found += _env(one, _shell(script), here)
        found += [f"${one}" for one in _shell(step.get("script", "")) - set(step.get("env", {}))]
        if "databricks" in script and "bundle" in script and "env" not in step:
            found.append(f"no SYSTEM_ACCESSTOKEN: {step.get('displayName')}")
    for name, value in defined.items():
        if name.isupper() or name.startswith("BUNDLE_VAR_"):
            found += _env(name, set(), here)
        elif name not in used and name.upper() not in used:
            found.append(f"unused {name}")
        if name == "DATABRICKS_AUTH_TYPE" and value not in AUTH:
            found.append(f"login {value}")
    return found


def _azure_references(
    name: str, tree: dict[str, Any], trees: Mapping[str, Any], told: set[str]
) -> list[str]:
    found: list[str] = []
    declared = {one["name"]: one for one in tree.get("parameters", ())}
    defined: set[str] = set()
    steps: set[str] = set()
    for job in _jobs(tree):
        defined |= {one["name"] for one in job["variables"] if "name" in one}
        steps |= {step["name"] for step in _flat(job["steps"]) if "name" in step}
    folder = Path(name).parent
    used: set[str] = set()
    for key, text in _texts(tree):
        parameters = set(re.findall(r"parameters\.(\w+)", text))
        used |= parameters
        found += [f"parameters.{one}" for one in parameters - set(declared)]
        for expression in re.findall(r"\$\{\{(.*?)\}\}", text):
            for one in re.findall(r"\b([a-zA-Z]\w*)\b(?=[.(])", expression):
                if one not in FUNCTIONS | {"parameters"}:
                    found.append(f"expression {one}")
        for one in re.findall(r"\$\((\w[\w.]*)\)", text):
            if one not in defined | AZURE_NAMES | told:
                found.append(f"$({one})")
        if key == "condition":
            for one in re.findall(r"([a-zA-Z]\w*)\(", text):
                found += [] if one in FUNCTIONS else [f"function {one}"]
            for one in re.findall(r"(\w+)\['", text):
                found += [] if one == "variables" else [f"condition {one}"]
            for one in re.findall(r"\['([^']+)'\]", text):
                step, _, output = one.partition(".")
                is_output = step in steps and output in {"exists", "name", "version"}
                found += [] if one in AZURE_NAMES | defined or is_output else [f"variable {one}"]
        if "inlineScript" in key:
            known = {word.upper() for word in told | {"stage"}} | AZURE_ENV | AZURE_NAMES
            made = set(re.findall(r"\b([A-Z][A-Z_]+)=", text))
            found += [f"${one}" for one in _shell(text) if one not in known | made]
    found += [f"unused parameter {one}" for one in set(declared) - used]
    for called in _templates(tree):
        path = (folder / called["template"]).as_posix()
        if path not in trees:
            found.append(f"template {called['template']}")
            continue
        wants = {one["name"]: one for one in trees[path].get("parameters", ())}
        given = called.get("parameters", {})
        found += [f"parameter {one}" for one in set(given) - set(wants)]
        needed = {one for one, spec in wants.items() if "default" not in spec}
        found += [f"missing parameter {one}" for one in needed - set(given)]
        for one, value in given.items():
            values = wants.get(one, {}).get("values")
            if values and value not in values:
                found.append(f"value {value}")
    return found


def _templates(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if isinstance(node.get("template"), str):
            yield node
        node = list(node.values())
    if isinstance(node, list):
        for one in node:
            yield from _templates(one)


def _texts(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, text) of all texts, and of the keys that are expressions."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name.startswith("${{"):
                yield "", name
            yield from _texts(value, name)
    elif isinstance(node, list):
        for one in node:
            yield from _texts(one, key)
    elif isinstance(node, str):
        yield key, node
