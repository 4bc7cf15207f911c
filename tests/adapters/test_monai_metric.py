"""MONAI's metric and handler on exact sums: the same values where MONAI is right, listed differences elsewhere."""

from inspect import signature

import monai.handlers
import monai.metrics
import pytest
import torch
from ignite.engine import Engine
from monai.handlers import from_engine

from segcal.adapters.monai import CalibrationError, CalibrationErrorMetric

REDUCTIONS = ("expected", "average", "maximum")


def off_the_edges(cases=2, classes=3, size=12, bins=20):
    """Probabilities at the quarters of bins, where no rounding can move them to another bin; and one-hot labels."""
    generator = torch.Generator().manual_seed(1)
    bin_of = torch.randint(0, bins, (cases, classes, size, size, size), generator=generator)
    quarter = torch.randint(1, 4, bin_of.shape, generator=generator)
    labels = torch.randint(0, classes, (cases, size, size, size), generator=generator)
    one_hot = torch.nn.functional.one_hot(labels, classes).movedim(-1, 1)
    return ((bin_of + quarter / 4) / bins).float(), one_hot.float()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("include_background", [True, False])
@pytest.mark.parametrize("how", ["none", "mean", "mean_batch", "sum_channel"])
def test_values_equal_monais_off_the_edges(reduction, include_background, how):
    probabilities, one_hot = off_the_edges()
    arguments = {"include_background": include_background, "calibration_reduction": reduction, "metric_reduction": how}
    ours, theirs = CalibrationErrorMetric(**arguments), monai.metrics.CalibrationErrorMetric(**arguments)
    for case in range(len(probabilities)):  # cumulative, batch by batch
        ours(probabilities[case : case + 1], one_hot[case : case + 1])
        theirs(probabilities[case : case + 1], one_hot[case : case + 1])
    torch.testing.assert_close(ours.aggregate(), theirs.aggregate(), rtol=0, atol=1e-6)


def defaults(call):
    return {name: parameter.default for name, parameter in signature(call).parameters.items()}


def test_defaults_are_monais_so_the_background_counts_unless_it_is_left_out():
    ours = defaults(CalibrationErrorMetric)
    assert ours == defaults(monai.metrics.CalibrationErrorMetric)
    assert ours["include_background"] is True
    theirs = defaults(monai.handlers.CalibrationError)
    for name, default in defaults(CalibrationError).items():
        assert callable(default) or theirs[name] == default


def test_an_integer_label_map_does_as_well_as_one_hot():
    probabilities, one_hot = off_the_edges()
    metric = CalibrationErrorMetric()
    metric(probabilities, one_hot)
    expected = metric.aggregate()
    metric.reset()
    metric(probabilities, one_hot.argmax(1, keepdim=True))
    assert torch.equal(metric.aggregate(), expected)


def test_known_difference_on_edges_right_means_what_its_documentation_says():
    """0.5 with two bins: [left, right) puts it in the upper bin. MONAI 1.6.1's edge lies a little above 0.5."""
    probabilities = torch.tensor([[[0.5, 0.1, 0.9]]])
    labels = torch.tensor([[[0.0, 0.0, 1.0]]])

    def errors(module, right):
        metric = module(num_bins=2, right=right, calibration_reduction="maximum")
        metric(probabilities, labels)
        return metric.aggregate().item()

    upper = 0.7 - 0.5  # 0.5 and 0.9, one of two true
    lower = 0.3  # 0.1 and 0.5, none true
    assert errors(CalibrationErrorMetric, False) == pytest.approx(upper)
    assert errors(CalibrationErrorMetric, True) == pytest.approx(lower)
    for right in (False, True):
        assert errors(monai.metrics.CalibrationErrorMetric, right) == pytest.approx(lower)


def test_get_not_nans_counts_what_has_a_value():
    ours, theirs = (kind(get_not_nans=True) for kind in (CalibrationErrorMetric, monai.metrics.CalibrationErrorMetric))
    ours(*off_the_edges())
    theirs(*off_the_edges())
    assert torch.equal(ours.aggregate()[1], theirs.aggregate()[1])


def test_the_handler_reports_through_an_engine():
    probabilities, one_hot = off_the_edges(cases=4)
    batches = [{"pred": probabilities[i : i + 2], "label": one_hot[i : i + 2]} for i in (0, 2)]
    engine = Engine(lambda engine, batch: batch)
    handler = CalibrationError(calibration_reduction="average", output_transform=from_engine(["pred", "label"]))
    handler.attach(engine, name="ace")
    engine.run(batches)
    expected = monai.metrics.CalibrationErrorMetric(calibration_reduction="average")
    expected(probabilities, one_hot)
    assert engine.state.metrics["ace"] == pytest.approx(expected.aggregate().item(), abs=1e-6)
    assert engine.state.metric_details["ace"].shape == (4, 3)
