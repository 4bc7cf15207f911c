"""What NRRD and MetaImage share, in files written by SimpleITK: the same voxels in the same places, or an error."""

import bz2
import gzip
import shutil
import zlib
from pathlib import Path

import nibabel
import numpy as np
import pytest
from simpleitk_oracle import check_as_simpleitk, itk, random_image

from segcal import evaluate
from segcal.errors import FileError, GridError
from segcal.evaluation.measure import measure_case
from segcal.evaluation.options import Options
from segcal.volumes import CaseFiles, find_predictions, open_prediction, pair_cases
from segcal.volumes.arrays import read_array
from segcal.volumes.text_header import with_detached_data

RANDOM = np.random.default_rng(0)
SHAPE = (4, 5, 6)
LABELS = RANDOM.integers(0, 3, SHAPE).astype(np.uint8)
_RAW = RANDOM.random((*SHAPE, 3)) ** 2
MAPS = (_RAW / _RAW.sum(-1, keepdims=True)).astype(np.float32)
ENDINGS = ("nrrd", "nhdr", "mha", "mhd")


def oblique() -> np.ndarray:
    """Directions that no axis runs along, as scanners tilted by 20 and 30 degrees have them; in RAS."""
    a, b = np.radians(20), np.radians(30)
    tilt = np.array([[1, 0, 0], [0, np.cos(a), -np.sin(a)], [0, np.sin(a), np.cos(a)]])
    turn = np.array([[np.cos(b), -np.sin(b), 0], [np.sin(b), np.cos(b), 0], [0, 0, 1]])
    affine = np.eye(4)
    affine[:3, :3] = tilt @ turn @ np.diag([0.7, 0.8, 2.5])
    affine[:3, 3] = 12, -34, 56
    return affine


AFFINE = oblique()


def write(path: Path, values: np.ndarray, affine: np.ndarray = AFFINE, *, compressed: bool = True) -> Path:
    """(x, y, z), or (x, y, z, class) as a vector per voxel; ITK counts to left and posterior."""
    path.parent.mkdir(parents=True, exist_ok=True)
    vector = values.ndim == 4
    image = itk.GetImageFromArray(values.transpose(2, 1, 0, 3) if vector else values.T, isVector=vector)
    lps = np.diag([-1, -1, 1, 1]) @ affine
    spacing = np.linalg.norm(lps[:3, :3], axis=0)
    image.SetSpacing(spacing.tolist())
    image.SetDirection((lps[:3, :3] / spacing).ravel().tolist())
    image.SetOrigin(lps[:3, 3].tolist())
    itk.WriteImage(image, str(path), compressed)
    return path


def nifti(path: Path, values: np.ndarray, affine: np.ndarray = AFFINE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.Nifti1Image(values, affine).to_filename(path)
    return path


def measured(prediction: Path, label: Path):
    return measure_case(CaseFiles("case", (prediction,), label), Options(), threads=1)


def same(one, other, *, rtol: float = 0) -> None:
    assert one.doubts == other.doubts
    for name in ("bins", "overlap", "scores", "joint"):
        np.testing.assert_allclose(getattr(one.sums, name), getattr(other.sums, name), rtol=rtol)
    np.testing.assert_allclose(one.sums.voxel_ml, other.sums.voxel_ml, rtol=1e-6)


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("ending", ENDINGS)
def test_what_itk_wrote_is_read_where_it_lies(tmp_path, ending, compressed):
    for values in (LABELS, MAPS, MAPS[..., 0].astype(np.float64), LABELS.astype(np.int16) - 1):
        path = write(tmp_path / f"a.{ending}", values, compressed=compressed)
        stored, peeked = read_array(path), read_array(path, peek=True)
        np.testing.assert_array_equal(stored.values, values)
        for found in (stored, peeked):
            assert (found.values.shape, found.values.dtype) == (values.shape, values.dtype)
            np.testing.assert_allclose(found.geometry.affines[0], AFFINE, atol=1e-6)
            np.testing.assert_allclose(found.geometry.zooms, (0.7, 0.8, 2.5), rtol=1e-6)


@pytest.mark.parametrize("ending", ["nrrd", "mha"])
def test_formats_mix_on_one_oblique_grid(tmp_path, ending):
    expected = measured(nifti(tmp_path / "m.nii.gz", MAPS), nifti(tmp_path / "l.nii.gz", LABELS))
    for label in (write(tmp_path / f"l.{ending}", LABELS), tmp_path / "l.nii.gz"):
        for maps in (write(tmp_path / f"m.{ending}", MAPS), tmp_path / "m.nii.gz"):
            same(measured(maps, label), expected)


def test_turned_axes_are_turned_back_and_other_places_refused(tmp_path):
    label = nifti(tmp_path / "l.nii.gz", LABELS)
    expected = measured(nifti(tmp_path / "m.nii.gz", MAPS), label)
    flipped = AFFINE @ np.array([[-1, 0, 0, SHAPE[0] - 1], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])
    same(
        measured(write(tmp_path / "m.nrrd", MAPS[::-1], flipped), label), expected, rtol=1e-12
    )  # voxels in other order
    moved = AFFINE.copy()
    moved[0, 3] += 5
    with pytest.raises(GridError, match="their origins are"):
        measured(write(tmp_path / "n.nrrd", MAPS, moved), label)


def test_names_pair_across_formats_and_slicers_ending_is_no_name(tmp_path):
    nifti(tmp_path / "maps" / "one.nii.gz", MAPS)
    write(tmp_path / "labels" / "one.seg.nrrd", LABELS)
    (case,) = pair_cases(tmp_path / "maps", tmp_path / "labels").cases
    assert (case.name, case.label.name) == ("one", "one.seg.nrrd")


def test_calibrated_maps_and_labels_become_nifti_in_the_same_place(tmp_path):
    from segcal.volumes import place_of_labels

    write(tmp_path / "maps" / "one.mha", MAPS)
    (files,) = find_predictions(tmp_path / "maps")
    prediction = open_prediction(files)
    (path,) = prediction.rewrite(lambda values: values / 2, tmp_path / "out", tmp_path / "maps")
    target = tmp_path / "labels" / place_of_labels(files, tmp_path / "maps")
    prediction.write_labels(LABELS, target)
    assert (path.name, target.name) == ("one.nii.gz", "one.nii.gz")
    for written, values in ((path, MAPS / 2), (target, LABELS)):
        image = nibabel.load(written)
        np.testing.assert_allclose(image.affine, AFFINE, atol=1e-4)
        np.testing.assert_array_equal(np.asarray(image.dataobj), values)


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("ending", ENDINGS)
def test_random_images_are_read_as_by_simpleitk(tmp_path, ending, compressed):
    random = np.random.default_rng(1)
    for number, code in enumerate(("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8") * 2):
        axes, components = 2 + number % 2, 1 + number // 2 % 4
        shape = (*random.integers(1, 7, axes), components)[: axes + (components > 1)]
        values = (random.normal(size=shape) * 100).astype(code)
        image = random_image(random, values, components=components > 1)
        path = tmp_path / f"{number}.{ending}"
        itk.WriteImage(image, str(path), compressed)
        check_as_simpleitk(path)


def test_notes_of_other_programs_and_umlauts_are_passed_over(tmp_path):
    image = itk.GetImageFromArray(LABELS.T)
    for key, value in {"Segment0_Name": "L\u00e4sion: links", "0010|0010": "A^B", "dim[0]": "3", "name": "x=1"}.items():
        image.SetMetaData(key, value)
    for ending in ENDINGS:
        itk.WriteImage(image, str(tmp_path / f"L\u00e4sion.{ending}"))
        check_as_simpleitk(tmp_path / f"L\u00e4sion.{ending}")


def test_headers_with_windows_line_ends_are_read(tmp_path):
    for ending in ("nrrd", "mha"):
        path = write(tmp_path / f"a.{ending}", LABELS, compressed=False)
        voxels = LABELS.tobytes(order="F")
        header = path.read_bytes().removesuffix(voxels)
        path.write_bytes(header.replace(b"\n", b"\r\n") + voxels)
        check_as_simpleitk(path)


def test_a_network_says_the_same_of_an_image_in_another_format(tmp_path):
    """Through reading, turning, predicting and writing: maps of the MetaImage and of its NIfTI twin."""
    from tiny import untrained_run

    from segcal.training.runs import image_cases, load_run, predict

    run = load_run(untrained_run(tmp_path), with_data=False)
    image = RANDOM.normal(100, 20, (12, 10, 6)).astype(np.int16)
    write(tmp_path / "itk" / "one.mha", image)
    nifti(tmp_path / "nifti" / "one.nii.gz", image)
    maps = [predict(run, tmp_path / f"{name}-maps", cases=image_cases(tmp_path / name, 1)) for name in ("itk", "nifti")]
    ours, twin = (nibabel.load(each.paths[0]) for each in maps)
    np.testing.assert_array_equal(np.asarray(ours.dataobj), np.asarray(twin.dataobj))
    np.testing.assert_allclose(ours.affine, twin.affine, atol=1e-4)
    np.testing.assert_allclose(ours.header.get_zooms(), twin.header.get_zooms(), rtol=1e-6)


# Damage


def smooth_labels() -> np.ndarray:
    """A label map whose neighboring voxels are alike, as those of real ones."""
    x, y, z = np.indices((24, 20, 16))
    return np.digitize(np.sin(x / 4) + np.cos(y / 5 + z / 9) + np.sin(z / 3), [0, 0.7, 1.4]).astype(np.uint8)


def compressed_file(folder: Path, kind: str) -> tuple[Path, Path, int]:
    """A compressed label map: its header, the file that holds the voxels, and the place of their first byte."""
    ending = {"mha": "mha", "zraw": "mhd", "gzip": "nrrd", "bzip2": "nrrd"}[kind]
    path = write(folder / f"a.{ending}", smooth_labels())
    if kind == "zraw":
        return path, path.with_suffix(".zraw"), 0
    content = path.read_bytes()
    start = content.index(b"LOCAL\n") + 6 if kind == "mha" else content.index(b"\n\n") + 2
    if kind == "bzip2":
        header = content[:start].replace(b"gzip", b"bzip2")
        path.write_bytes(header + bz2.compress(gzip.decompress(content[start:])))
        start += 1
    return path, path, start


@pytest.mark.parametrize("kind", ["mha", "zraw", "gzip", "bzip2"])
def test_no_flipped_bit_of_compressed_voxels_gives_other_voxels(tmp_path, kind):
    """Adler-32, the checksum of MetaImage, may miss a flip: of real label maps it missed 1 in 200,000."""
    header, file, start = compressed_file(tmp_path, kind)
    values = read_array(header).values.copy()
    np.testing.assert_array_equal(values, smooth_labels())
    content = file.read_bytes()
    bits = 8 * (len(content) - start)
    refused = 0
    for bit in np.random.default_rng(0).permutation(bits)[:1000]:
        damaged = bytearray(content)
        damaged[start + bit // 8] ^= 1 << (bit % 8)
        file.write_bytes(damaged)
        try:
            assert np.array_equal(read_array(header).values, values)
        except FileError:
            refused += 1
    assert refused > 0.8 * min(bits, 1000)


@pytest.mark.parametrize("kind", ["mha", "zraw", "gzip", "bzip2"])
def test_compressed_voxels_end_where_the_header_says(tmp_path, kind):
    header, file, start = compressed_file(tmp_path, kind)
    content = file.read_bytes()
    plain = smooth_labels().tobytes(order="F")
    compress = {"gzip": gzip.compress, "bzip2": bz2.compress}.get(kind, zlib.compress)
    for part in (plain[:-1], plain + b"\0", plain * 40, b""):
        file.write_bytes(content[:start] + compress(part))
        with pytest.raises(FileError, match=r"^a\.\w+ must be .* announces"):
            read_array(header)
    for end in (content[start:-1], content[start:] + b"\0", content[start:] + compress(b"\0")):
        file.write_bytes(content[:start] + end)
        with pytest.raises(FileError, match=r"^a\.\w+ must be "):
            read_array(header)


@pytest.mark.parametrize(("kind", "compress"), [("gzip", gzip.compress), ("bzip2", bz2.compress)])
def test_several_compressed_streams_are_one(tmp_path, kind, compress):
    header, file, start = compressed_file(tmp_path, kind)
    plain = smooth_labels().tobytes(order="F")
    file.write_bytes(file.read_bytes()[:start] + compress(plain[:500]) + compress(b"") + compress(plain[500:]))
    np.testing.assert_array_equal(read_array(header).values, smooth_labels())


@pytest.mark.parametrize("ending", ENDINGS)
def test_stored_voxels_end_where_the_header_says(tmp_path, ending):
    path = write(tmp_path / f"a.{ending}", LABELS, compressed=False)
    file = path.with_suffix(".raw") if ending in ("nhdr", "mhd") else path
    content = file.read_bytes()
    for damaged in (content[:-1], content + b"\0"):
        file.write_bytes(damaged)
        for peek in (True, False):
            with pytest.raises(FileError, match=r"its header announces 120 bytes and the file has 1(19|21): broken"):
                read_array(path, peek=peek)


@pytest.mark.parametrize("ending", ["nrrd", "mha"])
def test_a_header_that_announces_too_much_is_refused(tmp_path, ending):
    path = write(tmp_path / f"a.{ending}", LABELS, compressed=False)
    content = path.read_bytes()
    assert content.count(b"4 5 6") == 1
    path.write_bytes(content.replace(b"4 5 6", b"40000 50000 60000"))
    with pytest.raises(FileError, match="announces 120,000,000,000,000 bytes and the file has"):
        read_array(path)


@pytest.mark.parametrize("ending", ["nrrd", "mha"])
def test_broken_files_are_a_sentence(tmp_path, ending):
    path = write(tmp_path / f"a.{ending}", LABELS)
    sound = path.read_bytes()
    for content in (sound[:-40], b"none", gzip.compress(sound), sound[:60], b"NRRD0004\n", b"a = 1\n" * 200_000):
        path.write_bytes(content)
        with pytest.raises(FileError, match=rf"^a\.{ending} must (be|have) .*\.$"):
            read_array(path)


@pytest.mark.parametrize("ending", ["mhd", "nhdr"])
def test_changed_voxels_beside_a_header_are_measured_again(tmp_path, ending):
    write(tmp_path / "labels" / f"one.{ending}", LABELS, compressed=False)
    write(tmp_path / "empty" / f"one.{ending}", np.zeros_like(LABELS), compressed=False)
    nifti(tmp_path / "maps" / "one.nii.gz", MAPS)
    folders = [tmp_path / name for name in ("maps", "labels", "out")]
    assert evaluate(*folders).measured.overlap.true[0, 1:].sum() > 0
    shutil.copyfile(tmp_path / "empty" / "one.raw", tmp_path / "labels" / "one.raw")
    assert evaluate(*folders).measured.overlap.true[0, 1:].sum() == 0


def test_data_beside_a_header_is_listed_with_it(tmp_path):
    header = write(tmp_path / "one.mhd", LABELS)
    assert with_detached_data([header]) == (header, tmp_path / "one.zraw")
    assert with_detached_data([tmp_path / "missing.mhd"]) == (tmp_path / "missing.mhd",)
