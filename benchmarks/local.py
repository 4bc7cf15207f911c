"""A local temperature against one softmax of the same logits: applied to a volume, and a step of its fit."""

from __future__ import annotations

import time

import torch

from measure import alternate, write_rows
from phantom import logits_and_labels
from segcal import make_calibrator

SETTINGS = {"local-temperature": {}, "local-temperature, smoothing": {"smoothing": True}}
STEPS = 20
SEEN = 4 * 98_304  # voxels in a step of four classes


def there_and_back(logits: torch.Tensor) -> None:
    logits.grad = None
    logits.softmax(0).backward(torch.ones_like(logits))


def main() -> None:
    logits, labels = logits_and_labels(6, 4)
    cases = [(one, label[0].long()) for one, label in zip(logits, labels, strict=True)]
    rows: list[dict[str, object]] = []
    for name, settings in SETTINGS.items():
        calibrator = make_calibrator("local-temperature", steps=5, **settings).fit(cases)
        volume = logits[0]
        rows.append(
            {"what": f"{name}, transform / softmax", "data": "4x96^3", "must": "<= 3"}
            | alternate(lambda c=calibrator, v=volume: c.transform(v), lambda v=volume: v.softmax(0))
        )
    sample = logits.movedim(1, 0).flatten(1)[:, :SEEN].clone().requires_grad_()
    for name, settings in SETTINGS.items():
        seconds = []
        for steps in (5, 5 + STEPS):  # the difference leaves out the drawing
            start = time.perf_counter()
            make_calibrator("local-temperature", steps=steps, **settings).fit(cases)
            seconds.append(time.perf_counter() - start)
        step = (seconds[1] - seconds[0]) / STEPS
        softmax = alternate(lambda: there_and_back(sample), lambda: None)["ours_s"]
        rows.append(
            {"what": f"{name}, step of a fit / softmax and back", "data": f"{SEEN} voxels", "must": ""}
            | {"ours_s": step, "theirs_s": softmax, "ratio": step / softmax, "ratio_q1": "", "ratio_q3": ""}
        )
    write_rows("local", rows)


if __name__ == "__main__":
    main()
