"""Memory of evaluate, calibrate and predict on one large case: 10^8 voxels and 16 classes, if not told otherwise.

    python benchmarks/memory.py [--voxels 100000000] [--only evaluate fit "fit, local" apply predict "predict, turned"]
    python benchmarks/memory.py --dtype float32      # maps of 6.4 GB instead of 1.6 GB

Each command runs in a process of its own. Resident memory counts pages of files that are mapped, which the system
takes back when it needs them; anonymous memory is what the command itself holds, and what must be there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nibabel
import numpy as np

from segcal.calibrators import Temperature

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # small datasets and networks

CLASSES = 16
POLL_S = 0.02
COMMANDS = ("evaluate", "fit", "fit, local", "apply", "predict", "predict, turned")
WINDOW = (128, 128, 64)


def shape_of(voxels: int) -> tuple[int, int, int]:
    """About so many voxels, in slices of 500 x 500."""
    return 500, 500, max(1, round(voxels / 250_000))


def write_volume(path: Path, planes: list[np.ndarray], depth: int, *, slope: float = 1.0, flip: bool = False) -> None:
    """A NIfTI file (x, y, z, plane) that repeats each plane along z: written as fast as the disk takes it."""
    width, height = planes[0].shape
    header = nibabel.Nifti1Header()
    header.set_data_dtype(planes[0].dtype)
    header.set_data_shape((width, height, depth, len(planes)) if len(planes) > 1 else (width, height, depth))
    header.set_sform(np.diag([-1.0 if flip else 1.0, -1.0 if flip else 1.0, 1.0, 1.0]), code=1)
    header["vox_offset"], header["magic"] = 352, header.single_magic
    header["scl_slope"], header["scl_inter"] = slope, 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(header.binaryblock + bytes(4))
        for plane in planes:
            content = plane.tobytes(order="F")
            for _ in range(depth):
                file.write(content)


def write_maps(folder: Path, voxels: int, dtype: str) -> Path:
    """One case: labels, and probabilities that are too sure of them, and wrong in every fifth voxel."""
    width, height, depth = shape_of(voxels)
    random = np.random.default_rng(0)
    labels = random.integers(0, CLASSES, (width, height), np.uint8)
    shown = np.where(random.random((width, height)) < 0.2, (labels + 1) % CLASSES, labels)
    sure = random.integers(150, 226, (width, height))
    rest, left = np.divmod(255 - sure, CLASSES - 1)
    numbers = [np.where(shown == c, sure + left, rest).astype(np.uint8) for c in range(CLASSES)]  # 255 in all
    planes = numbers if dtype == "uint8" else [(plane / 255).astype(np.float32) for plane in numbers]
    write_volume(folder / "maps" / "case.nii", planes, depth, slope=1 / 255 if dtype == "uint8" else 1.0)
    write_volume(folder / "labels" / "case.nii", [labels], depth)
    return folder / "maps" / "case.nii"


def write_images(folder: Path, voxels: int, *, flip: bool) -> Path:
    """One image for `predict`; turned: stored with two axes the other way round, which are turned back in the map."""
    width, height, depth = shape_of(voxels)
    plane = np.random.default_rng(0).integers(0, 200, (width, height)).astype(np.int16)
    path = folder / ("turned" if flip else "images") / "case.nii"
    write_volume(path, [plane], depth, flip=flip)
    return path


def train_small(folder: Path) -> Path:
    """A run of a small network with 16 classes, as AMOS has them, and the least training."""
    import layouts
    import tiny

    from segcal.training import train
    from segcal.training.config import make_config

    root = layouts.write_amos(folder / "data", mr_cases=0)
    changes = [
        tiny.NETWORK.replace("[1, 1]", "[1, 1, 1]"), "data.patch=[32, 16, 16]", f"data.inference_patch={list(WINDOW)}",
        "data.inference_overlap=0.0", "data.spacing_mm=keep", "data.crop_foreground=false", "training.epochs=1",
        "training.patches_per_case=1",
    ]  # fmt: skip
    train(make_config(dataset="amos", root=root, method="dice-ce", changes=changes), folder / "run")
    return folder / "run"


def measured(*arguments: object) -> dict[str, float]:
    """Seconds of a command, and the most memory that it held: resident, and of that anonymous."""
    begin = time.monotonic()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "segcal", *map(str, arguments)], stdout=said, stderr=said,
            env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed goes back, and is not counted
        )  # fmt: skip
        anonymous = resident = 0
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                break
            found = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if "kB" in line}
            anonymous = max(anonymous, int(found.get("RssAnon", 0)))
            resident = max(resident, int(found.get("VmHWM", 0)))
            time.sleep(POLL_S)
        if process.wait():
            said.seek(0)
            raise SystemExit(f"segcal {' '.join(map(str, arguments))} failed:\n{said.read().decode()}")
    return {"resident": resident * 1024, "anonymous": anonymous * 1024, "seconds": time.monotonic() - begin}


def measure_all(folder: Path, voxels: int, dtype: str, only: list[str]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    maps = write_maps(folder, voxels, dtype) if {"evaluate", "fit", "fit, local", "apply"} & set(only) else folder
    places = (maps.parent, folder / "labels")

    def row(name: str, file: Path, *arguments: object) -> None:
        found = measured(*arguments)
        size = file.stat().st_size
        rows.append({"command": name, "file": file.name, "file_GB": size / 1e9} | found)
        print(rows[-1], file=sys.stderr, flush=True)

    if "evaluate" in only:
        row("evaluate", maps, "evaluate", *places, "--out", folder / "evaluated")
    for name in only:
        if name.startswith("fit"):
            method = "temperature" if name == "fit" else "local-temperature"
            out = folder / "fitted.json"
            row(f"calibrate fit, {method}", maps, "calibrate", "fit", *places, "--method", method, "--folds", 0,
                "--out", out)  # fmt: skip
    if "apply" in only:
        Temperature(1.5).save(folder / "given.json")
        row("calibrate apply", maps, "calibrate", "apply", folder / "given.json", maps.parent, "--out",
            folder / "applied")  # fmt: skip
        shutil.rmtree(folder / "applied")
    for name in only:
        if name.startswith("predict"):
            run = folder / "run" if (folder / "run").exists() else train_small(folder)
            image = write_images(folder, voxels, flip=name == "predict, turned")
            row(name, image, "predict", run, "--images", image.parent, "--out", folder / name.replace(" ", "-"))
            shutil.rmtree(folder / name.replace(" ", "-"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--voxels", type=int, default=10**8)
    parser.add_argument("--dtype", choices=("uint8", "float32"), default="uint8", help="of the maps")
    parser.add_argument("--only", nargs="*", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--folder", type=Path, help="where there is room: about 20 GB for 10^8 voxels")
    given = parser.parse_args()
    voxels = int(np.prod(shape_of(given.voxels)))
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        rows = measure_all(Path(folder), given.voxels, given.dtype, given.only)
    logits = voxels * CLASSES * 4
    print(f"\n{voxels:,} voxels x {CLASSES} classes; as float32 they are {logits / 1e9:.2f} GB\n")
    print("| command | file | file, GB | peak resident, GB | peak anonymous, GB | of all values as float32 | seconds |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        resident, anonymous = (float(str(row[name])) for name in ("resident", "anonymous"))
        print(
            f"| {row['command']} | {row['file']} | {row['file_GB']:.2f} | {resident / 1e9:.2f} | {anonymous / 1e9:.2f} "
            f"| {anonymous / logits:.2f} | {row['seconds']:.0f} |"
        )


if __name__ == "__main__":
    main()
