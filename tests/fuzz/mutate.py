"""Files spoilt on purpose, the same for the same seed: bytes turned, cut and put in, and trees of values gone wrong.

`spoil_bytes` knows nothing of the format. `spoil_tree` takes what JSON and TOML hold (dictionaries, lists, words,
numbers) and gives text that still parses, most of the time, but says something else. `spoil_inside` reaches into
compressed files: it spoils what they hold and compresses that again, so that a checksum does not catch it first.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import zipfile
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

import tomli_w

# What counts, lengths and offsets become: ends of the ranges, and numbers whose products overflow.
EXTREMES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)
WORDS = (
    "", " ", "a\nb", "\x00", "\x1b[31m", "ä€😀", "../../x", "/", "a" * 5000, "=1+1", "<script>", "nan", "1e400",
    "os.system", "__class__", "{0}", "%s",
)  # fmt: skip
NUMBERS = (0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**12, 10**40, 0.5, -0.5, 1e-320, 1e308, math.inf, math.nan)


def spoil_bytes(random: Random, content: bytes) -> bytes:
    """The content after one to three random changes."""
    spoilt = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        random.choice(_BYTE_CHANGES)(random, spoilt)
    return bytes(spoilt)


def spoil_start(size: int) -> Callable[[Random, bytes], bytes]:
    """Spoils nothing but the first bytes: the header of most formats."""
    return lambda random, content: spoil_bytes(random, content[:size]) + content[size:]


def _place(random: Random, content: bytearray) -> int:
    """Anywhere, but every other time near the start or the end, where formats keep what they count."""
    size = max(1, len(content))
    near = random.random()
    if near < 0.3:
        return random.randrange(min(size, 400))
    return max(0, size - 1 - random.randrange(min(size, 200))) if near < 0.5 else random.randrange(size)


def _flip(random: Random, content: bytearray) -> None:
    for _ in range(random.choice((1, 1, 2, 8))):
        if content:
            content[_place(random, content)] ^= 1 << random.randrange(8)


def _overwrite(random: Random, content: bytearray) -> None:
    start, length = _place(random, content), random.choice((1, 2, 4, 8, 64))
    value = random.choice((b"\x00", b"\xff", b"\x80", b" ", b"9"))
    content[start : start + length] = random.choice((value * length, random.randbytes(length)))


def _cut(random: Random, content: bytearray) -> None:
    del content[_place(random, content) :]


def _drop(random: Random, content: bytearray) -> None:
    start = _place(random, content)
    del content[start : start + random.choice((1, 2, 7, 100))]


def _insert(random: Random, content: bytearray) -> None:
    start = _place(random, content)
    content[start:start] = random.choice((random.randbytes(random.choice((1, 2, 8, 300))), b"\x00" * 64, b"\xff\xfe"))


def _repeat(random: Random, content: bytearray) -> None:
    start, length = _place(random, content), random.choice((4, 64, 1000))
    content[start:start] = content[start : start + length] * random.choice((1, 2, 20))


def _extreme(random: Random, content: bytearray) -> None:
    size = random.choice((1, 2, 4, 8))
    start = _place(random, content) // size * size  # most counts are aligned
    number = random.choice(EXTREMES) % (1 << (8 * size))
    content[start : start + size] = number.to_bytes(size, random.choice(("little", "little", "big")))


_BYTE_CHANGES = (_flip, _overwrite, _cut, _drop, _insert, _repeat, _extreme, _extreme)


def spoil_gzip(spoil: Callable[[Random, bytes], bytes]) -> Callable[[Random, bytes], bytes]:
    """Spoils the stream itself, or what it holds."""

    def change(random: Random, content: bytes) -> bytes:
        if random.random() < 0.4:
            return spoil_bytes(random, content)
        return gzip.compress(spoil(random, gzip.decompress(content)), 1, mtime=0)

    return change


def spoil_zip(
    spoil: Callable[[Random, bytes], bytes], *, skip: tuple[str, ...] = ()
) -> Callable[[Random, bytes], bytes]:
    """Spoils the archive itself, or one of its members, or which members it has."""

    def change(random: Random, content: bytes) -> bytes:
        if random.random() < 0.4:
            return spoil_bytes(random, content)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {member.filename: archive.read(member) for member in archive.infolist()}
            kind = archive.infolist()[0].compress_type
        name = random.choice([name for name in members if name not in skip])
        how = random.random()
        if how < 0.1:
            del members[name]
        elif how < 0.2:
            members[random.choice(WORDS).replace("\x00", "") or "x"] = members.pop(name)
        elif how < 0.3:
            members[name] = random.choice(list(members.values()))
        else:
            members[name] = spoil(random, members[name])
        into = io.BytesIO()
        with zipfile.ZipFile(into, "w", kind) as archive:
            for name, value in members.items():
                archive.writestr(name, value)
        return into.getvalue()

    return change


def spoil_tree(random: Random, content: Any) -> Any:
    """A copy of the tree with one to three places changed."""
    spoilt = [deepcopy(content)]  # in a list, so that its root has a place too
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        holder, key = random.choice(list(_places(spoilt)))
        how = random.random()
        if how < 0.2:
            del holder[key]
            if holder is spoilt:
                spoilt = [{}]
        elif how < 0.3 and isinstance(holder, dict):
            holder[random.choice(WORDS)] = holder.pop(key)
        elif how < 0.4:
            other, place = random.choice(list(_places(spoilt)))
            holder[key] = deepcopy(other[place])
        elif how < 0.5 and isinstance(holder, list):
            holder.extend(deepcopy(holder[key]) for _ in range(random.choice((1, 3, 200))))
        else:
            holder[key] = _another(random, holder[key])
    return spoilt[0]


def _places(tree: Any) -> Any:
    """Every holder and key of a tree."""
    for key in range(len(tree)) if isinstance(tree, list) else list(tree):
        yield tree, key
        if isinstance(tree[key], (dict, list)):
            yield from _places(tree[key])


def _another(random: Random, value: Any) -> Any:
    """A value of the same or of another type."""
    if random.random() < 0.4 and isinstance(value, (int, float)):
        return random.choice(NUMBERS)
    deep: Any = value
    for _ in range(random.choice((1, 3, 30))):
        deep = random.choice(([deep], {"x": deep}))
    return random.choice((random.choice(WORDS), random.choice(NUMBERS), True, None, [], {}, [value], deep))


def spoil_json(random: Random, content: bytes) -> bytes:
    """JSON that says something else, or is none."""
    return _spoil_text(random, content, json.loads, lambda tree: json.dumps(tree, ensure_ascii=False))


def spoil_toml(random: Random, content: bytes) -> bytes:
    """TOML that says something else, or is none."""
    import tomllib

    return _spoil_text(random, content, tomllib.loads, lambda tree: tomli_w.dumps(_for_toml(tree)))


def _for_toml(tree: Any) -> Any:
    """The tree without None, which TOML has not."""
    if isinstance(tree, dict):
        return {str(key): _for_toml(value) for key, value in tree.items() if value is not None}
    return [_for_toml(value) for value in tree if value is not None] if isinstance(tree, list) else tree


def _spoil_text(random: Random, content: bytes, loads: Callable[[str], Any], dumps: Callable[[Any], str]) -> bytes:
    text = content.decode()
    how = random.random()
    if how < 0.15:
        return spoil_bytes(random, content)
    if how < 0.2:  # deeper than any parser recurses
        depth = random.choice((500, 5000, 100_000))
        return b"x = " * (loads is not json.loads) + b"[" * depth + b"]" * depth
    if how < 0.25:  # more digits than Python converts
        number = "9" * random.choice((400, 5000))
        return _swap_a_number(random, text, number).encode()
    if how < 0.3:  # a line twice, or a key twice
        lines = text.splitlines(keepends=True)
        return "".join([*lines, random.choice(lines)]).encode()
    tree = spoil_tree(random, loads(text))
    try:
        return dumps(tree).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, AttributeError):  # no such text: a root that is no table
        return spoil_bytes(random, content)


def _swap_a_number(random: Random, text: str, number: str) -> str:
    places = [i for i, sign in enumerate(text) if sign.isdigit()] or [0]
    place = random.choice(places)
    return text[:place] + number + text[place + 1 :]


def spoil_lines(random: Random, content: bytes) -> bytes:
    """Lines of words exchanged, joined, lengthened; or bytes spoilt."""
    if random.random() < 0.3:
        return spoil_bytes(random, content)
    lines = [line.split(" ") for line in content.decode().splitlines()]
    for _ in range(random.choice((1, 2, 5))):
        line = random.choice(lines)
        line[random.randrange(len(line))] = random.choice((*WORDS, *random.choice(lines)))
        if random.random() < 0.3:
            lines.append(list(random.choice(lines)))
    return "\n".join(" ".join(line) for line in lines).encode()
