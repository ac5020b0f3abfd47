"""The order of samples: which samples each batch of an epoch holds, and which rank reads them.

It is a pure function of (seed, epoch, row group sizes) and the same at every world size. Five
steps make it:

1. Shuffle the row groups and lay their samples end to end: the line.
2. Cut the line into `shards` equal parts. If there are fewer row groups than shards, the parts
   change places at random in each epoch.
3. Cut each shard into windows of `window` whole row groups. Shuffle the samples inside each
   window.
4. Take one sample from each shard in turn: the stream. A place in it is a position, 0..N-1.
5. Global batch t is stream[t*B : (t+1)*B]. Rank r of `world` reads the positions p with p % world
   == r.

Example: 4 row groups of 3 samples, shards=2, window=2, B=4, seed 2, epoch 0.

    row groups         0: 0 1 2   1: 3 4 5   2: 6 7 8   3: 9 10 11
    1 line             9 10 11  6 7 8  0 1 2  3 4 5       (row groups 3, 2, 0, 1)
    2 shards           9 10 11  6 7 8 | 0 1 2  3 4 5
    3 windows          10 8 11 7 6 9  | 1 0 2, 4 5 3      (shard 0: one window; shard 1: two)
    4 stream           10 1 8 0 11 2 7 4 6 5 9 3          (shard 0, shard 1, shard 0, …)
    5 batch 0          10 1 8 0;  of 2 ranks, rank 0 reads 10 8 and rank 1 reads 1 0

Batch t takes the same shards in every epoch, unless `shards` divides the batch. With many row
groups step 1 puts others there. With one row group these would be the same rows, so the parts
change places.

Windows of neighbouring shards start at different row groups (`phase`). In the example, the first
window of shard 1 has one row group only. So the ranks load row groups one by one, and not all of
them at the same step.

What follows from it:
- Where the world size divides `shards`, a rank reads the row groups of its own shards only, at
  any batch size.
- Where it does not divide the batch, the ranks' parts differ by one image: `Share` says how to
  weigh them.
- A resume needs two integers: (epoch, step).
- At most shards * window row groups are needed at a time, however large the table is.
- Weighted sampling may draw a sample several times. So augmentation is keyed by position, which
  occurs once an epoch.

Everything is computed on demand. An epoch costs one permutation of the row groups, a batch only
its own windows. Source: the shuffles of MosaicML Streaming (py1b, py1e), which tie the order to a
canonical node count.

Legend: N samples, F row groups, B batch. Sample numbers run through the row groups in table
order, 0..N-1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from raypipe.feed.sampling import resample
from raypipe.feed.share import Share, deal

# Format of the order and of what is keyed by it. It is part of a training's key.
# Format 1 keyed augmentation by sample, and filled up the ranks' parts of a batch. Format 2 gave
# each shard of a small table the same rows in every epoch.
FORMAT = 3

# Samples planned together: for batches of 64 it takes a fifth of the time, and the first batch
# still does not wait.
SAMPLES_AT_ONCE = 1024


@dataclass(frozen=True)
class Order:
    """How the samples of a table become batches. sizes_F: samples in each row group (int64);
    batch_size is global.

    weights_N are relative chances (optional). With them, each epoch draws N samples: sample n comes
    int(N * share of its weight) times or once more. Without, every sample comes exactly once.
    """

    sizes_F: np.ndarray
    batch_size: int
    seed: int
    shards: int = 12
    window: int = 2
    drop_last: bool = True
    weights_N: np.ndarray | None = None

    @property
    def samples(self) -> int:
        return int(self.sizes_F.sum())

    @property
    def steps(self) -> int:
        """Batches of an epoch, at least one.

        drop_last drops the last incomplete batch; else it is filled up from the epoch's start.
        """
        whole, rest = divmod(self.samples, self.batch_size)
        keep_rest = whole == 0 or not self.drop_last
        if rest and keep_rest:
            return whole + 1
        return whole

    def epoch(self, epoch: int) -> Epoch:
        """The stream of one epoch."""
        if self.weights_N is None:
            return Epoch(self, self.sizes_F, epoch)

        # Weighted: plan an epoch of a table that holds sample n copies_N[n] times.
        copies_N = resample(self.weights_N, np.random.default_rng([self.seed, epoch, 1]))
        numbers = np.arange(len(copies_N), dtype=copies_N.dtype)
        drawn = np.repeat(numbers, copies_N)

        # The sizes of its row groups: the copies between each group's first and last sample.
        sizes_F = np.zeros(len(self.sizes_F), np.int64)
        has_samples = self.sizes_F > 0
        starts = (np.cumsum(self.sizes_F) - self.sizes_F)[has_samples]
        sizes_F[has_samples] = np.add.reduceat(copies_N, starts, dtype=np.int64)
        return Epoch(self, sizes_F, epoch, drawn)

    def rank(self, epoch: int, step: int, rank: int, world: int) -> Iterator[Step]:
        """This rank's part of every global batch of the epoch, from `step` on."""
        stream = self.epoch(epoch)
        at_once = max(1, SAMPLES_AT_ONCE // self.batch_size)
        for first in range(step, self.steps, at_once):
            steps = range(first, min(first + at_once, self.steps))
            yield from self._plan(stream, steps, rank, world)

    def _plan(self, stream: Epoch, steps: range, rank: int, world: int) -> Iterator[Step]:
        """This rank's part of some batches, looked up in the stream together."""
        parts: list[tuple[np.ndarray, Share]] = []
        for t in steps:
            batch = np.arange(t * self.batch_size, self._end(t))
            parts.append(deal(batch, self.samples, rank, world))

        # Positions behind the end fill up the last batch: they wrap to the epoch's start.
        positions = np.concatenate([mine_B for mine_B, _ in parts])
        samples, until = stream.samples_at(positions % self.samples)
        # These are wanted at the end, whatever was done with them at the start.
        until = np.where(positions < self.samples, until, self.samples)

        # Cut the result into steps again.
        cuts = np.cumsum([len(mine_B) for mine_B, _ in parts])[:-1]
        by_step = zip(
            steps,
            parts,
            np.split(samples, cuts),
            np.split(until, cuts),
            strict=True,
        )
        before = stream.epoch * self.samples
        for t, (mine_B, share), samples_B, until_B in by_step:
            done = min(self._end(t), self.samples)
            yield Step(
                samples_B,
                until_B=before + until_B,
                done=before + done,
                positions_B=mine_B,
                share=share,
            )

    def _end(self, step: int) -> int:
        """The position behind a batch; beyond the last sample where the batch is filled up."""
        end = (step + 1) * self.batch_size
        if self.drop_last:
            return min(end, self.samples)
        return end


@dataclass(frozen=True)
class Step:
    """One rank's samples of one global batch.

    until_B and done count positions over all epochs. A sample's window is used up once `done`
    reaches its `until`: then its row group is needed no more. done: the position behind this
    batch. positions_B: each sample's position in the epoch's stream.
    """

    samples_B: np.ndarray
    until_B: np.ndarray
    done: int
    positions_B: np.ndarray
    share: Share


class Epoch:
    """The stream of one epoch: steps 1 to 4 above.

    drawn: with weighted sampling, the sample that stands behind each drawn number.
    """

    def __init__(
        self, order: Order, sizes_F: np.ndarray, epoch: int, drawn: np.ndarray | None = None
    ) -> None:
        self.epoch = epoch
        self._key = (order.seed, epoch)
        self._drawn = drawn
        self._shards = order.shards
        self._window = order.window

        # 1. The line: shuffled row groups, where each starts on the line, and its first sample.
        self._groups_F = np.random.default_rng(self._key).permutation(len(sizes_F))
        line_ends = np.cumsum(sizes_F[self._groups_F])
        self._group_starts = np.concatenate(([0], line_ends))
        first_sample_F = np.cumsum(sizes_F) - sizes_F
        self._first_sample_F = first_sample_F[self._groups_F]
        self.samples = int(self._group_starts[-1])

        # 2. The shards: the first `rest` of them hold one sample more than the others.
        share, rest = divmod(self.samples, self._shards)
        shards = np.arange(self._shards)
        sizes = share + (shards < rest)
        # In which order they lie on the line.
        laid = shards
        if len(sizes_F) < self._shards:
            laid = np.random.default_rng([*self._key, 3]).permutation(shards)
        self._shard_ends = np.empty_like(sizes)
        self._shard_ends[laid] = np.cumsum(sizes[laid])
        self._shard_starts = self._shard_ends - sizes
        self._shard_groups = self._group_at(self._shard_starts)

        # 3. The windows are shuffled when they are needed.
        self._shuffled: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()

    def samples_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The samples at some positions of the stream: (sample numbers, until), int64, one each
        per position.

        `until` is the position behind the last one of the sample's window.
        """
        # Step 4 backwards: the stream takes the shards in turn.
        shard = positions % self._shards
        place_in_shard = positions // self._shards
        shard_start = self._shard_starts[shard]
        line = shard_start + place_in_shard
        window, low, high = self._window_at(shard, line)

        # Step 3: a place in a window holds the sample that the window's shuffle puts there.
        shuffled_line = np.empty_like(line)
        # `keys` numbers the windows of all shards, so that each is shuffled once. A window's number
        # is at most its row group's plus `phase`, and so below `most`.
        most = len(self._first_sample_F) + self._window
        keys = shard * most + window
        for key in np.unique(keys):
            here = np.flatnonzero(keys == key)
            one = here[0]
            start = low[one]
            size = int(high[one] - start)
            shuffle = self._shuffle(int(shard[one]), int(window[one]), size)
            place_in_window = line[here] - start
            shuffled_line[here] = start + shuffle[place_in_window]

        # Step 1 backwards: from the line to sample numbers.
        group = self._group_at(shuffled_line)
        place_in_group = shuffled_line - self._group_starts[group]
        samples = self._first_sample_F[group] + place_in_group
        if self._drawn is not None:
            samples = self._drawn[samples].astype(np.int64)

        # The window's last place in its shard, as a position of the stream.
        last_in_window = high - shard_start - 1
        until = last_in_window * self._shards + shard + 1
        return samples, until

    def groups(self) -> list[int]:
        """Row groups roughly in the order of need: the first of every shard, the second of every
        shard, …
        """
        # A shard's row groups end where those of the next shard on the line begin.
        firsts = np.sort(self._shard_groups)
        firsts[:1] = 0  # those without a sample come before the first shard
        ends = np.append(firsts[1:], len(self._first_sample_F))

        # Sort by the place in the shard, then by the place on the line.
        ranked: list[tuple[int, int]] = []
        for first, end in zip(firsts, ends, strict=True):
            for place, group in enumerate(range(first, end)):
                ranked.append((place, group))
        ranked.sort()
        return [int(self._groups_F[group]) for _, group in ranked]

    def _window_at(
        self, shard: np.ndarray, line: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The windows of some places on the line: (number in their shard, start and end on the
        line).
        """
        # Neighbouring shards start their windows at different row groups.
        phase = shard % self._window
        first_of_shard = self._shard_groups[shard]
        window = (self._group_at(line) - first_of_shard + phase) // self._window

        # A window is whole row groups, but it ends where its shard does.
        last = len(self._first_sample_F)
        first_group = first_of_shard + window * self._window - phase
        end_group = first_group + self._window
        first_group = np.clip(first_group, 0, last)
        end_group = np.clip(end_group, 0, last)

        shard_start = self._shard_starts[shard]
        shard_end = self._shard_ends[shard]
        low = np.maximum(self._group_starts[first_group], shard_start)
        high = np.minimum(self._group_starts[end_group], shard_end)
        return window, low, high

    def _group_at(self, line: np.ndarray) -> np.ndarray:
        """Which row group of the line (0: the first one on it) holds each place."""
        group = np.searchsorted(self._group_starts, line, side="right") - 1
        return np.clip(group, 0, len(self._first_sample_F) - 1)

    def _shuffle(self, shard: int, window: int, size: int) -> np.ndarray:
        """The permutation of one window. Two windows a shard are in use at a time; so many are
        kept.
        """
        key = (shard, window)
        if key not in self._shuffled:
            rng = np.random.default_rng([*self._key, 2, shard, window])
            self._shuffled[key] = rng.permutation(size)
            if len(self._shuffled) > 2 * self._shards:
                self._shuffled.popitem(last=False)
        self._shuffled.move_to_end(key)
        return self._shuffled[key]


def evaluation(sizes_F: np.ndarray, batch_size: int, rank: int, world: int) -> Iterator[Step]:
    """This rank's batches of a pass that sees every sample exactly once, in table order, without
    padding.

    Every rank gets the same number of batches, because sharded weights are gathered in step. Some
    are shorter, and some are empty where there are fewer samples than ranks.
    """
    ends_F = np.cumsum(sizes_F)
    samples = int(sizes_F.sum())
    first, end = _part(samples, world, rank)

    # Rounded up; one empty batch where there is no sample.
    batches = max(1, -(-samples // (batch_size * world)))
    for number in range(batches):
        start, stop = _part(end - first, batches, number)
        part_B = np.arange(first + start, first + stop)
        # A row group is used up when the pass is behind its last sample.
        group_B = np.searchsorted(ends_F, part_B, side="right")
        until_B = ends_F[group_B]
        done = int(part_B[-1]) + 1 if len(part_B) else 0
        yield Step(
            samples_B=part_B,
            until_B=until_B,
            done=done,
            positions_B=part_B,
            share=Share.whole(len(part_B)),
        )


def _part(samples: int, parts: int, number: int) -> tuple[int, int]:
    """Where one of `parts` nearly equal parts begins and ends; the first ones are the larger."""
    size, rest = divmod(samples, parts)
    start = number * size + min(number, rest)
    return start, start + size + (number < rest)
