"""Embeddings of real pictures and of corrupted copies, computed once, kept in a temporary folder.

Three champions: solar (ELPV, trained on mono cells; poly is the natural shift), emoji (Google's
drawings; Twitter's are the natural shift) and solar_poly (solar the other way round). Each has a
linear head on frozen EfficientNet-Lite0 features: logistic regression, whose penalty a
cross-validation of its training rows has chosen.

Parts of a champion's own domain: train, validation (what severity is calibrated on), test. Shifted
copies of validation pictures come from raypipe.images.shifts; corrupted copies of test pictures are
made here, and calibration does not see them.

Emoji: npm packages emoji-datasource-google and -twitter 16.0.0, in raypipe's cache folder
(`npm install --prefix ~/.cache/raypipe/emoji-16.0.0 emoji-datasource-google@16.0.0
emoji-datasource-twitter@16.0.0`). Base emojis only: a skin tone is nearly a copy.
"""

from __future__ import annotations

import io
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter
from sklearn.linear_model import LogisticRegressionCV
from sklearn.preprocessing import StandardScaler

from raypipe.images import shifts

SEVERITIES = {
    "noise": (8, 20, 45),  # standard deviation in grey levels
    "blur": (0.7, 1.5, 3.0),  # radius in pixels
    "brightness": (0.8, 0.6, 0.35),  # factor
    "contrast": (0.75, 0.5, 0.25),  # factor
    "jpeg": (30, 12, 5),  # quality
}
STRENGTHS = (0.3, 0.6, 1.0)
SIDE_PX = {"solar": 160, "emoji": 96, "solar_poly": 160}
EMOJI = Path.home() / ".cache/raypipe/emoji-16.0.0/node_modules"


@dataclass(frozen=True)
class World:
    """Features of all parts: "train", "validation", "test", "other" (the natural shift),
    "shift:KIND:STRENGTH" of validation rows, "CORRUPTION:SEVERITY" of test rows."""

    features: dict[str, np.ndarray]
    scores: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]


def corrupted(pixels_HWC: np.ndarray, kind: str, amount: float, seed: int) -> np.ndarray:
    image = Image.fromarray(pixels_HWC)
    if kind == "noise":
        noise = np.random.default_rng(seed).normal(0, amount, pixels_HWC.shape[:2])[..., None]
        return (pixels_HWC + noise).clip(0, 255).astype(np.uint8)
    if kind == "blur":
        return np.asarray(image.filter(ImageFilter.GaussianBlur(amount)))
    if kind == "brightness":
        return (pixels_HWC * amount).astype(np.uint8)
    if kind == "contrast":
        mean = pixels_HWC.mean()
        return (mean + (pixels_HWC - mean) * amount).clip(0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=int(amount))
    return np.asarray(Image.open(buffer).convert("RGB"))


def _pixels(path: Path, side_px: int) -> np.ndarray:
    image = Image.open(path).convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    flat = Image.alpha_composite(white, image).convert("RGB")
    return np.asarray(flat.resize((side_px, side_px), Image.Resampling.BILINEAR))


def _solar(own: str) -> tuple[dict[str, list[Path]], dict[str, np.ndarray]]:
    from raypipe.quickstart.elpv import cells

    folder, rows = cells()
    names = np.array([row["label"] == "defective" for row in rows]).astype(int)
    mine = [i for i, row in enumerate(rows) if row["type"] == own]
    other = [i for i, row in enumerate(rows) if row["type"] != own]
    files = [folder / row["file"] for row in rows]
    return _split(files, names, mine, other, (len(mine) - 600, 300))


def _emoji() -> tuple[dict[str, list[Path]], dict[str, np.ndarray]]:
    listed = json.loads((EMOJI / "emoji-datasource-google/emoji.json").read_text())
    both = [e for e in listed if e["has_img_google"] and e["has_img_twitter"]]
    categories = sorted({e["category"] for e in both})
    labels = np.array([categories.index(e["category"]) for e in both])
    google = [EMOJI / "emoji-datasource-google/img/google/64" / e["image"] for e in both]
    twitter = [EMOJI / "emoji-datasource-twitter/img/twitter/64" / e["image"] for e in both]
    order = list(np.random.default_rng(0).permutation(len(both)))
    train = order[: len(both) // 2]
    rest = order[len(both) // 2 :]
    other = [len(both) + i for i in rest]
    files = google + twitter
    every = np.concatenate([labels, labels])
    return _split(files, every, train + rest, other, (len(train), len(rest) // 2), shuffle=False)


def _split(
    files: list[Path],
    labels: np.ndarray,
    own: list[int],
    other: list[int],
    sizes: tuple[int, int],
    shuffle: bool = True,
) -> tuple[dict[str, list[Path]], dict[str, np.ndarray]]:
    order = np.random.default_rng(0).permutation(own) if shuffle else np.array(own)
    train, validation, test = np.split(order, np.cumsum(sizes))
    parts = {"train": train, "validation": validation, "test": test, "other": np.array(other)}
    paths = {name: [files[i] for i in rows] for name, rows in parts.items()}
    return paths, {name: labels[rows] for name, rows in parts.items()}


def _embedded(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(features, labels) by part."""
    from raypipe.models.zoo import ImageModel, ModelConfig

    kept = Path(tempfile.gettempdir()) / f"raypipe-shifted-2-{name}.npz"
    if name == "emoji":
        paths, labels = _emoji()
    else:
        paths, labels = _solar("mono" if name == "solar" else "poly")
    if not kept.exists():
        side_px = SIDE_PX[name]
        model = ImageModel(ModelConfig(side_px=side_px), 2).for_inference()
        found: dict[str, np.ndarray] = {}
        for part, files in paths.items():
            pixels = np.stack([_pixels(file, side_px) for file in files])
            found[part] = model.predict(pixels)[0]
            if part == "validation":
                for kind in shifts.KINDS:
                    for strength in STRENGTHS:
                        changed = shifts.shifted(pixels, kind, strength, 0)
                        found[f"shift:{kind}:{strength}"] = model.predict(changed)[0]
            if part == "test":
                for kind, amounts in SEVERITIES.items():
                    for severity, amount in enumerate(amounts, 1):
                        changed = np.stack(
                            [corrupted(p, kind, amount, i) for i, p in enumerate(pixels)]
                        )
                        found[f"{kind}:{severity}"] = model.predict(changed)[0]
        partial = kept.with_suffix(".partial.npz")
        np.savez(partial, allow_pickle=False, **found)  # type: ignore[arg-type]
        partial.rename(kept)
    with np.load(kept) as stored:
        features = {part: stored[part] for part in stored.files if part != "allow_pickle"}
    for part in features:
        if part not in labels:
            labels[part] = labels["validation" if part.startswith("shift:") else "test"]
    return features, labels


def world(name: str) -> World:
    """solar, emoji, solar_poly or solar_both: features, scores of the champion, labels.

    solar_both is a champion that knows mono and poly: the names of its parts begin with the domain
    ("mono/test"), and it has no natural shift.
    """
    if name != "solar_both":
        features, labels = _embedded(name)
    else:
        features, labels = {}, {}
        for domain, source in (("mono", "solar"), ("poly", "solar_poly")):
            made, known = _embedded(source)
            for part in made:
                if part not in ("train", "other"):
                    features[f"{domain}/{part}"] = made[part]
                    labels[f"{domain}/{part}"] = known[part]
            for kept, found in ((features, made), (labels, known)):
                before = [kept["train"]] if "train" in kept else []
                kept["train"] = np.concatenate([*before, found["train"]])
    scaler = StandardScaler().fit(features["train"])
    head = LogisticRegressionCV(Cs=np.logspace(-5, -1, 5), cv=5, max_iter=300)
    head.fit(scaler.transform(features["train"]), labels["train"])
    scores = {part: head.predict_proba(scaler.transform(x)) for part, x in features.items()}
    return World(features, scores, labels)


if __name__ == "__main__":
    for champion in [*SIDE_PX, "solar_both"]:
        made = world(champion)
        for part, scores_NC in made.scores.items():
            right = (scores_NC.argmax(1) == made.labels[part]).mean()
            print(f"{champion} {part} {len(scores_NC)} {right:.3f} {scores_NC.max(1).mean():.3f}")
