"""The main job in one command: a small study, trained with and without the calibration term, calibrated and compared.

On images made on the spot, whose true probabilities are known, or on a Decathlon task of the user's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from segcal.calibrators import Temperature, load_calibrator
from segcal.comparison.comparison import Comparison
from segcal.comparison.tables import write_comparison
from segcal.datasets import make_phantom
from segcal.errors import SegcalError
from segcal.report import build_report
from segcal.study import Study, Workshop, open_study, shipped_studies
from segcal.study.plan import AFTER, PHANTOM, DatasetPlan
from segcal.study.summary import collect
from segcal.study.work import CALIBRATOR
from segcal.training.config import merge

BASELINE = "dice-ce"
SCALED = f"{BASELINE}{AFTER}temperature"
METHODS = (BASELINE, SCALED, "hard-ace", "soft-ace")


class DemoResult(NamedTuple):
    """What was found on the test cases, and the page that shows it."""

    comparison: Comparison
    report: Path
    temperature: float


def open_demo(
    out: str | os.PathLike[str],
    *,
    dataset: str | os.PathLike[str] | None = None,
    epochs: int | None = None,
    seed: int = 0,
) -> Workshop:
    """The demo as a study: the shipped one of the phantom with fewer methods."""
    out = Path(out).absolute()
    shipped = shipped_studies()[PHANTOM].config
    if dataset is None:
        part, settings = (
            DatasetPlan(dataset=PHANTOM, root=str(make_phantom(out / "data", seed=seed))),
            shipped.set,
        )
    else:
        part, settings = DatasetPlan(dataset="decathlon", root=os.path.abspath(dataset)), {}
    changed = {
        "title": "segcal demo",
        "methods": METHODS,
        "seeds": (seed,),
        "datasets": {"demo": part},
        "set": merge(settings, {"training": {"epochs": epochs}} if epochs else {}),
    }
    return open_study(Study("demo", shipped.model_copy(update=changed), None), out)


def report_demo(shop: Workshop) -> DemoResult:
    """Compare the runs of a demo, and write tables and the page."""
    for state in shop.states():
        if state.status != "done":
            raise SegcalError(f"every run of the demo must be done; {state.name} is {state.status}. {state.message}")
    (found,) = collect(shop).datasets
    write_comparison(found.comparison, shop.out)
    evaluations = {method: seeds[0] for method, seeds in found.test.items()}
    title = shop.plan.study.config.title
    report = build_report(evaluations, shop.out / "report.html", title=title, comparison=found.comparison)
    (scaled,) = (arm for arm in shop.plan.arms if arm.fitting is not None)
    fitted = load_calibrator(scaled.results(shop.runs, CALIBRATOR))
    assert isinstance(fitted, Temperature)
    return DemoResult(found.comparison, report, fitted.temperature)
