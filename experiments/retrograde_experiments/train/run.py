"""`retrograde train`: one run in one folder, which the same command goes on with.

out/
  setting.json     what is trained and how: a run goes on with the same setting only
  log.jsonl        a line every few steps and after every epoch
  tensorboard/     the same
  checkpoints/     the last few
  net.safetensors  the weights at the end (of the moving average, if there is one)
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from retrograde import RangeOverflow, ReplayError
from retrograde.extras import require

from ..data import FOLDERS, load
from ..data.batches import Resident, Source
from ..data.folder import FolderBatches, load_folders
from ..errors import ExperimentError
from ..metrics import write_atomic, writing
from .checkpoints import Checkpoints
from .fit import fit
from .learner import Learner
from .logs import Clock, Line, Log, peak_bytes
from .models import build
from .parallel import World, join
from .schedule import rate_at
from .setting import Setting, fixed, parse

SETTING = "setting.json"
LATER = {"decay": "all", "graph": False}  # settings that folders of earlier versions do not name, and what they were


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
    net = build(
        setting.model, classes=source.classes, channels=source.channels, size="cifar" if small else "imagenet",
        gamma=setting.gamma, velocity=setting.velocity, memory=setting.memory, verify=setting.verify,
        overflow="nan" if setting.amp == "fp16" else "raise",
        fixed_point=setting.fixed_point,
    ).to(world.device)  # fmt: skip
    learner = Learner(net, setting, source.steps, world)
    folder = Path(setting.out)
    if world.rank == 0:
        _claim(folder, setting)
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
        with writing(folder):
            tensors = {name: t.contiguous() for name, t in {**state["net"], **state.get("average", {})}.items()}
            write_atomic(folder / "net.safetensors", require("safetensors.torch").save(tensors))
    return watcher.last


class _Run:
    """Logs and saves; on the first process only, but every process must call it."""

    def __init__(
        self, setting: Setting, learner: Learner, checkpoints: Checkpoints, saved: dict[str, Any], shown: bool
    ) -> None:
        self.setting, self.checkpoints, self.first = setting, checkpoints, learner.world.rank == 0
        self.last: dict[str, float] = {}
        self.clock, self.marked = Clock(saved.get("seconds", 0.0)), learner.done
        self.line = Line(learner.steps, setting.epochs, learner.done, shown)
        folder = Path(setting.out)
        self.log = Log(folder, saved.get("log", 0), learner.done, setting.tensorboard) if self.first else None

    def stepped(self, learner: Learner) -> None:
        if learner.done % self.setting.log_every == 0:
            self._note(learner, {})
        if self.setting.checkpoint_every and learner.done % self.setting.checkpoint_every == 0:
            self._save(learner)

    def tested(self, learner: Learner, epoch: int, values: dict[str, float]) -> None:
        self.last = values
        self._note(learner, values)
        self._save(learner)

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

    def _save(self, learner: Learner) -> None:
        state = learner.state()
        if self.log is not None:
            self.checkpoints.save(learner.done, {**state, "log": self.log.length(), "seconds": self.clock.seconds()})
        learner.world.wait()

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
        result = train(setting)
    except (ExperimentError, ModuleNotFoundError, RangeOverflow, ReplayError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        print("Stopped. The same command goes on from the last checkpoint.", file=sys.stderr)
        raise SystemExit(130) from None
    if os.environ.get("RANK", "0") == "0":
        print(
            f"test loss {result['test_loss']:.4f}, accuracy {result['accuracy']:.2f} %; weights in {setting.out}/net.safetensors"
        )
