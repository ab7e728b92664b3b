"""A converted block: the same object, of a class derived from its own, whose forward takes one step of its stage.

Nothing is added to the module tree, so parameters, buffers, hooks, names and `state_dict` are those of the original.
`isinstance` still holds, and the class keeps its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..memory.fake import is_fake
from ..nets import saved
from ..nets.floats import Giver
from ..nets.relu import branch_of, hooks_on_every_module
from ..reverse.extra import Extra
from ..reverse.inputs import check_input
from .caches import Spare, with_spares
from .checkpointing import directly, outside_checkpoints
from .split import Part, parts_now
from .stage import Stage

PLACE = "_retrograde_place"


@dataclass(eq=False)
class Place:
    """Which step of which stage a block takes."""

    stage: Stage
    index: int
    path: str
    keyword: str  # the name of x among the parameters of the block's forward
    steps: int = 1  # how many it takes: of a layer in parts, several
    compile: dict[str, Any] | None = None  # options of torch.compile for the block's own code
    givers: tuple[Giver, ...] = ()  # of its steps, where it is deployed


class Own:
    """A converted block's own forward, with x first and one tensor out.

    What the block returns besides (attention weights, a position bias) is kept from its first run.

    Args:
        forward: its own, or f of relu(x + f(x)).
        keyword: the name by which the block was given x; None: by its place.
        whole: it is its own though the steps would form relu(x + f) themselves.
        uses: what it uses of the block, the submodules that it may run among them; None: perhaps everything.
    """

    def __init__(
        self, block: nn.Module, forward: Callable[..., Any], keyword: str | None, whole: bool = False,
        uses: tuple[str, ...] | None = None,
    ) -> None:  # fmt: skip
        self.block = block
        self.forward = forward
        self.keyword = keyword
        self.whole = whole
        self.uses = uses
        self.out: Any = None

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tuple(map(Spare.of, args)), {name: Spare.of(value) for name, value in kwargs.items()}
        if self.keyword is not None:
            kwargs[self.keyword] = x
        else:
            args = (x, *args)
        out = self.forward(self.block, *args, **kwargs)
        if isinstance(out, tuple | list) and out and isinstance(out[0], Tensor):
            if self.out is None:
                self.out = (type(out), out[1:])
            return out[0]
        return out

    def with_x(self, x: Tensor) -> Any:
        """What the block returned in its first run, with this x."""
        if self.out is None:
            return x
        kind, rest = self.out
        self.out = ()
        return kind((x, *rest)) if kind in (tuple, list) else kind(x, *rest)

    def modules(self) -> Iterator[nn.Module]:
        own = vars(self.block)
        if self.uses is None or any(name in own and hasattr(type(self.block), name) for name in self.uses):
            return self.block.modules()  # a method that was replaced on the object may use anything
        used = [module for name, module in self.block._modules.items() if name in self.uses and module is not None]
        return iter(dict.fromkeys((self.block, *(inside for module in used for inside in module.modules()))))


class Derived:
    """What the class of a module adds that is still the same object: its own class, for copies, pickles and the way back."""

    _retrograde_class: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls = next(cls for cls in type(self).__mro__ if "_retrograde_class" in vars(cls))
        own_state = any("__getstate__" in vars(cls) for cls in type(self).__mro__[:-1])
        return _restored, (cls.__bases__[0], cls.__bases__[1]), self.__getstate__() if own_state else self.__dict__


class Step(Derived):
    """What the class of a block adds that takes a step of a stage, in integers or in floats: γ goes with its weights."""

    _retrograde_does = "momentum"

    def extra_repr(self) -> str:
        stage: Stage = self.__dict__[PLACE].stage
        does = "checkpointed" if stage.checkpointed else f"{self._retrograde_does}, gamma={stage.gamma}"
        own = self._retrograde_class.extra_repr(self)  # type: ignore[arg-type]
        return ", ".join(filter(None, (own, f"{stage.name}: {does}")))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        place: Place = self.__dict__[PLACE]
        if not place.stage.checkpointed:
            saved.put(destination, prefix, {**place.stage.described, "step": place.index})

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)  # type: ignore[misc]
        place: Place = self.__dict__[PLACE]
        stage = place.stage
        if stage.told is not errors and not stage.checkpointed:  # one warning a stage, for each loading
            described = {**stage.described, "step": place.index}
            if saved.compare(f"stage {stage.name!r}", local_metadata, described, _ADVICE):
                stage.told = errors


_ADVICE = (
    "rg.revert(model), and rg.convert(model, …) with what they were saved with; or, if the change is meant, load dict(state_dict), "
    "which does not say."
)


class Converted(Step):
    """What a converted block's class adds to its own."""

    def compile(self, **options: Any) -> None:
        """Run the block's own code through `torch.compile`, with these options; blocks that are alike are compiled once."""
        compiled(self._retrograde_class.forward, options)  # raises for what is no option
        self.__dict__[PLACE].compile = options

    @torch._disable_dynamo  # the step is not for the compiler; what the block calls may be compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        place: Place = self.__dict__[PLACE]
        stage = place.stage
        keyword = None if args else place.keyword
        if args:
            x, args = args[0], args[1:]
        elif keyword in kwargs:
            kwargs = dict(kwargs)
            x = kwargs.pop(keyword)
        else:
            raise TypeError(f"{place.path} was called without its input {keyword!r}.")
        check_input(x, f"the input of {place.path}, converted to a momentum step,")
        extra, alone = Extra(args, kwargs), stage.alone(self, x)
        if (args or kwargs) and torch.is_grad_enabled() and stage.settings.memory != "store":
            extra = with_spares(extra, place.path)
        if place.steps > 1 and (torch.is_grad_enabled() or not alone):
            with outside_checkpoints():
                return run_in_parts(self, place, x, extra)
        forward: Any = self._retrograde_class.forward
        whole = stage.settings.form == "relu" and not alone
        if whole:
            more = args or kwargs or hooks_on_every_module()
            branch = None if more else branch_of(self, self._retrograde_class)  # type: ignore[arg-type]
            if branch is not None:
                forward, keyword, whole = branch, None, False
        if place.compile is not None and not is_fake(x):
            forward = compiled(forward, place.compile)
        own = Own(self, forward, keyword, whole)  # type: ignore[arg-type]
        with outside_checkpoints():
            return stage.take(own, place.index, place.path, x, extra, alone)

    @property
    def _gradient_checkpointing_func(self) -> Any:
        """What a layer of transformers runs itself by while its flag `gradient_checkpointing` is set."""
        return directly

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, checkpoint: Any) -> None:
        self.__dict__["_gradient_checkpointing_func"] = checkpoint  # for `revert`


def run_in_parts(block: Any, place: Place, x: Tensor, extra: Extra) -> Any:
    """Attention, then MLP: a step each."""
    stage = place.stage

    def take(k: int, part: Part, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = part.run
        if place.compile is not None and not is_fake(x):
            run = compiled(run, place.compile)
        own = Own(block, run, None, uses=part.uses)
        return stage.take(
            own, place.index + k, f"{place.path} (step {k + 1})", x, Extra(args, kwargs), stage.alone(block, x)
        )

    parts = parts_now(block, block._retrograde_class, place.steps, place.path)
    return parts.walk(take, block, x, extra.args, extra.kwargs)


_compiled: dict[tuple[Any, str], Any] = {}


def compiled(forward: Any, options: dict[str, Any]) -> Any:
    """A block class's own forward, compiled: once for all blocks that are alike."""
    key = forward, repr(options)
    if key not in _compiled:
        _compiled[key] = torch.compile(forward, **options)
    return _compiled[key]


_classes: dict[tuple[type[Derived], type[nn.Module]], type[nn.Module]] = {}


def derived_class(adds: type[Derived], original: type[nn.Module]) -> type[nn.Module]:
    """The class of modules that were of this class, with what `adds` adds."""
    key = adds, original
    if key not in _classes:
        names = {"_retrograde_class": original, "__module__": original.__module__, "__doc__": original.__doc__}
        derived = type(original.__name__, (adds, original), names)
        derived.__qualname__ = original.__qualname__
        _classes[key] = derived
    return _classes[key]


def _restored(adds: type[Derived], original: type[nn.Module]) -> nn.Module:
    """An empty module of a derived class, for `pickle` and `copy` to fill."""
    derived = derived_class(adds, original)
    return derived.__new__(derived)


def place_of(module: nn.Module) -> Place | None:
    """Where a module is in a stage, if it is in one."""
    place: Place | None = module.__dict__.get(PLACE)
    return place


def install(module: nn.Module, stage: Stage, index: int, path: str, steps: int = 1) -> None:
    """Make the module a step of the stage, or several. It must have passed `check`."""
    module.__dict__[PLACE] = Place(stage, index, path, input_name(module), steps)
    module.__class__ = derived_class(Converted, type(module))


def remove(module: nn.Module) -> None:
    """Undo `install`."""
    module.__class__ = vars(type(module))["_retrograde_class"]
    del module.__dict__[PLACE]


def check_class(module: nn.Module, path: str) -> None:
    """Raise if the class of a converted block is not the one that it was given."""
    if "_retrograde_class" not in vars(type(module)):
        raise TypeError(
            f"{path} was given another class after it was converted ({type(module).__name__}; fully_shard does that). "
            "Undo that first."
        )


def check(module: nn.Module, path: str) -> None:
    """Raise if the module cannot be converted as it is."""
    if place_of(module) is not None:
        raise ValueError(f"{path} is already converted. rg.revert(model) first, to convert it another way.")
    if isinstance(module, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        raise TypeError(f"{path} is scripted. Convert the model before torch.jit.script or trace.")
    if hasattr(module, "_orig_mod"):
        raise TypeError(f"{path} is compiled. Convert the model first, then torch.compile it.")
    if "forward" in module.__dict__:
        raise TypeError(
            f"the forward of {path} was replaced on the object itself (accelerate's hooks do that). Convert before, or remove the "
            "replacement (accelerate.hooks.remove_hook_from_module) and put it back afterwards."
        )
    if getattr(module, "_compiled_call_impl", None) is not None:
        raise TypeError(f"{path} is compiled in place (module.compile()). Convert the model first, then compile it.")


def input_name(module: nn.Module) -> str:
    """The name of the first parameter of a block's forward."""
    for name, parameter in inspect.signature(module.forward).parameters.items():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return name
    return "x"
