"""The whole chain in one call: evaluate, calibrate, promise quality, report, and what to do next.

Every step is a function of another package, as its own command calls it. `nnunet` finds what belongs to a model folder,
`auditing` and `work` take the steps, `advice` writes down the commands that use what came of them.
"""

from segcal.audit.auditing import audit_predictions
from segcal.audit.result import Audit

__all__ = ["Audit", "audit_predictions"]
