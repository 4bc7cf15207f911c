"""Regions and class names from the command line and from files."""

import json

import pytest

from segcal import ConfigError
from segcal.regions import read_class_names, read_regions


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
        ("colour = 1\n[regions]\na = [1]\n", "table \\[regions\\]"),
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
