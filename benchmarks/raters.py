"""`segcal evaluate` against four raters beside the same against one: twenty cases of 4 x 128^3, two workers.

    python benchmarks/raters.py

The raters' labels are those of the first, shifted by a voxel along one axis each: they disagree along all borders.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from itertools import count
from pathlib import Path

import nibabel
import numpy as np

from evaluate import write_cases
from measure import alternate, write_rows

RATERS = 4
MOST = 1.5


def add_raters(folder: Path) -> list[Path]:
    """Folders of labels, the first of which is there."""
    folders = [folder / "labels", *(folder / f"labels-{rater}" for rater in range(2, RATERS + 1))]
    for axis, other in enumerate(folders[1:]):
        other.mkdir()
        for path in sorted(folders[0].iterdir()):
            image = nibabel.load(path)
            moved = np.roll(np.asarray(image.dataobj), 1, axis)
            nibabel.Nifti1Image(moved, image.affine).to_filename(other / path.name)
    return folders


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, runs = Path(name), count()
        write_cases(folder, 20, 128)
        labels = add_raters(folder)

        def evaluate(raters: int) -> None:
            folders = [str(path) for path in (folder / "predictions", *labels[:raters])]
            arguments = ["evaluate", *folders, "--out", str(folder / f"out-{next(runs)}"), "--workers", "2"]
            subprocess.run([sys.executable, "-m", "segcal", *arguments], check=True, capture_output=True)

        row = alternate(partial(evaluate, RATERS), partial(evaluate, 1), repetitions=5)
    what = f"segcal evaluate, {RATERS} raters / one rater"
    write_rows("raters", [{"what": what, "data": "20 x 4x128^3 .nii.gz", "must": f"<= {MOST}", **row}])


if __name__ == "__main__":
    main()
