"""The main job in one command: train with and without the calibration term, calibrate, evaluate, compare, report.

On images made on the spot, whose true probabilities are known, or on a Decathlon task of the user's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from segcal.comparison import Comparison, compare
from segcal.config import make_config
from segcal.datasets import make_phantom
from segcal.errors import SegcalError
from segcal.evaluation import Evaluation
from segcal.report import build_report
from segcal.runs import Run, evaluate_run, load_run
from segcal.scaling import Calibrator, Temperature
from segcal.tables import write_comparison
from segcal.training import train

METHODS = ("dice-ce", "hard-ace", "soft-ace")
BASELINE, SCALED = "dice-ce", "dice-ce, temperature"
# Of the phantom's patches, two thirds of an image wide, an epoch takes a third of a second on two cores.
PHANTOM_CHANGES = (
    "data.patch=[32, 32, 32]",
    "data.inference_patch=[48, 48, 32]",
    "training.batch_size=4",
    "training.epochs=120",
    "training.validate_every=20",
)


class DemoResult(NamedTuple):
    """What was found on the test cases, and the page that shows it."""

    comparison: Comparison
    report: Path
    temperature: float


def run_demo(
    out: str | os.PathLike[str],
    *,
    dataset: str | os.PathLike[str] | None = None,
    epochs: int | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> DemoResult:
    """Train each method on the phantom (or on a Decathlon task), and compare them on its test cases.

    Everything is kept in `out`; started again, it goes on from there.
    """
    out = Path(out)
    kind, root = ("decathlon", Path(dataset)) if dataset else ("phantom", make_phantom(out / "phantom", seed=seed))
    changes = [f"seed={seed}", *(PHANTOM_CHANGES if dataset is None else ())]
    changes += [f"training.epochs={epochs}"] if epochs else []
    stages = len(METHODS) + 1
    evaluations: dict[str, Evaluation] = {}
    temperature = 1.0
    for i, method in enumerate(METHODS):
        config = make_config(dataset=kind, root=root, method=method, preset="small", changes=changes)
        folder = out / "runs" / method

        def advance(done: int, total: int, text: str, stage: int = i, method: str = method) -> None:
            progress(stage * total + done, stages * total, f"{method}: {text}")

        done = train(
            config, folder, prepared=out / "prepared", progress=advance, say=say if i == 0 else lambda text: None
        )
        run = load_run(folder)
        evaluations[method] = _evaluated(run, out / "evaluations" / method, None)
        if method == BASELINE:
            fitted = Temperature().fit(list(run.logits_and_labels("validation")))
            fitted.save(folder / "temperature.json")
            temperature = fitted.temperature
            evaluations[SCALED] = _evaluated(run, out / "evaluations" / "temperature", fitted)
    progress((stages - 1) * done.epochs, stages * done.epochs, "comparing")
    comparison = compare(evaluations)
    write_comparison(comparison, out)
    report = build_report(evaluations, out / "report.html", title="segcal demo", comparison=comparison)
    progress(stages * done.epochs, stages * done.epochs, "done")
    return DemoResult(comparison, report, temperature)


def _evaluated(run: Run, out: Path, calibrator: Calibrator | None) -> Evaluation:
    outcome = evaluate_run(run, out, calibrator=calibrator)
    if outcome.evaluation is None or outcome.failures:
        first = outcome.failures[0]
        raise SegcalError(f"every test case must be evaluated; {first.case}: {first.message}")
    return outcome.evaluation
