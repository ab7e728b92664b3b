"""`convert` and `revert`: a residual model's blocks as steps of momentum networks, in place, and back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from ..arithmetic.fixed import FixedPoint
from ..arithmetic.ratio import as_ratios
from ..memory.budget import Scheduler
from ..memory.modes import MODES, Budget, parse_memory
from ..nets.checks import choice
from ..nets.relu import DEEPEST, branch_of
from ..nets.saved import written
from ..reverse.checks import CHOICES as VERIFY
from ..reverse.range import holders
from ..reverse.recurrence import gamma_of, recurrence_of
from . import block as blocks
from . import saved
from .deploy import undeploy
from .distance import Trial, check_auto
from .find import CONTAINERS, Finding, Run, find, looked_at, named
from .probe import confirm, probe
from .schedule import schedule_by, unschedule
from .split import steps_of
from .stage import Settings, Stage

GAMMA = Fraction(1, 8)
"""γ where neither the caller nor the model says."""
NESTED = "_retrograde_nested"
_CHOICES: dict[str, tuple[Any, ...]] = {
    "form": ("block", "branch", "relu"), "velocity": (None, "first"), "memory": MODES, "verify": VERIFY,
    "overflow": ("raise", "nan"),
}  # fmt: skip


def convert(
    model: nn.Module, example: Any = None, *, gamma: Any = None, stages: Sequence[str] | str | None = None,
    form: str | None = None, velocity: str | None = None, memory: str | int | float = "auto",
    fixed_point: str | FixedPoint = "auto", verify: str = "auto", overflow: str = "raise",
    split: bool = False,
) -> nn.Module:  # fmt: skip
    """Run the residual stages of a model as momentum networks: the same object, parameters and `state_dict`.

    Blocks of torchvision, timm, transformers and PyTorch itself are known; other models are tried out on an example, or
    their stages are named. Blocks that change the shape of their input stay what they are; unless memory is "store" they
    are run again in backward, from their kept input. `block.compile()` of a converted block compiles its own code in its steps.

    Args:
        model: any model. It is changed in place.
        example: what the model is called with: a tensor, a tuple of arguments, or a dictionary of keyword arguments.
            With one, the model is run once to see which blocks follow one another and keep their shape.
        gamma: γ in [0, 1]; one per step, if a single stage is converted. 1/8 changes a trained network little, and keeps 3 bits an
            element and block; 0 changes nothing, and cannot be reversed. "auto" takes the largest of 1/2, 1/4, … 1/256 at which the
            outputs on the example, which is run on a copy of the model, stay near those of the plain model: see `distance`. None: the
            one that the model was saved with, if its transformers config has it (as then `stages` and `velocity`), else 1/8. Another
            one than that is taken with a warning.
        stages: paths of containers (`nn.Sequential`, `nn.ModuleList`), or patterns for containers or for blocks, to be taken
            instead of what is found.
        form: "block": the blocks return x + f(x); "branch": they return f(x), and the model adds it to x; "relu": they return
            relu(x + f(x)), as those of ResNets, and the steps form the sum and the relu: the same network as with "block", in fewer
            passes over memory; one bit an element and block is kept besides. None: "branch" where a try on the example shows it,
            "relu" for stages whose blocks are all known to be of that kind (`branch_of`) and at most 64, else "block"; in a step in
            which that no longer holds, because of a hook on the relu say, the block is run as with "block".
        velocity: None for v₀ = 0, "first" for v₀ = f(x₀) of each stage's first block.
        memory: as in `MomentumNet`. A budget is for a training step of the whole model, at its highest point, above parameters,
            gradients and batch. The quickest plan within it is taken: blocks keep their inputs or their tensors, and are not
            reversed or not run again. What is needed is found by a step on a copy of the model without values; where that cannot
            be run, from the first real step. Code that keeps tensors outside of modules, in global caches, cannot be copied.
        fixed_point, verify, overflow: as in `MomentumNet`.
        split: attention and MLP of transformer layers as steps of their own: another momentum network, of twice as many blocks, that
            needs less memory where sequences are long. Layers that do not add one after the other to x are left whole: see `split`.

    Returns:
        The model.

    Raises:
        ValueError: nothing to convert or to split, a path that does not exist, blocks that change their shape, a model already
            converted, no γ that is near enough. The model is left as it was.
        TypeError: a scripted or compiled model.

    >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    >>> model = convert(nn.TransformerEncoder(layer, 6))
    >>> model(torch.randn(2, 5, 16)).sum().backward()
    """
    mode, budget = parse_memory(memory)
    settings = Settings(gamma, form or "block", velocity, mode, fixed_point, verify, overflow, insists=form is not None)
    check_settings(settings, model, example)
    finding = look(model, example, stages, form, split)
    if isinstance(gamma, str):
        settings = replace(settings, gamma=trial(model, example, finding, settings).nearest())
    for run in finding.runs:
        if gamma is None or run.gamma is None:
            continue
        asked, was = (gamma_of(recurrence_of(g, run.steps, run.form, False)) for g in (settings.gamma, run.gamma))
        if asked != was:
            warnings.warn(
                f"the stage {run.name!r} was saved with gamma = {written(was)}, and is converted with gamma = {gamma}, as asked: "
                "that is another network. Leave gamma out to have the one that was saved.",
                stacklevel=2,
            )
            break
    place(model, finding, settings, budget)
    if _has_config(model):
        saved.write(model)
    return model


def look(
    model: nn.Module,
    example: Any = None,
    stages: Sequence[str] | str | None = None,
    form: str | None = None,
    split: bool = False,
) -> Finding:
    """Which blocks `convert` would convert, checked. Nothing is changed."""
    check_model(model)
    check_example(example)
    modules = dict(model.named_modules(remove_duplicate=False))
    converted = [path for path, module in modules.items() if blocks.place_of(module) is not None]
    known = saved.runs(model) if _has_config(model) and not converted else ()
    if stages is not None:
        finding = named(model, stages, "branch" if form == "branch" else "block")
        if len({run.gamma for run in known}) == 1:
            runs = tuple(replace(run, gamma=known[0].gamma) for run in finding.runs)
            finding = replace(finding, runs=runs)
        if example is not None:
            finding = confirm(model, example, finding)
    elif known:
        inside = {path for run in known for path in run.blocks}
        finding = Finding(known, tuple(left for left in find(model).left if left.path not in inside))
    else:
        finding = find(model)
        if not finding.runs and example is not None:
            finding = probe(model, example)
    if not finding.runs:
        if converted:
            raise ValueError(
                f"this model is already converted ({len(converted)} blocks). rg.revert(model) first, to do it another way."
            )
        advice = (
            ", or pass an example input to try the model out on: rg.convert(model, example)" if example is None else ""
        )
        raise ValueError(
            f"found no run of two or more residual blocks to convert in {type(model).__name__}. Looked at:\n{looked_at(model)}\n"
            f"Name the stages, stages=['path.of.blocks']{advice}."
        )
    nets = list(holders(model))
    if nets:
        finding = _not_reversible(finding, modules, nets, every=stages is not None)
    for run in finding.runs:
        for path in run.blocks:
            blocks.check(modules[path], path)
    runs = finding.runs
    if form in (None, "relu"):
        runs = tuple(_rectified(run, modules, form) for run in runs)
    runs = tuple(_split(run, modules) if split or run.split else run for run in runs)
    if split and not any(run.split for run in runs):
        raise ValueError(
            f"split=True, and there is no layer to split. {'; '.join(dict.fromkeys(run.whole for run in runs))}."
        )
    return replace(finding, runs=runs)


def _has_config(model: nn.Module) -> bool:
    """Whether there may be a config that says how a model is converted."""
    return any("config" in module.__dict__ for module in model.modules())


def trial(
    model: nn.Module, example: Any, finding: Finding, settings: Settings, autocast: torch.dtype | None = None
) -> Trial:
    """The outputs on the example at any γ, with what was found converted."""
    way = replace(settings, memory="store")
    return Trial(model, example, lambda copied, gamma: place(copied, finding, replace(way, gamma=gamma)), autocast)


def _not_reversible(
    finding: Finding, modules: dict[str, nn.Module], nets: list[tuple[str, Any]], every: bool
) -> Finding:
    """Without what is a reversible network's already. Raise if nothing is left, or if `every` run was asked for."""
    known = {block: f"{name} ({type(net).__name__})" for name, net in nets for block in getattr(net, "blocks", ())}
    taken = {run: path for run in finding.runs for path in reversed(run.blocks) if modules[path] in known}  # the first
    if taken and (every or len(taken) == len(finding.runs)):
        path = next(iter(taken.values()))
        raise ValueError(
            f"{path} is a block of a reversible network already, {known[modules[path]]}. Build the plain network (gamma=None) to "
            "convert it or to plan its conversion, or name other stages."
        )
    inside = tuple(f"{name}." for name, _ in nets)
    left = tuple(other for other in finding.left if not other.path.startswith(inside))
    return Finding(tuple(run for run in finding.runs if run not in taken), left)


def _rectified(run: Run, modules: dict[str, nn.Module], form: str | None) -> Run:
    """The run in form "relu", if its blocks are, and not too many; raise if they are not and that was asked for."""
    other = next((path for path in run.blocks if run.form != "block" or branch_of(modules[path]) is None), None)
    if other is None:
        return replace(run, form="relu") if form is not None or len(run.blocks) <= DEEPEST else run
    if form is not None:
        cls = type(modules[other])
        raise ValueError(
            f"{other}, a {cls.__module__}.{cls.__name__}, is not known to compute relu(x + f(x)), which form='relu' needs: its "
            "submodules one after another, x added, and a plain nn.ReLU, the last one without hooks. Use form='block', or None."
        )
    return run


def _split(run: Run, modules: dict[str, nn.Module]) -> Run:
    """The run with its layers in steps, where they can be."""
    if run.form != "block":
        return replace(run, whole=f"{run.name}: form is {run.form!r}")
    found = {path: steps_of(modules[path]) for path in run.blocks}
    whole = "; ".join(dict.fromkeys(why for _, why in found.values() if why))
    steps = sum(found[path][0] for path in run.blocks) * run.steps // len(run.blocks)
    return replace(run, steps=steps, split=steps > run.steps, whole=whole)


def place(model: nn.Module, finding: Finding, settings: Settings, budget: Budget | None = None) -> None:
    """Convert what was found."""
    modules = dict(model.named_modules(remove_duplicate=False))
    plans: list[tuple[Stage, dict[str, int]]] = []  # with the blocks of each, and how many steps they are
    for run in finding.runs:
        distinct: dict[nn.Module, str] = {}
        for path in run.blocks:
            distinct.setdefault(modules[path], path)
        steps = {path: steps_of(block)[0] if run.split else 1 for block, path in distinct.items()}
        gamma = next(g for g in (settings.gamma, run.gamma, GAMMA) if g is not None)
        velocity = settings.velocity or run.velocity
        own = replace(settings, form=run.form, gamma=gamma, velocity=velocity, split=run.split)
        plans.append((Stage(run.name, sum(steps.values()), run.steps, own, trusted=run.trusted), steps))
    plain = Settings(0, memory="auto" if settings.memory == "reverse" else settings.memory, verify=settings.verify)
    for left in finding.left if settings.memory != "store" else ():
        if blocks.place_of(modules[left.path]) is None:
            blocks.check(modules[left.path], left.path)
            plans.append((Stage(left.path, 1, 1, plain, checkpointed=True), {left.path: 1}))
    installed: list[nn.Module] = []
    try:
        for stage, steps in plans:
            index = 0
            for path, taken in steps.items():
                blocks.install(modules[path], stage, index, path, taken)
                installed.append(modules[path])
                index += taken
    except BaseException:
        for module in installed:
            blocks.remove(module)
        raise
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and blocks.place_of(module.layers[0]) is not None:
            module.__dict__.setdefault(NESTED, module.use_nested_tensor)
            module.use_nested_tensor = False  # a step needs rows of one length
    scheduler = None if budget is None else Scheduler(budget, outputs=2)
    stacks = [stage.stack for stage in stages_of(model)]
    for stack in stacks:
        stack.owner, stack.planned = scheduler, None
    if scheduler is not None:
        schedule_by(scheduler, model, stacks)


def revert(model: nn.Module) -> nn.Module:
    """Undo `convert` and `deploy`: every block is of its own class again, and runs as it did. A config no longer says otherwise.

    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 6)
    >>> type(revert(convert(model)).layers[0]) is nn.TransformerEncoderLayer
    True
    """
    converted = [(path, module) for path, module in model.named_modules() if blocks.place_of(module) is not None]
    for path, module in converted:
        blocks.check_class(module, path)
    was_saved = saved.forget(model)
    if not (undeploy(model) or converted or was_saved):
        raise ValueError(f"this {type(model).__name__} is not converted.")
    for _, module in converted:
        blocks.remove(module)
    for module in model.modules():
        if NESTED in module.__dict__:
            module.use_nested_tensor = module.__dict__.pop(NESTED)
    unschedule(model)
    return model


def stages_of(model: nn.Module) -> list[Stage]:
    """The stages of a converted model, in the order of its blocks."""
    places = (blocks.place_of(module) for module in model.modules())
    return list(dict.fromkeys(place.stage for place in places if place is not None))


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module; got {type(model).__name__}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("a scripted model cannot be converted. Convert the model before torch.jit.script or trace.")
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise TypeError("a compiled model cannot be converted. Convert the model first, then torch.compile it.")
    if isinstance(model, CONTAINERS) and not len(model):
        raise ValueError("the model is empty.")


def check_example(example: Any) -> None:
    if isinstance(example, int | float | str | Fraction):
        raise TypeError(
            "example must be what the model is called with: a tensor, a tuple of arguments or a dictionary of keyword arguments; "
            f"got {example!r}. γ is given by its name: gamma={example!r}."
        )


def check_settings(settings: Settings, model: nn.Module, example: Any) -> None:
    """Raise for an option that there is not."""
    for name, allowed in _CHOICES.items():
        choice(name, getattr(settings, name), allowed)
    if isinstance(settings.gamma, str):
        check_auto(settings.gamma, model, example)
    if isinstance(settings.gamma, int | float):
        as_ratios(settings.gamma, 1)
