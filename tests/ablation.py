"""Small plans, cells and results of an ablation, without training."""

from pathlib import Path
from typing import Any

import yaml

from megatron_lrmoe.report.ablate_cells import Cell, grid
from megatron_lrmoe.report.ablate_code import Code
from megatron_lrmoe.report.ablate_plan import Plan, read_plan
from megatron_lrmoe.report.ablate_results import Result

CODE = Code("stock-source", "lrm-source", {"torch": "2"})

PLAN: dict[str, Any] = {
    "model": {"num-layers": 2, "lr": 0.001, "swiglu": True},
    "seeds": [1, 2],
    "retention": [0.8, 0.5],
    "regimes": {
        "scratch": {"iterations": 20},
        "warm": {"start": 10, "iterations": 20, "flags": {"clip-grad": 0.5}},
        "memorise": {
            **{"start": 10, "iterations": 20, "corpus": "kjv", "bytes": 4096},
            **{"flags": {"lr": 0.0005}, "start-flags": {"lr": 0.002}},
        },
    },
    "variants": {"unbiased": {}, "topk": {"selection": "topk", "where": {"retention": 0.8}}},
}


def plan_file(folder: Path, content: Any = None, **changes: Any) -> Path:
    """A plan file with PLAN, or PLAN with other top-level values."""
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump({**PLAN, **changes} if content is None else content, sort_keys=False))
    return path


def plan(folder: Path, **changes: Any) -> Plan:
    """The plan in such a file."""
    return read_plan(plan_file(folder, **changes))


def cells(folder: Path, code: Code = CODE, **changes: Any) -> dict[str, Cell]:
    """Its grid by the ids of the cells."""
    return {cell.id: cell for cell in grid(plan(folder, **changes), code)}


def result(cell: Cell, losses: tuple[float, ...] = (3.0, 2.0), **changes: Any) -> Result:
    """A result of a cell, with a kept share of its retention."""
    values: dict[str, Any] = {
        "key": cell.key,
        "flags": cell.flags,
        "ranks": cell.ranks,
        "losses": losses,
        "scalars": {} if cell.variant == "stock" else {"kept_share": (cell.retention,) * len(losses)},
        "pairs": 1000,
        "validation_loss": losses[-1] if cell.regime != "memorise" else None,
        "wall_s": 2.0,
        "cpu_s": 1.5,
        "versions": {"torch": "2"},
        "source": "abc1234",
    }
    return Result(**values | changes)
