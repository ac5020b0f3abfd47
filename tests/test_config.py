"""Defaults < YAML < overrides; unknown or invalid settings fail; a saved config loads again."""

from __future__ import annotations

import math
import threading
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from raypipe import config
from raypipe.config import RunConfig, Section
from raypipe.errors import ConfigError
from raypipe.job import Job
from raypipe.serve.online.settings import ServeConfig
from raypipe.train.settings import TrainConfig
from raypipe.watch.settings import WatchConfig
from raypipe.yaml_scalars import quoted


class Inner(Section):
    lr: float = Field(default=0.1, gt=0)
    mode: Literal["frozen", "finetune"] = "frozen"
    source: str = Field(default="folder", alias="from")


class Outer(Section):
    uri: str
    run: RunConfig = RunConfig()
    train: Inner = Inner()
    space: dict[str, str] = Field(default={})
    extra: Inner | None = None
    epochs: int | Literal["auto"] = "auto"
    where: dict[str, str | list[str]] = Field(default={})
    parts: tuple[Inner | int, ...] = ()


def written(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_an_override_wins_over_the_yaml_and_the_yaml_over_the_default(tmp_path: Path) -> None:
    path = written(tmp_path, "uri: here\ntrain: {lr: 0.2, mode: finetune}\n")
    cfg = config.load(Outer, path, ["train.lr=0.3"])
    assert (cfg.uri, cfg.train.lr, cfg.train.mode, cfg.train.source) == (
        "here",
        0.3,
        "finetune",
        "folder",
    )


def test_overrides_are_yaml_and_may_hold_equals_signs_lists_and_null(tmp_path: Path) -> None:
    cfg = config.load(
        Outer, None, ["uri=s3://b/x?a=b", "extra={lr: 1}", "space={train.lr: 'uniform(1, 2)'}"]
    )
    assert (cfg.uri, cfg.extra, cfg.space) == (
        "s3://b/x?a=b",
        Inner(lr=1),
        {"train.lr": "uniform(1, 2)"},
    )
    assert config.load(Outer, None, ["uri=x", "extra.lr=2", "extra="]).extra is None


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.lerning_rate=1", r"Unknown config key train\.lerning_rate \(got 1\)"),
        ("train.mod=frozen", r"Unknown config key train\.mod .*Did you mean 'train\.mode'\?"),
        ("tarin.lr=1", r"Unknown config key tarin .*Did you mean 'train'\?"),
        ("train.form=folder", r"Unknown config key train\.form .*Did you mean 'train\.from'\?"),
        ("train.lr=fast", r"Config key train\.lr is wrong \(got 'fast'\).*valid number"),
        ("train.lr=0", r"Config key train\.lr is wrong \(got 0\).*greater than 0"),
        (
            "train.mode=forzen",
            r"Config key train\.mode is wrong \(got 'forzen'\).*'frozen' or 'finetune'",
        ),
        # Not epochs.int, which is no key.
        ("epochs=x", r"Config key epochs is wrong \(got 'x'\)\. .*integer, .*; or: .*'auto'\.$"),
        ("where={a: {b: 1}}", r"Config key where\.a is wrong \(got \['b'\]\)"),
        ("parts=[1, {lr: x}]", r"Config key parts\.1\.lr is wrong \(1 more: .*parts\.1 is wrong"),
        ("train=3", r"Config key train is wrong \(got 3\)"),
        (
            "uri.path=x",
            r"uri\.path goes through uri, which is a value and not a section \(got 'here'\)",
        ),
        ("train.lr", r"not section\.key=value \(got 'train\.lr'\).*train\.lr=0\.001"),
        ("=3", r"not section\.key=value \(got '=3'\)"),
        (f"run.dir={'x' * 300}", r"run\.dir is wrong .*no folder can have this name: File name"),
        ("uri=$LAKE/cells", r"uri holds a variable \(got '\$LAKE/cells'\).*in the place of \$LAKE"),
        ("uri=${LAKE}", r"uri holds a variable \(got '\$\{LAKE\}'\).*nothing in the place of"),
        ("run.dir=${HOME}/a", r'run\.dir holds a variable .*command line.*run\.dir="\$\{HOME\}…"'),
        ("train.lr=[1", r"The value of train\.lr is not YAML \(got '\[1'\)"),
    ],
)
def test_a_wrong_override_names_key_value_and_way_out(
    override: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        config.load(Outer, written(tmp_path, "uri: here"), [override])


def test_a_section_that_is_null_begins_to_exist_with_its_first_setting(tmp_path: Path) -> None:
    """A saved configuration says `batch: null`, and `watch.batch.uri=…` was refused on it."""
    saved = written(tmp_path, config.dump(Outer(uri="x")))
    assert "extra: null" in saved.read_text()
    assert config.load(Outer, saved, ["extra.lr=2"]).extra == Inner(lr=2)
    assert config.replace(Outer(uri="x"), {"extra.lr": 2}).extra == Inner(lr=2)
    with pytest.raises(ConfigError, match=r"Unknown config key extra\.rl"):
        config.load(Outer, saved, ["extra.rl=2"])


def test_an_override_changes_one_of_two_places_with_an_alias(tmp_path: Path) -> None:
    """Both were one object, and changed together."""
    path = written(tmp_path, "uri: x\ntrain: &one {lr: 0.2, mode: finetune}\nextra: *one\n")
    cfg = config.load(Outer, path, ["extra.lr=0.3"])
    assert (cfg.train.lr, cfg.extra) == (0.2, Inner(lr=0.3, mode="finetune"))
    cfg = config.load(Outer, path, [], {"train": {"lr": 0.4}})
    assert (cfg.train.lr, cfg.extra) == (0.4, Inner(lr=0.2, mode="finetune"))


@pytest.mark.parametrize("value", ["cells #3", "#3", "[1, 2] # two"])
def test_a_value_that_yaml_would_cut_is_refused(value: str) -> None:
    """`uri=photos #2` was `photos`, another folder."""
    with pytest.raises(ConfigError, match=r"The value of uri holds a comment .*would ignore '#"):
        config.load(Outer, None, [f"uri={value}"])
    assert config.load(Outer, None, [f"uri='{value}'"]).uri == value
    assert config.load(Outer, None, ["uri=s3://b/x#sha256=1"]).uri == "s3://b/x#sha256=1"


@given(st.text())
def test_any_text_can_be_an_override(text: str) -> None:
    """JSON of a letter beyond 16 bits was other YAML: tables/😀 was a name that no file has."""
    assert config.load(Outer, None, [f"uri={quoted(text)}"]).uri == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", r"not a mapping of sections \(got 'list'\)"),
        ("just words", r"not a mapping of sections \(got 'str'\)"),
        ("uri: [\n", r"The config file is not YAML: .*job\.yaml"),
        ("uri: here\n\tlr: 1\n", r"The config file is not YAML"),
        ("", r"Config key uri is missing.*Add uri="),
        ("uri: here\ntrain.lr: 3\n", r"Unknown config key train\.lr .*write train: \{lr: …\}"),
        ("uri: here\nuri: there\n", r"'uri' stands in line 1 and again in line 2"),
        ("uri: x\ntrain: {lr: 1, lr: 2}\n", r"'lr' stands in line 2 and again in line 2"),
        ("uri: x\ntrain: {<<: {lr: 1}, lr: a}\n", r"train\.lr is wrong"),
        ("uri: x\ntrain: {<<: {lr: 1}, <<: {lr: 2}}\n", r"'<<' stands in line 2 and again"),
        (
            "uri: here\ntrain: {lr: fast, mode: x, form: 3}",
            r"train\.lr is wrong \(2 more: .*train\.mode.*train\.form",
        ),
    ],
)
def test_a_wrong_file_is_named_in_one_line(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        config.load(Outer, written(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"No such config file \(got .*nowhere\.yaml.*solar\.yaml"
    ):
        config.load(Outer, tmp_path / "nowhere.yaml")
    (tmp_path / "latin.yaml").write_bytes("uri: caf\xe9".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"The config file cannot be read.*latin\.yaml"):
        config.load(Outer, tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("kind", "name", "least"),
    [
        (ServeConfig, "timeout_s", 30.0),
        (ServeConfig, "follow_s", 1.0),
        (ServeConfig, "flush_s", 1.0),
        (ServeConfig, "batch_wait_ms", 0.0),
        (WatchConfig, "every_h", 0.01),
    ],
)
def test_a_time_that_no_clock_can_wait_for_is_refused(
    kind: type[config.Section], name: str, least: float
) -> None:
    """It ended in an OverflowError of a thread, or of a date."""
    for wrong in (1e14, 1e300):
        with pytest.raises(ConfigError, match=f"{name} is wrong .*less than or equal to"):
            config.validate(kind, {name: wrong})
    for right in (least, 1e6):
        assert getattr(config.validate(kind, {name: right}), name) == right


def test_a_worker_waits_for_others_at_most_as_long_as_clocks_can() -> None:
    """An older run may have kept such a number; its package is read all the same."""
    cfg = TrainConfig(timeout_s=1e300)
    # A lock looks at the number, even one that is free.
    assert threading.Lock().acquire(timeout=2 * cfg.waits_s) and cfg.waits_s == config.LONGEST_S
    assert timedelta(seconds=cfg.waits_s) < timedelta.max and math.ceil(cfg.waits_s) == 10**9
    assert TrainConfig(timeout_s=0.5).waits_s == 0.5


def test_a_section_cannot_be_changed_after_it_was_validated() -> None:
    with pytest.raises(ValueError, match=r"frozen"):
        Inner().lr = 3.0  # type: ignore[misc]


def test_replace_changes_a_copy_and_validates_it() -> None:
    cfg = Outer(uri="x")
    changed = config.replace(cfg, {"train.lr": 0.5, "uri": "y"})
    assert (changed.train.lr, changed.uri, cfg.train.lr, cfg.uri) == (0.5, "y", 0.1, "x")
    with pytest.raises(ConfigError, match=r"train\.lr is wrong \(got -1\)"):
        config.replace(cfg, {"train.lr": -1})


@given(
    st.floats(1e-6, 10),
    st.text(st.characters(codec="utf-8", exclude_categories=["C"])),
    st.none() | st.just(Inner(lr=3)),
)
def test_a_dumped_config_loads_to_an_equal_one(lr: float, uri: str, extra: Inner | None) -> None:
    cfg = Outer(uri=uri, train=Inner(lr=lr, mode="finetune"), extra=extra)
    again = config.validate(Outer, config.yaml.safe_load(config.dump(cfg)))
    assert again == cfg
    assert config.key_of(again) == config.key_of(cfg)


def test_the_whole_job_survives_saving_and_leaves_no_partial_file(tmp_path: Path) -> None:
    job = config.load(
        Job, Path("jobs/configs/solar.yaml"), ["train.lr=0.01", "watch.batch.uri=tables/night"]
    )
    saved = config.save(job, tmp_path / "run" / "config.yaml")
    assert config.load(Job, saved) == job
    assert [p.name for p in saved.parent.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    "file", sorted(Path("jobs/configs").glob("*.yaml")), ids=lambda file: file.name
)
def test_every_verb_can_start_with_every_config_that_ships(file: Path) -> None:
    job = config.load(Job, file)
    assert job.cluster.address != "none", (
        "ingest and most others need a cluster; a training without is an override"
    )


def test_a_key_changes_with_every_setting_and_with_nothing_else() -> None:
    job = config.load(Job, None, ["table.uri=x"])
    assert config.key_of(job) == config.key_of(config.load(Job, None, ["table.uri=x"]))
    keys = {
        config.key_of(config.replace(job, c))
        for c in ({}, {"train.lr": 0.5}, {"run.seed": 8}, {"table.uri": "y"})
    }
    assert len(keys) == 4
    assert all(len(key) == 12 for key in keys)


def test_every_name_the_config_offers_can_be_written_in_a_file() -> None:
    # Sections that may be null.
    optional = [
        "watch.batch.uri=y",
        "watch.horizon.checks=9",
        "predict.table.uri=z",
        "evaluate.table.uri=w",
    ]
    given = ["table.uri=x", "serve.challenger.share=0.1", *optional]
    job = config.load(Job, None, given).model_dump()
    for name in config.field_names(Job):
        node = job
        for part in name.split("."):
            assert part in node, f"{name} is offered as a suggestion but is no key"
            node = node[part]


@pytest.mark.parametrize(
    ("text", "field", "means"),
    [
        ("table.version=2026-11-01T12:00:00Z", "version", "2026-11-01T12:00:00Z"),
        ("table.version=2026-11-01", "version", "2026-11-01"),
        ("table.version=2026-11-01 12:00:00", "version", "2026-11-01 12:00:00"),
        ("table.version=12", "version", 12),
        ("table.version=010", "version", 10),
        ("table.version=1.50", "version", "1.50"),
        ("table.version='12'", "version", "12"),
        ("table.version=yes", "version", "yes"),
        ("table.version=null", "version", None),
        ("table.where={site: 1}", "where", {"site": "1"}),
        ("table.where={site: 01, 2: 1e3}", "where", {"site": "01", "2": "1e3"}),
        ("table.where={flag: yes}", "where", {"flag": "yes"}),
        ("table.where={at: 12:30, day: 2026-11-01}", "where", {"at": "12:30", "day": "2026-11-01"}),
        ("table.where={site: [1, 02, no, x]}", "where", {"site": ["1", "02", "no", "x"]}),
    ],
)
def test_text_is_what_was_written_and_not_what_yaml_makes_of_it(
    text: str, field: str, means: object, tmp_path: Path
) -> None:
    key, _, value = text.partition("=")
    file = written(tmp_path, f"table: {{uri: t, {key.removeprefix('table.')}: {value}}}")
    for job in (config.load(Job, file), config.load(Job, None, ["table.uri=t", text])):
        assert getattr(job.table, field) == means
        again = config.load(Job, config.save(job, tmp_path / "again.yaml"))
        assert again == job


def test_names_may_look_like_numbers_dates_and_truths(tmp_path: Path) -> None:
    text = """
run: {name: 12, dir: 2026-11-01, seed: 007}
table: {uri: 2026, columns: {label: on, image: 1, id: 2026-11-01, split: no}}
ingest: {name: 2026-11-01, splits: {train: 1, 2026: 1}, workers: 3, stratify: yes}
train: {class_weights: {0: 1, 1.0: 2, no: 3}, workers: [1, 2]}
watch: {name: 1e5, batch: {uri: 3}}
cluster: {dashboard: off}
"""
    job = config.load(Job, written(tmp_path, text))
    assert (job.run.name, job.run.dir, job.run.seed) == ("12", "2026-11-01", 7)
    c = job.table.columns
    assert (c.label, c.image, c.id, c.split) == ("on", "1", "2026-11-01", "no")
    assert (job.ingest.name, job.ingest.workers, job.ingest.stratify) == ("2026-11-01", 3, True)
    assert job.ingest.splits == {"train": 1, "2026": 1}
    assert job.train.class_weights == {"0": 1.0, "1.0": 2.0, "no": 3.0}
    assert (job.train.fewest_workers, job.train.most_workers) == (1, 2)
    assert (job.watch.name, job.watch.batch.uri, job.cluster.dashboard) == ("1e5", "3", False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run: {seed: yes}", "run.seed is wrong .got 'yes'"),
        ("train: {epochs: on}", "train.epochs is wrong .got 'on'"),
        ("run: {seed: !!int x}", "is not YAML: 'x' is no int"),
        ("run: {seed: !!bool perhaps}", "'perhaps' is no bool"),
        ("run: {seed: 12:30}", "run.seed is wrong .got '12:30'"),
        ("x: &a [*a]", "holds itself"),
        ("train: {lr: .inf}", "train.lr is wrong .got inf"),
        ("train: {weight_decay: .nan}", "train.weight_decay is wrong .got nan"),
    ],
)
def test_what_no_number_is_is_refused(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        config.load(Job, written(tmp_path, text), ["table.uri=t"])


def test_a_run_folder_beyond_a_link_is_one_place_for_everybody(tmp_path: Path) -> None:
    """MLflow's store takes `link/..` for nothing, the system goes where the link leads."""
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away")
    run = RunConfig(dir=str(tmp_path / "link" / ".." / "run"))
    assert run.path == tmp_path / "far" / "run"


@pytest.mark.parametrize(("images", "is_refused"), [(0, False), (1, True), (39, True), (40, False)])
def test_too_few_images_for_an_estimate_are_refused(images: int, is_refused: bool) -> None:
    """With 39 of them there was no estimate, and only a drift check said so."""
    tree = {"table": {"uri": "t"}, "registry": {"severity_images": images}}
    if not is_refused:
        assert config.validate(Job, tree).registry.severity_images == images
        return
    with pytest.raises(ConfigError, match=rf"severity_images={images} is too few.*needs 40.*Set 0"):
        config.validate(Job, tree)


def test_a_folder_is_no_config_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"This is a folder, and no config file.*--table"):
        config.load(Outer, tmp_path)
