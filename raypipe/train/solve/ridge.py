"""Ridge regression in closed form, its strength chosen by leaving images out.

One eigendecomposition gives the answer for every strength, and with it what each image would be
predicted without itself: the residual of a linear smoother divided by one minus its leverage.
Equal images are left out together, because a copy would give its twin's label away.

Classification by ridge regression on one column a class is linear discriminant analysis with
shrinkage, up to the scale of the scores (Hastie et al. 1994); of two classes exactly.

Pure numpy. Letters in names: N images, D features, R directions, C columns. x_ND and y_NC are
float64; weight_N counts each image so many times, mean 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

STRENGTHS = tuple(10.0 ** (exponent / 2) for exponent in range(-10, 9))
"""Tried strengths, in units of the mean eigenvalue: half decades from 1e-5 to 1e4."""

MOST_LEFT_OUT = 20_000
"""Images that are left out one by one: more say nothing new about one number."""

MOST_COLUMNS = 64
"""Columns that the strength is chosen by."""

_FLAT = 1e-10
"""Directions in which features vary less, compared with the first direction, are dropped."""

_CHUNK = 8192  # rows of a Gram matrix at a time: they are converted to float64


@dataclass(frozen=True)
class Spectrum:
    """The directions in which weighted features vary.

    mean_D: weighted. directions_DR: orthonormal columns. energy_R: the weighted sum of squares
    along each, descending. total: the sum of the weights.
    """

    mean_D: np.ndarray
    directions_DR: np.ndarray
    energy_R: np.ndarray
    total: float

    def coordinates(self, x_ND: np.ndarray) -> np.ndarray:
        """z_NR: where images lie along the directions."""
        z_NR: np.ndarray = (x_ND - self.mean_D) @ self.directions_DR
        return z_NR

    def first(self, most: int) -> Spectrum:
        """The same with at most so many directions: those with most energy."""
        return Spectrum(self.mean_D, self.directions_DR[:, :most], self.energy_R[:most], self.total)


@dataclass(frozen=True)
class Ridge:
    """A linear map, and how well it did without the images that it was asked about.

    weight_DC, bias_C: scores are x @ weight + bias. strength: chosen. error: the mean squared error
    of left-out images. left_out_KC: the scores of some images, each without itself; rows_K: which.
    """

    weight_DC: np.ndarray
    bias_C: np.ndarray
    strength: float
    error: float
    left_out_KC: np.ndarray
    rows_K: np.ndarray


def spectrum(x_ND: np.ndarray, weight_N: np.ndarray) -> Spectrum:
    """The spectrum of weighted, centred features; of features that never vary it is empty."""
    images, features = x_ND.shape
    total = float(weight_N.sum())
    mean_D = weight_N @ x_ND / total
    if features <= images:
        gram_DD = np.zeros((features, features))
        for start in range(0, images, _CHUNK):
            rows = slice(start, start + _CHUNK)
            centred = np.asarray(x_ND[rows], np.float64) - mean_D
            gram_DD += (centred * weight_N[rows, None]).T @ centred
        energy, directions = np.linalg.eigh(gram_DD)
    else:
        # Fewer images than features: the smaller matrix has the same eigenvalues.
        rooted_ND = (np.asarray(x_ND, np.float64) - mean_D) * np.sqrt(weight_N)[:, None]
        energy, left_NN = np.linalg.eigh(rooted_ND @ rooted_ND.T)
        length = np.sqrt(np.maximum(energy, np.finfo(np.float64).tiny))
        directions = rooted_ND.T @ left_NN / length
    kept = np.flatnonzero(energy > _FLAT * max(float(energy[-1]), 1e-12))[::-1]
    return Spectrum(mean_D, directions[:, kept], energy[kept], total)


def fit(
    x_ND: np.ndarray,
    y_NC: np.ndarray,
    weight_N: np.ndarray,
    known: Spectrum | None = None,
    seed: int = 0,
) -> Ridge:
    """The ridge regression with the strength whose left-out error is least.

    known: the spectrum of the features, if it was made already.
    """
    found = known or spectrum(x_ND, weight_N)
    mean_C = weight_N @ y_NC / found.total
    rows_K = _some(len(x_ND), seed)
    z_KR = found.coordinates(x_ND[rows_K])
    moments_RC = _moments(x_ND, y_NC - mean_C, weight_N, found)
    group_K = groups(x_ND[rows_K])

    unit = float(found.energy_R.mean()) if len(found.energy_R) else 1.0
    y_KC, weight_K, square_KR = y_NC[rows_K], weight_N[rows_K], np.square(z_KR)

    def left_out(strength: float, columns: np.ndarray) -> np.ndarray:
        shrunk_R = 1 / (found.energy_R + strength * unit)
        fitted_KC = z_KR @ (moments_RC[:, columns] * shrunk_R[:, None]) + mean_C[columns]
        leverage_K = 1 / found.total + square_KR @ shrunk_R
        return _left_out(y_KC[:, columns], fitted_KC, leverage_K, weight_K, group_K)

    # Of many columns, some say enough about one number.
    every = np.arange(y_NC.shape[1])
    some = np.random.default_rng(seed).permutation(every)[:MOST_COLUMNS]
    strength, error = STRENGTHS[0], np.inf
    for tried in STRENGTHS:
        wrong_K = np.square(left_out(tried, some) - y_KC[:, some]).mean(1)
        wrong = float(weight_K @ wrong_K / weight_K.sum())
        # Of equal ones the strongest, which moves least with the data.
        if wrong <= error:
            strength, error = tried, wrong
    out_KC = left_out(strength, every)
    weight_RC = moments_RC / (found.energy_R + strength * unit)[:, None]
    weight_DC = found.directions_DR @ weight_RC
    return Ridge(weight_DC, mean_C - found.mean_D @ weight_DC, strength, error, out_KC, rows_K)


def _moments(
    x_ND: np.ndarray, y_NC: np.ndarray, weight_N: np.ndarray, found: Spectrum
) -> np.ndarray:
    """Weighted products of coordinates and targets."""
    products_DC = np.zeros((x_ND.shape[1], y_NC.shape[1]))
    for start in range(0, len(x_ND), _CHUNK):
        rows = slice(start, start + _CHUNK)
        centred = np.asarray(x_ND[rows], np.float64) - found.mean_D
        products_DC += centred.T @ (y_NC[rows] * weight_N[rows, None])
    moments_RC: np.ndarray = found.directions_DR.T @ products_DC
    return moments_RC


def _left_out(
    y_KC: np.ndarray,
    fitted_KC: np.ndarray,
    leverage_K: np.ndarray,
    weight_K: np.ndarray,
    group_K: np.ndarray,
) -> np.ndarray:
    """What each image is predicted without itself and its equals.

    Equal images have one leverage h, so the inverse of (1 - H) of a group is known (Sherman and
    Morrison): the residual grows by h * (weighted sum of residuals) / (1 - h * sum of weights).
    """
    residual_KC = y_KC - fitted_KC
    groups = int(group_K.max()) + 1 if len(group_K) else 0
    sums_GC = np.zeros((groups, y_KC.shape[1]))
    np.add.at(sums_GC, group_K, residual_KC * weight_K[:, None])
    weights_G = np.bincount(group_K, weight_K, groups)
    # A leverage of 1 says that nothing but the image itself decides its prediction.
    remaining_K = np.maximum(1 - leverage_K * weights_G[group_K], 1e-6)
    grown_KC = residual_KC + (leverage_K / remaining_K)[:, None] * sums_GC[group_K]
    out_KC: np.ndarray = y_KC - grown_KC
    return out_KC


def groups(x_KD: np.ndarray) -> np.ndarray:
    """A number for each row; equal rows have equal numbers."""
    packed = np.ascontiguousarray(x_KD).view(np.dtype((np.void, x_KD.itemsize * x_KD.shape[1])))
    _, group_K = np.unique(packed.ravel(), return_inverse=True)
    return group_K


def _some(images: int, seed: int) -> np.ndarray:
    """All images, or a random part of MOST_LEFT_OUT."""
    if images <= MOST_LEFT_OUT:
        return np.arange(images)
    drawn = np.random.default_rng(seed).choice(images, MOST_LEFT_OUT, replace=False)
    return np.sort(drawn)
