"""raypipe export: a registered model as a file for other runtimes, compared before it is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from raypipe.errors import ConfigError, DataError
from raypipe.images.decode import decode_good
from raypipe.models.tasks import NUMERIC
from raypipe.registry import export as exporting
from raypipe.registry.export import OF_NUMBERS, Exported, Sample
from raypipe.registry.graph import FORMATS, Format
from raypipe.registry.package import Package
from raypipe.tables import label_column, scan
from raypipe.tables.scan import Where
from raypipe.tables.table import ImageTable, TableConfig
from raypipe.work import find
from raypipe.work.result import Facts, Result

MOST_IMAGES = 512  # that a file is compared on


@dataclass(frozen=True, repr=False)
class ExportedModel(Result):
    """A file, the version it was made from, and how near it is."""

    version: str
    numeric: bool
    done: Exported

    def facts(self) -> Facts:
        done = self.done
        unit = f" {OF_NUMBERS}" if done.relative else ""
        facts = {
            "model": self.version,
            "file": str(done.path),
            "size": f"{done.size / 1e6:.2f} MB",
            "compared on": f"{done.images} images: {done.source}",
            "scores apart": f"at most {_at_most(done.apart, 1)}{unit}",
        }
        if done.int8 is None:
            return facts
        # How much smaller and faster depends on the model; it may well be slower.
        int8 = done.int8
        # Two numbers are hardly ever the same.
        facts |= {} if self.numeric else {"int8, same labels": f"{int8.agree:.1%}"}
        facts |= {
            "int8, scores apart": f"at most {_at_most(int8.apart, 2)}{unit}",
            "int8, size": f"1/{int8.smaller:.2f} of float32",
            "int8, speed": f"{int8.faster:.2f} times float32, on this machine",
        }
        if int8.quality is not None:
            name = "mean error" if self.numeric else "accuracy"
            facts[f"int8, {name}"] = f"{int8.quality:.4g}, float32 {int8.float_quality:.4g}"
        return facts

    def summary(self) -> Facts:
        return {"model": self.version} | asdict(self.done) | {"path": str(self.done.path)}


def _at_most(value: float, digits: int) -> str:
    """The value with so many digits, and never below it."""
    text = f"{value:.{digits}g}"
    if not float(text) < value:  # NaN, too
        return text
    step = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return f"{float(text) + step:.{digits}g}"


def export(
    format: str,
    model: str,
    out: Path,
    overrides: Sequence[str] = (),
    int8: bool = False,
    table: str | None = None,
) -> ExportedModel:
    """Write a registered model to `out` as onnx, pt2 or torchscript.

    model: models:/NAME@ALIAS, models:/NAME/VERSION, or a YAML configuration for its champion.
    table: a Delta table to compare on; otherwise the model's own reference images are read, if
    their table can be. Raises as registry.export does.
    """
    if format not in FORMATS:
        raise ConfigError("There is no such format", got=format, rule=", ".join(FORMATS))
    known: Format = format
    # Before a model is fetched, which may take a while.
    exporting.check(known, int8)
    if out.is_dir():
        raise ConfigError("OUT is a folder", got=str(out), fix="Name a file, as model.onnx")
    found = find.of_command(model, overrides)
    package = found.package
    sample = _of_table(package, table) if table else _of_reference(package)
    done = exporting.export(package, known, out, sample, int8)
    return ExportedModel(str(found.version), package.task.kind in NUMERIC, done)


def _of_table(package: Package, uri: str) -> Sample:
    """Images of a table that the user named, with its columns as the model's own table has them."""
    # Its columns are likely named as those of the table that the model learned from.
    settings = {**_own_table(package), "uri": uri, "version": None, "where": {}, "sample": 1.0}
    cfg = TableConfig.model_validate(settings)
    table = ImageTable.open(cfg)
    version = table.pin(cfg.version)

    # A share by id, so that a large table costs no more than a small one.
    rows = len(scan.rows(table, version, [table.columns.id]))
    share = min(1.0, MOST_IMAGES / max(rows, 1))
    sampled = ImageTable.open(cfg.model_copy(update={"sample": share}))
    return _read(package, sampled, version.version, None, f"{uri}@v{version.version}")


def _of_reference(package: Package) -> Sample:
    """The model's reference images; drawn ones if their table cannot be read."""
    # Some reference images may have no id; the others suffice.
    own = _own_table(package)
    ids = [name for name in package.reference().ids if name][:MOST_IMAGES]
    try:
        if own and ids:
            version = package.info["table"]["version"]
            cfg = TableConfig.model_validate(own | {"version": version})
            table = ImageTable.open(cfg)
            where: Where = {table.columns.id: ids}
            return _read(package, table, version, where, "the model's reference images")
    except DataError:
        # The table has moved, or is not for this reader.
        pass
    return exporting.drawn(package.side_px)


def _own_table(package: Package) -> dict[str, object]:
    """The settings of the table that the model was trained on; {} where the package has none."""
    return dict(package.info.get("config", {}).get("table", {}))


def _read(
    package: Package, table: ImageTable, version: int, where: Where | None, source: str
) -> Sample:
    """Images that decode, and their labels. Raises DataError where there is none."""
    columns = table.columns
    pinned = table.pin(version)
    # New images may have no labels at all.
    has_labels = columns.label in {field.name for field in table.at(pinned).schema().fields}
    wanted = [columns.image, *([columns.label] if has_labels else [])]
    rows = scan.rows(table, pinned, wanted, where)
    decoded = decode_good(rows[columns.image].to_pylist(), package.side_px)
    if not decoded.good:
        raise DataError("There is no image to compare on", got=source)
    labels: list[str | None] = [None] * len(rows)
    if has_labels:
        read = label_column.read(rows[columns.label], package.task.kind, columns.label)
        labels = read.to_pylist()
    known = tuple(labels[place] for place in decoded.good)
    return Sample(decoded.pixels_NHWC, known, source)
