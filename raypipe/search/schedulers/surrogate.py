"""An exact Gaussian process over learning curves: a trial's values x and an epoch t -> its target.

Pure: numpy and scipy, no clock, no random numbers. Swersky et al. 2014, "Freeze-thaw Bayesian
optimization", with a kernel whose three terms are added:

    common(t)                      what all trials have in common: they get better with epochs
    Matern 5/2 (x) * RBF(log t)    trials with similar values have similar curves
    [same trial] * RBF(log t)      what is a trial's own
    + noise

Each coordinate of x belongs to a group, and a group has one lengthscale: the coordinates of one
choice are one field. Hyperparameters have weak normal priors on their logarithms. A lengthscale's
prior grows with the number of groups, for distances do (Hvarfner et al. 2024, "Vanilla Bayesian
optimization performs great in high dimensions"). L-BFGS maximises likelihood times prior, with
analytic gradients: 15 ms a step for 300 observations.

Legend: N observations, M trials that have some, C candidates, D coordinates, G groups, P
hyperparameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.optimize import minimize
from scipy.spatial.distance import cdist

Array = np.ndarray

# Positions in the vector of hyperparameters; the groups' lengthscales follow. All are logarithms.
COMMON, VALUES, OWN = 0, 1, 2  # amplitudes of the three terms
COMMON_T, VALUES_T, OWN_T = 3, 4, 5  # their lengthscales in log t
NOISE = 6
FIRST_LENGTH = 7

# Priors of these seven: means and standard deviations. Targets have variance 1.
_MEANS = (-1.0, -0.2, -1.2, 0.7, 1.0, 0.3, -2.5)
_SDS = (1.0, 0.7, 1.0, 0.7, 0.7, 0.7, 1.0)
_LENGTH_SD = 1.0
_JITTER = 1e-6
_STEPS = 30  # of L-BFGS, at most


@dataclass(frozen=True)
class Data:
    """What was observed. Targets have mean 0 and variance 1."""

    x_MD: Array
    trial_N: Array  # the row of x_MD
    t_N: Array  # logarithm of the epoch
    y_N: Array
    group_D: Array  # each coordinate's group, from 0

    @property
    def groups(self) -> int:
        return int(self.group_D.max()) + 1 if len(self.group_D) else 0


def prior(groups: int) -> tuple[Array, Array]:
    """(means_P, standard deviations_P) of the logarithms of the hyperparameters."""
    length = -0.5 + 0.5 * np.log(max(1, groups))
    means = np.concatenate([_MEANS, np.full(groups, length)])
    return means, np.concatenate([_SDS, np.full(groups, _LENGTH_SD)])


def fit(data: Data, start_P: Array | None = None) -> Array:
    """The most probable hyperparameters_P; `start_P`: where to begin, by default the prior's mean.

    Returns the start if no step improves it.
    """
    means_P, sds_P = prior(data.groups)
    start = means_P if start_P is None else start_P
    squares_GMM = _squares(data)

    def loss(theta_P: Array) -> tuple[float, Array]:
        value, slope_P = log_posterior(theta_P, data, squares_GMM)
        return -value, -slope_P

    bounds = list(zip(means_P - 4 * sds_P, means_P + 4 * sds_P, strict=True))
    found = minimize(
        loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": _STEPS}
    )
    theta_P: Array = found.x
    return theta_P if np.isfinite(theta_P).all() else start


def log_posterior(
    theta_P: Array, data: Data, squares_GMM: Array | None = None
) -> tuple[float, Array]:
    """(log of likelihood times prior, up to a constant; its gradient_P)."""
    squares_GMM = _squares(data) if squares_GMM is None else squares_GMM
    scales = np.exp(2 * theta_P)  # squares of amplitudes and lengthscales
    square_t_NN = np.subtract.outer(data.t_N, data.t_N) ** 2
    rows = np.ix_(data.trial_N, data.trial_N)
    r_MM, matern_MM = _matern(squares_GMM, scales[FIRST_LENGTH:])
    is_own_NN = np.equal.outer(data.trial_N, data.trial_N)

    # The three terms, and their sum with the noise.
    terms = []
    for amplitude, length in ((COMMON, COMMON_T), (VALUES, VALUES_T), (OWN, OWN_T)):
        terms.append(scales[amplitude] * np.exp(-0.5 * square_t_NN / scales[length]))
    time_NN = terms[VALUES]
    terms[VALUES] = time_NN * matern_MM[rows]
    terms[OWN] = terms[OWN] * is_own_NN
    noise = scales[NOISE] + _JITTER
    covariance_NN = terms[COMMON] + terms[VALUES] + terms[OWN] + noise * np.eye(len(data.y_N))

    factor = cho_factor(covariance_NN, lower=True)
    inverse_NN = cho_solve(factor, np.eye(len(data.y_N)))
    alpha_N = inverse_NN @ data.y_N
    value = -0.5 * data.y_N @ alpha_N - np.log(np.diag(factor[0])).sum()
    # d value = sum of weight_NN * d covariance_NN
    weight_NN = 0.5 * (np.outer(alpha_N, alpha_N) - inverse_NN)
    slope_P = np.zeros(len(theta_P))
    for term, (amplitude, length) in zip(
        terms, ((COMMON, COMMON_T), (VALUES, VALUES_T), (OWN, OWN_T)), strict=True
    ):
        weighted_NN = weight_NN * term
        slope_P[amplitude] = 2 * weighted_NN.sum()
        slope_P[length] = (weighted_NN * square_t_NN).sum() / scales[length]
    slope_P[NOISE] = 2 * scales[NOISE] * np.trace(weight_NN)
    if len(squares_GMM):
        slope_P[FIRST_LENGTH:] = _length_slopes(
            weight_NN * time_NN, data.trial_N, r_MM, squares_GMM, scales[FIRST_LENGTH:]
        )
    # The prior.
    means_P, sds_P = prior(len(squares_GMM))
    away_P = (theta_P - means_P) / sds_P
    return float(value - 0.5 * away_P @ away_P), slope_P - away_P / sds_P


def _length_slopes(
    weight_NN: Array, trial_N: Array, r_MM: Array, squares_GMM: Array, lengths_G: Array
) -> Array:
    """Slopes of the groups' log lengthscales.

    Trials have several observations each, so the weights are first summed over those.
    """
    member_MN = np.zeros((len(r_MM), len(trial_N)))
    member_MN[trial_N, np.arange(len(trial_N))] = 1.0
    weight_MM = member_MN @ weight_NN @ member_MN.T
    inner_MM = weight_MM * (5 / 3) * (1 + np.sqrt(5) * r_MM) * np.exp(-np.sqrt(5) * r_MM)
    return np.einsum("gmn,mn->g", squares_GMM, inner_MM) / lengths_G


def _squares(data: Data) -> Array:
    """Squared distances of the observed trials in each group, GMM."""
    squares = []
    for group in range(data.groups):
        part_MD = data.x_MD[:, data.group_D == group]
        squares.append(cdist(part_MD, part_MD, "sqeuclidean"))
    return np.array(squares).reshape(data.groups, len(data.x_MD), len(data.x_MD))


def _matern(squares_G: Array, lengths_G: Array) -> tuple[Array, Array]:
    """(distances, Matern 5/2 of them); squares_G: one matrix a group. lengths_G: squared."""
    r = np.sqrt(np.tensordot(1 / lengths_G, squares_G, 1))
    return r, matern(r)


def matern(r: Array) -> Array:
    """Matern 5/2 of scaled distances."""
    root = np.sqrt(5) * r
    return (1 + root + root**2 / 3) * np.exp(-root)


class Posterior:
    """The process, given data and hyperparameters."""

    def __init__(self, theta_P: Array, data: Data) -> None:
        self._data = data
        self._scales = np.exp(2 * theta_P)
        # A coordinate's lengthscale is its group's.
        self._length_D = np.exp(theta_P[FIRST_LENGTH:])[data.group_D]
        covariance_NN = self._covariance(data.x_MD, data.trial_N, data.t_N)
        noise = self._scales[NOISE] + _JITTER
        covariance_NN[np.diag_indices_from(covariance_NN)] += noise
        self._factor = cho_factor(covariance_NN, lower=True)
        self._alpha_N = cho_solve(self._factor, data.y_N)

    @property
    def noise(self) -> float:
        """Standard deviation of an observation around its curve."""
        return float(np.sqrt(self._scales[NOISE]))

    def at(self, x_CD: Array, trial_C: Array, t_C: Array) -> tuple[Array, Array]:
        """(mean_C, standard deviation_C) of the curves, without noise.

        trial_C: the row in the data's x_MD, or -1 for a trial without observations. t_C: logarithms
        of epochs.
        """
        cross_CN = self._cross(x_CD, trial_C, t_C)
        mean_C = cross_CN @ self._alpha_N
        solved_NC = solve_triangular(self._factor[0], cross_CN.T, lower=True)
        variance_C = self._scales[:FIRST_LENGTH][[COMMON, VALUES, OWN]].sum() - (solved_NC**2).sum(
            0
        )
        return mean_C, np.sqrt(np.maximum(variance_C, 1e-12))

    def _covariance(self, x_MD: Array, trial_N: Array, t_N: Array) -> Array:
        matern_MM = matern(cdist(x_MD / self._length_D, x_MD / self._length_D))
        is_own_NN = np.equal.outer(trial_N, trial_N)
        return self._sum(
            np.subtract.outer(t_N, t_N), matern_MM[np.ix_(trial_N, trial_N)], is_own_NN
        )

    def _cross(self, x_CD: Array, trial_C: Array, t_C: Array) -> Array:
        data = self._data
        matern_CM = matern(cdist(x_CD / self._length_D, data.x_MD / self._length_D))
        is_own_CN = np.equal.outer(trial_C, data.trial_N)
        return self._sum(np.subtract.outer(t_C, data.t_N), matern_CM[:, data.trial_N], is_own_CN)

    def _sum(self, apart_t: Array, matern_x: Array, is_own: Array) -> Array:
        """The kernel without noise."""
        squared = -0.5 * apart_t**2
        scales = self._scales
        common = scales[COMMON] * np.exp(squared / scales[COMMON_T])
        values = scales[VALUES] * np.exp(squared / scales[VALUES_T]) * matern_x
        own = scales[OWN] * np.exp(squared / scales[OWN_T]) * is_own
        return np.asarray(common + values + own)


def standardised(y_N: Sequence[float]) -> tuple[Array, float, float]:
    """(targets with mean 0 and variance 1, the mean, the standard deviation); lower is better.

    Diverged trials are far off, and infinite if they are lost. So targets are cut six times as far
    above the best as the median is. Where most are as good as the best, a tenth of the mean's
    distance takes the place of the median's.
    """
    y = np.asarray(y_N, np.float64)
    finite = y[np.isfinite(y)]
    if not len(finite):
        return np.zeros(len(y)), 0.0, 1.0
    best = finite.min()
    spread = max(np.median(finite) - best, 0.1 * (finite.mean() - best))
    cut = np.minimum(y, best + 6 * (spread or 1.0))  # all alike: only a lost one differs
    mean, sd = float(cut.mean()), float(cut.std())
    if sd < 1e-9:  # all are equal
        sd = 1.0
    return (cut - mean) / sd, mean, sd
