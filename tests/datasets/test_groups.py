"""Groups that a dataset's own files tell."""

import nibabel
import numpy as np
import pytest
from typer.testing import CliRunner

from segcal.cli import app


@pytest.fixture
def acdc(tmp_path):
    for patient, group in (("patient001", "DCM"), ("patient002", "NOR")):
        folder = tmp_path / "database" / "training" / patient
        folder.mkdir(parents=True)
        (folder / "Info.cfg").write_text(f"ED: 1\nES: 12\nGroup: {group}\nHeight: 184.0\n")
        for frame in ("frame01", "frame12"):
            for end in ("", "_gt"):
                image = nibabel.Nifti1Image(np.zeros((2, 2, 2), np.uint8), np.eye(4))
                nibabel.save(image, folder / f"{patient}_{frame}{end}.nii.gz")
    return tmp_path


def run(root, name="acdc"):
    return CliRunner().invoke(app, ["datasets", "groups", name, str(root), "--out", str(root / "groups.csv")])


def test_acdc_tells_pathology_and_phase(acdc):
    done = run(acdc)
    assert done.exit_code == 0, done.output
    assert (acdc / "groups.csv").read_text().splitlines() == [
        "case,pathology,phase",
        "patient001_frame01,dilated cardiomyopathy,ED",
        "patient001_frame12,dilated cardiomyopathy,ES",
        "patient002_frame01,normal,ED",
        "patient002_frame12,normal,ES",
    ]
    assert "pathology: dilated cardiomyopathy 2, normal 2" in done.output


def test_what_is_not_told_is_empty_and_nothing_at_all_is_refused(acdc):
    training = acdc / "database" / "training"
    (training / "patient001" / "Info.cfg").unlink()
    assert run(acdc).exit_code == 0
    assert "patient001_frame01,,\n" in (acdc / "groups.csv").read_text()
    (training / "patient002" / "Info.cfg").unlink()
    done = run(acdc)
    assert done.exit_code == 2
    assert "every patient of ACDC must have Info.cfg" in done.output


def test_a_dataset_that_tells_none_is_refused(tmp_path):
    from segcal.datasets import make_phantom

    done = run(make_phantom(tmp_path, cases=2, size=(40, 40, 26)).parent, "phantom")
    assert done.exit_code == 2
    assert "files that define groups, as acdc; phantom has none." in done.output
