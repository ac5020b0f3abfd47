"""Runs a command where every packet to another machine is seen and dropped.

`python -m tests.isolated REPORT COMMAND…` makes a network namespace of its own, in which all routes
lead to loopback: nothing leaves this host, DNS and telemetry time out as behind a firewall, and a
packet socket on loopback sees each try. REPORT gets them as JSON: {"code": the command's exit code,
"tries": [{"to", "port", "protocol", "who", "asked"}]}. It needs root, and Linux.

With --no-route there is no route at all: connections are refused at once, and none can be seen.
"""

from __future__ import annotations

import ctypes
import json
import re
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000
ALL_PROTOCOLS = 3
TCP, UDP = 6, 17
IPV4, IPV6 = 0x0800, 0x86DD


def enter(route: bool) -> None:
    """Move this process into a network namespace with loopback alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    if route:
        subprocess.run(["ip", "route", "add", "default", "dev", "lo"], check=True)
        # Without IPv6 in the kernel there is nothing to see.
        subprocess.run(["ip", "-6", "route", "add", "default", "dev", "lo"], check=False)


class Watch:
    """Packets on loopback that are not for loopback."""

    def __init__(self) -> None:
        self.tries: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._socket = socket.socket(
            socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ALL_PROTOCOLS)
        )
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**25)
        threading.Thread(target=self._see, daemon=True).start()

    def _see(self) -> None:
        while True:
            packet, (_, kind, *_) = self._socket.recvfrom(65_535)
            if kind == IPV4 and packet[16] != 127:
                rest = packet[(packet[0] & 15) * 4 :]
                self._note(socket.inet_ntoa(packet[16:20]), packet[9], rest)
            elif kind == IPV6 and packet[24:40] != b"\0" * 15 + b"\1":
                self._note(socket.inet_ntop(socket.AF_INET6, packet[24:40]), packet[6], packet[40:])

    def _note(self, to: str, protocol: int, rest: bytes) -> None:
        source, port = struct.unpack("!HH", rest[:4]) if protocol in (TCP, UDP) else (0, 0)
        asked = name_in(rest[8:]) if protocol == UDP and port == 53 else ""
        key = (to, port, protocol, asked)
        if key not in self.tries:
            name = {TCP: "tcp", UDP: "udp"}.get(protocol, str(protocol))
            found = {"to": to, "port": port, "protocol": name, "asked": asked}
            self.tries[key] = {**found, "who": owner(source)}


def name_in(question: bytes) -> str:
    """The name that a DNS packet asks for."""
    labels, at = [], 12
    while at < len(question) and 0 < question[at] < 64:
        labels.append(question[at + 1 : at + 1 + question[at]].decode("ascii", "replace"))
        at += 1 + question[at]
    return ".".join(labels)


def owner(port: int) -> str:
    """The command line of the process with this local port."""
    wanted = f":{port:04X} "
    inodes = set()
    for table in ("tcp", "udp", "tcp6", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            if wanted in " ".join(line.split()[1:2]) + " ":
                inodes.add(line.split()[9])
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = str(link.readlink())
        except OSError:
            continue
        found = re.fullmatch(r"socket:\[(\d+)\]", target)
        if found and found[1] in inodes:
            words = (link.parents[1] / "cmdline").read_bytes().split(b"\0")
            return b" ".join(words).decode(errors="replace")[:300]
    return ""


def main(report: str, *command: str) -> int:
    route = command[0] != "--no-route"
    enter(route)
    watch = Watch()
    code = subprocess.run(command[not route :]).returncode
    tries = list(watch.tries.values())
    Path(report).write_text(json.dumps({"code": code, "tries": tries}, indent=1))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
