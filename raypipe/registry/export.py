"""A package as a file for other runtimes: ONNX, torch.export (pt2) or TorchScript (graph.py).

No file is left that disagrees: it is run on images and compared with the package first.

int8 quantises matrix products, not convolutions. It makes a transformer 1.9 times as fast and 3.5
times smaller, and a convolutional network nothing. With its convolutions, efficientnet_lite0 took
14 times as long and kept 12 % of its labels (benchmarks/results/2026-11-23-int8.md). The scale of
activations is that of a batch: with int8, an image's scores depend a little on its neighbours.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np

from raypipe.errors import ConfigError, DataError, one_line
from raypipe.models import own_code
from raypipe.models.tasks import NUMERIC
from raypipe.registry import graph
from raypipe.registry.graph import Format, Run
from raypipe.registry.package import Package, Predictions

MOST_APART = 1e-4  # scores of the file and of the package
OF_NUMBERS = "of the number, or of the labels' standard deviation if that is larger"


@dataclass(frozen=True)
class Sample:
    """Images that an export is compared on: uint8, of the model's side.

    labels: of each image, None where it has none. source: where they are from, for people.
    """

    pixels_NHWC: np.ndarray
    labels: tuple[str | None, ...]
    source: str


@dataclass(frozen=True)
class Int8:
    """What int8 changed.

    agree: share of images with the same label. apart: the largest difference of a score. smaller
    and faster: float's bytes and seconds over int8's. float_quality and quality: the share of right
    labels before and after, or for numbers the mean absolute error; None without labels.
    """

    agree: float
    apart: float
    smaller: float
    faster: float
    float_quality: float | None
    quality: float | None


@dataclass(frozen=True)
class Exported:
    """What was written, and how near it is to the package.

    size: bytes. apart: the largest difference of a score, before int8, over so many images.
    relative: apart is a share OF_NUMBERS, as for every regression, here and of int8.
    """

    path: Path
    format: Format
    size: int
    apart: float
    images: int
    source: str
    int8: Int8 | None = None
    relative: bool = False


def export(
    package: Package, format: Format, out: Path, sample: Sample, int8: bool = False
) -> Exported:
    """Write the package's model to `out`, compared with the package on these images.

    Raises ConfigError where a library is missing, and DataError for a model that cannot be exported
    or differs by more than MOST_APART. Then nothing is written.
    """
    check(format, int8)
    pixels_NHWC = sample.pixels_NHWC
    expected = package.predict_pixels(pixels_NHWC)

    # Beside its place, so that the rename is one step.
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as folder:
        path = Path(folder) / "model"
        with _quiet(), own_code.importable(package.files):
            try:
                graph.write(format, package, path)
            except Exception as e:  # exporters raise anything
                raise DataError(
                    f"{format} cannot hold this model: {one_line(e)}",
                    got=", ".join(package.names),
                    fix="Try another format: onnx, pt2 or torchscript",
                ) from e

        # What was written is read again and run: the file is judged, not the graph in memory.
        scores_NC, took_s = _run(graph.read(format, path), pixels_NHWC)
        apart = _apart(package, scores_NC, expected)
        relative = _is_relative(package)
        unit = f" {OF_NUMBERS}," if relative else ""
        # NaN is not <= anything.
        if not apart <= MOST_APART:
            raise DataError(
                f"The {format} file gives other scores than the model",
                got=f"{apart:.2g} apart",
                rule=f"At most {MOST_APART:g}{unit} on {len(pixels_NHWC)} images",
                fix="Try another format: onnx, pt2 or torchscript",
            )

        # The float file was good; the small one is left in its place, with what it costs.
        changed = None
        if int8:
            small = _quantised(path)
            changed = _changed(package, sample, expected, path, small, took_s)
            path = small
        size = path.stat().st_size
        path.replace(out)
    return Exported(out, format, size, apart, len(pixels_NHWC), sample.source, changed, relative)


def check(format: Format, int8: bool) -> None:
    """Raise ConfigError for an export that cannot be made here: before a model is fetched."""
    # Quantisation is onnxruntime's, for its own format.
    if int8 and format != "onnx":
        raise ConfigError("int8 is for ONNX", got=format, fix="raypipe export onnx … --int8")
    if format != "onnx":
        return
    for library in ("onnx", "onnxscript", "onnxruntime"):
        try:
            import_module(library)
        except ImportError as e:
            raise ConfigError(
                f"ONNX needs {library}: {one_line(e)}", fix="pip install 'raypipe[onnx]'"
            ) from None


def drawn(side_px: int) -> Sample:
    """32 images of noise, grey and ramps, where there are no others to compare on."""
    rng = np.random.default_rng(0)
    shape = (side_px, side_px, 3)
    ramp_HWC = np.broadcast_to(np.linspace(0, 255, side_px)[:, None, None], shape)
    # Black, grey and white; a ramp each way; then noise.
    images = [np.full(shape, level) for level in (0, 128, 255)]
    images += [ramp_HWC, ramp_HWC.transpose(1, 0, 2)]
    images += [rng.integers(0, 256, shape) for _ in range(27)]
    pixels_NHWC = np.stack(images).astype(np.uint8)
    return Sample(pixels_NHWC, (None,) * len(images), "drawn images, as no table was read")


def _run(run: Run, pixels_NHWC: np.ndarray) -> tuple[np.ndarray, float]:
    """(scores_NC, seconds), in batches of several sizes: the number of images must be free."""
    # The first run of a session prepares it.
    run(pixels_NHWC[:1])
    scores: list[np.ndarray] = []
    began = time.perf_counter()
    start, size = 0, 1
    while start < len(pixels_NHWC):
        scores.append(run(pixels_NHWC[start : start + size])[0])
        start, size = start + size, min(16, 2 * size + 1)
    return np.concatenate(scores), time.perf_counter() - began


def _apart(package: Package, found_NC: np.ndarray, expected: Predictions) -> float:
    """The largest difference of two scores; for a regression, as a share OF_NUMBERS."""
    apart_NC = np.abs(found_NC - expected.scores_NC)
    if _is_relative(package):
        apart_NC = apart_NC / np.maximum(package.model.spread or 1.0, np.abs(expected.scores_NC))
    return float(apart_NC.max())


def _is_relative(package: Package) -> bool:
    """Numbers may be of any size: 1e-4 of 5,000 is less than float32 can hold."""
    return package.task.kind == "regression"


def _quantised(path: Path) -> Path:
    """The int8 file beside a float one."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    small = path.with_name("int8")
    products = ["MatMul", "Gemm"]
    with _quiet():
        quantize_dynamic(
            path,
            small,
            weight_type=QuantType.QInt8,
            per_channel=True,
            op_types_to_quantize=products,
        )
    return small


def _changed(
    package: Package,
    sample: Sample,
    expected: Predictions,
    path: Path,
    small: Path,
    took_s: float,
) -> Int8:
    """What int8 changed. took_s: of the float file, on the same images."""
    scores_NC, small_s = _run(graph.read("onnx", small), sample.pixels_NHWC)
    labels = package.task.predictions(scores_NC)
    is_same = np.array(labels) == np.array(expected.labels)
    return Int8(
        agree=float(is_same.mean()),
        apart=_apart(package, scores_NC, expected),
        smaller=path.stat().st_size / small.stat().st_size,
        faster=took_s / small_s,
        float_quality=_quality(package, expected.labels, sample.labels),
        quality=_quality(package, labels, sample.labels),
    )


def _quality(
    package: Package, predicted: Sequence[str], labels: Sequence[str | None]
) -> float | None:
    """The share of right labels, or the mean absolute error of numbers; None without labels."""
    marks: list[float] = []
    for found, label in zip(predicted, labels, strict=True):
        # Images without a label do not count.
        if label is None:
            continue
        if package.task.kind in NUMERIC:
            marks.append(abs(float(found) - float(label)))
        else:
            marks.append(found == package.task.text(label))
    return float(np.mean(marks)) if marks else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters log their progress and their libraries' deprecations."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
