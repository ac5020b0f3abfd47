"""What travels with a submitted job: raypipe as it is here, the configuration, and the user's own
modules that the configuration names. Nothing else of the current folder.

Ray names a package by its content and keeps it on the cluster, so the same code is sent once.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from raypipe.errors import ConfigError, one_line

CONFIG_FOLDER = "job"
COPIES = "/runtime_resources/working_dir_files/"
MOST_BYTES = 50 * 2**20  # of the user's own files
_NOT_CODE = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
# Ray would leave out what these name, also files of raypipe itself, without a word. And .env holds
# secrets, which Git's list had kept here.
STAYS = ".gitignore", ".rayignore", ".env"


@contextmanager
def packed(
    config: Path | None, modules: Mapping[str, bytes], bring: Mapping[str, Path]
) -> Iterator[tuple[Path, str | None]]:
    """A temporary folder for Ray to send, and the configuration's path in it.

    modules: source files by their path from the folder of imports. bring: more files and folders,
    by their path from the current folder. Raises ConfigError if these are too large or missing.
    """
    _require_small(bring)
    with tempfile.TemporaryDirectory(prefix="raypipe-job-") as name:
        folder = Path(name) / "luggage"
        for path, file in bring.items():
            _copy(file, folder / path)
        # Afterwards: what the job runs is raypipe as it is here, whatever the user brings.
        code = Path(__file__).parents[1]
        shutil.copytree(code, folder / "raypipe", ignore=_NOT_CODE, dirs_exist_ok=True)
        for path, source in modules.items():
            _write(folder / path, source)
        inside = None
        if config is not None:
            inside = f"{CONFIG_FOLDER}/{config.name}"
            _write(folder / inside, config.read_bytes())
        yield folder, inside


def require_lasting(places: Mapping[str, str]) -> None:
    """Raise ConfigError for a place inside the copy of what travelled, which Ray deletes.

    places: folders or URLs by the setting that names them.
    """
    for setting, place in places.items():
        if COPIES in place:
            raise ConfigError(
                f"{setting} is inside the folder that Ray copied for this job",
                got=place,
                rule="Ray deletes it with the job, and other nodes do not see it",
                fix=f"Set {setting} to an absolute path or a URL that every node can reach",
            )


def _copy(file: Path, to: Path) -> None:
    """A file or a folder, also where another one brought a part of it. Raises ConfigError."""
    if file.name in STAYS:
        return
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            shutil.copytree(
                file,
                to,
                ignore=shutil.ignore_patterns(*STAYS),
                dirs_exist_ok=True,
                ignore_dangling_symlinks=True,
            )
        else:
            shutil.copyfile(file, to)
    except shutil.Error as e:
        # Of a folder it tells all that failed: (from, to, why) each.
        raise _unreadable(file, e.args[0][0][2]) from None
    except OSError as e:
        raise _unreadable(file, e) from None


def _unreadable(file: Path, why: object) -> ConfigError:
    return ConfigError(
        f"This cannot travel with the job: {one_line(why)}",
        got=str(file),
        fix="Leave it out of cluster.bring, or mend it",
    )


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def below_here(paths: list[str]) -> dict[str, Path]:
    """Files and folders by their path from the current folder, links by their own names.

    Raises ConfigError.
    """
    found = {}
    here = Path.cwd()
    for text in paths:
        file = (here / text).resolve()
        if not file.exists() or not file.is_relative_to(here.resolve()):
            raise ConfigError(
                "This cannot travel with the job",
                got=text,
                rule="cluster.bring names files and folders below the current one",
            )
        # The job's configuration calls a link by its name, not by what it leads to.
        named = here / text
        is_plain = ".." not in named.parts and named.is_relative_to(here)
        place = named.relative_to(here) if is_plain else file.relative_to(here.resolve())
        found[str(place)] = file
    return found


def _require_small(bring: Mapping[str, Path]) -> None:
    """Raise ConfigError for too many bytes; links are followed, as they are when copied."""
    size = 0
    for file in bring.values():
        for each in _files(file, ()):
            size += each.stat().st_size
            if size > MOST_BYTES:
                raise ConfigError(
                    "Too much would travel with the job",
                    got=f"more than {MOST_BYTES // 2**20} MiB in cluster.bring",
                    rule=f"At most {MOST_BYTES // 2**20} MiB: Ray keeps them on every node",
                    fix="Put data where every node can read it",
                )


def _files(path: Path, above: tuple[str, ...]) -> Iterator[Path]:
    """The files of a folder, or the file itself. above: the real folders around it."""
    if path.is_file():
        yield path
    if not path.is_dir():
        return
    real = os.path.realpath(path)
    if real in above:
        raise ConfigError(
            "A link in cluster.bring leads into its own folder",
            got=str(path),
            fix="Remove the link, or name what the job needs",
        )
    try:
        inside = sorted(path.iterdir())
    except OSError as e:
        raise _unreadable(path, e) from None
    for each in inside:
        yield from _files(each, (*above, real))
