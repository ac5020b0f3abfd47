"""Claim: under ten minutes of mixed load the server loses no answer and does not grow.

python -m benchmarks.serve_load --json [--minutes 10] [--clients 8]

Clients send photographs, small pictures of five kinds, feedback, and what must be refused: bodies
that are too large, text, a picture of 120 megapixels, wrong tokens. Some hang up in the middle. The
alias moves every ten seconds, each fourth time to a version with a flipped byte. All settings are
the product's own, but for a token and cpus=2.

lost: requests without an answer. wrong: answers with another status than the one that the page of
the server names. log_rows_vs_answers: rows of the request log ÷ predictions that were answered.
replica_mb: the resident set of the process that answers, over time; growth_mb: the median of the
last tenth of the run less that of the tenth after the first fifth.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks import pictures
from benchmarks.feed import commit, machine
from benchmarks.serve_batch import store_of

Result = dict[str, Any]
TOKEN = "a-token-of-this-benchmark"
MODEL = "efficientnet_lite0"
MOVE_S = 10.0
KINDS = (("RGB", "JPEG"), ("L", "PNG"), ("RGBA", "PNG"), ("CMYK", "JPEG"), ("RGB", "WEBP"))
# What a client does, how often out of 100, and the status that the page names for it.
ACTIONS: dict[str, tuple[int, int]] = {
    "photograph": (30, 200),
    "small": (40, 200),
    "feedback": (8, 202),
    "ready": (5, 200),
    "metrics": (3, 200),
    "too large": (2, 413),
    "text": (4, 415),
    "pixels": (2, 422),
    "token": (3, 401),
    "hang up": (3, 0),
}


def small(kind: str, form: str, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (96, 128, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).convert(kind).save(out, form)
    return out.getvalue()


def many_pixels() -> bytes:
    """A PNG of 120 megapixels in 15 kB."""
    out = io.BytesIO()
    Image.new("1", (12_000, 10_000)).save(out, "PNG")
    return out.getvalue()


class Clients:
    """Threads that ask until `stop`, and what became of each request."""

    def __init__(self, address: str, stop: threading.Event) -> None:
        self.address, self.stop = address, stop
        self.photos = list(pictures.photos(range(20)))
        self.smalls = [small(*kind, seed) for seed in range(8) for kind in KINDS]
        self.pixels = many_pixels()
        self.lock = threading.Lock()
        self.done: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.models: Counter[str] = Counter()
        self.requests: list[tuple[str, str]] = []  # ids to give feedback for, and a label
        self.predictions = 0

    def run(self, seed: int) -> None:
        rng = random.Random(seed)
        names, shares = list(ACTIONS), [share for share, _ in ACTIONS.values()]
        while not self.stop.is_set():
            action = rng.choices(names, shares)[0]
            try:
                status = self._act(action, rng)
            except Exception as e:  # no answer, whatever the reason
                with self.lock:
                    self.lost[f"{action}: {type(e).__name__}"] += 1
                continue
            with self.lock:
                self.done[action] += 1
                if status != ACTIONS[action][1]:
                    self.wrong[f"{action}: {status}"] += 1

    def _act(self, action: str, rng: random.Random) -> int:
        """Send one request; returns its status."""
        if action == "hang up":
            self._hang_up(rng)
            return 0
        if action in ("ready", "metrics"):
            return self._ask(f"/{action}", None)
        if action == "feedback":
            with self.lock:
                told = rng.choice(self.requests) if self.requests else None
            if told is None:
                return 202  # nothing was answered yet
            body = json.dumps({"request_id": told[0], "label": told[1]}).encode()
            return self._ask("/feedback", body, "application/json")
        data = {
            "photograph": lambda: rng.choice(self.photos),
            "small": lambda: rng.choice(self.smalls),
            "too large": lambda: bytes(11 * 2**20),
            "text": lambda: b"this is no image",
            "pixels": lambda: self.pixels,
            "token": lambda: self.smalls[0],
        }[action]()
        kind = "text/plain" if action == "text" else "application/octet-stream"
        return self._ask("/predict", data, kind, "wrong" if action == "token" else TOKEN)

    def _ask(self, path: str, data: bytes | None, kind: str = "", token: str = TOKEN) -> int:
        request = urllib.request.Request(self.address + path, data)
        request.add_header("Authorization", f"Bearer {token}")
        if kind:
            request.add_header("Content-Type", kind)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                body = answer.read()
                status = int(answer.status)
        except urllib.error.HTTPError as e:
            json.loads(e.read())["error"]["what"]  # a clear body
            return e.code
        if path == "/predict":
            said = json.loads(body)
            with self.lock:
                self.predictions += 1
                self.models[said["model"]] += 1
                self.requests = [*self.requests[-99:], (said["request_id"], said["label"])]
        return status

    def _hang_up(self, rng: random.Random) -> None:
        host, port = self.address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as line:
            head = f"POST /predict HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
            head += "Content-Type: image/jpeg\r\nContent-Length: 40000\r\n\r\n"
            line.sendall(head.encode() + self.photos[0][: rng.randrange(1, 30_000)])


def another(store: Any, folder: Path, key: str) -> Any:
    """One more version of the same package."""
    from raypipe.registry import runs, versions

    with runs.run(store, key, "train", {}, None) as run_id:
        pass
    return versions.register(store, run_id, folder, key, {})


def flip(store: Any, version: Any) -> None:
    from urllib.parse import unquote, urlparse

    uri = store.client.get_model_version_download_uri(version.name, str(version.version))
    weights = next(Path(unquote(urlparse(uri).path)).rglob("weights.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def replica_mb(driver_children: list[Any]) -> float:
    """The resident set of the replica's process."""
    sizes = [0.0]
    for process in driver_children:
        try:
            if "ServeReplica" in " ".join(process.cmdline()) and ":replica" in process.cmdline()[0]:
                sizes.append(process.memory_info().rss / 2**20)
        except Exception:  # it has ended
            continue
    return max(sizes)


def measure(folder: Path, minutes: float, clients: int) -> Result:
    import psutil

    from raypipe.cluster.connect import ClusterConfig, close, connect
    from raypipe.registry import promote
    from raypipe.registry.tracking import RegistryConfig
    from raypipe.serve.online import server
    from raypipe.serve.online.settings import ServeConfig
    from raypipe.tables import scan
    from raypipe.tables.table import ImageTable

    home = folder / MODEL
    run, store = store_of(home, MODEL)
    first = promote.require_champion(store)
    second, broken = (another(store, home / "package", key) for key in ("second", "broken"))
    flip(store, broken)
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    connect(ClusterConfig(address="local", cpus=2))
    cfg = ServeConfig(port=0, cpus=2, token_file=str(token), requests=str(folder / "requests"))
    stop = threading.Event()
    sizes: list[tuple[float, float]] = []
    with server.running(run, RegistryConfig(), cfg) as running:
        load = Clients(running.address, stop)
        threads = [threading.Thread(target=load.run, args=(n,)) for n in range(clients)]
        for thread in threads:
            thread.start()
        began, moves = time.monotonic(), 0
        while (at := time.monotonic() - began) < minutes * 60:
            order = (second, first, second, broken)
            goal = order[moves % 4]
            store.client.set_registered_model_alias(store.model, store.alias, str(goal.version))
            moves += 1
            mb = replica_mb(psutil.Process().children(recursive=True))
            sizes.append((round(at, 1), round(mb, 1)))
            print(f"{at:.0f} s: {mb:.0f} MB, {load.done.total()} requests", file=sys.stderr)
            time.sleep(MOVE_S)
        store.client.set_registered_model_alias(store.model, store.alias, str(first.version))
        stop.set()
        for thread in threads:
            thread.join()
        time.sleep(2 * cfg.flush_s)
        ready = load._ask("/ready", None)
        images = ImageTable(f"{running.requests}/answers")
        rows = len(scan.rows(images, images.pin(), ["request_id"]))
    close()
    tenth = max(1, len(sizes) // 10)
    early = [mb for _, mb in sizes[2 * tenth : 3 * tenth]]
    late = [mb for _, mb in sizes[-tenth:]]
    growth = statistics.median(late) - statistics.median(early)
    return {
        "ratios": {"log_rows_vs_answers": rows / load.predictions},
        "requests": load.done.total(),
        "by_action": dict(load.done),
        "lost": dict(load.lost),
        "wrong": dict(load.wrong),
        "models": dict(load.models),
        "promotions": moves,
        "ready": ready,
        "growth_mb": round(growth, 1),
        "replica_mb": sizes[:: max(1, len(sizes) // 20)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON line on stdout")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=8)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        result = measure(Path(temporary), asked.minutes, asked.clients) | {
            "machine": machine(),
            "commit": commit(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": "python -m benchmarks.serve_load " + " ".join(sys.argv[1:]),
        }
    print(json.dumps(result, indent=None if asked.json else 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
