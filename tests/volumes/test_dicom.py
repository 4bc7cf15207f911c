"""DICOM segmentations, written by highdicom from made-up CT slices, against the same volume in NIfTI."""

from pathlib import Path

import nibabel
import numpy as np
import pytest

from segcal.errors import FileError, GridError
from segcal.evaluation.measure import measure_case
from segcal.evaluation.options import Options
from segcal.volumes import CaseFiles
from segcal.volumes.arrays import read_array

highdicom = pytest.importorskip("highdicom", reason="DICOM segmentations are read by highdicom")
pydicom = pytest.importorskip("pydicom")

ROWS, COLUMNS, SLICES = 6, 8, 5
SPACING = (0.7, 0.8, 2.5)  # along columns, rows, slices: x, y, z
ORIGIN = (-12.0, 34.0, 56.0)
DIRECTIONS = np.array([[1, 0, 0], [0, np.cos(0.3), np.sin(0.3)]])  # of a row and of a column, tilted, in LPS
NORMAL = np.cross(*DIRECTIONS)
STEPS = 255


def affine() -> np.ndarray:
    """NIfTI's of the slices, by the formula of the standard (C.7.6.2.1-1), and LPS turned to RAS."""
    lps = np.eye(4)
    lps[:3, 0], lps[:3, 1], lps[:3, 2] = DIRECTIONS[0] * SPACING[0], DIRECTIONS[1] * SPACING[1], NORMAL * SPACING[2]
    lps[:3, 3] = ORIGIN
    return np.diag([-1, -1, 1, 1]) @ lps


def ct_slices() -> list:
    study, series, frame = (pydicom.uid.generate_uid() for _ in range(3))
    found = []
    for index in range(SLICES):
        one = pydicom.Dataset()
        one.file_meta = pydicom.dataset.FileMetaDataset()
        one.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
        one.SOPClassUID, one.SOPInstanceUID = pydicom.uid.CTImageStorage, pydicom.uid.generate_uid()
        one.StudyInstanceUID, one.SeriesInstanceUID, one.FrameOfReferenceUID = study, series, frame
        one.Modality, one.PatientID, one.PatientName, one.PatientBirthDate, one.PatientSex = "CT", "1", "A^B", "", ""
        one.StudyID, one.AccessionNumber, one.ReferringPhysicianName = "1", "", ""
        one.StudyDate, one.StudyTime, one.InstanceNumber = "", "", index + 1
        one.Rows, one.Columns, one.PixelSpacing = ROWS, COLUMNS, [SPACING[1], SPACING[0]]
        one.SliceThickness = SPACING[2]
        one.ImageOrientationPatient = [float(x) for x in DIRECTIONS.ravel()]
        one.ImagePositionPatient = [float(x) for x in np.array(ORIGIN) + index * SPACING[2] * NORMAL]
        one.BitsAllocated = one.BitsStored = 16
        one.HighBit, one.PixelRepresentation, one.SamplesPerPixel = 15, 0, 1
        one.PhotometricInterpretation = "MONOCHROME2"
        one.PixelData = bytes(2 * ROWS * COLUMNS)
        found.append(one)
    return found


def write(path: Path, values: np.ndarray, kind: str, *, segments: int, omit: bool = False) -> Path:
    """Values (x, y, z), or (x, y, z, segment), as a segmentation."""
    code = pydicom.sr.codedict.codes.SCT.Organ
    described = [
        highdicom.seg.SegmentDescription(
            number + 1, f"organ {number + 1}", code, code, highdicom.seg.SegmentAlgorithmTypeValues.MANUAL
        )
        for number in range(segments)
    ]
    seg = highdicom.seg.Segmentation(
        ct_slices(), values.transpose(2, 1, 0, *range(3, values.ndim)), kind, described,
        pydicom.uid.generate_uid(), 1, pydicom.uid.generate_uid(), 1, "maker", "model", "1", "serial",
        max_fractional_value=STEPS, fractional_type="PROBABILITY", omit_empty_frames=omit,
    )  # fmt: skip
    seg.save_as(path)
    return path


def nifti(path: Path, values: np.ndarray) -> Path:
    nibabel.Nifti1Image(values, affine()).to_filename(path)
    return path


def measured(prediction: Path, label: Path):
    return measure_case(CaseFiles("case", (prediction,), label), Options(), threads=1).sums


def same(one, other) -> None:
    for name in ("bins", "overlap", "scores", "joint"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_allclose(one.voxel_ml, other.voxel_ml, rtol=1e-5)


@pytest.fixture(scope="module")
def volumes():
    """Labels of two organs in the inner slices, and probabilities of three classes in 255ths."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, (COLUMNS, ROWS, SLICES)).astype(np.uint8)
    labels[..., 0] = labels[..., -1] = 0
    parts = random.multinomial(STEPS, [0.5, 0.3, 0.2], (COLUMNS, ROWS, SLICES))
    parts[..., -1, :] = STEPS, 0, 0
    return labels, parts.astype(np.uint8)


@pytest.mark.parametrize("kind", ["BINARY", "LABELMAP"])
@pytest.mark.parametrize("omit", [False, True], ids=["all frames", "frames that hold something"])
def test_segments_are_labels_by_their_numbers(tmp_path, volumes, kind, omit):
    labels, parts = volumes
    maps = nifti(tmp_path / "maps.nii.gz", (parts / np.float32(STEPS)).astype(np.float32))
    seg = write(tmp_path / "seg.dcm", labels, kind, segments=2, omit=omit)
    stored = read_array(seg)
    np.testing.assert_array_equal(stored.values, labels[..., 1:-1] if omit else labels)
    assert read_array(seg, peek=True).values.shape == stored.values.shape
    if not omit:
        np.testing.assert_allclose(stored.geometry.affines[0], affine(), atol=1e-5)
    same(measured(maps, seg), measured(maps, nifti(tmp_path / "labels.nii.gz", labels)))


@pytest.mark.parametrize("omit", [False, True])
def test_fractional_segments_are_probabilities_and_the_rest_is_background(tmp_path, volumes, omit):
    labels, parts = volumes
    label = nifti(tmp_path / "labels.nii.gz", labels)
    values = parts[..., 1:] / STEPS
    seg = write(tmp_path / "maps.dcm", values.astype(np.float32), "FRACTIONAL", segments=2, omit=omit)
    np.testing.assert_array_equal(read_array(seg).values, parts[..., :-1, :] if omit else parts)
    # The same integers with the same scale: the sums are the same to the last bit.
    image = nibabel.Nifti1Image(parts, affine())
    image.header.set_slope_inter(1 / STEPS, 0)
    image.to_filename(tmp_path / "twin.nii.gz")
    raw = nibabel.load(tmp_path / "twin.nii.gz").dataobj
    assert raw.slope == pytest.approx(1 / STEPS)
    found, twin = measured(seg, label), measured(tmp_path / "twin.nii.gz", label)
    np.testing.assert_array_equal(found.bins[[0, 2]], twin.bins[[0, 2]])
    np.testing.assert_allclose(found.bins[1], twin.bins[1], rtol=1e-6)
    np.testing.assert_array_equal(found.overlap, twin.overlap)


def test_one_fractional_segment_is_one_foreground(tmp_path, volumes):
    labels, parts = volumes
    label = nifti(tmp_path / "labels.nii.gz", (labels == 1).astype(np.uint8))
    seg = write(tmp_path / "maps.dcm", (parts[..., 1] / STEPS).astype(np.float32), "FRACTIONAL", segments=1)
    maps = nifti(tmp_path / "maps.nii.gz", (parts[..., 1] / np.float32(STEPS)).astype(np.float32))
    np.testing.assert_allclose(measured(seg, label).bins, measured(maps, label).bins, rtol=1e-6)


def test_segments_that_overlap_are_a_channel_each(tmp_path, volumes):
    labels, _ = volumes
    both = np.stack([labels > 0, labels == 2], -1).astype(np.uint8)
    np.testing.assert_array_equal(read_array(write(tmp_path / "a.dcm", both, "BINARY", segments=2)).values, both)


def test_members_share_a_segmentation_without_its_empty_slices(tmp_path, volumes):
    from segcal.volumes.averaging import Averaging
    from segcal.volumes.pairing import MemberFiles

    labels, parts = volumes
    values = (parts / np.float32(STEPS)).astype(np.float32)
    maps = [nifti(tmp_path / f"{name}.nii.gz", array) for name, array in (("a", values), ("b", values[::-1].copy()))]
    seg = write(tmp_path / "seg.dcm", labels, "BINARY", segments=2, omit=True)
    twin = nifti(tmp_path / "labels.nii.gz", labels)
    members = (MemberFiles(tmp_path, (maps[1],)),)
    found, expected = (
        measure_case(CaseFiles("case", (maps[0],), label, members=members, averaging=Averaging()), Options(), threads=1)
        for label in (seg, twin)
    )
    same(found.sums, expected.sums)


def test_a_segmentation_elsewhere_is_refused(tmp_path, volumes):
    labels, _ = volumes
    seg = write(tmp_path / "a.dcm", labels, "BINARY", segments=2, omit=True)
    moved = affine()
    moved[0, 3] += 3
    nibabel.Nifti1Image(np.full((*labels.shape, 3), 1 / 3, np.float32), moved).to_filename(tmp_path / "m.nii.gz")
    with pytest.raises(GridError, match=r"labels are 8.6.3 at"):
        measured(tmp_path / "m.nii.gz", seg)


@pytest.mark.parametrize("kind", ["BINARY", "FRACTIONAL"])
def test_pixels_of_another_size_than_the_header_announces_are_rejected(tmp_path, volumes, kind):
    labels, parts = volumes
    values = labels if kind == "BINARY" else (parts[..., 1:] / STEPS).astype(np.float32)
    path = write(tmp_path / "a.dcm", values, kind, segments=2)
    intact, data = path.read_bytes(), pydicom.dcmread(path)
    pixels = data.PixelData
    for content in (pixels[:-2], pixels + bytes(2), b""):
        data.PixelData = content
        data.save_as(path)
        with pytest.raises(FileError, match=r"its header announces [\d,]+ bytes of pixels and it holds [\d,]+: broken"):
            read_array(path)
    with path.open("w+b", buffering=0) as file:
        file.write(intact)
        for length in reversed(range(0, len(intact), 61)):
            file.truncate(length)
            with pytest.raises(FileError):
                read_array(path)


def test_images_and_broken_files_are_refused(tmp_path):
    image = ct_slices()[0]
    image.file_meta.MediaStorageSOPClassUID, image.file_meta.MediaStorageSOPInstanceUID = (
        image.SOPClassUID, image.SOPInstanceUID,
    )  # fmt: skip
    image.save_as(tmp_path / "ct.dcm", enforce_file_format=True)
    with pytest.raises(FileError, match="it must be a DICOM segmentation"):
        read_array(tmp_path / "ct.dcm")
    (tmp_path / "none.dcm").write_bytes(b"none of it" * 99)
    with pytest.raises(FileError, match=r"^none\.dcm must be a DICOM segmentation; it cannot be read"):
        read_array(tmp_path / "none.dcm")
