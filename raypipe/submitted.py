"""`python -m raypipe.submitted FOLDER CONFIG VERB …`: a verb that was submitted begins here.

FOLDER is where it was submitted. Relative paths mean what they mean there, if this node has that
folder: it is the same machine, or it shares a file system. CONFIG is the configuration's path
among what travelled; - for none.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from raypipe.main import entry


def arguments(given: list[str]) -> list[str]:
    """The verb's arguments; the current folder is FOLDER afterwards, where there is one."""
    folder, config, verb, *more = given
    # The configuration is looked for before the folder changes.
    named = [] if config == "-" else [str(Path(config).absolute())]
    if Path(folder).is_dir():
        os.chdir(folder)
    return [verb, *named, *more]


if __name__ == "__main__":
    entry(arguments(sys.argv[1:]))
