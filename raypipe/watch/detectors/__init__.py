"""The drift detectors by name."""

from __future__ import annotations

from raypipe.watch.detectors import by_column, classes, kernel
from raypipe.watch.detectors.detector import Detector

DETECTORS = {
    one.name: one
    for one in (
        Detector(
            "mixture", ("embedding", "scores", "copies"), True, by_domain=True, moves_groups=True
        ),
        Detector("mmd", ("embedding",), True, kernel.mmd, moves_groups=True),
        Detector("online", ("arrival",), True, kernel.online, only_here=True),
        Detector("ks", ("embedding", "scores"), False, by_column.ks),
        Detector("cvm", ("embedding", "scores"), False, by_column.cvm),
        Detector("chi2", ("classes",), True, classes.chi2),
        Detector("looks", ("looks",), False, by_column.ks),
        Detector("lsdd", ("embedding",), True),
        Detector("classifier", ("embedding",), False),
        Detector("spot_the_diff", ("embedding",), False),
        Detector("learned_kernel", ("embedding",), True),
    )
}
