"""Clients that ask a server one request after the other, each on a connection of its own.

python -m benchmarks.http_load ADDRESS IMAGE CLIENTS SECONDS [--json-body]

Prints {"per_s", "p50_ms", "p99_ms", "answers", "failed"}. Every answer must be 200. It runs in a
process of its own, and takes about 0.1 ms of CPU for each request, from every server alike.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

WARM_S = 1.0


def request_of(address: str, image: bytes, is_json: bool) -> bytes:
    """The bytes of one request. is_json: as `mlflow models serve` wants it."""
    place = urlsplit(address)
    body, kind = image, "image/jpeg"
    if is_json:
        body = json.dumps({"inputs": [base64.b64encode(image).decode()]}).encode()
        kind = "application/json"
    head = f"POST {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> int:
    """The status of one request."""
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    start = head.index(b"content-length:") + len(b"content-length:")
    await reader.readexactly(int(head[start : head.index(b"\r", start)]))
    return int(head[9:12])


async def client(place: str, request: bytes, until: float, seen: list[tuple[float, float, int]]):
    """Ask until `until`; appends (end, seconds, status) of each request."""
    host, port = place.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**20)
    try:
        while (began := time.perf_counter()) < until:
            status = await ask(reader, writer, request)
            now = time.perf_counter()
            seen.append((now, now - began, status))
    finally:
        writer.close()


async def load(address: str, image: bytes, clients: int, seconds: float, is_json: bool) -> dict:
    request = request_of(address, image, is_json)
    place = urlsplit(address).netloc
    seen: list[tuple[float, float, int]] = []
    began = time.perf_counter() + WARM_S
    until = began + seconds
    await asyncio.gather(*(client(place, request, until, seen) for _ in range(clients)))
    # The first second is the connections', and does not count.
    counted = [one for one in seen if one[0] >= began]
    took_ms = np.array([took for _, took, _ in counted]) * 1000
    return {
        "per_s": round(len(counted) / seconds, 2),
        "p50_ms": round(float(np.percentile(took_ms, 50)), 2),
        "p99_ms": round(float(np.percentile(took_ms, 99)), 2),
        "answers": len(counted),
        "failed": sum(status != 200 for *_, status in counted),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("image", type=Path)
    parser.add_argument("clients", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--json-body", action="store_true")
    asked = parser.parse_args()
    data = asked.image.read_bytes()
    print(
        json.dumps(
            asyncio.run(load(asked.address, data, asked.clients, asked.seconds, asked.json_body))
        )
    )
