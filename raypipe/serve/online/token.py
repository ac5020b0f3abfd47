"""The bearer token: read from a file or the environment, compared by its sha256.

Only the hash leaves this process. Ray keeps the arguments of an actor in its store, so a token
among them could be read by whoever can join the cluster.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import socket
import stat
from pathlib import Path

from raypipe.errors import ConfigError, keep_secret
from raypipe.serve.online.settings import ServeConfig

VARIABLE = "RAYPIPE_SERVE_TOKEN"
SHORTEST = 16  # characters


def digest_of(cfg: ServeConfig) -> str | None:
    """sha256 of the token in hex; None where no token is asked for.

    Raises ConfigError for a token that others can read, that is too short, and for an address that
    others can reach without a token.
    """
    token = _from_file(cfg.token_file) if cfg.token_file else os.environ.get(VARIABLE, "").strip()
    if not token:
        _require_loopback(cfg.host)
        return None
    keep_secret(token)
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable():
        raise ConfigError(
            "The token is too easy to guess",
            got=f"{len(token)} characters",
            rule=f"It has at least {SHORTEST} printable ASCII characters",
            fix="python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return hashlib.sha256(token.encode()).hexdigest()


def matches(header: str, digest: str) -> bool:
    """Is this the Authorization header of the token with that digest? Takes the same time for
    every wrong token."""
    scheme, _, given = header.partition(" ")
    given_digest = hashlib.sha256(given.strip().encode("utf-8", "replace")).hexdigest()
    return hmac.compare_digest(given_digest, digest) and scheme.lower() == "bearer"


def _from_file(name: str) -> str:
    path = Path(name).expanduser()
    try:
        mode = path.stat().st_mode
        token = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(
            f"The token file cannot be read: {e}",
            got=f"serve.token_file={name}",
            fix="Write the token into a file of mode 0600",
        ) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            "Others can read the token",
            got=f"{name}, mode {stat.S_IMODE(mode):04o}",
            rule="Only its owner may read a token",
            fix=f"chmod 600 {name}",
        )
    if not token:
        raise ConfigError("The token file is empty", got=name, fix="Write the token into it")
    return token


def _require_loopback(host: str) -> None:
    """Raise ConfigError for an address that other machines can reach."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:
        raise ConfigError(
            f"This is no address to listen on: {e}",
            got=f"serve.host={host}",
            fix="Set serve.host=127.0.0.1",
        ) from None
    for entry in found:
        # A link-local address may carry its interface behind a %.
        address = str(entry[4][0]).partition("%")[0]
        if not ipaddress.ip_address(address).is_loopback:
            raise ConfigError(
                "A server that others can reach needs a token",
                got=f"serve.host={host}",
                rule="Without a token raypipe listens on loopback only",
                fix=f"Set serve.token_file or the environment variable {VARIABLE}",
            )
