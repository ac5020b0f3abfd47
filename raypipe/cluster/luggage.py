"""What travels with a submitted job: raypipe as it is here, the configuration, and the user's own
modules that the configuration names. Nothing else of the current folder.

Ray names a package by its content and keeps it on the cluster, so the same code is sent once.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from raypipe.errors import ConfigError

CONFIG_FOLDER = "job"
COPIES = "/runtime_resources/working_dir_files/"
MOST_BYTES = 50 * 2**20  # of the user's own files
_NOT_CODE = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


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
        code = Path(__file__).parents[1]
        shutil.copytree(code, folder / "raypipe", ignore=_NOT_CODE)
        for path, source in modules.items():
            _write(folder / path, source)
        for path, file in bring.items():
            copy = shutil.copytree if file.is_dir() else shutil.copyfile
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            copy(file, folder / path)
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
                f"{setting} lies in Ray's copy of what travelled with the job",
                got=place,
                rule="Ray deletes it with the job, and other nodes do not see it",
                fix=f"Set {setting} to an absolute path or a URL that every node can reach",
            )


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def below_here(paths: list[str]) -> dict[str, Path]:
    """Files and folders by their path from the current folder. Raises ConfigError."""
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
        found[str(file.relative_to(here.resolve()))] = file
    return found


def _require_small(bring: Mapping[str, Path]) -> None:
    size = 0
    for file in bring.values():
        inside = file.rglob("*") if file.is_dir() else [file]
        size += sum(each.stat().st_size for each in inside if each.is_file())
    if size > MOST_BYTES:
        raise ConfigError(
            "Too much would travel with the job",
            got=f"{size / 2**20:,.0f} MiB in cluster.bring",
            rule=f"At most {MOST_BYTES // 2**20} MiB: Ray keeps them on every node",
            fix="Put data where every node can read it",
        )
