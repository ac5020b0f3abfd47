"""Claim: `raypipe serve` picks the batching that is best on this machine, and answers at least as
many requests as a server of forty lines.

python -m benchmarks.serve_online --json [--rounds 5] [--seconds 5] [--models efficientnet_lite0]

Servers: ours at its defaults (so it keeps a request log), bare_server.py, and `mlflow models serve`
on the same registered model. All run at once, and one at a time is asked, in turn, so a slow minute
meets all of them. auto, on and off are one process that batches in one way and then in another: of
two processes with the same code one may be a tenth faster. Clients (http_load.py): 1, 8 and 32,
without a pause between two requests. Photographs of 500x375 for efficientnet_lite0, 32 px JPEGs for
small_cnn.

auto_vs_best_N: requests/s of auto ÷ the better of on and off, N clients. online_vs_bare_server_N:
auto ÷ bare_server.py. batched_vs_unbatched_N: on ÷ off. Each is the median over the rounds, in
pairs of one round. cold_s: from the command to the first answer, once each.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.feed import commit, machine
from benchmarks.serve_batch import small_images, store_of

Result = dict[str, Any]
CLIENTS = (1, 8, 32)
BATCHING = ("auto", "on", "off")
MODELS = ("efficientnet_lite0", "small_cnn")
CPUS = 2
START_S = 180


# Servers


@contextmanager
def started(command: list[str], ready: str, log: Path) -> Iterator[float]:
    """A server in a process group of its own, once `ready` answers 200; the seconds until then."""
    began = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, start_new_session=True, env=environment
        )
    try:
        while not _answers(ready):
            if process.poll() is not None or time.perf_counter() - began > START_S:
                raise SystemExit(f"{command[2]} did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.05)
        yield time.perf_counter() - began
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def bare(home: Path) -> Iterator[tuple[str, float]]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.bare_server", str(home / "package"), str(port)]
    address = f"http://127.0.0.1:{port}"
    with started(command, f"{address}/ready", home / "bare.log") as cold_s:
        yield f"{address}/predict", cold_s


@contextmanager
def mlflow_serve(home: Path, store: Any) -> Iterator[tuple[str, float]]:
    import mlflow

    from raypipe.registry import promote

    uri = promote.require_champion(store).uri
    files = mlflow.artifacts.download_artifacts(
        artifact_uri=uri, tracking_uri=store.address, dst_path=str(home / "mlflow")
    )
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", files]
    command += ["--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    address = f"http://127.0.0.1:{port}"
    with started(command, f"{address}/ping", home / "mlflow.log") as cold_s:
        yield f"{address}/invocations", cold_s


@contextmanager
def command_line(home: Path, name: str) -> Iterator[float]:
    """`raypipe serve` as a user starts it; the seconds until it is ready."""
    port = free_port()
    config = home / "serve.yaml"
    config.write_text(f"run: {{name: {name}, dir: {home / 'run'}}}\ntable: {{uri: none}}\n")
    command = [sys.executable, "-m", "raypipe", "serve", str(config), f"serve.port={port}"]
    command += ["cluster.address=local", f"cluster.cpus={CPUS}"]
    with started(command, f"http://127.0.0.1:{port}/ready", home / "serve.log") as cold_s:
        yield cold_s


# What is measured


def measure(folder: Path, name: str, rounds: int, seconds: float) -> Result:
    """All servers of one model."""
    from raypipe.cluster.connect import ClusterConfig, close, connect
    from raypipe.registry.tracking import RegistryConfig
    from raypipe.serve.online import server
    from raypipe.serve.online.settings import ServeConfig

    home = folder / name
    image = home / "image.jpg"
    run, store = store_of(home, name)
    image.write_bytes(_image(folder, name))
    cold_s: Result = {}
    with command_line(home, name) as took:
        cold_s["raypipe"] = round(took, 1)

    connect(ClusterConfig(address="local", cpus=CPUS))
    cfg = ServeConfig(port=0, requests=str(home / "requests"))
    with ExitStack() as stack:
        one = stack.enter_context(server.running(run, RegistryConfig(), cfg))

        def batch_as(who: str) -> str:
            plan: str = one.replica.replan.remote(who).result(timeout_s=30)
            return plan

        addresses = dict.fromkeys(BATCHING, f"{one.address}/predict")
        plans = {who: batch_as(who) for who in BATCHING}
        addresses["bare"], took = stack.enter_context(bare(home))
        cold_s["bare"] = round(took, 1)
        addresses["mlflow"], took = stack.enter_context(mlflow_serve(home, store))
        cold_s["mlflow"] = round(took, 1)
        by_clients = {n: _rounds(addresses, batch_as, image, n, rounds, seconds) for n in CLIENTS}
    close()
    ratios: Result = {}
    for clients, seen in by_clients.items():
        rates = {who: [one["per_s"] for one in found] for who, found in seen.items()}
        ratios |= _ratios(rates, clients)
    return {
        "ratios": {key: statistics.median(values) for key, values in ratios.items()},
        "by_round": ratios,
        "cold_s": cold_s,
        "batching": plans,
        "servers": {n: _servers(seen) for n, seen in by_clients.items()},
    }


def _image(folder: Path, name: str) -> bytes:
    from benchmarks import pictures

    if name == "small_cnn":
        return next(small_images(range(1)))
    return next(pictures.photos([0]))


def _rounds(
    addresses: dict[str, str],
    batch_as: Callable[[str], str],
    image: Path,
    clients: int,
    rounds: int,
    seconds: float,
) -> dict[str, list[Result]]:
    """What the clients saw of each server, a round after the other."""
    seen: dict[str, list[Result]] = {who: [] for who in addresses}
    for number in range(rounds):
        # Another one is first in each round.
        order = (
            list(addresses)[number % len(addresses) :] + list(addresses)[: number % len(addresses)]
        )
        for who in order:
            if who in BATCHING:
                batch_as(who)
            seen[who].append(_asked(addresses[who], image, clients, seconds, who == "mlflow"))
            print(f"{clients} clients, {who}: {seen[who][-1]}", file=sys.stderr)
    return seen


def _asked(address: str, image: Path, clients: int, seconds: float, is_json: bool) -> Result:
    command = [sys.executable, "-m", "benchmarks.http_load", address, str(image)]
    command += [str(clients), str(seconds), *(["--json-body"] if is_json else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: Result = json.loads(done.stdout)
    if found["failed"]:
        raise SystemExit(f"{address} refused {found['failed']} of {found['answers']} requests")
    return found


def _ratios(rates: dict[str, list[float]], clients: int) -> dict[str, list[float]]:
    """A ratio of each round."""

    def ratio(mine: str, other: str) -> list[float]:
        return [round(a / b, 3) for a, b in zip(rates[mine], rates[other], strict=True)]

    best = max(("on", "off"), key=lambda who: statistics.median(rates[who]))
    return {
        f"auto_vs_best_{clients}": ratio("auto", best),
        f"batched_vs_unbatched_{clients}": ratio("on", "off"),
        f"online_vs_bare_server_{clients}": ratio("auto", "bare"),
        f"online_vs_mlflow_{clients}": ratio("auto", "mlflow"),
    }


def _servers(seen: dict[str, list[Result]]) -> Result:
    """Medians over the rounds of what the clients saw."""
    keys = ("per_s", "p50_ms", "p99_ms")
    return {
        who: {key: round(statistics.median(one[key] for one in found), 1) for key in keys}
        for who, found in seen.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON line on stdout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--models", default=",".join(MODELS))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = {
            name: measure(Path(temporary), name, asked.rounds, asked.seconds)
            for name in asked.models.split(",")
        }
    result = {
        "models": found,
        "machine": machine(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.serve_online " + " ".join(sys.argv[1:]),
    }
    print(json.dumps(result, indent=None if asked.json else 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
