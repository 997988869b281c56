"""What the workers of a world leave for one another in the store, for when one of them is missed.

One writer per key, but for `failed` and `call`:

    left/R    by worker R when it leaves: it has finished, or what it has raised
    failed    by a worker that leaves because of an error: the rank of the worker whose it was, so that those who wait
              give up although its connections may stay open (see group.py)
    ended/R   by a launcher that serves the store: how the process of worker R has ended
    call      by a worker whose connection broke, or whose deadline has passed
    here/R    the answer of worker R to the call: what it waits in, given between two slices of its own wait, or when
              its own wait fails
    at/R      where the main thread of worker R is, by its listener: a thread that looks for the call every second,
              and reads Python frames and nothing else. It also writes the stack to stderr

A worker that is neither waiting nor gone does not answer: it is named as not answering, not as dead. A store whose
server is stopped answers no worker, ever: it is asked from a thread, so that every wait still ends.
"""

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lockstep import frames

ANSWER = timedelta(seconds=2)
"""How long the store may take for an answer."""
LOOK_S = 1.0
"""How often the listener looks for a call."""
FINISHED = "has finished: its program came to its end"
RAISED = "raised"
"""Begins the last word of a worker that leaves because of an error."""
_MOST_CHARACTERS = 300
"""How much of an error's first line is told to others."""


def farewell() -> str:
    """How this worker leaves, for others: it has finished, or has raised what Python is about to end with."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if error is None or isinstance(error, SystemExit):
        return FINISHED
    line = "".join(traceback.format_exception_only(error)).partition("\n")[0].removeprefix("lockstep.errors.")
    return f"{RAISED} {line[:_MOST_CHARACTERS]}"


class Unheard(RuntimeError):
    """The store does not answer, as one whose server is stopped."""


class Notices:
    """One worker's side of the notices. Without a store, as in a world of one, there are none."""

    def __init__(self, store: dist.Store | None, rank: int) -> None:
        self.store = store
        self._rank = rank
        self._asking: threading.Thread | None = None
        """The thread that asks the store; alive while it does not answer."""
        self._has_left = threading.Event()
        self._listener: threading.Thread | None = None

    @property
    def are_unheard(self) -> bool:
        """Whether the store owes an answer."""
        return self._asking is not None and self._asking.is_alive()

    def get(self, key: str) -> str:
        """What the store holds there; empty if nothing, or if it does not answer."""
        store = self.store
        try:
            return str(self._ask(lambda: store.get(key).decode() if store.check([key]) else "")) if store else ""
        except RuntimeError:
            return ""

    def farewell(self, rank: int) -> str:
        """How a worker that is gone left or ended, as it or its launcher told; empty if neither did."""
        left, ended = self.get(f"left/{rank}"), self.get(f"ended/{rank}")
        return left if left.startswith(RAISED) else ended or left

    def is_store_there(self) -> bool:
        """Whether the store answers."""
        try:
            self._is_called()
        except RuntimeError:
            return False
        return True

    def call(self, doing: str) -> None:
        """Ask all workers to say where they are, and say it of this one."""
        with contextlib.suppress(RuntimeError):
            self._set("call", "1")
            self._set(f"here/{self._rank}", doing)

    def answer(self, doing: str) -> None:
        """Say what this worker is doing, if it has been asked for. Raises RuntimeError if the store is gone."""
        with contextlib.suppress(Unheard):  # Its server is stopped; the wait that this is part of has a deadline.
            if self._is_called():
                self._set(f"here/{self._rank}", doing)

    def listen(self, is_waiting: Callable[[], bool]) -> None:
        """From now on, tell those who call where this worker is, whatever it does.

        is_waiting: whether the main thread is in a wait of its own, which will end with an error and a stack.
        """
        if self.store is not None:
            self._listener = threading.Thread(
                target=self._listen, args=(self.store, is_waiting), name="lockstep-listener", daemon=True
            )
            self._listener.start()

    def leave(self, text: str, culprit: int | None) -> None:
        """Tell those who may still wait that this worker has left and how, and whose fault it was."""
        with contextlib.suppress(RuntimeError):  # Where the store's host is gone too, there is nobody left to tell.
            self._set(f"left/{self._rank}", text)
            if culprit is not None and not self.get("failed"):
                self._set("failed", str(culprit))
        self._has_left.set()
        if self._listener is not None:  # One that is in the store when the interpreter ends would abort the process.
            self._listener.join(ANSWER.total_seconds())

    def retire(self) -> None:
        """Listen no more, and say nothing."""
        self._has_left.set()

    def _listen(self, store: dist.Store, is_waiting: Callable[[], bool]) -> None:
        with contextlib.suppress(RuntimeError):  # The store is gone: so is its server, and waits say that.
            while not self._has_left.wait(LOOK_S):
                if store.check(["call"]):
                    stack = frames.main_stack()
                    place = frames.at(frames.own_frame(stack))
                    store.set(f"at/{self._rank}", place)
                    if not is_waiting():
                        said = f"lockstep: the others wait for worker {self._rank}, which is at {place}:\n"
                        sys.stderr.write(said + frames.listing(stack))
                        sys.stderr.flush()
                    return

    def _is_called(self) -> bool:
        store = self.store
        return store is not None and bool(self._ask(lambda: store.check(["call"])))

    def _set(self, key: str, value: str) -> None:
        store = self.store
        if store is not None:
            self._ask(lambda: store.set(key, value))

    def _ask(self, question: Callable[[], Any]) -> Any:
        """What the store answers; RuntimeError if it fails, Unheard if it does not answer in time."""
        answers: list[Any] = []

        def ask() -> None:
            try:
                answers.append(question())
            except RuntimeError as error:
                answers.append(error)

        if not self.are_unheard:
            self._asking = threading.Thread(target=ask, name="lockstep-asking", daemon=True)
            self._asking.start()
            self._asking.join(ANSWER.total_seconds())
        if not answers:
            raise Unheard("the store does not answer")
        if isinstance(answers[0], RuntimeError):
            raise answers[0]
        return answers[0]
