"""The standard figures follow from saved evaluations alone."""

from dataclasses import replace

import matplotlib
import pytest
import torch

from segcal import ConfigError, Evaluation
from segcal._io.files import file_stems
from segcal.decisions import DecisionSums
from segcal.plots import write_figures


def test_the_standard_set_is_written_from_saved_evaluations(make_evaluation, tmp_path):
    make_evaluation(absent=[(0, 2)]).save(tmp_path / "a.npz")
    make_evaluation(absent=[(0, 2)], sharpness=0.5).save(tmp_path / "b.npz")
    loaded = {"DSC + CE": Evaluation.load(tmp_path / "a.npz"), "a/b $c": Evaluation.load(tmp_path / "b.npz")}
    written = write_figures(loaded, tmp_path / "new" / "figures")
    names = ["reliability-DSC-CE", "reliability-a-b-c", "histograms", "histograms-classes", "radar"]
    assert [path.name for path in written] == [f"{name}.png" for name in names]
    assert sorted((tmp_path / "new" / "figures").iterdir()) == sorted(written)


def test_decisions_are_drawn_where_their_sums_are_known(make_evaluation, tmp_path):
    old, new = make_evaluation(), with_decisions(make_evaluation())
    written = write_figures({"old": old, "new": new}, tmp_path, formats=["svg"])
    names = [path.name for path in written if path.name.startswith("decisions")]
    assert names == [f"decisions-{name}.svg" for name in ("dice", "risk", "thresholds", "volumes")]
    texts = [(tmp_path / name).read_text() for name in names]
    assert all(">new<" in text and ">old<" not in text and ">tumour<" in text for text in texts)
    assert ["average of classes" in text for text in texts] == [True, True, True, False]
    assert "Volumes in voxels" in texts[3]


def with_decisions(evaluation):
    """As if every decided voxel had a probability of 0.8."""
    sums = DecisionSums(0.8 * evaluation.overlap.predicted, *[torch.full_like(evaluation.overlap.true, torch.nan)] * 2)
    return replace(evaluation, decisions=sums)


def test_the_background_is_not_drawn(make_evaluation, tmp_path):
    written = write_figures({"m": make_evaluation()}, tmp_path, formats=["svg"])
    content = "".join(path.read_text() for path in written)
    assert "liver" in content
    assert "background" not in content


def test_one_class_and_one_case_have_figures_too(make_evaluation, tmp_path):
    evaluation = make_evaluation(cases=1, classes=("background", "lesion"))
    written = write_figures({"m": evaluation}, tmp_path, formats=("pdf",))
    assert [path.name for path in written] == ["reliability-m.pdf", "histograms.pdf", "radar.pdf"]


def test_the_users_settings_do_not_change_the_figures(make_evaluation, tmp_path):
    evaluations = {"m": make_evaluation(cases=2, classes=("background", "lesion"))}
    plain = write_figures(evaluations, tmp_path / "plain")
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True, "savefig.bbox": "tight", "figure.dpi": 50}):
        other = write_figures(evaluations, tmp_path / "other")
    assert [path.read_bytes() for path in plain] == [path.read_bytes() for path in other]


def test_the_rule_for_patients_reaches_the_bands(make_evaluation, tmp_path):
    evaluations = {"m": make_evaluation(classes=("background", "lesion"), cases=6)}  # of case 0 to case 5
    for rule, band in ((None, "bootstrap over 6 patients"), ("(case)", "Wilson")):
        path, *_ = write_figures(evaluations, tmp_path, formats=["svg"], patients=rule)
        assert band in path.read_text()


def test_unknown_formats_and_different_classes_are_refused_before_anything_is_written(make_evaluation, tmp_path):
    one, other = make_evaluation(), make_evaluation(classes=("background", "lesion"))
    with pytest.raises(ConfigError, match="got 'jpg'"):
        write_figures({"m": one}, tmp_path / "out", formats=("png", "jpg"))
    with pytest.raises(ConfigError, match="same classes"):
        write_figures({"m": one, "n": other}, tmp_path / "out")
    with pytest.raises(ConfigError, match="at least one"):
        write_figures({}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_of_files_differ_even_where_case_does_not_count():
    stems = file_stems(["a b", "a-b", "A b", "..", ""])
    assert len({stem.lower() for stem in stems.values()}) == 5
    assert all(stem and "/" not in stem and not stem.startswith(".") for stem in stems.values())
