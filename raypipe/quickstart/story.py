"""The story of the design, told with every real engine in its place.

A plant makes monocrystalline solar cells: ingest, clean, search, register a champion. One night's
batch is more of the same, and nothing must fire. The next night polycrystalline cells arrive,
unannounced: the batch is predicted and drift is found. Labels come in, those of the first night's
cells too; a small search around the champion's settings finds a challenger for both kinds, and the
gate compares the two on the same pinned test images.

run.seed draws what is random: what goes into which split (unless ingest.seed is set), the trials,
the order of samples.

Every step is a verb's own function, and each looks for what an earlier run finished: a killed story
is told to its end.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raypipe import report
from raypipe.cli.console import Console
from raypipe.cluster import sidecar
from raypipe.cluster.connect import connect
from raypipe.cluster.sidecars import build, pins
from raypipe.config import replace, to_json
from raypipe.errors import ConfigError, RaypipeError
from raypipe.job import Job
from raypipe.quickstart import folder, page
from raypipe.registry import promote
from raypipe.registry.store import Store
from raypipe.registry.versions import ModelVersion
from raypipe.search.result import SearchResult
from raypipe.serve import batch
from raypipe.stores import address
from raypipe.tables import scan
from raypipe.tables.clean import CleanResult, clean
from raypipe.tables.ingest import IngestResult, ingest
from raypipe.tables.table import ImageTable, TableConfig, TableVersion
from raypipe.watch import calls
from raypipe.watch.check import CheckResult, check
from raypipe.watch.retrain import RetrainConfigs, retrain
from raypipe.watch.retrained import RetrainResult
from raypipe.work import tables, training

CELLS = "raypipe.quickstart.elpv:cells"
# Of the mono cells are known on the first day; the rest is the first night's batch, the negative
# control.
NIGHT_SHARE = 0.85


@dataclass
class Story:
    """What has happened so far, for the report."""

    steps: list[report.Step] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)


def tell(job: Job, console: Console, fresh: bool = False) -> dict[str, Any]:
    """Run the story to its end; returns the summary, the last line of `make quickstart`."""
    with folder.told_in(job.run.path, job.table.uri, fresh):
        return _told(job, console)


def _told(job: Job, console: Console) -> dict[str, Any]:
    story = Story()
    cells = TableConfig(uri=job.table.uri)
    # Each night has a table of its own: a batch is checked before it is mixed with anything.
    # Not a Path's: that of s3://b/cells would be a folder here.
    head, slash, _ = job.table.uri.rstrip("/").rpartition("/")
    nights = {name: TableConfig(uri=f"{head}{slash}night_{name}") for name in ("control", "poly")}

    console.heading("Day 1: the cells we know")
    # Built before the clock of the first step starts: it takes a minute on a new machine.
    sidecar.take_from(job.cluster.sidecars)
    for name in pins.names():
        build.place(name)  # raises where this Python cannot have one
    for name in pins.names():
        sidecar.ensure(name)
    with _step(story, console, "Ingest mono cells") as done:
        mono = _ingest(console, job, cells, name="mono", kind="mono", share=(0.0, NIGHT_SHARE))
        _require_own(cells, mono)
        raw = ImageTable.open(cells).tag("mono-raw", _version_of(cells, "mono", "mono-raw"))
        done(f"{_count(cells, raw)} images, every one decoded, in {_short(raw)}")
    # Ingest above runs in this process; from here on there is a cluster.
    connect(job.cluster)
    with _step(story, console, "Clean") as done:
        cleaned = clean(_at(cells, "mono-raw"), job.clean.model_copy(update={"tag": "mono-clean"}))
        done(_cleaned(cleaned))
    with _step(story, console, "Search and register") as done:
        found, first, store = training.search_and_register(
            replace(job, {"table": _at(cells, "mono-clean").model_dump()}), console
        )
        training.crown_first(store, first)
        console.leaderboard(found.metric, found.standings, top=5)
        done(_searched(found, first))

    # The negative control: cells of the same kind must not raise an alarm.
    console.heading("Night 1: more of the same")
    checks = {
        "control": _night(
            story,
            console,
            job,
            store,
            nights["control"],
            first,
            "control",
            "mono",
            (NIGHT_SHARE, 1.0),
        )
    }
    console.heading("Night 2: other cells arrive, unannounced")
    checks["poly"] = _night(
        story, console, job, store, nights["poly"], first, "poly", "poly", (0.0, 1.0)
    )

    # The control night gets its labels too, or the challenger would know fewer mono cells.
    console.heading("Day 3: labels come in")
    with _step(story, console, "Ingest both nights' cells with labels") as done:
        more = _ingest(console, job, cells, name="mono", kind="mono", share=(NIGHT_SHARE, 1.0))
        poly = _ingest(console, job, cells, name="poly", kind="poly", share=(0.0, 1.0))
        both = ImageTable.open(cells).tag("both-raw", _version_of(cells, "poly", "both-raw"))
        done(f"{_count(cells, both)} images of both kinds in {_short(both)}")
    with _step(story, console, "Clean") as done:
        cleaned_both = clean(
            _at(cells, "both-raw"), job.clean.model_copy(update={"tag": "both-clean"})
        )
        done(_cleaned(cleaned_both))
    with _step(story, console, "Retrain, compare, decide") as done:
        on_both = replace(job, {"table": _at(cells, "both-clean").model_dump()})
        after = retrain(
            store,
            on_both.training,
            RetrainConfigs(job.search, job.watch, job.gate),
            checks["poly"],
            first,
            console.say,
            decided=lambda said: calls.keep(
                job.run,
                job.watch,
                checks["poly"].key,
                store.model,
                str(first),
                said,
                seal=first.seal,
            ),
        )
        _show(console, tables.comparison(after))
        done(after.decision.reason)

    summary = _summary(
        job, cells, [mono, more, poly], [cleaned, cleaned_both], found, checks, after, store
    )
    summary["report"] = str(
        page.write(
            job, story.steps, store, found, [cleaned, cleaned_both], checks, nights, after, first
        )
    )
    # The page is part of the time that is told.
    summary["seconds"] = round(time.perf_counter() - story.started, 1)
    console.heading("The story")
    console.facts(
        {
            "report": summary["report"],
            "MLflow": f"mlflow ui --backend-store-uri {shlex.quote(store.uri)}",
            "decision": after.decision.reason,
        }
    )
    (job.run.path / "quickstart.json").write_text(to_json(summary, indent=2), encoding="utf-8")
    return summary


def _night(
    story: Story,
    console: Console,
    job: Job,
    store: Store,
    table: TableConfig,
    model: ModelVersion,
    name: str,
    kind: str,
    share: tuple[float, float],
) -> CheckResult:
    with _step(story, console, f"The batch {name} arrives") as done:
        _ingest(console, job, table, name=name, kind=kind, share=share, labelled=False)
        with console.progress("Predicting") as tick:
            predicted = batch.predict(store, job.run, table, job.predict, model, tick)
        labels = ", ".join(f"{n} {label}" for label, n in sorted(predicted.labels.items()))
        done(f"{predicted.images} unlabelled images predicted by {model}: {labels}")
    with _step(story, console, f"Drift check {name}") as done:
        checked = check(store, job.run, table, name, job.predict, job.drift, model)
        _show(console, tables.evidence(checked))
        console.facts({"what it costs": str(checked.report.severity), "report": checked.page})
        done(
            ("Drift" if checked.report.is_drift else "No drift")
            + f", p {tables.p_text(checked.report.p_value, checked.report.alpha)}"
        )
    return checked


def _show(console: Console, table: tables.Table | None) -> None:
    if table is not None:
        console.table(table.title, table.columns, table.rows)


@contextmanager
def _step(story: Story, console: Console, name: str) -> Iterator[Any]:
    started, said = time.perf_counter(), ["done"]
    console.say(f"{name} …")
    yield lambda text: said.__setitem__(0, text)
    story.steps.append(report.Step(name, said[0], time.perf_counter() - started))
    console.say(f"{name}: {said[0]}")


def _ingest(
    console: Console,
    job: Job,
    table: TableConfig,
    name: str,
    kind: str,
    share: tuple[float, float],
    labelled: bool = True,
) -> IngestResult:
    source = {"kind": "python", "images": CELLS, "where": {"type": kind}, "labelled": labelled}
    # Splits follow run.seed, so that another seed is another story; ingest.seed still wins.
    seed = job.ingest.seed if "seed" in job.ingest.model_fields_set else job.run.seed
    cfg = replace(job.ingest, {"from": source, "name": name, "share": share, "seed": seed})
    with console.progress(f"Ingesting {name}") as tick:
        return ingest(table, cfg, tick)


def _require_own(table: TableConfig, mono: IngestResult) -> None:
    """Raise ConfigError if a story that begins finds more than its own images in the table: the
    first night's would be known already."""
    opened = ImageTable.open(table)
    own = mono.accepted + mono.present
    if "mono-raw" in opened.tags() or (count := _count(table, opened.pin())) <= own:
        return
    raise ConfigError(
        "The table has images that no quickstart has put there",
        got=f"{count} images in {table.uri}, {own} of them of the first day",
        rule="A quickstart begins with a table of its own: it keeps images back for its nights",
        fix="Set table.uri and run.dir to new folders",
    )


def _version_of(table: TableConfig, name: str, tag: str) -> int:
    """The newest version made by the ingest called `name`; the tagged one, if the tag exists."""
    opened = ImageTable.open(table)
    # An earlier run of the story came this far; versions that it made later do not count.
    if tag in opened.tags():
        return opened.pin(tag).version
    made = [v["version"] for v in opened.history() if v["why"] == f"ingest {name}"]
    if not made:
        raise RaypipeError(
            f"{table.uri} holds the images of {name}, but no version says so",
            fix="raypipe quickstart --fresh",
        )
    return int(max(made))


def _at(table: TableConfig, tag: str) -> TableConfig:
    return table.model_copy(update={"version": tag})


def _count(table: TableConfig, version: TableVersion) -> int:
    return len(scan.rows(ImageTable.open(table), version, ["image_id"]))


def _short(version: TableVersion) -> str:
    return f"{Path(version.uri).name}@v{version.version}"


def _searched(found: SearchResult, registered: ModelVersion) -> str:
    # The metric may be a loss, which is no share.
    best = report.number(found.trials[0].metric)
    return f"{found.drawn} trials, best {found.metric} {best}, registered as {registered}"


def _cleaned(result: CleanResult) -> str:
    found = ", ".join(f"{n} {verdict}" for verdict, n in sorted(result.counts.items())) or "nothing"
    left = f"dropped {result.dropped}, leaving {_short(result.clean)}"
    return f"found {found} in {result.images} images; {left}"


def _summary(
    job: Job,
    cells: TableConfig,
    ingested: list[IngestResult],
    cleaned: list[CleanResult],
    found: SearchResult,
    checks: dict[str, CheckResult],
    after: RetrainResult,
    store: Store,
) -> dict[str, Any]:
    # A slice without test images is missing.
    by_slice = {s.slice: s for s in after.slices}
    winner = promote.require_champion(store)

    def accuracies(which: str) -> dict[str, float | None]:
        return {
            f"accuracy_{name}": round(getattr(by_slice[name], which), 4)
            if name in by_slice
            else None
            for name in ("mono", "poly")
        }

    return {
        "table_versions": {"uri": address(cells.uri), **ImageTable.open(cells).tags()},
        "images_ingested": sum(r.accepted + r.present for r in ingested),
        "images_dropped": sum(c.dropped for c in cleaned),
        "trials": found.drawn,
        "champion_before": {"version": after.champion.version, **accuracies("champion")},
        "drift": {
            name: {"is_drift": c.report.is_drift, "p_value": c.report.p_value}
            for name, c in checks.items()
        },
        "champion_after": {
            "version": winner.version,
            **accuracies(
                "challenger" if winner != after.champion and after.decision.act else "champion"
            ),
        },
        "promoted": after.decision.act and after.challenger is not None,
        "slices": {
            s.slice: {
                "images": s.images,
                "champion": round(s.champion, 4),
                "challenger": round(s.challenger, 4),
                "won": s.won,
                "lost": s.lost,
                "p_value": s.p_value,
            }
            for s in after.slices
        },
        "decision": after.decision.reason,
        "mlflow_uri": store.uri,
    }
