"""`retrograde train`: one run in one folder, which the same command goes on with.

out/
  setting.json     what is trained and how: a run goes on with the same setting only
  log.jsonl        a line every few steps and after every epoch
  tensorboard/     the same
  checkpoints/     the last few
  net.safetensors  the weights at the end (of the moving average, if there is one)
  best.safetensors those of the best test accuracy so far
  environment.jsonl  a line for every start: command, commit, versions, hardware
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import retrograde
from retrograde import RangeOverflow, ReplayError
from retrograde.extras import require

from ..data import FOLDERS, load
from ..data.batches import Resident, Source
from ..data.folder import FolderBatches, load_folders
from ..errors import ExperimentError
from ..findings import spread
from ..hardware import commit, hardware
from ..metrics import write_atomic, writing
from .checkpoints import Checkpoints
from .fit import fit
from .learner import Learner
from .logs import Clock, Line, Log, peak_bytes
from .models import build, outside, start_from
from .parallel import World, join
from .schedule import rate_at
from .setting import Setting, fixed, parse
from .sweep import Results, expanded, table

SETTING = "setting.json"
LATER = {
    "decay": "all", "graph": False, "optimizer": "sgd", "optimizer_options": [], "clip": 0.0, "init": None, "residual": "relu",
    "gamma_schedule": [],
}  # fmt: skip
"""Settings that folders of earlier versions do not name, and what they were."""
EXTENDED = ("multistep", "constant")
"""Schedules whose rates do not depend on how many epochs there are."""


def train(setting: Setting, shown: bool = True) -> dict[str, float]:
    """Train, or go on training; loss and accuracy on the test images at the end.

    Raises:
        ExperimentError: with what to do about it. A run that was there before is untouched.
    """
    world = join(setting.parallel, setting.device)
    try:
        return _train(setting, world, shown and world.rank == 0)
    finally:
        world.leave()


def _train(setting: Setting, world: World, shown: bool) -> dict[str, float]:
    if setting.resume is not None and not Path(setting.resume).is_dir():
        raise ExperimentError(
            f"--resume {setting.resume}: there is no such checkpoint. Without --resume the newest is taken."
        )
    source = source_of(setting, world)
    small = setting.data not in (*FOLDERS, "folder")
    torch.manual_seed(setting.seed)
    net = network(setting, source, small).to(world.device)
    learner = Learner(net, setting, source.steps, world)
    if setting.gamma_schedule:
        learner.gammas(setting.points())
    folder = Path(setting.out)
    if world.rank == 0:
        _claim(folder, setting)
        _note_environment(folder, world)
    world.wait()
    checkpoints = Checkpoints(folder / "checkpoints", setting.keep)
    saved = checkpoints.load(setting.resume)
    if saved is not None:
        learner.restore(saved)
    watcher = _Run(setting, learner, checkpoints, saved or {}, shown)
    try:
        fit(learner, source, watcher)
    finally:
        watcher.close()
    if not watcher.last:  # it was finished before
        watcher.last = learner.evaluate(source)
    state = learner.state()
    if world.rank == 0:
        _write_weights(folder / "net.safetensors", state)
    return watcher.last


def network(setting: Setting, source: Source, small: bool) -> nn.Module:
    """The network of a setting, with its first weights."""
    overflow = "nan" if setting.amp == "fp16" else "raise"
    common: dict[str, Any] = {
        "classes": source.classes, "gamma": setting.gamma, "velocity": setting.velocity, "memory": setting.memory,
        "verify": setting.verify, "overflow": overflow, "fixed_point": setting.fixed_point,
    }  # fmt: skip
    if ":" in setting.model:
        first = next(iter(source.test()))[0]
        net = outside(setting.model, shape=(first.shape[1], first.shape[2], first.shape[3]), **common)
    else:
        size = "cifar" if small else "imagenet"
        net = build(setting.model, channels=source.channels, size=size, residual=setting.residual, **common)
    if setting.init is not None:
        left = start_from(net, Path(setting.init))
        if left:
            print(f"not in {setting.init}, or of another shape: {', '.join(left)}", file=sys.stderr)
    return net


def _write_weights(path: Path, state: dict[str, Any]) -> None:
    with writing(path.parent):
        tensors = {name: t.contiguous() for name, t in {**state["net"], **state.get("average", {})}.items()}
        write_atomic(path, require("safetensors.torch").save(tensors))


def _note_environment(folder: Path, world: World) -> None:
    said = {
        "date": datetime.datetime.now().isoformat(timespec="seconds"), "command": shlex.join(sys.argv), "commit": commit(),
        "retrograde": retrograde.__version__, "torch": torch.__version__, "python": platform.python_version(),
        "hardware": hardware(str(world.device)), "processes": world.size,
    }  # fmt: skip
    with writing(folder), (folder / "environment.jsonl").open("a") as file:
        file.write(json.dumps(said) + "\n")


class _Run:
    """Logs and saves; on the first process only, but every process must call it."""

    def __init__(
        self, setting: Setting, learner: Learner, checkpoints: Checkpoints, saved: dict[str, Any], shown: bool
    ) -> None:
        self.setting, self.checkpoints, self.first = setting, checkpoints, learner.world.rank == 0
        self.last: dict[str, float] = {}
        self.best = saved.get("best", -1.0)
        self.clock, self.marked = Clock(saved.get("seconds", 0.0)), learner.done
        self.line = Line(learner.steps, setting.epochs, learner.done, shown)
        folder = Path(setting.out)
        self.log = Log(folder, saved.get("log", 0), learner.done, setting.tensorboard) if self.first else None

    def stepped(self, learner: Learner) -> None:
        if learner.done % self.setting.log_every == 0:
            self._note(learner, {})
        if self.setting.checkpoint_every and learner.done % self.setting.checkpoint_every == 0:
            self._save(learner, self.best)

    def tested(self, learner: Learner, epoch: int, values: dict[str, float]) -> None:
        self.last = values
        self._note(learner, values)
        state = self._save(learner, max(self.best, values["accuracy"]))
        if values["accuracy"] > self.best:
            self.best = values["accuracy"]
            if self.log is not None:
                _write_weights(Path(self.setting.out) / "best.safetensors", state)

    def _note(self, learner: Learner, values: dict[str, float]) -> None:
        loss = learner.loss()
        if loss != loss and self.setting.amp != "fp16":
            raise ExperimentError(
                f"the loss is not a number at step {learner.done}. Lower --rate (it is {self.setting.rate:g}) or add --warmup epochs; "
                "the last checkpoint is kept."
            )
        speed = (learner.done - self.marked) * self.setting.batch / self.clock.lap()
        self.marked, peak = learner.done, peak_bytes(learner.device)
        if self.log is not None:
            rate = rate_at(self.setting, learner.done - 1, learner.steps)
            said = {"epoch": -(-learner.done // learner.steps), "loss": loss, "rate": rate, **values}
            run = {"seconds": round(self.clock.seconds(), 3), "images_per_second": round(speed, 1), "peak_bytes": peak}
            self.log.add(learner.done, said, run)
        self.line.update(learner.done, loss, speed, peak, values.get("accuracy"))

    def _save(self, learner: Learner, best: float) -> dict[str, Any]:
        state = learner.state()
        if self.log is not None:
            more = {"log": self.log.length(), "seconds": self.clock.seconds(), "best": best}
            self.checkpoints.save(learner.done, {**state, **more})
        learner.world.wait()
        return state

    def close(self) -> None:
        self.line.stop()
        if self.log is not None:
            self.log.close()


def source_of(setting: Setting, world: World) -> Source:
    """The images of a setting."""
    options: dict[str, Any] = {"seed": setting.seed, "device": world.device, "rank": world.rank, "world": world.size}
    try:
        if setting.data in (*FOLDERS, "folder"):
            folders = load_folders(setting.data, setting.data_dir)
            return FolderBatches(folders, setting.batch, size=setting.image_size, workers=setting.workers, **options)
        images = load(setting.data, setting.data_dir)
        return Resident(images, setting.batch, augment=setting.augment, limit=setting.limit, **options)
    except ValueError as error:
        raise ExperimentError(str(error)) from error


def _claim(folder: Path, setting: Setting) -> None:
    """Make the folder, or see that the run in it is one of this setting."""
    path, wanted = folder / SETTING, fixed(setting)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_atomic(path, json.dumps(wanted, indent=1).encode() + b"\n")
            return
    try:
        there = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ExperimentError(f"{path} is damaged ({error}). Restore it, or use another folder (--out).") from error
    if not isinstance(there, dict):
        raise ExperimentError(f"{path} is not the setting of a run. Restore it, or use another folder (--out).")
    there = LATER | there
    if wanted["epochs"] > there["epochs"] and wanted == {**there, "epochs": wanted["epochs"]}:
        if setting.schedule not in EXTENDED:
            raise ExperimentError(
                f"{folder} holds a run of {there['epochs']} epochs whose rate follows {setting.schedule}, which depends on their "
                f"number: it cannot go on to {wanted['epochs']}. Take another folder (--out) and --init {folder / 'net.safetensors'}, "
                f"or train with --schedule {' or '.join(EXTENDED)}, whose runs can. Nothing was changed."
            )
        with writing(folder):
            write_atomic(path, json.dumps(wanted, indent=1).encode() + b"\n")
        return
    differ = [f"{k} is {there.get(k)!r} there and {wanted[k]!r} here" for k in wanted if there.get(k) != wanted[k]]
    if differ:
        raise ExperimentError(
            f"{folder} holds a run of another setting: {'; '.join(differ)}. Use another folder (--out), or delete that one. "
            "Nothing was changed."
        )


def main(arguments: list[str] | None = None, prog: str = "retrograde train") -> None:
    """The command line: parse, train, say what came out."""
    setting = parse(arguments, prog)
    try:
        points = expanded(setting)
    except ValueError as error:
        sys.exit(f"error: {error}")
    found: list[tuple[Setting, Results | str]] = []
    try:
        for point in points:
            try:
                found.append((point, [train(run) for run in _runs(point)]))
            except (ExperimentError, ModuleNotFoundError, RangeOverflow, ReplayError) as error:
                if not setting.sweep:
                    sys.exit(str(error))
                print(f"{point.out}: {error}", file=sys.stderr)
                found.append((point, str(error)))  # the others go on
    except KeyboardInterrupt:
        print("Stopped. The same command goes on from the last checkpoint.", file=sys.stderr)
        raise SystemExit(130) from None
    if os.environ.get("RANK", "0") != "0":
        return
    if setting.sweep:
        print(table(found))
    else:
        print(_said(points[0], found[0][1]))
    if any(isinstance(results, str) for _, results in found):
        raise SystemExit(1)


def _runs(setting: Setting) -> list[Setting]:
    """One for each seed."""
    if not setting.seeds:
        return [setting]
    return [replace(setting, seed=s, seeds=(), out=str(Path(setting.out) / f"seed-{s}")) for s in setting.seeds]


def _said(setting: Setting, results: Results | str) -> str:
    assert not isinstance(results, str)
    loss, right, near = (
        spread([r[name] for r in results], form)
        for name, form in (("test_loss", ".4f"), ("accuracy", ".2f"), ("top5", ".2f"))
    )
    places = ", ".join(f"{run.out}/net.safetensors" for run in _runs(setting))
    return f"test loss {loss}, accuracy {right} %, top-5 {near} %; weights in {places}"
