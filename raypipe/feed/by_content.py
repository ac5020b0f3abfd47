"""One array of features for many samples, filled by content: the sha256 of an image's bytes.

Features are most of what a run with a frozen backbone holds: 5 kB an image. So they are laid where
they belong as soon as they are read, and nothing else holds them. Equal contents have one row in
the stored features, and a row each here.

Legend: N samples, U different contents, K rows of stored features, D numbers of a feature.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


class ByContent:
    """features_ND of the samples whose contents are `contents`, in that order.

    code_N: the place of each sample's content in `different`. has_U: whose features are known.
    """

    def __init__(self, contents: pa.Array, width: int) -> None:
        encoded = contents.dictionary_encode()
        self.different = encoded.dictionary
        self.code_N = encoded.indices.to_numpy()
        self.has_U = np.zeros(len(self.different), bool)
        self.features_ND = np.empty((len(contents), width), np.float32)
        # The first sample of each content. Of several values for one place, the last one stays.
        self._first_U = np.empty(len(self.different), np.int64)
        self._first_U[self.code_N[::-1]] = np.arange(len(contents))[::-1]

    def fill(self, contents: pa.Array, features: Iterable[np.ndarray]) -> None:
        """Enter stored features where there are none. features: those of `contents`, in parts."""
        place_K = pc.fill_null(pc.index_in(contents, value_set=self.different), -1).to_numpy()
        done = 0
        for part_nD in features:
            place_n = place_K[done : done + len(part_nD)]
            done += len(part_nD)
            is_wanted = place_n >= 0
            is_wanted[is_wanted] = ~self.has_U[place_n[is_wanted]]
            self.put(place_n[is_wanted], part_nD[is_wanted])

    def put(self, codes_n: np.ndarray, features_nD: np.ndarray) -> None:
        """Enter the features of some contents."""
        self.features_ND[self._first_U[codes_n]] = features_nD
        self.has_U[codes_n] = True

    def spread(self) -> None:
        """Give samples of equal content equal features. Call it once, when all are entered."""
        first_N = self._first_U[self.code_N]
        again = np.flatnonzero(first_N != np.arange(len(first_N)))
        self.features_ND[again] = self.features_ND[first_N[again]]

    def known(self, samples: slice | np.ndarray) -> np.ndarray:
        """One bool a sample: its features are entered."""
        return self.has_U[self.code_N[samples]]
