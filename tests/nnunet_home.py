"""Folders of nnU-Net with small datasets, planned and preprocessed, and a small network in the plans.

Run as a program this file is nnU-Net's `train` or `predict`, but short: on the CPU, an epoch of two steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nibabel
import numpy as np

SHAPE = (20, 24, 18)
AFFINE = np.array([[-1.0, 0, 0, 10], [0, 0, 1.5, -4], [0, 1.2, 0, 5], [0, 0, 0, 1]])  # axes flipped and exchanged
CLASSES = {"background": 0, "shell": 1, "core": 2}
REGIONS = {"background": 0, "whole": [1, 2], "core": 2}
IGNORE = {"ignore": 3}


def save(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(array, AFFINE), path)


def dataset_json(labels):
    order = {"regions_class_order": [1, 2]} if "whole" in labels else {}
    return {"channel_names": {"0": "noise"}, "labels": labels, "numTraining": 5, "file_ending": ".nii.gz", **order}


def write_dataset(root, labels):
    """Five cases to train with and one to test: a core in a shell, in noise; four slices are to be ignored."""
    for i in range(6):
        random = np.random.default_rng(i)
        places = np.stack(np.meshgrid(*map(np.arange, SHAPE), indexing="ij"), -1)
        distance = np.linalg.norm(places - np.array(SHAPE) / 2 - random.uniform(-3, 3, 3), axis=-1)
        label = (distance < 7).astype(np.uint8) + (distance < 4)
        part = "Tr" if i < 5 else "Ts"
        image = (label + random.normal(0, 0.5, SHAPE)).astype(np.float32)
        if "ignore" in labels:
            label[:, :, :4] = 3
        save(root / f"images{part}" / f"case_{i}_0000.nii.gz", image)
        save(root / f"labels{part}" / f"case_{i}.nii.gz", label)
    (root / "dataset.json").write_text(json.dumps(dataset_json(labels)))


class Home:
    """Takes the labels of each dataset by its name, as Dataset004_Hippocampus."""

    def __init__(self, root, datasets):
        self.raw, self.results = root / "raw", root / "results"
        self.preprocessed = root / "preprocessed"
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "nnUNet_raw": str(self.raw),
            "nnUNet_preprocessed": str(self.preprocessed),
            "nnUNet_results": str(self.results),
            "nnUNet_def_n_proc": "1",
            "nnUNet_n_proc_DA": "0",
            "OMP_NUM_THREADS": "1",
        }
        self.names = {int(name[7:10]): name for name in datasets}
        for name, labels in datasets.items():
            write_dataset(self.raw / name, labels)
        numbers = " ".join(map(str, self.names))
        plan = f"nnUNetv2_plan_and_preprocess -d {numbers} -c 3d_fullres -np 1 -npfp 1"
        self.run(plan, nnUNet_n_proc_DA="1")  # planning sets as many threads as this
        for name in self.names.values():
            self._shrink(self.preprocessed / name)

    def _shrink(self, folder):
        path = folder / "nnUNetPlans.json"
        plans = json.loads(path.read_text())
        configuration = plans["configurations"]["3d_fullres"]
        configuration["patch_size"] = [16, 16, 16]
        configuration["architecture"]["arch_kwargs"] |= {
            "n_stages": 4,
            "features_per_stage": [4, 4, 8, 8],
            "kernel_sizes": [[3, 3, 3]] * 4,
            "strides": [[1, 1, 1], *[[2, 2, 2]] * 3],
            "n_conv_per_stage": [1] * 4,
            "n_conv_per_stage_decoder": [1] * 3,
        }
        path.write_text(json.dumps(plans))
        cases = [f"case_{i}" for i in range(5)]
        (folder / "splits_final.json").write_text(json.dumps([{"train": cases[:3], "val": cases[3:]}]))

    def write_short_programs(self, folder):
        """`nnUNetv2_train` and `nnUNetv2_predict` that take seconds, found before nnU-Net's own."""
        folder.mkdir()
        for name, more in {"train": "-device cpu", "predict": "-device cpu -npp 1 -nps 1"}.items():
            path = folder / f"nnUNetv2_{name}"
            path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P "{Path(__file__).resolve()}" {name} "$@" {more}\n')
            path.chmod(0o755)
        self.environment["PATH"] = f"{folder}{os.pathsep}{self.environment['PATH']}"

    def run(self, command, **more):
        done = subprocess.run(
            command.split(), env=os.environ | self.environment | more, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    def model(self, number, trainer):
        return self.results / self.names[number] / f"{trainer}__nnUNetPlans__3d_fullres"

    def train(self, number, trainer, **more):
        """Folders of a trained run: the model's, of the predictions for the test case, and of its labels."""
        self.run(f"nnUNetv2_train {number} 3d_fullres 0 -tr {trainer} -device cpu --npz", **more)
        raw, out = self.raw / self.names[number], self.results / f"predictions_{number}"
        self.run(
            f"nnUNetv2_predict -d {number} -i {raw / 'imagesTs'} -o {out} -c 3d_fullres -f 0 -tr {trainer} -device cpu "
            "--save_probabilities --disable_tta -npp 1 -nps 1"
        )
        return SimpleNamespace(model=self.model(number, trainer), predictions=out, raw=raw)

    @property
    def plans(self):
        """Of the first dataset."""
        folder = self.preprocessed / next(iter(self.names.values()))
        return json.loads((folder / "nnUNetPlans.json").read_text()) | {"continue_training": False}


def _short(command):
    from nnunetv2.inference.predict_from_raw_data import predict_entry_point
    from nnunetv2.run.run_training import run_training_entry
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    own = nnUNetTrainer.run_training

    def run_training(trainer):
        trainer.num_epochs, trainer.num_iterations_per_epoch, trainer.num_val_iterations_per_epoch = 1, 2, 1
        own(trainer)

    nnUNetTrainer.run_training = run_training
    {"train": run_training_entry, "predict": predict_entry_point}[command]()


if __name__ == "__main__":
    _short(sys.argv.pop(1))
