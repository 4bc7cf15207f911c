"""What a lower ACE cost is told where it must be, with numbers worked out by hand, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cohorts import run, save
from handmade import evaluation_of

from segcal import Evaluation, EvaluationAccumulator, ScoreSums, compare
from segcal.comparison.cost import costs
from segcal.comparison.tables import explanations, notes, write_comparison
from segcal.datasets.phantom import phantom_case
from segcal.evaluation.remarks import remarks
from segcal.report import build_report

CASES = 6


def made(gap: float, *, nll: float = 0.2, brier: float = 0.1) -> Evaluation:
    """Every case with this gap in the one bin that is occupied, and these scores."""
    part = evaluation_of(torch.full((CASES, 1), gap), torch.full((CASES, 1), 0.8))
    voxels = torch.full((CASES, 1), 1000.0, dtype=torch.float64)
    return replace(part, joint=ScoreSums(brier * voxels, nll * voxels, voxels))


def told(baseline: Evaluation, other: Evaluation) -> dict[str, str]:
    return costs(compare({"base": baseline, "other": other}, resamples=5, draws=1))


def test_a_score_that_rose_is_told_with_its_share():
    assert told(made(0.2), made(0.1, nll=0.25)) == {
        "other": "other: macro-ACE fell by 50 %, but NLL rose by 25 %: part of the gain may come from less informative "
        "probabilities (see How ACE can be gamed)."
    }
    both = told(made(0.2), made(0.19, nll=0.21, brier=0.102))["other"]
    assert "macro-ACE fell by 5.0 %, but NLL rose by 5.0 % and Brier score rose by 2.0 %: part" in both


@pytest.mark.parametrize(
    ("gap", "nll", "brier"),
    [(0.1, 0.15, 0.08), (0.1, 0.2, 0.1), (0.1, 0.2019, 0.1009), (0.2, 0.3, 0.2), (0.25, 0.3, 0.2)],
    ids=["all better", "scores as they were", "less than 1 % higher", "the same ACE", "a higher ACE"],
)
def test_a_plain_improvement_and_a_plain_loss_cost_nothing(gap, nll, brier):
    assert told(made(0.2), made(gap, nll=nll, brier=brier)) == {}


def spread(bins: int) -> Evaluation:
    """The same voxels, all of the class: in this many of the 20 bins, from the highest down."""
    part = made(0.0)
    counts = torch.zeros_like(part.statistics.count)
    counts[..., 20 - bins :] = 10
    centers = (torch.arange(20) + 0.5) / 20
    return replace(
        part, statistics=replace(part.statistics, count=counts, confidence_sum=counts * centers, label_sum=counts)
    )


def test_occupied_bins_that_became_fewer_are_told():
    # Gaps 0.025, 0.075, ...: of ten bins 0.25 on average, of five 0.125.
    sentence = told(spread(10), spread(5))["other"]
    assert (
        "macro-ACE fell by 50 %, but occupied bins fell by 50 %: part of the gain may come from bins that" in sentence
    )
    assert told(spread(5), spread(10)) == {}


@pytest.fixture(scope="module")
def phantoms() -> dict[str, Evaluation]:
    """The organ of six phantoms: too high in one case and too low in the next, then heated, and as a label map."""
    cases = [phantom_case(number) for number in range(CASES)]
    truth = torch.stack([torch.from_numpy(case.probabilities[..., 1]) for case in cases]).double()
    labels = torch.stack([torch.from_numpy(case.label == 1) for case in cases]).long()
    turns = torch.tensor([1.0, -1.0]).repeat(CASES // 2).view(-1, 1, 1, 1)
    true_logits = torch.logit(truth, eps=1e-5)
    logits = true_logits + turns
    methods = {
        "network": logits.sigmoid(),
        "heated": (logits / 1.5).sigmoid(),
        "label map": (logits >= 0).double(),
        "better": (true_logits + 0.5 * turns).sigmoid(),
    }
    found = {}
    for name, organ in methods.items():
        accumulator = EvaluationAccumulator()
        accumulator.update(torch.stack([1 - organ, organ], 1), labels, [f"phantom_{i}" for i in range(CASES)])
        found[name] = accumulator.compute()
    return found


def test_heat_and_label_maps_are_told_and_better_probabilities_are_not(phantoms, tmp_path):
    comparison = compare(phantoms, resamples=20, draws=2)
    found = costs(comparison)
    assert list(found) == ["heated", "label map"]
    for name in found:
        nll = comparison.find(name, metric="nll").value / comparison.find("network", metric="nll").value
        assert f"NLL rose by {100 * (nll - 1):.{0 if nll >= 1.1 else 1}f} %" in found[name]
    assert "occupied bins fell by 90 %" in found["label map"]  # 2 of 20 are left
    assert [note for note in notes(comparison) if note not in explanations(comparison)] == list(found.values())
    _, markdown, latex = write_comparison(comparison, tmp_path)
    page = build_report(phantoms, tmp_path / "report.html", comparison=comparison).read_text(encoding="utf-8")
    for sentence in found.values():
        assert f"- {sentence}" in markdown.read_text(encoding="utf-8")
        assert f"% {sentence}" in latex.read_text(encoding="utf-8")
        assert page.count(f"<p>{sentence}</p>") == 1


def test_empty_bins_are_told_of_a_label_map_alone(phantoms, tmp_path):
    (sentence,) = remarks(phantoms)
    assert sentence.startswith(
        "label map: only 10 % of the bins hold voxels, on average over cases and their classes: most are"
    )
    for name in ("network", "label map"):
        page = build_report({name: phantoms[name]}, tmp_path / "report.html", resamples=5).read_text(encoding="utf-8")
        assert ("of the bins hold voxels, on average" in page) == (name == "label map")


def test_a_class_that_a_case_lacks_is_no_empty_bin():
    full = spread(20)
    counts = full.statistics.count.clone()
    counts[1:, :, 1:] = 0  # nothing but the first bin, as where a network is sure that the class is not there
    sums = replace(full.statistics, count=counts, confidence_sum=counts * 0.01, label_sum=counts * 0)
    sparse = replace(full, statistics=sums)
    assert len(remarks({"net": sparse})) == 1
    lacking = replace(sparse.overlap, true=torch.tensor([[100.0], *[[0.0]] * (CASES - 1)], dtype=torch.float64))
    assert remarks({"net": replace(sparse, overlap=lacking)}) == []


def test_evaluate_tells_of_empty_bins_and_has_their_column(tmp_path):
    labels = torch.randint(0, 2, (9, 8, 7), generator=torch.Generator().manual_seed(0))
    sure = torch.stack([1 - labels, labels], -1).double()
    for name, factor in (("map", 1.0), ("soft", torch.linspace(0, 1, 9 * 8 * 7).view(9, 8, 7, 1))):
        (tmp_path / name).mkdir()
        save(tmp_path / name / "P" / "a.nii.gz", (0.5 + (sure - 0.5) * factor).numpy())
        save(tmp_path / name / "L" / "a.nii.gz", labels.numpy().astype("uint8"))
        done = run(tmp_path / name)
        assert "Occupied bins" in done.stdout
        assert ("Note: only 10 % of the bins hold voxels" in done.stdout) == (name == "map")
    rows = (tmp_path / "soft" / "out" / "cases.csv").read_text().splitlines()
    assert "a,class,class 1,occupied,1.0" in rows
    assert '"occupied"' in (tmp_path / "soft" / "out" / "summary.json").read_text()
