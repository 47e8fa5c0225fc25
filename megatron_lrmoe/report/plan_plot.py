"""A plan as a picture: the ranks' rows before and after, at masters and at replicas, with the limits."""

from pathlib import Path

import numpy as np

from megatron_lrmoe.replicas.plan import IntArray
from megatron_lrmoe.replicas.task import Layout
from megatron_lrmoe.report.plan_report import PlanReport


def write_plot(path: Path, report: PlanReport) -> None:
    """A PNG, renamed into place when whole.

    Before: routed rows at the experts' owners. After: kept rows at masters, kept rows at replicas, and on top the rows
    that have only a forward, so that the whole bar is the rank's forward rows.

    Raises:
        ValueError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        # An explicit Agg canvas, not pyplot: no window, and no change to the caller's matplotlib.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'megatron-lrmoe[report]'") from error

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    before, after = figure.subplots(1, 2, sharey=True)
    rows, made = report.rank_rows, report.plan
    ranks = np.arange(made.num_ranks)
    before.bar(ranks, rows.before_R, color="tab:blue", label="routed, at masters")
    kept_replica_R = _kept_at_replicas(report)
    kept_master_R = rows.backward_R - kept_replica_R
    after.bar(ranks, kept_master_R, color="tab:blue", label="kept, at masters")
    after.bar(ranks, kept_replica_R, bottom=kept_master_R, color="tab:orange", label="kept, at replicas")
    after.bar(
        ranks, rows.forward_R - rows.backward_R, bottom=rows.backward_R, color="0.85", label="dropped: forward only"
    )
    for axes, title in ((before, "before"), (after, f"after, {made.replicas} replicas")):
        for name, limit, style in (("forward", report.limits.forward, ":"), ("backward", report.limits.backward, "--")):
            if isinstance(limit, int):
                axes.axhline(limit, color="tab:red", ls=style, lw=1.2, label=f"{name} limit, {limit}")
        axes.set(title=title, xlabel="rank")
        axes.legend(fontsize="small")
    before.set_ylabel("rows")
    part = path.with_name(path.name + ".part")
    try:
        figure.savefig(part, format="png", dpi=120)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ValueError(f"--plot {path}: {error.strerror}") from error


def _kept_at_replicas(report: PlanReport) -> IntArray:
    """(R,) kept rows of each rank that are not its masters'."""
    made, first = report.plan, report.plan.num_experts
    cost_n = report.row_cost.of(made.kept_I[first:])
    return Layout(made.expert_I[first:], made.rank_I[first:], cost_n).rows_on(made.num_ranks)
