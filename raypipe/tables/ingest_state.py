"""What an ingest knows while it runs, and its decision for each verified image.

`State` is what the table holds: the ids, the near-duplicate groups and the splits. `decide` gives
each image of a batch its group and its split, or counts why it is not added. It decides in the
source's order, so equal sources give equal tables.

A batch is decided on the state of one version. If another writer commits first, `ingest` reads the
state again (`read_state`) and decides the batch again. So `decide` changes neither `strata` nor the
counters of the state it was given: they change when the commit has landed. Only the near-duplicate
groups keep what a lost attempt added; `read_state` makes new ones.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

import pyarrow as pa
from deltalake import DeltaTable

from raypipe.errors import DataError
from raypipe.tables import near_duplicates, prepared, scan, split, verdicts
from raypipe.tables.commits import require_appendable
from raypipe.tables.fragment import Options
from raypipe.tables.ingest_config import IngestConfig
from raypipe.tables.near_duplicates import Groups
from raypipe.tables.schema import SCHEMA
from raypipe.tables.table import ImageTable, TableConfig, TableVersion


@dataclass
class Counts:
    """What happened to the images of a batch, or of all batches so far."""

    present: int = 0
    # Of `present`: dropped by an earlier cleaning, or in another split than the source gives.
    dropped: int = 0
    other_split: int = 0
    duplicates: int = 0
    unlabelled: int = 0
    # Of the added images: an earlier cleaning by other rules dropped them.
    returned: int = 0
    # Of the added images: their files have further pages or frames.
    more: int = 0
    # Of the added images: they look like images of a group in another split, too.
    between: int = 0
    # Of the added images: they have 16 bits, and use 12 of them.
    dark: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    splits: Counter[str] = field(default_factory=Counter)
    # Images of `splits` whose split was drawn, because the source did not give it.
    drawn: split.Placed = field(default_factory=Counter)

    def add(self, other: Counts) -> None:
        """Add the other counts to these."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


@dataclass
class State:
    """What the table holds at version `base`, and what this run has added to it."""

    # The version that everything below was read from, or that this run wrote. None: there is no
    # table yet.
    base: DeltaTable | None
    # Ids that are not added again, and their split: those in the table, and those that cleaning
    # dropped (None).
    known: dict[str, str | None]
    # Ids that cleaning dropped, by whatever rules.
    ever_dropped: set[str]
    groups: Groups
    # Images by label and split: for stratified splits, and for the search of gaps.
    strata: split.Strata | None
    placed: split.Placed
    # Of this run: ids that it added, ids that it found there, and images whose split it drew.
    mine: set[str] = field(default_factory=set)
    met: set[str] = field(default_factory=set)
    drawn: split.Placed = field(default_factory=Counter)
    # The split of each near-duplicate group, which its later images join. A draw alone would tell
    # another one where the source gave the split, or where shares or seed were others.
    split_of: dict[str, str] = field(default_factory=dict)
    # Images that ingest has stored smaller, or in another format: the sha256 of the stored bytes,
    # which an export writes -> the image's id.
    stored_as: dict[str, str] = field(default_factory=dict)

    def renew(self, now: State) -> None:
        """Continue on the newer state `now`, after another writer has committed."""
        self.base = now.base
        self.groups = now.groups
        self.strata = now.strata
        self.placed = now.placed
        self.split_of = now.split_of
        # Images that were verified as known have no bytes: their ids stay.
        self.stored_as = self.stored_as | now.stored_as
        # What this run added is a duplicate, not present.
        for image_id, in_split in now.known.items():
            if image_id not in self.mine:
                self.known[image_id] = in_split
        self.ever_dropped |= now.ever_dropped

    def landed(self, decision: Decision, base: DeltaTable | None) -> None:
        """Take over a decision whose rows are now in the table, at version `base`."""
        self.base = base
        self.strata = decision.strata
        ids = decision.rows["image_id"].to_pylist()
        self.mine |= set(ids)
        self.met |= decision.met
        self.placed += placed_in(decision.rows)
        self.drawn += decision.counts.drawn
        self.split_of |= decision.split_of


@dataclass(frozen=True)
class Decision:
    """The new rows of one batch, the counts of all its images, the strata that include the new
    rows, the splits of groups that had none, and the ids that the table has already.
    """

    rows: pa.Table
    counts: Counts
    strata: split.Strata | None
    split_of: dict[str, str]
    met: set[str]


def read_state(
    uri: str, cfg: IngestConfig, options: Options, policies: set[str] | None, images: int
) -> State:
    """What the table holds now. `images` is the number of candidates, `policies` as in `ingest`.

    Raises DataError for a table that ingest did not make, and for one that `table prepare` made.
    """
    strata = split.Strata() if cfg.stratify else None
    placed: split.Placed = Counter()
    if not ImageTable.exists(uri, options):
        return State(None, {}, set(), _groups(cfg, images), strata, placed)

    opened = ImageTable.open(TableConfig(uri=uri, storage_options=options))
    base = opened.delta()
    if prepared.is_prepared(base):
        raise DataError(
            "This table was made by raypipe table prepare",
            got=uri,
            rule="Its rows are those of its source, which it names",
            fix="Ingest into the source, then run raypipe table prepare again: it adds the new "
            "rows",
        )
    # Older tables lack sha256; the next commit adds it.
    opened.require(base, *(name for name in SCHEMA.names if name != "sha256"))
    # Before the first image is read: the commit would fail after an hour of work.
    require_appendable(uri, base, SCHEMA)
    columns = ["image_id", "look", "family", "label", "split"]
    if "sha256" in base.schema().to_arrow().names:
        columns.append("sha256")
    version = TableVersion(uri, base.version())
    rows = scan.rows(opened, version, columns).to_pylist()
    groups = _groups(cfg, max(images, len(rows)))
    known: dict[str, str | None] = {}
    split_of: dict[str, str] = {}
    stored_as: dict[str, str] = {}
    for row in rows:
        image_id, group = row["image_id"], row["family"]
        label, in_split = row["label"], row["split"]
        placed[label, in_split] += 1
        # A row of another engine may lack what only ingest writes.
        if image_id is None:
            continue
        known[image_id] = in_split
        if row.get("sha256") not in (None, image_id):
            stored_as[row["sha256"]] = image_id
        group = group or image_id
        if row["look"]:
            groups.join(image_id, bytes.fromhex(row["look"]), group)
        # Another engine may write a row without a split: it says nothing of its group.
        if in_split is None:
            continue
        split_of.setdefault(group, in_split)
        if strata:
            strata.add(group, label, in_split)

    # What cleaning dropped must not come back with the next ingest.
    own = str(base.metadata().id)
    ever_dropped = verdicts.dropped_ids(uri, own, None, options)
    for image_id in verdicts.dropped_ids(uri, own, policies, options):
        known.setdefault(image_id, None)
    # Whoever gives the small image itself means that one.
    stored_as = {stored: one for stored, one in stored_as.items() if stored not in known}
    return State(
        base,
        known,
        ever_dropped,
        groups,
        strata,
        placed,
        split_of=split_of,
        stored_as=stored_as,
    )


def with_ids(chunk: pa.Table, state: State) -> pa.Table:
    """A verified chunk with the table's ids for images that it stores under other bytes."""
    if not state.stored_as:
        return chunk
    ids = [state.stored_as.get(one, one) for one in chunk["image_id"].to_pylist()]
    at = chunk.schema.get_field_index("image_id")
    return chunk.set_column(at, chunk.schema.field(at), pa.array(ids, pa.string()))


def decide(batch: list[pa.Table], cfg: IngestConfig, state: State) -> Decision:
    """Rows for the new images of a verified batch, with group and split, and the counts of all its
    images.
    """
    counts = Counts()
    strata = state.strata.copy() if state.strata else None
    split_of: dict[str, str] = {}  # of groups that begin with this batch
    fresh: set[str] = set()  # ids that this batch adds
    met: set[str] = set()  # and those that the table has
    accepted = []
    for chunk in batch:
        # The accepted rows of this chunk, and the columns that are decided here.
        kept, columns = [], []
        small = chunk.select(["image_id", "reason", "look", "given", "label", "more", "dark"])
        for i, row in enumerate(small.to_pylist()):
            image_id = row["image_id"]
            if row["reason"]:
                counts.reasons[row["reason"]] += 1
            elif any(image_id in ids for ids in (state.mine, fresh, state.met, met)):
                # An image under a second name, whether it is new or was there.
                counts.duplicates += 1
            elif image_id in state.known:
                met.add(image_id)
                in_split = state.known[image_id]
                counts.present += 1
                counts.dropped += in_split is None and image_id in state.ever_dropped
                counts.other_split += in_split is not None and row["given"] not in (None, in_split)
            else:
                # A new image: it joins a group, and gets the split that the source gives or a drawn
                # one.
                label, given = row["label"], row["given"]
                fresh.add(image_id)
                look = bytes.fromhex(row["look"])
                group = state.groups.join(image_id, look)
                known_split = state.split_of.get(group) or split_of.get(group)
                chosen = given or known_split or _draw(group, label, cfg, strata)
                if known_split is None:
                    split_of[group] = chosen
                # A split that the source gives is its own choice.
                others = [] if given else state.groups.between.get(look, [])
                splits = {state.split_of.get(one) or split_of.get(one) for one in others}
                counts.between += bool(splits - {None, chosen})
                if strata:
                    strata.add(group, label, chosen)

                counts.unlabelled += label is None
                counts.more += bool(row["more"])
                counts.dark += bool(row["dark"])
                counts.returned += image_id in state.ever_dropped
                counts.splits[chosen] += 1
                if not given:
                    counts.drawn[label, chosen] += 1
                kept.append(i)
                columns.append({"split": chosen, "source": cfg.name, "family": group})
        accepted.append(_complete(chunk, kept, columns))
    return Decision(pa.concat_tables(accepted), counts, strata, split_of, met)


def placed_in(rows: pa.Table) -> split.Placed:
    """How many of these rows there are by label and split."""
    labels = rows["label"].to_pylist()
    splits = rows["split"].to_pylist()
    return Counter(zip(labels, splits, strict=True))


def _groups(cfg: IngestConfig, images: int) -> Groups:
    most = near_duplicates.most_in_group(images, cfg.splits)
    return Groups(cfg.near_bits, most)


def _draw(group: str, label: str | None, cfg: IngestConfig, strata: split.Strata | None) -> str:
    """The split of a group; every seed but 0 is a salt."""
    salt = str(cfg.seed) if cfg.seed else ""
    # Strata hold the shares within each label; without them a draw depends on the group alone.
    if strata:
        return strata.draw(group, label, cfg.splits, salt)
    return split.draw(group, cfg.splits, salt)


def _complete(chunk: pa.Table, kept: list[int], columns: list[dict[str, str]]) -> pa.Table:
    """The rows `kept` of a verified chunk in the table's schema; `columns` has the decided values
    of each.
    """
    rows = chunk
    if len(kept) < len(chunk):
        rows = chunk.take(pa.array(kept, pa.int64()))
    names = ("split", "source", "family")
    schema = pa.schema([SCHEMA.field(name) for name in names])
    decided = pa.Table.from_pylist(columns, schema)
    arrays = []
    for name in SCHEMA.names:
        table = decided if name in names else rows
        arrays.append(table[name])
    return pa.table(arrays, schema=SCHEMA)
