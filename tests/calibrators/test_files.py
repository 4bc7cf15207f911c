"""Calibrators come back from their files to the last bit; other files are refused by their names."""

from __future__ import annotations

import json

import pytest
import torch
from truths import KINDS, METHODS, drawn

from segcal.calibrators import (
    CALIBRATORS,
    Dirichlet,
    Isotonic,
    Temperature,
    VectorScaling,
    load_calibrator,
    make_calibrator,
)
from segcal.errors import ConfigError, FileError, SegcalError, ShapeError

SETTINGS = {
    "temperature": {"voxels": 500, "seed": 3},
    "dirichlet": {"off_diagonal": 0.1, "intercept": 0.2},
    "vector": {"objective": "ace"},
}


@pytest.mark.parametrize(
    ("method", "activation", "settings"),
    [(*kind, {}) for kind in KINDS] + [(*kind, SETTINGS[kind[0]]) for kind in KINDS if kind[0] in SETTINGS],
    ids=str,
)
def test_a_fitted_calibrator_comes_back_to_the_last_bit(tmp_path, method, activation, settings):
    logits, labels = drawn(activation, voxels=400)
    fitted = make_calibrator(method, activation=activation, **settings).fit([(2 * logits, labels)])
    fitted.save(tmp_path / "c.json")
    json.loads((tmp_path / "c.json").read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    loaded = load_calibrator(tmp_path / "c.json")
    wide = torch.cat([logits, 30 * logits], 1)
    for values in (wide, wide.float(), wide.half()):
        assert torch.equal(loaded.transform(values), fitted.transform(values))
    assert type(loaded) is CALIBRATORS[method]
    assert loaded.settings() == fitted.settings()
    assert loaded.fingerprint == fitted.fingerprint
    assert repr(loaded.report) == repr(fitted.report)  # NaN is not equal to itself


def test_curves_from_few_voxels_rise_and_come_back(tmp_path):
    for seed in range(40):
        logits, labels = drawn("sigmoid", voxels=15, classes=1, seed=seed)
        labels[0, :2] = torch.tensor([0, 1])
        fitted = Isotonic(activation="sigmoid").fit([(logits, labels)])
        shown = fitted.transform(torch.linspace(-9, 9, 500, dtype=torch.float64)[None])
        assert (shown.diff() >= 0).all()
        fitted.save(tmp_path / "c.json")
        assert torch.equal(load_calibrator(tmp_path / "c.json").transform(logits), fitted.transform(logits))


def test_a_temperature_chosen_by_hand_comes_back_for_any_number_of_classes(tmp_path):
    Temperature(1.5).save(tmp_path / "t.json")
    json.loads((tmp_path / "t.json").read_text(), parse_constant=pytest.fail)
    loaded = load_calibrator(tmp_path / "t.json")
    assert loaded.temperature == 1.5
    for classes in (2, 5):
        assert loaded.transform(torch.full((classes, 4), 3.0)).unique().item() == 2


def test_fingerprints_differ_where_results_do(tmp_path):
    prints = {Temperature(t, activation=a).fingerprint for t in (1.5, 1.6) for a in ("softmax", "sigmoid")}
    assert len(prints) == 4


@pytest.fixture(scope="module")
def contents():
    """What the file of each method holds."""
    case = drawn(voxels=300)
    return {method: json.loads(make_calibrator(method).fit([case]).to_json()) for method in METHODS}


def refused(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(SegcalError, match="must be a calibrator") as caught:
        load_calibrator(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 400
    return message


@pytest.mark.parametrize(
    "content",
    [
        "",
        "3",
        "null",
        "[]",
        "{}",
        '"temperature"',
        "[" * 100_000,
        '{"format": ' * 50_000,
        '{"format": "segcal calibrator 1"}',
        '{"format": "segcal temperature 1", "temperature": 1.5}',
    ],
    ids=lambda content: content[:20],
)
def test_files_of_something_else_are_refused_by_their_name(tmp_path, content):
    refused(tmp_path / "c.json", content)


@pytest.mark.parametrize("method", METHODS)
def test_files_that_were_cut_off_or_lack_something_are_refused_by_their_name(tmp_path, contents, method):
    good = contents[method]
    whole = json.dumps(good)
    for share in (0.2, 0.6, 0.99):
        refused(tmp_path / "c.json", whole[: int(share * len(whole))])
    for key in good:
        assert key in refused(tmp_path / "c.json", {name: value for name, value in good.items() if name != key})
    for key in good["state"]:
        state = {name: value for name, value in good["state"].items() if name != key}
        assert key in refused(tmp_path / "c.json", good | {"state": state})


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "other",
    [
        {"format": "segcal calibrator 2"},
        {"method": "plat"},
        {"method": ["temperature"]},
        {"settings": []},
        {"settings": {"activation": "tanh"}},
        {"settings": {"unknown": 3}},
        {"settings": {"voxels": "many"}},
        {"classes": "three"},
        {"classes": 0},
        {"classes": 2.5},
        {"inputs": "images"},
        {"state": []},
        {"state": None},
        {"fit": 3},
        {"fit": {"cases": 1}},
    ],
    ids=str,
)
def test_files_with_something_wrong_are_refused_by_their_name(tmp_path, contents, method, other):
    refused(tmp_path / "c.json", contents[method] | other)


NAN = float("nan")  # which json writes and reads, though it is none


@pytest.mark.parametrize(
    ("method", "state"),
    [
        *(
            ("temperature", {"parameters": value})
            for value in ([[0.0]], [[-2]], [[1e9]], [[NAN]], [["warm"]], [[None]], [1.0], 1.0, [[1.0, 1.0]], {}, [[[]]])
        ),
        ("temperature", {"parameters": [[1.0], [1.0, 2.0]]}),
        ("class-temperature", {"parameters": [[1.0], [1.0], [0.0]]}),
        ("vector", {"parameters": [[1.0, 0.0]] * 4}),
        ("vector", {"parameters": [[1.0, 1e5]] * 3}),
        ("dirichlet", {"parameters": [[1.0, 0.0]] * 3}),
        ("beta", {"parameters": [[-0.1, 1.0, 0.0]] * 3}),
        ("isotonic", {"knots": [[[0.0], [0.5]]] * 2}),
        ("isotonic", {"knots": [[[0.0, 1.0], [0.5, 0.4]]] * 3}),
        ("isotonic", {"knots": [[[1.0, 0.0], [0.4, 0.5]]] * 3}),
        ("isotonic", {"knots": [[[0.0], [1.0]]] * 3}),
        ("isotonic", {"knots": [[[NAN], [0.5]]] * 3}),
        ("isotonic", {"knots": [[[], []]] * 3}),
        ("isotonic", {"knots": [[[0.0, 1.0], [0.5]]] * 3}),
        ("isotonic", {"knots": [[[0.0]]] * 3}),
    ],
    ids=str,
)
def test_parameters_that_no_fit_finds_are_refused_by_the_name_of_the_file(tmp_path, contents, method, state):
    good = contents[method]
    refused(tmp_path / "c.json", good | {"state": good["state"] | state})


@pytest.mark.parametrize("method", [each for each in METHODS if each != "temperature"])
def test_parameters_of_each_class_belong_to_a_number_of_classes(tmp_path, contents, method):
    for classes in (None, 2, 4):
        refused(tmp_path / "c.json", contents[method] | {"classes": classes})


@pytest.mark.parametrize(
    ("method", "replacement"),
    [("histogram", "isotonic"), ("matrix", "dirichlet"), ("ensemble-temperature", "temperature")],
)
def test_removed_methods_are_refused_with_their_replacement(tmp_path, contents, method, replacement):
    message = refused(tmp_path / "c.json", contents["temperature"] | {"method": method})
    assert f"its method '{method}' was removed in this version, use {replacement}" in message
    assert message.endswith("Fit it again with `segcal calibrate fit`.")


def test_bytes_folders_and_missing_files_are_refused_by_their_name(tmp_path):
    (tmp_path / "t.json").write_bytes(b"\x80\x81\xff")
    with pytest.raises(SegcalError, match=r"t\.json must be a calibrator"):
        load_calibrator(tmp_path / "t.json")
    with pytest.raises(FileError, match=r"none\.json must be a calibrator; No such file"):
        load_calibrator(tmp_path / "none.json")
    with pytest.raises(FileError, match=r"must be a calibrator; Is a directory"):
        load_calibrator(tmp_path)


@pytest.mark.parametrize(("method", "activation"), KINDS)
def test_what_was_not_fitted_or_not_for_these_classes_is_refused(tmp_path, method, activation):
    calibrator = make_calibrator(method, activation=activation)
    assert not calibrator.fitted
    with pytest.raises(ConfigError, match="must be fitted before it can transform"):
        calibrator.transform(torch.zeros(3, 5))
    with pytest.raises(ConfigError, match="must be fitted before it is saved"):
        calibrator.save(tmp_path / "c.json")
    assert not list(tmp_path.iterdir())
    calibrator.fit([drawn(activation, voxels=200)])
    with pytest.raises(
        ShapeError, match=r"must have the 3 classes of the calibrator on their first axis; got \(2, 5\)"
    ):
        calibrator.transform(torch.zeros(2, 5))
    assert calibrator.transform(torch.zeros(3, 0)).shape == (3, 0)


@pytest.mark.parametrize("method", METHODS)
def test_unknown_words_are_refused(method):
    with pytest.raises(ConfigError, match="method must be one of 'temperature'"):
        make_calibrator(method + "s")
    with pytest.raises(ConfigError, match=f"{method} has no such setting"):
        make_calibrator(method, warmth=3)
    with pytest.raises(ConfigError, match="activation must be one of 'softmax', 'sigmoid'; got 'tanh'"):
        make_calibrator(method, activation="tanh")


@pytest.mark.parametrize(
    ("method", "settings", "match"),
    [
        ("temperature", {"temperature": 0}, r"must lie in \[0.01, 100.0\]; got 0"),
        ("temperature", {"temperature": float("nan")}, "must lie in"),
        ("temperature", {"voxels": 0}, "voxels must be a whole number of at least 1"),
        ("dirichlet", {"activation": "sigmoid"}, "exclusive classes"),
        ("dirichlet", {"off_diagonal": -1}, "off_diagonal must be a number of at least 0"),
        ("dirichlet", {"intercept": float("inf")}, "intercept must be a number of at least 0"),
    ],
    ids=str,
)
def test_settings_outside_their_range_are_refused(method, settings, match):
    with pytest.raises(ConfigError, match=match):
        make_calibrator(method, **settings)


def test_temperatures_are_known_only_after_the_fit():
    with pytest.raises(ConfigError, match="must be fitted first"):
        Temperature().temperature  # noqa: B018


def test_what_was_fitted_on_probabilities_takes_logits_as_log_probabilities(tmp_path):
    logits, labels = drawn(voxels=500)
    cases = [(2 * logits.log_softmax(0), labels)]
    on_logits, fitted = VectorScaling().fit(cases), VectorScaling().fit(cases, inputs="probabilities")
    wanted = on_logits.transform(logits.log_softmax(0))
    assert not torch.allclose(on_logits.transform(logits), wanted)
    fitted.save(tmp_path / "c.json")
    for calibrator in (fitted, load_calibrator(tmp_path / "c.json")):
        assert torch.equal(calibrator.transform(logits), wanted)
        assert torch.allclose(calibrator.transform(logits + 100), wanted)
    dirichlet = Dirichlet().fit([(logits, labels)])
    assert torch.allclose(dirichlet.transform(logits + 100), dirichlet.transform(logits))


def test_a_local_temperature_of_endless_axes_is_refused(tmp_path):
    torch.manual_seed(0)
    logits = torch.randn(1, 2, 6, 6, 6)
    labels = logits.add(torch.randn_like(logits)).argmax(1)
    path = tmp_path / "calibrator.json"
    make_calibrator("local-temperature", steps=1).fit(list(zip(logits, labels, strict=True))).save(path)
    content = json.loads(path.read_text())
    content["state"]["axes"] = float("inf")
    path.write_text(json.dumps(content))
    with pytest.raises(SegcalError, match="must be a calibrator that segcal wrote; cannot convert float infinity"):
        load_calibrator(path)


@pytest.mark.parametrize(("method", "activation"), KINDS)
def test_only_a_fit_sets_what_a_calibrator_was_fitted_on(method, activation):
    case = drawn(activation, voxels=200)
    calibrator = make_calibrator(method, activation=activation)
    assert (calibrator.classes, calibrator.inputs, calibrator.report) == (None, "logits", None)
    with pytest.raises(ConfigError, match="inputs must be one of 'logits', 'probabilities'; got 'scores'"):
        calibrator.fit([case], inputs="scores")
    assert not calibrator.fitted
    calibrator.fit([case], inputs="probabilities")
    assert (calibrator.classes, calibrator.inputs) == (3, "probabilities")
    for name in ("classes", "inputs", "report"):
        with pytest.raises(AttributeError):
            setattr(calibrator, name, None)
    assert calibrator.fit([case]).inputs == "logits"
