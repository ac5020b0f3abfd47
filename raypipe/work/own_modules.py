"""The user's own modules that a job names; they travel with it when it is submitted."""

from __future__ import annotations

import re

from raypipe.config import dump
from raypipe.errors import DataError
from raypipe.job import Job
from raypipe.models import own_code

FILE_MODEL = re.compile(r"\bfile:([A-Za-z_][\w.]*):[A-Za-z_]\w*")


def of(job: Job) -> dict[str, bytes]:
    """Sources by path: of `file:` models, also those of a search space, and of a python source.

    A module that is not here may be installed on the cluster, and is left out.
    """
    # A model's name may stand in many fields: the model, a space, a retrain.
    names = set(FILE_MODEL.findall(dump(job)))
    if job.ingest.source.kind == "python":
        names.add(job.ingest.source.images.partition(":")[0])
    files: dict[str, bytes] = {}
    for name in sorted(names):
        if name.partition(".")[0] == "raypipe":
            continue
        try:
            files |= own_code.collect(name)
        except DataError:
            continue
    return files
