"""SegmentationLoss and bin_statistics against MONAI: time, and memory beyond the logits."""

from __future__ import annotations

import torch
from monai.losses import DiceCELoss
from monai.metrics import calibration_binning

from measure import alternate, peak_bytes, write_rows
from phantom import logits_and_labels
from segcal import ACELoss, Binning, SegmentationLoss, bin_statistics

SHAPES = ((2, 4), (1, 16))
HARD, SOFT = Binning(20), Binning(20, kernel="triangular")


def there_and_back(loss, logits, labels):
    logits.grad = None
    loss(logits, labels).backward()


def losses() -> list[dict[str, object]]:
    monai = DiceCELoss(softmax=True, to_onehot_y=True, squared_pred=True, smooth_nr=0, smooth_dr=1e-5)
    rows: list[dict[str, object]] = []
    for cases, classes in SHAPES:
        logits, labels = logits_and_labels(cases, classes)
        logits.requires_grad_()

        def ours(loss, logits=logits, labels=labels):
            return lambda: there_and_back(loss, logits, labels)

        for name, must, loss in (
            ("SegmentationLoss hard / DiceCELoss", 0.5, SegmentationLoss(binning=HARD)),
            ("SegmentationLoss soft / DiceCELoss", 0.6, SegmentationLoss(binning=SOFT)),
        ):
            rows.append(
                {"what": name, "data": f"{cases}x{classes}x96^3", "must": f"<= {must}"}
                | alternate(ours(loss), ours(monai))
            )
        for kernel in ("hard", "triangular"):
            many, few = (ACELoss(Binning(bins, kernel=kernel)) for bins in (100, 5))
            rows.append(
                {"what": f"ACELoss {kernel} 100 bins / 5 bins", "data": f"{cases}x{classes}x96^3", "must": "<= 1.2"}
                | alternate(ours(many), ours(few))
            )
    return rows


def binning() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for cases, classes in SHAPES:
        logits, labels = logits_and_labels(cases, classes)
        probabilities = logits.softmax(1)
        one_hot = torch.nn.functional.one_hot(labels[:, 0], classes).movedim(-1, 1).contiguous()
        for name, must, backend in (("numba", "<= 0.125", "numba"), ("plain torch", "<= 1.5", "torch")):
            times = alternate(
                lambda b=backend, p=probabilities, y=labels: bin_statistics(p, y, bins=20, backend=b),
                lambda p=probabilities, y=one_hot: calibration_binning(p, y, num_bins=20),
            )
            what = f"bin_statistics {name} / calibration_binning"
            rows.append({"what": what, "data": f"{cases}x{classes}x96^3", "must": must} | times)
    return rows


MEMORY = """
import sys
sys.path.insert(0, {folder!r})
import torch
from phantom import logits_and_labels
{imports}
loss = {loss}
for size in (16, 64):  # warm up: imports, compiled code, threads
    small, small_labels = logits_and_labels({cases}, {classes}, size)
    loss(small.requires_grad_(), small_labels).backward()
logits, labels = logits_and_labels({cases}, {classes})
logits.requires_grad_()
# measured from here
loss(logits, labels).backward()
"""


def memory() -> list[dict[str, object]]:
    from pathlib import Path

    rows: list[dict[str, object]] = []
    ours = "from segcal import SegmentationLoss, Binning"
    monai = "DiceCELoss(softmax=True, to_onehot_y=True, squared_pred=True, smooth_nr=0, smooth_dr=1e-5)"
    for cases, classes in SHAPES:
        for what, must, imports, loss in (
            ("DiceCELoss", "", "from monai.losses import DiceCELoss", monai),
            ("SegmentationLoss hard", "<= 2.3", ours, "SegmentationLoss()"),
            ("SegmentationLoss soft", "<= 2.3", ours, "SegmentationLoss(binning=Binning(20, 'triangular'))"),
            ("SegmentationLoss soft, 100 bins", "<= 2.3", ours, "SegmentationLoss(binning=Binning(100, 'triangular'))"),
            (
                "SegmentationLoss soft, plain torch",
                "<= 2.3",
                ours,
                "SegmentationLoss(binning=Binning(20, 'triangular'), backend='torch')",
            ),
        ):
            code = MEMORY.format(
                folder=str(Path(__file__).parent), imports=imports, loss=loss, cases=cases, classes=classes
            )
            size = cases * classes * 96**3 * 4
            rows.append(
                {"what": what, "data": f"{cases}x{classes}x96^3", "must": must, "times_logits": peak_bytes(code) / size}
            )
    return rows


if __name__ == "__main__":
    write_rows("losses", losses())
    write_rows("binning", binning())
    write_rows("memory", memory())
