"""``megatron-lrmoe ablate``: a grid of paired training runs against stock Megatron, resumable, and its report."""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_lrmoe.report import ablate_code, ablate_plots, ablate_results, ablate_tables
from megatron_lrmoe.report.ablate_cells import Cell, chosen, grid
from megatron_lrmoe.report.ablate_plan import START, Plan, read_plan
from megatron_lrmoe.report.ablate_process import CellFailedError
from megatron_lrmoe.report.ablate_run import Grid, SourceChangedError, alone, missing, prepare, refuse
from megatron_lrmoe.report.ablate_stats import Setting, settings

FAILED = 1


def run(path: Path, output: Path | None = None, *, jobs: int = 1, only: Sequence[str] = ()) -> int:
    """Train what is missing of a plan's grid and write the report over all that is finished.

    Args:
        path: of the plan file.
        output: directory for everything; None is ``runs/`` and the plan's name.
        jobs: processes at a time, with a thread each; a run of more ranks than that goes alone.
        only: ids of cells or patterns; the rest of the grid is left as it is.

    Returns:
        0, or 1 when a run failed or was interrupted (the reason is on stderr).

    Raises:
        ValueError: the plan or an argument is wrong, or Megatron refuses a cell's flags; nothing was trained.
    """
    if jobs < 1:
        raise ValueError(f"--jobs: found {jobs}, allowed is a whole number >= 1")
    plan = read_plan(path)
    code = ablate_code.code()
    cells = grid(plan, code)
    wanted = chosen(cells, only)
    output = (output or Path("runs") / path.stem).resolve()
    output.mkdir(parents=True, exist_ok=True)
    with alone(output):
        status = _train(wanted, output, jobs, code)
        _write_report(plan, path, cells, output)
    return status


def _train(wanted: Sequence[Cell], output: Path, jobs: int, code: ablate_code.Code) -> int:
    waiting = missing(wanted, output)
    trained = [cell for cell in wanted if cell.variant != START]
    lacking = sum(cell.variant != START for cell in waiting)
    print(f"{len(trained) - lacking} of {len(trained)} cells are finished already", flush=True)
    if not waiting:
        return 0
    ids = {cell.id for cell in waiting}
    try:
        refuse(waiting, output)
        prepare((cell.dataset for cell in waiting), output)
        training = Grid(waiting, (cell.id for cell in wanted if cell.id not in ids), output, code, jobs)
        training.run()
    except (CellFailedError, SourceChangedError) as error:
        print(f"megatron-lrmoe: error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on where this one ended", file=sys.stderr)
        return FAILED
    for failure in training.failures:
        print(f"megatron-lrmoe: error: {failure}", file=sys.stderr)
    return FAILED if training.failures else 0


def _write_report(plan: Plan, path: Path, cells: Sequence[Cell], output: Path) -> None:
    """Write CSV files, pictures and ``report.md`` over all finished cells, each renamed into place when whole."""
    results = {cell.id: result for cell in cells if (result := ablate_results.read(cell, output))}
    found = settings(cells, results)
    if not found:
        return
    unfinished = [cell.id for cell in cells if cell.variant != START and cell.id not in results]
    pictures = ablate_plots.pictures(found)
    command = f"megatron-lrmoe ablate {shlex.quote(path.as_posix())}"
    text = ablate_tables.report(plan, command, found, unfinished, pictures)
    files: dict[str, Callable[[Path], object]] = {
        "cells.csv": lambda part: ablate_tables.write_cells(part, cells, results, found),
        "settings.csv": lambda part: ablate_tables.write_settings(part, found),
        "curves.csv": lambda part: ablate_tables.write_curves(part, found),
        **pictures,
        "report.md": lambda part: part.write_text(text),
    }
    for name, write in files.items():
        part = output / f"{name}.part"
        write(part)
        part.replace(output / name)
    print(_summary(plan, found))
    print(f"\nwritten: {output}/{', '.join(files)}")


def _summary(plan: Plan, found: Sequence[Setting]) -> str:
    tables = []
    for regime in plan.regimes:
        if of_regime := [s for s in found if s.regime == regime.name]:
            tables.append(f"{regime.name}\n\n{ablate_tables.table(of_regime)}")
    return "\n\n".join(tables)
