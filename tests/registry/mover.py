"""A process that promotes versions: PROGRAM with an argument of JSON, which has

registry, dir      the section, and the run's folder
versions           the versions to promote, one after the other, each from wherever the alias is
expected           the version that it must be moved from; "any": where it is
go                 a file to wait for
dies               whether it is killed between its commit and the alias

It prints one JSON line: the versions that it moved to, and the messages of refusals.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from raypipe.config import RunConfig
from raypipe.errors import RaypipeError
from raypipe.registry import follow, promote, versions
from raypipe.registry.store import open_store
from raypipe.registry.tracking import RegistryConfig

PROGRAM = """
import json, sys
from tests.registry import mover
print(json.dumps(mover.main(json.loads(sys.argv[1]))), flush=True)
"""


def main(given: dict) -> dict:
    cfg = RegistryConfig(**given["registry"])
    store = open_store(RunConfig(dir=given["dir"]), cfg)
    if given.get("dies"):
        follow.apply = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    Path(given["dir"], "ready").touch()
    while not Path(given["go"]).exists():
        time.sleep(0.01)
    won, refused = [], []
    for number in given["versions"]:
        version = versions.require(store, number, "")
        expected = given["expected"]
        if expected == "any":
            now = promote.champion(store)
            expected = now.version if now else None
        try:
            promote.promote(store, version, expected)
            won.append(number)
        except RaypipeError as e:
            refused.append(str(e))
    return {"won": won, "refused": refused}
