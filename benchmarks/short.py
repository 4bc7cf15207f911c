"""A few ratios in seconds, on small tensors and one thread: fails where one is more than twice what was recorded
(four times, on another kind of processor).

    python benchmarks/short.py [--record]

It is there to notice that a loop no longer runs in vector lanes, or that a pass was added, before a release does. What
is compared runs in turn, and its time is the processor's, not the clock's, so that a busy machine does little harm;
what comes out too slow is measured again, a few times.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable

import torch
from monai.losses import DiceCELoss
from monai.metrics import calibration_binning

from losses import KINDS, softmax_and_back, there_and_back
from measure import RESULTS, alternate, write_rows
from phantom import logits_and_labels
from repeat import machine
from segcal import SegmentationLoss, bin_statistics
from segcal.kernels.numba_likelihood import NO_WEIGHTS, temperature_sums

WORST = 2.0  # times the recorded ratio
ELSEWHERE = 4.0  # the same, on another kind of processor than that of the record: ratios differ by two there
ATTEMPTS = 5
SHAPE = (1, 4, 64)
Run = Callable[[], object]


def comparisons() -> dict[str, tuple[Run, Run]]:
    """What is compared: ours, and what it is held against."""
    logits, labels = logits_and_labels(*SHAPE)
    probabilities, flat = logits.softmax(1), logits.clone().flatten(2)[0]
    one_hot = torch.nn.functional.one_hot(labels[:, 0], SHAPE[1]).movedim(-1, 1).contiguous()
    wide = -flat.double().abs()
    room = torch.empty_like(wide)
    logits.requires_grad_()
    hard, soft, sigmoid = (
        there_and_back(SegmentationLoss(binning=KINDS[kind], activation=activation), logits, labels)
        for kind, activation in (("hard", "softmax"), ("soft", "softmax"), ("hard", "sigmoid"))
    )
    dice_ce = DiceCELoss(softmax=True, to_onehot_y=True, squared_pred=True, smooth_nr=0, smooth_dr=1e-5)

    def bins(labels: torch.Tensor = labels, backend: str = "numba") -> Run:
        return lambda: bin_statistics(probabilities, labels, bins=20, backend=backend)

    def monai_bins() -> object:
        return calibration_binning(probabilities, one_hot, num_bins=20)

    def temperature() -> object:
        return temperature_sums(flat.numpy(), labels.flatten().numpy(), NO_WEIGHTS, 0.7, threads=1)

    return {
        "SegmentationLoss hard / softmax, forward and backward": (hard, softmax_and_back(logits)),
        "SegmentationLoss soft / softmax, forward and backward": (soft, softmax_and_back(logits)),
        "SegmentationLoss sigmoid / softmax, forward and backward": (sigmoid, softmax_and_back(logits)),
        "SegmentationLoss hard / DiceCELoss": (hard, there_and_back(dice_ce, logits, labels)),
        "bin_statistics / calibration_binning": (bins(), monai_bins),
        "bin_statistics one-hot labels / a label map": (bins(one_hot), bins()),
        "bin_statistics plain torch / calibration_binning": (bins(backend="torch"), monai_bins),
        "likelihood of a temperature / exp of as many float64": (temperature, lambda: torch.exp(wide, out=room)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write what this machine gives, in place of checking it")
    record = parser.parse_args().record
    torch.set_num_threads(1)
    if record:
        found = {what: recorded(*pair) for what, pair in comparisons().items()}
        write_rows("short", [{"what": what, "ratio": ratio, "processor": processor()} for what, ratio in found.items()])
        return
    with (RESULTS / "short.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    before = {row["what"]: float(row["ratio"]) for row in rows}
    times = WORST if rows[0]["processor"] == processor() else ELSEWHERE
    slow = []
    for what, pair in comparisons().items():
        ratio = attempt(*pair, limit=times * before[what])
        print(f"{what}: {ratio:.3f}, recorded {before[what]:.3f}", flush=True)
        if ratio > times * before[what]:
            slow.append(what)
    if slow:
        sys.exit(
            f"A ratio must stay below {times:g} times the recorded one; in {ATTEMPTS} attempts it did not for: "
            f"{'; '.join(slow)}. Look at what the change does to the passes; where it is meant, record it by --record."
        )


def processor() -> str:
    about = machine()
    return " ".join(map(str, (about["processor"], about["family and model"])))


def recorded(ours: Run, theirs: Run) -> float:
    return statistics.median(alternate(ours, theirs, clock=time.process_time)["ratio"] for _ in range(ATTEMPTS))


def attempt(ours: Run, theirs: Run, *, limit: float) -> float:
    """The least ratio of several attempts; the first below the limit will do."""
    least = float("inf")
    for _ in range(ATTEMPTS):
        least = min(least, alternate(ours, theirs, repetitions=9, clock=time.process_time)["ratio"])
        if least <= limit:
            break
    return least


if __name__ == "__main__":
    main()
