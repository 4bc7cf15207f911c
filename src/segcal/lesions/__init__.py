"""Lesions: is a predicted component real, and how far can its confidence be trusted?

Reading order: `components` (connected components of a mask, their sizes, confidences and partners), `case` (one case
from files to rows), `numbers` (sensitivity, false positives, FROC and reliability, with intervals), `results` (tables
and files), `cohort` (a folder of maps, resumable).
"""
