"""NRRD headers: every form that SimpleITK reads as it reads it, and forms that must not be read."""

import bz2
import gzip
import os
from pathlib import Path

import numpy as np
import pytest
from simpleitk_oracle import check_as_simpleitk

from segcal.errors import FileError
from segcal.volumes.arrays import read_array

VALUES = np.arange(24, dtype=np.uint8)


def write(path: Path, lines: str, voxels: bytes = bytes(VALUES), *, type_name: str = "uint8") -> Path:
    """The dimension comes from the sizes."""
    sizes = next(line for line in lines.splitlines() if line.startswith("sizes: "))
    encoding = "" if "encoding" in lines else "encoding: raw\n"
    header = f"NRRD0005\n# made by hand\ntype: {type_name}\ndimension: {len(sizes.split()) - 1}\n{encoding}{lines}\n"
    path.write_bytes(header.encode() + voxels)
    return path


def test_voxels_are_in_the_order_of_the_format(tmp_path):
    """By hand: the first axis is the fastest, wherever the components are."""
    first = read_array(write(tmp_path / "a.nrrd", "sizes: 2 4 3\nkinds: list domain domain\n")).values
    last = read_array(write(tmp_path / "a.nrrd", "sizes: 4 3 2\nkinds: domain domain list\n")).values
    assert first.shape == last.shape == (4, 3, 2)
    assert (first[1, 0].tolist(), first[0, 1].tolist()) == ([2, 3], [8, 9])
    assert (last[1, 0].tolist(), last[0, 1].tolist()) == ([1, 13], [4, 16])


DIRECTIONS = "space directions: (0.6,0.8,0) (-1.6,1.2,0) (0,0,3)\nspace origin: (1,2.5,-3e1)\n"


@pytest.mark.parametrize("lines", [
    *[f"sizes: 4 3 2\nspace: {space}\n{DIRECTIONS}" for space in (
        "right-anterior-superior", "left-anterior-superior", "left-posterior-superior", "RAS", "LAS", "LPS",
        "scanner-xyz", "3D-right-handed", "3D-left-handed")],
    f"sizes: 4 3 2\nspace dimension: 3\n{DIRECTIONS}",
    "sizes: 4 6\nspace dimension: 2\nspace directions: (1, 0)  (0 ,2)\nspace origin: (3,4)\n",
    "sizes: 4 6\nspacedimension: 2\nspaceorigin: (3,4)\n",
    "sizes: 4 6\nspacings: 2 3\ncenterings: cell cell\n",
    "sizes: 4 6\nlabels: \"x\" \"y\"\nunits: \"mm\" \"mm\"\nmin: 0\nold max: 3\nthicknesses: 1 nan\n",
    "sizes: 4 3 2\nkinds: domain domain time\n",
    "sizes: 4 3 2\nkinds: none space ???\nspacings: 1 2 3\n",
    "sizes: 2 3 4\nkinds: vector domain domain\nspacings: nan 2 3\n",
    "sizes: 3 4 2\nkinds: domain domain list\nspacings: 2 3 nan\n",
    "sizes: 2 4 3 1\nkinds: list domain domain domain\nspace: RAS\nspace directions: none (2,0,0) (0,0,3) (0,4,0)\n",
    "sizes: 4 2 3 1\nkinds: domain point domain domain\nspace: RAS\nspace directions: (2,0,0) none (0,0,3) (0,4,0)\n",
    "sizes: 1 4 6\nkinds: stub domain domain\n",
    "sizes: 3 4 2\nkinds: RGB-color domain domain\n",
    "sizes: 4 3 2\nSegment0_Name:=L\u00e4sion: links\nSegment0_Tags:=a~b: c\nmeasurement:=1\nspace: LPS\n",
    "sizes: 4 3 1 2\n",
])  # fmt: skip
def test_places_are_those_of_simpleitk(tmp_path, lines):
    check_as_simpleitk(write(tmp_path / "a.nrrd", lines))


TYPES = {
    1: ("signed char", "int8", "int8_t", "uchar", "unsigned char", "uint8", "uint8_t"),
    2: ("short", "short int", "signed short", "signed short int", "int16", "int16_t", "ushort", "unsigned short",
        "unsigned short int", "uint16", "uint16_t"),
    4: ("int", "signed int", "int32", "int32_t", "uint", "unsigned int", "uint32", "uint32_t", "float"),
    8: ("longlong", "long long", "long long int", "signed long long", "signed long long int", "int64", "int64_t",
        "ulonglong", "unsigned long long", "unsigned long long int", "uint64", "uint64_t", "double"),
}  # fmt: skip


@pytest.mark.parametrize("endian", ["little", "big"])
@pytest.mark.parametrize(("size", "name"), [(size, name) for size, names in TYPES.items() for name in names])
def test_types_and_byte_orders_are_those_of_simpleitk(tmp_path, size, name, endian):
    voxels = np.random.default_rng(0).integers(0, 120, 24 * size).astype(np.uint8).tobytes()
    check_as_simpleitk(write(tmp_path / "a.nrrd", f"sizes: 4 3 2\nendian: {endian}\n", voxels, type_name=name))


@pytest.mark.parametrize("encoding", ["raw", "gzip", "gz", "bzip2", "bz2"])
def test_encodings_hold_the_same_voxels(tmp_path, encoding):
    """SimpleITK cannot read bzip2."""
    compress = {"r": bytes, "g": gzip.compress, "b": bz2.compress}[encoding[0]]
    attached = write(tmp_path / "a.nrrd", f"sizes: 4 3 2\nencoding: {encoding}\n", compress(bytes(VALUES)))
    (tmp_path / "voxels").write_bytes(compress(bytes(VALUES)))
    detached = tmp_path / "a.nhdr"
    detached.write_text(f"NRRD0001\ntype: uchar\ndimension: 3\nsizes: 4 3 2\nencoding: {encoding}\ndatafile: voxels")
    expected = write(tmp_path / "raw.nrrd", "sizes: 4 3 2\n")
    for path in (attached, detached):
        check_as_simpleitk(path, expected)


@pytest.mark.parametrize(("lines", "before", "after"), [
    ("line skip: 2\n", b"some\nlines\n", b""),
    ("lineskip: 1\nbyteskip: 3\n", b"line\nabc", b""),
    ("byte skip: -1\n", b"anything", b""),
])  # fmt: skip
def test_what_precedes_raw_voxels_is_skipped(tmp_path, lines, before, after):
    check_as_simpleitk(write(tmp_path / "a.nrrd", f"sizes: 4 3 2\n{lines}", before + bytes(VALUES) + after))


REFUSED = {
    "hex": ("sizes: 4 3 2\nencoding: hex\n", "its encoding is 'hex', which cannot be read"),
    "text": ("sizes: 4 3 2\nencoding: ascii\n", "its encoding is 'ascii', which cannot be read"),
    "unknown": ("sizes: 4 3 2\nencoding: zstd\n", "its encoding is 'zstd', which cannot be read"),
    "complex": ("sizes: 2 4 3\nkinds: complex domain domain\n", "kinds must be 3 that can be read"),
    "matrix": ("sizes: 4 3 2\nkinds: 2D-matrix domain domain\n", "kinds must be 3 that can be read"),
    "two lists": ("sizes: 4 3 2 1\nkinds: list domain domain list\n", "at most one axis of components"),
    "kinds": ("sizes: 4 3 2\nkinds: domain domain\n", "kinds must be 3 that can be read; got 'domain domain'"),
    "one axis": ("sizes: 4 6\nkinds: list domain\n", "it must have at least 2 axes in space"),
    "mins": ("sizes: 4 3 2\naxis mins: 0 0 0\n", "its axis mins and maxs cannot be read"),
    "time": ("sizes: 4 3 2 1\nspace: RAST\n", "its space is 'RAST', which cannot be read"),
    "plane": ("sizes: 4 6\nspace: LPS\n", "one dimension for each of its 2 domain axes; it has 3"),
    "spacings": ("sizes: 4 3 2\nspace: LPS\nspacings: 1 1 1\n", "and no spacings"),
    "spaces": ("sizes: 4 3 2\nspace: LPS\nspace dimension: 3\n", "must have space or space dimension"),
    "no space": ("sizes: 4 3 2\nspace directions: (1,0,0) (0,1,0) (0,0,1)\n", "need the field space"),
    "few": ("sizes: 4 3 2\nspace: LPS\nspace directions: (1,0,0) (0,1,0)\n", "must be 3 vectors"),
    "many": ("sizes: 4 3 2\nspace: LPS\nspace origin: (1,0,0) (0,1,0)\n", "must be 1 vectors"),
    "short": ("sizes: 4 3 2\nspace: LPS\nspace origin: (1,0)\n", "space origin must be 3 numbers"),
    "hole": ("sizes: 4 3 2\nspace: LPS\nspace directions: none (0,1,0) (0,0,1)\n", "must be finite"),
    "flat": ("sizes: 4 3 2\nspace: LPS\nspace directions: (1,0,0) (2,0,0) (0,0,1)\n", "directions independent"),
    "nowhere": ("sizes: 4 3 2\nspace: LPS\nspace origin: (nan,nan,nan)\n", "must be finite"),
    "sizes": ("sizes: 4 3 2.0\n", "its sizes must be 3 whole numbers; got '4 3 2.0'"),
    "negative": ("sizes: 4 -3 -2\n", "is not that of an image"),
    "skip": ("sizes: 4 3 2\nbyte skip: -3\n", "cannot be read with that encoding"),
    "compressed skip": ("sizes: 4 3 2\nbyte skip: 1\nencoding: gzip\n", "cannot be read with that encoding"),
    "lines": ("sizes: 4 3 2\nline skip: 3\n", "its line skip must lead to its voxels; got 3"),
    "beyond": ("sizes: 4 3 2\nbyte skip: 1000\n", "broken or cut off"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_cannot_be_read_are_named(tmp_path, name):
    lines, reason = REFUSED[name]
    with pytest.raises(FileError, match=rf"^a\.nrrd must .*{reason}"):
        read_array(write(tmp_path / "a.nrrd", lines))


def test_the_byte_order_must_be_known(tmp_path):
    with pytest.raises(FileError, match="it has no field 'endian'"):
        read_array(write(tmp_path / "a.nrrd", "sizes: 4 3 1\n", type_name="short"))
    with pytest.raises(FileError, match="its type is 'block', which cannot be read"):
        read_array(write(tmp_path / "a.nrrd", "sizes: 4 3 1\n", type_name="block"))


@pytest.mark.parametrize("magic", ["NRRD0000", "NRRD0006", "NRRD00.01", "NRRD0004 ", "nrrd0004", ""])
def test_other_versions_are_refused(tmp_path, magic):
    path = write(tmp_path / "a.nrrd", "sizes: 4 3 2\n")
    path.write_bytes(path.read_bytes().replace(b"NRRD0005", magic.encode()))
    with pytest.raises(FileError, match="it does not begin as an NRRD file does"):
        read_array(path)


HOSTILE = {  # the last lines of a header, and the reason of the error
    "absolute": ("data file: /secret.raw", "it names '/secret.raw'"),
    "parent": ("data file: ../secret.raw", "it names '../secret.raw'"),
    "other name": ("datafile: ../secret.raw", "it names '../secret.raw'"),
    "folder": ("data file: part/a.raw", "it names 'part/a.raw'"),
    "backslash": ("data file: ..\\secret.raw", "it names"),
    "list": ("data file: LIST\n../secret.raw", "it names 'LIST'|every line must be a field"),
    "list of planes": ("data file: LIST 2\n../secret.raw", "it names 'LIST 2'|every line must be a field"),
    "pattern": ("data file: slice%03d.raw 1 6 1", "it names 'slice%03d.raw 1 6 1'"),
    "standard input": ("data file: -", "- must be a file; it does not exist"),
    "dots": ("data file: ..", r"it names '\.\.'"),
    "nothing": ("data file: ", "it names ''"),
    "capitals": ("Data File: ../secret.raw", "'Data File' is not spelled"),
    "two spaces": ("data  file: ../secret.raw", "'data  file' is not spelled"),
    "space before": (" data file: ../secret.raw", "' data file' is not spelled"),
    "space after": ("data file : ../secret.raw", "'data file ' is not spelled"),
    "tab": ("data\tfile: ../secret.raw", "is not spelled"),
    "no space": ("data file:../secret.raw", "every line must be a field"),
    "note inside": ("data file:=a: ../secret.raw", "is not spelled"),
    "twice": ("data file: a.raw\ndata file: ../secret.raw", "'data file' is there twice"),
    "two names": ("data file: a.raw\ndatafile: ../secret.raw", "there twice, last as 'datafile'"),
    "sizes twice": ("sizes: 4 3\ndata file: a.raw", "'sizes' is there twice"),
    "unknown": ("datei: ../secret.raw\ndata file: a.raw", "every line must be a field"),
    "more lines": ("data file: a.raw\n\ndata file: ../secret.raw", "the header must end after that"),
    "next line": ("# a\x85data file: ../secret.raw\ndata file: a.raw", "other line ends"),
    "vertical tab": ("# a\x0bdata file: ../secret.raw\ndata file: a.raw", "other line ends"),
    "form feed": ("# a\x0cdata file: ../secret.raw\ndata file: a.raw", "other line ends"),
    "carriage return": ("# a\rdata file: ../secret.raw\ndata file: a.raw", "other line ends"),
    "line separator": ("# a\u2028data file: ../secret.raw\ndata file: a.raw", "other line ends"),
    "zero": ("data file: a.raw\0../secret.raw", "control characters"),
    "other digits": ("byte skip: \u0660\ndata file: a.raw", "its byte skip must be ASCII text"),
    "pipe": ("data file: pipe", "pipe must be a file"),
    "link": ("data file: link.raw", r"must be in the same folder; 'link\.raw' is a link"),
    "no end": ("labels: \"x\" \"y\"", "it must end with an empty line"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_no_header_leads_to_other_files(tmp_path, name):
    """A file of the right size is in every place; a pipe would wait forever if it were opened."""
    lines, reason = HOSTILE[name]
    folder = tmp_path / "in"
    folder.mkdir()
    for secret in (folder / "a.raw", tmp_path / "secret.raw"):
        secret.write_bytes(bytes(12))
    os.mkfifo(folder / "pipe")
    (folder / "link.raw").symlink_to("../secret.raw")
    path = folder / "a.nhdr"
    path.write_text(f"NRRD0004\ntype: uchar\ndimension: 2\nsizes: 4 3\nencoding: raw\n{lines}\n")
    for peek in (True, False):
        with pytest.raises(FileError, match=reason):
            read_array(path, peek=peek)
