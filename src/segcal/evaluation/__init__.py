"""Evaluate a folder of predictions: read, measure case by case, put together, save."""
