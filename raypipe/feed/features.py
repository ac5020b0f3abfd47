"""Features of a frozen backbone.

They are computed once per image and backbone, and kept in a Delta table beside the run: a search, the final training
and a retrain on old plus new rows all read them, and only images never seen before cost a forward pass (30-50 images/s on two
cores, against 200,000/s for reading a feature back).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import torch

from raypipe.feed.dataset import FeedConfig, Pinned, locate
from raypipe.feed.feed import Source
from raypipe.images.decode import decode_batch
from raypipe.models.allocator import keep_memory
from raypipe.models.zoo import ImageModel, ModelConfig, fingerprint
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, append

log = logging.getLogger("raypipe")


def feature_sources(pinned: Pinned, splits: list[str], model: ModelConfig, feed: FeedConfig, store: str) -> dict[str, Source]:
    """The features of the labelled rows of each split as one array in the object store, computing only those it lacks."""
    rows = {split: locate(pinned, split, feed) for split in splits}
    features, new = _features(pinned, {i for r in rows.values() for i in r.ids.to_pylist()}, model, store)
    sources = {}
    for split, r in rows.items():
        ids = r.ids.to_pylist()
        inputs, decoded = np.stack([features[i] for i in ids]), len(new.intersection(ids))
        alone = replace(
            r, sizes_F=np.ones(len(r), np.int64), fragments=(), row_N=None, sha256_N32=None
        )  # no windows: all is here
        sources[split] = Source("memory", ray.put(alone), model.pixels, feed, inputs=ray.put(inputs), decoded=decoded)
    return sources


def _features(pinned: Pinned, ids: set[str], model: ModelConfig, store: str) -> tuple[dict[str, np.ndarray], set[str]]:
    """(the features of at least these images, which of them had to be computed)."""
    uri = f"{store}/{model.slug}-{model.pixels}px-{fingerprint(ImageModel(model, classes=2).backbone)}"
    have = _stored(uri)
    missing = ids - have.keys()
    if missing:
        log.info("Computing features of %d images (%d are stored already)", len(missing), len(ids) - len(missing))
        new = _embed(pinned, missing, model)
        rows = pa.table({"image_id": list(new), "features": [v.tobytes() for v in new.values()]})
        append(uri, rows, f"features of {pinned.version}")
        have |= new
    return have, missing


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
        features_BD, _ = _backbone(model.model_dump_json()).predict(decode_batch(list(batch["image"]), model.pixels, threads=1))
        return {"id": batch["id"], "features": features_BD}

    stream = scan.dataset(pinned.table, pinned.version, [c.id, c.image], pinned.where)
    stream = stream.map_batches(missing, batch_size=None).map_batches(embedded, batch_size=64)
    out: dict[str, np.ndarray] = {}
    for batch in stream.iter_batches(batch_size=256, batch_format="numpy"):
        out |= dict(zip(batch["id"].tolist(), batch["features"], strict=True))
    return out


@lru_cache(maxsize=1)
def _backbone(model: str) -> ImageModel:
    """Of a ModelConfig as JSON, which hashes. Built once in each worker process; Ray Data runs one task a CPU, so each takes
    one thread."""
    torch.set_num_threads(1)
    keep_memory()
    return ImageModel(ModelConfig.model_validate_json(model), classes=2).for_inference()
