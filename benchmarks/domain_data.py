"""Embeddings for `benchmarks.domains`: solar cells, corrupted ones, and the two emoji sets.

EfficientNet-Lite0 with ImageNet weights, 224 px, 1,280 features: computed once and kept as .npz in
the system's folder for temporary files, one file a set. About 40 images a second on one core.

The emoji pictures are two packages of npm (Google's are Apache-2.0, Twitter's CC BY 4.0). They are
installed once into the user's cache, as the tests do with Azurite.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter

EMOJI = "16.0.0"
TYPES = ("mono", "poly")
VENDORS = ("google", "twitter")
# Pictures of each vendor, drawn apart: a picture and its twin are never in the same comparison.
EMOJI_IMAGES = 1_500
# Cells of each module type that are corrupted.
CORRUPTED = 250
# Mild, middle, strong.
SEVERITIES = {
    "noise": (8, 16, 32),  # standard deviation, of 255
    "blur": (1.0, 2.0, 4.0),  # radius in pixels, of 300
    "dark": (0.85, 0.7, 0.5),  # factor of the brightness
    "contrast": (0.85, 0.7, 0.5),  # factor around the mean
    "jpeg": (30, 15, 7),  # quality
}
CACHE = Path(tempfile.gettempdir()) / "raypipe-domains"


def corrupt(image: Image.Image, kind: str, amount: float, seed: int) -> Image.Image:
    """A copy with one fault. seed: of the noise."""
    if kind == "noise":
        noise = np.random.default_rng(seed).normal(0, amount, (image.height, image.width, 1))
        noisy = np.asarray(image, np.float64) + noise
        return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
    if kind == "blur":
        return image.filter(ImageFilter.GaussianBlur(amount))
    if kind == "dark":
        return ImageEnhance.Brightness(image).enhance(amount)
    if kind == "contrast":
        return ImageEnhance.Contrast(image).enhance(amount)
    data = io.BytesIO()
    image.save(data, "JPEG", quality=int(amount))
    return Image.open(data).convert("RGB")


def embed(images: list[Image.Image]) -> np.ndarray:
    """features_ND as a model package computes them."""
    from raypipe.models.zoo import ImageModel, ModelConfig

    model = ImageModel(ModelConfig(name="efficientnet_lite0"), 2).for_inference()
    return np.concatenate([model.predict(pixels)[0] for pixels in _decoded(images)])


def looks(images: list[Image.Image]) -> np.ndarray:
    """looks_NK, the columns of `measure.SEEN`."""
    from raypipe.images.measure import LOOKS, statistics

    found = [statistics(pixels) for pixels in _decoded(images)]
    columns = [np.concatenate([one[name] for one in found]) for name in LOOKS]
    sizes = np.array([image.size for image in images], np.float64).T
    return np.stack([*columns, *sizes], axis=1)


Measured = Callable[[list[Image.Image]], np.ndarray]


def cells(
    what: Measured = embed,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(features_ND, type_N, defective_N, module_N) of all solar cells, in the order of files.

    what: looks instead of features.

    module_N: the data set names no modules. Its cells lie module by module, so 60 neighbours of
    one type are called one; some of these blocks hold parts of two modules.
    """
    from raypipe.quickstart.elpv import cells as listed

    folder, rows = listed()
    rows.sort(key=lambda row: row["file"])
    types_N = np.array([row["type"] for row in rows])
    defective_N = np.array([row["label"] == "defective" for row in rows])
    starts = np.flatnonzero(np.r_[True, types_N[1:] != types_N[:-1]])
    run_N = np.repeat(starts, np.diff(np.r_[starts, len(rows)]))
    module_N = run_N * 1000 + (np.arange(len(rows)) - run_N) // 60
    files = [folder / row["file"] for row in rows]
    features_ND = _kept("cells", what, lambda: [_opened(file) for file in files])
    return features_ND, types_N, defective_N, module_N


def corrupted(kind: str, severity: int, what: Measured = embed) -> tuple[np.ndarray, np.ndarray]:
    """(features_nD, place_n) of CORRUPTED cells of each type with one fault.

    place_n: which of all cells each is. They are the same cells for all faults.
    """
    from raypipe.quickstart.elpv import cells as listed

    folder, rows = listed()
    rows.sort(key=lambda row: row["file"])
    types_N = np.array([row["type"] for row in rows])
    rng = np.random.default_rng(1)
    each = [rng.permutation(np.flatnonzero(types_N == name))[:CORRUPTED] for name in TYPES]
    place_n = np.concatenate(each)

    def made() -> list[Image.Image]:
        amount = SEVERITIES[kind][severity]
        files = [(at, folder / rows[at]["file"]) for at in place_n.tolist()]
        return [corrupt(_opened(file), kind, amount, at) for at, file in files]

    return _kept(f"{kind}-{severity}", what, made), place_n


def emoji(vendor: str, what: Measured = embed) -> np.ndarray:
    """features_ND of one vendor's pictures, on white. The same N names for both vendors."""
    home, chosen = emoji_home(), _emoji_names()
    folder = home / f"node_modules/emoji-datasource-{vendor}/img/{vendor}/64"
    return _kept(f"emoji-{vendor}", what, lambda: [_opened(folder / name) for name in chosen])


def emoji_categories() -> np.ndarray:
    """category_N of emoji's rows: "Flags", "Objects" …"""
    listed = json.loads(
        (emoji_home() / "node_modules/emoji-datasource-google/emoji.json").read_text()
    )
    category = {}
    for one in listed:
        for picture in (one, *one.get("skin_variations", {}).values()):
            category[picture["image"]] = one["category"]
    return np.array([category[name] for name in _emoji_names()])


def _emoji_names() -> list[str]:
    home = emoji_home()
    names = [
        {path.name for path in (home / f"node_modules/emoji-datasource-{v}/img/{v}/64").iterdir()}
        for v in VENDORS
    ]
    both = sorted(names[0] & names[1])
    return [both[at] for at in np.random.default_rng(0).permutation(len(both))[:EMOJI_IMAGES]]


def _decoded(images: list[Image.Image]) -> Iterator[np.ndarray]:
    """pixels_NHWC, 64 images at a time, 224 px."""
    from raypipe.images.decode import decode_good

    for at in range(0, len(images), 64):
        pixels = [np.asarray(image.convert("RGB")) for image in images[at : at + 64]]
        yield decode_good(pixels, 224, 1).pixels_NHWC


def _opened(path: Path) -> Image.Image:
    image = Image.open(path)
    if image.mode in ("P", "RGBA", "LA"):
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _kept(name: str, what: Measured, images: Callable[[], list[Image.Image]]) -> np.ndarray:
    path = CACHE / (f"{name}.npy" if what is embed else f"{what.__name__}-{name}.npy")
    if not path.exists():
        CACHE.mkdir(exist_ok=True)
        found_NK = what(images())
        partial = path.with_name(f"{uuid.uuid4().hex}.npy")
        np.save(partial, found_NK)
        partial.replace(path)
    found: np.ndarray = np.load(path)
    return found


def emoji_home() -> Path:
    home = Path.home() / ".cache" / "raypipe" / f"emoji-{EMOJI}"
    if not home.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise SystemExit("The emoji pictures are packages of npm, which is not installed here")
        partial = home.with_name(f"{home.name}.{uuid.uuid4().hex[:8]}")
        packages = [f"emoji-datasource-{vendor}@{EMOJI}" for vendor in VENDORS]
        flags = ["--no-audit", "--no-fund", "--ignore-scripts"]
        command = [npm, "install", "--prefix", str(partial), *flags, *packages]
        subprocess.run(command, check=True)
        partial.replace(home)
    return home
