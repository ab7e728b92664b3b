"""Handwritten digits that come with scikit-learn: 1,797 images of 8×8 pixels in 17 grey levels, one in five for testing."""

from __future__ import annotations

from pathlib import Path

import torch

from retrograde.extras import require

from .images import Images, Spec, verified

DIGITS = Spec("digits", 10, 1438, 359, (1, 8, 8), (73.345,), (90.253,), flip=False, pad=1, digest="b0982536c220a877")


def load_bundled_digits(spec: Spec, root: Path) -> Images:
    """The digits, split in the same way every time. `root` is not needed: the package brings them."""
    data = require("sklearn.datasets").load_digits()
    x = torch.tensor(data.images * (240 / 16)).byte().unsqueeze(1)
    y = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order.tensor_split([len(x) // 5])
    return verified(Images(spec, x[train], y[train], x[test], y[test], "scikit-learn"), "install scikit-learn again.")
