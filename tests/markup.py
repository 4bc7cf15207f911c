"""A written page, taken apart."""

from __future__ import annotations

import base64
import gzip
import json
from html.parser import HTMLParser


def unpacked(text):
    """What lies in a page as compressed JSON."""
    return json.loads(gzip.decompress(base64.b64decode(text)))


class Markup(HTMLParser):
    """The elements of a page, its text outside scripts, and the embedded data."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.words, self.scripts = [], [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        (self.scripts if self.lasttag == "script" else self.words).append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    @property
    def data(self):
        return json.loads(next(text for text in self.scripts if text.startswith("{")))
