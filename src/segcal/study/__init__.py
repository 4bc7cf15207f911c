"""Many runs, one table: datasets x methods x seeds, trained, calibrated, evaluated, compared and shown.

Reading order: `plan` (which runs there are), `work` (one run done, under the lock of its folder), `overview` (how far
they are), `summary` (what they found), `figures` and `page` (how it is shown), `running` (all of it in one call, spread
over processes).
"""

from segcal.study.plan import Plan, Study, make_plan, read_study, shipped_studies
from segcal.study.running import do_runs, load_study, open_study, report_study, run_study
from segcal.study.summary import Results
from segcal.study.work import Workshop

__all__ = [
    "Plan",
    "Results",
    "Study",
    "Workshop",
    "do_runs",
    "load_study",
    "make_plan",
    "open_study",
    "read_study",
    "report_study",
    "run_study",
    "shipped_studies",
]
