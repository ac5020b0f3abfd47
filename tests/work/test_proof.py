"""Eight questions about a version that a loop with real stores made, and what hostile hands do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from raypipe.config import RunConfig, key_of, validate
from raypipe.job import Job
from raypipe.registry import fetching, promote, recorded, runs, versions
from raypipe.registry import package as packages
from raypipe.registry.moves import Move
from raypipe.registry.store import Store, open_store
from raypipe.registry.versions import ModelVersion
from raypipe.tables.commits import rows_once
from raypipe.train import learned, origin, trainer
from raypipe.train.origin import CalledFor
from raypipe.train.publish import publish
from raypipe.watch import calls, decisions, evidence_row, retrained
from raypipe.watch.comparison import compare
from raypipe.watch.decide import Decision
from raypipe.work import reports
from raypipe.work.proof import questions
from raypipe.work.proof.answers import Answer
from tests.conftest import Cli, encode, striped

CHECK, NAME = key_of("a check"), "photos"
PART = ("warm", "cold")


@dataclass
class Loop:
    """A run folder with two versions: the second replaced the first, after drift."""

    root: Path
    job: Job
    store: Store
    first: ModelVersion
    second: ModelVersion
    decision: str

    def answers(self, number: int | None = None, **how: Any) -> dict[str, Answer]:
        done = reports.model(self.job, number, **how)
        return {answer.name: answer for answer in done.answers}


@pytest.fixture(scope="module")
def loop(ray_session: str, tmp_path_factory: pytest.TempPathFactory) -> Loop:
    root = tmp_path_factory.mktemp("proof")
    rows = []
    for i in range(40):
        split = ("train", "train", "train", "val", "test")[i % 5]
        image = encode(striped(i, PART[i % 2]))
        row = {"image_id": f"i{i}", "image": image, "label": PART[i % 2], "split": split}
        rows.append({**row, "source": f"<b>{i % 3}</b>"})
    write_deltalake(str(root / "t"), pa.Table.from_pylist(rows))
    settings = {
        "run": {"name": NAME, "dir": str(root / "run")},
        "table": {"uri": str(root / "t")},
        "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False},
        "train": {"epochs": 1, "batch_size": 8, "lr": 0.01, "precision": "fp32"},
    }
    (root / "c.yaml").write_text(json.dumps(settings))
    job = validate(Job, settings)
    store = open_store(job.run, job.registry)

    def trained(seed: int, name: str, why: CalledFor | None = None) -> ModelVersion:
        one = job.training.model_copy(
            update={"run": RunConfig(**{**settings["run"], "seed": seed})}
        )
        planned = trainer.plan(one)
        return publish(store, planned, trainer.run(planned), name, called_for=why)

    first = trained(1, "train")
    promote.promote(store, first, None, evidence={"first": first.tags[runs.KEY]})
    drift = {"key": CHECK, "name": "night", "model": str(first), "table": "n@v1"}
    drift |= {"is_drift": True, "p_value": 0.002, "alpha": 0.05, "checked_at": "2026-01-02T03:00"}
    said = pa.Table.from_pylist([drift], evidence_row.ROW)
    rows_once(
        str(job.run.path / "drift"), evidence_row.ROW, {"key": CHECK}, lambda: said, "drift check"
    )
    logged = {"drift.p_value": 0.002}
    fill = lambda run_id: runs.log_metrics(store, run_id, logged)  # noqa: E731
    runs.once(store, CHECK, "drift night", {}, None, fill)

    evidence = {"check": CHECK, "batch": "n@v1", "is_drift": True, "p_value": 0.002, "alpha": 0.05}
    why = CalledFor("retrain", "Drift, and labels: 5 images of new", first, evidence)
    second = trained(2, "challenger", why)
    key = key_of("a decision")
    slices = (compare("<i>s</i>", [True] * 5 + [False] * 15, [True] * 20, is_new=True),)
    decision = Decision(True, "Promoted: +75.0 points on <i>s</i> (p = 0.00003)")
    parts = (first, second, "t@v0")
    row = decisions.as_row(key, parts, slices, None, decision)
    place = str(job.run.path / "decisions")
    rows_once(place, decisions.ROW, {"key": key}, lambda: row, "gate")
    named = {"decision": key, "check": f"drift-night-{CHECK}"}
    retrained.carry_out(store, first, second, decision, slices, named)
    return Loop(root, job, store, first, second, key)


@pytest.fixture
def put_back(loop: Loop, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Copies a folder of the loop, and puts it back after the test."""
    saved: list[tuple[Path, Path]] = []

    def keep(name: str) -> Path:
        folder = loop.root / name
        copy = shutil.copytree(folder, tmp_path / name.replace("/", "-"))
        saved.append((folder, copy))
        return folder

    yield keep
    for folder, copy in saved:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(copy, folder)


def test_eight_of_eight_questions_are_answered(loop: Loop, cli: Cli) -> None:
    code, out, err = cli("report", "model", str(loop.root / "c.yaml"), "--json")
    assert code == 0, err
    said = json.loads(out.splitlines()[-1])
    assert (said["model"], said["answered"], said["questions"]) == (f"{NAME}/2", 8, 8)
    by_name = {answer["name"]: answer for answer in said["answers"]}
    for answer in said["answers"]:
        assert answer["answer"] and answer["source"], answer["name"]
        assert all(check["ok"] is not False for check in answer["checks"]), answer
    # What nobody can look up again is recorded, and not called proven.
    statuses = {name: answer["status"] for name, answer in by_name.items()}
    assert statuses.pop("packages") == statuses.pop("cost") == "recorded"
    assert set(statuses.values()) == {"proven"}, statuses

    assert by_name["rows"]["facts"]["rows"]["train"]["rows"] == 24
    assert by_name["cleaning"]["facts"]["state"] == "not cleaned"
    assert by_name["code"]["facts"]["config"]["train"]["lr"] == 0.01
    assert len(by_name["code"]["facts"]["sha256"]) == 64
    assert by_name["packages"]["facts"]["packages"]["torch"]
    assert by_name["quality"]["facts"]["judged"]["images"] == 8
    assert [part["name"] for part in by_name["quality"]["facts"]["judged"]["slices"]]
    assert by_name["replaced"]["facts"]["decision"]["champion"] == f"{NAME}/1"
    assert f"{NAME}/1" in by_name["replaced"]["answer"]
    assert "Drift, and labels" in by_name["why"]["answer"] and CHECK in by_name["why"]["answer"]
    assert "cost.node" in by_name["cost"]["not_known"]

    page = Path(said["report"]).read_text()
    assert "<i>s" not in page and "&lt;i&gt;s" in page and "<b>0" not in page
    kept = json.loads(Path(said["report"]).with_suffix(".json").read_text())
    assert kept["answers"] == said["answers"]


def test_the_decision_is_noted_on_the_challenger_and_is_no_part_of_it(loop: Loop) -> None:
    assert recorded.decision_of(loop.store, loop.second) == loop.decision
    assert recorded.decision_of(loop.store, loop.first) == ""
    # A version that is looked up later equals the one that was registered.
    assert promote.require_champion(loop.store) == loop.second
    assert loop.second.tags["raypipe.parent"] == str(loop.first)


def test_the_first_champion_replaced_none(loop: Loop) -> None:
    answers = loop.answers(1)
    assert answers["replaced"].text.startswith("None: it was the first photos@champion")
    assert answers["why"].text == "raypipe train was called"
    assert answers["why"].status == "recorded"


@pytest.mark.parametrize(
    ("named", "version"),
    [
        (["photos@champion"], 2),
        (["photos/1"], 1),
        (["models:/photos@champion"], 2),
        (["CONFIG", "--version", "1"], 1),
        (["photos@champion", "CONFIG"], 2),
        (["photos/1", "CONFIG", "run.seed=3"], 1),
        (["CONFIG", "run.seed=3"], 2),
    ],
)
def test_a_version_has_several_names(
    loop: Loop, named: list[str], version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = loop.root / "c.yaml"
    (loop.root / "runs").mkdir(exist_ok=True)
    link = loop.root / "runs" / NAME
    if not link.exists():
        link.symlink_to(loop.root / "run")
    monkeypatch.chdir(loop.root)
    words = [str(config) if word == "CONFIG" else word for word in named]
    number = int(words.pop()) if "--version" in words else None
    words = [word for word in words if word != "--version"]
    overrides = [word for word in words if "=" in word]
    paths = [Path(word) for word in words[1:] if "=" not in word]
    job, asked = reports.job_of(words[0], paths[0] if paths else None, overrides, number)
    assert reports.model(job, asked, reread=False).found.version.version == version


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("photos",), "names no registered model"),
        (("photos/1", "CONFIG", "--version", "2"), "Two versions"),
        (("CONFIG", "CONFIG"), "Two configurations"),
        (("photos/9", "CONFIG"), "has no version 9"),
        (("photos@blue", "CONFIG"), "There is no blue"),
        (("nobody@champion",), "There is no model store here"),
        (("photos/" + "9" * 30, "CONFIG"), "has no version 9"),
        (("x" * 300,), "names no registered model"),
        (("CONFIG", f"run.name={'x' * 300}"), "There is no champion of"),
        (("photos/1", "run.name=" + "x" * 300), "There is no model store here"),
    ],
)
def test_what_names_nothing_is_one_message(
    loop: Loop, cli: Cli, words: tuple[str, ...], message: str
) -> None:
    given = [str(loop.root / "c.yaml") if word == "CONFIG" else word for word in words]
    code, _, err = cli("report", "model", *given)
    assert code == 2 and message in " ".join(err.split()), err


def package_file(loop: Loop, name: str) -> Path:
    """A file of the second version's package, where MLflow keeps it."""
    folder = Path(fetching.fetch(loop.store, loop.second).folder or "")
    return folder / name


@pytest.mark.parametrize("file", ["package.json", "weights.safetensors", "manifest.json"])
def test_an_altered_package_is_believed_in_nothing(loop: Loop, cli: Cli, file: str) -> None:
    path = package_file(loop, file)
    written = path.read_bytes()
    path.write_bytes(written.replace(b"0", b"1", 1))
    try:
        code, out, _ = cli("report", "model", str(loop.root / "c.yaml"), "--json")
    finally:
        path.write_bytes(written)
    said = json.loads(out.splitlines()[-1])
    assert code == 2 and said["status"] == "contradicted"
    by_name = {answer["name"]: answer for answer in said["answers"]}
    for name in ("rows", "cleaning", "code", "packages", "quality", "why"):
        assert by_name[name]["status"] == "contradicted" and by_name[name]["answer"] is None
    assert all(
        answer["status"] != "proven" or not answer["checks"][0]["what"].startswith("The pack")
        for answer in said["answers"]
    )
    assert "Contradicted" in Path(said["report"]).read_text()


def test_a_package_that_lost_a_file_is_not_proven(loop: Loop) -> None:
    path = package_file(loop, "reference.npz")
    written = path.read_bytes()
    path.unlink()
    try:
        answers = loop.answers()
    finally:
        path.write_bytes(written)
    assert answers["rows"].status == "contradicted"


def test_a_table_that_is_gone_leaves_the_record(
    loop: Loop, put_back: Callable[[str], Path]
) -> None:
    shutil.rmtree(put_back("t"))
    answers = loop.answers()
    assert answers["rows"].status == answers["quality"].status == "recorded"
    reasons = [check.found for check in answers["rows"].checks if check.ok is None]
    assert any("No Delta table here" in reason for reason in reasons)


def test_another_table_at_the_same_address_is_noticed(
    loop: Loop, put_back: Callable[[str], Path]
) -> None:
    folder = put_back("t")
    rows = DeltaTable(str(folder)).to_pyarrow_table().slice(1)
    shutil.rmtree(folder)
    write_deltalake(str(folder), rows)
    answers = loop.answers()
    wrong = [check.what for check in answers["rows"].checks if check.ok is False]
    assert "It is the same table, not one made again there" in wrong
    assert "Number and ids of the train rows, read again" in wrong


def test_labels_that_were_changed_under_the_version_are_noticed(
    loop: Loop, put_back: Callable[[str], Path]
) -> None:
    """The log says version 0, the ids are the same, and its file has other labels."""
    folder = put_back("t")
    table = DeltaTable(str(folder)).to_pyarrow_table()
    swapped = [{"warm": "cold", "cold": "warm"}[text] for text in table["label"].to_pylist()]
    lied = table.set_column(table.schema.get_field_index("label"), "label", pa.array(swapped))
    file = next(folder.glob("*.parquet"))
    pq.write_table(lied, file)
    quality = loop.answers()["quality"]
    assert quality.status == "contradicted"
    # Nothing is read with --quick, and nothing is claimed.
    assert loop.answers(reread=False)["quality"].status == "recorded"


@pytest.mark.parametrize("table", ["decisions", "drift"])
def test_a_changed_or_added_row_of_evidence_is_noticed(
    loop: Loop, put_back: Callable[[str], Path], table: str
) -> None:
    asked = {"decisions": "replaced", "drift": "why"}[table]
    place = put_back(f"run/{table}")
    assert loop.answers()[asked].status == "proven"
    rows = DeltaTable(str(place)).to_pyarrow_table()
    write_deltalake(str(place), rows, mode="append")
    wrong = [check.what for check in loop.answers()[asked].checks if check.ok is False]
    assert wrong == ["One row has its key"]
    change = {"reason": "'Promoted: because'"} if table == "decisions" else {"p_value": "0.9"}
    DeltaTable(str(place)).update(updates=change)
    wrong = [check.what for check in loop.answers()[asked].checks if check.ok is False]
    assert any("was only appended to" in what for what in wrong)
    assert any("says the same" in what for what in wrong)


def test_evidence_that_is_gone_is_said_to_be_gone(
    loop: Loop, put_back: Callable[[str], Path]
) -> None:
    shutil.rmtree(put_back("run/decisions"))
    answer = loop.answers()["replaced"]
    assert answer.status == "recorded" and loop.decision in answer.why


def test_moves_that_were_deleted_are_noticed(loop: Loop, put_back: Callable[[str], Path]) -> None:
    put_back("run/mlflow/raypipe-moves")
    table = DeltaTable(str(loop.store.moves))
    table.update(updates={"who": "'somebody else'"})
    answer = loop.answers()["replaced"]
    assert answer.status == "contradicted"
    told = reports.tell(loop.job)
    assert told.altered and "Changed afterwards" in told.page.read_text()


def registered_again(loop: Loop, name: str, change: Callable[[dict[str, Any]], None]) -> Store:
    """The first package under another name, with another package.json and a seal of its own."""
    store = replace(loop.store, model=name)
    old = fetching.fetch(loop.store, loop.first)
    info = json.loads(old.files["package.json"])
    change(info)
    files = {**old.files, "package.json": json.dumps(info).encode()}
    folder = loop.root / f"old-{key_of(name)}"
    folder.mkdir()
    manifest = {"format": packages.FORMAT}
    for file, data in files.items():
        if file != packages.MANIFEST:
            (folder / file).write_bytes(data)
            manifest[file] = packages.sha256(data)
    (folder / packages.MANIFEST).write_text(json.dumps(manifest))
    run_id = store.client.get_model_version(NAME, str(loop.first.version)).run_id
    version = versions.register(store, run_id, folder, key_of(name), {})
    promote.promote(store, version, None)
    return store


def of_model(loop: Loop, name: str) -> dict[str, Answer]:
    registry = loop.job.registry.model_copy(update={"model": name})
    done = reports.model(loop.job.model_copy(update={"registry": registry}), None)
    return {answer.name: answer for answer in done.answers}


def test_a_comparison_of_another_registry_is_not_told_as_its_own(
    loop: Loop, tmp_path: Path
) -> None:
    """Two registries have a model of one name, and their records lie in one folder."""
    there = f"sqlite:///{tmp_path / 'other.db'}"
    job = validate(Job, {**loop.job.model_dump(mode="json"), "registry": {"uri": there}})
    store = open_store(job.run, job.registry)
    folder = Path(str(fetching.fetch(loop.store, loop.first).folder))
    made = []
    for key in ("one", "two"):
        with runs.run(store, key, "train", {}, None) as run_id:
            pass
        made.append(versions.register(store, run_id, folder, key, {}))
    promote.promote(store, made[0], None)
    promote.promote(store, made[1], made[0].version)
    assert str(made[1]) == str(loop.second)
    answers = {answer.name: answer for answer in reports.model(job, 2, reread=False).answers}
    assert "points" not in answers["replaced"].text and not answers["replaced"].facts["decision"]
    assert f"Whether the comparison {loop.decision}" in answers["replaced"].why
    assert not answers["quality"].facts["compared"]


def test_a_deleted_run_is_said(loop: Loop) -> None:
    client = loop.store.client
    run_id = client.get_model_version(NAME, str(loop.second.version)).run_id
    client.delete_run(run_id)
    try:
        answer = loop.answers(2, reread=False)["code"]
    finally:
        client.restore_run(run_id)
    assert any("deleted" in source for source in answer.sources)


def test_an_older_package_says_what_was_not_recorded(loop: Loop) -> None:
    registered_again(loop, "of <old>", lambda info: info.pop(origin.MADE))
    answers = of_model(loop, "of <old>")
    assert answers["rows"].text and "Not recorded" in answers["rows"].why
    assert answers["packages"].status == answers["why"].status == "unknown"
    assert "Not recorded" in answers["packages"].why
    # The log of its table still says it.
    assert answers["cleaning"].text == "Not cleaned"
    assert not any(answer.status == "contradicted" for answer in answers.values())


@pytest.mark.parametrize(
    "made", [None, [], "text", {"format": 1}, {"format": 2}, {"format": 1, "rows": {"train": 3}}]
)
def test_a_package_may_say_anything(loop: Loop, made: Any) -> None:
    name = f"odd {key_of(made)}"
    registered_again(loop, name, lambda info: info.update({origin.MADE: made}))
    answers = of_model(loop, name)
    assert len(answers) == 8 and answers["packages"].status == "unknown"


def test_a_lie_that_was_sealed_is_found_where_it_can_be(loop: Loop) -> None:
    def lie(info: dict[str, Any]) -> None:
        info[origin.MADE]["rows"]["train"]["rows"] = 10_000
        info[origin.MADE]["judged"]["metrics"]["accuracy"] = 0.123
        info[origin.MADE]["cleaning"]["state"] = "cleaned"

    registered_again(loop, "lies", lie)
    answers = of_model(loop, "lies")
    for name in ("rows", "quality", "cleaning"):
        assert answers[name].status == "contradicted", name


def test_a_version_without_a_seal_is_not_believed(loop: Loop) -> None:
    store = registered_again(loop, "unsealed", lambda info: None)
    store.client.delete_model_version_tag("unsealed", "1", versions.SEAL)
    answers = of_model(loop, "unsealed")
    assert answers["rows"].status == "unknown" and "no seal" in answers["rows"].why


def test_the_timeline_of_the_loop(loop: Loop, cli: Cli) -> None:
    code, out, err = cli("report", "timeline", str(loop.root / "c.yaml"), "--json")
    assert code == 0, err
    said = json.loads(out.splitlines()[-1])
    kinds = [event["kind"] for event in said["events"]]
    assert kinds.count("move") == 2 and kinds.index("decision") < len(kinds) - 1
    assert kinds[-1] == "move" and said["in_use"] == 2 and not said["altered"]
    page = Path(said["report"]).read_text()
    assert "<i>s" not in page and "Drift: night" in page


def test_checks_of_another_registry_are_left_out_of_the_timeline(
    loop: Loop, put_back: Callable[[str], Path]
) -> None:
    put_back("run/drift")
    for seal, name in ((loop.first.seal, "mine"), ("of another package", "theirs")):
        row = {"key": name, "name": name, "model": str(loop.first), "table": "n@v2", "seal": seal}
        row |= {"is_drift": True, "p_value": 0.002, "checked_at": "2026-01-03T03:00"}
        added = pa.Table.from_pylist([row], evidence_row.ROW)
        place = str(loop.job.run.path / "drift")
        rows_once(place, evidence_row.ROW, {"key": name}, lambda rows=added: rows, "drift check")
        said = Decision(False, "waiting for labels")
        calls.keep(loop.job.run, loop.job.watch, name, NAME, str(loop.first), said)
    told = reports.tell(loop.job)
    shutil.rmtree(loop.job.run.path / "calls")
    seen = [(row.kind, row.facts["name"]) for row in told.rows if row.kind == "check"]
    assert seen == [("check", "night"), ("check", "mine")]
    assert [row.after for row in told.rows if row.kind == "call"] == [("mine",)]
    assert told.others.startswith("1 check of") and told.others in told.page.read_text()
    assert told.summary()["left_out"] == told.facts()["left out"] == told.others


def test_forced_retrains_of_another_registry_are_left_out_of_the_timeline(loop: Loop) -> None:
    """No check called for them, so no check told whose they are."""
    said = Decision(True, "watch.force=true: a retrain in any case")
    # The table of an older raypipe has no column of seals.
    columns = [name for name in calls.ROW.names if name != "seal"]
    row = dict.fromkeys(columns, "older") | {"model": NAME, "champion": str(loop.first)}
    row |= {"number": 1, "act": True, "format": 1, "decided_at": "2026-01-02T03:00"}
    older = pa.Table.from_pylist([row], calls.ROW).select(columns)
    place = loop.job.watch.place(loop.job.run, "calls")
    rows_once(place, calls.ROW, {"key": "older"}, lambda: older, "retrain")
    for seal, about in ((loop.first.seal, "mine"), ("of another package", "theirs")):
        champion = str(loop.first)
        calls.keep(loop.job.run, loop.job.watch, about, NAME, champion, said, seal=seal)
    told = reports.tell(loop.job)
    shutil.rmtree(place)
    assert [row.after for row in told.rows if row.kind == "call"] == [("older",), ("mine",)]
    assert told.others == "1 decision of packages that this registry does not have"


def test_comparisons_of_another_registry_are_left_out_of_the_timeline(
    loop: Loop, put_back: Callable[[str], Path]
) -> None:
    place = str(put_back("run/decisions"))
    parts = (loop.first, loop.second, "t@v0")
    sealed = {"mine": (loop.first.seal, loop.second.seal), "theirs": (loop.first.seal, "other")}
    # A row of an older raypipe has no seals: nothing in this registry names the comparison.
    for key, seals in {**sealed, "older": (None, None)}.items():
        row = decisions.as_row(key, parts, (), None, Decision(True, "better"), seals=seals)
        rows_once(place, decisions.ROW, {"key": key}, lambda row=row: row, "gate")
    told = reports.tell(loop.job)
    seen = [row.key for row in told.rows if row.kind == "decision"]
    assert seen == [loop.decision, "mine"] and told.facts()["comparisons"] == 2
    assert told.others == "2 comparisons of packages that this registry does not have"
    assert "2 comparisons, 2 for the challenger" in told.page.read_text()


def test_a_model_that_nobody_checked_has_a_timeline(loop: Loop) -> None:
    registered_again(loop, "quiet", lambda info: None)
    registry = loop.job.registry.model_copy(update={"model": "quiet"})
    told = reports.tell(loop.job.model_copy(update={"registry": registry}))
    assert [row.kind for row in told.rows] == ["move"]
    assert "No checks yet" in told.page.read_text()


def test_what_is_behind_the_weights_is_counted_by_what_it_is(loop: Loop) -> None:
    """A row of a prepared table has two identities, and was said to be two rows."""
    rows_NK = np.arange(1, 25, dtype=np.uint64).reshape(6, 4)
    replay = {"new": 3, "replayed": 2, "old": 6}
    begun = origin.Start("those of photos/1", loop.first, learned.united(rows_NK), replay)
    found = reports.model(loop.job, 2, reread=False).found
    made = {**found.made, "start": begun.facts(loop.job.training)}
    info = {**found.info, "made": made}
    said = questions.why(replace(found, info=info)).text
    named = "12 row identities behind them, two for a row of a prepared table"
    assert f"and its weights ({named}); trained on 3 new rows and 2 of 6 old ones" in said


def test_an_alias_without_a_move_is_not_called_never_named(loop: Loop) -> None:
    """Somebody had set it in MLflow before there was a table of moves."""
    first = reports.model(loop.job, 1, reread=False).found
    said = questions.replaced(replace(first, moves=(), in_use=1))
    assert "no move to it is recorded" in said.text and said.status != "proven"
    assert questions.replaced(replace(first, moves=(), in_use=2)).text.startswith("None: ")
    at = datetime(2026, 1, 1, tzinfo=timezone.utc)
    ends = [(None, 2), (2, None), (None, 1)]
    moves = [Move(n, *pair, at, "me", "by hand") for n, pair in enumerate(ends, 1)]
    said = questions.replaced(replace(first, moves=tuple(moves), in_use=1))
    assert "named no version then. The last one before was photos/2" in said.text
