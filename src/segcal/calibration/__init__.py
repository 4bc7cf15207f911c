"""Fit a calibrator to a folder of predictions, check it across patients, apply it to others."""
