"""Feeds spoilt files to everything in segcal that reads one, and tells what did not end well.

    python tests/fuzz/fuzz.py --mutations 2000              # each target
    python tests/fuzz/fuzz.py --mutations 500 nifti config  # some
    python tests/fuzz/fuzz.py --one nifti 1234              # a finding again, with its traceback

A mutation ends well in success, or in a SegcalError of one line. Any other exception, a message of several lines, a
hang, a dead interpreter, and memory beyond what small files can ask for are findings. Mutations are drawn from
their number alone, so a finding comes back. They run in a child process with a limit on its memory; it tells which
mutation is at work, and when it dies or is silent for too long the next one goes on after that mutation.
"""

from __future__ import annotations

import argparse
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # beside this file, and helpers beside conftest.py

from targets import TARGETS, Target, check_message  # noqa: E402

SECONDS = 20  # for one mutation; the slowest takes well below one
MEMORY = 768 << 20  # beyond what the process has once everything is imported; no file here is above 100 kB


class Hang(BaseException):
    """A mutation took too long; no `except Exception` swallows it."""


class Finding(NamedTuple):
    """A mutation that did not end well."""

    target: str
    number: int
    what: str


@dataclass
class Outcome:
    """How often mutations of a target ended in what, and what did not end well."""

    ends: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)


# The child: one mutation after the other, within limits.


def _memory_ran_out(error: BaseException | None) -> bool:
    """Whether memory was asked for that the limit does not allow, even if that was turned into a sentence."""
    while error is not None:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def attempt(target: Target, path: Path, sound: bytes, number: int) -> str:
    """How one mutation ended: "success", the name of a SegcalError, or what is a finding after "!"."""
    from segcal.errors import SegcalError

    path.write_bytes(target.spoil(Random(number), sound))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        target.read(path)
        return "success"
    except SegcalError as error:
        if _memory_ran_out(error):
            return f"! memory: {error}"
        try:
            check_message(str(error))
        except AssertionError as wrong:
            return f"! message: {wrong}"
        return type(error).__name__
    except Hang:
        return f"! hang: more than {SECONDS} s"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"! {type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _raise_hang(*_: object) -> None:
    raise Hang


def child(name: str, first: int, last: int) -> None:
    """Writes the number of each mutation as it starts, and how it ended."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    report = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    target = TARGETS[name]
    with tempfile.TemporaryDirectory(prefix="segcal-fuzz-") as folder:
        path = target.write(Path(folder))
        sound = path.read_bytes()
        target.read(path)  # the sound file must do, and everything that reading needs is imported
        signal.signal(signal.SIGALRM, _raise_hang)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        for number in range(first, last):
            report.write(f"{number}\n")
            end = attempt(target, path, sound, number)
            if end.startswith("! hang"):  # or the machine stood still
                end = attempt(target, path, sound, number)
            report.write(f"{number} {end!r}\n")


def one(name: str, number: int) -> None:
    """A mutation again, in this process, with its traceback."""
    target = TARGETS[name]
    with tempfile.TemporaryDirectory(prefix="segcal-fuzz-") as folder:
        path = target.write(Path(folder))
        path.write_bytes(target.spoil(Random(number), path.read_bytes()))
        print(path.read_bytes()[:600])
        target.read(path)


# The parent: children one after the other, until all mutations are done.


def _lines(process: subprocess.Popen[bytes], patience: float) -> Iterator[str]:
    """What the child writes; ends when it does, or when it is silent for too long."""
    assert process.stdout is not None
    left = b""
    while select.select([process.stdout], [], [], patience)[0]:
        piece = os.read(process.stdout.fileno(), 1 << 16)
        if not piece:
            return
        *whole, left = (left + piece).split(b"\n")
        yield from (line.decode() for line in whole)
    process.kill()


def fuzz(name: str, mutations: int, *, first: int = 0) -> Outcome:
    """All mutations of a target."""
    outcome = Outcome()
    start, last = first, first + mutations
    while start < last:
        command = [sys.executable, __file__, "--child", name, str(start), str(last)]
        # Of glibc's arenas each reserves 64 MiB of addresses, which the limit counts.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        at_work = None
        # Starting takes seconds, of numba's compiler a minute; afterwards an alarm rings before patience ends.
        for line in _lines(process, 180):
            number, _, end = line.partition(" ")
            at_work = int(number) if not end else None
            start = int(number) + 1
            if end.startswith(("'! ", '"! ')):
                outcome.findings.append(Finding(name, int(number), end[3:-1]))
            if end:
                outcome.ends["finding" if end[1] == "!" else end[1:-1]] += 1
        _, errors = process.communicate()
        if at_work is not None:
            outcome.findings.append(Finding(name, at_work, f"the process died with {process.returncode}"))
            outcome.ends["finding"] += 1
        elif start < last:  # it ended without a mutation at work: the target itself is broken
            raise RuntimeError(f"{name} does not start:\n{errors.decode()[-2000:]}")
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--mutations", type=int, default=500, help="of each target")
    parser.add_argument("--first", type=int, default=0, help="number of the first one; others are others")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--one", nargs=2, metavar=("TARGET", "NUMBER"), help="a single mutation, with its traceback")
    options = parser.parse_args()
    if options.child:
        child(options.child[0], int(options.child[1]), int(options.child[2]))
        return 0
    if options.one:
        one(options.one[0], int(options.one[1]))
        return 0
    findings = 0
    for name in options.targets or TARGETS:
        began = time.monotonic()
        outcome = fuzz(name, options.mutations, first=options.first)
        ends = ", ".join(f"{number} {end}" for end, number in sorted(outcome.ends.items()))
        print(f"{name:15} {options.mutations} mutations, {time.monotonic() - began:.0f} s: {ends}", flush=True)
        for finding in outcome.findings[:20]:
            print(f"    {finding.number}: {finding.what}", flush=True)
        findings += len(outcome.findings)
    print(f"{findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
