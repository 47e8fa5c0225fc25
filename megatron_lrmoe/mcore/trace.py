"""Loads of each layer call as Parquet files (``--moe-lrm-trace``), for the planner's benchmark and command line.

The first rank of every expert-parallel group writes for all of it: ``DIR/groupN`` of data-parallel group N. Retained
pairs of an expert are its quota, which with scope 'expert' is shared out over the sources in proportion: which
source's pairs are kept is known only later, and where they come from is random.
"""

import atexit
from pathlib import Path

import torch.distributed as dist

from megatron_lrmoe.config import LrmConfig
from megatron_lrmoe.recalibration.plan import KeepPlan
from megatron_lrmoe.recalibration.sources import split_over_sources
from megatron_lrmoe.replicas.plan import Plan
from megatron_lrmoe.replicas.trace_writer import TraceWriter

_writers: dict[Path, TraceWriter] = {}


def open_for(config: LrmConfig, group: dist.ProcessGroup, data_parallel: int) -> None:
    """Make the folder and start the writer, so that what is wrong with them is said before training.

    Raises:
        ImportError: pyarrow is not installed.
        OSError: the folder cannot be made.
    """
    if config.trace is not None and dist.get_rank(group) == 0:
        _writer(config.trace, data_parallel)


def _writer(folder: str, data_parallel: int) -> TraceWriter:
    place = Path(folder) / f"group{data_parallel}"
    if place not in _writers:
        if not _writers:
            atexit.register(close)
        # Pipeline stages of a group have different layers and different ranks.
        _writers[place] = TraceWriter(place, f"rank{dist.get_rank()}")
    return _writers[place]


def record(keep: KeepPlan, plan: Plan | None = None) -> None:
    """Add one layer call, if its iteration is traced and this rank writes.

    Args:
        keep: loads by expert.
        plan: where the rows go, and the quotas; None: to the owners, and the quotas are ``keep``'s.
    """
    config, key = keep.config, keep.key
    if config.trace is None or keep.rank != 0 or key.iteration % config.trace_interval:
        return
    quota_E = list(keep.quota_E)
    if plan is not None:
        quota_E = [0] * len(quota_E)
        for expert, kept in zip(plan.expert_I.tolist(), plan.kept_I.tolist(), strict=True):
            quota_E[expert] += kept
    columns = zip(*keep.loads_SE, strict=True)
    retained_ES = [split_over_sources(quota, loads, 0).rows_S for quota, loads in zip(quota_E, columns, strict=True)]
    _writer(config.trace, key.data_parallel).record(
        key.iteration,
        key.microbatch,
        key.layer,
        keep.loads_SE,
        list(zip(*retained_ES, strict=True)),
        *(() if plan is None else (plan.rows_SI, plan.expert_I, plan.rank_I)),
    )


def close() -> None:
    """Write what is left; called at exit, too."""
    while _writers:
        _writers.popitem()[1].close()
