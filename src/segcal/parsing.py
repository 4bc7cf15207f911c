"""JSON and TOML from anywhere, read so that whatever is wrong with them is a ValueError.

Their parsers recurse, so that text nested deeply enough ends in a RecursionError; and JSON may hold half of a surrogate
pair, which no file and no terminal takes.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from typing import Any


def parse_json(text: str) -> Any:
    """What the JSON says; ValueError where it is none, or cannot be written again.

    >>> parse_json('{"labels": {"background": 0}}')
    {'labels': {'background': 0}}
    """
    content = _parsed(json.loads, text)
    json.dumps(content, ensure_ascii=False).encode()
    return content


def parse_toml(text: str) -> dict[str, Any]:
    """What the TOML says; ValueError where it is none.

    >>> parse_toml("values = [0, 1]")
    {'values': [0, 1]}
    """
    content: dict[str, Any] = _parsed(tomllib.loads, text)
    return content


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
