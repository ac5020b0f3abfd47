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

Legend: N observations, M trials that have some, C candidates, E different epochs, K trials
whose likeness is kept (A and B: those that are asked for), D coordinates, G groups, P
hyperparameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.linalg.blas import dtrsm
from scipy.optimize import minimize
from scipy.spatial.distance import cdist
from threadpoolctl import ThreadpoolController

Array = np.ndarray
_Function = TypeVar("_Function", bound=Callable[..., Any])
_threads = ThreadpoolController()  # of the libraries that are loaded by now

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
MOST_KEPT = 1024  # trials whose likeness is kept: 8 MB


def one_thread(function: _Function) -> _Function:
    """Its linear algebra runs in one thread.

    Matrices are small, and trials train beside it. With a thread for each core, threads wait for
    each other: on two busy cores a search of 64 trials took 17 s of CPU so, and 1.2 s with one
    thread. Nor do the last digits depend on the number of cores.
    """
    wrapped: _Function = _threads.wrap(limits=1, user_api="blas")(function)
    return wrapped


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
    pairs = _Pairs(data)

    def loss(theta_P: Array) -> tuple[float, Array]:
        value, slope_P = log_posterior(theta_P, data, pairs)
        return -value, -slope_P

    bounds = list(zip(means_P - 4 * sds_P, means_P + 4 * sds_P, strict=True))
    found = minimize(
        loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": _STEPS}
    )
    theta_P: Array = found.x
    return theta_P if np.isfinite(theta_P).all() else start


class _Pairs:
    """What the hyperparameters do not change."""

    def __init__(self, data: Data) -> None:
        self.square_t_NN = np.subtract.outer(data.t_N, data.t_N) ** 2
        # Pairs of observations of one trial: positions in the flat NN.
        self.own = np.flatnonzero(np.equal.outer(data.trial_N, data.trial_N))
        # Squared distances of the observed trials in each group.
        squares = []
        for group in range(data.groups):
            part_MD = data.x_MD[:, data.group_D == group]
            squares.append(cdist(part_MD, part_MD, "sqeuclidean"))
        trials, observations = len(data.x_MD), len(data.trial_N)
        self.squares_GMM = np.array(squares).reshape(data.groups, trials, trials)
        # Sums over a trial's observations.
        self.member_MN = np.zeros((trials, observations))
        self.member_MN[data.trial_N, np.arange(observations)] = 1.0


def log_posterior(theta_P: Array, data: Data, pairs: _Pairs | None = None) -> tuple[float, Array]:
    """(log of likelihood times prior, up to a constant; its gradient_P)."""
    pairs = pairs or _Pairs(data)
    scales = np.exp(2 * theta_P)  # squares of amplitudes and lengthscales
    square_t_NN, lengths_G = pairs.square_t_NN, scales[FIRST_LENGTH:]
    r_MM = np.sqrt(np.tensordot(1 / lengths_G, pairs.squares_GMM, 1))

    # The three terms, and their sum with the noise.
    common_NN = scales[COMMON] * np.exp(-0.5 * square_t_NN / scales[COMMON_T])
    time_NN = scales[VALUES] * np.exp(-0.5 * square_t_NN / scales[VALUES_T])
    values_NN = time_NN * matern(r_MM).take(data.trial_N, 0).take(data.trial_N, 1)
    own_NN = np.zeros_like(time_NN)
    own = scales[OWN] * np.exp(-0.5 * square_t_NN.ravel()[pairs.own] / scales[OWN_T])
    own_NN.ravel()[pairs.own] = own
    covariance_NN = common_NN + values_NN
    covariance_NN += own_NN
    covariance_NN[np.diag_indices_from(covariance_NN)] += scales[NOISE] + _JITTER

    factor = cho_factor(covariance_NN, lower=True, check_finite=False)
    inverse_NN = cho_solve(factor, np.eye(len(data.y_N)), check_finite=False)
    alpha_N = inverse_NN @ data.y_N
    value = -0.5 * data.y_N @ alpha_N - np.log(np.diag(factor[0])).sum()
    # d value = sum of weight_NN * d covariance_NN
    weight_NN = 0.5 * (np.outer(alpha_N, alpha_N) - inverse_NN)
    slope_P = np.zeros(len(theta_P))
    for term_NN, amplitude, length in (
        (common_NN, COMMON, COMMON_T),
        (values_NN, VALUES, VALUES_T),
        (own_NN, OWN, OWN_T),
    ):
        weighted_NN = weight_NN * term_NN
        slope_P[amplitude] = 2 * weighted_NN.sum()
        slope_P[length] = (weighted_NN * square_t_NN).sum() / scales[length]
    slope_P[NOISE] = 2 * scales[NOISE] * np.trace(weight_NN)
    if len(lengths_G):
        slope_P[FIRST_LENGTH:] = _length_slopes(weight_NN * time_NN, pairs, r_MM) / lengths_G
    # The prior.
    means_P, sds_P = prior(len(lengths_G))
    away_P = (theta_P - means_P) / sds_P
    return float(value - 0.5 * away_P @ away_P), slope_P - away_P / sds_P


def _length_slopes(weight_NN: Array, pairs: _Pairs, r_MM: Array) -> Array:
    """Slopes of the groups' log lengthscales, times these squared.

    Trials have several observations each, so the weights are first summed over those.
    """
    weight_MM = pairs.member_MN @ weight_NN @ pairs.member_MN.T
    inner_MM = weight_MM * (5 / 3) * (1 + np.sqrt(5) * r_MM) * np.exp(-np.sqrt(5) * r_MM)
    slopes_G: Array = np.einsum("gmn,mn->g", pairs.squares_GMM, inner_MM)
    return slopes_G


def matern(r: Array) -> Array:
    """Matern 5/2 of scaled distances."""
    root = np.sqrt(5) * r
    return (1 + root + root**2 / 3) * np.exp(-root)


class Likeness:
    """How alike trials are at one vector of hyperparameters: Matern 5/2 of their values.

    A search asks for the same pairs after each report, so they are kept by the trials' names.
    """

    def __init__(self, theta_P: Array, group_D: Array, x: Mapping[str, Array]) -> None:
        # A coordinate's lengthscale is its group's.
        self._length_D = np.exp(theta_P[FIRST_LENGTH:])[group_D]
        self._x = x
        self._rows: dict[str, int] = {}
        self._scaled_KD = np.zeros((0, len(self._length_D)))
        self._alike_KK = np.zeros((0, 0))

    def between(self, one_A: Sequence[str], other_B: Sequence[str]) -> Array:
        """Of each pair of trials, AB."""
        rows = self._rows
        new = list(dict.fromkeys(name for name in (*one_A, *other_B) if name not in rows))
        if len(rows) + len(new) > MOST_KEPT:
            rows.clear()
            self._scaled_KD, self._alike_KK = self._scaled_KD[:0], self._alike_KK[:0, :0]
            new = list(dict.fromkeys((*one_A, *other_B)))
        if new:
            self._add(new)
        rows_A, rows_B = ([self._rows[name] for name in names] for names in (one_A, other_B))
        return self._alike_KK.take(rows_A, 0).take(rows_B, 1)

    def _add(self, names: list[str]) -> None:
        known = len(self._rows)
        self._rows |= {name: known + i for i, name in enumerate(names)}
        new_AD = np.array([self._x[name] for name in names]) / self._length_D
        self._scaled_KD = np.concatenate([self._scaled_KD, new_AD])
        alike_AK = matern(cdist(new_AD, self._scaled_KD))
        self._alike_KK = np.pad(self._alike_KK, (0, len(names)))
        self._alike_KK[known:] = alike_AK
        self._alike_KK[:, known:] = alike_AK.T


class Posterior:
    """The process, given data and hyperparameters.

    alike_MM: how alike the trials of the data are at these hyperparameters.
    """

    def __init__(self, theta_P: Array, data: Data, alike_MM: Array) -> None:
        self._data = data
        self._scales = np.exp(2 * theta_P)
        # Observations share their epochs, and an exponential costs more than a copy.
        self._t_E, self._epoch_N = np.unique(data.t_N, return_inverse=True)
        covariance_NN = self._cross(alike_MM[:, data.trial_N], data.trial_N, data.t_N)
        noise = self._scales[NOISE] + _JITTER
        covariance_NN[np.diag_indices_from(covariance_NN)] += noise
        self._factor = cho_factor(covariance_NN, lower=True, check_finite=False)
        self._alpha_N = cho_solve(self._factor, data.y_N, check_finite=False)

    @property
    def noise(self) -> float:
        """Standard deviation of an observation around its curve."""
        return float(np.sqrt(self._scales[NOISE]))

    def at(self, alike_MC: Array, trial_C: Array, t_C: Array) -> tuple[Array, Array]:
        """(mean_C, standard deviation_C) of the curves, without noise.

        alike_MC: how alike the data's trials are to them. trial_C: their row in the data's x_MD, or
        -1 for a trial without observations. t_C: logarithms of epochs.
        """
        cross_NC = self._cross(alike_MC, trial_C, t_C)
        mean_C = self._alpha_N @ cross_NC
        # From the right: of C-ordered NC, columns of CN lie together in memory.
        solved_CN = dtrsm(1.0, self._factor[0], cross_NC.T, side=1, lower=1, trans_a=1)
        scales = self._scales
        variance_C = scales[COMMON] + scales[VALUES] + scales[OWN] - (solved_CN**2).sum(1)
        return mean_C, np.sqrt(np.maximum(variance_C, 1e-12))

    def _cross(self, alike_MC: Array, trial_C: Array, t_C: Array) -> Array:
        """The kernel without noise, between the data and C points, NC."""
        trial_N, scales = self._data.trial_N, self._scales
        squared_EC = -0.5 * np.subtract.outer(self._t_E, t_C) ** 2
        values_EC = scales[VALUES] * np.exp(squared_EC / scales[VALUES_T])
        common_EC = scales[COMMON] * np.exp(squared_EC / scales[COMMON_T])
        cross_NC = alike_MC.take(trial_N, 0)
        cross_NC *= values_EC.take(self._epoch_N, 0)
        cross_NC += common_EC.take(self._epoch_N, 0)
        # Few pairs are of one trial.
        own = np.flatnonzero(np.equal.outer(trial_N, trial_C))
        rows, columns = np.divmod(own, len(trial_C))
        squared = squared_EC[self._epoch_N[rows], columns]
        cross_NC.ravel()[own] += scales[OWN] * np.exp(squared / scales[OWN_T])
        return cross_NC


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
