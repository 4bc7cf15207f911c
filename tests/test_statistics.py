from __future__ import annotations

import os
import pickle
import stat
import zipfile

import numpy as np
import pytest
import torch

from segcal import Binning, BinStatistics, ConfigError, SegcalError, ShapeError, bin_statistics

NAN = torch.nan


def statistics(count, confidence_sum, label_sum, **binning) -> BinStatistics:
    sums = [torch.tensor(values, dtype=torch.float64) for values in (count, confidence_sum, label_sum)]
    return BinStatistics(*sums, Binning(sums[0].shape[-1], **binning))


@pytest.fixture
def two_cases() -> BinStatistics:
    """Two cases, two classes, four bins; bins without voxels among them."""
    return statistics(
        [[[4, 0, 2, 10], [0, 0, 0, 16]], [[8, 8, 0, 0], [1, 1, 1, 13]]],
        [[[0.5, 0, 1.5, 9.0], [0, 0, 0, 14.0]], [[1.0, 3.0, 0, 0], [0.125, 0.25, 0.5, 13.0]]],
        [[[1, 0, 1, 10], [0, 0, 0, 12]], [[0, 4, 0, 0], [0, 1, 0, 13]]],
    )


def same(a: BinStatistics, b: BinStatistics) -> bool:
    return a.binning == b.binning and all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in ("count", "confidence_sum", "label_sum")
    )


def test_means_are_sums_over_counts_and_an_empty_bin_has_none(two_cases):
    expected = {
        "mean_confidence": [0.125, NAN, 0.75, 0.9],
        "frequency": [0.25, NAN, 0.5, 1.0],
        "signed_gap": [-0.125, NAN, 0.25, -0.1],
        "gap": [0.125, NAN, 0.25, 0.1],
    }
    for name, values in expected.items():
        got = getattr(two_cases, name)[0, 0]
        torch.testing.assert_close(got, torch.tensor(values, dtype=torch.float64), equal_nan=True)
    assert two_cases.occupied[0, 0].tolist() == [True, False, True, True]
    assert (two_cases.cases, two_cases.classes) == (2, 2)


@pytest.mark.parametrize(
    ("empty_below", "occupied"), [(0.0, [False, True, True]), (0.25, [False, True, True]), (0.5, [False, False, True])]
)
def test_a_bin_below_the_threshold_is_empty_and_one_without_weight_always(empty_below, occupied):
    stats = statistics([[[0, 0.25, 0.5]]], [[[0, 0, 0]]], [[[0, 0, 0]]], empty_below=empty_below)
    assert stats.occupied[0, 0].tolist() == occupied


def test_adding_sums_voxels_case_by_case(two_cases):
    twice = two_cases + two_cases
    assert twice.count[1, 0].tolist() == [16, 16, 0, 0]
    assert twice.label_sum[0, 0].tolist() == [2, 0, 2, 20]
    assert twice.confidence_sum[0, 1].tolist() == [0, 0, 0, 28]


def test_concatenate_keeps_the_cases_in_order(two_cases):
    first, second = two_cases.select(cases=[0]), two_cases.select(cases=[1])
    assert same(BinStatistics.concatenate([first, second]), two_cases)
    assert BinStatistics.concatenate(iter([second, two_cases])).count[:, 0, 0].tolist() == [8, 4, 8]


def test_pool_sums_over_cases_or_classes_and_keeps_the_axis(two_cases):
    assert two_cases.pool("case").count.tolist() == [[[12, 8, 2, 10], [1, 1, 1, 29]]]
    assert two_cases.pool("class").label_sum.tolist() == [[[1, 0, 1, 22]], [[0, 5, 0, 13]]]


@pytest.mark.parametrize(
    "chosen", [[1], [-1], torch.tensor([1]), torch.tensor([False, True])], ids=["list", "from_end", "index", "boolean"]
)
def test_select_takes_indices_and_booleans(two_cases, chosen):
    assert two_cases.select(cases=chosen, classes=[1, 0]).count.tolist() == [[[1, 1, 1, 13], [8, 8, 0, 0]]]
    assert two_cases.select(classes=chosen).count[:, 0, 3].tolist() == [16, 13]


def test_select_of_nothing_is_empty(two_cases):
    assert two_cases.select(cases=[]).count.shape == (0, 2, 4)


def test_rebin_adds_neighboring_bins(two_cases):
    halves = two_cases.rebin(2)
    assert halves.count[0, 0].tolist() == [4, 12]
    assert halves.label_sum[1, 1].tolist() == [1, 13]
    assert halves.binning == Binning(2)
    assert same(two_cases.rebin(4), two_cases)


def test_detach_cuts_the_gradient():
    probabilities = torch.rand(1, 2, 5, requires_grad=True)
    stats = bin_statistics(probabilities, torch.zeros(1, 5, dtype=torch.int64))
    assert stats.count.requires_grad
    assert not any(getattr(stats.detach(), name).requires_grad for name in ("count", "confidence_sum", "label_sum"))


def test_a_file_gives_back_the_same_statistics(two_cases, tmp_path):
    two_cases.save(tmp_path / "case.npz")
    assert same(BinStatistics.load(tmp_path / "case.npz"), two_cases)


@pytest.mark.parametrize(
    "binning",
    [
        Binning(3, kernel="gaussian", bandwidth=1.5, empty_below=0.2),
        Binning(3, kernel="bspline"),
        Binning(3, closed="right", empty_below=0),
    ],
)
def test_a_file_keeps_the_binning_and_every_digit(binning, tmp_path):
    stats = bin_statistics(torch.rand(2, 2, 50), torch.randint(0, 2, (2, 50)), binning=binning)
    stats.save(str(tmp_path / "case.npz"))
    assert same(BinStatistics.load(str(tmp_path / "case.npz")), stats)


def test_a_file_is_replaced_whole_and_nothing_else_is_left(two_cases, tmp_path):
    path = tmp_path / "case.npz"
    path.write_text("old")
    two_cases.save(path)
    assert same(BinStatistics.load(path), two_cases)
    assert os.listdir(tmp_path) == ["case.npz"]


def test_a_file_has_the_permissions_of_any_new_file(two_cases, tmp_path):
    (tmp_path / "other").write_text("")
    two_cases.save(tmp_path / "case.npz")
    modes = {stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("other", "case.npz")}
    assert len(modes) == 1


def test_a_file_that_cannot_be_written_leaves_the_old_one(two_cases, tmp_path, monkeypatch):
    path = tmp_path / "case.npz"
    two_cases.save(path)

    def full_disk(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        (two_cases + two_cases).save(path)
    assert same(BinStatistics.load(path), two_cases)
    assert os.listdir(tmp_path) == ["case.npz"]


def test_a_missing_file_is_reported_as_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        BinStatistics.load(tmp_path / "nowhere.npz")


def test_no_damage_to_a_file_ends_in_anything_but_the_same_statistics_or_one_sentence(two_cases, tmp_path):
    path = tmp_path / "case.npz"
    two_cases.save(path)
    whole = path.read_bytes()
    damaged = [whole[:length] for length in range(0, len(whole), 37)]
    damaged += [whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :] for at in range(len(whole))]
    refusals = []
    for content in damaged:
        path.write_bytes(content)
        try:
            assert same(BinStatistics.load(path), two_cases)  # bytes that nothing depends on, such as a date
        except SegcalError as error:
            refusals.append(str(error))
    assert len(refusals) > len(damaged) / 2
    for sentence in set(refusals):
        assert sentence.startswith(f"{path} must ")
        assert sentence.count(". ") == 1  # the remedy
        assert sentence.rstrip(".") + "." == sentence


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("name", ["header", "count"])
def test_an_array_with_more_bytes_than_its_header_announces_is_rejected(two_cases, tmp_path, name, kind):
    path = tmp_path / "case.npz"
    two_cases.save(path)
    with zipfile.ZipFile(path) as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    members[f"{name}.npy"] += b"more"
    with zipfile.ZipFile(path, "w", kind) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    with pytest.raises(SegcalError, match=f"array '{name}' holds more than its header announces"):
        BinStatistics.load(path)


def write_foreign(kind: str, path) -> None:
    sums = dict.fromkeys(("count", "confidence_sum", "label_sum"), np.zeros((1, 1, 3)))
    header = '{"format": "segcal bin statistics 1", "binning": {"bins": 3}}'
    with open(path, "wb") as file:  # an open file, because numpy appends .npz to names
        if kind == "text":
            file.write(b"case,dice\n1,0.9\n")
        elif kind == "npy":
            np.save(file, np.zeros(3))
        elif kind == "npz of something else":
            np.savez(file, probabilities=np.zeros(3))
        elif kind == "later format":
            np.savez(file, header=np.array(header.replace("statistics 1", "statistics 9")), **sums)
        elif kind == "header without binning":
            np.savez(file, header=np.array('{"format": "segcal bin statistics 1"}'), **sums)
        elif kind == "binning with an unknown field":
            np.savez(file, header=np.array(header.replace("bins", "sums")), **sums)
        elif kind == "bins that do not fit":
            np.savez(file, header=np.array(header.replace("3", "4")), **sums)
        elif kind == "sum missing":
            np.savez(file, header=np.array(header), count=sums["count"])


@pytest.mark.parametrize(
    "kind",
    [
        "nothing",
        "text",
        "npy",
        "npz of something else",
        "later format",
        "header without binning",
        "binning with an unknown field",
        "bins that do not fit",
        "sum missing",
    ],
)
def test_a_foreign_file_is_refused_by_name(kind, tmp_path):
    path = tmp_path / "foreign.npz"
    write_foreign(kind, path)
    with pytest.raises(SegcalError, match=r"foreign\.npz must .*\S\.$"):
        BinStatistics.load(path)


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("kind", ["pickle", "object array"])
def test_a_file_is_never_unpickled(kind, tmp_path):
    path, bomb = tmp_path / "bomb.npz", Bomb(str(tmp_path / "exploded"))
    with open(path, "wb") as file:
        if kind == "pickle":
            pickle.dump(bomb, file)
        else:
            np.savez(file, header=np.array(bomb, dtype=object))
    with pytest.raises(SegcalError, match=r"bomb\.npz must"):
        BinStatistics.load(path)
    assert os.listdir(tmp_path) == ["bomb.npz"]


def three(*shape: int) -> list[torch.Tensor]:
    return [torch.zeros(shape)] * 3


@pytest.mark.parametrize(
    ("attempt", "error", "message"),
    [
        (lambda s: BinStatistics(*three(1, 3), Binning(3)), ShapeError, r"\(case, class, bin\); got count \(1, 3\)"),
        (
            lambda s: BinStatistics(torch.zeros(1, 1, 3), *three(1, 2, 3)[:2], Binning(3)),
            ShapeError,
            r"count \(1, 1, 3\), confidence_sum \(1, 2, 3\)",
        ),
        (lambda s: BinStatistics(*three(1, 1, 3), Binning(4)), ShapeError, r"one entry per bin; got 3 for 4 bins"),
        (lambda s: s + s.select(cases=[0]), ShapeError, r"\(2, 2\) and \(1, 2\).*BinStatistics\.concatenate"),
        (lambda s: s + s.rebin(2), ConfigError, r"one binning; got .*bins=4.* and .*bins=2"),
        (lambda s: BinStatistics.concatenate([]), ShapeError, r"at least one part"),
        (lambda s: BinStatistics.concatenate([s, s.select(classes=[0])]), ShapeError, r"same classes; got 2 and 1"),
        (lambda s: BinStatistics.concatenate([s, s.rebin(1)]), ConfigError, r"one binning"),
        (lambda s: s.pool("bin"), ConfigError, r"axis must be one of 'case', 'class'; got 'bin'"),
        (lambda s: s.rebin(3), ConfigError, r"bins must divide 4; got 3"),
        (lambda s: s.rebin(0), ConfigError, r"bins must be a whole number of at least 1; got 0"),
        (lambda s: s.select(cases=[2]), ShapeError, r"case indices must lie in 0\.\.1; got \[2\]"),
        (lambda s: s.select(classes=torch.tensor([True])), ShapeError, r"one entry per class \(2\); got 1"),
        (lambda s: s.select(cases=1), ShapeError, r"case indices must be a list of whole numbers; got 1"),
    ],
)
def test_what_does_not_belong_together_is_refused_with_what_came(two_cases, attempt, error, message):
    with pytest.raises(error, match=message):
        attempt(two_cases)


@pytest.mark.parametrize("kernel", ["triangular", "gaussian", "bspline"])
def test_soft_bins_cannot_be_rebinned_and_the_error_says_why(kernel):
    stats = bin_statistics(torch.rand(1, 1, 9), torch.zeros(1, 1, 9), binning=Binning(20, kernel=kernel))
    with pytest.raises(ConfigError, match=rf"only hard bins can be rebinned; these are {kernel}.*bins=10"):
        stats.rebin(10)


def test_adding_something_else_is_a_type_error(two_cases):
    with pytest.raises(TypeError):
        two_cases + 1


@pytest.mark.parametrize("bins", [2.0, "2", None, True])
def test_bins_of_a_wrong_type_are_refused(bins):
    with pytest.raises(ConfigError, match=r"bins must be a whole number of at least 1; got"):
        BinStatistics(*three(1, 1, 4), Binning(4)).rebin(bins)


def test_a_bound_beyond_all_counts_leaves_every_bin_empty():
    stats = BinStatistics(*[torch.ones(1, 1, 4, dtype=torch.float64)] * 3, Binning(4, empty_below=10**40))
    assert not stats.occupied.any()
