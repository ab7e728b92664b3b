"""Two real processes on this machine, joined by gloo.

    outcomes = launch({"name": case, ...})      # case(rank) runs on both ranks; what it returns comes back
    outcomes.of("name")                         # [of rank 0, of rank 1]; fails with the child's traceback

Processes are forked from a server that has imported torch once (it runs nothing else), and many cases share a launch: importing is what
takes the seconds. Each case gets a process group of its own: when a case fails on one rank,
its sockets close, the other rank's collective fails at once, and both go on to the next case together. A case that hangs ends
by gloo's timeout, a launch in which no case is answered for `limit` seconds is ended, both well below a minute.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

Case = Callable[[int], Any]
WORLD = 2


@dataclass(frozen=True)
class Outcomes:
    """What the cases of a launch gave, by name and rank: (value, None) or (None, traceback)."""

    found: Mapping[tuple[str, int], tuple[Any, str | None]]
    exits: tuple[int | None, ...]  # exit codes; None: had to be stopped

    def of(self, name: str) -> list[Any]:
        """The values of both ranks. Fails where a rank failed or never answered."""
        problems = [problem for rank in range(WORLD) if (problem := self.error(name, rank))]
        if problems:
            pytest.fail("\n".join(problems), pytrace=False)
        return [self.found[name, rank][0] for rank in range(WORLD)]

    def error(self, name: str, rank: int) -> str | None:
        """The traceback of a rank, or what became of it."""
        if (name, rank) not in self.found:
            return f"rank {rank} gave no answer to {name!r} (exit codes {self.exits}; None: stopped, it hung)"
        problem = self.found[name, rank][1]
        return None if problem is None else f"rank {rank} in {name!r}:\n{problem}"


@dataclass(frozen=True)
class Survivor:
    """What a case returns where the other rank is not there any more."""

    error: str
    seconds: float
    value: Any = None


def launch(cases: Mapping[str, Case], *, limit: float = 45, patience: float = 20) -> Outcomes:
    """Run every case on two processes, one case after the other.

    Args:
        limit: seconds without an answer after which the processes are stopped.
        patience: seconds after which a collective that is not answered fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(["retrograde", "torch.distributed.fsdp", "torch.profiler", "pytest"])
        children = [server.Process(target=_child, args=(r, dict(cases), folder, limit, patience)) for r in range(WORLD)]
        for child in children:
            child.start()
        answers, deadline = 0, time.monotonic() + limit
        while any(child.exitcode is None for child in children) and time.monotonic() < deadline:
            multiprocessing.connection.wait(
                [child.sentinel for child in children if child.exitcode is None], timeout=0.5
            )
            if answers != (answers := len(list(folder.glob("*.[01]")))):
                deadline = time.monotonic() + limit
        exits = tuple(child.exitcode for child in children)
        for child in children:
            if child.exitcode is None:
                child.kill()
                child.join()
        found = {}
        for index, case in enumerate(cases):
            for rank in range(WORLD):
                answer = folder / f"{index}.{rank}"
                if answer.exists():
                    found[case, rank] = torch.load(answer, weights_only=False)
        return Outcomes(found, exits)


def _child(rank: int, cases: dict[str, Case], folder: Path, limit: float, patience: float) -> None:
    warnings.simplefilter("default")  # shown, not fatal: some are torch's own
    faulthandler.enable(2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    for index, case in enumerate(cases.values()):
        faulthandler.dump_traceback_later(limit - 3, file=2)  # where it hangs, if it does
        answer = _answer(rank, case, folder / f"group{index}", timedelta(seconds=patience))
        torch.save(answer, folder / f"{index}.{rank}.part")
        (folder / f"{index}.{rank}.part").rename(folder / f"{index}.{rank}")
    faulthandler.cancel_dump_traceback_later()


def _answer(rank: int, case: Case, meeting_point: Path, patience: timedelta) -> tuple[Any, str | None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=WORLD, timeout=patience
    )
    try:
        torch.manual_seed(rank)
        value = case(rank)
        if not isinstance(value, Survivor):
            dist.barrier()  # a rank that is done early must not take the group away
        return value, None
    except Exception:
        return None, traceback.format_exc()
    finally:
        dist.destroy_process_group()
