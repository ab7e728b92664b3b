"""A step that is stopped leaves no trace, wherever it is stopped: at every place at which Python looks for signals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from interrupted import KINDS, Subject, network, prepared


class Everywhere:
    """Raises KeyboardInterrupt at the n-th place: where a Python function begins, or a function in C has returned."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_return"):
            self.left -= 1
            if not self.left:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def stops(self, job: Callable[[], Any]) -> bool:
        """Whether there were so many places."""
        stopped = True
        sys.setprofile(self)
        try:
            job()
            stopped = False
        except KeyboardInterrupt:
            pass
        except RuntimeError as error:  # out of a Function's backward
            if "Interrupt" not in str(error):
                raise
        finally:
            sys.setprofile(None)
        return stopped


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
@pytest.mark.parametrize("converted", [False, True])
def test_a_step_stopped_anywhere_leaves_no_trace(
    converted: bool, memory: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)  # in a destructor
    subject, at, stride = (
        Subject(network(memory, converted, 2, 2), torch.randn(2, 2, 3, 3)),
        1,
        1 if kind != "step" else 2,
    )
    if kind == "autocast":
        prepared(subject, kind)()
        subject.moved = {name: b.clone() for name, b in subject.net.named_buffers()}
    while True:
        job = prepared(subject, kind)
        places = torch.get_rng_state()
        stopped = Everywhere(at).stops(job)
        assert subject.wrong() == "", at
        assert kind == "step" or torch.equal(torch.get_rng_state(), places), at
        subject.net.train()
        subject.note()
        if not stopped:
            break
        at += stride
    assert at > 50
    assert subject.next_step_differs() == ""
