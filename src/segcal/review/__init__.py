"""Cases of a cohort looked at one after the other: a page served on this machine, and the decisions made on it.

`results` finds the cases and their numbers, `decisions` keeps the file, `volumes` reads what is to be seen, `guard`
says who may ask, `page` is what they see, `server` what is answered, and `serving` puts all together. To serve needs
Starlette and uvicorn: `pip install "segcal[review]"`.
"""

from segcal.review.decisions import ReviewDecision, read_decisions

__all__ = ["ReviewDecision", "read_decisions"]
