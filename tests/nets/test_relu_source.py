"""`branch_of`: which blocks compute relu(x + f(x)), told from the code of their forward."""

from __future__ import annotations

import functools
import gc
import importlib
import random
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograde.nets.relu import branch_of


class Block(nn.Module):
    """As people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.second(self.act(self.first(x))) + x)


SEEN: list[Any] = []


def noted(x: Any) -> Any:
    SEEN.append(x)
    return x


class Off(nn.Linear):
    def __bool__(self) -> bool:
        return False


class Named(nn.Linear):
    name = ""


class Halves(nn.ReLU):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) * 0.5


class Inside(nn.ReLU):
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return super()._call_impl(*args, **kwargs) * 0.5


def doubled(forward: Any) -> Any:
    """`inspect` gives the source of what is inside the wrapper."""

    @functools.wraps(forward)
    def wrapper(self: Any, x: Tensor) -> Tensor:
        return forward(self, x) * 2

    return wrapper


FORWARD, USUAL = "def forward(self, x):", "return self.act(self.first(x) + x)"
TAKEN = {
    "as people write it": f"{FORWARD}\n    {USUAL}",
    "in place": f"{FORWARD}\n    shortcut = x\n    x = self.second(self.act(self.first(x)))\n    x += shortcut"
    f"\n    return self.act(x)",
    "a loop": f"{FORWARD}\n    y = x\n    for part in (self.first, self.act, self.second):\n        y = part(y)"
    f"\n    return self.act(y + x)",
    "one module under two names": f"{FORWARD}\n    y = self.tied(self.first(x))\n    if self.first is self.tied: y = self.tied(y)"
    f"\n    return self.act(y + x)",
    "methods, and code that is not reached": f"""
def branch(self, x):
    return self.second(self.act(self.first(x)))
{FORWARD}
    shortcut = x if self.downsample is None else self.downsample(x)
    out = self.branch(x)
    if self.downsample is not None:
        out = out * 2
    return self.act(self.same(shortcut) + out)""",
}
"""Sources of blocks' methods."""
OTHERS = {
    "asks for the mode": f"{FORWARD}\n    y = self.first(x)\n    if self.training: y = self.second(y)\n    return self.act(y + x)",
    "chance": f"{FORWARD}\n    if random.random() < 0.5: return x\n    {USUAL}",
    "super": f"{FORWARD}\n    return super(type(self), self).forward(x)",
    "a function": f"{FORWARD}\n    return self.act(F.gelu(self.first(x)) + x)",
    "two branches": f"{FORWARD}\n    return self.act(self.first(x) + self.second(x))",
    "scaled": f"{FORWARD}\n    return self.act(self.first(x) * 2 + x)",
    "more after the relu": f"{FORWARD}\n    return self.second(self.act(self.first(x) + x))",
    "a call whose result is not used": f"{FORWARD}\n    self.second(x)\n    {USUAL}",
    "adds into x": f"{FORWARD}\n    x += self.first(x)\n    return self.act(x)",
    "an optional input": f"def forward(self, x, scale=None):\n    {USUAL}",
    "an exception": f"{FORWARD}\n    y = self.first(x)\n    try: y = y.mul(2)\n    except: pass\n    return self.act(y + x)",
    "the first module writes to x": f"{FORWARD}\n    return self.act(self.first(self.writes(x)) + x)",
    "a property": f"factor = property(lambda self: None)\n{FORWARD}\n    if self.factor is not None: return x\n    {USUAL}",
    "counts": f"calls = 0\n{FORWARD}\n    self.calls += 1\n    {USUAL}",
    "a default": f"def by(self, x, by=random):\n    return self.first(x) if by.random() < 2 else x\n"
        f"{FORWARD}\n    return self.act(self.by(x) + x)",
    "wrapped": f"@doubled\n{FORWARD}\n    {USUAL}",
    "f is written to": f"{FORWARD}\n    y = self.first(x)\n    z = y\n    z += x\n    return self.act(self.second(y) + x)",
    "a keyword": f"{FORWARD}\n    return self.act(self.first(input=x) + x)",
    "a keyword-only input": "def forward(self, x, *, by=noted):\n    return self.act(by(self.first(x)) + x)",
    "a function that notes": f"{FORWARD}\n    return self.act(noted(self.first(x)) + x)",
    "whether a module is true": f"{FORWARD}\n    y = self.first(x)\n    if self.off: y = self.second(y)\n    return self.act(y + x)",
    "a method without self": f"@staticmethod\ndef of(self):\n    return self\n"
        f"{FORWARD}\n    return self.act(self.of(self.first(x)) + x)",
    "a name that the class has, too": f"none = None\n"
        f"{FORWARD}\n    y = self.act(self.first(x)) + x\n    return y if self.none is None else self.none(y)",
    "a module whose call is another": f"{FORWARD}\n    return self.halves(self.act(self.first(x)) + x)",
    "a module whose inner call is another": f"{FORWARD}\n    return self.inside(self.act(self.first(x)) + x)",
    "what a module has, and its stand-in": f"{FORWARD}\n    y = self.first(x)"
        f"\n    return self.act(y + x if self.named.name else x + self.second(y))",
    "what x has, and its stand-in": f"{FORWARD}\n    y = self.first(x)\n    return self.act(y + x) if x.calls is not None else y",
    "leaves something on a module": f"{FORWARD}\n    self.first.feature = y = self.first(x)\n    return self.act(y + x)",
    "writes to a global name": f"{FORWARD}\n    global LAST\n    LAST = y = self.first(x)\n    return self.act(y + x)",
    "a function inside": f"{FORWARD}\n    return (lambda y: self.act(y + x))(self.first(x))",
    "imports": f"{FORWARD}\n    import random\n    random.random()\n    {USUAL}",
    "asks whether modules are equal": f"{FORWARD}\n    y = self.first(x)"
        f"\n    return self.act(y + x) if self.first == self.second else y",
    "asks whether x is true": f"{FORWARD}\n    if x: return x\n    {USUAL}",
    "counts in its class": f"calls = 0\n{FORWARD}\n    self.__class__.calls += 1\n    {USUAL}",
    "a function that is no module": f"{FORWARD}\n    return self.act(self.noted(self.first(x)) + x)",
    "leaves something on x": f"{FORWARD}\n    x.skip = y = self.first(x)\n    return self.act(y + x)",
}  # fmt: skip


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tables as classes of a file."""
    folder = tmp_path_factory.mktemp("blocks")
    text = "import random\nfrom torch.nn import functional as F\nfrom test_relu_source import Block, doubled, noted\n"
    for k, methods in enumerate([*TAKEN.values(), *OTHERS.values()]):
        text += f"class Block{k}(Block):\n" + "".join(f"    {line}\n" for line in methods.splitlines() if line)
    (folder / "blocks_of_tables.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.syspath_prepend(Path(__file__).parent)
        yield importlib.import_module("blocks_of_tables")


def made(classes: ModuleType, name: str) -> Any:
    block = getattr(classes, f"Block{[*TAKEN, *OTHERS].index(name)}")()
    block.downsample, block.same, block.writes = None, nn.Identity(), nn.ReLU(inplace=True)
    block.off, block.named, block.tied = Off(6, 6), Named(6, 6), block.first
    block.halves, block.inside, block.noted = Halves(), Inside(), noted
    if "none" in type(block).__dict__:
        block._modules["none"] = nn.ReLU()
    return block


@pytest.mark.parametrize("name", OTHERS)
def test_other_blocks_are_not_taken_apart(name: str, classes: ModuleType) -> None:
    """And nothing of them is run to find out."""
    block = made(classes, name)
    before, attributes = (random.getstate(), torch.get_rng_state()), dict(block.__dict__)
    assert branch_of(block) is None
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert not SEEN
    assert not importlib.import_module("test_relu_source").SEEN
    assert block.__dict__ == attributes


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", TAKEN)
def test_blocks_that_are_taken_apart(name: str, training: bool, classes: ModuleType) -> None:
    block, x = made(classes, name).train(training), torch.randn(5, 6)
    f = branch_of(block)
    assert f is not None
    assert torch.equal(torch.relu(f(block, x) + x), block(x))
    assert branch_of(made(classes, name)) is f  # one function for blocks that are alike


def test_code_that_is_put_in_the_place_of_other_code(classes: ModuleType) -> None:
    """As reloading does in a notebook: the function stays, and its code is another."""

    class Reloaded(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.first(x) + x)

    assert branch_of(Reloaded()) is not None
    Reloaded.forward.__code__ = type(made(classes, "a function that notes")).forward.__code__
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


def test_what_was_seen_is_looked_up_again() -> None:
    class Mine(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.first(x) + x)  # type: ignore[no-any-return]

    def scaled(self: Any, x: Tensor) -> Tensor:
        return self.act(self.first(x) * 2 + x)  # type: ignore[no-any-return]

    block = Mine()
    act = block.act
    for changed, undone in (
        (lambda: setattr(block, "act", Halves()), lambda: setattr(block, "act", act)),
        (lambda: setattr(block, "first", None), lambda: setattr(block, "first", nn.Linear(6, 6))),
        (lambda: setattr(block, "forward", lambda x: x), lambda: delattr(block, "forward")),
    ):
        assert branch_of(block) is not None
        changed()
        assert branch_of(block) is None
        undone()
    assert branch_of(block) is not None
    Mine.forward.__code__ = scaled.__code__  # as notebooks do that reload
    assert branch_of(block) is None


def test_a_block_that_was_looked_at_is_not_kept() -> None:
    block = Block()
    block.first.parent = [block]  # type: ignore[assignment]
    assert branch_of(block) is not None
    gone = weakref.ref(block)
    del block
    gc.collect()
    assert gone() is None
