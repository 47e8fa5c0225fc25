"""Loads and flags of ``megatron-lrmoe plan``: every form that is read, and everything that is refused."""

import re
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from megatron_lrmoe.replicas.traces import COLUMNS
from megatron_lrmoe.replicas.workloads import WORKLOADS, Shape
from megatron_lrmoe.report.plan_loads import read_loads
from megatron_lrmoe.report.plan_report import make_report, policies
from megatron_lrmoe.report.plan_request import LARGEST, Request, parse_limit
from megatron_lrmoe.report.plan_text import text
from tests.plans import cases


def written(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def refusal(request: Request) -> list[str]:
    with pytest.raises(ValueError) as caught:
        make_report(request)
    return str(caught.value).splitlines()


def trace(path: Path, rows: list[tuple[int, ...]]) -> Path:
    columns = zip(*rows, strict=True)
    parquet.write_table(pa.table([pa.array(column) for column in columns], names=list(COLUMNS)), path)
    return path


@given(st.data())
@cases(200, 30)
def test_a_matrix_and_a_headed_file_are_read_as_written(tmp_path_factory, data):
    ranks, per_rank = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    row_E = st.lists(st.integers(0, 9), min_size=ranks * per_rank, max_size=ranks * per_rank)
    loads = data.draw(st.lists(row_E, min_size=ranks, max_size=ranks))
    folder = tmp_path_factory.getbasetemp()
    matrix = written(folder / "matrix.csv", "\n\n".join(" , ".join(map(str, row)) for row in loads) + "\n\n")
    lines = [f"{rows},x,{e},{s}" for s, row in enumerate(loads) for e, rows in enumerate(row) if rows]
    headed = written(folder / "headed.csv", "\ufeffRouted,note,expert, Source\r\n" + "\r\n".join(lines))
    for file in (matrix, headed):
        found = read_loads(Request(file=file, ranks=ranks, experts=ranks * per_rank))
        assert found.loads_SE.tolist() == loads and not found.even_sources
        assert found.loads_SE.dtype == np.int64
        assert found.owner_E.tolist() == [r for r in range(ranks) for _ in range(per_rank)]


@given(st.integers(1, 6), st.data())
@cases(200, 30)
def test_totals_are_dealt_evenly(tmp_path_factory, ranks, data):
    totals = data.draw(st.lists(st.integers(0, 100), min_size=2 * ranks, max_size=2 * ranks))
    file = written(tmp_path_factory.getbasetemp() / "totals.csv", ",".join(map(str, totals)))
    found = read_loads(Request(file=file, ranks=ranks))
    assert found.loads_SE.sum(axis=0).tolist() == totals and found.loads_SE.min() >= 0
    assert np.ptp(found.loads_SE, axis=0).max() <= 1 and np.ptp(found.loads_SE.sum(axis=1)) <= 1
    assert found.even_sources == (ranks > 1) == found.origin.endswith("totals; sources are taken as even")


def test_a_headed_file_without_the_last_experts_asks_for_their_number(tmp_path):
    file = written(tmp_path / "loads.csv", "source,expert,routed\n0,2,5\n")
    hint = "(a file that leaves out experts without rows needs --experts)"
    problem = f"{file}: found 3 experts, allowed is a multiple of --ranks, 2 {hint}"
    assert refusal(Request(file=file, ranks=2)) == [problem]
    assert read_loads(Request(file=file, ranks=2, experts=4)).loads_SE.tolist() == [[0, 0, 5, 0], [0, 0, 0, 0]]


def test_a_trace_is_read_by_iteration_layer_and_microbatch(tmp_path):
    stages = [(iteration, 0, layer) for iteration in (1, 2, 3, 7) for layer in (0, 4)]
    rows = [(*stage, n % 2, 3, n + 1, n) for n, stage in enumerate(stages)]
    path = trace(tmp_path / "trace", rows)
    found = read_loads(Request(file=path, ranks=2, iteration=2, layer=4, microbatch=0))
    assert found.loads_SE.tolist() == [[0, 0, 0, 0], [0, 0, 0, 4]]
    assert found.origin == f"{path}: iteration 2, layer 4, microbatch 0"
    choose = "allowed is one; choose with --iteration or --layer or --microbatch"
    assert refusal(Request(file=path, ranks=2, layer=4)) == [
        f"{path}: found 4 loads with --layer 4, {choose}; these have iteration 1-3,7; layer 4; microbatch 0"
    ]
    assert refusal(Request(file=path, ranks=2, iteration=5)) == [
        f"{path}: found 0 loads with --iteration 5, {choose}; the trace has iteration 1-3,7; layer 0,4; microbatch 0"
    ]
    assert refusal(Request(file=path, ranks=1)) == [
        f"{path}: not a trace of loads:",
        "  source: found 1 in row 1, allowed is 0 to 0; 4 such rows",
    ]


def test_a_trace_of_one_load_needs_no_choice(tmp_path):
    path = trace(tmp_path / "one.parquet", [(0, 0, 1, 1, 1, 6, 2)])
    assert read_loads(Request(file=path, ranks=2)).loads_SE.tolist() == [[0, 0], [0, 6]]


def test_a_trace_without_pyarrow_or_of_another_kind_is_bad_input(tmp_path, monkeypatch):
    path = trace(tmp_path / "one.parquet", [(0, 0, 1, 1, 1, 6, 2)])
    other = written(tmp_path / "text.parquet", "4,2,3\n")
    assert refusal(Request(file=other, ranks=3))[0].startswith(f"{other}: not a Parquet file: ")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (problem,) = refusal(Request(file=path, ranks=2))
    assert problem == f"{path}: reading a trace needs pyarrow: pip install 'megatron-lrmoe[report]'"


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_can_be_planned(name):
    report = make_report(Request(workload=name, experts=16, ranks=4, tokens=50, top_k=2, seed=1))
    shape = Shape(experts=16, ranks=4, tokens=50, top_k=2)
    assert report.loads.loads_SE.tolist() == WORKLOADS[name](shape, seed=1).tolist()
    assert report.loads.owner_E.tolist() == shape.owner_E.tolist()
    assert text(report).startswith(f"workload {name}, 50 tokens a source, top-2, seed 1\n")


def test_all_problems_of_a_matrix_are_listed(tmp_path):
    file = written(tmp_path / "loads.csv", "1,x\n\n-1,2.5,3\n1,2\n")
    numbers = f"allowed are whole numbers up to {LARGEST}"
    assert refusal(Request(file=file, ranks=2, layer=1)) == [
        f"{file}: --layer: allowed only with a trace",
        f"{file}: found 3 lines, allowed are 2, one for each rank, or 1 of totals; or a header with source, expert, "
        "routed",
        f"{file}: line 1, column 2: found 'x', {numbers}",
        f"{file}: line 3: found 3 numbers, allowed are 2, as in the first line",
        f"{file}: line 3, column 1: found '-1', {numbers}",
        f"{file}: line 3, column 2: found '2.5', {numbers}",
    ]
    assert refusal(Request(file=written(file, "1,2\n"), ranks=2, experts=4)) == [
        f"{file}: line 1: found 2 numbers, allowed are 4, as --experts says"
    ]


def test_all_problems_of_a_headed_file_are_listed(tmp_path):
    file = written(tmp_path / "loads.csv", "expert,source,routed\n0,0,3\n0,0,4\n1,2,\n2,0,1\n1\n1,1,7\n")
    assert refusal(Request(file=file, ranks=2, experts=2)) == [
        f"{file}: line 3: found source 0, expert 0 again, after line 2",
        f"{file}: line 4, column 2: found '2', allowed are source 0 to 1",
        f"{file}: line 4, column 3: found '', allowed are routed 0 to {LARGEST}",
        f"{file}: line 5, column 1: found '2', allowed are expert 0 to 1",
        f"{file}: line 6: found 1 cells, allowed are 3, as above",
    ]
    assert refusal(Request(file=written(file, "expert,routed,routed\n0,1,1"), ranks=2)) == [
        f"{file}: line 1: found 0 columns named 'source', allowed is one",
        f"{file}: line 1: found 2 columns named 'routed', allowed is one",
    ]


def test_a_long_list_of_problems_is_cut(tmp_path):
    problems = refusal(Request(file=written(tmp_path / "loads.csv", ",".join("x" * 50)), ranks=1))
    assert len(problems) == 21 and problems[-1].endswith(": and 30 more")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "found no numbers, allowed is a CSV file of loads"),
        (b"\n \n", "found no numbers, allowed is a CSV file of loads"),
        (b"\xff\xfe1", "found bytes that are no UTF-8 text, allowed are CSV files and Parquet traces"),
        (b'1,"2\n', "no CSV file: unexpected end of data"),
        (b"1,2,3", "found 3 experts, allowed is a multiple of --ranks, 2"),
        (b"source,expert,routed", "found 0 experts, allowed is a multiple of --ranks, 2"),
        (b"2147483647,1", "found 2147483648 rows in all, allowed are at most 2147483647"),
        (b"9" * 5000 + b",1", "line 1, column 1: found '999"),
    ],
)
def test_files_that_are_no_loads(tmp_path, content, problem):
    file = tmp_path / "loads.csv"
    file.write_bytes(content)
    (found,) = refusal(Request(file=file, ranks=2))
    assert found.startswith(f"{file}: {problem}")


def test_missing_files_and_folders(tmp_path):
    assert refusal(Request(file=tmp_path / "no.csv", ranks=2)) == [f"{tmp_path / 'no.csv'}: no such file"]
    assert refusal(Request(file=tmp_path, ranks=2)) == [f"{tmp_path}: Is a directory"]


def test_the_choice_of_loads(tmp_path):
    one = "FILE and --workload: found {}, allowed is one of them"
    assert refusal(Request(ranks=0, tokens=-1)) == [
        one.format("neither"),
        "--ranks: found 0, allowed is 1 to 65536",
        f"--tokens: found -1, allowed is 0 to {LARGEST}",
        "--tokens: found -1, allowed only with --workload",
    ]
    assert refusal(Request(file=tmp_path, workload="zipf", ranks=2)) == [
        one.format("both"),
        "--experts: not given, needed with --workload",
    ]
    assert refusal(Request(workload="zip", ranks=2, experts=4)) == [
        f"--workload: found 'zip', allowed are {', '.join(WORKLOADS)}"
    ]
    assert refusal(Request(workload="zipf", ranks=1, experts=4, tokens=9, top_k=1)) == [
        "workload zipf, 9 tokens a source, top-1, seed 0: ratio: found 2.0, allowed is 1 to 1.0 with these experts "
        "and this top_k"
    ]
    assert refusal(Request(workload="burst", ranks=2, experts=4, top_k=5)) == [
        "workload burst, 4096 tokens a source, top-5, seed 0: top_k: found 5, allowed is 1 to 4"
    ]


def test_all_problems_of_the_flags_are_listed_beside_those_of_the_file(tmp_path):
    file = tmp_path / "no.csv"
    request = Request(file=file, ranks=2, retention="1.2", min_retention="half", slots=-1, domain=0, hidden=8)
    assert refusal(request) == [
        f"{file}: no such file",
        "--retention: found 1.2, allowed is 0 < retention <= 1",
        "--min-retention: found 'half', allowed is a number such as 0.8 or 4/5",
        "--slots: found -1, allowed is 0 to 1024",
        f"--domain: found 0, allowed is 1 to {LARGEST}",
        "--hidden: allowed only with --budget-gib",
    ]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"retention": "0"}, "--retention: found 0, allowed is 0 < retention <= 1"),
        ({"retention": "nan"}, "--retention: found 'nan', allowed is a number such as 0.8 or 4/5"),
        ({"retention": "1e-3"}, "--retention: found '1e-3', allowed is a number such as 0.8 or 4/5"),
        ({"min_retention": "1.5"}, "--min-retention: found 1.5, allowed is 0 <= share <= 1"),
        (
            {"retention": "0.4", "min_retention": "0.5"},
            "--min-retention: found 0.5, allowed is at most --retention, 0.4",
        ),
        ({"tile_rows": 0}, "--tile-rows: found 0, allowed is 1 to 1048576"),
        ({"policy": "best"}, f"--policy: found 'best', allowed are {', '.join(policies())}"),
        ({"policy": "eplb", "strong": True}, "--strong: allowed only with --policy lrm"),
        ({"policy": "eplb", "domain": 1}, "--domain: allowed only with --policy lrm"),
        ({"budget_gib": "1", "hidden": 8}, "--ffn: not given, needed with --budget-gib"),
        (
            {"budget_gib": "1", "hidden": 8, "ffn": 8, "forward_limit": "none"},
            "--forward-limit: not allowed with --budget-gib",
        ),
        (
            {"budget_gib": "1", "hidden": 8, "ffn": 8, "group_rows": 3},
            "--group-rows: not allowed with --budget-gib",
        ),
        ({"budget_gib": "0", "hidden": 8, "ffn": 8}, "--budget-gib: found 0, allowed is a number > 0, at most 1048576"),
    ],
)
def test_flags_out_of_range(tmp_path, flags, problem):
    file = written(tmp_path / "loads.csv", "4,2,3")
    assert refusal(Request(file=file, ranks=3, **flags)) == [problem]


def test_limits_as_text():
    assert [parse_limit("backward_limit", t) for t in ("7", "1.5x", "4/3x", ".5x", "finest", "none")] == [
        7,
        Fraction(3, 2),
        Fraction(4, 3),
        Fraction(1, 2),
        "finest",
        None,
    ]
    for wrong in ("0", "-1", "1.5", "x", "0x", "1e3", "1001x", "1/0x", "3000000000", "Finest", "٣", ""):
        with pytest.raises(ValueError, match=f"^--backward-limit: found {re.escape(repr(wrong))}, allowed are rows"):
            parse_limit("backward_limit", wrong)


def test_loads_beyond_64_bits_are_refused(tmp_path):
    most = 2**63 - 1
    path = trace(tmp_path / "trace", [(0, 0, 0, 0, e, most, 0) for e in range(4)])
    (problem,) = refusal(Request(file=path, ranks=2))
    assert problem.startswith(f"{path}: found 3689348814741910") and problem.endswith(f"at most {LARGEST}")
