"""SegmentationLoss and bin_statistics against MONAI and against what any machine has; memory beyond the logits.

Two yardsticks transfer between machines: torch's softmax forward and backward for a loss, which reads the logits and
writes as large a gradient, and the sum of a tensor for binning, which reads it once.
"""

from __future__ import annotations

import torch
from monai.losses import DiceCELoss
from monai.metrics import calibration_binning

from measure import alternate, peak_bytes, write_rows
from phantom import logits_and_labels
from segcal import ACELoss, Binning, SegmentationLoss, bin_statistics

SHAPES = ((2, 4), (1, 16))
LOSS_MUST = {(2, 4): "<= 0.40", (1, 16): "<= 0.25"}
BINNING_MUST = {(2, 4): f"<= {1 / 12:.3f}", (1, 16): f"<= {1 / 18:.3f}"}
KINDS = {"hard": Binning(20), "soft": Binning(20, kernel="triangular")}


def there_and_back(loss, logits, labels):
    """A loss and its gradient, as what can be timed."""

    def run():
        logits.grad = None
        loss(logits, labels).backward()

    return run


def softmax_and_back(logits):
    """What a loss cannot do without: the yardstick that any machine has."""
    upstream = torch.rand(logits.shape, generator=torch.Generator().manual_seed(0))

    def run():
        logits.grad = None
        logits.softmax(1).backward(upstream)

    return run


def named(what: str, shape: tuple[int, int], must: str) -> dict[str, object]:
    return {"what": what, "data": f"{shape[0]}x{shape[1]}x96^3", "must": must}


def losses() -> list[dict[str, object]]:
    monai = DiceCELoss(softmax=True, to_onehot_y=True, squared_pred=True, smooth_nr=0, smooth_dr=1e-5)
    rows: list[dict[str, object]] = []
    for shape in SHAPES:
        logits, labels = logits_and_labels(*shape)
        logits.requires_grad_()
        for kind, binning in KINDS.items():
            ours = there_and_back(SegmentationLoss(binning=binning), logits, labels)
            theirs = there_and_back(monai, logits, labels)
            what = f"SegmentationLoss {kind}"
            rows.append(named(f"{what} / DiceCELoss", shape, LOSS_MUST[shape]) | alternate(ours, theirs))
            times = alternate(ours, softmax_and_back(logits))
            rows.append(named(f"{what} / softmax, forward and backward", shape, "<= 1.5") | times)
        for kernel in ("hard", "triangular"):
            many, few = (there_and_back(ACELoss(Binning(n, kernel=kernel)), logits, labels) for n in (100, 5))
            rows.append(named(f"ACELoss {kernel} 100 bins / 5 bins", shape, "<= 1.2") | alternate(many, few))
    return rows


def binning() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for shape in SHAPES:
        logits, labels = logits_and_labels(*shape)
        probabilities = logits.softmax(1)
        one_hot = torch.nn.functional.one_hot(labels[:, 0], shape[1]).movedim(-1, 1).contiguous()
        bytes_ = one_hot.byte()

        def ours(labels=labels, backend="numba", probabilities=probabilities):
            return lambda: bin_statistics(probabilities, labels, bins=20, backend=backend)

        def theirs(probabilities=probabilities, one_hot=one_hot):
            return calibration_binning(probabilities, one_hot, num_bins=20)

        for what, must, times in (
            ("numba / calibration_binning", BINNING_MUST[shape], alternate(ours(), theirs)),
            ("plain torch / calibration_binning", "<= 1.0", alternate(ours(backend="torch"), theirs)),
            ("one-hot int64 labels / a label map", "<= 1.3", alternate(ours(one_hot), ours())),
            ("one-hot uint8 labels / a label map", "<= 1.3", alternate(ours(bytes_), ours())),
            ("numba / tensor.sum()", "", alternate(ours(), probabilities.sum)),
        ):
            rows.append(named(f"bin_statistics {what}", shape, must) | times)
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
