"""What raypipe writes into a commit about itself: the user, the reason, and the version that its
rows come from.

The log keeps these properties for as long as it keeps the commit. `raypipe table list` and `table
lineage` read them.
"""

from __future__ import annotations

import getpass

from deltalake import CommitProperties

# The version that the rows of this commit come from: uri@vN, or @vN for a version of the same
# table.
SOURCE = "raypipe.from"


def commit_properties(why: str, source: str = "") -> CommitProperties:
    """Custom metadata of one commit: the reason `why`, the user and, for derived rows, the version
    `source`.
    """
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # in a container the user may have no name
        user = ""
    metadata = {"raypipe": why, "raypipe.by": user, SOURCE: source}
    return CommitProperties(custom_metadata={k: v for k, v in metadata.items() if v})
