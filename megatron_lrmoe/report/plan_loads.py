"""Loads for ``megatron-lrmoe plan``: from a CSV file, from a trace, or from a workload generator.

A CSV file has one of three forms, with whole numbers, commas and no comments; blank lines do not count:

- matrix: a line for each source rank, a number of routed rows for each expert, no header;
- totals: one such line for all sources together. Each expert's rows are dealt to the sources in turn, so that both
  the sources' totals and what they send to an expert differ by one row at most;
- headed: columns source, expert and routed, in any order and beside others; what is not listed is 0.
"""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_lrmoe.replicas.plan import IntArray
from megatron_lrmoe.replicas.traces import RecordedLoads, read_trace
from megatron_lrmoe.replicas.workloads import WORKLOADS, Shape
from megatron_lrmoe.report.plan_request import LARGEST, MOST_EXPERTS, Request, flag

COLUMNS = ("source", "expert", "routed")
TOKENS, TOP_K, SEED = 4096, 8, 0
"""Of a workload, where the flags are not given."""

_STAGE = ("iteration", "layer", "microbatch")
_SHOWN = 20
"""Problems of a file that are listed."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Loads:
    """Routed rows and where they are from.

    Args:
        loads_SE: (S, E) int64 routed rows; E is a multiple of S.
        origin: for the reader.
        even_sources: the sources are an assumption, since only totals were given.
    """

    loads_SE: IntArray
    origin: str
    even_sources: bool = False

    @property
    def owner_E(self) -> IntArray:
        """(E,) rank of each expert: contiguous blocks of equal size."""
        ranks, experts = self.loads_SE.shape
        return np.arange(experts) // (experts // ranks)


def read_loads(request: Request) -> Loads:
    """The loads that a request names.

    Args:
        request: without ``input_problems``.

    Raises:
        ValueError: all that is wrong, a line each, with the file, the line and the column.
    """
    if request.file is None:
        return _checked(_generated(request, request.workload or "", request.experts or 0), request)
    try:
        with request.file.open("rb") as file:
            parquet = file.read(4) == b"PAR1" or request.file.suffix == ".parquet"
        return _checked(_from_trace(request.file, request) if parquet else _from_csv(request.file, request), request)
    except FileNotFoundError as error:
        raise ValueError(f"{request.file}: no such file") from error
    except OSError as error:
        raise ValueError(f"{request.file}: {error.strerror or error}") from error
    except ImportError as error:
        raise ValueError(f"{request.file}: {error}") from error


def _checked(loads: Loads, request: Request) -> Loads:
    ranks, experts = loads.loads_SE.shape
    problems = []
    if experts == 0 or experts % ranks:
        hint = "" if request.experts else " (a file that leaves out experts without rows needs --experts)"
        problems.append(f"found {experts} experts, allowed is a multiple of --ranks, {ranks}{hint}")
    # Floats, since a trace's sum may not fit into 64 bits; up to the limit they are exact.
    if (total := loads.loads_SE.sum(dtype=np.float64)) > LARGEST:
        problems.append(f"found {total:.0f} rows in all, allowed are at most {LARGEST}")
    if problems:
        raise ValueError("\n".join(f"{request.file or loads.origin}: {problem}" for problem in problems))
    return loads


def _generated(request: Request, name: str, experts: int) -> Loads:
    if name not in WORKLOADS:
        raise ValueError(f"--workload: found {name!r}, allowed are {', '.join(WORKLOADS)}")
    tokens = TOKENS if request.tokens is None else request.tokens
    top_k = min(TOP_K, experts) if request.top_k is None else request.top_k
    seed = SEED if request.seed is None else request.seed
    origin = f"workload {name}, {tokens} tokens a source, top-{top_k}, seed {seed}"
    try:
        shape = Shape(experts=experts, ranks=request.ranks, tokens=tokens, top_k=top_k)
        return Loads(loads_SE=WORKLOADS[name](shape, seed=seed), origin=origin)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error


def _from_trace(path: Path, request: Request) -> Loads:
    records = read_trace(path, request.ranks, request.experts)
    asked = {name: getattr(request, name) for name in _STAGE}
    left = [r for r in records if all(value in (None, getattr(r, name)) for name, value in asked.items())]
    if len(left) != 1:
        given = ", ".join(f"{flag(name)} {value}" for name, value in asked.items() if value is not None)
        choose = " or ".join(flag(name) for name in _STAGE)
        there = _listed(left or list(records))
        raise ValueError(
            f"{path}: found {len(left)} loads{f' with {given}' if given else ''}, allowed is one; "
            f"choose with {choose}; {'the trace has' if not left else 'these have'} {there}"
        )
    origin = f"{path}: " + ", ".join(f"{name} {getattr(left[0], name)}" for name in _STAGE)
    return Loads(loads_SE=left[0].routed_SE, origin=origin)


def _listed(records: list[RecordedLoads]) -> str:
    """Iterations, layers and microbatches of records, as ranges."""
    parts = []
    for name in _STAGE:
        values = sorted({getattr(record, name) for record in records})
        runs: list[list[int]] = []
        for value in values:
            if runs and value == runs[-1][1] + 1:
                runs[-1][1] = value
            else:
                runs.append([value, value])
        parts.append(f"{name} " + (",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs) or "none"))
    return "; ".join(parts)


class _Line(NamedTuple):
    number: int
    cells: list[str]


def _from_csv(path: Path, request: Request) -> Loads:
    lines, problems = _lines(path)
    problems += [f"{flag(name)}: allowed only with a trace" for name in _STAGE if getattr(request, name) is not None]
    headed = bool(lines) and bool({cell.lower() for cell in lines[0].cells} & set(COLUMNS))
    values, more = _headed(lines, request) if headed else _matrix(lines, request)
    problems += more
    if problems:
        hidden = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems[:_SHOWN] + hidden))
    if headed:
        return Loads(loads_SE=values, origin=f"{path}: columns source, expert and routed")
    if len(values) == request.ranks:
        return Loads(loads_SE=values, origin=f"{path}: a line for each source")
    dealt_SE = _dealt(values[0], request.ranks)
    return Loads(loads_SE=dealt_SE, origin=f"{path}: totals; sources are taken as even", even_sources=True)


def _lines(path: Path) -> tuple[list[_Line], list[str]]:
    try:
        reader = csv.reader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""), strict=True)
        lines = [_Line(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
    except UnicodeDecodeError:
        return [], ["found bytes that are no UTF-8 text, allowed are CSV files and Parquet traces"]
    except csv.Error as error:
        return [], [f"no CSV file: {error}"]
    lines = [line for line in lines if line.cells not in ([], [""])]
    return lines, [] if lines else ["found no numbers, allowed is a CSV file of loads"]


def _matrix(lines: list[_Line], request: Request) -> tuple[IntArray, list[str]]:
    """One or R lines of numbers, and problems; the array counts only without those."""
    if not lines:
        return np.zeros((0, 0), np.int64), []
    problems = []
    experts = len(lines[0].cells) if request.experts is None else request.experts
    if experts > MOST_EXPERTS:
        problems.append(f"line {lines[0].number}: found {experts} experts, allowed are at most {MOST_EXPERTS}")
    if len(lines) not in (1, request.ranks):
        problems.append(
            f"found {len(lines)} lines, allowed are {request.ranks}, one for each rank, or 1 of totals; "
            f"or a header with {', '.join(COLUMNS)}"
        )
    rows = []
    for line in lines:
        if len(line.cells) != experts:
            said = "as in the first line" if request.experts is None else "as --experts says"
            problems.append(f"line {line.number}: found {len(line.cells)} numbers, allowed are {experts}, {said}")
        rows.append([_whole(cell) for cell in line.cells])
        wrong = (n for n, value in enumerate(rows[-1]) if value is None)
        problems += (_cell_problem(line, n, f"whole numbers up to {LARGEST}") for n in wrong)
    return np.array([] if problems else rows, np.int64), problems


def _headed(lines: list[_Line], request: Request) -> tuple[IntArray, list[str]]:
    """(S, E) rows by the columns of a header, and problems; the array counts only without those."""
    names = [cell.lower() for cell in lines[0].cells]
    problems = [
        f"line {lines[0].number}: found {names.count(name)} columns named {name!r}, allowed is one"
        for name in COLUMNS
        if names.count(name) != 1
    ]
    if problems:
        return np.zeros((0, 0), np.int64), problems
    most = {"source": request.ranks - 1, "expert": (request.experts or MOST_EXPERTS) - 1, "routed": LARGEST}
    place = {name: names.index(name) for name in COLUMNS}
    entries: dict[tuple[int, int], tuple[int, int]] = {}
    for line in lines[1:]:
        if len(line.cells) != len(names):
            problems.append(f"line {line.number}: found {len(line.cells)} cells, allowed are {len(names)}, as above")
            continue
        values = {name: _whole(line.cells[n], most[name]) for name, n in place.items()}
        wrong = [_cell_problem(line, place[n], f"{n} 0 to {most[n]}") for n, value in values.items() if value is None]
        problems += wrong
        if wrong:
            continue
        source, expert, routed = (value for value in values.values() if value is not None)
        first, _ = entries.setdefault((source, expert), (line.number, routed))
        if first != line.number:
            problems.append(f"line {line.number}: found source {source}, expert {expert} again, after line {first}")
    experts = request.experts or max((expert for _, expert in entries), default=-1) + 1
    loads_SE = np.zeros((request.ranks, experts), np.int64)
    for key, (_, routed) in entries.items():
        loads_SE[key] = routed
    return loads_SE, problems


def _whole(cell: str, most: int = LARGEST) -> int | None:
    fine = cell.isascii() and cell.isdigit() and len(cell) <= 20 and int(cell) <= most
    return int(cell) if fine else None


def _cell_problem(line: _Line, n: int, allowed: str) -> str:
    return f"line {line.number}, column {n + 1}: found {line.cells[n]!r}, allowed are {allowed}"


def _dealt(total_E: IntArray, sources: int) -> IntArray:
    """(S, E) rows of the experts, one expert after the other, dealt to the sources in turn."""
    end_E = np.cumsum(total_E)
    place_S = np.arange(sources)[:, None]

    def dealt(rows_E: IntArray) -> IntArray:
        return (rows_E - place_S + sources - 1) // sources

    return dealt(end_E) - dealt(end_E - total_E)
