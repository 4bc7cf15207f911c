"""Methods compared on the same cases, as numbers and as tables."""
