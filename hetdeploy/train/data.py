"""Which samples a step takes, and which rank computes them.

A global batch is a function of (seed, epoch, step) alone: a slice of the epoch's permutation. Weights only decide who
computes which part of that slice. So a run that resumes, loses a rank or gains one goes through the same samples in the
same order, and every rank has the same number of steps, whatever the weights are.

    batches = Batches(len(dataset), 64, seed=1)
    sampler = ShareSampler(batches, rank=0, weights=[3, 1], start=0, stop=10 * batches.per_epoch)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, generator=torch.Generator())
    for step, batch in enumerate(loader, start=0):
        ...

Steps are counted over all epochs, from 0: there is no epoch to set, or to forget. The loader gets a generator of its
own because a new loader draws from its generator, and a resumed run would otherwise see other random numbers than one
that was never interrupted.

``TokenBlocks`` makes a dataset of a stream of tokens. For ranks that take steps at a pace of their own (DiLoCo with a
time), ``parts`` divides the samples beforehand: each rank then has ``Batches`` of its own part.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, default_collate

from hetdeploy.train.errors import MisuseError

EPOCHS_REMEMBERED = 4
"""Permutations kept, 8 bytes a sample each: this epoch's and the next one's, for training and evaluation data."""


def seed_for(seed: int, *parts: int) -> int:
    """A seed for ``torch.manual_seed`` from the run's seed and, say, (rank, step, worker): below 2^63, the same on
    every machine. Neighbouring numbers give unrelated seeds.
    """
    digest = hashlib.blake2b(repr((seed, *parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """``total`` in whole numbers proportional to ``weights`` (largest remainder; ties go to the lower rank).

    They sum to ``total``; each is less than one away from its exact share; a weight of 0 gets 0. Raises MisuseError for
    weights that are negative, not finite, or all 0.
    """
    if not weights or not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise MisuseError(f"weights {list(weights)} cannot be", "give every rank 0 or more, at least one of them more")
    rational = [Fraction(weight) for weight in weights]  # exact: rounding must not make or lose a sample
    exact = [total * weight / sum(rational) for weight in rational]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda rank: shares[rank] - exact[rank])
    for rank in by_remainder[: total - sum(shares)]:
        shares[rank] += 1
    return shares


def parts(length: int, weights: Sequence[float]) -> list[range]:
    """``range(length)`` cut into one part for each rank, in rank order, by weight."""
    ends = list(accumulate(apportion(length, weights)))
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def shares(
    length: int, size: int, weights: Sequence[float], *, seed: int = 0, epoch: int = 0, step: int = 0
) -> list[list[int]]:
    """For each rank its samples in ``step`` of ``epoch``: disjoint, together the whole global batch.

    The plain function behind ``Batches`` and ``ShareSampler``. length: samples in the dataset. size: samples in a
    global batch; the last one of an epoch has what is left. A rank may have none.
    """
    batches = Batches(length, size, seed=seed)
    if not 0 <= step < batches.per_epoch:
        raise MisuseError(f"step {step} is not in an epoch of {batches.per_epoch}", "count steps from 0 in each epoch")
    return batches.shares(epoch * batches.per_epoch + step, weights)


@dataclass(frozen=True)
class Batches:
    """The global batches of a run. ``step`` counts over all epochs, from 0.

    length: samples in the dataset. size: samples in a global batch. last: what becomes of an epoch's last batch if
    samples are left over: "keep" it short (every epoch is complete) or "drop" it (every batch has the same shape).

    Raises MisuseError if there is nothing to make a batch of.
    """

    length: int
    size: int
    seed: int = 0
    last: Literal["keep", "drop"] = "keep"

    def __post_init__(self) -> None:
        if self.length < 1 or self.size < 1:
            raise MisuseError(f"{self.length} samples in batches of {self.size} cannot be", "give at least one of each")
        if self.last not in ("keep", "drop"):
            raise MisuseError(f"last={self.last!r} is not known", "use keep or drop")
        if self.per_epoch == 0:
            raise MisuseError(
                f"{self.length} samples do not fill one batch of {self.size}", "use a smaller batch, or last='keep'"
            )

    @property
    def per_epoch(self) -> int:
        """Steps in an epoch."""
        return self.length // self.size if self.last == "drop" else -(-self.length // self.size)

    def at(self, step: int) -> list[int]:
        """The samples of a step, in order."""
        epoch, position = divmod(step, self.per_epoch)
        order = _permutation(self.length, seed_for(self.seed, epoch))
        return order[position * self.size : (position + 1) * self.size].tolist()

    def shares(self, step: int, weights: Sequence[float]) -> list[list[int]]:
        """The samples of a step by rank: disjoint and complete. Raises MisuseError for a dataset smaller than the
        world.
        """
        self.check_world(sum(weight > 0 for weight in weights))
        samples = self.at(step)
        return [samples[part.start : part.stop] for part in parts(len(samples), weights)]

    def micro_batches(self, step: int, count: int) -> list[list[int]]:
        """The samples of a step in ``count`` pieces: of one size where that divides the batch, else one apart."""
        samples = self.at(step)
        return [samples[part.start : part.stop] for part in parts(len(samples), [1.0] * count)]

    def check_world(self, ranks: int) -> None:
        """Raises MisuseError unless every one of so many ranks can have a sample."""
        if self.length < ranks:
            raise MisuseError(
                f"a dataset of {self.length} samples is smaller than the world of {ranks} ranks", "use fewer ranks"
            )
        if self.size < ranks:
            raise MisuseError(
                f"a global batch of {self.size} samples is smaller than the world of {ranks} ranks",
                "use a larger batch, or give ranks that shall have no samples a weight of 0",
            )

    def state_dict(self) -> dict[str, Any]:
        """What makes the order of samples: for a checkpoint, or to compare between ranks."""
        return {"length": self.length, "size": self.size, "seed": self.seed, "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load, but a run can go on only in the same order. Raises MisuseError naming what differs."""
        for name, mine in self.state_dict().items():
            if state.get(name) != mine:
                raise MisuseError(
                    f"the checkpoint's batches have {name} {state.get(name)}, this run's have {mine}",
                    "resume with the same dataset, batch size and seed, or samples would be repeated and skipped",
                )


class ShareSampler(Sampler[list[int]]):
    """One rank's samples, step by step: a ``batch_sampler`` for a DataLoader.

    weights: one for each rank, in proportion to speed; any unit. start and stop: steps, counted over all epochs; the
    same on all ranks, so all ranks yield the same number of times. A rank that has no sample in a step yields an empty
    list, for which ``collate`` is made.

    Raises MisuseError for a dataset smaller than the world.
    """

    def __init__(self, batches: Batches, rank: int, weights: Sequence[float], *, start: int = 0, stop: int) -> None:
        if not 0 <= rank < len(weights):
            raise MisuseError(f"rank {rank} has no weight among {len(weights)}", "give one for every rank")
        if not 0 <= start <= stop:
            raise MisuseError(f"steps from {start} to {stop} cannot be", "start at 0 or later and stop after that")
        batches.shares(start, weights)  # whatever is wrong with the weights is said here
        self._batches = batches
        self._rank = rank
        self._start = start
        self._stop = stop
        self._weights = [(start, list(weights))]  # from which step on which weights count, in order of steps
        self._reached = start

    def __len__(self) -> int:
        return self._stop - self._start

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self._start, self._stop):
            self._reached = step + 1
            weights = next(weights for since, weights in reversed(self._weights) if since <= step)
            yield self._batches.shares(step, weights)[self._rank]

    def reweigh(self, weights: Sequence[float], step: int) -> None:
        """Use other weights from ``step`` on. On all ranks, with the same arguments, or samples are lost and repeated.

        A loader with workers asks for samples ahead of time, so ``step`` must be as far ahead. Raises MisuseError if
        this rank has already handed out that step.
        """
        if step < self._reached:
            raise MisuseError(
                f"weights from step {step} on come too late, samples are out up to step {self._reached - 1}",
                "change them at a later step: prefetch_factor * num_workers steps ahead of the loop",
            )
        if len(weights) != len(self._weights[0][1]):
            raise MisuseError(f"{len(weights)} weights for {len(self._weights[0][1])} ranks", "give one for every rank")
        self._batches.shares(step, weights)
        self._weights = [*(earlier for earlier in self._weights if earlier[0] < step), (step, list(weights))]


class TokenBlocks(Dataset[tuple[Tensor, Tensor]]):
    """A stream of tokens as a dataset: sample i is block i of ``context`` tokens, with the next token of each.

    tokens: 1-D tensor of any integer type. Blocks do not overlap; tokens after the last whole block are not used.
    Samples are (inputs, targets), int64 tensors of length ``context``; a list of indices gives (n, context) each.
    """

    def __init__(self, tokens: Tensor, context: int) -> None:
        if tokens.dim() != 1 or tokens.is_floating_point():
            raise MisuseError(f"tokens are {tokens.dtype} {tuple(tokens.shape)}", "give a 1-D tensor of integers")
        if context < 1 or len(tokens) <= context:
            raise MisuseError(
                f"{len(tokens)} tokens do not fill a block of {context} and its targets",
                "use a longer text or a shorter context",
            )
        self._tokens = tokens
        self._context = context

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        block = self._tokens[index * self._context : (index + 1) * self._context + 1].long()
        return block[:-1], block[1:]

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Several samples at once: (len(indices), context) each, also for none."""
        starts = torch.tensor(indices, dtype=torch.int64)[:, None] * self._context
        blocks = self._tokens[starts + torch.arange(self._context + 1)].long()
        return blocks[:, :-1], blocks[:, 1:]


def collate(samples: list[Any]) -> Any:
    """``torch.utils.data.default_collate``, and None where a rank has no sample in a step."""
    return default_collate(samples) if samples else None


def pad(indices: Sequence[int], size: int) -> tuple[list[int], Tensor]:
    """``indices`` repeated to ``size`` of them, and a weight for each: 1 for the real ones, then 0.

    For devices that want one shape always (MPS keeps a compiled graph for every new one): multiply the per-sample loss
    by the weights, and count only the real ones. Where there are none, sample 0 is computed and counts nothing.
    """
    if len(indices) > size:
        raise MisuseError(f"{len(indices)} samples do not fit into {size}", "pad to the largest share")
    filler = list(indices) or [0]
    padded = [filler[i % len(filler)] for i in range(size)]
    return padded, (torch.arange(size) < len(indices)).to(torch.float32)


@lru_cache(EPOCHS_REMEMBERED)
def _permutation(length: int, seed: int) -> Tensor:
    # On the CPU, where the generator (mt19937) gives the same numbers on every machine; a test pins them.
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))
