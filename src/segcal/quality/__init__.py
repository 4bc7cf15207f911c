"""Promises on cases without labels, learned from cases with labels: Dice and volume with intervals, safe thresholds.

Reading order: `summaries` (what the probabilities of a case say), `conformal` (intervals), `risk` (thresholds with a
guarantee), `shift` (cases unlike those that were learned from), `fitting`, `applying`, `deciding`.
"""
