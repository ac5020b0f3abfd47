"""From which known domain does each row of a window come, and how far is it from it?

Normal distributions of one covariance say how likely a row is in each domain. Where domains are not
normal, that is too sure of itself; so the log likelihoods are divided by a temperature, fitted to
reference rows that were left out. How often each domain occurs comes from the window itself (EM,
Saerens et al. 2002).

Legend: N rows of the reference, M of the window, D features, K domains.
"""

from __future__ import annotations

import numpy as np

# Components that the likelihoods look at: of a domain of five rows, more are only noise.
COMPONENTS = 16
FOLDS = 5
TEMPERATURES = (1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 20.0, 50.0)
EM_STEPS = 100
# A domain's mean is drawn towards the mean of all, as if so many of its rows lay there.
PRIOR_ROWS = 2
SHRINKAGE = 0.1  # of the covariance towards its diagonal
# Nats: a window without this domain would be 20 times as rare.
PLAUSIBLE = 3.0
NEIGHBOURS = 5
# A row is unlike a domain if it lies farther from it than this share of the domain's own rows.
USUAL = 0.99


def log_likelihoods(
    reference_ND: np.ndarray, domain_N: np.ndarray, window_MD: np.ndarray, seed: int
) -> np.ndarray:
    """How likely each window row is in each domain: logarithms (M, K), up to a constant of the row.

    Features are principal components, the largest first. domain_N: 0 to K - 1, and each occurs.
    """
    domains = int(domain_N.max()) + 1
    if domains == 1:
        return np.zeros((len(window_MD), 1))
    known_Nd, asked_Md = reference_ND[:, :COMPONENTS], window_MD[:, :COMPONENTS]
    fold_N = np.random.default_rng(seed).permutation(len(domain_N)) % FOLDS
    left_out_NK = np.zeros((len(domain_N), domains))
    for fold in np.unique(fold_N):
        out = fold_N == fold
        left_out_NK[out] = _normal(known_Nd[~out], domain_N[~out], known_Nd[out], domains)
    shares_K = np.log(np.bincount(domain_N, minlength=domains) / len(domain_N))
    rows_N = np.arange(len(domain_N))
    losses = [
        -_log_softmax(left_out_NK / temperature + shares_K)[rows_N, domain_N].mean()
        for temperature in TEMPERATURES
    ]
    temperature = TEMPERATURES[int(np.argmin(losses))]
    return _normal(known_Nd, domain_N, asked_Md, domains) / temperature


def posterior(log_likelihood_MK: np.ndarray) -> np.ndarray:
    """The probability (M, K) of each domain for each row. It knows how often the window holds
    each."""
    rows, domains = log_likelihood_MK.shape
    share_K = np.full(domains, 1 / domains)
    for _ in range(EM_STEPS):
        member_MK = np.exp(_log_softmax(log_likelihood_MK + np.log(share_K)))
        # One row more, of all domains: no share becomes 0.
        share_K = (member_MK.sum(0) + 1 / domains) / (rows + 1)
    return member_MK


def sparse(log_likelihood_MK: np.ndarray) -> np.ndarray:
    """The posterior with as few domains as the window allows: others have probability 0.

    Those whose absence costs less than PLAUSIBLE of log likelihood are left out, the rarest first.
    """
    kept = list(range(log_likelihood_MK.shape[1]))
    member_MK = posterior(log_likelihood_MK)
    best = _evidence(log_likelihood_MK)
    while len(kept) > 1:
        rarest = kept[int(member_MK.sum(0).argmin())]
        fewer = [domain for domain in kept if domain != rarest]
        if best - _evidence(log_likelihood_MK[:, fewer]) > PLAUSIBLE:
            break
        kept, member_MK = fewer, posterior(log_likelihood_MK[:, fewer])
    found = np.zeros_like(log_likelihood_MK)
    found[:, kept] = member_MK
    return found


def _evidence(log_likelihood_MK: np.ndarray) -> float:
    """log likelihood of the window under its most likely mixture."""
    share_K = posterior(log_likelihood_MK).mean(0)
    top_M1 = log_likelihood_MK.max(1, keepdims=True)
    mixed_M = np.exp(log_likelihood_MK - top_M1) @ share_K
    return float((np.log(mixed_M) + top_M1[:, 0]).sum())


def is_unlike(
    squared_MN: np.ndarray, squared_NN: np.ndarray, domain_N: np.ndarray, domain_M: np.ndarray
) -> np.ndarray:
    """Which window rows lie farther from their domain than 99 % of its own rows do (bool, M).

    squared: distances between rows. Far: the mean distance to the nearest rows of the domain. A
    domain of fewer than three rows says nothing, and no row is unlike it.
    """
    unlike_M = np.zeros(len(domain_M), bool)
    for domain in np.unique(domain_M):
        mine = np.flatnonzero(domain_N == domain)
        if len(mine) < 3:
            continue
        own = squared_NN[np.ix_(mine, mine)].copy()
        np.fill_diagonal(own, np.inf)
        count = min(NEIGHBOURS, len(mine) - 1)
        rows = np.flatnonzero(domain_M == domain)
        usual = np.quantile(_nearest(own, count), USUAL)
        unlike_M[rows] = _nearest(squared_MN[np.ix_(rows, mine)], count) > usual
    return unlike_M


def _nearest(squared: np.ndarray, count: int) -> np.ndarray:
    return np.sqrt(np.partition(squared, count - 1, axis=1)[:, :count]).mean(1)


def _normal(
    known_ND: np.ndarray, domain_N: np.ndarray, asked_MD: np.ndarray, domains: int
) -> np.ndarray:
    """log likelihoods (M, K) under normal distributions around each domain's mean."""
    overall_D = known_ND.mean(0)
    # A domain may have no row in this fold: then its mean is the mean of all.
    means_KD = np.stack(
        [
            (mine.sum(0) + PRIOR_ROWS * overall_D) / (len(mine) + PRIOR_ROWS)
            for mine in (known_ND[domain_N == domain] for domain in range(domains))
        ]
    )
    residual_ND = known_ND - means_KD[domain_N]
    covariance_DD = residual_ND.T @ residual_ND / len(residual_ND)
    variance_D = np.diag(covariance_DD)
    covariance_DD = (1 - SHRINKAGE) * covariance_DD + SHRINKAGE * np.diag(variance_D)
    # A component that never moves inside the domains.
    covariance_DD += 1e-6 * max(float(variance_D.mean()), 1e-12) * np.eye(len(variance_D))
    inverse_DD = np.linalg.inv(covariance_DD)
    away_MKD = asked_MD[:, None] - means_KD
    return -0.5 * np.einsum("mkd,de,mke->mk", away_MKD, inverse_DD, away_MKD, optimize=True)


def _log_softmax(logits_MK: np.ndarray) -> np.ndarray:
    shifted = logits_MK - logits_MK.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
