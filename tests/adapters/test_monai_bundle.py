"""A run as a MONAI bundle: MONAI alone reads it, takes it for valid, and predicts what `segcal predict` does."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import layouts
import monai.bundle
import nibabel
import numpy as np
import pytest
import tiny
import torch
from monai.bundle import create_workflow, verify_net_in_out
from typer.testing import CliRunner

from segcal.adapters import monai_bundle
from segcal.adapters.monai_bundle import export_bundle
from segcal.calibrators import Temperature, make_calibrator
from segcal.cli import app
from segcal.errors import ConfigError, FileError
from segcal.training import train
from segcal.training.runs import image_cases, load_run, predict

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:parsing config_file"),  # MONAI's, whenever it reads a bundle
]
TOLERANCE = 5e-6  # in a probability: float32 here and there; 6e-7 is what was seen
TURNED = nibabel.eulerangles.euler2mat(0.1, -0.05, 0.2) @ np.diag([-1, -1, 1])
SWAPPED = np.array([[0, 0, -1], [1, 0, 0], [0, -1, 0]])


def store(path: Path, *, shape=(22, 19, 9), empty=0.0, mm=(1.5, 1.4, 5.0), axes=TURNED, channels=0, dtype=np.float32):
    """An image with a bright box off its middle, the rest empty."""
    random = np.random.default_rng(len(path.name))
    values = np.full((*shape, *([channels] if channels else [])), empty, dtype)
    inside = values[3:-4, 2:-3, 1:-2]
    inside[...] = random.normal(100, 30, inside.shape)
    affine = np.eye(4)
    affine[:3, :3], affine[:3, 3] = axes @ np.diag(mm), (-31.5, 12.25, 80)
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, affine), path)


def write_images(folder: Path, kind: str) -> None:
    if kind == "two channels":
        for number in range(2):
            store(folder / f"files_{number:04d}.nii.gz")
        store(folder / "four-d.nii.gz", channels=2, axes=SWAPPED)
    elif kind == "window":
        store(folder / "first_0000.nii.gz", empty=-1000, mm=(1.1, 1.4, 3.0))
        store(folder / "second_0000.nii.gz", empty=-1000, mm=(1.1, 1.4, 0.6), dtype=np.int16, axes=np.diag([-1, 1, 1]))
    else:
        store(folder / "oblique.v1.nii.gz")
        store(folder / "swapped.nii", axes=SWAPPED, shape=(14, 25, 17), mm=(2.0, 0.9, 3.3))
        nibabel.save(nibabel.Nifti1Image(np.zeros((9, 8, 6), np.float32), np.eye(4)), folder / "nothing.nii.gz")


KINDS = {
    "resampled": (layouts.write_acdc, "acdc", ("data.spacing_mm=[1.1, 1.3, 4.0]",)),
    "two channels": (layouts.write_nnunet, "nnunet", ("data.spacing_mm=[1.7, 1.2, 4.0]",)),
    "window": (layouts.write_kits, "kits", ()),
    "as it is": (layouts.write_acdc, "acdc", ("data.spacing_mm=keep", "data.crop_foreground=false")),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Makes each run once, with images for it."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(kind: str) -> tuple[Path, Path]:
        if kind not in made:
            write, dataset, settings = KINDS[kind]
            folder = tmp_path_factory.mktemp("bundle")
            train(tiny.tiny_config(dataset, write(folder / "data"), epochs=2, more=settings), folder / "run")
            write_images(folder / "images", kind)
            made[kind] = folder / "run", folder / "images"
        return made[kind]

    return make


@pytest.fixture(scope="module")
def run(trained):
    return load_run(trained("resampled")[0], with_data=False)


@pytest.fixture(scope="module")
def bundle(run, tmp_path_factory):
    return export_bundle(run, tmp_path_factory.mktemp("shared") / "bundle")


def workflow(bundle: Path, images: Path, out: Path):
    return create_workflow(
        config_file=str(bundle / "configs" / "inference.json"),
        logging_file=False,
        workflow_type="infer",
        bundle_root=str(bundle),
        dataset_dir=str(images),
        output_dir=str(out),
    )


def assert_same_maps(ours: list[Path], folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in ours)
    for path in ours:
        expected, found = nibabel.load(path), nibabel.load(folder / path.name)
        assert found.get_data_dtype() == np.float32
        np.testing.assert_allclose(found.affine, expected.affine, rtol=0, atol=1e-6)
        np.testing.assert_allclose(found.get_fdata(), expected.get_fdata(), rtol=0, atol=TOLERANCE)


def check_agreement(run, images: Path, folder: Path, calibrator=None) -> list[Path]:
    bundle = export_bundle(run, folder / "bundle", calibrator=calibrator)
    workflow(bundle, images, folder / "theirs").run()
    cases = image_cases(images, len(run.dataset.channels))
    ours, failures = predict(run, folder / "ours", cases=cases, calibrator=calibrator)
    assert not failures
    assert_same_maps(ours, folder / "theirs")
    assert max(nibabel.load(path).get_fdata().std() for path in ours) > 0.05  # they say something
    return ours


@pytest.mark.parametrize("kind", KINDS)
def test_maps_are_those_of_predict_to_rounding(kind, trained, tmp_path):
    folder, images = trained(kind)
    check_agreement(load_run(folder, with_data=False), images, tmp_path)


def test_the_comparison_tells_resampling_by_affine_from_ours(run, trained, tmp_path):
    """What a bundle would do with Spacingd, MONAI's usual transform, is further off than the tolerance."""
    bundle = export_bundle(run, tmp_path / "bundle")
    config = bundle / "configs" / "inference.json"
    content = json.loads(config.read_text())
    steps = content["preprocessing"]["transforms"]
    (place,) = (i for i, step in enumerate(steps) if step["_target_"] == "Lambda")
    steps[place] = {"_target_": "Spacingd", "keys": "image", "pixdim": [1.1, 1.3, 4.0], "mode": "bilinear"}
    config.write_text(json.dumps(content))
    images = trained("resampled")[1]
    workflow(bundle, images, tmp_path / "theirs").run()
    ours, _ = predict(run, tmp_path / "ours", cases=image_cases(images, 1))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same_maps(ours, tmp_path / "theirs")


def test_a_header_whose_affine_disagrees_with_its_voxel_sizes_is_read_as_predict_reads_it(run, tmp_path):
    """As in ACDC, whose affines were never set. The map lies where the image does."""
    store(tmp_path / "images" / "odd.nii.gz")
    image = nibabel.load(tmp_path / "images" / "odd.nii.gz")
    image.header.set_sform(np.eye(4), 1)
    image.header["qform_code"] = 0
    odd = nibabel.Nifti1Image(image.get_fdata(dtype=np.float32), None, image.header)
    nibabel.save(odd, tmp_path / "images" / "odd.nii.gz")
    stored = nibabel.load(tmp_path / "images" / "odd.nii.gz")
    np.testing.assert_array_equal(stored.affine, np.eye(4))
    assert stored.header.get_zooms()[2] == 5
    check_agreement(run, tmp_path / "images", tmp_path)


def fitted(method: str, *, inputs: str = "logits"):
    """A calibrator that changes what it is given, as if it had been fitted to four classes."""
    calibrator = make_calibrator(method)
    start = calibrator.start(4)
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(start.shape, generator=generator, dtype=torch.float64)
    state = {"parameters": (0.6 * start + 0.2 * noise).tolist()}
    return calibrator.restore({"classes": 4, "inputs": inputs, "fit": None, "state": state})


@pytest.mark.parametrize("method", ["temperature", "class-temperature", "vector", "matrix", "dirichlet"])
def test_a_linear_calibrator_is_a_step_of_the_bundle(method, run, trained, tmp_path):
    calibrator = fitted(method)
    images = trained("resampled")[1]
    ours = check_agreement(run, images, tmp_path, calibrator)
    plain, _ = predict(run, tmp_path / "plain", cases=image_cases(images, 1))
    changed = [nibabel.load(path).get_fdata() for path in (ours[0], plain[0])]
    assert np.abs(changed[0] - changed[1]).max() > 0.01


def test_a_vector_calibrator_of_probabilities_sees_their_logarithms(run, trained, tmp_path):
    calibrator = fitted("vector", inputs="probabilities")
    check_agreement(run, trained("resampled")[1], tmp_path, calibrator)


@pytest.mark.parametrize(
    ("calibrator", "message"),
    [
        (make_calibrator("local-temperature"), r"got local-temperature .* `segcal calibrate apply`"),
        (make_calibrator("platt"), r"got platt \(softmax\).* `segcal calibrate apply`"),
        (Temperature(temperature=2.0, activation="sigmoid"), r"got temperature \(sigmoid\)"),
        (make_calibrator("vector"), "must be fitted"),
    ],
    ids=["local", "platt", "sigmoid", "unfitted"],
)
def test_other_calibrators_are_refused(calibrator, message, run, tmp_path):
    with pytest.raises(ConfigError, match=message):
        export_bundle(run, tmp_path / "bundle", calibrator=calibrator)
    assert list(tmp_path.iterdir()) == []


def test_it_runs_where_segcal_is_not(bundle, run, trained, tmp_path):
    """`python -m monai.bundle run` calls this function; that command itself needs the package fire."""
    code = (
        "import sys; sys.modules['segcal'] = None; import monai.bundle; "
        "monai.bundle.run(config_file='configs/inference.json', dataset_dir=sys.argv[1], output_dir=sys.argv[2])"
    )
    images = trained("resampled")[1]
    done = subprocess.run(
        [sys.executable, "-c", code, images, tmp_path / "theirs"],
        cwd=bundle, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ours, _ = predict(run, tmp_path / "ours", cases=image_cases(images, 1))
    assert_same_maps(ours, tmp_path / "theirs")


def test_monai_verifies_what_goes_into_the_network_and_comes_out(bundle):
    files = {
        "meta_file": str(bundle / "configs" / "metadata.json"),
        "config_file": str(bundle / "configs" / "inference.json"),
    }
    verify_net_in_out("network_def", **files, device="cpu")
    wrong = {"_meta_#network_data_format#outputs#pred#num_channels": 7}
    with pytest.raises(ValueError, match="output channel number `4` doesn't match: `7`"):
        verify_net_in_out("network_def", **files, device="cpu", **wrong)


def test_monai_finds_every_property_of_an_inference_workflow(bundle, trained, tmp_path):
    found = workflow(bundle, trained("resampled")[1], tmp_path)
    assert found.check_properties() == []
    assert [type(part).__name__ for part in (found.network_def, found.inferer, found.evaluator)] == [
        "SegResNetDS",
        "SlidingWindowInferer",
        "SupervisedEvaluator",
    ]
    assert len(found.dataset_data) == 3
    assert found.version == "1.0.0"


def test_monai_loads_the_network_with_its_weights(bundle, run):
    network = monai.bundle.load("bundle", bundle_dir=bundle.parent, workflow_type="inference", device="cpu").eval()
    image = torch.randn(1, 1, 16, 16, 4)
    with torch.no_grad():
        torch.testing.assert_close(network(image), run.network(image))


def test_weights_are_tensors_alone(bundle, run):
    weights = torch.load(bundle / "models" / "model.pt", weights_only=True)
    expected = run.network.state_dict()
    assert type(weights) is dict
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_metadata_have_what_monais_schema_demands(bundle, run):
    """The demands of meta_schema_20240725.json, which MONAI's verify_metadata downloads, put again by hand."""
    metadata = json.loads((bundle / "configs" / "metadata.json").read_text(encoding="utf-8"))
    texts = (
        "schema version monai_version pytorch_version numpy_version task description authors copyright data_source "
        "data_type intended_use"
    )
    assert all(isinstance(metadata[name], str) for name in texts.split())
    assert isinstance(metadata["required_packages_version"], dict)
    assert isinstance(metadata["changelog"], dict)
    parts = metadata["network_data_format"]
    assert parts.keys() == {"inputs", "outputs", "post_processed_outputs"}
    for tensor in (parts["inputs"]["image"], parts["outputs"]["pred"], parts["post_processed_outputs"]["pred"]):
        assert all(isinstance(tensor[name], str) for name in ("type", "format", "dtype"))
        assert isinstance(tensor["num_channels"], int)
        assert all(isinstance(size, (int, str)) for size in tensor["spatial_shape"])
        assert all(isinstance(end, (int, float)) for end in tensor["value_range"])
        assert tensor["is_patch_data"] in (True, False)
        assert len(tensor["channel_def"]) == tensor["num_channels"]
    assert parts["inputs"]["image"]["spatial_shape"] == [16, 16, 4]
    assert list(parts["outputs"]["pred"]["channel_def"].values()) == list(run.dataset.classes)
    assert metadata["segcal"]["loss"]["ace"]["kernel"] == "triangular"


def test_nothing_of_this_machine_is_told(bundle, run, tmp_path):
    texts = [path.read_text(encoding="utf-8") for path in bundle.rglob("*") if path.suffix in (".json", ".md", ".conf")]
    assert len(texts) == 4
    assert not any(str(run.folder.parent) in text or Path.home().as_posix() + "/" in text for text in texts)


def test_a_folder_with_something_in_it_is_refused(run, tmp_path):
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(FileError, match="must be a new or an empty folder"):
        export_bundle(run, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
    (tmp_path / "empty").mkdir()
    assert export_bundle(run, tmp_path / "empty" / "new") == tmp_path / "empty" / "new"
    with pytest.raises(FileError, match=r"cannot be written: Not a directory"):
        export_bundle(run, tmp_path / "kept.txt" / "bundle")


def test_a_disk_that_fails_leaves_no_part_of_a_bundle(run, tmp_path, monkeypatch):
    write_whole = monai_bundle.write_whole

    def fail_at_weights(path, content):
        if path.name == "model.pt":
            raise OSError(28, "No space left on device")
        write_whole(path, content)

    monkeypatch.setattr(monai_bundle, "write_whole", fail_at_weights)
    with pytest.raises(FileError, match="No space left on device"):
        export_bundle(run, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_authors_that_are_not_valid_text_are_refused(run, tmp_path):
    with pytest.raises(ConfigError, match=r"must be valid UTF-8; one is not"):
        export_bundle(run, tmp_path / "bundle", authors="A. \udcff")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["$print(1)", "@device", "%configs/inference.json::device"])
def test_names_that_monai_would_take_for_code_are_refused(name, run, tmp_path):
    named = replace(run, dataset=replace(run.dataset, classes=("background", "a", "b", name)))
    with pytest.raises(ConfigError, match=r"must not begin with \$, @ or %"):
        export_bundle(named, tmp_path / "bundle")
    quoted = replace(run, dataset=replace(run.dataset, classes=("background", "a", "b", f'"{name}')))
    assert export_bundle(quoted, tmp_path / "bundle").is_dir()


def test_a_folder_without_images_is_an_error_not_silence(bundle, tmp_path):
    (tmp_path / "images").mkdir()
    with pytest.raises(RuntimeError, match="Failed to evaluate") as caught:
        workflow(bundle, tmp_path / "images", tmp_path / "maps").run()
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_the_command_writes_a_bundle_once(trained, tmp_path):
    fitted("temperature").save(tmp_path / "calibrator.json")
    arguments = ["export-bundle", str(trained("resampled")[0]), "--out", str(tmp_path / "bundle")]
    options = ["--calibrator", str(tmp_path / "calibrator.json"), "--checkpoint", "last.pt", "--authors", "A. Uthor"]
    done = CliRunner().invoke(app, [*arguments, *options])
    assert done.exit_code == 0, done.output
    metadata = json.loads((tmp_path / "bundle" / "configs" / "metadata.json").read_text(encoding="utf-8"))
    assert metadata["authors"] == "A. Uthor"
    assert metadata["segcal"]["checkpoint"] == "last.pt"
    assert metadata["segcal"]["calibrator"]["method"] == "temperature"
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 2
    assert "must be a new or an empty folder" in again.output
