"""How processes end: a command in order when it is asked to, and workers with the process that started them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import parent_process
from typing import Any

REQUESTS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
PATIENCE_S = 10.0


class Ended(KeyboardInterrupt):
    """A signal has asked this process to end; it ends as with Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """128 and the number of the signal, as a shell tells it.

    >>> exit_code(Ended(15)), exit_code(KeyboardInterrupt())
    (143, 130)
    """
    return 128 + (interrupt.number if isinstance(interrupt, Ended) else signal.SIGINT)


@contextmanager
def ending_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `Ended` meanwhile; one that is ignored (nohup) or has a handler is left alone."""
    if not _in_main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise Ended(number)

    taken = [number for number in REQUESTS if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def import_whole(name: str) -> None:
    """Import a module; signals wait until it is there, since torch cut short takes the process along with it."""
    if not _in_main_thread():
        import_module(name)
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *REQUESTS)}
    ours = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in ours:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        import_module(name)
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def start_worker() -> None:
    """For a process of multiprocessing, at its start: Ctrl-C is the parent's to handle, and it ends with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_with_stdin() -> None:
    """End this process in order once its stdin is closed, as it is when the process at its other end is gone."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE_S)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
