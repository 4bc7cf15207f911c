"""segcal against torchmetrics 1.9, whose binary calibration error is that of one class.

Known disagreement: torchmetrics gives p = 1 a bin of its own; here the last bin is closed, as METHOD fixes it.
"""

from __future__ import annotations

import pytest
import torch
from torchmetrics.functional.classification import binary_calibration_error

from segcal import bin_statistics, ece, mce


@pytest.mark.parametrize(("norm", "error"), [("l1", ece), ("max", mce)])
@pytest.mark.parametrize("bins", [1, 10, 15, 100])
def test_errors_are_torchmetrics(norm, error, bins, backend):
    p, labels = torch.rand(1, 1, 5000, dtype=torch.float64), torch.randint(0, 2, (1, 1, 5000))
    ours = error(bin_statistics(p, labels, bins=bins, backend=backend))
    theirs = binary_calibration_error(p.flatten(), labels.flatten(), n_bins=bins, norm=norm)
    torch.testing.assert_close(ours[0, 0], theirs.double(), rtol=1e-6, atol=1e-7)


def test_edges_belong_to_the_bin_above_in_both():
    p, labels = torch.tensor([[[0.25, 0.5, 0.75, 0.1]]]), torch.tensor([[[1, 0, 1, 0]]])
    ours = mce(bin_statistics(p, labels, bins=4))
    assert ours.item() == pytest.approx(0.75)
    assert binary_calibration_error(p.flatten(), labels.flatten(), n_bins=4, norm="max").item() == pytest.approx(0.75)


def test_known_disagreement_torchmetrics_gives_one_a_bin_of_its_own():
    p, labels = torch.tensor([[[0.8, 1.0]]]), torch.tensor([[[1, 0]]])
    assert mce(bin_statistics(p, labels, bins=4)).item() == pytest.approx(0.4)  # one bin: 0.9 against 0.5
    assert binary_calibration_error(p.flatten(), labels.flatten(), n_bins=4, norm="max").item() == pytest.approx(1.0)
