"""Maps of cases on disk: the slice that matters, turned for the eye, of the worst cases."""

import io
import math
from dataclasses import replace

import nibabel
import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from segcal import ConfigError, FileError, GridError, RangeError, ReadOptions, Regions, evaluate
from segcal.evaluation.options import Options
from segcal.plots import figure_bytes
from segcal.plots.maps import (
    case_maps,
    options_of,
    worst_case_figures,
    worst_cases,
)
from segcal.volumes.images import find_image

SHAPE = (6, 5, 4)


def save(array, path, affine=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(array, np.diag([1.0, 1.0, 3.0, 1.0]) if affine is None else affine), path)
    return path


def exclusive(*foreground):
    """Probabilities (x, y, z, class) of these foreground classes and the background."""
    return np.stack([1 - sum(foreground), *foreground], -1).astype(np.float32)


@pytest.fixture
def case(tmp_path):
    """Labels of class 1 in a block, two methods: one wrong in slice 1, the other a little in slice 2."""
    labels = np.zeros(SHAPE, np.uint8)
    labels[1:4, 1:4, 1:3] = 1
    wrong, nearly = labels.astype(float), labels.astype(float)
    wrong[1:4, 1:4, 1] = 0.2
    nearly[2, 2, 2] = 0.4
    return {
        "labels": save(labels, tmp_path / "labels" / "a$1.nii.gz"),
        "wrong": save(exclusive(wrong), tmp_path / "wrong" / "a$1.nii.gz"),
        "nearly": save(exclusive(nearly), tmp_path / "nearly" / "a$1.nii.gz"),
        "image": save(np.arange(120, dtype=np.int16).reshape(SHAPE), tmp_path / "images" / "a$1.nii.gz"),
    }


def panels(figure):
    """The image, and the probabilities of each method, as (right, up)."""
    axes = figure.axes
    return axes[0].images[0].get_array().T, [ax.images[1].get_array().T for ax in axes[1:] if len(ax.images) == 2]


def test_without_disagreement_the_slice_with_most_labels_is_shown(tmp_path):
    labels = np.zeros((3, 4, 5), np.uint8)
    labels[0, 0, 1] = labels[:2, 0, 2] = 1
    maps = save(exclusive(labels.astype(np.float32)), tmp_path / "P" / "a.nii.gz")
    figure = case_maps({"m": maps}, save(labels, tmp_path / "L" / "a.nii.gz"), 1)
    assert any("slice 2" in text.get_text() for text in figure.findobj(Text))


def test_a_case_is_shown_in_the_slice_in_which_all_methods_disagree_most(case):
    predictions = {"dice-ce": case["wrong"], "soft-ace": case["nearly"]}
    figure = case_maps(predictions, case["labels"], "class 1", image=case["image"])
    image, (first, second) = panels(figure)
    # An identity-like affine points right, to the front and up: for the eye left is on the right.
    np.testing.assert_array_equal(image, np.arange(120).reshape(SHAPE)[::-1, :, 1])
    np.testing.assert_allclose(first[::-1], np.pad(np.full((3, 3), 0.2), ((1, 2), (1, 1))), rtol=1e-6)
    np.testing.assert_allclose(second[::-1], np.pad(np.ones((3, 3)), ((1, 2), (1, 1))))
    assert figure.axes[0].get_title() == "a$1\nclass 1, slice 1"
    assert not figure.axes[0].title.get_parse_math()


def test_axis_and_index_can_be_chosen(case):
    figure = case_maps({"m": case["wrong"]}, case["labels"], 1, axis=0, index=3, image=case["image"])
    image, (probability,) = panels(figure)
    np.testing.assert_array_equal(image, np.arange(120).reshape(SHAPE)[3, ::-1])  # seen from the left: front is left
    assert probability.shape == (5, 4)
    ax = figure.axes[0]
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 5), (0, 12))  # mm: 4 slices of 3
    for wrong in ({"index": 4}, {"axis": 3}, {"index": -1}):
        with pytest.raises(ConfigError, match="must"):
            case_maps({"m": case["wrong"]}, case["labels"], 1, **wrong)


@pytest.mark.parametrize("codes", ["LPS", "RAS", "SRA", "PIL"])
def test_however_the_files_are_turned_the_eye_sees_the_same(case, tmp_path, codes):
    expected = panels(case_maps({"m": case["wrong"]}, case["labels"], 1, image=case["image"]))
    turned = {}
    for name in ("labels", "wrong", "image"):
        volume = nibabel.load(case[name])
        turn = nibabel.orientations.ornt_transform(
            nibabel.orientations.axcodes2ornt("RAS"), nibabel.orientations.axcodes2ornt(codes)
        )
        turned[name] = tmp_path / codes / name / "a.nii.gz"
        turned[name].parent.mkdir(parents=True)
        nibabel.save(volume.as_reoriented(turn), turned[name])
    # The image stays as it was: it is brought to the labels' axes by its affine.
    for image in (turned["image"], case["image"]):
        got = panels(case_maps({"m": turned["wrong"]}, turned["labels"], 1, image=image))
        np.testing.assert_array_equal(got[0], expected[0])
        np.testing.assert_array_equal(got[1][0], expected[1][0])


def test_a_region_is_the_sum_of_its_members(tmp_path):
    labels = np.zeros((4, 4, 2), np.uint8)
    labels[0, 0, 0], labels[1, 1, 0] = 1, 2
    one, two = np.full(labels.shape, 0.1), np.full(labels.shape, 0.25)
    path = save(exclusive(one, two), tmp_path / "p" / "a.nii.gz")
    options = Options(regions=Regions({"two": (2,), "both": (1, 2)}, values=(0, 1, 2)))
    label_path = save(labels, tmp_path / "l" / "a.nii.gz")
    figure = case_maps({"m": path}, label_path, "both", options=options, index=0)
    np.testing.assert_allclose(panels(figure)[1][0], 0.35, rtol=1e-6)
    with pytest.raises(ConfigError, match="one of two, both, or its place; got 'three'"):
        case_maps({"m": path}, label_path, "three", options=options)


def test_logits_become_probabilities(tmp_path):
    labels = save(np.zeros((4, 4, 2), np.uint8), tmp_path / "l" / "a.nii.gz")
    path = save(np.full((4, 4, 2, 3), 2.0, np.float32), tmp_path / "p" / "a.nii.gz")
    figure = case_maps({"m": path}, labels, 1, options=Options(logits=True))
    np.testing.assert_allclose(panels(figure)[1][0], 1 / 3, rtol=1e-6)
    with pytest.raises(RangeError, match="logits"):
        case_maps({"m": path}, labels, 1)
    figure = case_maps({"m": path}, labels, 1, options=Options(logits=True, sigmoid=True))
    np.testing.assert_allclose(panels(figure)[1][0], 1 / (1 + math.exp(-2)), rtol=1e-6)


def test_a_flat_image_stands_upright_and_is_no_slice(tmp_path):
    """Rows from the top and columns from the left, as any viewer of pictures shows an array."""
    labels = np.zeros((8, 6), np.uint8)
    labels[1, 2] = 1
    np.save(tmp_path / "l.npy", labels)
    np.save(tmp_path / "p.npy", np.moveaxis(exclusive(np.where(labels, 0.75, 0.0)), -1, 0))
    np.save(tmp_path / "i.npy", np.arange(48.0).reshape(8, 6))
    figure = case_maps({"m": tmp_path / "p.npy"}, tmp_path / "l.npy", 1, image=tmp_path / "i.npy")
    image, (probability,) = panels(figure)
    seen = np.flipud(image.T)  # first row at the top
    np.testing.assert_array_equal(seen, np.arange(48.0).reshape(8, 6))
    np.testing.assert_array_equal(np.flipud(probability.T), 0.75 * labels)
    texts = [ax.get_title() for ax in figure.axes] + [text.get_text() for text in figure.findobj(Text)]
    assert not [text for text in texts if "slice" in text]


def test_a_volume_without_a_grid_is_shown_as_stored_and_says_its_slice(tmp_path):
    labels = np.zeros((8, 6, 3), np.uint8)
    labels[1, 2, 2] = 1
    np.save(tmp_path / "l.npy", labels)
    np.save(tmp_path / "p.npy", np.moveaxis(exclusive(np.where(labels, 0.75, 0.0)), -1, 0))
    figure = case_maps({"m": tmp_path / "p.npy"}, tmp_path / "l.npy", 1)
    np.testing.assert_array_equal(panels(figure)[1][0], 0.75 * labels[:, :, 2])
    assert any("slice 2" in text.get_text() for text in figure.findobj(Text))


def test_maps_are_cut_to_what_there_is_and_its_surroundings(tmp_path):
    labels = np.zeros((200, 200, 1), np.uint8)
    labels[100:140, 60:70] = 1
    path = save(exclusive(labels.astype(float)), tmp_path / "p" / "a.nii.gz")
    figure = case_maps({"m": path}, save(labels, tmp_path / "l" / "a.nii.gz"), 1)
    (probability,) = panels(figure)[1]
    assert probability.shape == (60, 40)  # a quarter more on each side; 40 mm at least
    assert probability.sum() == 400


def test_an_image_elsewhere_is_refused(case, tmp_path):
    image = save(np.zeros((3, 3, 3), np.int16), tmp_path / "other" / "a$1.nii.gz")
    with pytest.raises(GridError, match=r"a\$1: the image a\$1.nii.gz must lie on the grid of the labels"):
        case_maps({"m": case["wrong"]}, case["labels"], 1, image=image)
    with pytest.raises(FileError, match=r"a\$1: none.nii must be a file"):
        case_maps({"m": case["wrong"]}, case["labels"], 1, image=tmp_path / "none.nii")
    with pytest.raises(ConfigError, match="at least one method"):
        case_maps({}, case["labels"], 1)


def test_a_png_for_a_page_is_small_and_whole(case):
    image = Image.open(io.BytesIO(figure_bytes(case_maps({"m": case["wrong"]}, case["labels"], 1), dpi=100)))
    image.load()
    assert image.size[0] == 716


@pytest.fixture
def cohort(tmp_path):
    """Five cases, the later the worse for both methods; in case d class 2 is worse than class 1."""
    generator = np.random.default_rng(0)
    for i, name in enumerate("abcde"):
        labels = np.zeros((8, 8, 3), np.uint8)
        labels[1:7, 1:4], labels[1:7, 4:7] = 1, 2
        save(labels, tmp_path / "labels" / f"{name}.nii.gz")
        save(generator.normal(size=labels.shape).astype(np.float32), tmp_path / "images" / f"{name}_0000.nii.gz")
        for method, shift in (("dice-ce", 0.0), ("soft-ace", 0.05)):
            one, two = (0.9 * (labels == c) for c in (1, 2))
            one[1 : 1 + i] *= 0.3 + shift
            if name == "d":
                two[1:6] *= 0.1
            save(exclusive(one, two), tmp_path / method / f"{name}.nii.gz")
    methods = ("dice-ce", "soft-ace")
    outcomes = {m: evaluate(tmp_path / m, tmp_path / "labels", tmp_path / "out" / m) for m in methods}
    return tmp_path, {method: outcome.evaluation for method, outcome in outcomes.items()}


def test_the_worst_cases_are_those_of_lowest_dice(cohort):
    _, evaluations = cohort
    assert worst_cases(evaluations["dice-ce"], number=3) == ["d", "e", "c"]
    assert worst_cases(*evaluations.values()) == ["d", "e", "c", "b", "a"]
    assert worst_cases(evaluations["dice-ce"].select(cases=[0, 1]), evaluations["soft-ace"]) == ["b", "a"]


def test_the_maps_of_the_worst_cases_are_drawn_in_one_call(cohort):
    root, evaluations = cohort
    predictions = {method: root / method for method in evaluations}
    found = worst_case_figures(evaluations, predictions, root / "labels", images=root / "images", number=2)
    assert [drawn[:2] for drawn in found] == [("d", "class 2"), ("e", "class 1")]
    (again,) = worst_case_figures(evaluations, predictions, root / "labels", class_name=1, number=1)
    assert (again.case, again.class_name, again.flat) == ("d", 1, False)
    with pytest.raises(ConfigError, match="methods"):
        list(worst_case_figures(evaluations, {"dice-ce": root / "dice-ce"}, root / "labels"))


def test_options_are_those_the_evaluation_was_told(tmp_path, cohort):
    root, evaluations = cohort
    (root / "regions.toml").write_text('values = [0, 1, 2]\n[regions]\n"whole thing" = [1, 2]\n')
    outcome = evaluate(
        root / "dice-ce", root / "labels", root / "other", options=ReadOptions(regions=root / "regions.toml")
    )
    outcome.evaluation.save(tmp_path / "saved.npz")
    loaded = type(outcome.evaluation).load(tmp_path / "saved.npz")
    assert options_of(loaded) == options_of(outcome.evaluation)
    assert options_of(loaded).regions == Regions({"whole thing": (1, 2)}, values=(0, 1, 2))
    (drawn,) = worst_case_figures({"m": loaded}, {"m": root / "dice-ce"}, root / "labels", number=1)
    assert drawn[:2] == ("d", "whole thing")
    assert options_of(evaluations["dice-ce"]) == Options()


def test_options_of_an_evaluation_from_memory_name_the_background_first(cohort):
    evaluation = replace(cohort[1]["dice-ce"], provenance={})
    names = tuple(enumerate(evaluation.classes))
    assert options_of(evaluation).class_names == names
    assert options_of(evaluation.foreground()).class_names == names[1:]
    assert options_of(evaluation.select(classes=[1, 2, 0])).class_names == names


def test_each_method_is_read_as_its_own_evaluation_was(cohort):
    root, evaluations = cohort
    for path in (root / "soft-ace").iterdir():
        volume = nibabel.load(path)
        save(np.log(np.asarray(volume.dataobj) + 1e-6), root / "logits" / path.name, volume.affine)
    told = evaluate(
        root / "logits", root / "labels", root / "out" / "logits", options=ReadOptions(logits=True)
    ).evaluation
    both = {"dice-ce": evaluations["dice-ce"], "soft-ace": told}
    folders = {"dice-ce": root / "dice-ce", "soft-ace": root / "logits"}
    assert len(list(worst_case_figures(both, folders, root / "labels", number=1))) == 1


@pytest.mark.parametrize(
    "place", ["a.nii.gz", "a_0000.nii", "a/a.nii.gz", "x/a.npy", "a/imaging.nii.gz", "BraTS/a/a_flair.nii.gz"]
)
def test_images_are_found_where_datasets_have_them(tmp_path, place):
    for name in (place, "ab.nii.gz", "a_gt.nii.gz", "a_seg.nii.gz", "a.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert find_image(tmp_path, "a") == tmp_path / place
    with pytest.raises(FileError, match="must have an image of b"):
        find_image(tmp_path, "b")
