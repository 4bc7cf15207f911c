"""Regions and class names from the command line and from files."""

import json

import pytest

from segcal import ConfigError
from segcal.volumes.regions import Regions, read_class_names, read_ignored, read_regions


def test_built_in_regions_are_those_of_the_challenges():
    brats = read_regions("brats")
    assert {name: brats.channels(name) for name in brats.members} == {"ET": [3], "TC": [1, 3], "WT": [1, 2, 3]}
    kits = read_regions("kits")
    assert list(kits.members.values()) == [(2,), (2, 3), (1, 2, 3)]


def test_regions_from_toml(tmp_path):
    path = tmp_path / "regions.toml"
    path.write_text('values = [0, 2, 5]\n[regions]\nheart = [2, 5]\n"left ventricle" = [5]\n')
    regions = read_regions(str(path))
    assert regions.channels("heart") == [1, 2]
    assert regions.channels("left ventricle") == [2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "table \\[regions\\]"),
        ("[regions]\n", "at least one region"),
        ("[regions]\na = []\n", "at least one class"),
        ("[regions]\na = [1.5]\n", "list of label values"),
        ("[regions]\na = 1\n", "list of label values"),
        ("color = 1\n[regions]\na = [1]\n", "table \\[regions\\]"),
        ("values = [0, 1]\n[regions]\na = [2]\n", "it names \\[2\\]"),
        ("values = 3\n[regions]\na = [2]\n", "values must be"),
        ("not toml", "TOML"),
    ],
)
def test_wrong_region_files_are_refused_in_a_sentence(tmp_path, content, message):
    path = tmp_path / "regions.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_regions(str(path))


def nnunet_json(folder, labels):
    path = folder / "dataset.json"
    path.write_text(json.dumps({"labels": labels, "regions_class_order": [2, 1]}))
    return str(path)


def test_regions_from_nnunets_dataset_json_are_its_channels_in_order(tmp_path):
    """One channel for each label that is neither background nor ignored, lists or not, in the order of the file."""
    labels = {"background": 0, "whole": [1, 2, 3], "core": 3, "rim": [2], "ignore": 4}
    regions = read_regions(nnunet_json(tmp_path, labels))
    assert list(regions.members.items()) == [("whole", (1, 2, 3)), ("core", (3,)), ("rim", (2,))]
    assert regions.values == (0, 1, 2, 3)


@pytest.mark.parametrize(
    "labels", [{"background": 0, "liver": 1}, {"background": 0, "liver": [1]}, {"0": "background", "1": "liver"}, 3]
)
def test_a_dataset_json_without_regions_has_none_to_give(tmp_path, labels):
    with pytest.raises(ConfigError, match=r"must have regions, labels of several values as \[1, 2\]; it has none"):
        read_regions(nnunet_json(tmp_path, labels))


def test_the_label_to_ignore_is_no_class(tmp_path):
    path = nnunet_json(tmp_path, {"background": 0, "liver": 1, "tumour": [2], "ignore": 3})
    assert read_class_names(path) == {0: "background", 1: "liver", 2: "tumour"}
    assert read_ignored(path) == 3
    assert read_ignored(nnunet_json(tmp_path, {"background": 0, "liver": 1})) is None
    assert read_ignored(nnunet_json(tmp_path, {"0": "background", "1": "ignore"})) is None  # a class of the Decathlon's
    with pytest.raises(ConfigError, match=r"'ignore' must be one value; got \[3, 4\]"):
        read_ignored(nnunet_json(tmp_path, {"background": 0, "ignore": [3, 4]}))


def test_unknown_regions_are_refused():
    with pytest.raises(ConfigError, match="brats, kits"):
        read_regions("heart")
    with pytest.raises(ConfigError, match="can be read"):
        read_regions("nowhere.toml")


def test_class_names_from_every_source(tmp_path):
    assert read_class_names("background, RV,MYO") == {0: "background", 1: "RV", 2: "MYO"}
    decathlon = tmp_path / "dataset.json"
    decathlon.write_text(json.dumps({"labels": {"0": "background", "1": "Anterior"}}))
    assert read_class_names(str(decathlon)) == {0: "background", 1: "Anterior"}
    nnunet = tmp_path / "nnunet.json"
    nnunet.write_text(json.dumps({"labels": {"background": 0, "kidney": 1, "all": [1, 2]}}))
    assert read_class_names(str(nnunet)) == {0: "background", 1: "kidney"}
    toml = tmp_path / "classes.toml"
    toml.write_text('classes = ["background", "liver"]\n')
    assert read_class_names(str(toml)) == {0: "background", 1: "liver"}


@pytest.mark.parametrize("content", ['{"labels": 3}', "[1]", "{", '{"labels": {}}'])
def test_wrong_name_files_are_refused(tmp_path, content):
    path = tmp_path / "dataset.json"
    path.write_text(content)
    with pytest.raises(ConfigError):
        read_class_names(str(path))


def test_files_that_overwhelm_the_parser_are_refused_in_a_sentence(tmp_path):
    deep, file = "[" * 100_000 + "]" * 100_000, tmp_path / "regions.toml"
    file.write_text(f"x = {deep}")
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_regions(str(file))
    file = tmp_path / "dataset.json"
    file.write_text(deep)
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_class_names(str(file))


@pytest.mark.parametrize("value", ["9" * 5000, "\N{SUPERSCRIPT TWO}"])
def test_a_label_value_that_is_no_number_is_refused(tmp_path, value):
    file = tmp_path / "dataset.json"
    file.write_text(f'{{"labels": {{"0": "background", "{value}": "x"}}}}', encoding="utf-8")
    with pytest.raises(ConfigError, match="class names must be a,b,c"):
        read_class_names(str(file))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("dataset.json", '{"labels": {"0": "background", "1": "x", "2": "x"}}'),
        ("dataset.json", '{"labels": {"0": "background", "1": "x", "2": " x"}}'),
        ("dataset.json", '{"labels": {"background": 0, "x": 1, "x": 2}}'),
        ("dataset.json", '{"labels": {"background": 0, "x": 1, "y": 1}}'),
        ("dataset.json", '{"labels": {"0": "background", "1": "x", "01": "y"}}'),
        ("classes.toml", 'classes = ["background", "x", "x"]'),
        ("classes.toml", 'classes = ["background", "\\u00e9", "e\\u0301"]'),
    ],
)
def test_two_classes_of_one_name_are_refused_wherever_names_come_in(tmp_path, name, content):
    """The last of them would name them all, or one would be lost."""
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="more than once"):
        read_class_names(str(path))


@pytest.mark.parametrize("names", ["background,,liver", "background,liver,", ""])
def test_a_class_without_a_name_is_refused(tmp_path, names):
    with pytest.raises(ConfigError, match="must not be empty"):
        read_class_names(names)
    path = tmp_path / "dataset.json"
    path.write_text(json.dumps({"labels": {"0": "background", "1": " "}}))
    with pytest.raises(ConfigError, match="must not be empty"):
        read_class_names(str(path))


def test_two_regions_of_one_name_or_a_value_named_twice_are_refused(tmp_path):
    """A value that a region names twice would be added to its probability twice."""
    for members, values in (({"a": (1,), " a": (2,)}, None), ({"a": (1, 1)}, None), ({"a": (1,)}, (0, 1, 1))):
        with pytest.raises(ConfigError, match="more than once"):
            Regions(members, values)
    with pytest.raises(ConfigError, match="must not be empty"):
        Regions({"": (1,)})
    file = tmp_path / "dataset.json"
    file.write_text('{"labels": {"background": 0, "whole": [1, 2], "whole": [2]}}')
    with pytest.raises(ConfigError, match="'whole' more than once"):
        read_regions(str(file))


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    toml, names = tmp_path / "regions.toml", tmp_path / "dataset.json"
    toml.write_text("[regions]\na = [1]\n", encoding="utf-8-sig")
    names.write_text('{"labels": {"0": "background"}}', encoding="utf-8-sig")
    assert read_regions(str(toml)).members == {"a": (1,)}
    assert read_class_names(str(names)) == {0: "background"}


def test_values_alone_are_a_remap(tmp_path):
    path = tmp_path / "regions.toml"
    path.write_text("values = [0, 1, 2, 4]\n")
    assert read_regions(str(path)) == Regions({}, (0, 1, 2, 4))
