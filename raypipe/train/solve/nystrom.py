"""Features of a Gaussian kernel: landmarks, width, and a map under which a linear model is a kernel
machine (Nyström's method, Williams and Seeger 2001).

With as many landmarks as images this is kernel ridge regression itself. The similarity of images is
exp(-gamma * squared distance).

Pure numpy. Letters in names: N images, D features, M landmarks, R directions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypipe.train.solve import ridge

WIDTHS = (0.125, 0.25, 0.5, 1.0, 2.0)
"""Tried gammas, in units of one over the median squared distance of two images."""

MOST_TRIED = 512
"""Images, and landmarks, on which widths are compared: which is best depends little on more."""

_FLAT = 1e-7
"""Directions of the landmarks with less energy than this, compared with the first, are dropped:
float32 could not tell them from rounding."""


@dataclass(frozen=True)
class Kernel:
    """landmarks_MD: standardised. whitening_MR: similarities times it are Nyström's features."""

    landmarks_MD: np.ndarray
    gamma: float
    whitening_MR: np.ndarray

    def features(self, x_ND: np.ndarray) -> np.ndarray:
        """phi_NR: their products are the kernel's, as far as the landmarks know it."""
        phi_NR: np.ndarray = similarities(x_ND, self.landmarks_MD, self.gamma) @ self.whitening_MR
        return phi_NR


def choose(
    x_ND: np.ndarray, y_NC: np.ndarray, weight_N: np.ndarray, landmarks: int, seed: int
) -> Kernel:
    """Random images as landmarks, and the width whose ridge regression errs least on left-out
    images. x_ND: standardised.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(x_ND))
    tried = order[:MOST_TRIED]
    unit = 1 / _median_distance(x_ND[tried[:256]])
    best, least = WIDTHS[0], np.inf
    for width in WIDTHS:
        kernel = of(x_ND[tried[: min(landmarks, len(tried))]], width * unit)
        phi_NR = kernel.features(x_ND[tried])
        error = ridge.fit(phi_NR, y_NC[tried], weight_N[tried]).error
        if error < least:
            best, least = width, error
    return of(x_ND[np.sort(order[:landmarks])], best * unit)


def of(landmarks_MD: np.ndarray, gamma: float) -> Kernel:
    """The kernel of these landmarks."""
    energy, directions = np.linalg.eigh(similarities(landmarks_MD, landmarks_MD, gamma))
    kept = energy > _FLAT * energy[-1]
    whitening_MR = directions[:, kept] / np.sqrt(energy[kept])
    return Kernel(landmarks_MD, gamma, whitening_MR)


def similarities(x_ND: np.ndarray, landmarks_MD: np.ndarray, gamma: float) -> np.ndarray:
    """k_NM: as heads.KernelHead computes them, in float64."""
    squared_NM = -2 * (x_ND @ landmarks_MD.T)
    squared_NM += np.square(x_ND).sum(1)[:, None]
    squared_NM += np.square(landmarks_MD).sum(1)
    k_NM: np.ndarray = np.exp(-gamma * np.maximum(squared_NM, 0))
    return k_NM


def _median_distance(x_KD: np.ndarray) -> float:
    """The median squared distance of two different images; 1 if all are equal."""
    squared_KK = np.square(x_KD).sum(1)[:, None] + np.square(x_KD).sum(1) - 2 * (x_KD @ x_KD.T)
    apart = squared_KK[np.triu_indices(len(x_KD), 1)]
    # Rounding, relative to the rows themselves, is no distance.
    apart = apart[apart > 1e-9 * max(float(np.square(x_KD).sum(1).max(initial=0)), 1e-12)]
    return float(np.median(apart)) if len(apart) else 1.0
