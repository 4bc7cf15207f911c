"""What SimpleITK reads from a file, as the independent truth for our readers of NRRD and MetaImage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from segcal.volumes.arrays import read_array
from segcal.volumes.stored import StoredArray

itk = pytest.importorskip("SimpleITK", reason="SimpleITK says what files hold")
itk.ProcessObject.SetGlobalWarningDisplay(False)


def random_image(random: np.random.Generator, values: np.ndarray[Any, Any], *, components: bool) -> Any:
    """An ITK image (z, y, x) or (z, y, x, component) in a random place; its axes may be mirrored."""
    image = itk.GetImageFromArray(values, isVector=components)
    axes = image.GetDimension()
    direction, _ = np.linalg.qr(random.normal(size=(axes, axes)))
    image.SetDirection(direction.ravel().tolist())
    image.SetSpacing(random.uniform(0.2, 5, axes).tolist())
    image.SetOrigin(random.normal(0, 200, axes).tolist())
    return image


def check_as_simpleitk(path: Path, expected_file: Path | None = None) -> StoredArray:
    """Compare our values and affine with those of SimpleITK, which may read an equivalent file."""
    image = itk.ReadImage(str(expected_file or path))
    array = itk.GetArrayFromImage(image)
    expected = np.moveaxis(array.T, 0, -1) if image.GetNumberOfComponentsPerPixel() > 1 else array.T
    stored, peek = read_array(path), read_array(path, peek=True)
    np.testing.assert_array_equal(stored.values, expected)
    axes = image.GetDimension()
    space = min(axes, 3)
    lps = np.eye(4)
    steps = np.reshape(image.GetDirection(), (axes, axes)) * image.GetSpacing()
    lps[:space, :space] = steps[:space, :space]
    lps[:space, 3] = image.GetOrigin()[:space]
    for array in (stored, peek):
        assert (array.values.shape, array.order) == (expected.shape, "F")
        assert array.values.dtype.newbyteorder("=") == expected.dtype
        assert array.geometry is not None
        np.testing.assert_allclose(array.geometry.affines[0], np.diag([-1, -1, 1, 1]) @ lps, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(array.geometry.zooms, (*image.GetSpacing(), 1.0)[:3], rtol=1e-12)
    return stored
