"""How `--help` shows options: in four groups, with short placeholders for their values."""

from __future__ import annotations

from typing import Any

PANELS = {
    "Input": (
        "calibrator", "checkpoint", "class_name", "class_names", "config", "data", "data_root", "dataset", "groups",
        "ignore_index", "images", "labels", "lesions", "logits", "mean", "member", "patients", "predictions",
        "raters_from", "regions", "side", "sigmoid", "strict_grid",
    ),
    "Output": (
        "as_json", "background", "bands", "browser", "cases", "decisions", "dtype", "evaluate", "figures", "full",
        "masks", "nifti", "names", "out", "prepared", "report", "reviewer", "statistics",
        "title", "worst",
    ),
    "Method": (
        "bins", "by", "change", "confidence", "connectivity", "epochs", "fixed", "flips", "folds", "holm",
        "level", "method", "min_size", "only", "overlap", "preset", "resamples", "risk", "rule", "seed", "setting",
        "test", "threshold",
    ),
    "Compute": ("dask", "jobs", "port", "workers"),
}  # fmt: skip
OTHER = "Help"
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}
_NUMBERS = {
    "bins", "cases", "epochs", "folds", "ignore_index", "jobs", "port", "resamples", "seed", "workers", "worst",
}  # fmt: skip


def panel_of(name: str) -> str:
    """The group of an option, by the name of its parameter."""
    return _PANEL_OF.get(name, OTHER)


def arranged(parameters: list[Any]) -> list[Any]:
    """Arguments, then options by group; flags show no value, numbers a short one."""
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            parameter.metavar = parameter.metavar or parameter.name.upper()
        else:
            parameter.rich_help_panel = parameter.rich_help_panel or panel_of(parameter.name)
            if parameter.metavar is None and (getattr(parameter, "is_flag", False) or parameter.name in _NUMBERS):
                parameter.metavar = "N" if parameter.name in _NUMBERS else ""
    order = [*PANELS, OTHER]
    return sorted(
        parameters, key=lambda each: -1 if each.param_type_name == "argument" else order.index(each.rich_help_panel)
    )
