from __future__ import annotations

from types import SimpleNamespace

import oracle
import pytest
import torch
from monai.data import MetaTensor
from monai.metrics import calibration_binning

from segcal import Binning, ConfigError, LabelError, RangeError, ShapeError, bin_statistics
from segcal.collect import pick_backend

SUMS = ("count", "confidence_sum", "label_sum")


def assert_same(got, expected, **tolerances) -> None:
    for name in SUMS:
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), **tolerances)


def assert_sums(stats, count, confidence_sum, label_sum) -> None:
    """Sums of the first case, written out by hand."""
    for name, expected in zip(SUMS, (count, confidence_sum, label_sum), strict=True):
        torch.testing.assert_close(getattr(stats, name)[0], torch.tensor(expected, dtype=torch.float64), msg=name)


def softmax_probabilities(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).softmax(1).to(dtype)


# By hand: two classes, four voxels, two bins.
P = torch.tensor([[[0.75, 0.25, 0.625, 1.0], [0.25, 0.75, 0.375, 0.0]]])
Y = torch.tensor([[0, 1, 1, 0]])
BY_HAND = ([[1, 3], [3, 1]], [[0.25, 2.375], [0.625, 0.75]], [[0, 2], [1, 1]])


def test_three_sums_by_hand(backend):
    stats = bin_statistics(P, Y, bins=2, backend=backend)
    assert_sums(stats, *BY_HAND)
    assert {getattr(stats, name).dtype for name in SUMS} == {torch.float64}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("channel", [False, True], ids=["map", "map with channel axis"])
def test_whole_labels_of_any_type_give_the_same_sums(dtype, channel, backend):
    labels = (Y[:, None] if channel else Y).to(dtype)
    assert_sums(bin_statistics(P, labels, bins=2, backend=backend), *BY_HAND)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["map", "map with channel axis", "one-hot"])
def test_float_labels_give_the_same_sums(dtype, form, backend):
    labels = {"map": Y, "map with channel axis": Y[:, None], "one-hot": oracle.one_hot(Y, 2)}[form].to(dtype)
    assert_sums(bin_statistics(P, labels, bins=2, backend=backend), *BY_HAND)


def test_labels_that_overlap_are_for_probabilities_that_overlap(backend):
    labels = oracle.one_hot(Y, 2)
    labels[0, :, 2] = 1
    with pytest.raises(LabelError, match=r"must sum to 1 .* in every voxel; in case 0 they sum to 1\.25"):
        bin_statistics(P, labels, bins=2, backend=backend)
    apart = torch.tensor([[[0.75, 0.25, 0.625, 1.0], [0.25, 0.75, 0.875, 0.0]]])
    assert bin_statistics(apart, labels, bins=2, backend=backend).label_sum.sum() == 5


def test_soft_labels_count_by_their_share(backend):
    labels = torch.tensor([[[0.5, 0.0, 0.25, 1.0], [0.5, 1.0, 0.75, 0.0]]])
    assert_sums(bin_statistics(P, labels, bins=2, backend=backend), *BY_HAND[:2], [[0, 1.75], [1.25, 1.0]])


@pytest.mark.parametrize("with_channel", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_labels_of_a_single_class_are_that_classs_own(dtype, with_channel, backend):
    labels = torch.tensor([[1, 0, 1, 1]]).to(dtype)
    stats = bin_statistics(P[:, :1], labels[:, None] if with_channel else labels, bins=2, backend=backend)
    assert_sums(stats, [[1, 3]], [[0.25, 2.375]], [[0, 3]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
@pytest.mark.parametrize("channel", [False, True])
def test_voxels_off_the_mask_are_left_out_whatever_they_hold(dtype, channel, backend):
    probabilities, labels = P.clone(), Y.clone()
    probabilities[..., 1], labels[:, 2] = torch.nan, 99
    mask = torch.tensor([[1, 0, 0, 1]]).to(dtype)
    stats = bin_statistics(probabilities, labels, bins=2, mask=mask[:, None] if channel else mask, backend=backend)
    assert_sums(stats, [[0, 2], [2, 0]], [[0, 1.75], [0.25, 0]], [[0, 2], [0, 0]])


@pytest.mark.parametrize(
    ("ignore_index", "dtype"),
    [(255, torch.uint8), (-1, torch.int16), (-100, torch.int64), (7, torch.float32), (-1, torch.float64)],
)
def test_voxels_with_the_ignored_label_are_left_out(ignore_index, dtype, backend):
    labels = torch.tensor([[0, ignore_index, ignore_index, 0]]).to(dtype)
    stats = bin_statistics(P, labels, bins=2, ignore_index=ignore_index, backend=backend)
    assert_sums(stats, [[0, 2], [2, 0]], [[0, 1.75], [0.25, 0]], [[0, 2], [0, 0]])


def test_mask_and_ignored_label_leave_out_what_either_does(backend):
    labels, mask = torch.tensor([[0, 1, 9, 0]]), torch.tensor([[1, 1, 1, 0]])
    stats = bin_statistics(P, labels, bins=2, mask=mask, ignore_index=9, backend=backend)
    assert_sums(stats, [[1, 1], [1, 1]], [[0.25, 0.75], [0.25, 0.75]], [[0, 1], [0, 1]])


@pytest.mark.parametrize(("ignore_index", "held", "dtype"), [(-1, 255, torch.uint8), (255, -1, torch.int8)])
def test_an_ignored_label_that_the_type_cannot_hold_ignores_nothing(ignore_index, held, dtype, backend):
    labels = torch.tensor([[0, 1, 1, held]]).to(dtype)
    with pytest.raises(LabelError, match=rf"holds {held}\."):
        bin_statistics(P, labels, ignore_index=ignore_index, backend=backend)


@pytest.mark.parametrize("shape", [(7,), (5, 6), (3, 4, 5)], ids=["1-D", "2-D", "3-D"])
@pytest.mark.parametrize("with_channel", [False, True])
def test_an_image_of_any_dimension_is_a_list_of_voxels(shape, with_channel, kernel, backend):
    probabilities, labels = softmax_probabilities(2, 3, *shape), torch.randint(0, 3, (2, *shape))
    binning = Binning(6, kernel=kernel)
    got = bin_statistics(probabilities, labels[:, None] if with_channel else labels, binning=binning, backend=backend)
    flat = bin_statistics(probabilities.flatten(2), labels.flatten(1), binning=binning, backend=backend)
    assert_same(got, flat, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_exactly(dtype, kernel, backend):
    half, labels = softmax_probabilities(2, 3, 200, dtype=dtype), torch.randint(0, 3, (2, 200))
    got = bin_statistics(half, labels, binning=Binning(7, kernel=kernel), backend=backend)
    expected = oracle.bin_sums(half.double(), oracle.one_hot(labels, 3), bins=7, kernel=kernel)
    for name, value in zip(SUMS, expected, strict=True):
        torch.testing.assert_close(getattr(got, name), value, rtol=1e-5, atol=1e-4 if kernel == "gaussian" else 1e-9)


def test_tensors_need_not_be_contiguous(backend):
    probabilities, labels = softmax_probabilities(2, 3, 8, 10), torch.randint(0, 3, (2, 8, 10))
    mask = torch.rand(2, 8, 10) < 0.7
    expected = bin_statistics(probabilities, labels, mask=mask, backend=backend)
    channels_last = probabilities.contiguous(memory_format=torch.channels_last)
    assert_same(bin_statistics(channels_last, labels, mask=mask, backend=backend), expected)
    turned = [tensor.transpose(-1, -2).contiguous().transpose(-1, -2) for tensor in (probabilities, labels, mask)]
    assert not any(tensor.is_contiguous() for tensor in turned)
    assert_same(bin_statistics(turned[0], turned[1], mask=turned[2], backend=backend), expected)
    strided = torch.zeros(2, 3, 8, 20)[..., ::2]
    strided.copy_(probabilities)
    assert_same(bin_statistics(strided, labels, mask=mask, backend=backend), expected)
    expanded = probabilities[:1].expand(2, 3, 8, 10)
    assert_same(
        bin_statistics(expanded, labels, backend=backend), bin_statistics(expanded.clone(), labels, backend=backend)
    )


def test_metatensors_are_read_as_tensors(backend):
    probabilities, labels, mask = (
        softmax_probabilities(1, 3, 6, 6),
        torch.randint(0, 3, (1, 1, 6, 6)),
        torch.ones(1, 6, 6),
    )
    got = bin_statistics(MetaTensor(probabilities), MetaTensor(labels), mask=MetaTensor(mask), backend=backend)
    assert_same(got, bin_statistics(probabilities, labels, backend=backend))
    assert type(got.count) is torch.Tensor


def test_inputs_are_left_as_they_were(backend):
    probabilities, labels = softmax_probabilities(1, 3, 50), torch.randint(0, 3, (1, 50))
    before = probabilities.clone(), labels.clone()
    bin_statistics(probabilities, labels, backend=backend)
    assert torch.equal(probabilities, before[0])
    assert torch.equal(labels, before[1])


def test_a_batch_equals_its_cases_one_by_one(kernel, backend):
    probabilities, labels, mask = (
        softmax_probabilities(3, 4, 300),
        torch.randint(0, 4, (3, 300)),
        torch.rand(3, 300) < 0.5,
    )
    options = {"binning": Binning(9, kernel=kernel), "backend": backend}
    batch = bin_statistics(probabilities, labels, mask=mask, **options)
    for case in range(3):
        one = slice(case, case + 1)
        alone = bin_statistics(probabilities[one], labels[one], mask=mask[one], **options)
        assert_same(batch.select(cases=[case]), alone, rtol=0, atol=0)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5])
def test_one_voxel(value, backend):
    stats = bin_statistics(torch.tensor([[[value]]]), torch.tensor([[[1]]]), bins=4, backend=backend)
    where = {0.0: 0, 0.5: 2, 1.0: 3}[value]
    expected = [[float(k == where) for k in range(4)]]
    assert_sums(stats, expected, [[value * e for e in expected[0]]], expected)


def test_an_absent_class_has_counts_but_no_labels(backend):
    stats = bin_statistics(softmax_probabilities(1, 3, 40), torch.zeros(1, 40, dtype=torch.int64), backend=backend)
    assert stats.label_sum[0].sum(-1).tolist() == [40, 0, 0]
    assert stats.count[0].sum(-1).tolist() == [40, 40, 40]


@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 2, 0), (1, 2, 3, 0)], ids=["no case", "no voxel", "an empty axis"])
def test_nothing_gives_empty_sums(shape, kernel, backend):
    labels = torch.zeros(shape[0], *shape[2:], dtype=torch.int64)
    stats = bin_statistics(torch.zeros(shape), labels, binning=Binning(3, kernel=kernel), backend=backend)
    assert stats.count.shape == (shape[0], 2, 3)
    assert stats.count.sum() == 0


@pytest.mark.parametrize("voxels", [2**24 + 1, 60_000_000])
def test_counts_and_means_are_exact_where_single_precision_sums_saturate(voxels):
    p, limit = 0.9375, 2**24  # p is exact in binary, so the mean must be, too
    probabilities = torch.full((1, 1, voxels), p)
    labels = torch.ones(1, 1, voxels, dtype=torch.uint8)
    stats = bin_statistics(probabilities, labels, bins=10)
    assert stats.count[0, 0].tolist() == [0] * 9 + [voxels]
    assert stats.label_sum[0, 0, 9] == voxels
    assert stats.mean_confidence[0, 0, 9] == p
    mean, _, count = calibration_binning(probabilities, labels, num_bins=10)
    assert count[0, 0, 9] == limit  # MONAI 1.6 adds in float32
    if voxels > 2 * limit:
        assert mean[0, 0, 9] != p


def test_the_reference_is_exact_beyond_single_precision_too():
    voxels = 2**24 + 1
    stats = bin_statistics(torch.full((1, 1, voxels), 0.5), torch.ones(1, 1, voxels), bins=10, backend="torch")
    assert stats.count[0, 0, 5] == stats.label_sum[0, 0, 5] == voxels
    assert stats.mean_confidence[0, 0, 5] == 0.5


def test_statistics_carry_the_gradient_of_the_sums(backend):
    probabilities = P.clone().requires_grad_()
    bin_statistics(probabilities, Y, bins=2, backend=backend).confidence_sum[0, 0, 1].backward()
    assert probabilities.grad.tolist() == [[[1, 0, 1, 1], [0, 0, 0, 0]]]


def test_twenty_hard_bins_if_nothing_is_said():
    assert bin_statistics(P, Y).binning == Binning(20)


def test_probabilities_that_pass_zero_or_one_by_rounding_count_as_those_and_have_no_gradient(backend):
    probabilities = torch.tensor([[[1.0004, -0.0004, 0.5]]], requires_grad=True)
    stats = bin_statistics(probabilities, torch.ones(1, 1, 3), bins=2, backend=backend)
    assert_sums(stats.detach(), [[1, 2]], [[0, 1.5]], [[1, 2]])
    stats.confidence_sum.sum().backward()
    assert probabilities.grad.tolist() == [[[0, 0, 1]]]


def test_numba_is_picked_on_the_cpu_and_an_argument_overrides(monkeypatch):
    monkeypatch.delenv("SEGCAL_BACKEND", raising=False)
    assert pick_backend(torch.zeros(1), None) == "numba"
    assert pick_backend(torch.zeros(1), "torch") == "torch"
    assert pick_backend(torch.zeros(1, device="meta"), None) == "torch"


ON_GPU = SimpleNamespace(device=torch.device("cuda"))


def test_numba_is_refused_on_a_gpu():
    with pytest.raises(ConfigError, match=r"backend='numba' works on the CPU; the inputs are on cuda. Use 'torch'."):
        pick_backend(ON_GPU, "numba")


@pytest.mark.parametrize(
    ("value", "on_cpu", "on_gpu"),
    [("", "numba", "torch"), ("torch", "torch", "torch"), ("numba", "numba", "torch")],
)
def test_the_variable_holds_wherever_its_backend_works(monkeypatch, value, on_cpu, on_gpu):
    monkeypatch.setenv("SEGCAL_BACKEND", value)
    assert pick_backend(torch.zeros(1), None) == on_cpu
    assert pick_backend(ON_GPU, None) == on_gpu


def test_a_variable_that_names_no_backend_is_refused(monkeypatch):
    monkeypatch.setenv("SEGCAL_BACKEND", "cuda")
    message = r"SEGCAL_BACKEND must be one of 'torch', 'numba'; got 'cuda'. Unset it to let segcal pick."
    with pytest.raises(ConfigError, match=message):
        bin_statistics(P, Y)


def with_value(tensor: torch.Tensor, place: tuple[int, ...], value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed[place] = value
    return changed


THREE = torch.full((2, 3, 4, 5), 1 / 3)
MAP = torch.zeros(2, 4, 5, dtype=torch.int64)
ONE_HOT = oracle.one_hot(MAP, 3)


@pytest.mark.parametrize(
    ("probabilities", "labels", "options", "error", "message"),
    [
        (THREE, MAP[:, :, :4], {}, ShapeError, r"got \(2, 4, 4\) for inputs of shape \(2, 3, 4, 5\)\. Check the order"),
        (THREE, MAP[:1], {}, ShapeError, r"got \(1, 4, 5\) for inputs"),
        (THREE, ONE_HOT[:, :2], {}, ShapeError, r"got \(2, 2, 4, 5\) for inputs"),
        (THREE[0, 0], MAP, {}, ShapeError, r"axes \(case, class, space, \.\.\.\); got \(4, 5\)"),
        (THREE[:, :0], MAP, {}, ShapeError, r"at least one class; got \(2, 0, 4, 5\)"),
        (THREE.long(), MAP, {}, ShapeError, r"must be floating point; got torch\.int64"),
        (THREE, MAP, {"mask": MAP[0]}, ShapeError, r"mask must be .* got \(4, 5\) for \(2, 3, 4, 5\)"),
        (THREE, with_value(MAP, (1, 2, 3), 3), {}, LabelError, r"classes 0 to 2; case 1, voxel 13 .* holds 3\. Remap"),
        (THREE, with_value(MAP, (0, 0, 1), -1), {}, LabelError, r"case 0, voxel 1 .* holds -1\."),
        (THREE, with_value(MAP.byte(), (1, 3, 4), 255), {}, LabelError, r"case 1, voxel 19 .* holds 255\."),
        (THREE, with_value(MAP.float(), (0, 1, 0), 0.5), {}, LabelError, r"voxel 5 .* holds 0\.5\..*soft labels need"),
        (THREE, with_value(MAP.float(), (0, 1, 0), torch.nan), {}, LabelError, r"voxel 5 .* holds nan"),
        (THREE, with_value(MAP.double(), (1, 1, 0), torch.inf), {}, LabelError, r"case 1, voxel 5 .* holds inf"),
        (THREE, with_value(ONE_HOT, (1, 2, 0, 3), 1.5), {}, LabelError, r"\[0, 1\]; case 1, class 2, voxel 3 .* 1\.5"),
        (THREE, with_value(ONE_HOT, (0, 1, 1, 1), torch.nan), {}, LabelError, r"case 0, class 1, voxel 6 .* nan"),
        (THREE, ONE_HOT.long() * 2, {}, LabelError, r"holds 2\. Integer label maps have no channel per class"),
        (THREE, ONE_HOT, {"ignore_index": 2}, LabelError, r"ignore_index needs an integer label map.*mask"),
        (
            with_value(THREE, (1, 2, 0, 0), 7.31),
            MAP,
            {},
            RangeError,
            r"case 1, class 2 reaches 7\.31\. If these are lo",
        ),
        (with_value(THREE, (0, 1, 2, 3), -0.5), MAP, {}, RangeError, r"case 0, class 1 reaches -0\.5\."),
        (with_value(THREE, (0, 1, 2, 3), torch.inf), MAP, {}, RangeError, r"case 0, class 1 reaches inf\."),
        (with_value(THREE, (1, 0, 2, 3), torch.nan), MAP, {}, RangeError, r"case 1, class 0 contains NaN.*by mask"),
        (THREE, MAP, {"bins": 5, "binning": Binning(5)}, ConfigError, r"bins and binning must not be given together"),
        (THREE, MAP, {"bins": 0}, ConfigError, r"bins must be a whole number from 1 to 100000; got 0"),
        (
            THREE,
            MAP,
            {"backend": "cuda"},
            ConfigError,
            r"backend must be one of 'torch', 'numba'; got 'cuda'",
        ),
    ],
)
def test_bad_input_is_refused_with_its_value_and_place(probabilities, labels, options, error, message, backend):
    with pytest.raises(error, match=message):
        bin_statistics(probabilities, labels, **{"backend": backend, **options})


def test_numba_on_another_device_is_refused():
    meta = torch.zeros(1, 2, 4, device="meta")
    with pytest.raises(ConfigError, match=r"backend='numba' works on the CPU; the inputs are on meta"):
        bin_statistics(meta, meta[:, 0], backend="numba")


def test_what_is_no_tensor_is_refused_with_a_hint():
    probabilities, labels = torch.rand(1, 2, 3), torch.ones(1, 3).long()
    for inputs, truth, mask, name in (
        (probabilities.numpy(), labels, None, "logits or probabilities"),
        (probabilities, labels.numpy(), None, "labels"),
        (probabilities, labels, labels.numpy(), "mask"),
    ):
        message = rf"{name} must be a torch tensor; got numpy\.ndarray\. Pass torch\.from_numpy"
        with pytest.raises(ShapeError, match=message):
            bin_statistics(inputs, truth, mask=mask)
    with pytest.raises(ShapeError, match=r"must be a torch tensor; got builtins\.list\."):
        bin_statistics([[[0.5]]], labels)
    with pytest.raises(ShapeError, match=r"must be a dense tensor"):
        bin_statistics(probabilities.to_sparse(), labels)
    with pytest.raises(LabelError, match=r"must be real numbers"):
        bin_statistics(probabilities, labels.to(torch.complex64))


@pytest.mark.parametrize("options", [{"binning": 20}, {"bins": "20"}, {"ignore_index": "1"}, {"ignore_index": 1.5}])
def test_options_of_a_wrong_type_are_refused(options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))} must be a"):
        bin_statistics(torch.rand(1, 2, 3), torch.ones(1, 3).long(), **options)
