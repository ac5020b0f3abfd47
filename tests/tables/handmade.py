"""Delta tables written by hand, as other engines write them.

They have a JSON log, Parquet with field ids, and deletion vectors. deltalake writes neither
deletion vectors nor column mapping. The golden tables hold no inline vector, no vector over several
row groups, and no mapping by id.
Formats: Delta protocol (deletion vector format, Base85) and the portable roaring bitmap format.
"""

from __future__ import annotations

import json
import struct
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.tables import rewrite
from raypipe.tables.table import ImageTable, TableVersion

Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
Action = dict[str, Any]


def commit(table: Path, *actions: Action) -> int:
    """Add one version to the log; returns its number."""
    log = table / "_delta_log"
    log.mkdir(parents=True, exist_ok=True)
    version = len(list(log.glob("*.json")))
    (log / f"{version:020d}.json").write_text(
        "\n".join(json.dumps(a) for a in actions) + "\n", encoding="utf-8"
    )
    return version


def drop(table: ImageTable, pinned: TableVersion, ids: Sequence[str], why: str) -> TableVersion:
    """The version without every row that has one of these ids."""
    rows = rewrite.places(table, pinned, [table.columns.id]).to_pylist()
    gone = [rewrite.Place(r["file"], r["place"]) for r in rows if r[table.columns.id] in ids]
    return rewrite.drop(table, pinned, gone, why)


def protocol(*features: str, reader: int = 3, writer: int = 7) -> Action:
    """`features` when the protocol lists them, else the old reader and writer versions alone."""
    listed = (
        {"readerFeatures": list(features), "writerFeatures": list(features)} if features else {}
    )
    return {"protocol": {"minReaderVersion": reader, "minWriterVersion": writer, **listed}}


def metadata(
    fields: Sequence[Action], partition: Sequence[str] = (), **configuration: str
) -> Action:
    return {
        "metaData": {
            "id": "by-hand",
            "format": {"provider": "parquet", "options": {}},
            "schemaString": json.dumps({"type": "struct", "fields": list(fields)}),
            "partitionColumns": list(partition),
            "configuration": configuration,
            "createdTime": 0,
        }
    }


def column(
    name: str, kind: Any = "long", id: int | None = None, physical: str | None = None
) -> Action:
    """A field of the schema; `id` and `physical` are its column mapping."""
    mapped = (
        {}
        if id is None
        else {"delta.columnMapping.id": id, "delta.columnMapping.physicalName": physical or name}
    )
    return {"name": name, "type": kind, "nullable": True, "metadata": mapped}


def add(
    table: Path,
    rows: pa.Table,
    path: str,
    group: int = 1_000_000,
    dv: Action | None = None,
    logged: str = "",
    **partition: Any,
) -> Action:
    """Write a Parquet file and return the action that adds it.

    `logged` is its path in the log, where that differs.
    """
    (table / path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, table / path, row_group_size=group, store_schema=False)
    return {
        "add": {
            "path": logged or path,
            "partitionValues": partition,
            "size": (table / path).stat().st_size,
            "modificationTime": 0,
            "dataChange": True,
            "stats": json.dumps({"numRecords": len(rows)}),
            **({"deletionVector": dv} if dv else {}),
        }
    }


def inline(rows: Sequence[int]) -> Action:
    """A deletion vector inside the log."""
    data = _bitmap(rows)
    return {
        "storageType": "i",
        "pathOrInlineDv": _base85(data),
        "sizeInBytes": len(data),
        "cardinality": len(rows),
    }


def on_disk(table: Path, rows: Sequence[int], absolute: bool = False) -> Action:
    """A deletion vector in a file of its own, named relative to the table or absolutely."""
    data, name = _bitmap(rows), uuid.uuid4()
    file = table / f"deletion_vector_{name}.bin"
    file.write_bytes(
        b"\x01" + struct.pack(">I", len(data)) + data + struct.pack(">I", zlib.crc32(data))
    )
    where = {"storageType": "p", "pathOrInlineDv": file.as_uri()} if absolute else None
    where = where or {"storageType": "u", "pathOrInlineDv": _base85(name.bytes)}
    return {**where, "offset": 1, "sizeInBytes": len(data), "cardinality": len(rows)}


def _bitmap(rows: Sequence[int]) -> bytes:
    """A 64-bit roaring bitmap with array containers, and bitset containers above 4,096 values."""
    rows_N = np.unique(np.asarray(rows, np.uint64))
    highs = np.unique(rows_N >> np.uint64(32))
    out = struct.pack("<IQ", 1681511377, len(highs))
    for high in highs:
        mine = (rows_N[rows_N >> np.uint64(32) == high] & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        parts = {
            key: (mine[mine >> 16 == key] & 0xFFFF).astype(np.uint16)
            for key in np.unique(mine >> 16)
        }
        bodies = [_container(values) for values in parts.values()]
        head = b"".join(struct.pack("<HH", key, len(values) - 1) for key, values in parts.items())
        starts = np.cumsum([8 + 8 * len(parts)] + [len(b) for b in bodies])[:-1]
        out += (
            struct.pack("<III", int(high), 12346, len(parts))
            + head
            + starts.astype("<u4").tobytes()
            + b"".join(bodies)
        )
    return out


def _container(values: np.ndarray) -> bytes:
    if len(values) <= 4096:
        return values.astype("<u2").tobytes()
    bits = np.zeros(65536, np.uint8)
    bits[values] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def _base85(data: bytes) -> str:
    data += bytes(-len(data) % 4)
    numbers = struct.unpack(f">{len(data) // 4}I", data)
    return "".join(Z85[n // 85**p % 85] for n in numbers for p in (4, 3, 2, 1, 0))
