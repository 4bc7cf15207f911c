"""Fits see the voxels of all cases, however these come, and refuse what cannot be fitted."""

from __future__ import annotations

import re

import pytest
import torch
from truths import KINDS, METHODS, drawn

from segcal.calibrators import Isotonic, Temperature, make_calibrator
from segcal.errors import ConfigError, LabelError, RangeError, SegcalError, ShapeError

BY_CLASS = [kind for kind in KINDS if kind[0] != "temperature"]


class Slabs:
    """A case that is read in parts, some of them without a voxel."""

    def __init__(self, logits, labels, *edges):
        self.logits, self.labels, self.edges = logits, labels, (0, *edges, logits.shape[1])

    def slabs(self):
        for start, stop in zip(self.edges[:-1], self.edges[1:], strict=True):
            yield self.logits[:, start:stop], self.labels[..., start:stop]


def same(one, other, logits, *, tolerance=1e-9):
    """Whether both give the same probabilities and report the same."""
    activation = one.activation
    first, second = (fitted.transform(logits.double()) for fitted in (one, other))
    if activation == "softmax":
        first, second = first.softmax(0), second.softmax(0)
    else:
        first, second = first.sigmoid(), second.sigmoid()
    assert torch.allclose(first, second, rtol=0, atol=tolerance)
    assert other.report.before == pytest.approx(one.report.before, rel=tolerance)
    assert other.report.after == pytest.approx(one.report.after, rel=tolerance)
    assert other.report.voxels == one.report.voxels


@pytest.mark.parametrize(("method", "activation"), KINDS)
def test_how_voxels_are_divided_changes_nothing(method, activation, monkeypatch):
    logits, labels = drawn(activation, voxels=3000)
    logits = 2 * logits
    whole = make_calibrator(method, activation=activation).fit([(logits, labels)])
    cut = (1, 1, 700, 2999)
    cases = [(logits[:, start:stop], labels[..., start:stop]) for start, stop in ((0, 7), (7, 1500), (1500, 3000))]
    for stream in ([Slabs(logits, labels, *cut)], cases, [Slabs(*cases[0], 3), cases[1], Slabs(*cases[2], 0, 9)]):
        other = make_calibrator(method, activation=activation).fit(stream)
        same(whole, other, logits)
        assert other.report.cases == len(stream)
    monkeypatch.setattr("segcal.calibrators.stream.PIECE_ELEMENTS", 1)  # then 1,024 voxels at a time
    monkeypatch.setattr("segcal.calibrators.calibrator.CACHED_ELEMENTS", 1)
    same(whole, make_calibrator(method, activation=activation).fit([(logits, labels)]), logits)


@pytest.mark.parametrize(("method", "activation"), KINDS)
def test_precision_and_layout_change_nothing(method, activation):
    logits, labels = drawn(activation, voxels=60)
    logits = logits.half()  # which float32 and float64 hold, too
    labels = labels.byte()
    fitted = make_calibrator(method, activation=activation).fit([(logits.double(), labels.long())])
    volume = logits.reshape(3, 3, 4, 5), labels.reshape(*labels.shape[:-1], 3, 4, 5)
    turned = tuple(side.transpose(-1, -3).contiguous().transpose(-1, -3) for side in volume)
    assert not turned[0].is_contiguous()
    for case in ((logits, labels), (logits.float(), labels.short()), volume, turned):
        other = make_calibrator(method, activation=activation).fit([case])
        same(fitted, other, logits)
        shown = other.transform(case[0].float())
        assert shown.shape == case[0].shape
        assert shown.dtype == torch.float32
        assert torch.allclose(shown.flatten(1), other.transform(logits.float()), atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_cases_may_come_with_gradients(method):
    logits, labels = drawn(voxels=300)
    fitted = make_calibrator(method).fit([(logits, labels)])
    other = make_calibrator(method).fit([(logits.clone().requires_grad_(), labels)])
    same(fitted, other, logits)
    assert not other.transform(logits.clone().requires_grad_()).requires_grad


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("method", ["temperature", "vector", "beta"])
def test_where_a_fit_starts_changes_nothing(method, activation, monkeypatch):
    logits, labels = drawn(activation, voxels=20_000)
    fitted = make_calibrator(method, activation=activation).fit([(2 * logits, labels)])
    monkeypatch.setattr("segcal.calibrators.linear.START_VOXELS", 200)
    other = make_calibrator(method, activation=activation).fit([(2 * logits, labels)])
    same(fitted, other, 2 * logits, tolerance=2e-7)


def test_a_first_draw_without_mistakes_is_no_reason_to_refuse(monkeypatch):
    monkeypatch.setattr("segcal.calibrators.linear.START_VOXELS", 1)  # eight of a stratum
    logits, labels = torch.zeros(2, 30_000), torch.zeros(30_000, dtype=torch.uint8)
    logits[0] = 5
    logits[:, :2], labels[1] = 0, 1  # as doubtful as can be: the only mistakes
    logits[1, 2:2000], labels[2:2000] = 10, 1
    assert Temperature().fit([(logits, labels)]).report.voxels == 30_000


@pytest.mark.parametrize("method", METHODS)
def test_what_can_be_gone_through_only_once_is_refused(method):
    cases = [drawn(voxels=50)]
    for once in (iter(cases), (case for case in cases)):
        with pytest.raises(ConfigError, match="iterated again"):
            make_calibrator(method).fit(once)


@pytest.mark.parametrize("method", METHODS)
def test_no_cases_and_no_voxels_are_refused(method):
    with pytest.raises(ConfigError, match="there must be cases"):
        make_calibrator(method).fit([])
    with pytest.raises(ConfigError, match="there must be voxels"):
        make_calibrator(method).fit([(torch.zeros(3, 0), torch.zeros(0))])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_are_refused(method, number):
    logits, labels = drawn(voxels=50)
    logits[1, 31] = number
    with pytest.raises(RangeError, match="logits must be finite"):
        make_calibrator(method).fit([drawn(voxels=50), (logits, labels)])


def refused(method, activation, case):
    """The one line that fitting after a good case is refused with."""
    with pytest.raises(SegcalError) as caught:
        make_calibrator(method, activation=activation).fit([drawn(activation, voxels=50), case])
    assert re.fullmatch(r"[^\n]+\.", str(caught.value))
    return caught


@pytest.mark.parametrize(("method", "activation"), KINDS)
def test_labels_that_are_no_classes_are_refused(method, activation):
    logits, labels = drawn(activation, voxels=50)
    for wrong in (3, -1) if activation == "softmax" else (2, -1):
        broken = labels.long()
        broken[..., 17] = wrong
        caught = refused(method, activation, (logits, broken))
        assert caught.type is LabelError
        assert (f"one is {wrong}" if activation == "softmax" else "must be 0 or 1") in str(caught.value)


@pytest.mark.parametrize(("method", "activation"), KINDS)
def test_cases_with_other_classes_or_another_grid_are_refused(method, activation):
    caught = refused(method, activation, drawn(activation, voxels=50, classes=2))
    assert caught.type is ShapeError
    assert "every case must have 3 classes, as the first has; case 1 has 2" in str(caught.value)
    logits, labels = drawn(activation, voxels=50)
    assert "must lie on the grid" in str(refused(method, activation, (logits, labels[..., 1:])).value)


@pytest.mark.parametrize(("activation", "classes", "match"), [("softmax", 1, "2 classes"), ("sigmoid", 3, "overlap")])
def test_one_map_of_labels_belongs_to_exclusive_classes(activation, classes, match):
    with pytest.raises(ShapeError, match=match):
        Temperature(activation=activation).fit([(torch.zeros(classes, 9), torch.zeros(9))])
    with pytest.raises(ShapeError, match="one map of class indices"):
        Temperature().fit([(torch.zeros(3, 9), torch.zeros(3, 9))])


def test_one_channel_is_calibrated_by_a_sigmoid_and_refused_by_a_softmax():
    logits = torch.tensor([[4.0, -3.0]])
    assert Temperature(2.0, activation="sigmoid").transform(logits).tolist() == [[2.0, -1.5]]
    for calibrator in (Temperature(2.0), Temperature(2.0).weakened(0.5)):
        with pytest.raises(ShapeError, match=r'got one channel\. Use activation="sigmoid"'):
            calibrator.transform(logits)


@pytest.mark.parametrize(("method", "activation"), BY_CLASS)
def test_a_class_without_voxels_is_refused_by_what_fits_each_class(method, activation):
    logits, labels = drawn(activation, voxels=200)
    if activation == "softmax":
        labels[labels == 1] = 2
    else:
        labels[1] = 0
    with pytest.raises(LabelError, match=rf"{method} needs voxels of every class .* class 1 has none"):
        make_calibrator(method, activation=activation).fit([(logits, labels)])


def test_a_class_without_voxels_is_no_matter_to_what_all_classes_share():
    logits, labels = drawn(voxels=2000)
    labels[labels == 1] = 2
    assert Temperature().fit([(logits, labels)]).report.after < 5


@pytest.mark.parametrize(("method", "activation"), [kind for kind in KINDS if kind[0] != "isotonic"])
def test_where_no_mistake_is_left_the_fit_is_refused(method, activation):
    logits, _ = drawn(activation, voxels=300)
    labels = logits.argmax(0) if activation == "softmax" else (logits > 0).byte()
    if activation == "softmax":
        logits[labels, torch.arange(300)] += 1  # more probable than all others together
    with pytest.raises(SegcalError, match="no finite fit is best") as caught:
        make_calibrator(method, activation=activation).fit([(logits, labels)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["vector", "dirichlet"])
def test_where_a_bias_would_leave_no_mistake_the_fit_is_refused(method):
    logits, _ = drawn(voxels=300)
    labels = logits.argmax(0)
    with pytest.raises(SegcalError, match="no finite fit is best"):
        make_calibrator(method).fit([(logits.log_softmax(0) + torch.tensor([[3.0], [0], [0]]), labels)])


def test_curves_take_cases_without_mistakes_and_stay_off_0_and_1():
    logits, _ = drawn(voxels=300)
    shown = Isotonic().fit([(logits, logits.argmax(0))]).transform(10 * logits)
    assert shown.isfinite().all()
    assert torch.equal(shown.argmax(0), logits.argmax(0))
