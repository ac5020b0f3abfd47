"""Asks an address whether the head of a Ray cluster is there, before Ray does.

`ray.init` said nothing within 80 s where no head was (Ray 2.56; it was then ended from outside). A
head's GCS speaks gRPC, so HTTP/2. A server of HTTP/2 sends its
settings first, within milliseconds, however busy it is (RFC 9113, section 3.4). That tells a head
from a port of something else. A head that refuses this user's token says so at once, too.
"""

from __future__ import annotations

import os
import re
import socket

from raypipe.cluster import ray_private
from raypipe.errors import ClusterError, one_line

# A head on this host answers in milliseconds.
PROBE_S = 3.0
_HOST_PORT = re.compile(r"(?P<host>[\w.\-]+|\[[\da-fA-F:]+\]):(?P<port>\d{1,5})")
# What a client of HTTP/2 sends first: a line of text, and settings that set nothing.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_FRAME_HEAD, _KIND_AT, _SETTINGS = 9, 3, 4


def require(address: str, setting: str) -> None:
    """Raise ClusterError within seconds unless a head that takes the token may be at this address.

    setting: where the address comes from, for the message.
    """
    require_form(address, setting)
    reason = silence(address)
    if reason:
        raise ClusterError(
            f"No head of a Ray cluster answers: {reason}",
            got=f"{setting}={address}",
            rule="`ray start --head` prints HOST:PORT; its port is mostly 6379",
            fix="Start that cluster, or name none: unset RAY_ADDRESS, and set cluster.address=auto "
            "or local",
        )
    if refuses_token(address):
        raise ClusterError(
            "The Ray cluster refuses the token of this process",
            got=f"{setting}={address}, RAY_AUTH_MODE={os.environ.get('RAY_AUTH_MODE', '')}",
            rule="RAY_AUTH_MODE=token must be set where the cluster was started and here, "
            "with the same ~/.ray/auth_token",
            fix="Copy the head's ~/.ray/auth_token here (mode 600) or into RAY_AUTH_TOKEN, or set "
            "cluster.address=local to start a cluster of your own",
        )


def require_form(address: str, setting: str) -> None:
    """Raise ClusterError for an address that no verb can join, whoever listens there."""
    if address.startswith("ray://"):
        raise ClusterError(
            "ray:// is Ray Client, over which Ray Train and Tune cannot run",
            got=f"{setting}={address}",
            fix="Submit the verb (--submit http://HOST:8265), or set HOST:6379 on a node",
        )
    if not _HOST_PORT.fullmatch(address):
        raise ClusterError(
            "This is no address of a cluster",
            got=f"{setting}={address}",
            rule="It is auto, local, spark, none, or HOST:PORT of a head, whose port is mostly "
            "6379. A dashboard (http://HOST:8265) is for --submit",
            fix=f"Set {setting}=HOST:6379, or leave it out",
        )


def require_token() -> None:
    """Raise ClusterError if Ray would end this process because it cannot read the token."""
    fault = ray_private.token_fault()
    if fault:
        raise ClusterError(
            f"Ray cannot read its token: {one_line(fault)}",
            fix="unset RAY_AUTH_TOKEN_PATH, or copy the cluster's token there",
        )


def listens(address: str) -> bool:
    """Does anything accept a connection at HOST:PORT?"""
    try:
        _connected(address).close()
        return True
    except (OSError, ValueError, OverflowError):
        return False


def silence(address: str) -> str:
    """Why no head of a cluster can be at HOST:PORT; "" if one answers."""
    try:
        with _connected(address) as connection:
            if _is_encrypted():
                return ""  # it takes encrypted words only
            connection.sendall(_PREFACE)
            answer = connection.recv(_FRAME_HEAD, socket.MSG_WAITALL)
    except TimeoutError:
        return f"silence for {PROBE_S:g} s"
    except (OSError, ValueError, OverflowError) as e:
        return one_line(e)
    is_head = len(answer) == _FRAME_HEAD and answer[_KIND_AT] == _SETTINGS
    return "" if is_head else "something else listens there"


def refuses_token(address: str) -> bool:
    """Does the head at HOST:PORT say that it does not take this process's token?"""
    return not _is_encrypted() and ray_private.refuses_token(address, PROBE_S)


def _is_encrypted() -> bool:
    return os.environ.get("RAY_USE_TLS", "0") not in ("", "0")


def _connected(address: str) -> socket.socket:
    """A connection whose answers may take PROBE_S. Raises OSError, and for no port ValueError."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S)
