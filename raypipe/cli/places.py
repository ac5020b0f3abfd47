"""OUT and DST: places that a command writes to, and no settings that stand there by mistake."""

from __future__ import annotations

import re

from raypipe.errors import ConfigError
from raypipe.files import is_there


def require(word: str, name: str) -> None:
    """Raise ConfigError for section.key=value in the place of `name`.

    A file would be called so, and the setting would not be applied.
    """
    if re.match(r"[a-z_]+(\.[\w-]+)+=", word) and not is_there(word):
        raise ConfigError(
            f"{name} is missing",
            got=word,
            rule="This is a setting, and no place",
            fix=f"Write {name} before the settings. If a file is to be called so: ./{word}",
        )
