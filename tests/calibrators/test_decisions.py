"""What changes no decision changes it in no voxel, however rounding falls."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from truths import KINDS, drawn

from segcal.calibrators import CALIBRATORS, ClassTemperature, Temperature, make_calibrator
from segcal.calibrators.calibrator import keep_decisions, keep_sides

TEMPERATURES = (0.01, 0.3, 7.0, 100.0)


@pytest.fixture(scope="module")
def adversarial():
    """float32 logits of three classes: neighbors, equal ones, very large and very small ones, in every order."""
    random = np.random.default_rng(0)
    sizes = np.array([0, 1e-45, 1e-38, 1e-20, 1e-8, 0.3, 1, 3, 88, 1e4, 1e20, 3e38], dtype=np.float32)
    first = np.repeat(np.concatenate([sizes, -sizes]), 40)
    with np.errstate(over="ignore", under="ignore"):
        first = first * random.uniform(0.5, 1, len(first)).astype(np.float32)
        above, below = (np.nextafter(first, np.float32(side) * np.inf) for side in (1, -1))
        above, below = np.nextafter(above, np.float32(np.inf)), np.where(random.random(len(first)) < 0.5, below, first)
    stack = np.stack([first, above, below])
    shuffled = random.permuted(stack, axis=0)
    equal = np.broadcast_to(first, (3, len(first)))
    return torch.from_numpy(np.concatenate([shuffled, equal, np.float32(2) * random.normal(size=(3, 2000))], 1)).float()


def test_no_method_claims_more_than_to_keep_the_most_probable_class():
    """A temperature may change where a union of classes is predicted, as it draws all of them together."""
    logits = torch.tensor([0.51, 0.26, 0.23]).log()
    union = [Temperature(t).transform(logits).softmax(0)[1:].sum() >= 0.5 for t in (1.0, 3.0)]
    assert [bool(each) for each in union] == [False, True]
    for name in CALIBRATORS:
        summary = make_calibrator(name).summary
        assert "decision" not in summary
        assert ("the most probable class stays" in summary) == make_calibrator(name).keeps_decisions


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_most_probable_class_stays_what_it_was(adversarial, temperature, dtype):
    logits = adversarial.clamp(-6e4, 6e4).half() if dtype == torch.float16 else adversarial.to(dtype)
    assert torch.equal(Temperature(temperature).transform(logits).argmax(0), logits.argmax(0))


def class_temperature(inverse):
    """Classes that overlap, each multiplied by its own number."""
    content = {"classes": len(inverse), "inputs": "logits", "fit": None, "state": {"parameters": inverse}}
    return ClassTemperature(activation="sigmoid").restore(content)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_overlapping_classes_stay_on_their_side_of_a_half(adversarial, temperature):
    by_class = class_temperature([[1 / temperature], [1.0], [temperature]])
    for calibrator in (Temperature(temperature, activation="sigmoid"), by_class):
        assert torch.equal(calibrator.transform(adversarial).sign(), adversarial.sign())


def test_rounding_does_join_classes_without_care(adversarial):
    assert not torch.equal((adversarial / 7).argmax(0), adversarial.argmax(0))
    assert not torch.equal((adversarial * 100).argmax(0), adversarial.argmax(0))
    assert not torch.equal((adversarial / 100).sign(), adversarial.sign())


def test_classes_that_overlap_are_scaled_each_by_its_own_temperature():
    by_class = class_temperature([[10.0], [0.1]])
    assert by_class.transform(torch.tensor([[2.0], [3.0]])).flatten().tolist() == pytest.approx([20, 0.3])


def test_decisions_are_kept_by_a_step_of_rounding_and_only_where_they_were_lost():
    before = torch.tensor([[1.0, 5.0, 0.0], [2.0, 4.0, 0.0], [1.5, 0.0, 0.0]])
    after = torch.tensor([[0.5, 3.0, 0.2], [0.5, 2.0, 0.2], [0.5, 0.0, 0.2]])
    kept = keep_decisions(before, after)
    assert torch.equal(kept.argmax(0), before.argmax(0))
    assert torch.allclose(kept, after, rtol=1e-6)
    assert torch.equal(kept[:, 1:], after[:, 1:])
    assert keep_decisions(before, after - 1) is not after
    assert torch.equal(keep_decisions(before[:1], after[:1]), after[:1])


def test_sides_are_kept_by_the_smallest_number_and_only_where_they_were_lost():
    before, after = torch.tensor([1e-40, -1e-40, 0.0, 2.0, -3.0]), torch.tensor([0.0, 0.0, 0.0, 1.0, -1.0])
    kept = keep_sides(before, after)
    assert torch.equal(kept.sign(), before.sign())
    assert torch.allclose(kept, after, atol=1e-37)


@pytest.mark.parametrize(("method", "activation"), KINDS)
def test_calibrators_say_whether_they_keep_decisions_and_keep_their_word(method, activation):
    logits, labels = drawn(activation, voxels=2000)
    logits = 3 * logits + torch.tensor([[2.0], [0.0], [-2.0]])
    fitted = make_calibrator(method, activation=activation).fit([(logits, labels)])
    wanted = method == "temperature" or (method, activation) == ("class-temperature", "sigmoid")
    assert fitted.keeps_decisions is wanted
    shown = fitted.transform(logits)
    if activation == "softmax":
        kept = torch.equal(shown.argmax(0), logits.argmax(0))
    else:
        kept = torch.equal(shown > 0, logits > 0)
    assert kept is wanted  # the biases of these logits are wrong, so that the others do change some
