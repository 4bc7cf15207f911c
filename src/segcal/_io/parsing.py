"""JSON and TOML from anywhere, with or without a byte order mark; whatever is wrong with them is a ValueError.

Their parsers recurse, so that text nested deeply enough ends in a RecursionError; and JSON may hold half of a surrogate
pair, which no file and no terminal takes.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from segcal.errors import ConfigError

BYTE_ORDER_MARK = "\ufeff"  # some editors put it first in a file


def parse_json(text: str) -> Any:
    """What the JSON says; ValueError where it is none, names something twice, or cannot be written again.

    >>> parse_json('{"labels": {"background": 0}}')
    {'labels': {'background': 0}}
    """
    content = _parsed(partial(json.loads, object_pairs_hook=_once), text.removeprefix(BYTE_ORDER_MARK))
    json.dumps(content, ensure_ascii=False).encode()
    return content


def parse_toml(text: str) -> dict[str, Any]:
    """What the TOML says; ValueError where it is none.

    >>> parse_toml("values = [0, 1]")
    {'values': [0, 1]}
    """
    content: dict[str, Any] = _parsed(tomllib.loads, text.removeprefix(BYTE_ORDER_MARK))
    return content


def parse_setting(text: str) -> tuple[str, Any]:
    """Key and value of `--set KEY=VALUE`; the value is TOML, or text where it is not.

    >>> parse_setting("loss.ace.weight=0.3"), parse_setting("objective=ace")
    (('loss.ace.weight', 0.3), ('objective', 'ace'))
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(f"a setting must read KEY=VALUE, as --set loss.ace.weight=0.3; got {text!r}.")
    try:
        return key, parse_toml(f"value = {value}")["value"]
    except ValueError:
        return key, value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; Python would take the last of two that have one name."""
    content = {sys.intern(name): value for name, value in pairs}  # of thousands of files the same names are held once
    if len(content) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"it names {twice!r} more than once")
    return content


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
