"""Claim: with raypipe's GOMP_SPINCOUNT a training step on CPUs is at least twice as fast where
something else runs, and at most a tenth slower on a quiet machine.

python -m benchmarks.spin --json [--rounds 3]

A step of small_cnn (64 px, batch 32) and one of efficientnet_lite0 (128 px, batch 32) on all cores,
each in a process of its own, with the setting and without, in turn. `busy`: beside one process that
does nothing but count. Ratios are step times without ÷ with it; medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from datetime import datetime, timezone

from benchmarks.feed import commit, machine

MODELS = {"small_cnn": 64, "efficientnet_lite0": 128}
BATCH, SECONDS = 32, 4.0
STEP = """
import sys, time, torch
from raypipe.models.zoo import ImageModel, ModelConfig
name, px, batch, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
cfg = ModelConfig(name=name, mode="finetune", pretrained=False, side_px=px)
model = ImageModel(cfg, 2).train()
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
images = torch.randint(0, 255, (batch, px, px, 3), dtype=torch.uint8)
labels = torch.randint(0, 2, (batch,))
def step():
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
step()
began, steps = time.perf_counter(), 0
while time.perf_counter() - began < seconds:
    step()
    steps += 1
print((time.perf_counter() - began) / steps * 1e3)
"""


def step_ms(name: str, spin: bool) -> float:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP", "OMP"))}
    if spin:
        from raypipe.cluster.connect import ENV

        environment["GOMP_SPINCOUNT"] = ENV["GOMP_SPINCOUNT"]
    given = [name, str(MODELS[name]), str(BATCH), str(SECONDS)]
    command = [sys.executable, "-c", STEP, *given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure(rounds: int) -> dict[str, object]:
    found: dict[str, dict[str, list[float]]] = {}
    for load in ("quiet", "busy"):
        beside = None
        if load == "busy":
            beside = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            for _ in range(rounds):
                for name in MODELS:
                    times = found.setdefault(f"{load}_{name}", {"with": [], "without": []})
                    times["without"].append(step_ms(name, spin=False))
                    times["with"].append(step_ms(name, spin=True))
        finally:
            if beside is not None:
                beside.kill()
                beside.wait()
    ratios = {
        key: statistics.median(times["without"]) / statistics.median(times["with"])
        for key, times in found.items()
    }
    return {"ratios": ratios, "step_ms": found}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON line on stdout")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    result = measure(asked.rounds) | {
        "load_before": os.getloadavg()[0],
        "machine": machine(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.spin " + " ".join(sys.argv[1:]),
    }
    print(json.dumps(result, indent=None if asked.json else 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
