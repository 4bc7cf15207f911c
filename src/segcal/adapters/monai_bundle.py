"""A trained run as a MONAI bundle: a folder that predicts with MONAI alone, without segcal.

    from segcal.adapters.monai_bundle import export_bundle
    from segcal.training.runs import load_run

    export_bundle(load_run("runs/soft-ace", with_data=False), "bundle")

The bundle holds the weights, a description of what goes in and comes out, and `configs/inference.json`: the steps of
`segcal predict` as transforms of MONAI. They are the same arithmetic, not only alike: the image is turned, cut and
resampled before intensities are normalized; logits, not probabilities, go back to the grid of the image; then come the
calibrator and the softmax. Two steps have no transform in MONAI and are expressions: the size to resample to follows
from each image's voxels, and where the image was cut away the background has a logit of its own. The inverse of a crop
puts zeros there, so that logit is subtracted from the background before and added after, which changes nothing inside.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import shutil
import unicodedata
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import monai
import nibabel
import numpy as np
import torch
from monai.bundle import ConfigParser
from monai.utils import IgniteInfo
from torch import Tensor

import segcal
from segcal._io.files import write_whole
from segcal.calibrators import Calibrator, LinearCalibrator, Temperature
from segcal.errors import ConfigError, FileError
from segcal.training.inference import Flat
from segcal.training.preprocessing import OUTSIDE
from segcal.training.runs import Run

SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
NOT_STATED = "not stated"

LOGGING = """\
[loggers]
keys=root

[handlers]
keys=console

[formatters]
keys=plain

[logger_root]
level=INFO
handlers=console

[handler_console]
class=StreamHandler
level=INFO
formatter=plain
args=(sys.stdout,)

[formatter_plain]
format=%(asctime)s %(name)s: %(message)s
"""

README = """\
# {title}

```sh
pip install "monai[fire,ignite,nibabel]>={monai}"
python -m monai.bundle run --config_file configs/inference.json --dataset_dir IMAGES --output_dir MAPS
```
Run it in this folder, or give `--bundle_root`. IMAGES holds {images}; MAPS gets `NAME.nii.gz`: probabilities
(x, y, z, class) on the grid of the image. segcal is not needed.

| | |
| --- | --- |
{table}

Maps are those of `segcal predict` to rounding: within 5e-6 in segcal's tests, on the CPU. What differs: an image that
cannot be read stops the run; channels in several files must be stored on one grid, the same way round; NaN is not
looked for; a channel of one constant is not scaled to 0 but to rounding errors; maps have the image's affine, not the
voxel sizes of a header that disagrees with it.

Loss, training and versions are in `configs/metadata.json`. No license comes with the weights: whoever shares them adds
one. For research, not for diagnosis.
"""


def export_bundle(
    run: Run,
    out: str | os.PathLike[str],
    *,
    calibrator: Calibrator | None = None,
    authors: str = NOT_STATED,
    copyright: str = NOT_STATED,
) -> Path:
    """The folder of a new bundle, written whole or not at all; one that is there and not empty is refused.

    A calibrator that is linear in the logits (temperature, class-temperature, vector, matrix, dirichlet) becomes a step
    of the bundle; others are refused.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileError(f"{out} must be a new or an empty folder; something is there. Choose another --out.")
    if isinstance(run.network, Flat):
        raise ConfigError(
            f"the run must be one of volumes, as bundles are; the network of {run.folder} has two axes."
            " Export a run of 3-D images."
        )
    inference = _inference(run, calibrator)
    metadata = _metadata(run, calibrator, authors, copyright)
    _check_plain([metadata, run.config.network.options])
    weights = {name: value.detach().cpu().contiguous() for name, value in run.network.state_dict().items()}
    _check_network(inference["network_def"], weights)
    stored = io.BytesIO()
    torch.save(weights, stored)
    files: dict[str, bytes | memoryview] = {
        "configs/metadata.json": _json(metadata),
        "configs/inference.json": _json(inference),
        "configs/logging.conf": LOGGING.encode(),
        "models/model.pt": stored.getbuffer(),
        "docs/README.md": _readme(run, calibrator).encode(),
    }
    _write_folder(out, files)
    return out


def _write_folder(out: Path, files: Mapping[str, bytes | memoryview]) -> None:
    """Files in a folder that has its name only once all are in it."""
    out = out.absolute()
    partial = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    try:
        for name, content in files.items():
            path = partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
        os.replace(partial, out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise FileError(f"{out} cannot be written: {error.strerror or error}. Choose another folder.") from error
        raise


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=4, ensure_ascii=False).encode()


def _check_plain(content: Any) -> None:
    """Refuse names that are not valid text, or that MONAI would run as code or take for a reference."""
    text = json.dumps(content, ensure_ascii=False)
    if any(unicodedata.category(sign) == "Cs" for sign in text):
        raise ConfigError("texts in a bundle must be valid UTF-8; one is not. Correct --authors or --copyright.")
    found = re.search(r'(?<!\\)"([$@%][^"]*|_target_)', text)
    if found is not None:
        raise ConfigError(
            f"names in a bundle must not begin with $, @ or %, which MONAI takes for code or a reference; got "
            f"{found[1]!r}. Rename it in the run's config.toml or classes.json."
        )


def _check_network(definition: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Refuse a network that MONAI does not build from the bundle as the run did."""
    try:
        network = ConfigParser({"network_def": definition}).get_parsed_content("network_def")
        network.load_state_dict(weights)
    except Exception as error:  # whatever MONAI's parser and networks raise
        reason = str(error).splitlines()[0]
        raise ConfigError(f"network.options must fit MONAI's bundle parser; {reason}.") from error


def _network(run: Run) -> dict[str, Any]:
    """As `segcal.training.inference.build_network` makes it."""
    name = run.config.network.name
    given = {"spatial_dims": 3, "in_channels": len(run.dataset.channels), "out_channels": len(run.dataset.classes)}
    takes = inspect.signature(type(run.network)).parameters
    return {
        "_target_": f"monai.networks.nets.{name}",
        **{key: value for key, value in given.items() if key in takes},
        **run.config.network.options,
    }


def _inference(run: Run, calibrator: Calibrator | None) -> dict[str, Any]:
    data = run.config.data
    return {
        "imports": ["$import glob", "$import nibabel", "$import os"],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/maps'",
        "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "network_def": _network(run),
        "network": "$@network_def.to(@device)",
        **_cases(len(run.dataset.channels)),
        **_preprocessing(run),
        "dataset": {"_target_": "Dataset", "data": "@datalist", "transform": "@preprocessing"},
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1, "num_workers": 0},
        "inferer": {
            "_target_": "SlidingWindowInferer",
            "roi_size": list(data.inference_patch or ()),
            "sw_batch_size": 1,
            "overlap": data.inference_overlap,
            "mode": "gaussian",
        },
        **_postprocessing(run, calibrator),
        "handlers": [
            {
                "_target_": "CheckpointLoader",
                "load_path": "$@bundle_root + '/models/model.pt'",
                "load_dict": {"model": "@network"},
                "map_location": "@device",
            },
            {"_target_": "StatsHandler", "iteration_log": False},
        ],
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
            "val_handlers": "@handlers",
            "amp": "$@device.type == 'cuda'" if run.config.training.mixed_precision else False,
        },
        # An expression cannot raise; a generator can.
        "run": [
            "$@files or (_ for _ in ()).throw(FileNotFoundError('no *.nii or *.nii.gz in ' + @dataset_dir))",
            "$@evaluator.run()",
        ],
    }


def _cases(channels: int) -> dict[str, Any]:
    """NAME.nii.gz, or NAME_0000.nii.gz and so on for several channels, as `training.runs.image_cases` has them."""
    return {
        "channels": channels,
        "files": "$sorted(file for file in glob.glob(os.path.join(glob.escape(@dataset_dir), '*'))"
        " if file.endswith(('.nii', '.nii.gz')))",
        "numbered": "$@channels > 1 or all('_0000.nii' in file for file in @files)",
        "channel_of": "$lambda file, i: file.replace('_0000.nii', f'_{i:04d}.nii')",
        "firsts": "$[file for file in @files if '_0000.nii' in file] if @channels > 1 else []",
        "others": "$[@channel_of(file, i) for file in @firsts for i in range(1, @channels)]",
        "datalist": "$[{'image': [@channel_of(file, i) for i in range(@channels)] if file in @firsts else file}"
        " for file in @files if file not in @others]",
        "name": "$lambda meta, saver: {'subject': os.path.basename(meta['filename_or_obj'])"
        ".replace('_0000.nii' if @numbered else '.nii', '.nii')}",
    }


def _preprocessing(run: Run) -> dict[str, Any]:
    """`segcal.training.preprocessing.prepare_case`."""
    data = run.config.data
    low, high = data.window or (0.0, 1.0)
    window = data.intensity == "window"
    # MONAI's reader mends an affine that disagrees with the voxel sizes, as in ACDC; take both as the file has them.
    items: dict[str, Any] = {
        "file_of": "$lambda x: nibabel.load(x.meta['filename_or_obj'])",
        "placed": "$lambda x: monai.data.MetaTensor("
        "x.as_tensor(), meta={**x.meta, 'affine': torch.tensor(@file_of(x).affine)})",
    }
    steps: list[dict[str, Any]] = [
        _step("LoadImaged", reader="NibabelReader"),
        _step("EnsureChannelFirstd"),
        _step("Lambdad", func="@placed"),
        _step("Orientationd", axcodes="RAS", labels=[["L", "R"], ["P", "A"], ["I", "S"]]),
    ]
    if data.crop_foreground:
        items["foreground"] = f"$lambda x: x > {low!r}" if window else "$lambda x: x != 0"
        # The whole of an image without any foreground.
        inside = "$lambda x: @foreground(x) | ~@foreground(x).any()"
        steps.append(_step("CropForegroundd", source_key="image", select_fn=inside, allow_smaller=True))
    if data.spacing_mm not in (None, "keep"):
        items["spacing_mm"] = data.spacing_mm
        items["voxel_mm"] = (
            "$lambda x: numpy.array(@file_of(x).header.get_zooms()[:3], float)"
            "[numpy.argsort(nibabel.io_orientation(@file_of(x).affine)[:, 0])]"
        )
        items["size"] = (
            "$lambda x: [max(1, round(n * old / new)) for n, old, new in zip(x.shape[1:], @voxel_mm(x), @spacing_mm)]"
        )
        items["resample"] = "$lambda x: monai.transforms.Resize(@size(x), mode='trilinear', align_corners=False)(x)"
        items["back"] = "$lambda x: monai.transforms.Resize(1).inverse_transform(x, x.applied_operations.pop())"
        # Lambdad drops its inverse in MONAI 1.6; Lambda has one, of the whole dictionary.
        func, inverse = (f"$lambda data: {{**data, 'image': {way}(data['image'])}}" for way in ("@resample", "@back"))
        steps.append({"_target_": "Lambda", "func": func, "inv_func": inverse})
    if window:
        steps.append(_step("ScaleIntensityRanged", a_min=low, a_max=high, b_min=0.0, b_max=1.0, clip=True))
    else:
        steps.append(_step("NormalizeIntensityd", nonzero=True, channel_wise=True))
    return {**items, "preprocessing": {"_target_": "Compose", "transforms": steps}}


def _postprocessing(run: Run, calibrator: Calibrator | None) -> dict[str, Any]:
    """`segcal.training.preprocessing.restore`, the calibrator and the softmax; maps as `segcal predict` names them."""
    items: dict[str, Any] = {}
    steps = [_step("EnsureTyped", "pred", dtype="$torch.float32", device="$torch.device('cpu')")]
    invert = _step("Invertd", "pred", transform="@preprocessing", orig_keys="image", nearest_interp=False)
    if run.config.data.crop_foreground:
        items["outside"] = f"$torch.eye({len(run.dataset.classes)})[0].reshape(-1, 1, 1, 1) * {OUTSIDE!r}"
        before, after = (_step("Lambdad", "pred", func=f"$lambda x: x {sign} @outside") for sign in "-+")
        steps += [before, invert, after]
    else:
        steps.append(invert)
    if calibrator is not None:
        items |= _calibration(calibrator, len(run.dataset.classes))
        steps.append(_step("Lambdad", "pred", func="@calibrate"))
    name = {"output_dir": "@output_dir", "output_postfix": "", "output_name_formatter": "@name"}
    steps += [
        _step("Activationsd", "pred", softmax=True),
        _step("SaveImaged", "pred", **name, separate_folder=False, squeeze_end_dims=False),
    ]
    return {**items, "postprocessing": {"_target_": "Compose", "transforms": steps}}


def _step(target: str, key: str = "image", **arguments: Any) -> dict[str, Any]:
    return {"_target_": target, "keys": key, **arguments}


def _calibration(calibrator: Calibrator, classes: int) -> dict[str, Any]:
    """Items of the configuration that calibrate logits."""
    if not isinstance(calibrator, LinearCalibrator) or calibrator.against_rest or calibrator.activation != "softmax":
        raise ConfigError(
            f"the calibrator of a bundle must be one of exclusive classes that is linear in the logits: temperature, "
            f"class-temperature, vector, matrix or dirichlet; got {calibrator.method} ({calibrator.activation}). "
            f"Export without it, and calibrate the bundle's maps with `segcal calibrate apply`."
        )
    calibrator.check(torch.empty(classes, 0))
    if isinstance(calibrator, Temperature):
        return {"temperature": calibrator.temperature, "calibrate": "$lambda x: x / @temperature"}
    assert calibrator.parameters is not None  # `check` has looked
    parameters = calibrator.parameters
    if parameters.shape[1] == classes + 1:
        weights, bias = parameters[:, :-1], parameters[:, -1]
    else:
        weights, bias = torch.diag(parameters[:, 0]), parameters[:, 1:].sum(1)
    of_probabilities = calibrator.inputs == "probabilities" or calibrator.method == "dirichlet"
    return {
        "weights": weights.tolist(),
        "bias": bias.tolist(),
        "calibrate": "$lambda x: torch.tensordot(torch.tensor(@weights), "
        + ("x.log_softmax(0)" if of_probabilities else "x")
        + ", 1) + torch.tensor(@bias).reshape(-1, 1, 1, 1)",
    }


def _described(calibrator: Calibrator | None) -> str:
    if calibrator is None:
        return "none"
    if isinstance(calibrator, Temperature):
        return f"temperature {calibrator.temperature:.4g}"
    return calibrator.method


def _metadata(run: Run, calibrator: Calibrator | None, authors: str, copyright: str) -> dict[str, Any]:
    config, dataset = run.config, run.dataset
    patch = list(config.data.inference_patch or ())
    classes = {str(i): name for i, name in enumerate(dataset.classes)}
    window = config.data.intensity == "window"
    named = ", ".join(dataset.classes[1:])
    image = {"type": "image", "spatial_shape": patch, "dtype": "float32", "is_patch_data": True}
    predicted = image | {"format": "classes", "num_channels": len(classes), "value_range": [], "channel_def": classes}
    return {
        "schema": SCHEMA,
        "version": "1.0.0",
        "changelog": {"1.0.0": f"exported by segcal {segcal.__version__}"},
        "monai_version": _release(monai.__version__),
        "pytorch_version": _release(torch.__version__),
        "numpy_version": np.__version__,
        "required_packages_version": {"nibabel": nibabel.__version__, "pytorch-ignite": IgniteInfo.OPT_IMPORT_VERSION},
        "task": f"Segmentation of {named}",
        "description": f"{config.network.name} trained on {config.data.dataset} by segcal with the method "
        f"{config.method}. Maps hold a probability for each class and voxel; calibrator: {_described(calibrator)}.",
        "authors": authors,
        "copyright": copyright,
        "data_source": config.data.dataset,
        "data_type": "nibabel",
        "intended_use": "research; not for diagnosis",
        "network_data_format": {
            "inputs": {
                "image": image
                | {
                    "format": "hounsfield" if window else "magnitude",
                    "modality": "n/a",
                    "num_channels": len(dataset.channels),
                    "value_range": [0, 1] if window else [],
                    "channel_def": {str(i): name for i, name in enumerate(dataset.channels)},
                }
            },
            "outputs": {"pred": predicted},
            "post_processed_outputs": {
                "pred": predicted
                | {"type": "probabilities", "spatial_shape": ["*"] * 3, "value_range": [0, 1], "is_patch_data": False}
            },
        },
        "segcal": {
            "version": segcal.__version__,
            "run": config.hash,
            "weights": run.fingerprint,
            "checkpoint": run.checkpoint,
            "method": config.method,
            "seed": config.seed,
            "loss": config.loss.model_dump(mode="json"),
            "training": config.training.model_dump(mode="json"),
            "label_values": list(dataset.values),
            "calibrator": None if calibrator is None else json.loads(calibrator.to_json()),
        },
    }


def _release(text: str) -> str:
    """Without what a build adds, such as +cpu."""
    return text.partition("+")[0]


def _readme(run: Run, calibrator: Calibrator | None) -> str:
    config, dataset = run.config, run.dataset
    data = config.data
    several = len(dataset.channels) > 1
    low, high = data.window or (0.0, 1.0)
    steps = ["turned to right, anterior, superior"]
    if data.crop_foreground:
        steps.append("cut to the foreground")
    if data.spacing_mm is not None and data.spacing_mm != "keep":
        steps.append(f"resampled to {_times(data.spacing_mm)} mm")
    if data.intensity == "window":
        steps.append(f"clipped to {low:g} … {high:g} and scaled to 0 … 1")
    else:
        steps.append("each channel's non-zero voxels scaled to mean 0 and deviation 1")
    rows = {
        "channels of the image": ", ".join(dataset.channels),
        "classes of the map": ", ".join(f"{i} {name}" for i, name in enumerate(dataset.classes)),
        "images are": ", ".join(steps),
        "network": f"{config.network.name}, windows of {_times(data.inference_patch or ())} voxels",
        "calibrator": _described(calibrator) + ("" if calibrator is None else ", a step after the network"),
        "trained by": f"segcal {segcal.__version__} on {data.dataset}, method {config.method}, seed {config.seed}",
    }
    return README.format(
        title=", ".join(dataset.classes[1:]),
        monai=_release(monai.__version__),
        images="`NAME_0000.nii.gz`, `NAME_0001.nii.gz` …, or 4-D files" if several else "`NAME.nii.gz`",
        table="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
    )


def _times(sizes: Sequence[float]) -> str:
    return " x ".join(f"{size:g}" for size in sizes)
