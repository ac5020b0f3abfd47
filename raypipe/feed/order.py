"""The order of samples: a pure function of (seed, epoch, row group sizes), the same at every world size.

Row groups are permuted and laid end to end; the line of samples is cut into `shards` equal parts; inside a shard, samples are
shuffled within windows of `window` whole row groups; and the epoch's stream takes one sample from each shard in turn. So

- global batch *t* is stream[t*B:(t+1)*B] whoever reads it. A rank takes the stream's positions p with p % world == rank, so
  where the world size divides `shards` a rank only ever reads its own shards' row groups, at any batch size. The ranks' parts
  of a batch then differ by an image where the world does not divide the batch: `Share` says what each part counts;
- a resume token is two integers, (epoch, step);
- a position comes once an epoch, a sample may come several times (weighted sampling, a batch that is filled up): what is drawn
  at random for an image is keyed by its position;
- at most shards * window row groups are needed at a time, however large the table.

Windows of neighbouring shards start at different offsets, so that row groups come and go one by one and not all at once.
Everything is lazy: an epoch over 1 million row groups costs one permutation of them, a batch only its own windows.
Read before writing: the shuffles of MosaicML Streaming (py1b, py1e), which tie the order to a canonical node count.

Legend: N samples, F row groups, B batch. Sample numbers run through the row groups in table order, 0..N-1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

FORMAT = 2  # of orders and what is keyed by them: part of a training's key (1: augmentation by sample, parts filled up)
SAMPLES_AT_ONCE = 1024  # steps planned together: a fifth of the time for batches of 64, and still nothing to wait for


@dataclass(frozen=True)
class Order:
    """How the samples of a table become batches. sizes_F: samples in each row group (int64); batch_size is global.

    weights_N, when given, are relative chances: each epoch draws N samples, each int(N * weight) times or once more, so that
    rare samples come often. Without, every sample comes exactly once.
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
        """Batches of an epoch: whole ones, or all with the last one filled up from the epoch's start; never none."""
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + 1 if rest and (not whole or not self.drop_last) else whole

    def epoch(self, epoch: int) -> Epoch:
        if self.weights_N is None:
            return Epoch(self, self.sizes_F, epoch)
        copies_N = resample(self.weights_N, np.random.default_rng([self.seed, epoch, 1]))
        bounds = np.concatenate(([0], np.cumsum(self.sizes_F)))
        copied = np.concatenate(([0], np.cumsum(copies_N)))
        return Epoch(
            self, np.diff(copied[bounds]), epoch, np.repeat(np.arange(len(copies_N)), copies_N)
        )

    def rank(self, epoch: int, step: int, rank: int, world: int) -> Iterator[Step]:
        """This rank's share of every global batch of the epoch, from `step` on."""
        laid, before = self.epoch(epoch), epoch * self.samples
        at_once = max(1, SAMPLES_AT_ONCE // self.batch_size)
        for first in range(step, self.steps, at_once):
            ends = [self._end(t) for t in range(first, min(first + at_once, self.steps))]
            starts = [first * self.batch_size, *ends[:-1]]
            parts = [
                deal(np.arange(a, b), self.samples, rank, world)
                for a, b in zip(starts, ends, strict=True)
            ]
            cuts = np.cumsum([len(mine) for mine, _ in parts])[:-1]
            positions = np.concatenate([mine for mine, _ in parts]) % self.samples
            found = zip(*(np.split(values, cuts) for values in laid.at(positions)), strict=True)
            for end, (mine, share), (samples_B, until_B) in zip(ends, parts, found, strict=True):
                yield Step(
                    samples_B, before + until_B, before + min(end, self.samples), mine, share
                )

    def _end(self, step: int) -> int:
        """The position of the stream behind a batch."""
        end = (step + 1) * self.batch_size
        return min(end, self.samples) if self.drop_last else end


@dataclass(frozen=True)
class Share:
    """What one rank's part of a global batch counts.

    images: how many it holds; 0 where it has none, and one image of another rank stands in, so that all ranks take the step.
    even: the ranks' mean number of images. least: the smallest part of any rank, stand-ins counted.
    """

    images: int
    even: float
    least: int

    @classmethod
    def whole(cls, images: int) -> Share:
        """Of a world of one."""
        return cls(images, float(images), images)

    @property
    def weight(self) -> float:
        """What this part's mean loss is multiplied by: the mean over the ranks is then the global batch's mean."""
        return self.images / self.even if self.even else 0.0


@dataclass(frozen=True)
class Step:
    """One rank's samples of one global batch.

    until_B: the position of the stream from which a sample's window is done with; done: where the stream is after this batch.
    positions_B: each sample's place in the epoch's stream.
    """

    samples_B: np.ndarray
    until_B: np.ndarray
    done: int
    positions_B: np.ndarray
    share: Share


class Epoch:
    """One epoch's stream. `drawn` maps positions of the line to samples where sampling is weighted."""

    def __init__(
        self, order: Order, sizes_F: np.ndarray, epoch: int, drawn: np.ndarray | None = None
    ) -> None:
        self._key, self._drawn = (order.seed, epoch), drawn
        self._shards, self._window = order.shards, order.window
        self._groups_F = groups_F = np.random.default_rng(self._key).permutation(len(sizes_F))
        self._starts = np.concatenate(
            ([0], np.cumsum(sizes_F[groups_F]))
        )  # where each row group begins on the line
        self._first_F = (np.cumsum(sizes_F) - sizes_F)[groups_F]  # its first sample's number
        self.samples = int(self._starts[-1])
        share, rest = divmod(self.samples, self._shards)
        self._cuts = np.arange(self._shards + 1) * share + np.minimum(
            np.arange(self._shards + 1), rest
        )
        self._cut_groups = self._group(self._cuts[:-1])
        self._shuffled: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(sample numbers, until) of stream positions, int64 each and in their order."""
        shard, nth = positions % self._shards, positions // self._shards
        line = self._cuts[shard] + nth
        phase = shard % self._window
        window = (self._group(line) - self._cut_groups[shard] + phase) // self._window
        first_group = self._cut_groups[shard] + window * self._window - phase
        last = len(self._starts) - 1
        low = np.maximum(self._starts[np.clip(first_group, 0, last)], self._cuts[shard])
        high = np.minimum(
            self._starts[np.clip(first_group + self._window, 0, last)], self._cuts[shard + 1]
        )
        found = np.empty_like(line)
        keys = shard * (2 * last + self._window) + window
        for key in np.unique(keys):
            here = np.flatnonzero(keys == key)
            i = here[0]
            shuffled = self._shuffle(int(shard[i]), int(window[i]), int(high[i] - low[i]))
            found[here] = low[i] + shuffled[line[here] - low[i]]
        group = self._group(found)
        samples = self._first_F[group] + found - self._starts[group]
        if self._drawn is not None:
            samples = self._drawn[samples]
        return samples, (high - self._cuts[shard] - 1) * self._shards + shard + 1

    def groups(self) -> list[int]:
        """Row groups in the order in which the stream first needs them, roughly: shards side by side, window after window."""
        ends = np.append(self._cut_groups[1:], len(self._starts) - 1)
        ahead = [
            (i, g)
            for a, b in zip(self._cut_groups, ends, strict=True)
            for i, g in enumerate(range(a, b))
        ]
        return [int(self._groups_F[g]) for _, g in sorted(ahead)]

    def _group(self, line: np.ndarray) -> np.ndarray:
        return np.clip(
            np.searchsorted(self._starts, line, side="right") - 1, 0, len(self._starts) - 2
        )

    def _shuffle(self, shard: int, window: int, size: int) -> np.ndarray:
        """The permutation of one window; the latest ones are kept, two for each shard are in use at a time."""
        key = shard, window
        if key not in self._shuffled:
            self._shuffled[key] = np.random.default_rng([*self._key, 2, shard, window]).permutation(
                size
            )
            if len(self._shuffled) > 2 * self._shards:
                self._shuffled.popitem(last=False)
        self._shuffled.move_to_end(key)
        return self._shuffled[key]


def deal(positions_B: np.ndarray, samples: int, rank: int, world: int) -> tuple[np.ndarray, Share]:
    """This rank's positions of a global batch, and what they count. Positions from `samples` on fill a batch up from the
    epoch's start; they go to the rank whose shards they are."""
    owner_B = positions_B % samples % world
    sizes = np.bincount(owner_B, minlength=world)
    share = Share(int(sizes[rank]), len(positions_B) / world, max(1, int(sizes.min())))
    return (positions_B[owner_B == rank] if share.images else positions_B[:1]), share


def evaluation(sizes_F: np.ndarray, batch_size: int, rank: int, world: int) -> Iterator[Step]:
    """This rank's batches of a pass that sees every sample exactly once, in table order and without padding.

    Equally many batches on every rank (sharded weights gather in step), some of them shorter, and empty ones when there are
    fewer samples than ranks.
    """
    ends_F = np.cumsum(sizes_F)
    samples = int(sizes_F.sum())
    mine = np.array_split(np.arange(samples), world)[rank]
    for part in np.array_split(mine, max(1, -(-samples // (batch_size * world)))):
        until = ends_F[np.searchsorted(ends_F, part, side="right")]
        yield Step(part, until, int(part[-1]) + 1 if len(part) else 0, part, Share.whole(len(part)))


def resample(weights_N: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """How often each sample comes among N draws, int64: systematic resampling, so each count is the expected one rounded up
    or down, and they sum to N. Source: J. Carpenter et al., "Improved particle filter for nonlinear problems" (1999)."""
    n = len(weights_N)
    edges = np.cumsum(weights_N) * (n / weights_N.sum())
    edges[-1] = n  # not a rounding error less
    return np.diff(np.ceil(np.concatenate(([0.0], edges)) - rng.uniform()).astype(np.int64).clip(0))


def balanced_weights(labels_N: np.ndarray) -> np.ndarray:
    """Weights under which every class comes equally often."""
    return 1.0 / np.bincount(labels_N)[labels_N]
