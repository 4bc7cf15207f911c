"""segcal against netcal 1.4 on float64 probabilities.

Known disagreements:
- netcal differentiates by finite steps: on float32 probabilities these vanish, and no fit leaves its start. One test
  shows it.
- Beta calibration of several classes is one softmax over all there, each class against the rest here (as Kull and
  others have it); vector scaling is of log-probabilities there, of logits here. No test shows it.
"""

from __future__ import annotations

import numpy as np
import pytest
from netcal import binning, scaling
from scipy.special import expit, softmax
from truths import drawn, nll

from segcal.calibrators import Beta, Isotonic, Platt, Temperature, VectorScaling

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


def test_isotonic_curves_are_netcals_but_for_the_width_of_a_step(exclusive):
    logits, labels, p = exclusive
    theirs = binning.IsotonicRegression().fit(p, labels.numpy()).transform(p)
    ours = Isotonic().fit([(logits, labels)]).transform(logits).softmax(0)
    assert np.abs(ours.T.numpy() - theirs).mean() < 0.004
