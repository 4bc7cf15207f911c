"""Names that attack: they neither leave the output folder nor break CSV, HTML or a split file; no text becomes code."""

from __future__ import annotations

import ast
import csv
import dataclasses
import json
import os
from html.parser import HTMLParser
from pathlib import Path

import layouts
import numpy as np
import pytest
import tiny
from typer.testing import CliRunner

import segcal
from segcal import ConfigError, FileError, SegcalError
from segcal.calibrators import Temperature
from segcal.cli import app
from segcal.datasets import Split, make_split, open_dataset, read_split, write_split
from segcal.evaluation.evaluation import Evaluation
from segcal.report import build_report
from segcal.training.config import make_config
from segcal.training.inference import build_network
from segcal.volumes import pair_cases

PACKAGE = Path(segcal.__file__).parent
IN_FILES = [  # what a file may be called
    "=HYPERLINK(1)", "+1", "-rf", "@SUM(A1)", "a,b", 'a"b', "a;b", "$(touch x)", "`touch x`",
    "<script>alert(1)<", "' onload='alert(1)", "{{ 7 * 7 }}", "[red]x", "%s%n", "~", "ünï 😀", "\u202etxt", "x" * 200,
]  # fmt: skip
ANYWHERE = [
    *IN_FILES,
    "a\nb",
    "a\rb",
    "a\tb",
    "..",
    "../../escaped",
    "/tmp/escaped",
    "a/../../b",
    "</script><script>alert(1)</script>",
    "\x1b[31m",
]


def write_case(root: Path, name: str) -> None:
    first = np.random.default_rng(len(name)).random((4, 4, 4), np.float32)
    layouts.save(root / "maps" / f"{name}.nii", np.stack([first, 1 - first], -1))
    layouts.save(root / "labels" / f"{name}.nii", (first < 0.4).astype(np.uint8))


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("names")
    for name in IN_FILES:
        write_case(root, name)
    before = files_in(root)
    assert (
        CliRunner()
        .invoke(app, ["evaluate", str(root / "maps"), str(root / "labels"), "--out", str(root / "out")])
        .exit_code
        == 0
    )
    assert all(name.startswith("out/") for name in files_in(root) - before)
    return root


def test_names_of_cases_stand_in_a_table_as_they_are(evaluated):
    """Leading = + - @ stay: who joins tables by case needs the name. docs/reliability.md says so."""
    with open(evaluated / "out" / "cases.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["case"] for row in rows} == set(IN_FILES)
    assert {row["metric"] for row in rows} >= {"ace", "dice"}
    assert all(list(row) == ["case", "scope", "class", "metric", "value"] and row["value"] for row in rows)


class Elements(HTMLParser):
    """Counts elements and their on... attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def test_names_add_no_element_to_a_page(evaluated, tmp_path):
    evaluation = Evaluation.load(evaluated / "out" / "evaluation.npz")
    number = len(evaluation.cases)
    assert number <= len(ANYWHERE)
    attacked = dataclasses.replace(evaluation, cases=tuple(reversed(ANYWHERE))[:number], classes=("<b>", "</td><i>"))
    harmless = dataclasses.replace(evaluation, cases=tuple(f"case {i}" for i in range(number)), classes=("b", "i"))
    pages = [
        Elements(
            build_report({name: one, "other": one}, tmp_path / f"{i}.html", title=name).read_text(encoding="utf-8")
        )
        for i, (name, one) in enumerate({"plain": harmless, "<script>x</script>": attacked}.items())
    ]
    assert pages[0].tags == pages[1].tags
    assert pages[1].handlers == []
    assert files_in(tmp_path) == {"0.html", "1.html"}


@pytest.mark.parametrize("name", ANYWHERE)
def test_an_evaluation_keeps_any_name_in_its_own_file(evaluated, name, tmp_path):
    evaluation = Evaluation.load(evaluated / "out" / "evaluation.npz").select(cases=[0])
    (tmp_path / "in").mkdir()
    dataclasses.replace(evaluation, cases=(name,)).save(tmp_path / "in" / "evaluation.npz")
    assert Evaluation.load(tmp_path / "in" / "evaluation.npz").cases == (name,)
    assert files_in(tmp_path) == {"in/evaluation.npz", "in/evaluation.json"}


def test_calibrated_maps_stay_in_their_folder(evaluated, tmp_path):
    Temperature(2.0).save(tmp_path / "calibrator.json")
    arguments = ["calibrate", "apply", str(tmp_path / "calibrator.json"), str(evaluated / "maps")]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    maps = {name for name in files_in(tmp_path) if name.endswith(".nii")}
    assert maps == {f"out/{name}.nii" for name in IN_FILES}


def test_predicted_maps_stay_in_their_folder(tmp_path):
    run = tiny.untrained_run(tmp_path)
    for name in IN_FILES:
        layouts.save(tmp_path / "named" / f"{name}.nii", np.random.default_rng(len(name)).random((8, 8, 4), np.float32))
    before = files_in(tmp_path)
    arguments = ["predict", str(run), "--images", str(tmp_path / "named"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    made = files_in(tmp_path) - before
    beside = {"out/predictions.json", "out/segcal-classes.json"}
    assert made == {*beside, *(f"out/{name}.nii.gz" for name in IN_FILES)}


@pytest.mark.parametrize(
    ("name", "shown"), [(b"a\xff", r"a\\udcff"), (b"a\nb", r"a\\nb"), (b"\x1b[31m", r"\\x1b\[31m")]
)
def test_a_name_that_is_no_plain_text_is_refused(tmp_path, name, shown):
    for folder in ("maps", "labels"):
        (tmp_path / folder).mkdir()
        with open(os.fsencode(tmp_path / folder) + b"/" + name + b".nii", "wb") as file:
            file.write(b"x")
    with pytest.raises(FileError, match=rf"{shown}\.nii must have a name of plain text") as caught:
        pair_cases(tmp_path / "maps", tmp_path / "labels")
    str(caught.value).encode()


def test_folders_linked_in_a_circle_end(tmp_path):
    write_case(tmp_path, "case")
    for folder in ("maps", "labels"):
        (tmp_path / folder / "again").symlink_to(tmp_path / folder)
        (tmp_path / folder / "self.nii").symlink_to("self.nii")
    outcome = segcal.evaluate(tmp_path / "maps", tmp_path / "labels", tmp_path / "out")
    assert outcome.evaluation.cases == ("case",)
    assert [failure.case for failure in outcome.failures] == ["self"]  # a link to no file
    root = layouts.write_decathlon(tmp_path / "data")
    (root / "imagesTr" / "again").symlink_to(root)
    (root / "imagesTr" / "self.nii.gz").symlink_to("self.nii.gz")
    assert len(open_dataset("decathlon", root).cases) == 4


@pytest.mark.parametrize("path", ["../outside.nii.gz", "imagesTr/../../outside.nii.gz", "/outside.nii.gz"])
@pytest.mark.parametrize("key", ["image", "label"])
def test_a_dataset_does_not_lead_to_files_outside_its_folder(tmp_path, path, key):
    root = layouts.write_decathlon(tmp_path)
    (tmp_path / "outside.nii.gz").write_bytes((root / "imagesTr" / "test_001.nii.gz").read_bytes())
    content = json.loads((root / "dataset.json").read_text())
    content["training"][0][key] = str(tmp_path) + path if path.startswith("/") else path
    content["test"] = [content["training"][0][key]]
    (root / "dataset.json").write_text(json.dumps(content))
    dataset = open_dataset("decathlon", root)
    assert len(dataset.cases) == 3
    assert dataset.unlabelled == ()
    assert all("must lie in the dataset's folder" in problem.what for problem in dataset.problems)
    assert len(dataset.problems) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x" * 5000, "training must list an image"),
        ("a\0b", "training must list an image"),
        ("a\nb", "training must list an image"),
        ("\ud800", "surrogates not allowed"),
        ("x" * 300, None),
        ("..", None),
        ("", None),
    ],
)
def test_a_dataset_that_lists_no_possible_file_is_a_sentence(tmp_path, name, message):
    root = layouts.write_decathlon(tmp_path)
    content = json.loads((root / "dataset.json").read_text())
    content["training"][0]["image"] = f"imagesTr/{name}"
    (root / "dataset.json").write_text(json.dumps(content))
    if message:
        with pytest.raises(FileError, match=message):
            open_dataset("decathlon", root)
    else:
        dataset = open_dataset("decathlon", root)
        assert len(dataset.cases) == 3
        assert "must be there" in dataset.problems[0].what


def test_a_split_file_takes_any_name_that_fits_a_line_and_refuses_the_others(tmp_path):
    dataset = open_dataset("decathlon", layouts.write_decathlon(tmp_path))
    for name in ANYWHERE:
        first, *others = dataset.cases
        renamed = dataclasses.replace(dataset, cases=(dataclasses.replace(first, name=name, patient=name), *others))
        split = make_split(renamed)
        path = tmp_path / "split.txt"
        if name.isprintable():
            write_split(split, path)
            assert read_split(path, renamed) == split
        else:
            with pytest.raises(ConfigError, match="must have a name that fits a line"):
                write_split(split, path)


@pytest.mark.parametrize("name", ["", " a", "a ", "a#b", "#"])
def test_names_that_would_read_back_as_others_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="must have a name that fits a line"):
        write_split(Split((name,), (), ()), tmp_path / "split.txt")


UNPICKLING = {"pickle", "yaml", "marshal", "shelve", "dill"}
NO_NETWORKS = ["os.system", "os", "torch", "nn", "monai.networks.nets.UNet", "__import__", "__builtins__", "unet.UNet",
               "load_state_dict_from_url", "get_pretrained_resnet_medicalnet", "resnet10", "", "\n"]  # fmt: skip


@pytest.mark.parametrize("name", NO_NETWORKS)
def test_a_configuration_names_networks_and_nothing_else(tmp_path, name):
    dataset = open_dataset("decathlon", layouts.write_decathlon(tmp_path))
    config = make_config(dataset="decathlon", root=tmp_path, settings={"network": {"name": name}})
    with pytest.raises(ConfigError, match=r"network\.name must be a network of monai\.networks\.nets"):
        build_network(config.resolved(dataset), dataset)


@pytest.mark.parametrize("option", ["pretrained", "pretrained_url", "weights", "path_or_repo_id", "filename"])
def test_a_configuration_fetches_no_weights(option):
    with pytest.raises(ConfigError, match=rf"network\.options: must not fetch weights, as '{option}' does"):
        make_config(
            dataset="phantom", root="x", settings={"network": {"name": "UNet", "options": {option: "http://x"}}}
        )


def test_no_shell_is_called_and_nothing_is_evaluated():
    """By what is called: a shell, eval, exec, pickle, yaml, or numpy and torch told to unpickle."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {name.partition(".")[0] for name in names} & UNPICKLING, path
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert called not in ("eval", "exec", "os.system", "os.popen", "compile", "__import__"), f"{path}: {called}"
            assert given.get("shell", "False") == "False", f"{path}: {called}"
            if called == "torch.load":
                assert given.get("weights_only") == "True", path
            if called in ("np.load", "numpy.load"):
                assert given.get("allow_pickle", "False") == "False", path


@pytest.mark.parametrize("name", [*ANYWHERE, "\0", "\udcff"])
def test_a_message_is_one_line_that_can_be_shown(name):
    text = str(SegcalError(f"the case must be there; got {name}."))
    assert text.isprintable()
    text.encode()


def test_a_message_is_no_longer_than_a_paragraph():
    text = str(SegcalError("the list must be short; got " + "x" * 10**6 + ". Shorten it."))
    assert len(text) < 1100
    assert text.startswith("the list must be short; got xxx")
    assert text.endswith("xxx. Shorten it.")
