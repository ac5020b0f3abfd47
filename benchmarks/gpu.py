"""Claim: on a GPU, training from JPEGs keeps up with training on one batch that lies there already;
and what strategies cost.

make gpu-check, or python -m benchmarks.gpu --json [--images 8192] [--batch 256] [--steps 60]
    [--models NAME,NAME] [--strategies NAME,NAME]

Needs torch and one GPU, neither Ray nor a lake: train/loop.py, parallel, augment and decode know
none. Prints one JSON line with the device's name; without a GPU it says so and ends well. What is
not installed (a model's package, DeepSpeed) is skipped, and `skipped` says why. Each result is on
stderr as soon as it is there: a lease of a GPU may end before the last.

images_per_s: whole steps of `fit` at 224 px in bf16 (channels_last, flips and crops on the device,
AdamW) after ten of them. `one_batch` is the limit; `real` decodes 500x375 JPEGs in threads, by our
Feed from a Delta table where that is installed, else from a folder of files with the same decoder;
`offload`, measured once, decodes them in Ray tasks, where Ray is installed; `compiled` is one_batch
under torch.compile. strategies: a rank for each GPU, 32 layers that hold 302 million parameters, 64
images a rank; the most memory of a rank.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks import pictures
from raypipe.errors import RaypipeError
from raypipe.feed.share import Share
from raypipe.images.augment import AugmentConfig
from raypipe.images.decode import decode_into
from raypipe.models.tasks import Task
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.train import parallel
from raypipe.train.loop import LoopState, fit
from raypipe.train.objective import Objective
from raypipe.train.settings import TrainConfig

MODELS = ("efficientnet_lite0", "torchvision:resnet50", "timm:vit_base_patch16_224")
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp_offload": {"strategy": "fsdp", "offload": "optimizer"},
    "zero3": {"strategy": "zero3"},
    "zero3_offload": {"strategy": "zero3", "offload": "optimizer"},
}
WARM_UP, ROUNDS, CHUNK, AHEAD = 10, 3, 32, 3
AUGMENT = AugmentConfig(flip_horizontal=True, crop_area=0.5)


class Batch(NamedTuple):
    """As in feed/feed.py, which needs Ray."""

    inputs: Tensor
    labels_B: Tensor
    positions_B: np.ndarray
    share: Share


Batches = Callable[[], Iterator[Batch]]


class Timed:
    """The feed that `fit` gets: so many training batches, timed after the warm-up, and one to judge
    by.
    """

    def __init__(self, batches: Batches, steps: int, device: torch.device) -> None:
        self.steps, self.seconds, self._batches, self._device = steps, 0.0, batches, device

    def train(self, epoch: int, step: int = 0) -> Iterator[Batch]:
        started = 0.0
        for i, batch in enumerate(itertools.islice(self._batches(), self.steps)):
            if i == WARM_UP:
                started = self._now()
            yield batch
        self.seconds = self._now() - started

    def val(self) -> Iterator[Batch]:
        yield next(self._batches())

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def one_batch(batch_size: int, side_px: int, device: torch.device) -> Batches:
    """The same batch again and again, where it is needed."""
    pixels = torch.randint(
        0, 256, (batch_size, side_px, side_px, 3), dtype=torch.uint8, device=device
    )
    batch = Batch(
        pixels,
        torch.arange(batch_size, device=device) % pictures.CLASSES,
        np.arange(batch_size),
        Share.whole(batch_size),
    )
    return lambda: itertools.repeat(batch)


def from_folder(
    files: Sequence[Path], batch_size: int, side_px: int, device: torch.device
) -> Batches:
    """Files read and decoded on all cores, a few batches ahead, into pinned memory, as
    feed/loaders.py does it.
    """

    def decode(files: Sequence[Path], out_BHWC: np.ndarray) -> None:
        for file, out_HWC in zip(files, out_BHWC, strict=True):
            decode_into(file.read_bytes(), out_HWC)

    def batches() -> Iterator[Batch]:
        rng, pending = np.random.default_rng(0), deque[tuple[Tensor, np.ndarray, list[Any]]]()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            while True:
                samples_B = rng.choice(len(files), batch_size, replace=False)
                pixels = torch.empty(
                    (batch_size, side_px, side_px, 3),
                    dtype=torch.uint8,
                    pin_memory=device.type == "cuda",
                )
                cuts = range(0, batch_size, CHUNK)
                chosen = [[files[n] for n in samples_B[i : i + CHUNK]] for i in cuts]
                parts = [
                    pool.submit(decode, part, pixels.numpy()[i : i + CHUNK])
                    for i, part in zip(cuts, chosen, strict=True)
                ]
                pending.append((pixels, samples_B, parts))
                if len(pending) > AHEAD:
                    pixels, samples_B, parts = pending.popleft()
                    for part in parts:
                        part.result()
                    labels_B = torch.from_numpy(samples_B % pictures.CLASSES).to(
                        device, non_blocking=True
                    )
                    yield Batch(
                        pixels.to(device, non_blocking=True),
                        labels_B,
                        samples_B,
                        Share.whole(batch_size),
                    )

    return batches


def from_lake(
    uri: str, carrier: str, batch_size: int, side_px: int, device: torch.device
) -> Batches:
    """Our Feed with the loader `threads` or `offload`."""
    from raypipe.feed.dataset import FeedConfig, pin
    from raypipe.feed.feed import Feed, prepare
    from raypipe.tables.table import TableConfig

    fields = {"carrier": carrier, "prefetch": AHEAD, "val": "train", "test": "train"}
    cfg = FeedConfig.model_validate(fields)
    source = prepare(pin(TableConfig(uri=uri), cfg), ["train"], side_px, cfg, 0)["train"]

    def batches() -> Iterator[Any]:
        feed = Feed(source, source, batch_size, 0, device=device)
        try:
            for epoch in itertools.count():
                yield from feed.train(epoch)
        finally:
            feed.close()

    return batches


def rate(
    engine: parallel.Engine, objective: Objective, batches: Batches, batch_size: int, steps: int
) -> float:
    """Images/s of one rank in the loop itself."""
    feed = Timed(batches, steps, engine.device)
    cfg = TrainConfig(epochs=1, batch_size=batch_size)
    fit(engine, feed, objective, cfg, AUGMENT, LoopState(), lambda *_: None, lambda *_: None, 0)  # type: ignore[arg-type]
    return (steps - WARM_UP) * batch_size / feed.seconds


def trained(
    model: ModelConfig, device: torch.device, **settings: Any
) -> tuple[parallel.Engine, Objective]:
    torch.manual_seed(0)
    labels_N = np.arange(pictures.CLASSES)
    objective = Objective.of(Task("single_label", tuple(map(str, labels_N))), labels_N)
    engine = parallel.build(ImageModel(model, pictures.CLASSES), TrainConfig(**settings))
    return engine, objective.to(device)


def race(
    name: str, real: Batches, offload: Batches | None, size: Size, device: torch.device
) -> dict[str, Any]:
    """One model on one device: the limit, real data, compiled; their medians, of real data also the
    ratio.
    """
    model = ModelConfig(name=name, mode="finetune", pretrained=False, side_px=size.side_px)
    engine, objective = trained(model, device, precision=size.precision)
    same = one_batch(size.batch, size.side_px, device)
    pairs = [
        tuple(rate(engine, objective, b, size.batch, size.steps) for b in (real, same))
        for _ in range(ROUNDS)
    ]
    rates = {}
    if offload is not None:
        rates["offload"] = round(rate(engine, objective, offload, size.batch, size.steps), 1)
    del engine
    engine, _ = trained(model, device, precision=size.precision, compile=True)
    compiled = rate(engine, objective, same, size.batch, size.steps)
    reals, limits = zip(*pairs, strict=True)
    return {
        "real_vs_one_batch": round(statistics.median(r / limit for r, limit in pairs), 3),
        "images_per_s": {
            "real": round(statistics.median(reals), 1),
            "one_batch": round(statistics.median(limits), 1),
            "compiled": round(compiled, 1),
        }
        | rates,
    }


class Size(NamedTuple):
    batch: int
    side_px: int
    steps: int
    precision: str
    layers: int


def strategy(name: str, size: Size) -> dict[str, Any]:
    """Rate over all ranks and a rank's peak memory; or why there is none."""
    world = max(1, torch.cuda.device_count())
    if name.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        return {"skipped": "DeepSpeed is not installed"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(_rank, (world, name, size, folder), nprocs=world)
        except Exception as e:
            return {"failed": str(e).strip().splitlines()[-1][:300]}
        ranks = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("rank-*.json"))]
    peak_mb = max(r["peak_mb"] for r in ranks)
    return {
        "images_per_s": round(sum(r["rate"] for r in ranks), 1),
        "peak_mb": round(peak_mb, 1),
        "ranks": world,
    }


def _rank(rank: int, world: int, name: str, size: Size, folder: str) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    if cuda:
        torch.cuda.set_device(device)
    meeting, backend = (
        f"file://{folder}/meeting",
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
    )  # offloaded tensors meet on the CPU
    dist.init_process_group(
        backend, meeting, rank=rank, world_size=world, timeout=timedelta(minutes=5)
    )
    model = ModelConfig(
        name="file:benchmarks.clock:wide",
        mode="finetune",
        pretrained=False,
        side_px=32,
        options={"layers": size.layers},
    )
    batch = min(64, size.batch)
    settings = STRATEGIES[name] | {"precision": size.precision, "batch_size": batch * world}
    engine, objective = trained(model, device, **settings)
    found = rate(engine, objective, one_batch(batch, 32, device), batch, size.steps)
    peak_mb = torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0
    Path(folder, f"rank-{rank}.json").write_text(json.dumps({"rate": found, "peak_mb": peak_mb}))
    dist.barrier()
    os._exit(0)  # DeepSpeed's threads outlive the interpreter


def measure(
    folder: Path,
    images: int,
    size: Size,
    device: torch.device,
    models: Sequence[str],
    strategies: Sequence[str],
) -> dict[str, Any]:
    lake = all(importlib.util.find_spec(package) for package in ("ray", "deltalake"))
    raced, skipped, held = {}, {}, {}
    offload = None
    if models and lake:
        from raypipe.cluster import connect

        connect.prepare_environment()  # Ray reads its switches when it is imported
        import ray

        uri = pictures.table(folder, images)
        ray.init("local", include_dashboard=False, log_to_driver=False)
        real = from_lake(uri, "threads", size.batch, size.side_px, device)
        offload = from_lake(uri, "offload", size.batch, size.side_px, device)
    elif models:
        files = pictures.jpegs(folder / "jpegs", images)
        real = from_folder(files, size.batch, size.side_px, device)
    for name in models:
        try:
            raced[name] = race(name, real, offload, size, device)
        except (ImportError, RaypipeError) as e:
            skipped[name] = " ".join(str(e).split())[:200]
        _tell(name, raced.get(name) or skipped[name])
    for name in strategies:
        held[name] = strategy(name, size)
        _tell(name, held[name])
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu (a rehearsal)",
        "ratios": {
            f"real_vs_one_batch_{name}": found["real_vs_one_batch"] for name, found in raced.items()
        },
        "images_per_s": {name: found["images_per_s"] for name, found in raced.items()},
        "strategies": held,
        "skipped": skipped,
        "real": "Feed on a Delta table" if lake else "a folder of files",
        "size": size._asdict(),
    }


def _tell(name: str, result: Any) -> None:
    print(f"{name}: {json.dumps(result)}", file=sys.stderr, flush=True)


def _names(text: str) -> list[str]:
    """Names separated by commas; none for an empty text."""
    return [name for name in text.split(",") if name]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line; else indented")
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--models",
        type=_names,
        default=MODELS,
        help="names as in model.name, separated by commas; '' for none",
    )
    parser.add_argument(
        "--strategies",
        type=_names,
        default=tuple(STRATEGIES),
        help=f"of {', '.join(STRATEGIES)}; '' for none",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        default=Path(tempfile.gettempdir()) / "raypipe-benchmark",
        help="pictures' folder",
    )
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, tiny: does it run?")
    asked = parser.parse_args()
    if not torch.cuda.is_available() and not asked.rehearse:
        print("gpu-check skipped: torch sees no GPU here")
        return 0
    if asked.rehearse:
        device, images, size = torch.device("cpu"), 32, Size(8, 32, WARM_UP + 2, "fp32", 2)
    else:
        device, images, size = (
            torch.device("cuda", 0),
            asked.images,
            Size(asked.batch, 224, asked.steps, "bf16", 32),
        )
    unknown = [name for name in asked.strategies if name not in STRATEGIES]
    if unknown:
        parser.error(f"--strategies: no {', '.join(unknown)} among {', '.join(STRATEGIES)}")
    keep = asked.keep.absolute()
    result = measure(keep, images, size, device, asked.models, asked.strategies) | {
        "torch": torch.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.gpu " + " ".join(sys.argv[1:]),
    }
    print(json.dumps(result, indent=None if asked.json else 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
