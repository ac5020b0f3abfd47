"""A server that speaks the calls of MLflow's Unity Catalog client: HTTPS on loopback.

Written by reading the client (mlflow 3.17.2: store/_unity_catalog/registry/rest_store.py,
store/artifact/presigned_url_artifact_repo.py and databricks_artifact_repo_resources.py) and
Databricks' pages on names and tags. It never ran beside Databricks: where both are silent, the
stricter answer was taken. It keeps what it is told, and refuses what Unity Catalog refuses:

- names of other than three levels, with blanks or slashes, and of catalogs that do not exist
- tags with `. , - = / :` in the key, with more than 1,000 characters, with outer blanks, the 51st
- a search by anything but `name = '…'`; what is found has neither tags nor aliases, in pages of two
- a version whose files lack a model with a signature; it is PENDING until its files are there
- stages, unknown calls, requests without the token, and signed addresses with it

Files of versions are in the server itself, behind signed addresses: Databricks' default storage. Or
they are in a real store of objects (`bucket`, external storage), for which each client gets
temporary credentials: of S3, as the client of this MLflow has them for AWS.

Runs are another matter: a real `mlflow server` behind it keeps them (`runs`), whose experiments
must be paths of the workspace.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import ssl
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import mlflow
import yaml

TOKEN = "dapi-of-the-double-0123456789"
MODELS = "/api/2.0/mlflow/unity-catalog/registered-models"
VERSIONS = "/api/2.0/mlflow/unity-catalog/model-versions"
PAGE = 2
INTERNAL = ("/api/2.0/fs/files/WorkspaceInternal", "/api/2.0/fs/directories/WorkspaceInternal")
ROOT = "dbfs:/databricks/mlflow-tracking"  # where a workspace keeps the files of runs
RESERVED = ".,-=/:"


class Refused(Exception):
    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


def invalid(message: str) -> Refused:
    return Refused("INVALID_PARAMETER_VALUE", message)


def missing(message: str) -> Refused:
    return Refused("RESOURCE_DOES_NOT_EXIST", message, 404)


@dataclass(frozen=True)
class Bucket:
    """A store of objects that keeps the files of versions.

    credentials: called for each of a client's requests; (key id, secret, session token). read: the
    bytes of a key, None if there is none.
    """

    name: str
    credentials: Callable[[], tuple[str, str, str]]
    read: Callable[[str], bytes | None]


@dataclass
class Catalog:
    """What the server was told. One call at a time."""

    bucket: Bucket | None = None
    schemas: set[str] = field(default_factory=lambda: {"main.default"})
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    signed: dict[str, tuple[str, str]] = field(default_factory=dict)  # token: (verb, path)
    calls: list[tuple[str, str]] = field(default_factory=list)
    unknown: list[tuple[str, str]] = field(default_factory=list)
    hurt: dict[str, list[int]] = field(default_factory=dict)  # path: statuses to answer first
    # Other parts of a workspace: beginning of a path, and (method, path, body) -> (answer, status).
    more: dict[str, Callable[[str, str, Any], tuple[Any, int]]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    # Names and tags

    def full(self, name: str) -> str:
        levels = name.split(".")
        if len(levels) != 3 or not all(levels):
            raise invalid(f"{name!r}: please specify all three levels: catalog.schema.model")
        if re.search(r"[\s/\x00-\x1f\x7f]", name) or max(map(len, levels)) > 255:
            raise invalid(f"{name!r} is no valid name")
        name = name.lower()
        if name.rpartition(".")[0] not in self.schemas:
            raise missing(f"Schema '{name.rpartition('.')[0]}' does not exist.")
        return name

    def model(self, name: str) -> dict[str, Any]:
        name = self.full(name)
        if name not in self.models:
            raise missing(f"Routine or Model '{name}' does not exist.")
        return self.models[name]

    def version(self, asked: dict[str, Any]) -> dict[str, Any]:
        name = self.model(asked["name"])["name"]
        number = str(asked["version"])
        found = self.versions[name].get(int(number)) if number.isdigit() else None
        if found is None:
            raise missing(f"Model version '{name}' version {number} does not exist.")
        return found

    @staticmethod
    def tag(tags: dict[str, str], key: str, value: str) -> None:
        if set(RESERVED) & set(key):
            listed = "., ,, -, =, /, :"
            raise invalid(
                f"Tag name {key} contains one or more of the reserved characters: List({listed})"
            )
        if not key or len(key) > 255 or len(value) > 1000:
            raise invalid(f"Tag {key} is too long: 255 characters of a key, 1000 of a value")
        if key != key.strip() or value != value.strip():
            raise invalid(f"Tag {key} has leading or trailing spaces")
        if key not in tags and len(tags) == 50:
            raise invalid("No more than 50 tags may be assigned to one securable")
        tags[key] = value

    # How they are told

    def told_model(self, model: dict[str, Any]) -> dict[str, Any]:
        aliases = [{"alias": a, "version": str(v)} for a, v in model["aliases"].items()]
        tags = [{"key": k, "value": v} for k, v in model["tags"].items()]
        return {**model, "aliases": aliases, "tags": tags}

    def told_version(self, version: dict[str, Any], found: bool = False) -> dict[str, Any]:
        told = {**version, "version": str(version["version"])}
        if found:
            return {k: v for k, v in told.items() if k != "tags"}
        named = self.models[version["name"]]["aliases"]
        told["aliases"] = [
            {"alias": a, "version": str(v)} for a, v in named.items() if v == version["version"]
        ]
        told["tags"] = [{"key": k, "value": v} for k, v in version["tags"].items()]
        return told

    # Calls on models

    def create_model(self, asked: dict[str, Any]) -> dict[str, Any]:
        name = self.full(asked["name"])
        if name in self.models:
            raise Refused("RESOURCE_ALREADY_EXISTS", f"Model '{name}' already exists.", 409)
        now = int(time.time() * 1000)
        model = {"name": name, "creation_timestamp": now, "last_updated_timestamp": now}
        self.models[name] = {**model, "user_id": "me", "aliases": {}, "tags": {}, "next": 1}
        self.versions[name] = {}
        for tag in asked.get("tags", []):
            self.tag(self.models[name]["tags"], tag["key"], tag["value"])
        return {"registered_model": self.told_model(self.models[name])}

    def get_model(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"registered_model": self.told_model(self.model(asked["name"]))}

    def search_models(self, asked: dict[str, Any]) -> dict[str, Any]:
        start = int(asked.get("page_token") or 0)
        size = min(PAGE, int(asked.get("max_results") or PAGE))
        names = sorted(self.models)[start : start + size]
        found = []
        for name in names:
            told = self.told_model(self.models[name])
            found.append({k: v for k, v in told.items() if k not in ("tags", "aliases")})
        more = start + size < len(self.models)
        told = {"registered_models": found}
        return told | ({"next_page_token": str(start + size)} if more else {})

    def delete_model(self, asked: dict[str, Any]) -> dict[str, Any]:
        name = self.model(asked["name"])["name"]
        del self.models[name], self.versions[name]
        return {}

    def set_alias(self, asked: dict[str, Any]) -> dict[str, Any]:
        version = self.version(asked)
        alias = asked["alias"].lower()
        if not re.fullmatch(r"[\w-]{1,255}", alias) or re.fullmatch(r"latest|v\d+", alias):
            raise invalid(f"Invalid alias {asked['alias']!r}")
        self.models[version["name"]]["aliases"][alias] = version["version"]
        return {}

    def delete_alias(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.model(asked["name"])["aliases"].pop(asked["alias"].lower(), None)
        return {}

    def get_alias(self, asked: dict[str, Any]) -> dict[str, Any]:
        model = self.model(asked["name"])
        number = model["aliases"].get(asked["alias"].lower())
        if number is None:
            raise missing(f"Alias {asked['alias']!r} of '{model['name']}' does not exist.")
        found = self.version({"name": model["name"], "version": number})
        return {"model_version": self.told_version(found)}

    def tag_model(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.tag(self.model(asked["name"])["tags"], asked["key"], asked.get("value", ""))
        return {}

    # Calls on versions

    def create_version(self, asked: dict[str, Any]) -> dict[str, Any]:
        model = self.model(asked["name"])
        if not asked.get("source"):
            raise invalid("A model version has a source")
        tags: dict[str, str] = {}
        for tag in asked.get("tags", []):
            self.tag(tags, tag["key"], tag.get("value", ""))
        number, now = model["next"], int(time.time() * 1000)
        model["next"] += 1
        kept = {"name": model["name"], "version": number, "tags": tags, "user_id": "me"}
        kept |= {"creation_timestamp": now, "last_updated_timestamp": now}
        kept |= {name: asked[name] for name in ("source", "run_id", "model_id") if asked.get(name)}
        bucket = self.bucket.name if self.bucket else "uc"
        location = f"s3://{bucket}/{uuid.uuid4()}"
        kept |= {"status": "PENDING_REGISTRATION", "storage_location": location}
        self.versions[model["name"]][number] = kept
        return {"model_version": self.told_version(kept)}

    def finalize(self, asked: dict[str, Any]) -> dict[str, Any]:
        version = self.version(asked)
        text = self.files.get(f"{self.folder(version)}/MLmodel")
        if self.bucket is not None:
            # Location s3://BUCKET/ID: the key is what follows the bucket.
            text = self.bucket.read(f"{version['storage_location'].split('/', 3)[3]}/MLmodel")
        signature = (yaml.safe_load(text) or {}).get("signature") if text else None
        if not signature or not signature.get("inputs") or not signature.get("outputs"):
            version["status"] = "FAILED_REGISTRATION"
            raise invalid("The files are no model with a signature of inputs and outputs")
        version["status"] = "READY"
        return {"model_version": self.told_version(version)}

    def get_version(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"model_version": self.told_version(self.version(asked))}

    def delete_version(self, asked: dict[str, Any]) -> dict[str, Any]:
        version = self.version(asked)
        model = self.models[version["name"]]
        kept = {a: v for a, v in model["aliases"].items() if v != version["version"]}
        model["aliases"] = kept
        del self.versions[version["name"]][version["version"]]
        return {}

    def search_versions(self, asked: dict[str, Any]) -> dict[str, Any]:
        match = re.fullmatch(r"\s*name\s*=\s*'([^']+)'\s*", asked.get("filter", ""))
        if match is None:
            raise invalid(f"Unsupported filter query : `{asked.get('filter')}`")
        versions = self.versions[self.model(match[1])["name"]]
        start = int(asked.get("page_token") or 0)
        size = min(PAGE, int(asked.get("max_results") or PAGE))
        # Newest first: callers must not count on an order.
        numbers = sorted(versions, reverse=True)[start : start + size]
        told = {"model_versions": [self.told_version(versions[n], found=True) for n in numbers]}
        more = start + size < len(versions)
        return told | ({"next_page_token": str(start + size)} if more else {})

    def tag_version(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.tag(self.version(asked)["tags"], asked["key"], asked.get("value", ""))
        return {}

    def untag_version(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.version(asked)["tags"].pop(asked["key"], None)
        return {}

    def credentials(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.require_state(self.version(asked), asked.get("operation", "").endswith("WRITE"))
        expires = int(time.time() * 1000) + 3_600_000
        if self.bucket is not None:
            names = "access_key_id", "secret_access_key", "session_token"
            given = dict(zip(names, self.bucket.credentials(), strict=True))
            mode = {"storage_mode": "CUSTOMER_HOSTED", "expiration_time": expires}
            return {"credentials": {**mode, "aws_temp_credentials": given}}
        return {"credentials": {"storage_mode": "DEFAULT_STORAGE", "expiration_time": expires}}

    def download_uri(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"artifact_uri": self.version(asked)["storage_location"]}

    # Files

    @staticmethod
    def folder(version: dict[str, Any]) -> str:
        return f"/Models/{version['name'].replace('.', '/')}/{version['version']}"

    @staticmethod
    def require_state(version: dict[str, Any], write: bool) -> None:
        wanted = "PENDING_REGISTRATION" if write else "READY"
        if version["status"] != wanted:
            raise invalid(f"The version is {version['status']}, not {wanted}")

    def of_file(self, path: str) -> dict[str, Any]:
        match = re.match(r"/Models/([^/]+)/([^/]+)/([^/]+)/(\d+)(/|$)", path)
        if match is None or ".." in path:
            raise invalid(f"{path} is no file of a model version")
        return self.version({"name": ".".join(match.groups()[:3]), "version": match[4]})

    def sign(self, verb: str, path: str) -> str:
        token = uuid.uuid4().hex
        self.signed[token] = verb, path
        return f"/signed/{token}"

    def upload_url(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.require_state(self.of_file(asked["path"]), write=True)
        return {"url": self.sign("PUT", asked["path"]), "headers": []}

    def download_url(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.require_state(self.of_file(asked["path"]), write=False)
        if asked["path"] not in self.files:
            raise Refused("NOT_FOUND", f"{asked['path']} does not exist", 404)
        return {"url": self.sign("GET", asked["path"]), "headers": []}

    def listed(self, folder: str) -> dict[str, dict[str, Any]]:
        """The entries of a folder by name."""
        entries: dict[str, dict[str, Any]] = {}
        for path, content in self.files.items():
            if path.startswith(f"{folder}/"):
                name, separator, _ = path.removeprefix(f"{folder}/").partition("/")
                entries[name] = {"path": f"{folder}/{name}", "is_directory": bool(separator)}
                if not separator:
                    entries[name]["file_size"] = len(content)
        return entries

    def directory(self, folder: str) -> dict[str, Any]:
        folder = folder.rstrip("/")
        self.require_state(self.of_file(folder), write=False)
        entries = self.listed(folder)
        if not entries:
            raise Refused("NOT_FOUND", f"{folder} is no directory", 404)
        return {"contents": list(entries.values())}

    # Files of runs, below their artifact root

    def run_credentials(self, verb: str, root: str, paths: list[str]) -> list[dict[str, Any]]:
        infos = []
        for path in paths:
            uri = self.sign(verb, f"{root}/{path}")
            infos.append({"path": path, "signed_uri": uri, "type": "AWS_PRESIGNED_URL"})
        return infos

    def run_files(self, root: str, path: str) -> list[dict[str, Any]]:
        above = f"{root}/{path}".rstrip("/")
        if above in self.files:
            return [{"path": path, "is_dir": False, "file_size": len(self.files[above])}]
        told = []
        for entry in self.listed(above).values():
            name = entry["path"].removeprefix(f"{root}/")
            told.append({"path": name, "is_dir": entry["is_directory"]})
            told[-1] |= {"file_size": entry.get("file_size", 0)}
        return told


def calls(catalog: Catalog) -> dict[tuple[str, str], Callable[[dict[str, Any]], dict[str, Any]]]:
    sdk = "is-databricks-sdk-models-artifact-repository-enabled"
    return {
        ("POST", f"{MODELS}/create"): catalog.create_model,
        ("GET", f"{MODELS}/get"): catalog.get_model,
        ("DELETE", f"{MODELS}/delete"): catalog.delete_model,
        ("GET", f"{MODELS}/search"): catalog.search_models,
        ("POST", f"{MODELS}/alias"): catalog.set_alias,
        ("DELETE", f"{MODELS}/alias"): catalog.delete_alias,
        ("GET", f"{MODELS}/alias"): catalog.get_alias,
        ("POST", f"{MODELS}/set-tag"): catalog.tag_model,
        ("GET", f"{MODELS}:{sdk}"): lambda _: {sdk.replace("-", "_"): False},
        ("POST", f"{VERSIONS}/create"): catalog.create_version,
        ("POST", f"{VERSIONS}/finalize"): catalog.finalize,
        ("GET", f"{VERSIONS}/get"): catalog.get_version,
        ("DELETE", f"{VERSIONS}/delete"): catalog.delete_version,
        ("GET", f"{VERSIONS}/search"): catalog.search_versions,
        ("POST", f"{VERSIONS}/set-tag"): catalog.tag_version,
        ("DELETE", f"{VERSIONS}/delete-tag"): catalog.untag_version,
        ("POST", f"{VERSIONS}/generate-temporary-credentials"): catalog.credentials,
        ("GET", f"{VERSIONS}/get-download-uri"): catalog.download_uri,
        ("POST", "/api/2.0/fs/create-upload-url"): catalog.upload_url,
        ("POST", "/api/2.0/fs/create-download-url"): catalog.download_url,
    }


def handler(catalog: Catalog, runs: str | None) -> type[BaseHTTPRequestHandler]:
    known = calls(catalog)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body in one packet: a client waits 40 ms for the second of two.
        wbufsize, disable_nagle_algorithm = -1, True

        def log_message(self, *given: object) -> None:
            pass

        def answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def tell(self, told: dict[str, Any], status: int = 200) -> None:
            body = json.dumps(told).encode()
            self.answer(status, body, Content_Type="application/json", x_databricks_org_id="7")

        def absolute(self, told: dict[str, Any]) -> dict[str, Any]:
            """Signed addresses with this server's name."""
            here = f"https://{self.headers['Host']}"
            return {k: here + v if k in ("url", "signed_uri") else v for k, v in told.items()}

        def handle_call(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = urlsplit(self.path)
            path = unquote(parts.path)
            with catalog.lock:
                catalog.calls.append((self.command, path))
                statuses = catalog.hurt.get(path)
                status = statuses.pop(0) if statuses else 0
            try:
                if path.startswith("/signed/"):
                    return self.signed(path, body)
                if path == "/.well-known/databricks-config":
                    return self.tell({"workspace_id": "7"})
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    raise Refused("UNAUTHENTICATED", "The token is not known", 401)
                if status:
                    raise Refused("TEMPORARILY_UNAVAILABLE", "Try again", status)
                asked = {k: v[-1] for k, v in parse_qs(parts.query).items()}
                # A file may begin with a brace, as weights do whose header has 123 bytes more than
                # a multiple of 256: answered by a broken connection, its upload waits for 300 s.
                is_file = path.startswith("/api/2.0/fs/files/")
                if body.startswith(b"{") and not is_file:
                    asked |= json.loads(body)
                self.tell(*self.called(path, asked, body))
            except Refused as e:
                self.tell({"error_code": e.code, "message": str(e)}, e.status)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = handle_call

        def called(
            self, path: str, asked: dict[str, Any], body: bytes
        ) -> tuple[dict[str, Any], int]:
            call = known.get((self.command, path))
            with catalog.lock:
                if call is not None:
                    return self.absolute(call(asked)), 200
                if self.command == "GET" and path.startswith("/api/2.0/fs/directories/Models"):
                    return catalog.directory(path.removeprefix("/api/2.0/fs/directories")), 200
                for beginning, answer in catalog.more.items():
                    if path.startswith(beginning):
                        return answer(self.command, path, json.loads(body or b"null"))
            if runs is not None and path.startswith("/api/2.0/mlflow/"):
                return self.of_runs(path, asked, body)
            # Files of runs are asked for by another name first. Where a workspace refuses it, the
            # client falls back on signed addresses. By 404 it would take a folder for an empty one.
            if path.startswith(INTERNAL):
                raise Refused("PERMISSION_DENIED", "No access to internal files", 403)
            if not path.startswith("/api/2.0/fs/"):
                catalog.unknown.append((self.command, path))
            raise Refused("ENDPOINT_NOT_FOUND", f"No API found for {self.command} {path}", 404)

        def signed(self, path: str, body: bytes) -> None:
            # A store of objects refuses two ways to sign, and the token is none of its business.
            with catalog.lock:
                verb, file = catalog.signed.get(path.removeprefix("/signed/"), ("", ""))
                if verb != self.command or "Authorization" in self.headers:
                    return self.answer(403, b"SignatureDoesNotMatch")
                if verb == "PUT":
                    catalog.files[file] = body
                    return self.answer(200, b"")
                if file not in catalog.files:
                    return self.answer(404, b"NoSuchKey")
                return self.answer(200, catalog.files[file])

        def of_runs(
            self, path: str, asked: dict[str, Any], body: bytes
        ) -> tuple[dict[str, Any], int]:
            """Calls on experiments, runs and logged models: the server behind answers them."""
            name = asked.get("name", "")
            if path.endswith("/experiments/create") and not re.fullmatch(r"(/[^/]+){2,}", name):
                raise invalid(
                    f"Got an invalid experiment name '{name}'. An experiment name must be an "
                    "absolute path within the Databricks workspace"
                )
            verb = "PUT" if path.endswith(("/credentials-for-write", "for-upload")) else "GET"
            logged = re.search(r"/logged-models/([^/]+)/artifacts/(.+)$", path)
            if logged is not None:
                model = self.behind(f"/api/2.0/mlflow/logged-models/{logged[1]}", "GET", b"")[0]
                root = model["model"]["info"]["artifact_uri"]
                with catalog.lock:
                    if logged[2] == "directories":
                        where = asked.get("artifact_directory_path", "")
                        return {"files": catalog.run_files(root, where)}, 200
                    infos = catalog.run_credentials(verb, root, asked["paths"])
                told = [{"credential_info": self.absolute(info)} for info in infos]
                return {"credentials": told}, 200
            if "/artifacts/" in path:
                query = f"/api/2.0/mlflow/runs/get?run_id={asked['run_id']}"
                root = self.behind(query, "GET", b"")[0]["run"]["info"]["artifact_uri"]
                with catalog.lock:
                    if path.endswith("/list"):
                        files = catalog.run_files(root, asked.get("path", ""))
                        return {"root_uri": root, "files": files}, 200
                    paths = asked["path"] if isinstance(asked["path"], list) else [asked["path"]]
                    infos = catalog.run_credentials(verb, root, paths)
                return {"credential_infos": [self.absolute(info) for info in infos]}, 200
            return self.behind(self.path, self.command, body)

        def behind(self, path: str, verb: str, body: bytes) -> tuple[dict[str, Any], int]:
            given = {"Content-Type": "application/json"}
            sent = body if body else None
            request = urllib.request.Request(f"{runs}{path}", sent, given, method=verb)
            try:
                with urllib.request.urlopen(request, timeout=60) as answered:
                    told = answered.read() or b"{}"
                # A workspace keeps logged models in a folder of another name; by it the client
                # tells them from runs.
                told = re.sub(rf"({ROOT}/\d+)/models/".encode(), rb"\1/logged_models/", told)
                return json.loads(told), answered.status
            except urllib.error.HTTPError as e:
                return json.loads(e.read() or b"{}"), e.code

    return Handler


@dataclass(frozen=True)
class Double:
    """A running server: its address, what it was told, and the variables that clients need."""

    address: str
    catalog: Catalog
    environment: dict[str, str]


@contextmanager
def serving(
    folder: Path, runs: str | None = None, bucket: Bucket | None = None
) -> Iterator[Double]:
    """The server on a free port of loopback, with a certificate of its own in `folder`.

    runs: address of the `mlflow server` that keeps runs. bucket: keeps the files of versions.
    """
    # Stores that are opened meanwhile become MLflow's global ones.
    before = mlflow.get_tracking_uri(), mlflow.get_registry_uri()
    folder.mkdir(parents=True, exist_ok=True)
    certificate = folder / "certificate.pem"
    certificate.write_bytes(_certificate())
    catalog = Catalog(bucket)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(catalog, runs))
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    address = f"https://127.0.0.1:{server.server_address[1]}"
    # A profile in a file of its own, so that databricks-uc://double works as well.
    profile = folder / "databrickscfg"
    profile.write_text(f"[double]\nhost = {address}\ntoken = {TOKEN}\n")
    environment = {
        "DATABRICKS_HOST": address,
        "DATABRICKS_TOKEN": TOKEN,
        "DATABRICKS_CONFIG_FILE": str(profile),
        "REQUESTS_CA_BUNDLE": str(certificate),
    }
    try:
        yield Double(address, catalog, environment)
    finally:
        mlflow.set_tracking_uri(before[0])
        mlflow.set_registry_uri(before[1])
        server.shutdown()
        thread.join()
        server.server_close()


def _certificate() -> bytes:
    """A key and a certificate of 127.0.0.1 for a day, signed by itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "double of Databricks")])
    now = datetime.datetime.now(datetime.timezone.utc)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return secret + made.public_bytes(serialization.Encoding.PEM)
