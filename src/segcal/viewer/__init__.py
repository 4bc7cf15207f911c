"""Cases to look at in a browser: their volumes as bytes, the numbers behind the threshold slider, which cases to show.

`volumes` reads and crops a case, `curves` has the numbers at each threshold, `cases` chooses cases of evaluations and
puts both together, and `embedding` writes them into a page with NiiVue, which `vendor` holds as it was published.
"""

from segcal.viewer.cases import BY, Choice, ViewedCase, choose_cases, view_case, view_cases
from segcal.viewer.curves import case_curves
from segcal.viewer.embedding import niivue_script
from segcal.viewer.volumes import CaseVolumes, case_volumes

__all__ = [
    "BY",
    "CaseVolumes",
    "Choice",
    "ViewedCase",
    "case_curves",
    "case_volumes",
    "choose_cases",
    "niivue_script",
    "view_case",
    "view_cases",
]
