"""Ray Data pipelines from a pinned version: decoded pixels, and features of a frozen backbone.

Features are computed once per image and backbone, and kept in a Delta table beside the run: a search, the final training
and a retrain on old plus new rows all read them, and only images never seen before cost a forward pass (30-50 images/s on two
cores, against 200,000/s for reading a feature back).
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
import torch

from raypipe.feed.dataset import FeedConfig, Pinned, Samples, label_indices
from raypipe.images.decode import decode_batch
from raypipe.models.zoo import ImageModel, ModelConfig, fingerprint
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, append

log = logging.getLogger("raypipe")


def pixels(pinned: Pinned, split: str, model: ModelConfig, feed: FeedConfig) -> ray.data.Dataset:
    """A lazy stream of {pixels: uint8 HWC, label: int64, id: str} rows of one split."""
    c = pinned.table.columns
    stream = scan.dataset(pinned.table, pinned.version, [c.id, c.label, c.image], pinned.rows_of(split))

    def decoded(batch: dict[str, Any]) -> dict[str, Any]:
        keep = [i for i, label in enumerate(batch[c.label]) if label is not None]
        return {
            "pixels": decode_batch([batch[c.image][i] for i in keep], model.pixels, feed.threads),
            "label": label_indices([batch[c.label][i] for i in keep], pinned.classes),
            "id": np.asarray([str(batch[c.id][i]) for i in keep], dtype=object),
        }

    return stream.map_batches(decoded, batch_size=64)


def pixel_samples(pinned: Pinned, split: str, model: ModelConfig, feed: FeedConfig) -> Samples:
    """One split decoded into memory, in the order of its ids, whatever order tasks finish in."""
    parts = list(pixels(pinned, split, model, feed).iter_batches(batch_size=256, batch_format="numpy"))
    ids = np.concatenate([p["id"] for p in parts])
    by_id = np.argsort(ids.astype(str), kind="stable")
    return Samples(
        np.concatenate([p["pixels"] for p in parts])[by_id],
        np.concatenate([p["label"] for p in parts])[by_id],
        tuple(ids[by_id]),
    )


def feature_samples(pinned: Pinned, splits: list[str], model: ModelConfig, feed: FeedConfig, store: str) -> dict[str, Samples]:
    """The features of the labelled rows of each split, computing only those the store lacks."""
    c = pinned.table.columns
    found = scan.rows(pinned.table, pinned.version, [c.id, c.label, c.split], {**pinned.where, c.split: splits}).to_pylist()
    labelled = {r[c.id]: r for r in found if r[c.label] is not None}
    features = _features(pinned, set(labelled), model, store)
    samples = {}
    for split in splits:
        ids = sorted(i for i, r in labelled.items() if r[c.split] == split)
        labels = label_indices([labelled[i][c.label] for i in ids], pinned.classes)
        inputs = np.stack([features[i] for i in ids]) if ids else np.empty((0, 0), np.float32)
        samples[split] = Samples(inputs, labels, tuple(ids))
    return samples


def _features(pinned: Pinned, ids: set[str], model: ModelConfig, store: str) -> dict[str, np.ndarray]:
    uri = f"{store}/{model.name}-{model.pixels}px-{fingerprint(ImageModel(model, classes=2).backbone)}"
    have = _stored(uri)
    missing = ids - have.keys()
    if missing:
        log.info("Computing features of %d images (%d are stored already)", len(missing), len(ids) - len(missing))
        new = _embed(pinned, missing, model)
        rows = pa.table({"image_id": list(new), "features": [v.tobytes() for v in new.values()]})
        append(uri, rows, f"features of {pinned.version}")
        have |= new
    return have


def _stored(uri: str) -> dict[str, np.ndarray]:
    if not ImageTable.exists(uri):
        return {}
    table = ImageTable(uri)
    stored = scan.rows(table, table.pin(), ["image_id", "features"])
    vectors = (np.frombuffer(v.as_py(), np.float32) for v in stored["features"])
    return dict(zip(stored["image_id"].to_pylist(), vectors, strict=True))


def _embed(pinned: Pinned, ids: set[str], model: ModelConfig) -> dict[str, np.ndarray]:
    c = pinned.table.columns
    wanted = ray.put(ids)  # once in the object store, not once in every task

    def missing(batch: dict[str, Any]) -> dict[str, Any]:
        mine = ray.get(wanted)
        keep = [i for i, image_id in enumerate(batch[c.id]) if image_id in mine]
        return {"id": batch[c.id][keep], "image": batch[c.image][keep]}

    def embedded(batch: dict[str, Any]) -> dict[str, Any]:
        features_BD, _ = _backbone(model).predict(decode_batch(list(batch["image"]), model.pixels, threads=1))
        return {"id": batch["id"], "features": features_BD}

    stream = scan.dataset(pinned.table, pinned.version, [c.id, c.image], pinned.where)
    stream = stream.map_batches(missing, batch_size=None).map_batches(embedded, batch_size=64)
    out: dict[str, np.ndarray] = {}
    for batch in stream.iter_batches(batch_size=256, batch_format="numpy"):
        out |= dict(zip(batch["id"].tolist(), batch["features"], strict=True))
    return out


@lru_cache(maxsize=1)
def _backbone(model: ModelConfig) -> ImageModel:
    """Built once in each worker process. Ray Data runs one task a CPU, so each takes one thread."""
    torch.set_num_threads(1)
    return ImageModel(model, classes=2).for_inference()
