"""Splits by patient: the paper's counts, the same draw everywhere, and text files that a user may write."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from segcal.datasets import DataCase, Dataset, Split, make_split, read_split, write_split
from segcal.datasets.recipes import PLAIN
from segcal.errors import ConfigError


def dataset(patients, *, frames=1, shares=(60, 10, 30), official=0, **more):
    """A dataset of names alone; the last `official` patients are the official test."""
    cases = [
        DataCase(f"p{p:04d}" + (f"_frame{f}" if frames > 1 else ""), f"p{p:04d}", (Path("i"),), Path("l"))
        for p in range(patients)
        for f in range(frames)
    ]
    held = tuple(case.name for case in cases[len(cases) - official * frames :]) if official else ()
    return Dataset(
        name="test",
        title="test",
        root=Path("somewhere"),
        channels=("MRI",),
        classes=("background", "a"),
        values=(0, 1),
        cases=tuple(cases),
        recipe=PLAIN,
        shares=shares,
        official_test=held,
        **more,
    )


def sizes(split):
    return len(split.train), len(split.validation), len(split.test)


@pytest.mark.parametrize(
    ("patients", "frames", "official", "shares", "expected"),
    [
        (150, 2, 50, (90, 10, 50), (180, 20, 100)),  # ACDC
        (340, 1, 100, (216, 24, 0), (216, 24, 100)),  # AMOS
        (1251, 1, 0, (1000, 51, 200), (1000, 51, 200)),  # BraTS
        (489, 1, 0, (352, 39, 98), (352, 39, 98)),  # KiTS
        (60, 2, 0, (60, 10, 30), (72, 12, 36)),
    ],
)
def test_the_papers_counts_come_out(patients, frames, official, shares, expected):
    whole = dataset(patients, frames=frames, official=official, shares=shares)
    split = make_split(whole)
    assert sizes(split) == expected
    assert sorted(split.train + split.validation + split.test) == [case.name for case in whole.cases]
    if official:
        assert split.test == whole.official_test


@pytest.mark.parametrize(("patients", "expected"), [(3, (1, 1, 1)), (4, (2, 1, 1)), (25, (20, 1, 4))])
def test_fewer_patients_are_divided_in_proportion_with_one_on_each_side(patients, expected):
    assert sizes(make_split(dataset(patients, shares=(1000, 51, 200)))) == expected


def test_too_few_patients_are_refused():
    with pytest.raises(ConfigError, match="at least 3 labeled patients to divide; it has 2"):
        make_split(dataset(2))
    with pytest.raises(ConfigError, match="at least 2 labeled patients to divide; it has 1"):
        make_split(dataset(3, official=2))


@pytest.mark.parametrize("seed", range(5))
def test_no_patient_is_on_two_sides(seed):
    split = make_split(dataset(20, frames=3), seed=seed)
    sides = [{name.partition("_")[0] for name in side} for side in (split.train, split.validation, split.test)]
    assert sum(map(len, sides)) == len(set.union(*sides)) == 20


def test_the_seed_decides_and_the_order_of_files_does_not():
    whole = dataset(30)
    shuffled = list(whole.cases)
    random.Random(1).shuffle(shuffled)
    assert make_split(replace(whole, cases=tuple(shuffled)), seed=3) == make_split(whole, seed=3)
    assert make_split(whole, seed=3) != make_split(whole, seed=4)


def test_the_draw_is_an_order_of_checksums():
    # `printf "0 p0002" | sha256sum` and so on, sorted: 2 (1026...), 7 (14dd...), 5 (150e...), 0 (210d...), the others.
    split = make_split(dataset(10))
    assert split.test == ("p0002", "p0005", "p0007")
    assert split.validation == ("p0000",)


def test_the_note_of_the_dataset_is_carried_and_written(tmp_path):
    split = make_split(dataset(10, split_note="testing/ is not here."))
    assert split.note == "testing/ is not here."
    write_split(split, tmp_path / "split.txt")
    assert (tmp_path / "split.txt").read_text().startswith("# testing/ is not here.\ntrain p0")


def test_what_is_written_is_read_again(tmp_path):
    whole = dataset(12, frames=2)
    split = make_split(whole, seed=7)
    write_split(split, tmp_path / "split.txt")
    assert read_split(tmp_path / "split.txt", whole) == split
    assert make_split(whole, seed=1, file=tmp_path / "split.txt") == split


def test_a_file_may_name_patients_and_leave_out_cases(tmp_path):
    path = tmp_path / "split.txt"
    path.write_text("# mine\n\ntrain p0000   # both frames\ntest p0001_frame1\n  validation   p0002\n")
    split = read_split(path, dataset(4, frames=2))
    assert split == Split(("p0000_frame0", "p0000_frame1"), ("p0002_frame0", "p0002_frame1"), ("p0001_frame1",))
    assert split.note == "The split file leaves out 3 of 8 cases."


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("train p0000\ntest p9999", r"split.txt, line 2: case 'p9999' must be one of the 8 labeled cases"),
        ("train p0001_frame9", r"line 1: .*Did you mean 'p0001_frame1'\?"),
        ("train p0000\n\ntest p0000_frame1", r"line 3: patient p0000 must be on one side; line 1 has train, this test"),
        ("train p0000_frame0\ntrain p0000", r"line 2: case p0000_frame0 must be named once; line 1 names it too"),
        ("train p0001\ntrain p0001", r"line 2: case p0001_frame0 must be named once; line 1"),
        ("training p0000", r"line 1: a line must be one of train, validation, test and a case; got 'training p0000'"),
        ("train", r"line 1: a line must be one of"),
        ("test new", r"line 1: case new must have labels; it has none"),
        ("# nothing\n", r"must name at least one case, as in 'train p0000_frame0'; it names none"),
    ],
)
def test_a_wrong_line_is_refused_with_file_and_line(tmp_path, text, sentence):
    path = tmp_path / "split.txt"
    path.write_text(text)
    whole = dataset(4, frames=2, unlabelled=(DataCase("new", "new", (Path("i"),), None),))
    with pytest.raises(ConfigError, match=sentence):
        read_split(path, whole)


def test_a_byte_order_mark_is_no_part_of_a_side(tmp_path):
    path = tmp_path / "split.txt"
    path.write_text("train p0000\ntest p0001\n", encoding="utf-8-sig")
    assert read_split(path, dataset(2)).train == ("p0000",)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.txt must be a split file that can be read"):
        make_split(dataset(4), file=tmp_path / "nowhere.txt")
