"""`relaygr`, whose planner damps by seconds, not by minutes: python -m tests.e2e.quick_planner planner --mode act …"""

from __future__ import annotations

from functools import partial

from relaygr_stream.cli.main import main
from relaygr_stream.ops.planner import process
from relaygr_stream.ops.planner.plan import Damping

if __name__ == "__main__":
    quick = Damping(floor_s=1.0, patience_s=0.5, settle_s=0.5)
    setattr(process, "PlannerOptions", partial(process.PlannerOptions, damping=quick))  # noqa: B010  (mypy knows a type)
    main()
