"""segcal against netcal 1.4 on float64 probabilities.

Known disagreements, each with a test:
- netcal differentiates by finite steps: on float32 probabilities these vanish, and no fit leaves its start.
- A bin of its histogram without voxels gives the bin's middle; here probabilities stay as they are. One without a true
  voxel gives 0; here half a voxel more. Its bins of equal mass can be fitted, not applied.
- Its histogram counts a probability on an edge in the bin above, and looks it up in the bin below.
And without one: beta calibration of several classes is one softmax over all there, each class against the rest here (as
Kull and others have it); vector scaling is of log-probabilities there, of logits here.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from netcal import binning, scaling
from scipy.special import expit, softmax
from truths import drawn, nll

from segcal.calibrators import Beta, HistogramBinning, Isotonic, Platt, Temperature, VectorScaling

pytestmark = pytest.mark.filterwarnings("ignore:independent is deprecated:DeprecationWarning")


@pytest.fixture(scope="module")
def exclusive():
    logits, labels = drawn(voxels=4000)
    return 2.5 * logits, labels, softmax(2.5 * logits.numpy(), axis=0).T


@pytest.fixture(scope="module")
def one_class():
    logits, labels = drawn("sigmoid", voxels=4000, classes=1)
    distorted = 2.5 * logits + 0.4
    return distorted, labels, expit(distorted[0].numpy())


def values(fitted):
    return {name: site["values"] for name, site in fitted._sites.items()}


def test_temperatures_are_netcals(exclusive, one_class):
    for (logits, labels, p), activation in ((exclusive, "softmax"), (one_class, "sigmoid")):
        theirs = scaling.TemperatureScaling().fit(p, labels.numpy().squeeze())
        ours = Temperature(activation=activation).fit([(logits, labels)])
        assert 1 / ours.temperature == pytest.approx(values(theirs)["weights"].item(), rel=1e-4)


def test_known_disagreement_netcal_does_not_leave_its_start_in_float32(exclusive):
    logits, labels, p = exclusive
    theirs = scaling.TemperatureScaling().fit(p.astype(np.float32), labels.numpy())
    assert values(theirs)["weights"].item() == 1
    assert 1 / Temperature().fit([(logits.float(), labels)]).temperature == pytest.approx(0.4, rel=0.05)


def test_vector_scaling_of_log_probabilities_is_netcals_logistic_calibration(exclusive):
    logits, labels, p = exclusive
    theirs = scaling.LogisticCalibration().fit(p, labels.numpy())
    ours = VectorScaling().fit([(logits.log_softmax(0), labels)])
    loss = nll(np.log(theirs.transform(p)).T, labels)
    assert ours.report.after == pytest.approx(loss, rel=1e-6)
    assert ours.report.after <= loss * (1 + 1e-9)
    assert ours.parameters[:, 0].numpy() == pytest.approx(values(theirs)["weights"], rel=1e-2)


def test_platt_and_beta_of_one_class_are_netcals(one_class):
    logits, labels, p = one_class
    theirs = values(scaling.LogisticCalibration().fit(p, labels[0].numpy()))
    ours = Platt(activation="sigmoid").fit([(logits, labels)])
    assert ours.parameters[0].tolist() == pytest.approx([*theirs["weights"], *theirs["bias"]], rel=1e-3)
    theirs = values(scaling.BetaCalibration().fit(p, labels[0].numpy()))
    ours = Beta(activation="sigmoid").fit([(logits, labels)])
    assert ours.parameters[0].tolist() == pytest.approx([*theirs["weights"], *theirs["bias"]], rel=1e-2)


def test_histograms_are_netcals_where_bins_have_voxels_of_both_kinds(exclusive, one_class):
    logits, labels, p = one_class
    theirs = binning.HistogramBinning(bins=15).fit(p, labels[0].numpy()).transform(p)
    ours = HistogramBinning(activation="sigmoid", bins=15).fit([(logits, labels)]).transform(logits)[0].sigmoid()
    assert ours.numpy() == pytest.approx(theirs, abs=1e-9)
    logits, labels, p = exclusive
    theirs = binning.HistogramBinning(bins=15).fit(p, labels.numpy()).transform(p)
    ours = HistogramBinning(bins=15).fit([(logits, labels)]).transform(logits).softmax(0)
    assert ours.T.numpy() == pytest.approx(theirs, abs=1e-9)


def test_known_disagreement_bins_of_netcal_without_voxels_or_without_true_ones():
    p, labels = np.array([0.05, 0.06, 0.55, 0.56, 0.95]), np.array([0, 0, 1, 0, 1])
    theirs = binning.HistogramBinning(bins=10).fit(p, labels)
    ours = HistogramBinning(activation="sigmoid", bins=10).fit(
        [(torch.logit(torch.from_numpy(p))[None], labels_of(labels))]
    )
    seen, unseen = np.array([0.07, 0.58, 0.99]), np.array([0.31])
    assert theirs.transform(seen).tolist() == [0, 0.5, 1]
    assert transformed(ours, seen) == pytest.approx([0.5 / 3, 0.5, 1.5 / 2])
    assert theirs.transform(unseen).item() == pytest.approx(0.35)
    assert transformed(ours, unseen) == pytest.approx(unseen)


def test_known_disagreement_netcal_counts_an_edge_above_and_looks_it_up_below():
    p, labels = np.array([0.25, 0.25, 0.1, 0.1]), np.array([1, 1, 0, 0])
    theirs = binning.HistogramBinning(bins=4).fit(p, labels)
    assert theirs.transform(np.array([0.25])).item() == 0  # the share of what is at 0.1
    ours = HistogramBinning(activation="sigmoid", bins=4).fit(
        [(torch.logit(torch.from_numpy(p))[None], labels_of(labels))]
    )
    assert transformed(ours, np.array([0.25])) == pytest.approx([2.5 / 3])


def test_known_disagreement_netcal_cannot_apply_bins_of_equal_mass(one_class):
    _, labels, p = one_class
    theirs = binning.HistogramBinning(bins=5, equal_intervals=False).fit(p, labels[0].numpy())
    with pytest.raises(ValueError, match="not implemented"):
        theirs.transform(p)


def test_isotonic_curves_are_netcals_but_for_the_width_of_a_step(exclusive):
    logits, labels, p = exclusive
    theirs = binning.IsotonicRegression().fit(p, labels.numpy()).transform(p)
    ours = Isotonic().fit([(logits, labels)]).transform(logits).softmax(0)
    assert np.abs(ours.T.numpy() - theirs).mean() < 0.004


def labels_of(labels):
    return torch.from_numpy(labels)[None]


def transformed(calibrator, p):
    return calibrator.transform(torch.logit(torch.from_numpy(p))[None])[0].sigmoid().numpy()
