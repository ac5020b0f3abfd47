"""infra/ci/model.py against a server that answers as Unity Catalog's REST interface is documented.

It logs in with what the templates give it: an OIDC token of GitHub's, or of Azure DevOps's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import forked

ROOT = Path(__file__).parents[2]
NAME = "raypipe_uat.solar.cells"
Ask = Callable[..., tuple[int, dict[str, Any], str]]


@dataclass
class Workspace:
    """models: aliases by full name. refuses: (status, error_code, message) for all questions."""

    models: dict[str, dict[str, int]] = field(default_factory=dict)
    refuses: tuple[int, str, str] | None = None
    asked: list[str] = field(default_factory=list)
    host: str = ""


@pytest.fixture
def workspace() -> Iterator[Workspace]:
    state = Workspace()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            state.asked.append(self.path.partition("?")[0])
            if "oidctoken" in self.path and self.headers["Authorization"] == "Bearer of the run":
                self.answer(200, {"oidcToken": "vouched"})
            elif self.path.endswith("/token") and "subject_token=vouched" in body:
                token = {"access_token": "let in", "token_type": "Bearer", "expires_in": 3600}
                self.answer(200, token)
            else:
                self.answer(401, {"error": "invalid_grant", "error_description": body[:80]})

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            state.asked.append(path)
            if path == "/github":
                good = self.headers["Authorization"] == "Bearer of the run"
                self.answer(200 if good else 401, {"value": "vouched"})
            elif ".well-known" in path:
                ends = {"token_endpoint": f"{state.host}/oidc/v1/token"}
                ends["authorization_endpoint"] = f"{state.host}/oidc/v1/authorize"
                config = {"oidc_endpoint": f"{state.host}/oidc", "workspace_id": "1"}
                is_config = path.endswith("databricks-config")
                self.answer(200, config if is_config else ends)
            elif self.headers["Authorization"] != "Bearer let in":
                self.answer(401, {"error_code": "UNAUTHENTICATED", "message": "who are you?"})
            elif state.refuses:
                status, code, message = state.refuses
                self.answer(status, {"error_code": code, "message": message})
            else:
                self.model(path.rpartition("/")[2])

        def model(self, name: str) -> None:
            if name not in state.models:
                text = f"Registered Model '{name}' does not exist."
                self.answer(404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": text})
                return
            aliases = state.models[name].items()
            listed = [{"alias_name": alias, "version_num": number} for alias, number in aliases]
            self.answer(200, {"full_name": name, "name": "cells", "aliases": listed})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.host = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def _environment(workspace: Workspace, login: str) -> dict[str, str]:
    """Of a run in CI: what the template sets, and what GitHub or Azure DevOps sets."""
    env = {k: os.environ[k] for k in ("PATH", "HOME") if k in os.environ}
    env |= {"DATABRICKS_HOST": workspace.host, "DATABRICKS_CLIENT_ID": "an application's id"}
    env["DATABRICKS_AUTH_TYPE"] = login
    if login == "github-oidc":
        env["ACTIONS_ID_TOKEN_REQUEST_URL"] = f"{workspace.host}/github?v=1"
        return env | {"ACTIONS_ID_TOKEN_REQUEST_TOKEN": "of the run"}
    run = {"TEAMPROJECTID": "p", "PLANID": "p", "JOBID": "j", "HOSTTYPE": "build"}
    run |= {"TEAMFOUNDATIONCOLLECTIONURI": f"{workspace.host}/", "ACCESSTOKEN": "of the run"}
    return env | {f"SYSTEM_{name}": value for name, value in run.items()}


@pytest.fixture
def ask(workspace: Workspace, tmp_path: Path) -> Ask:
    """`ask("--name", …)` -> (exit code, what it printed, stderr)."""

    def run(*words: str, login: str = "github-oidc") -> tuple[int, dict[str, Any], str]:
        done = forked.run(
            forked.SCRIPT,
            ROOT / "infra" / "ci" / "model.py",
            *words,
            env=_environment(workspace, login),
            cwd=tmp_path,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        return done.returncode, json.loads(lines[0]) if lines else {}, done.stderr

    return run


def test_a_first_deployment_has_no_model_and_that_is_no_error(
    ask: Ask, workspace: Workspace, tmp_path: Path
) -> None:
    out = tmp_path / "output"
    code, said, err = ask("--name", NAME, "--alias", "champion", "--output", str(out))
    assert (code, said["exists"], said["version"]) == (0, "false", ""), err
    # A model without the alias has nothing to serve, either.
    workspace.models[NAME] = {"other": 2}
    code, said, _ = ask("--name", NAME, "--alias", "champion", "--output", str(out))
    assert (code, said["exists"]) == (0, "false")
    workspace.models[NAME]["champion"] = 3
    code, said, _ = ask("--name", NAME, "--alias", "champion", "--output", str(out))
    assert (code, said["exists"], said["version"]) == (0, "true", "3")
    lines = out.read_text("utf-8").splitlines()
    assert [line for line in lines if line.startswith("exists=")][-1] == "exists=true"


@pytest.mark.parametrize("login", ["github-oidc", "azure-devops-oidc"])
def test_it_logs_in_as_the_templates_say(ask: Ask, workspace: Workspace, login: str) -> None:
    workspace.models[NAME] = {"champion": 3}
    code, said, err = ask("--name", NAME, "--alias", "champion", login=login)
    assert (code, said.get("version")) == (0, "3"), err
    assert any(path.endswith("/token") for path in workspace.asked)
    templates = (ROOT / "infra" / "ci").rglob("deploy.yml")
    assert any(f": {login}\n" in file.read_text("utf-8") for file in templates)


def test_an_alias_is_read_back(ask: Ask, workspace: Workspace) -> None:
    workspace.models[NAME] = {"champion": 3}
    assert ask("--name", NAME, "--alias", "champion", "--is", "3")[0] == 0
    code, _, err = ask("--name", NAME, "--alias", "champion", "--is", "4")
    assert code == 1 and "is 3, not 4" in err
    code, _, err = ask("--name", NAME, "--alias", "challenger", "--is", "4")
    assert code == 1 and "is not there, not 4" in err


@pytest.mark.parametrize(
    "refuses",
    [
        (403, "PERMISSION_DENIED", "User does not have EXECUTE on Registered Model 'c.s.m'."),
        (404, "CATALOG_DOES_NOT_EXIST", "Catalog 'raypipe_uat' does not exist."),
        (404, "SCHEMA_DOES_NOT_EXIST", "Schema 'models.model' does not exist."),
        (400, "INVALID_PARAMETER_VALUE", "bad request"),
    ],
)
def test_what_else_goes_wrong_is_an_error(
    ask: Ask, workspace: Workspace, tmp_path: Path, refuses: tuple[int, str, str]
) -> None:
    """Else a lost permission would look like a first deployment."""
    workspace.refuses = refuses
    out = tmp_path / "output"
    code, said, err = ask("--name", NAME, "--alias", "champion", "--output", str(out))
    assert (code, said, out.exists()) == (1, {}, False)
    assert "model: " in err and "Traceback" not in err


def test_a_wrong_login_is_an_error_of_one_line(ask: Ask, workspace: Workspace) -> None:
    code, said, err = ask("--name", NAME, "--alias", "champion", login="nonsense")
    assert (code, said) == (1, {})
    assert len(err.splitlines()) == 1 and "of the run" not in err


def test_the_model_of_the_bundle(ask: Ask, workspace: Workspace, tmp_path: Path) -> None:
    workspace.models["dev.sand_box.cells"] = {"champion": 1}
    file = tmp_path / "bundle.json"
    parts = {"catalog_name": "dev", "schema_name": "sand_box", "name": "cells"}
    for model in ({"id": "dev.sand_box.cells"}, parts):
        file.write_text(json.dumps({"resources": {"registered_models": {"cells": model}}}))
        code, said, err = ask("--bundle", str(file), "--alias", "champion")
        assert (code, said.get("version")) == (0, "1"), err
    for wrong in ({}, {"cells": parts | {"schema_name": "${resources.schemas.solar.name}"}}):
        file.write_text(json.dumps({"resources": {"registered_models": wrong}}))
        assert ask("--bundle", str(file), "--alias", "champion")[0] == 1
    for text in ("", "[]", "null"):
        file.write_text(text)
        assert ask("--bundle", str(file), "--alias", "champion")[0] == 1


def test_azure_devops_hears_of_it(workspace: Workspace) -> None:
    workspace.models[NAME] = {"champion": 3}
    script = str(ROOT / "infra" / "ci" / "model.py")
    command = [sys.executable, script, "--name", NAME, "--alias", "champion", "--azure"]
    env = _environment(workspace, "azure-devops-oidc")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert "##vso[task.setvariable variable=exists;isOutput=true]true" in done.stdout


def test_the_templates_pass_it_what_it_takes() -> None:
    """Each call of the script in the templates is one that its parser accepts."""
    sys.path.insert(0, str(ROOT / "infra" / "ci"))
    try:
        import model
    finally:
        sys.path.pop(0)
    calls = []
    for file in (ROOT / "infra" / "ci").rglob("*.yml"):
        for text in _scripts(yaml.safe_load(file.read_text("utf-8"))):
            calls += [
                line.split("model.py", 1)[1] for line in text.splitlines() if "model.py" in line
            ]
    assert len(calls) == 3
    for call in calls:
        words = call.replace('"', "").split()
        # --is takes a number, which is known in a run only.
        words = ["3" if word == "$VERSION" else word for word in words]
        assert model.parser().parse_args(words).alias == "champion"


def _scripts(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (node[key] for key in ("run", "script") if isinstance(node.get(key), str))
        node = list(node.values())
    if isinstance(node, list):
        for one in node:
            yield from _scripts(one)
