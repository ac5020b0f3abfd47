"""`train.workers=[1, 2]` while it runs: a node joins and the training grows, the node dies and the
training shrinks.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.config import dump, replace, validate
from raypipe.feed.dataset import pin
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.table import TableConfig
from raypipe.train import checkpoint, trainer
from raypipe.train.job import TrainJob
from raypipe.train.parallel.native import Single

pytestmark = pytest.mark.chaos
ROOT = Path(__file__).parents[2]
EPOCHS, SAVED = 8, 2  # a checkpoint every two steps
Step = tuple[int, int]  # epoch, step


@pytest.fixture(scope="module")
def job(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    """One worker, in this process, without a cluster."""
    folder = tmp_path_factory.mktemp("elastic")
    table = TableConfig(uri=str(folder / "table"))
    source = {"images": str(photos), "labels": str(photos / "labels.csv")}
    ingest(table, validate(IngestConfig, {"from": source, "splits": {"train": 0.6, "val": 0.4}}))
    settings: dict[str, Any] = {
        "table": table.model_dump(),
        "run": {"dir": str(folder / "alone")},
        "cluster": {"address": "none"},
        "feed": {"carrier": "threads", "trace": str(folder / "alone" / "trace")},
        "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False, "dropout": 0.0},
        "augment": {"flip_horizontal": True, "shift": 0.1},
        "train": {
            "epochs": EPOCHS,
            "batch_size": 4,
            "lr": 0.001,
            "precision": "fp32",
            "sync_bn": True,
            "result": "last",
        },
    }
    settings["train"] |= {
        "checkpoint_steps": SAVED,
        "timeout_s": 20,
        "stopping": {"patience": None},
        "max_failures": 1,
    }
    return validate(TrainJob, settings)


def test_a_training_grows_and_shrinks_while_it_runs(
    job: TrainJob,
    own_ray: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates: list[float] = []
    set_lr = Single.set_lr

    def noting(self: Single, lr: float, epoch: int) -> None:
        rates.append(lr)
        set_lr(self, lr, epoch)

    monkeypatch.setattr(Single, "set_lr", noting)
    alone = checkpoint.read(Path(trainer.run(job).checkpoint)).weights
    notes, trace = tmp_path / "notes", tmp_path / "trace"
    notes.mkdir()
    mine = replace(
        job,
        {
            "run.dir": str(tmp_path / "run"),
            "cluster.address": "auto",
            "feed.trace": str(trace),
            "train.workers": [1, 2],
        },
    )
    (tmp_path / "job.yaml").write_text(dump(mine))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = str(bound.getsockname()[1])
    command = [
        sys.executable,
        "-m",
        "tests.chaos.joining_nodes",
        str(tmp_path / "job.yaml"),
        str(notes),
        port,
    ]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=220, cwd=ROOT, env=os.environ | own_ray
    )
    assert process.returncode == 0, process.stdout + process.stderr

    steps = [json.loads(line) for line in (notes / "steps.jsonl").read_text().splitlines()]
    worlds = [world for world, _ in itertools.groupby(step["world"] for step in steps)]
    assert worlds == [1, 2, 1]
    joined, lost = (float((notes / what).read_text()) for what in ("joined", "lost"))
    grown = min(step["at"] for step in steps if step["world"] == 2)
    alone_until = max(step["at"] for step in steps if step["at"] < grown)
    shrunk = min(step["at"] for step in steps if step["world"] == 1 and step["at"] > grown)
    print(
        f"\ngrew {grown - joined:.1f} s after the node joined ({grown - alone_until:.1f} s "
        "without a step)"
    )
    print(f"went on {shrunk - lost:.1f} s after the node was killed")

    expected = merged(list_of_files(Path(str(job.feed.trace))))
    groups = [merged(files) for files in by_group(trace)]
    first, both, last = groups
    assert sorted(expected) == [
        (e, t) for e in range(EPOCHS) for t in range(len(expected) // EPOCHS)
    ]
    assert all(batch == expected[at] for group in groups for at, batch in group.items()), (
        "another sequence of samples"
    )
    before, after, order = sorted(first), sorted(last), sorted(expected)
    assert min(both) == order[order.index(before[-1]) + 1], "growing lost or repeated a step"
    repeated = [at for at in both if at >= after[0]]
    assert (
        {*before, *both, *after} == set(order) and before[0] == order[0] and after[-1] == order[-1]
    )
    assert len(repeated) <= SAVED, f"steps that were trained again: {repeated}"
    print(
        f"grew at {min(both)} without repeating a step, went on at {after[0]}, repeating {repeated}"
    )

    # The schedule goes on where it was. Weights would hardly tell: a step too far moves them by ten
    # times their noise.
    assert len(rates) == len(order)
    of_rank_0 = [step for step in steps if step["rank"] == 0]
    for first_step, (_, group_steps) in zip(
        (before[0], min(both), after[0]),
        itertools.groupby(of_rank_0, lambda step: step["world"]),
        strict=True,
    ):
        had = [step["lr"] for step in group_steps]
        at = order.index(first_step)
        assert had == rates[at : at + len(had)], "another learning rate"

    folder = (
        mine.run.path
        / "train"
        / mine.training_key(pin(mine.table, mine.feed).version)
        / "checkpoints"
    )
    found = checkpoint.read(folder / checkpoint.name(EPOCHS)).weights
    assert found.keys() == alone.keys()
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    apart = [(found[n] - alone[n]).double().flatten() for n in alone if not n.endswith(statistics)]
    distance = torch.cat(apart)
    rms, most = float(distance.square().mean().sqrt()), float(distance.abs().max())
    print(f"weights differ by {rms:.2e} (rms) and {most:.2e} (most)")
    moved: dict[str, float] = {}
    for name in alone:
        norm, _, kind = name.rpartition(".")
        if kind in statistics[:2]:
            variance = alone[f"{norm}.running_var"].double()
            scale = variance.sqrt() if kind == "running_mean" else variance
            apart_C = (found[name].double() - alone[name].double()).abs() / scale
            moved[kind] = max(moved.get(kind, 0.0), float(apart_C.max()))
        elif kind in statistics:
            assert torch.equal(found[name], alone[name]), name
    print(f"statistics, in units of spread and variance: {moved}")
    # Adam's step is about the learning rate, however small the gradient: sums in another order
    # turn a few steps around.
    lr = float(job.train.lr)
    assert rms < 0.05 * lr and most < lr
    assert moved["running_mean"] < 0.05 and moved["running_var"] < 0.05


def list_of_files(trace: Path) -> list[Path]:
    return sorted(trace.glob("*.jsonl"))


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def by_group(trace: Path) -> list[list[Path]]:
    """The files of each group of workers, in their order: one worker, two, one."""
    files = list_of_files(trace)
    one = sorted(
        (f for f in files if "-of-1-" in f.name),
        key=lambda f: (lines(f)[0]["epoch"], lines(f)[0]["step"]),
    )
    two = [f for f in files if "-of-2-" in f.name]
    assert len(one) == 2 and len(two) == 2, f"groups: {[f.name for f in files]}"
    return [one[:1], two, one[1:]]


def merged(files: list[Path]) -> dict[Step, list[str]]:
    """Global batches: the ranks' samples by their places in the stream. A killed rank may lack the
    last.
    """
    batches: dict[Step, dict[int, list[tuple[int, str]]]] = {}
    for line in itertools.chain.from_iterable(lines(file) for file in files):
        placed = list(zip(line["positions"], line["ids"], strict=True))
        batches.setdefault((line["epoch"], line["step"]), {})[line["rank"]] = placed
    whole = {at: ranks for at, ranks in batches.items() if len(ranks) == len(files)}
    return {
        at: [i for _, i in sorted(itertools.chain.from_iterable(ranks.values()))]
        for at, ranks in whole.items()
    }
