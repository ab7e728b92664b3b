"""Batches of a small set: the whole of it lies on the device, and is shuffled, shifted, flipped and normalised there.

The order of an epoch and what is done to each image are drawn on the CPU from the seed and the epoch alone: the same on
every device, and a run that goes on in the middle of an epoch sees what it would have seen. One indexing operation takes
a batch out, shifted and flipped; its layout in memory is channels_last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad as padded

from .images import Images

Batch = tuple[Tensor, Tensor]


class Source(Protocol):
    """What a network is trained on. `steps`: batches in an epoch; `size`: images in it."""

    classes: int
    channels: int
    steps: int
    size: int

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `start` on."""

    def test(self) -> Iterator[Batch]:
        """The test images, in order, none left out."""


class Resident:
    """Batches of a set that lies on the device.

    Args:
        images: the set.
        batch: images in a training batch, over all processes; what does not fill one is left out of the epoch.
        seed: of the order, the shifts and the flips.
        augment: whether training images are shifted (by up to `spec.pad` pixels, zeros beyond the edge) and flipped.
        limit: use the first so many training images (and a fifth as many test images) only.
        home: where the set lies, if not on the device: batches are then brought there one by one.
        rank, world: this process takes its share of every batch.
    """

    def __init__(
        self, images: Images, batch: int, *, seed: int = 0, device: torch.device | str = "cpu", augment: bool = True,
        limit: int | None = None, test_batch: int = 1000, rank: int = 0, world: int = 1,
        home: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        spec = images.spec
        train_x, train_y = images.train_x[:limit], images.train_y[:limit]
        few = None if limit is None else max(1, limit // 5)
        test_x, test_y = images.test_x[:few], images.test_y[:few]
        if not 1 <= batch <= len(train_x) or batch % world:
            raise ValueError(
                f"batch must be from 1 to {len(train_x)} and a multiple of {world} processes; got {batch}."
            )
        self.classes, self.channels, self.size, self.seed, self.batch = (
            spec.classes,
            spec.shape[0],
            len(train_x),
            seed,
            batch,
        )
        self.steps, self.test_batch, self.rank, self.share = len(train_x) // batch, test_batch, rank, batch // world
        self.device, home = torch.device(device), torch.device(home or device)
        self.pad, self.flip = (spec.pad, spec.flip) if augment else (0, False)
        edge = (0, 0) + (self.pad,) * 4
        margin = train_x.shape[-1] - spec.shape[-1]
        if margin:  # the images are larger than what is cut out of them: shift within them
            edge, self.pad = (0,) * 6, margin // 2
        self.train_x = padded(train_x.permute(0, 2, 3, 1).to(home), edge).contiguous()
        self.test_x = test_x.permute(0, 2, 3, 1).to(home).contiguous()
        self.train_y, self.test_y = train_y.to(home), test_y.to(home)
        self.rows, self.cols = (torch.arange(n, device=home) for n in spec.shape[1:])
        self.mean, self.std = (torch.tensor(values, device=device) for values in (spec.mean, spec.std))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        order, shifts, flips = self.drawn(self.seed, epoch)
        for k in range(start, self.steps):
            first = k * self.batch + self.rank * self.share
            part = slice(first, first + self.share)
            yield self.taken(order[part], shifts[part], flips[part])

    def drawn(self, seed: int, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of every image of an epoch: which it is, how it is shifted, and whether it is flipped."""
        draw = torch.Generator().manual_seed(1_000_003 * seed + epoch)
        order = torch.randperm(self.size, generator=draw)
        shifts = torch.randint(2 * self.pad + 1, (self.size, 2), generator=draw)
        flips = torch.randint(2, (self.size,), generator=draw).bool() & self.flip
        order, shifts, flips = (drawn.to(self.train_x.device, non_blocking=True) for drawn in (order, shifts, flips))
        return order, shifts, flips

    def taken(self, chosen: Tensor, shift: Tensor, flips: Tensor) -> Batch:
        """These images, shifted and flipped."""
        cols = torch.where(flips[:, None], self.cols.flip(0), self.cols) + shift[:, 1:]
        rows = self.rows + shift[:, :1]
        x = self.train_x[chosen[:, None, None], rows[:, :, None], cols[:, None, :]]
        return self._normalised(x), self.train_y[chosen].to(self.device)

    def test(self) -> Iterator[Batch]:
        for x, y in zip(self.test_x.split(self.test_batch), self.test_y.split(self.test_batch), strict=True):
            yield self._normalised(x), y.to(self.device)

    def _normalised(self, x: Tensor) -> Tensor:
        x = x.to(self.device)
        return ((x.float() - self.mean) / self.std).permute(0, 3, 1, 2)


class Several:
    """Batches of several seeds side by side, taken out of one set together: those that `Resident` gives of each.

    Args:
        source: the set; all of a batch, in one process.
        seeds: one for each network that is trained.
    """

    def __init__(self, source: Resident, seeds: Sequence[int]) -> None:
        assert source.share == source.batch
        self.source, self.seeds, self.steps = source, seeds, source.steps

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """x: (batch, seeds · channels, height, width), a seed's channels next to each other. y: (seeds, batch)."""
        each = [self.source.drawn(seed, epoch) for seed in self.seeds]
        order, shifts, flips = (torch.stack(drawn) for drawn in zip(*each, strict=True))
        count, batch = len(self.seeds), self.source.batch
        for first in range(0, self.steps * batch, batch):
            part = slice(first, first + batch)
            x, y = self.source.taken(*(drawn[:, part].flatten(0, 1) for drawn in (order, shifts, flips)))
            beside = x.unflatten(0, (count, batch)).transpose(0, 1).flatten(1, 2)
            yield beside.contiguous(), y.view(count, batch)
