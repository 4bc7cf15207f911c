"""DICOM segmentations (.dcm, binary, fractional or label maps) by highdicom; other DICOM objects are refused.

Binary segments that do not overlap are one label map whose values are the segments' numbers, and label maps stay what
they are. Binary segments that overlap are a channel each. Fractional segments are probabilities, the last axis that of
classes: one segment is one foreground; of several that sum to at most 1 everywhere, the rest is a background before
them, so that a class is the segment of that number. Slices without anything in them may be left out of the file;
they are added when the other file of the case says where they were.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from segcal.volumes.stored import Geometry, StoredArray, byte_size, check_size, needed, no_values, refuse

Array = NDArray[Any]
_SEGMENTATIONS = ("1.2.840.10008.5.1.4.1.1.66.4", "1.2.840.10008.5.1.4.1.1.66.7")  # of frames; of label maps
_ROUNDING = 1.5  # steps of the scale by which segments that were rounded one by one may exceed it


def read_segmentation(path: Path, file: BinaryIO, peek: bool) -> StoredArray:
    """(x, y, z) or (x, y, z, class), from the first slice to the last that the file has.

    A `peek` reads all of it, too: whether segments overlap is not in the header.
    """
    dicom = needed("pydicom", "dicom", path)
    highdicom = needed("highdicom", "dicom", path)
    data = dicom.dcmread(io.BytesIO(file.read()))  # a file would be asked for the bytes that a broken length announces
    if data.get("SOPClassUID") not in _SEGMENTATIONS:
        refuse(path, "it must be a DICOM segmentation (SEG); it is another kind of object")
    compressed = data.file_meta.TransferSyntaxUID.is_compressed
    size = -(-int(data.NumberOfFrames) * int(data.Rows) * int(data.Columns) * int(data.BitsAllocated) // 8)
    check_size(path, size, compressed=compressed)
    stored = len(data.PixelData or b"")
    if not compressed and stored not in (size, size + size % 2):  # an even number, by the standard
        refuse(path, f"its header announces {size:,} bytes of pixels and it holds {stored:,}: broken")
    seg = _opened(highdicom, data)
    geometry = seg.get_volume_geometry()
    if geometry is None:
        refuse(path, "its frames must lie in parallel planes at equal distances; they do not")
    segments = len(seg.segment_numbers)
    size = byte_size(path, (*geometry.spatial_shape, segments), np.uint8)
    check_size(path, size, compressed=True)  # slices that are far apart would have endless ones between them
    values, slope, empty = _values(highdicom, data, seg)
    affine = geometry.affine[:, [2, 1, 0, 3]]  # from (slice, row, column) to (x, y, z)
    values = values.transpose(2, 1, 0, *range(3, values.ndim))
    if np.linalg.det(affine[:3, :3]) < 0:  # slices go along the normal of rows and columns, as ITK stacks them
        values, affine = values[:, :, ::-1], affine @ _last_slice_first(values.shape[2])
    kept = no_values(values.shape, values.dtype) if peek else values
    return StoredArray(kept, slope, geometry=Geometry.of_lps(affine), order="F", empty=empty)


def _opened(highdicom: Any, data: Any) -> Any:
    return highdicom.seg.Segmentation.from_dataset(data, copy=False)


def _last_slice_first(slices: int) -> Array:
    turn = np.eye(4)
    turn[2, 2], turn[2, 3] = -1, slices - 1
    return turn


def _values(highdicom: Any, data: Any, seg: Any) -> tuple[Array, float, Array]:
    """(slice, row, column) or (slice, row, column, segment), their scale, and what a voxel outside of them holds."""
    kind = highdicom.seg.SegmentationTypeValues
    if seg.segmentation_type != kind.FRACTIONAL:
        try:
            return seg.get_volume(combine_segments=True).array, 1.0, np.zeros((), np.uint8)
        except RuntimeError:  # they overlap; what was asked holds a table that must not be asked again
            values = _opened(highdicom, data).get_volume(combine_segments=False).array.astype(np.uint8)
            return values, 1.0, np.zeros(values.shape[-1], np.uint8)
    most = int(seg.MaximumFractionalValue)
    values = seg.get_volume(combine_segments=False, rescale_fractional=False).array
    if values.shape[-1] == 1:
        return values[..., 0], 1 / most, np.zeros((), values.dtype)
    empty, total = np.zeros(values.shape[-1], values.dtype), values.sum(-1, dtype=np.int64)
    if total.max() <= most + _ROUNDING * values.shape[-1]:
        rest = np.maximum(most - total, 0).astype(values.dtype)
        values, empty = np.concatenate([rest[..., None], values], -1), np.array([most, *empty], values.dtype)
    return values, 1 / most, empty
