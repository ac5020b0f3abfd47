"""The interval holds the accuracy of windows it was not calibrated on, or there is no answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest

from raypipe.errors import DataError
from raypipe.models.severity import Calibration, calibrate, estimate
from raypipe.models.severity_windows import on_one_side

FEATURES = 12
KINDS = {"darker": 0, "softer": 1, "turned": 2, "dirty": 3}


@dataclass
class Drawn:
    scores: np.ndarray
    labels: np.ndarray
    features: np.ndarray

    def window(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.scores[rows], self.features[rows]

    def accuracy(self, rows: np.ndarray) -> float:
        return float((self.scores[rows].argmax(1) == self.labels[rows]).mean())


def draw(
    rows: int, rng: np.random.Generator, domain: float = 0.0, kind: int = 0, strength: float = 0.0
) -> Drawn:
    """Two classes along one feature, and a head that knows their boundary. A shift weakens this
    feature, as blur weakens edges, and moves features of its own."""
    labels = rng.integers(0, 2, rows)
    features = rng.normal(size=(rows, FEATURES))
    features[:, 0] += (1.6 - 1.2 * strength) * (2 * labels - 1)
    features[:, 4] += domain
    features[:, 5 + kind] += 2 * strength
    right = 1 / (1 + np.exp(-2.2 * features[:, 0]))
    return Drawn(np.column_stack([1 - right, right]), labels, features)


@dataclass
class Given:
    """Arguments of calibrate."""

    scores_NC: np.ndarray
    labels_N: np.ndarray
    features_ND: np.ndarray
    domains_N: np.ndarray
    shifts_N: np.ndarray
    images_N: np.ndarray

    def calibrate(self, **other: object) -> Calibration:
        return calibrate(**{**vars(self), "seed": 0, **other})  # type: ignore[arg-type]


def given(domains: dict[str, float], images: int = 300, copies: bool = True) -> Given:
    rng = np.random.default_rng(0)
    parts, names, shifts, numbers = [], [], [], []
    for place, (name, domain) in enumerate(domains.items()):
        for kind in ["", *KINDS] if copies else [""]:
            for strength in (0.2, 0.5, 0.8) if kind else (0.0,):
                parts.append(draw(images, rng, domain, KINDS.get(kind, 0), strength))
                names += [name] * images
                shifts += [kind] * images
                numbers += list(range(place * images, (place + 1) * images))
    return Given(
        np.concatenate([p.scores for p in parts]),
        np.concatenate([p.labels for p in parts]),
        np.concatenate([p.features for p in parts]),
        np.array(names),
        np.array(shifts),
        np.array(numbers),
    )


@pytest.fixture(scope="module")
def two_domains() -> Calibration:
    return given({"mono": 0.0, "poly": 4.0}).calibrate()


def test_windows_of_known_domains_and_of_their_mixtures_are_covered(
    two_domains: Calibration,
) -> None:
    rng = np.random.default_rng(1)
    covered, widths = [], []
    for share in [0.0, 0.5, 1.0] * 20:
        count = int(200 * share)
        mono, poly = draw(200 - count, rng), draw(count, rng, domain=4.0)
        scores, features = (
            np.concatenate([getattr(mono, what), getattr(poly, what)])
            for what in ("scores", "features")
        )
        labels = np.concatenate([mono.labels, poly.labels])
        found = estimate(two_domains, scores, features)
        assert not found.abstains
        assert found.nearest.get("poly", 0.0) == pytest.approx(share, abs=0.1)
        covered.append(found.low <= (scores.argmax(1) == labels).mean() <= found.high)
        widths.append(found.high - found.low)
    assert np.mean(covered) >= 0.9 and np.median(widths) < 0.2


def test_a_shift_of_a_new_kind_costs_what_it_costs(two_domains: Calibration) -> None:
    """Of a kind that calibration has not seen, mild enough for an answer."""
    rng = np.random.default_rng(2)
    covered = []
    for _ in range(40):
        window = draw(200, rng, kind=4, strength=0.4)
        found = estimate(two_domains, *window.window(np.arange(200)))
        if found.abstains:
            continue
        covered.append(found.low <= window.accuracy(np.arange(200)) <= found.high)
        assert found.accuracy < two_domains.accuracy - 0.02
    assert len(covered) >= 20 and np.mean(covered) >= 0.9


def test_other_shares_of_the_classes_are_covered(two_domains: Calibration) -> None:
    rng = np.random.default_rng(3)
    many = draw(4000, rng)
    covered = []
    for _ in range(40):
        weight = np.where(many.labels == 1, rng.uniform(0.1, 0.9), 0.5)
        rows = rng.choice(4000, 200, replace=False, p=weight / weight.sum())
        found = estimate(two_domains, *many.window(rows))
        assert not found.abstains
        covered.append(found.low <= many.accuracy(rows) <= found.high)
    assert np.mean(covered) >= 0.9


def test_far_outside_it_abstains_and_says_so(two_domains: Calibration) -> None:
    rng = np.random.default_rng(4)
    far = draw(200, rng)
    far.features[:, 3] += 25
    found = estimate(two_domains, *far.window(np.arange(200)))
    assert "too unlike those the model knows (distance" in found.abstains
    assert np.isnan([found.accuracy, found.low, found.high]).all()
    # However small the errors were in calibration.
    sure = replace(two_domains, error_3=[0.0, 0.0, 0.0])
    for limit, why in (({"newest": np.inf}, "too unlike"), ({"farthest": np.inf}, "was not cal")):
        one = estimate(replace(sure, **limit), *far.window(np.arange(200)))
        assert why in one.abstains
    few = estimate(two_domains, *draw(10, rng).window(np.arange(10)))
    assert "10 images are too few" in few.abstains


def test_without_shifted_copies_it_answers_at_home_only() -> None:
    calibration = given({"mono": 0.0}, copies=False).calibrate()
    assert calibration.kinds == []
    rng = np.random.default_rng(5)
    home = draw(200, rng)
    found = estimate(calibration, *home.window(np.arange(200)))
    assert found.low <= home.accuracy(np.arange(200)) <= found.high
    away = draw(200, rng, domain=6.0)
    assert estimate(calibration, *away.window(np.arange(200))).abstains


def test_it_is_json_and_the_same_twice(two_domains: Calibration) -> None:
    again = given({"mono": 0.0, "poly": 4.0}).calibrate()
    assert again == two_domains
    text = json.dumps(two_domains.to_json(), allow_nan=False)
    read = Calibration.from_json(json.loads(text), "m/1")
    window = draw(150, np.random.default_rng(6)).window(np.arange(150))
    assert estimate(read, *window) == estimate(two_domains, *window)
    assert len(text) < 1_000_000


def test_the_order_of_rows_does_not_matter_and_fewer_images_say_less(
    two_domains: Calibration,
) -> None:
    window = draw(400, np.random.default_rng(7))
    order = np.random.default_rng(8).permutation(400)
    one = estimate(two_domains, *window.window(np.arange(400)))
    other = estimate(two_domains, *window.window(order))
    assert one.accuracy == pytest.approx(other.accuracy)
    few = estimate(two_domains, *window.window(np.arange(60)))
    assert few.high - few.low > one.high - one.low


def test_a_model_that_is_never_wrong_has_an_interval_all_the_same() -> None:
    made = given({"mono": 0.0}, copies=False)
    made.labels_N = made.scores_NC.argmax(1)
    calibration = made.calibrate()
    found = estimate(calibration, *draw(200, np.random.default_rng(9)).window(np.arange(200)))
    assert found.high == 1 and 0.9 < found.low < 0.99


def test_features_that_never_vary_do_no_harm() -> None:
    made = given({"mono": 0.0}, copies=False)
    dead = np.ones((len(made.labels_N), 500))
    made.features_ND = np.concatenate([made.features_ND, dead], axis=1)
    calibration = made.calibrate()
    window = draw(200, np.random.default_rng(10))
    features = np.concatenate([window.features, np.ones((200, 500))], axis=1)
    assert not estimate(calibration, window.scores, features).abstains
    # One that hardly varies is no measure of distances.
    nearly = replace_feature(made, 20, 1e-7 * np.random.default_rng(0).normal(size=300))
    features[:, 20] = 1e-5
    assert not estimate(nearly.calibrate(), window.scores, features).abstains
    # A feature that wakes up is a shift, and no division by zero.
    features[:, 20] = 50
    assert estimate(calibration, window.scores, features).abstains
    made.features_ND = np.ones_like(made.features_ND)
    with pytest.raises(DataError, match="the same for all images"):
        made.calibrate()


def replace_feature(made: Given, place: int, values: np.ndarray) -> Given:
    features = made.features_ND.copy()
    features[:, place] = values
    return replace(made, features_ND=features)


def broken(field: str, value: object) -> Given:
    made = given({"mono": 0.0}, images=120, copies=False)
    setattr(made, field, value)
    return made


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (broken("labels_N", np.full(120, 2)), "no class"),
        (broken("labels_N", np.full(120, -1)), "no class"),
        (broken("labels_N", np.full(119, 1)), "differ in length"),
        (broken("scores_NC", np.full((120, 2), np.nan)), "not finite"),
        (broken("scores_NC", np.full((120, 2), 0.9)), "no probabilities"),
        (broken("scores_NC", np.ones((120, 1))), "no probabilities"),
        (broken("features_ND", np.full((120, 3), np.inf)), "not finite"),
        (broken("features_ND", np.ones((120, 0))), "no table"),
        (broken("shifts_N", np.full(120, "dark")), "Too few labelled"),
        (broken("images_N", np.zeros(120)), "Too few labelled"),
        (broken("domains_N", np.array(["a"] * 115 + ["b"] * 5)), "'b': 5"),
    ],
)
def test_what_cannot_be_calibrated(made: Given, match: str) -> None:
    with pytest.raises(DataError, match=match):
        made.calibrate()


def test_groups_that_lie_in_several_domains_end_in_no_traceback() -> None:
    """One group of 260 rows, and a small domain whose groups are every second one of the other."""
    made = given({"mono": 0.0}, images=400, copies=False)
    made.domains_N = np.array(["a"] * 20 + ["b"] * 380)
    odd = [2 * number + 1 for number in range(20)]
    made.images_N = np.array([*odd, *range(120), *[500] * 260])
    assert made.calibrate().domains == ["a", "b"]
    # Two groups that hold all of a domain may fall on one side.
    half_N = np.array([True, True, False, False])
    domains_N, plain_N = np.array(["a", "a", "b", "a"]), np.array([True, True, True, False])
    assert on_one_side(half_N, domains_N, plain_N) == ["a", "b"]


def test_why_there_is_no_estimate_is_true(two_domains: Calibration) -> None:
    """At home nothing is outside, however wide the interval; and numbers stay short."""
    scores, features = draw(200, np.random.default_rng(11)).window(np.arange(200))
    wide = estimate(replace(two_domains, error_3=[0.5, 0.0, 0.0]), scores, features)
    assert "points wide: 30 are most" in wide.abstains and "unlike" not in wide.abstains
    huge = estimate(two_domains, scores, np.full_like(features, 3e38))
    assert "unlike" in huge.abstains and len(huge.abstains) < 120
    # Squares overflow, and distances are no numbers: no limit holds.
    with np.errstate(all="ignore"):
        assert estimate(two_domains, scores, np.full_like(features, 1e200)).abstains


def test_a_window_of_another_model_is_refused(two_domains: Calibration) -> None:
    scores, features = draw(50, np.random.default_rng(0)).window(np.arange(50))
    with pytest.raises(DataError, match="another model"):
        estimate(two_domains, scores, features[:, :5])
    with pytest.raises(DataError, match="differ in length"):
        estimate(two_domains, scores, features[:40])
    with pytest.raises(DataError, match="not finite"):
        estimate(two_domains, scores, np.full_like(features, np.nan))
