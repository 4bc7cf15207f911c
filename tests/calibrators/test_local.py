"""Local temperatures: what they find where the right ones are known, and that no decision ever changes."""

from __future__ import annotations

import hashlib
import json
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from segcal import ace, bin_statistics
from segcal.calibrators import LocalTemperature, Temperature, boxes, load_calibrator, local
from segcal.calibrators.local import COLDEST, HOTTEST
from segcal.errors import ConfigError, RangeError, SegcalError, ShapeError

QUICK = {"steps": 60, "width": 16}


def drawn(shape, *, classes=3, seed=0, spread=2.0):
    """True logits, and labels drawn from them."""
    random = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(classes, *shape, generator=random)
    flat = logits.flatten(1).softmax(0).T
    return logits, torch.multinomial(flat, 1, generator=random)[:, 0].reshape(shape)


def too_sure_of_class_one(seed, shape=(12, 12, 12)):
    """Logits that are too large by a factor of 3 where class 1 leads, and right elsewhere."""
    logits, labels = drawn(shape, seed=seed)
    factor = torch.where(logits.argmax(0) == 1, 3.0, 1.0)
    return logits * factor, labels


def nll(logits, labels):
    return cross_entropy(logits[None].double(), labels[None]).item()


@pytest.fixture(scope="module")
def cases():
    return [too_sure_of_class_one(seed) for seed in range(6)]


@pytest.fixture(scope="module")
def fitted(cases):
    return LocalTemperature(steps=150, width=16).fit(cases)


@pytest.fixture(scope="module")
def likeliest(cases):
    """Without the calibration error, whose optimum on few voxels is not the truth."""
    return LocalTemperature(steps=150, width=16, ace=0).fit(cases)


def test_a_temperature_that_depends_on_the_class_is_found_where_one_for_all_cannot(cases, likeliest):
    logits, labels = too_sure_of_class_one(99)
    truth = drawn((12, 12, 12), seed=99)[0]
    one_for_all = Temperature().fit(cases)
    found, plain, best = (
        nll(each, labels) for each in (likeliest.transform(logits), one_for_all.transform(logits), truth)
    )
    assert found - best < 0.35 * (plain - best)
    temperatures = likeliest.temperatures(logits)[0]
    leads = logits.argmax(0) == 1
    assert temperatures[leads].median().item() == pytest.approx(3, rel=0.25)
    assert temperatures[~leads].median().item() == pytest.approx(1, rel=0.25)


def test_the_calibration_error_falls_on_cases_not_fitted_to(fitted):
    def error(logits, labels):
        probabilities = logits.softmax(0).flatten(1)[None]
        return ace(bin_statistics(probabilities, labels.flatten()[None], bins=20))[0, 1:].mean().item()

    logits, labels = too_sure_of_class_one(99)
    assert error(fitted.transform(logits), labels) < 0.7 * error(logits, labels)


def test_no_decision_changes_whatever_the_logits(fitted):
    random = torch.Generator().manual_seed(3)
    for scale in (1e-6, 1e-3, 1.0, 30.0, 1e4):
        logits = scale * torch.randn(3, 5000, generator=random)
        logits[:, :500] = logits[:1, :500]  # all alike
        logits[1, 500:900] = torch.nextafter(logits[0, 500:900], torch.tensor(math.inf))
        assert torch.equal(fitted.transform(logits).argmax(0), logits.argmax(0))


def test_temperatures_stay_within_their_bounds(fitted):
    extreme = torch.tensor([[1e6, -1e6, 0.0], [0.0, 1e6, 1e-9], [-1e6, 0.0, -1e6]])
    found = fitted.temperatures(extreme)
    assert bool(((found >= COLDEST - 1e-6) & (found <= HOTTEST + 1e-6)).all())


def test_a_constant_added_to_all_logits_changes_no_probability(fitted):
    logits, _ = too_sure_of_class_one(1)
    one, other = (fitted.transform(logits + shift).softmax(0) for shift in (0.0, 7.5))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_pieces_give_what_the_whole_gives(fitted, monkeypatch):
    logits, _ = too_sure_of_class_one(2)
    monkeypatch.setattr(local, "compiled", lambda _: False)
    whole = fitted.transform(logits)
    monkeypatch.setattr("segcal.calibrators.calibrator.CACHED_ELEMENTS", 1)  # 1024 voxels at a time
    torch.testing.assert_close(fitted.transform(logits), whole, rtol=1e-6, atol=1e-6)


def test_the_same_seed_gives_the_same_network_and_leaves_torchs_own_alone(cases):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, two, other = (LocalTemperature(**QUICK, seed=seed).fit(cases) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    logits = cases[0][0]
    assert torch.equal(one.transform(logits), two.transform(logits))
    assert not torch.equal(one.transform(logits), other.transform(logits))


@pytest.mark.parametrize("settings", [{}, {"dilations": (1, 2)}])
def test_a_file_brings_back_the_same_temperatures(cases, tmp_path, settings):
    fitted = LocalTemperature(**QUICK, **settings).fit(cases)
    fitted.save(tmp_path / "c.json")
    again = load_calibrator(tmp_path / "c.json")
    logits, _ = cases[0]
    assert torch.equal(again.transform(logits), fitted.transform(logits))
    assert again.spatial == bool(settings)
    assert again.fingerprint == fitted.fingerprint != again.weakened(0.5).fingerprint


def test_a_file_of_version_0_3_0_loads_with_its_fingerprint(cases, fitted, tmp_path):
    """0.3.0 had a setting `image` and a number of channels; files of quality models refer to the fingerprint."""
    content = json.loads(fitted.to_json())
    content["settings"] = {"image": False} | content["settings"]
    content["state"] = {"channels": 0} | content["state"]
    text = json.dumps(content, indent=2)
    path = tmp_path / "c.json"
    path.write_text(text, encoding="utf-8")
    again = load_calibrator(path)
    logits, _ = cases[0]
    assert torch.equal(again.transform(logits), fitted.transform(logits))
    assert again.fingerprint == hashlib.sha256(text.encode()).hexdigest()[:16]
    path.write_text(text.replace('"image": false', '"image": true'), encoding="utf-8")
    with pytest.raises(SegcalError, match="it was fitted with image=True, which this version does not have"):
        load_calibrator(path)


@pytest.mark.parametrize("axes", [2, 3])
def test_neighbors_that_tell_where_the_network_is_too_sure_are_used(axes):
    """Large logits are right among large ones, and three times too large where their surroundings are small."""
    shape = (24, 24) if axes == 2 else (12, 12, 12)

    def case(seed):
        logits, labels = drawn(shape, seed=seed)
        outer = torch.zeros(shape, dtype=torch.bool)
        outer[: shape[0] // 2] = True
        marked = torch.zeros(shape, dtype=torch.bool)
        marked[..., ::3] = True  # among the others, these say which half it is
        seen = torch.where(outer, 3 * logits, logits)
        return torch.where(
            marked, torch.where(outer, 9.0, 0.0) * torch.tensor([1.0, 0, 0]).view(3, *[1] * axes), seen
        ), labels

    cases = [case(seed) for seed in range(8)]
    near, alone = (
        LocalTemperature(steps=200, width=16, ace=0, dilations=dilations).fit(cases) for dilations in ((1,), ())
    )
    logits, labels = case(70)
    assert nll(near.transform(logits), labels) < nll(alone.transform(logits), labels) - 0.01
    assert torch.equal(near.transform(logits).argmax(0), logits.argmax(0))


def test_overlapping_classes_have_a_temperature_each():
    def case(seed):
        random = torch.Generator().manual_seed(seed)
        logits = 2 * torch.randn(2, 4000, generator=random)
        labels = (torch.rand(2, 4000, generator=random) < logits.sigmoid()).byte()
        return logits * torch.tensor([[3.0], [1.0]]), labels

    fitted = LocalTemperature(activation="sigmoid", steps=150, width=16).fit([case(seed) for seed in range(6)])
    logits, _ = case(40)
    found = fitted.temperatures(logits)
    assert found.shape == (2, 4000)
    assert found[0].median().item() == pytest.approx(3, rel=0.2)
    assert found[1].median().item() == pytest.approx(1, rel=0.2)
    assert torch.equal(fitted.transform(logits) > 0, logits > 0)


def test_every_case_is_read_once_and_any_stream_will_do(cases):
    class Stream:
        reads = 0

        def __iter__(self):
            for case in cases:
                self.reads += 1
                yield case

        def __len__(self):
            return len(cases)

    stream = Stream()
    fitted = LocalTemperature(**QUICK).fit(stream)
    assert stream.reads == len(cases)
    assert torch.equal(fitted.transform(cases[0][0]), LocalTemperature(**QUICK).fit(cases).transform(cases[0][0]))


class Slabs:
    """A case that is read in parts, of which it says only how many voxels they have together."""

    def __init__(self, logits, labels):
        self.logits, self.labels = logits, labels

    def voxels(self, classes):
        assert classes == len(self.logits)
        return self.labels.numel()

    def slabs(self):
        for part in (slice(0, 5), slice(5, 5), slice(5, None)):
            yield self.logits[:, part], self.labels[part]


def test_a_case_in_parts_is_drawn_from_alike_and_never_held_whole(cases, likeliest):
    found = LocalTemperature(steps=150, width=16, ace=0).fit([Slabs(*case) for case in cases])
    logits, labels = too_sure_of_class_one(99)
    assert nll(found.transform(logits), labels) == pytest.approx(nll(likeliest.transform(logits), labels), abs=0.003)
    assert found.report.voxels == likeliest.report.voxels


def test_few_voxels_of_a_large_case_stand_for_all_wherever_they_come_from(cases):
    logits, labels = cases[0]
    logits = torch.cat([logits, 9 * logits], 1)  # surer in its second half
    case = Slabs(logits, torch.cat([labels, labels]))
    (((box,),), voxels) = LocalTemperature(box_voxels=50).drawing.draw([case], 1, seed=0)
    assert voxels == 2 * 12**3
    assert 300 < box.voxels <= 8 * 50 + 4  # rounded up in each part and group
    assert box.weights.sum().item() == pytest.approx(voxels, rel=1e-6)
    sure = boxes.sureness(box.logits, "softmax")[0] > boxes.SURE
    truly = boxes.sureness(logits, "softmax")[0] > boxes.SURE
    assert box.weights[sure].sum().item() == pytest.approx(truly.sum().item(), rel=1e-6)


def test_a_step_has_a_bounded_cost_and_all_steps_together_see_every_voxel(cases, monkeypatch):
    calibrator = LocalTemperature(steps=30)
    unbounded = LocalTemperature(steps=30).fit(cases)
    seen = []
    original = LocalTemperature._errors

    def errors(self, batch, network=None, shares=None, *, learning=False):
        seen.append([box.logits for box in batch])
        return original(self, batch, network, shares, learning=learning)

    monkeypatch.setattr(LocalTemperature, "_errors", errors)
    monkeypatch.setattr(local, "STEP_WORK", 7 * 12**3)
    shares = []
    calibrator.fit(cases, progress=shares.append)
    assert torch.equal(calibrator.transform(cases[0][0]), unbounded.transform(cases[0][0]))  # they are small enough
    assert shares == [(i + 1) / 30 for i in range(30)]
    seen.clear()
    monkeypatch.setattr(local, "STEP_WORK", 7 * 500)
    bounded = LocalTemperature(steps=150, ace=0).fit(cases)
    assert max(logits.shape[1] for batch in seen for logits in batch) <= 500
    known = {float(logits.sum()): logits for batch in seen for logits in batch}
    drawn, _ = bounded.drawing.draw(cases, len(cases), seed=0)
    assert len(known) == sum(math.ceil(box.voxels / 500) for (box,) in drawn)
    for axis in range(3):
        values = torch.cat([logits[axis] for logits in known.values()]).sort().values
        assert torch.equal(values, torch.cat([box.logits[axis] for (box,) in drawn]).sort().values)
    logits, labels = too_sure_of_class_one(99)
    plain = Temperature().fit(cases)
    assert nll(bounded.transform(logits), labels) < nll(plain.transform(logits), labels)


def test_large_cases_are_learned_from_in_boxes_around_doubtful_voxels(monkeypatch):
    logits = torch.zeros(2, 40, 30, 20)
    logits[0] = 20
    logits[:, 33:36, 3:6, 10:12] = 0  # the only doubt
    labels = torch.zeros(40, 30, 20, dtype=torch.uint8)
    whole = boxes.Box(logits, labels, None)
    size = boxes.box_size((40, 30, 20), 1000)
    assert math.prod(size) <= 1000
    calibrator = LocalTemperature(box_voxels=1000, dilations=(1,))
    for seed in range(20):
        box = calibrator.drawing.cut(whole, size, torch.Generator().manual_seed(seed))
        assert box.logits.shape == (2, *size)
        assert bool((box.logits[0] == 0).any())
    drawn_boxes, voxels = calibrator.drawing.draw([(logits, labels)] * 3, 3, seed=0)
    assert voxels == 3 * 24_000
    assert [len(case) for case in drawn_boxes] == [boxes.MOST_BOXES] * 3
    monkeypatch.setattr(boxes, "KEPT_BYTES", 3 * 9 * 500)  # nine bytes a voxel
    drawn_boxes, _ = calibrator.drawing.draw([(logits, labels)] * 3, 3, seed=0)
    assert sum(box.labels.numel() for case in drawn_boxes for box in case) <= 3 * 500


def true_edge(seed, noise=2.0):
    """Logits along a slanted edge, with noise from voxel to voxel that the neighbors do not share."""
    random = torch.Generator().manual_seed(seed)
    place = torch.arange(16.0)
    logits = (place[:, None, None] - place[None, :, None] + 0 * place[None, None, :]) / 2
    truth = torch.stack([-logits, logits]) / 2
    labels = (torch.rand(logits.shape, generator=random) < truth.softmax(0)[1]).long()
    return truth + noise * torch.randn(truth.shape, generator=random), labels


def test_neighbors_help_where_noise_is_not_theirs_and_no_decision_changes():
    cases = [true_edge(seed) for seed in range(4)]
    fits = [LocalTemperature(**QUICK, ace=0, smoothing=smoothing).fit(cases) for smoothing in (False, True)]
    logits, labels = true_edge(99)
    alone, with_neighbors = (each.transform(logits) for each in fits)
    assert nll(with_neighbors, labels) < nll(alone, labels) - 0.01
    assert torch.equal(with_neighbors.argmax(0), logits.argmax(0))
    assert torch.equal(with_neighbors.softmax(0).argmax(0), logits.argmax(0))
    shares = fits[1].shares
    assert shares.shape == (3,)
    assert shares.min() > 0
    assert shares.sum() < 1
    with pytest.raises(ShapeError, match="3 axes of space"):
        fits[1].transform(logits[:, 0])


def test_smoothing_is_the_mean_of_neighbors_and_comes_back_from_its_file(tmp_path):
    cases = [true_edge(seed) for seed in range(2)]
    fitted = LocalTemperature(steps=5, width=4, smoothing=True).fit(cases)
    fitted.save(tmp_path / "c.json")
    again = load_calibrator(tmp_path / "c.json")
    logits = cases[0][0]
    assert torch.equal(again.transform(logits), fitted.transform(logits))
    values = logits.softmax(0).numpy()
    padded = np.pad(values, [(0, 0)] + [(1, 1)] * 3, mode="edge")
    mean = (1 - fitted.shares.sum().item()) * values
    for axis, share in enumerate(fitted.shares.tolist(), start=1):
        for start in (0, 2):
            cut = [slice(None)] + [slice(1, -1)] * 3
            cut[axis] = slice(start, start + values.shape[axis])
            mean = mean + share / 2 * padded[tuple(cut)]
    found = fitted._smoothed(logits).softmax(0).numpy()
    same = mean.argmax(0) == values.argmax(0)
    assert 0.5 < same.mean() < 1  # elsewhere the decision is held
    np.testing.assert_allclose(found[:, same], mean[:, same], atol=1e-3)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("shape", [(700,), (37, 21), (5, 1, 61), (9, 8, 7)])
@pytest.mark.parametrize(("smoothing", "width"), [(False, 16), (True, 5)])
def test_compiled_code_gives_what_torch_gives_in_double_precision(activation, shape, smoothing, width):
    random = torch.Generator().manual_seed(len(shape))
    cases = []
    for _ in range(2):
        logits = 4 * torch.randn(3, *shape, generator=random)
        labels = (logits + torch.randn(3, *shape, generator=random)).argmax(0)
        one_hot = torch.stack([labels == c for c in range(3)]).to(torch.uint8)
        cases.append((logits, labels if activation == "softmax" else one_hot))
    calibrator = LocalTemperature(activation=activation, smoothing=smoothing, width=width, steps=12).fit(cases)
    logits = cases[0][0].clone()
    logits[:, ..., :3] *= 12  # sure beyond what a float32 tells from 1
    logits[:, ..., 3:5] = 0  # equals
    single, double = calibrator.transform(logits), calibrator.transform(logits.double())
    probability = (lambda x: x.softmax(0)) if activation == "softmax" else torch.sigmoid
    assert single.dtype == torch.float32
    torch.testing.assert_close(probability(single).double(), probability(double), rtol=1e-4, atol=1e-5)
    assert (probability(double) - probability(logits.double())).abs().max() > 0.01  # something was done
    if activation == "softmax":
        assert torch.equal(single.argmax(0), logits.argmax(0))
    assert torch.equal(single.sign(), logits.sign()) or activation == "softmax"


def test_overlapping_classes_are_smoothed_each_by_itself():
    logits, labels = true_edge(0)
    cases = [(logits[1:], labels[None])] * 2
    fitted = LocalTemperature(activation="sigmoid", steps=5, width=4, smoothing=True).fit(cases)
    found = fitted.transform(logits[1:])
    assert torch.equal(found > 0, logits[1:] > 0)
    assert not torch.allclose(found, logits[1:])


def test_the_report_tells_how_far_the_objective_fell(fitted):
    assert fitted.report.objective == "1 ACE / own + 1 NLL / own"
    assert fitted.report.before == 2
    assert fitted.report.after < 1.8
    assert fitted.report.passes == 1


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"ace": -1}, "the weight ace must be a number of at least 0"),
        ({"nll": math.nan}, "the weight nll must be a number"),
        ({"ace": 0, "nll": 0}, "both are 0"),
        ({"steps": 0}, "steps must be a whole number of at least 1"),
        ({"dilations": (0,)}, "dilations must be a whole number of at least 1"),
        ({"activation": "none"}, "activation must be one of"),
    ],
)
def test_senseless_settings_are_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        LocalTemperature(**settings)


def test_what_cannot_be_learned_from_is_refused(cases, fitted):
    logits, labels = cases[0]
    broken = logits.clone()
    broken[0, 0, 0, 0] = math.nan
    with pytest.raises(RangeError, match="must be finite"):
        LocalTemperature(**QUICK).fit([(broken, labels)])
    with pytest.raises(ShapeError, match="every case must have 3 classes, as the first has; case 1 has 4"):
        LocalTemperature(**QUICK).fit([cases[0], drawn((4, 4, 4), classes=4)])
    with pytest.raises(ConfigError, match="case 0 has none"):
        LocalTemperature(**QUICK).fit([(torch.zeros(3, 0, 2), torch.zeros(0, 2))])
    with pytest.raises(ShapeError, match="must have the 3 classes"):
        fitted.transform(torch.zeros(4, 10))
    with pytest.raises(ConfigError, match="must be fitted"):
        LocalTemperature().transform(logits)


def test_a_file_with_other_weights_is_refused(fitted, tmp_path):
    path = tmp_path / "c.json"
    fitted.save(path)
    text = path.read_text()
    for old, new in (('"width": 16', '"width": 17'), ('"axes": 1', '"axes": 9'), ('"classes": 3', '"classes": null')):
        path.write_text(text.replace(old, new))
        with pytest.raises(SegcalError, match="must be a calibrator that segcal wrote"):
            load_calibrator(path)
