"""`branch_of`: which blocks compute relu(x + f(x)), told from the code of their forward."""

import functools
import importlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrograde.nets.relu import branch_of


class Block(nn.Module):
    """As people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.second(self.act(self.first(x))) + x)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.second(self.act(self.first(x)))
        x += shortcut
        return self.act(x)


class Methods(Block):
    """Conditions on what there is, code that is not reached, and methods."""

    downsample: Any

    def __init__(self) -> None:
        super().__init__()
        self.downsample, self.same = None, nn.Identity()

    def branch(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.branch(x)
        if self.downsample is not None:
            out = out * 2
        return self.act(self.same(shortcut) + out)


# others -----------------------------------------------------------------------------------------------------------------


class Training(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        if self.training:
            out = self.second(out)
        return self.act(out + x)


class Chance(Block):
    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.5:
            return x
        return self.act(self.first(x) + x)


class Super(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Functional(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(F.gelu(self.first(x)) + x)


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.first(x) + self.second(x))


class Scaled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.first(x) * 2 + x)


class After(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x) + x))


class Wasted(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.second(x)
        return self.act(self.first(x) + x)


class IntoX(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += self.first(x)
        return self.act(x)


class Optional(Block):
    def forward(self, x: Tensor, scale: Any = None) -> Tensor:
        return self.act(self.first(x) + x)


class Caught(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        try:  # noqa: SIM105
            out = out.mul(2)
        except:  # noqa: E722 - without the name of an exception, which would be a global
            pass
        return self.act(out + x)


class Preactivated(Block):
    """The first module writes to x, so that what is added is relu(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.first(self.before(x)) + x)


class Property(Block):
    @property
    def factor(self) -> Any:
        return None

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        if self.factor is not None:
            out = self.second(out)
        return self.act(out + x)


class Counting(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.act(self.first(x) + x)


class Default(Block):
    def scaled(self, x: Tensor, by: Any = random) -> Tensor:
        return self.first(x) if by.random() < 2 else self.second(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.scaled(x) + x)


def doubled(forward: Any) -> Any:
    @functools.wraps(forward)
    def wrapper(self: Any, x: Tensor) -> Tensor:
        return forward(self, x) * 2

    return wrapper


class Wrapped(Block):
    """`inspect` gives the source of what is inside the wrapper."""

    @doubled
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.first(x) + x)


class WrittenTo(Block):
    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        alias = first
        alias += x
        return self.act(self.second(first) + x)


SEEN: list[Any] = []


def noted(x: Any) -> Any:
    SEEN.append(x)
    return x


class KeywordOnly(Block):
    def forward(self, x: Tensor, *, by: Any = noted) -> Tensor:
        return self.act(by(self.first(x)) + x)


class Noting(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(noted(self.first(x)) + x)


class Off(nn.Linear):
    def __bool__(self) -> bool:
        return False


class Truth(Block):
    """Whether a submodule is true may be anything."""

    def __init__(self) -> None:
        super().__init__()
        self.second = Off(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        if self.second:
            out = self.second(out)
        return self.act(out + x)


class Static(Block):
    """Has no `self`."""

    @staticmethod
    def scaled(self: Tensor) -> Tensor:
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.scaled(self.first(x)) + x)


class Keyword(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.first(input=x) + x)


class ActNone(Block):
    """A name that the class has as well, where Python finds it first."""

    final = None

    def __init__(self) -> None:
        super().__init__()
        self.final = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.first(x)) + x
        if self.final is not None:
            out = self.final(out)
        return out


class Halves(nn.ReLU):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) * 0.5


class Inside(nn.ReLU):
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return super()._call_impl(*args, **kwargs) * 0.5


class Called(Block):
    """The last module's forward is relu, calling it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.final = Halves()

    def forward(self, x: Tensor) -> Tensor:
        return self.final(self.act(self.first(x)) + x)


class CalledInside(Called):
    def __init__(self) -> None:
        super().__init__()
        self.final = Inside()


class Tied(Block):
    def __init__(self) -> None:
        super().__init__()
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.first(x))
        if self.first is self.second:
            out = self.second(out)
        return self.act(out + x)


class Chained(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = x
        for part in (self.first, self.act, self.second):
            out = part(out)
        return self.act(out + x)


class Named(nn.Linear):
    name = ""


class AsksForAName(Block):
    """What a submodule has, which what stands in for it has too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Named(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        if self.first.name:
            out = out + x
        else:
            out = x + self.second(out)
        return self.act(out)


class AsksForAChain(Block):
    """What x has, which what stands in for it has too."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        return self.act(out + x) if x.chain is not None else out


class LeavesOnModule(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        self.first.feature = out
        return self.act(out + x)


class LeavesOnX(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        x.skip = out
        return self.act(out + x)


class Global(Block):
    def forward(self, x: Tensor) -> Tensor:
        global LAST
        LAST = out = self.first(x)
        return self.act(out + x)


class Inner(Block):
    def forward(self, x: Tensor) -> Tensor:
        return (lambda out: self.act(out + x))(self.first(x))


class Imports(Block):
    def forward(self, x: Tensor) -> Tensor:
        import random

        return self.act(self.first(x) + x) if random.random() < 2 else x


class Equal(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        return self.act(out + x) if self.first == self.second else out


class Falsy(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x if x else self.act(self.first(x) + x)


class OwnClass(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.__class__.calls += 1
        return self.act(self.first(x) + x)


class Positional(Block):
    """Names that the stand-in for a submodule may have."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.first(value=x) + x)


class Given(Block):
    """A function that is no submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.noted = noted

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.noted(self.first(x)) + x)


OTHERS = [
    Training, Chance, Super, Functional, Twice, Scaled, After, Wasted, IntoX, Optional, Caught, Preactivated, Property, Counting,
    Default, Wrapped, WrittenTo, Keyword, KeywordOnly, Noting, Truth, Static,
    ActNone, Called, CalledInside, AsksForAName, AsksForAChain, LeavesOnModule,
    LeavesOnX, Global, Inner, Imports, Equal, Falsy, OwnClass, Positional, Given,
]  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_other_blocks_are_not_taken_apart(kind: type[nn.Module]) -> None:
    """And nothing of them is run to find out."""
    random.seed(0)
    before = random.getstate(), torch.get_rng_state()
    block = kind()
    attributes = dict(block.__dict__)
    assert branch_of(block) is None
    assert random.getstate() == before[0]
    assert not SEEN
    assert block.__dict__ == attributes


def test_blocks_that_are_taken_apart() -> None:
    x = torch.randn(5, 6)
    for block in (Block(), Block().eval(), InPlace(), Methods(), Tied(), Chained()):
        f = branch_of(block)
        assert f is not None
        assert torch.equal(torch.relu(f(block, x) + x), block(x))
        assert branch_of(type(block)()) is f  # one function for blocks that are alike


def test_code_that_is_put_in_the_place_of_other_code() -> None:
    """As reloading does in a notebook: the function stays, and its code is another."""

    class Reloaded(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.first(x) + x)

    assert branch_of(Reloaded()) is not None
    Reloaded.forward.__code__ = Noting.forward.__code__
    assert branch_of(Reloaded()) is None
    assert not SEEN


def test_a_module_that_is_no_submodule() -> None:
    block, x = Block(), torch.randn(5, 6)
    object.__setattr__(block, "act", nn.ReLU())
    f = branch_of(block)
    assert f is not None
    assert torch.equal(torch.relu(f(block, x) + x), block(x))


def test_code_whose_source_is_not_to_be_had(tmp_path: Path, monkeypatch: Any) -> None:
    """Of a file that was changed since it was imported, or of none."""
    file, x = tmp_path / "blocks_of_a_file.py", torch.randn(5, 6)
    text = "from torch import nn\n\nclass Other(nn.Module):\n    def forward(self, x):\n        return self.act(self.{}(x) + x)\n"
    file.write_text(text.format("second"))
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}
    exec(text.format("first"), names)
    blocks = [importlib.import_module(file.stem).Other(), names["Other"]()]
    file.write_text(text.format("third"))
    for block in blocks:
        block.first, block.second, block.act = nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU()
        f = branch_of(block)
        assert f is not None
        assert torch.equal(torch.relu(f(block, x) + x), block(x))
