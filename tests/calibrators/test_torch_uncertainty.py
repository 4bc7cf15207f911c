"""segcal against numbers that torch-uncertainty 0.13.0 gave on the same logits.

It cannot be used beside the CPU build of torch 2.13.0: importing it needs lightning and torchvision, whose only wheel
here is built for CUDA ("operator torchvision::nms does not exist"). So its scalers were run without the rest of it:

    root = ".../site-packages/torch_uncertainty"
    for name, path in (("", ""), (".post_processing", "/post_processing"),
                       (".post_processing.calibration", "/post_processing/calibration")):
        module = sys.modules["torch_uncertainty" + name] = types.ModuleType("torch_uncertainty" + name)
        module.__path__ = [root + path]
    from torch_uncertainty.post_processing.abstract import PostProcessing
    sys.modules["torch_uncertainty.post_processing"].PostProcessing = PostProcessing
    from torch_uncertainty.post_processing.calibration.vector_scaler import VectorScaler  # and so on
    logits, labels = drawn(voxels=2000, seed=11)
    data = DataLoader(TensorDataset((factor * logits.T).float(), labels), batch_size=500)
    scaler = VectorScaler(num_classes=3)
    scaler.fit(data, progress=False)
    scaler.inv_temperature

Its vector scaler has no bias: it is our class-temperature. It takes a fixed 0.1 of each step of L-BFGS without a search
along it, so that it stops a little short, and on large logits goes astray.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from truths import drawn, nll

from segcal.calibrators import ClassTemperature, Dirichlet, Temperature

TEMPERATURE = {2.5: 0.379026, 0.05: 18.919973, 60: 1287405.5}  # inverse, by the factor of the logits
VECTOR = {2.5: (0.374566, 0.380789, 0.382953), 0.05: (18.68405, 19.005548, 19.111372), 60: (math.nan,) * 3}
DIRICHLET = np.array(  # both penalties 1e-3, factor 2.5; the last column are the biases
    [
        [0.575528, 0.202168, 0.201779, 0.093639],
        [0.215653, 0.570306, 0.191842, -0.036553],
        [0.197115, 0.215783, 0.595383, -0.057086],
    ]
)


@pytest.fixture(scope="module")
def data():
    return drawn(voxels=2000, seed=11)


@pytest.mark.parametrize("factor", [2.5, 0.05])
def test_one_temperature_and_one_for_each_class_are_torch_uncertaintys(data, factor):
    logits, labels = data
    for calibrator, theirs in ((Temperature(), TEMPERATURE), (ClassTemperature(), VECTOR)):
        ours = calibrator.fit([(factor * logits, labels)])
        assert ours.parameters.flatten().numpy() == pytest.approx(np.atleast_1d(theirs[factor]), rel=2e-3)
        there = nll(np.atleast_1d(theirs[factor])[:, None] * factor * logits.numpy(), labels)
        assert ours.report.after < there < ours.report.after * (1 + 1e-6)


def test_known_disagreement_torch_uncertainty_goes_astray_on_large_logits(data):
    logits, labels = data
    assert nll(TEMPERATURE[60] * 60 * logits, labels) > 1e7  # 0.61 is to be had
    assert math.isnan(VECTOR[60][0])
    for calibrator, theirs in ((Temperature(), TEMPERATURE), (ClassTemperature(), VECTOR)):
        smaller = nll(np.atleast_1d(theirs[2.5])[:, None] * 2.5 * logits.numpy(), labels)
        assert calibrator.fit([(60 * logits, labels)]).report.after < smaller


def test_known_disagreement_torch_uncertainty_stops_with_most_of_its_dirichlet_penalty_unpaid(data):
    logits, labels = data
    ours = Dirichlet(off_diagonal=1e-3, intercept=1e-3).fit([(2.5 * logits, labels)])

    def objective(full):
        out = full[:, :-1] @ (2.5 * logits).log_softmax(0).numpy() + full[:, -1:]
        off = full[:, :-1][~np.eye(3, dtype=bool)]
        return nll(out, labels) + 1e-3 * (off**2).mean() + 1e-3 * (full[:, -1] ** 2).mean()

    assert objective(ours.parameters.numpy()) == pytest.approx(ours.report.after, rel=1e-9)
    assert objective(DIRICHLET) > ours.report.after + 3e-5
    assert nll(DIRICHLET[:, :-1] @ (2.5 * logits).log_softmax(0).numpy() + DIRICHLET[:, -1:], labels) == pytest.approx(
        nll(ours.transform(2.5 * logits), labels), rel=1e-5
    )  # nearly the same probabilities: rows may all be moved by as much
