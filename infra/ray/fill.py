"""Fill in the placeholders of a file, and refuse it while one is unset:

    export RAYPIPE_IMAGE=… RAYPIPE_VERB=train
    python infra/ray/fill.py infra/ray/kuberay/job.yaml | kubectl apply -f -

A placeholder is `${NAME:?what it is}`, as in a shell. Its value comes from the environment. Nothing
is printed before all have one, so a pipe never gets half of a file. Only Python's standard library
is needed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

PLACEHOLDER = re.compile(r"\$\{([A-Z][A-Z0-9_]*):\?([^{}]*)\}")
# Letters, digits and what paths, addresses and image names have. Nothing that YAML or a shell would
# read as more than text.
VALUE = re.compile(r"[A-Za-z0-9_/~][A-Za-z0-9._/:@=+,~-]*(?<!:)")
# What YAML reads as nothing, as true or false, as a number, or as a time. Nothing here is meant to
# be one.
NO_TEXT = re.compile(
    r"(?i)~|null|true|false|yes|no|on|off|y|n|[0-9][0-9_.:,+-]*(e[0-9+-]+)?|0[xob]\w+"
    r"|\d{4}-\d\d?-\d\d?t\S*"
)


def fill(text: str, values: Mapping[str, str]) -> str:
    """`text` with its placeholders filled in.

    Raises ValueError that names each placeholder without a value, and each value that is refused.
    """
    problems = {}
    for name, what in PLACEHOLDER.findall(text):
        value = values.get(name, "")
        if not value.strip():
            problems[name] = f"{name} is not set: {what}"
        elif not VALUE.fullmatch(value):
            # Not the value itself: it may be a secret that is in the wrong variable.
            problems[name] = f"{name} has a character that is not allowed in {what}"
        elif NO_TEXT.fullmatch(value):
            problems[name] = f"{name} would be read as a number, a switch or nothing; it is {what}"
    left = PLACEHOLDER.sub("", text)
    if "${" in left:
        line = left[: left.index("${")].count("\n") + 1
        problems["${"] = (
            f"line {line} has a ${{ that is no placeholder; write ${{NAME:?what it is}}"
        )
    if problems:
        raise ValueError("\n".join(problems.values()))
    return PLACEHOLDER.sub(lambda found: values[found[1]], text)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        filled = fill(Path(arguments[0]).read_text(encoding="utf-8"), os.environ)
    except (OSError, ValueError) as e:
        print(e, file=sys.stderr)
        return 2
    # Whatever the locale: half of a file, or none, would go into the pipe.
    sys.stdout.buffer.write(filled.encode("utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
