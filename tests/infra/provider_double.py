"""A Terraform provider that only knows its schema: Terraform's plugin protocol 6 over TLS.

The real providers come from a registry that many machines do not reach. This one answers what
`terraform validate` and `terraform test` with mock_provider ask, from provider_schema.json, so that
Terraform itself checks types, references, functions, conditions and what is known at plan time.

    python tests/infra/provider_double.py azurerm      (Terraform starts it, see `terraform_home`)
"""

from __future__ import annotations

import base64
import concurrent.futures
import datetime
import json
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

COOKIE = "d602bf8f470bc67ca7faa0386276bbdd4330efaf76d1a219cb4d6991ca9872b2"
SCHEMA = Path(__file__).with_name("provider_schema.json")
NESTING = {"single": 1, "list": 2, "set": 3}


# Protocol buffers, by hand: five message types, of which only these fields are written.


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def piece(field: int, value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(raw)) + raw


def type_of(entry: Mapping[str, Any]) -> Any:
    """A type as Terraform writes it in JSON."""
    if "block" not in entry:
        return entry["type"]
    inner = ["object", {name: type_of(one) for name, one in entry["block"].items()}]
    return inner if entry["nesting"] == "single" else [entry["nesting"], inner]


def attribute(name: str, entry: Mapping[str, Any]) -> bytes:
    out = piece(1, name)
    if "block" in entry and not entry.get("computed"):
        inner = b"".join(piece(1, attribute(key, one)) for key, one in entry["block"].items())
        out += piece(10, inner + number(3, NESTING[entry["nesting"]]))
    else:
        out += piece(2, json.dumps(type_of(entry)))
    if entry.get("required"):
        return out + number(4, 1)
    # What may be left out may also be filled in by the provider.
    return out + (b"" if entry.get("computed") else number(5, 1)) + number(6, 1)


def block(entries: Mapping[str, Any], provider: bool = False) -> bytes:
    out = b""
    for name, entry in entries.items():
        if name == "alias" and provider:
            continue  # Terraform's own
        if "block" in entry and not entry.get("attribute"):
            nested = piece(1, name) + piece(2, block(entry["block"], provider))
            nested += number(3, NESTING[entry["nesting"]])
            nested += number(4, 1) if entry.get("required") else b""
            out += piece(3, nested + (number(5, 1) if entry.get("max") else b""))
        elif provider:
            out += piece(2, piece(1, name) + piece(2, json.dumps(type_of(entry))) + number(5, 1))
        else:
            out += piece(2, attribute(name, entry))
    return out


def schema_response(schema: Mapping[str, Any], provider: str) -> bytes:
    out = piece(1, piece(2, block(schema["provider"][provider], provider=True)))
    for field, kind in ((2, "resource"), (3, "data")):
        for name, entries in schema[kind].items():
            if name.partition("_")[0] == provider:
                out += piece(field, piece(1, name) + piece(2, piece(2, block(entries))))
    return out


def certificate() -> tuple[bytes, bytes, bytes]:
    """Key and certificate as PEM, and the certificate as DER."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    encoding = serialization.Encoding
    return private, made.public_bytes(encoding.PEM), made.public_bytes(encoding.DER)


def serve(provider: str) -> None:
    import grpc

    answer = schema_response(json.loads(SCHEMA.read_text("utf-8")), provider)
    over = threading.Event()

    class Everything(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            service, _, method = details.method.lstrip("/").partition("/")
            if service == "plugin.GRPCController":
                over.set()
            elif service != "tfplugin6.Provider":
                return None
            out = answer if method == "GetProviderSchema" else b""
            if method not in ANSWERED and service == "tfplugin6.Provider":
                return None  # Terraform says so, rather than taking nothing for an answer
            return grpc.unary_unary_rpc_method_handler(lambda request, context: out)

    key, pem, der = certificate()
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), options=options)
    server.add_generic_rpc_handlers((Everything(),))
    # Terraform's own certificate is on the curve P-521, which gRPC's TLS does not take: not asked.
    credentials = grpc.ssl_server_credentials([(key, pem)])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    shown = base64.b64encode(der).decode().rstrip("=")
    print(f"1|6|tcp|127.0.0.1:{port}|grpc|{shown}", flush=True)
    # It must not outlive a Terraform that was killed.
    parent = os.getppid()
    while not over.wait(1) and os.getppid() == parent:
        pass
    server.stop(0.5)


# What needs no answer but "no complaint". A plan with the real protocol is not among them:
# `terraform test` mocks it.
ANSWERED = (
    "GetProviderSchema",
    "ValidateProviderConfig",
    "ValidateResourceConfig",
    "ValidateDataResourceConfig",
    "StopProvider",
)


def terraform_home(folder: Path, sources: Mapping[str, str]) -> dict[str, str]:
    """The environment in which Terraform uses doubles for `sources` {provider: its source}."""
    lines = ["provider_installation {", "  dev_overrides {"]
    for provider, source in sources.items():
        home = folder / provider
        home.mkdir(parents=True)
        script = home / f"terraform-provider-{provider}"
        script.write_text(f"#!/bin/sh\nexec {sys.executable} {Path(__file__)} {provider}\n")
        script.chmod(0o755)
        lines.append(f'    "{source.lower()}" = "{home}"')
    config = folder / "terraform.rc"
    config.write_text("\n".join([*lines, "  }", "  direct {}", "}", ""]))
    kept: Iterable[str] = ("PATH", "HOME", "TMPDIR")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    return {**environment, "TF_CLI_CONFIG_FILE": str(config), "CHECKPOINT_DISABLE": "1"}


if __name__ == "__main__":
    if os.environ.get("TF_PLUGIN_MAGIC_COOKIE") != COOKIE:
        raise SystemExit("Terraform starts this")
    serve(sys.argv[1])
