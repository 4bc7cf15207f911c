"""The method "auto": what the rule refuses and takes where the truth is known, and the whole way over files."""

from __future__ import annotations

import nibabel
import numpy as np
import pytest
import torch
from tests.calibration.test_fitting import folder  # noqa: F401
from typer.testing import CliRunner

from segcal import EvaluationAccumulator, ReadOptions
from segcal.calibration import planning
from segcal.calibration.choosing import CANDIDATES, UNCHANGED, Candidate, choose, chosen_patients
from segcal.calibration.fitting import fit_calibrator
from segcal.calibrators import load_calibrator
from segcal.cli import app

CASES = [f"case_{i}" for i in range(12)]


@pytest.fixture(scope="module")
def truth():
    """True logits of two classes, and labels drawn from them."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(len(CASES), 2, 4000, generator=random) * 1.5
    labels = (torch.rand(len(CASES), 4000, generator=random) < logits.softmax(1)[:, 1]).long()
    return logits, labels


def measured(logits, labels):
    accumulator = EvaluationAccumulator(options=ReadOptions(logits=True))
    accumulator.update(logits, labels, CASES)
    return accumulator.compute()


def test_the_truth_is_taken_and_what_games_ace_is_refused(truth):
    logits, labels = truth
    before = measured(2 * logits, labels)
    found = choose(
        before,
        {
            "truth": measured(logits, labels),
            "cooler": measured(4 * logits, labels),
            "label map": measured(1000 * (logits - logits.mean(1, keepdim=True)), labels),
            "moved": measured(logits + torch.tensor([[[0.0], [1.5]]]), labels),
        },
    )
    assert found.taken == "truth"
    why = {trial.name: trial.refused for trial in found.trials}
    assert why["truth"] == ""
    assert why["cooler"].startswith("NLL rises")
    assert why["label map"].startswith("NLL rises")
    assert why["moved"] == "overlap is lost" or why["moved"].startswith("NLL")
    ace = {trial.name: trial.values["ace"] for trial in found.trials}
    assert f"{1 - ace['truth'] / ace[UNCHANGED]:.1%} below" in found.reason
    table = found.table()
    assert [row[0].value for row in table.rows][:2] == [UNCHANGED, "truth"]
    assert table.rows[1][-1].value == "taken"


def test_nothing_is_taken_where_nothing_helps(truth):
    logits, labels = truth
    hot, same = measured(logits / 2, labels), measured(logits, labels)
    found = choose(measured(logits, labels), {"hot": hot, "same": same})
    assert found.taken == UNCHANGED
    assert found.trials[2].refused == "ACE falls by no more than chance"


def test_a_rise_within_chance_is_none_and_a_large_one_always_is(truth):
    """Half of the patients are calibrated better, half worse: the mean rises a little, and that says nothing."""
    logits, labels = truth
    sign = torch.tensor([1.0, -1.0] * (len(CASES) // 2))[:, None, None]
    noise = 0.05 * sign * torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    found = choose(measured(logits, labels), {"noisy": measured(logits + noise.abs() * sign, labels)})
    rise = found.trials[1].values["nll"] / found.trials[0].values["nll"] - 1
    assert 0 < rise < 0.01
    assert not found.trials[1].refused.startswith("NLL")
    worse = choose(measured(logits, labels), {"hot": measured(logits / 1.6, labels)})
    assert worse.trials[1].refused.startswith("NLL rises by")


def test_bins_must_stay_occupied(truth):
    """Probabilities joined to three values are as likely as before where there is nothing to tell apart."""
    logits, labels = truth
    level = torch.where(logits[:, 1] > logits[:, 0], 1.0, -1.0)
    right = torch.stack([-level, level], 1) * 0.6
    noisy = right + 0.4 * torch.randn(right.shape, generator=torch.Generator().manual_seed(1))
    drawn = (torch.rand(labels.shape, generator=torch.Generator().manual_seed(2)) < right.softmax(1)[:, 1]).long()
    found = choose(measured(noisy, drawn), {"joined": measured(right, drawn)})
    assert found.trials[1].values["nll"] < found.trials[0].values["nll"]
    assert "of the bins stay occupied" in found.trials[1].refused
    assert found.taken == UNCHANGED


def test_at_most_so_many_patients_are_tried_on_with_all_their_cases():
    names = [f"p{i:03d}_{frame}" for i in range(100) for frame in "ab"]
    kept = chosen_patients(names, "(p[0-9]+)_", most=40)
    assert len(kept) == 80
    assert {name[:4] for name in kept} >= {"p000", "p097"}
    assert chosen_patients(names[:20], "(p[0-9]+)_", most=40) == names[:20]


@pytest.fixture
def quick(monkeypatch):
    """Networks of a few steps: what matters here is what becomes of them."""
    short = [
        each._replace(settings={**each.settings, "steps": 40} if each.method == "local-temperature" else {})
        for each in CANDIDATES
    ]
    monkeypatch.setattr(planning, "CANDIDATES", short)


def test_auto_is_the_default_shows_what_it_tried_and_keeps_decisions(folder, quick):  # noqa: F811
    """Logits are too large by a factor of 2.5: nothing may be worse than before."""
    arguments = ["calibrate", "fit", str(folder / "probabilities"), str(folder / "labels"), "--folds", "2"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(folder / "c.json")])
    assert done.exit_code == 0, done.output
    words = " ".join(done.output.split())
    for part in ("Candidates", "is taken: of those that lose no overlap", "no decision changed"):
        assert part in words
    fitted = fit_calibrator(folder / "probabilities", folder / "labels", folder / "again.json", folds=2)
    assert fitted.choice is not None
    assert [trial.name for trial in fitted.choice.trials][:2] == [UNCHANGED, "temperature"]
    assert len(fitted.choice.trials) == 8
    before, after = (each.case_values() for each in (fitted.before, fitted.after))
    for metric in ("nll", "brier", "ace"):
        assert after[None, metric].mean() < before[None, metric].mean()
    assert (folder / "c.json").read_bytes() == (folder / "again.json").read_bytes()
    assert load_calibrator(folder / "c.json").strength == fitted.calibrator.strength


def test_where_nothing_helps_the_calibrator_changes_nothing(folder, quick, monkeypatch):  # noqa: F811
    monkeypatch.setattr("segcal.calibration.choosing.LEAST_OCCUPIED", 2.0)  # nothing is good enough
    arguments = ["calibrate", "fit", str(folder / "probabilities"), str(folder / "labels"), "--folds", "2"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(folder / "c.json")])
    assert done.exit_code == 0, done.output
    assert "nothing is changed" in " ".join(done.output.split())
    logits = torch.randn(3, 4, 4)
    assert torch.equal(load_calibrator(folder / "c.json").transform(logits), logits)


def test_large_cases_are_not_held_at_once(folder, quick, monkeypatch):  # noqa: F811
    monkeypatch.setattr(planning, "MOST_AT_ONCE", 1000)
    told = []
    fitted = fit_calibrator(folder / "probabilities", folder / "labels", folder / "c.json", folds=2, say=told.append)
    assert told[0] == "6 cases of more than 1,000 values: what needs whole cases is not tried"
    assert not any("smoothing" in trial.name for trial in fitted.choice.trials)


def test_a_candidate_that_cannot_be_fitted_is_named(folder, monkeypatch):  # noqa: F811
    """A curve for each class needs voxels of each; no label has the third class here."""
    monkeypatch.setattr(planning, "CANDIDATES", (CANDIDATES[0], Candidate("isotonic", "isotonic", {})))
    for path in (folder / "labels").iterdir():
        image = nibabel.load(path)
        nibabel.save(nibabel.Nifti1Image(np.minimum(np.asarray(image.dataobj), 1), image.affine), path)
    said = []
    fitted = fit_calibrator(folder / "probabilities", folder / "labels", folder / "c.json", folds=2, say=said.append)
    assert [trial.name for trial in fitted.choice.trials] == [UNCHANGED, "temperature"]
    (line,) = (line for line in said if "left out" in line)
    assert line.startswith("isotonic is left out: isotonic needs voxels of every class in the labels; class 2 has none")
