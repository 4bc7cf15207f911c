"""Configurations: where values come from, what is refused and how, what the hash tells apart, files and back."""

from __future__ import annotations

import os

import layouts
import pytest

from segcal.datasets import open_dataset
from segcal.errors import ConfigError, FileError
from segcal.training.config import METHODS, RunConfig, make_config, read_config
from segcal.training.inference import build_network

LAYOUTS = ("acdc", "amos", "brats", "kits", "decathlon", "nnunet")


def config(**options) -> RunConfig:
    return make_config(**{"dataset": "acdc", "root": "somewhere"} | options)


def refusal(**options) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**options)
    return str(caught.value)


def written(path, text):
    path.write_text(text, encoding="utf-8")
    return path


DATA = '[data]\ndataset = "acdc"\nroot = "somewhere"\n'


def test_the_defaults_are_the_papers():
    found = config()
    assert found.network.name == "SegResNetDS"
    assert found.network.options == {
        "init_filters": 32,
        "blocks_down": [1, 2, 2, 4, 4],
        "norm": "INSTANCE",
        "dsdepth": 4,
    }
    training = found.training
    assert (training.batch_size, training.weight_decay, training.validate_every) == (2, 1e-5, 10)
    assert (training.warmup_epochs, training.warmup_start) == (2, 0.5)
    assert found.loss.ace.bins == found.evaluation.bins == 20


@pytest.mark.parametrize(
    ("name", "epochs", "rate", "patch", "window_of_inference", "spacing", "intensity", "window"),
    [
        ("acdc", 600, 1e-4, (256, 256, 16), (256, 256, 16), (1, 1, 5), "zscore", None),
        ("amos", 600, 2e-4, (176, 176, 64), (192, 192, 64), (1, 1, 5), "window", (-100, 200)),
        ("brats", 1250, 1e-4, (224, 224, 144), (240, 240, 160), (1, 1, 1), "zscore", None),
        ("kits", 1250, 1e-4, (128, 128, 128), (256, 256, 256), (1, 1, 1), "window", (-54, 242)),
    ],
)
def test_what_is_left_open_is_the_papers_for_the_dataset(
    tmp_path, name, epochs, rate, patch, window_of_inference, spacing, intensity, window
):
    root = getattr(layouts, f"write_{name}")(tmp_path)
    found = config(dataset=name, root=root).resolved(open_dataset(name, root))
    data, training = found.data, found.training
    assert (training.epochs, training.learning_rate) == (epochs, rate)
    assert (data.patch, data.inference_patch, data.spacing_mm) == (patch, window_of_inference, spacing)
    assert (data.intensity, data.window) == (intensity, window)
    assert data.augmentation == ("brats" if name == "brats" else "affine")
    assert data.sampling == ("random" if name == "brats" else "foreground")
    assert data.crop_foreground


@pytest.mark.parametrize(
    ("method", "weights", "kernel"),
    [("dice-ce", (1, 1, 0), "hard"), ("ce", (0, 1, 0), "hard"), ("hard-ace", (1, 1, 1), "hard"),
     ("soft-ace", (1, 1, 1), "triangular"), ("balanced", (1, 1, 0.3), "triangular")],
)  # fmt: skip
def test_a_method_is_a_setting_of_the_loss(method, weights, kernel):
    loss = config(method=method).loss
    assert (loss.dice, loss.ce, loss.ace.weight) == weights
    assert loss.ace.kernel == kernel
    assert set(METHODS) == {"dice-ce", "ce", "hard-ace", "soft-ace", "balanced"}


def test_runs_of_version_0_3_0_keep_their_hash(tmp_path):
    """The hash is part of the names of run folders; 0.3.0 computed this one, and wrote `begin = 0.0` into the file."""
    text = f'method = "soft-ace"\n{DATA}[loss.ace]\nweight = 1.0\nbegin = 0.0\nkernel = "triangular"\n'
    stored = read_config(written(tmp_path / "config.toml", text))
    assert stored == config(method="soft-ace")
    assert stored.hash == "8ab7d8003d60c9a7"
    assert "unknown key 'loss.ace.begin'" in refusal(changes=["loss.ace.begin=0.5"])


def test_defaults_yield_to_the_preset_to_the_method_to_the_file_to_changes(tmp_path):
    assert config().training.validate_every == 10
    assert config(preset="small").training.validate_every == 5
    file = written(
        tmp_path / "a.toml", 'method = "soft-ace"\n[training]\nvalidate_every = 7\n[loss.ace]\nweight = 0.5\n'
    )
    found = config(preset="small", file=file)
    assert found.training.validate_every == 7  # the file wins over the preset, which keeps the rest
    assert found.training.learning_rate == config(preset="small").training.learning_rate
    assert (found.loss.ace.weight, found.loss.ace.kernel) == (0.5, "triangular")  # and over its method
    changes = ["loss.ace.weight=0.1", "training.validate_every=3", "loss.ace.weight=0.3"]
    changed = config(preset="small", file=file, changes=changes)
    assert (changed.training.validate_every, changed.loss.ace.weight) == (3, 0.3)  # the last change counts


def test_arguments_win_over_the_file(tmp_path):
    file = written(tmp_path / "a.toml", f'method = "soft-ace"\n{DATA}')
    found = make_config(file=file, dataset="kits", root="elsewhere", method="hard-ace")
    assert (found.data.dataset, found.data.root) == ("kits", "elsewhere")
    assert (found.method, found.loss.ace.kernel) == ("hard-ace", "hard")


def test_one_option_of_the_network_leaves_the_others_as_they_are():
    options = config(changes=["network.options.norm=BATCH"]).network.options
    assert options == config().network.options | {"norm": "BATCH"}


def test_another_network_does_not_inherit_options():
    assert config(changes=["network.options.channels=[4, 8]", "network.name=UNet"]).network.options == {
        "channels": [4, 8]
    }
    assert config(preset="small", changes=["network.name=SegResNet"]).network.options == {}


def test_an_unknown_key_in_a_file_is_named_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("runs")
    written(tmp_path / "runs" / "acdc.toml", f"{DATA}[loss.ace]\nnum_bins = 10\n")
    message = "runs/acdc.toml: unknown key 'loss.ace.num_bins'. Did you mean 'loss.ace.bins'?"
    with pytest.raises(ConfigError) as caught:
        read_config("runs/acdc.toml")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("epochs=3", "unknown key 'epochs'. Did you mean 'training.epochs'?"),
        ("training.epoch=3", "unknown key 'training.epoch'. Did you mean 'training.epochs'?"),
        ("quite.another=3", "unknown key 'quite'."),
        ("loss.dice=-1", "loss.dice: should be greater than or equal to 0; got -1."),
        ("loss.dice=nan", "loss.dice: should be a finite number; got nan."),
        ("loss.ace.bins=0", "loss.ace.bins: should be greater than or equal to 1; got 0."),
        ("data.intensity=ct", "data.intensity: should be 'zscore' or 'window'; got 'ct'."),
        ("loss.ace.bandwidth=2", "loss: bandwidth belongs to kernel='gaussian'; got kernel='hard'. Leave it out."),
        ("training.epochs=0", "training.epochs: should be greater than or equal to 1; got 0."),
        ("training.epochs=true", "training.epochs: must not be true or false; got True."),
        ("loss.ace.weight=false", "loss.ace.weight: must not be true or false; got False."),
        ("data.patch=[true, 8, 8]", "data.patch: must not be true or false; got [True, 8, 8]."),
        ("training.learning_rate=0", "training.learning_rate: should be greater than 0; got 0."),
        ("data.patch=[0, 8, 8]", "data.patch.0: should be greater than or equal to 1; got 0."),
        ("data.patch=8", "data.patch: should be a valid tuple; got 8."),
        ("data.spacing_mm=[1, -1, 5]", "data.spacing_mm.1: should be greater than 0; got -1."),
        ("data.window=[200, -100]", "data.window: must be the lower end and the upper one; got [200, -100]."),
        ("data.inference_overlap=1", "data.inference_overlap: should be less than 1; got 1."),
        ("data=3", "data: should be a valid dictionary or instance of DataConfig; got 3."),
        ("training=fast", "training: should be a valid dictionary or instance of TrainingConfig; got 'fast'."),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_its_key(change, message):
    assert refusal(changes=[change]) == f"the configuration: {message}"


def test_a_change_must_read_key_and_value():
    assert refusal(changes=["loss.dice"]).startswith("a setting must read KEY=VALUE")
    assert refusal(changes=["=3"]).startswith("a setting must read KEY=VALUE")
    assert "--method" in refusal(changes=["method = ce"])


def test_dataset_and_root_must_be_given(tmp_path):
    assert "data.dataset must be given; got none. Add --dataset" in refusal(dataset=None)
    assert "data.root must be given; got none. Add --data-root" in refusal(root=None)


def test_unknown_methods_and_presets_are_refused_with_the_known_ones():
    assert refusal(method="dice").startswith("method must be one of 'dice-ce', 'ce'")
    assert refusal(preset="tiny").startswith("preset must be one of 'paper', 'small'")


def test_a_file_that_is_none_or_no_toml_is_refused(tmp_path):
    with pytest.raises(FileError, match="must be a configuration file; No such file"):
        read_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"a\.toml must be TOML"):
        read_config(written(tmp_path / "a.toml", "[data\n"))
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"b\.toml must be TOML"):
        read_config(tmp_path / "b.toml")


def test_a_window_is_asked_for_where_the_intensity_needs_one(tmp_path):
    root = layouts.write_acdc(tmp_path)
    found = config(root=root, changes=["data.intensity=window"])
    with pytest.raises(ConfigError, match=r"data\.window must be two numbers"):
        found.resolved(open_dataset("acdc", root))


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        config().seed = 3


def test_the_hash_does_not_tell_machines_apart():
    assert config().hash == config(root="elsewhere").hash == config(changes=["training.loader_workers=4"]).hash


@pytest.mark.parametrize(
    "options",
    [{"changes": [change]} for change in ("seed=1", "loss.dice=2.0", "data.patch=[8, 8, 8]", "data.split=a.txt",
     "network.options.dropout=0.1", "training.epochs=3", "evaluation.bins=10")]
    + [{"method": "ce"}, {"dataset": "kits"}],
)  # fmt: skip
def test_the_hash_tells_apart_what_changes_the_result(options):
    assert config(**options).hash != config().hash


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_resolved_configuration_comes_back_from_its_file(tmp_path, name):
    root = getattr(layouts, f"write_{name}")(tmp_path)
    resolved = config(dataset=name, root=root, method="soft-ace").resolved(open_dataset(name, root))
    resolved.save(tmp_path / "config.toml")
    back = read_config(tmp_path / "config.toml")
    assert back == resolved
    assert back.hash == resolved.hash
    assert back.resolved(open_dataset(name, root)) == resolved


def test_a_resolved_configuration_finds_its_data_from_any_folder(tmp_path, monkeypatch):
    layouts.write_acdc(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    resolved = config(root="data").resolved(open_dataset("acdc", "data"))
    assert resolved.data.root == str(tmp_path / "data")


@pytest.mark.parametrize(
    "text",
    ['a "quoted" name', "it's", "two\nlines", "tab\there", "C:\\data", "Žluťoučký/数据", "a = 1 # not a comment"],
)
def test_any_text_comes_back_from_a_file(tmp_path, text):
    found = config(root=text)
    path = tmp_path / "config.toml"
    found.save(path)
    assert read_config(path).data.root == text


def test_a_change_takes_toml_or_plain_text():
    assert config(changes=["data.split=my split.txt"]).data.split == "my split.txt"
    assert config(changes=['data.split="a=b.txt"']).data.split == "a=b.txt"
    assert config(changes=["data.split=a=b.txt"]).data.split == "a=b.txt"
    assert config(changes=["data.patch=[16, 8, 4]"]).data.patch == (16, 8, 4)


@pytest.mark.parametrize("name", ["os.system", "__class__", "__builtins__", "torch", "SegResnetDs", "Act", ""])
def test_a_file_cannot_name_code_that_is_no_network(tmp_path, name):
    root = layouts.write_acdc(tmp_path)
    dataset = open_dataset("acdc", root)
    found = config(root=root, changes=[f"network.name='{name}'"]).resolved(dataset)
    with pytest.raises(ConfigError, match=r"network\.name must be a network of monai\.networks\.nets; got"):
        build_network(found, dataset)


def test_a_misspelt_network_is_named_with_the_nearest(tmp_path):
    dataset = open_dataset("acdc", layouts.write_acdc(tmp_path))
    with pytest.raises(ConfigError, match="Did you mean 'SegResNetDS'"):
        build_network(config(changes=["network.name=SegResNetD"]).resolved(dataset), dataset)


@pytest.mark.parametrize("change", ["norm=NONSENSE", "init_filters=0", "unknown=3", "in_channels=3"])
def test_options_that_do_not_fit_the_network_are_refused(tmp_path, change):
    dataset = open_dataset("acdc", layouts.write_acdc(tmp_path))
    with pytest.raises(ConfigError, match=r"network\.options must fit SegResNetDS; "):
        build_network(config(changes=[f"network.options.{change}"]).resolved(dataset), dataset)


def test_a_patch_that_the_network_cannot_halve_is_refused_with_the_nearest(tmp_path):
    dataset = open_dataset("acdc", layouts.write_acdc(tmp_path))
    found = config(changes=["network.options.blocks_down=[1, 1, 1]", "data.patch=[10, 8, 16]"]).resolved(dataset)
    with pytest.raises(ConfigError, match=r"data\.patch must be divisible by \[4, 4, 4\].*nearest is \[8, 8, 16\]"):
        build_network(found, dataset)


@pytest.mark.parametrize("text", ["x = " + "[" * 5000 + "]" * 5000, "seed = " + "9" * 5000])
def test_a_file_that_overwhelms_the_parser_is_refused_in_a_sentence(tmp_path, text):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.toml must be TOML; "):
        make_config(file=tmp_path / "run.toml")


def test_a_change_that_overwhelms_the_parser_is_text():
    with pytest.raises(ConfigError, match="seed: should be a valid integer"):
        make_config(dataset="phantom", root="x", changes=["seed=" + "[" * 5000])


@pytest.mark.parametrize("value", ["nan", "[1, inf]", "{ a = nan }", "1979-05-27"])
def test_an_option_that_would_not_read_back_as_the_same_is_refused(value):
    with pytest.raises(ConfigError, match=r"network\.options: must consist of words, finite numbers and lists"):
        make_config(dataset="phantom", root="x", changes=[f"network.options.act={value}"])
