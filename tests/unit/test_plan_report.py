"""``megatron-lrmoe plan``: what it reads, what it refuses, and what it shows."""

import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lrmoe import cli
from megatron_lrmoe.replicas.plan import Limits
from megatron_lrmoe.replicas.planner import plan
from megatron_lrmoe.replicas.workloads import WORKLOADS, Shape
from megatron_lrmoe.report import plan_plot
from megatron_lrmoe.report.plan_report import PlanReport, as_json, make_report, policies
from megatron_lrmoe.report.plan_request import Request
from megatron_lrmoe.report.plan_text import encodable, text, verdict
from tests.plans import cases, problems_of

TINY = """\
loads.csv: totals; sources are taken as even
3 experts on 3 ranks, 1 slot on each; 9 rows; max/mean before 1.333
policy lrm, quota proportional, retention 0.8
forward limit none; backward limit 3

rank  rows before             forward after           backward after          slots  pushes
   0       4!██████████│███        4 ██████████████        3 ██████████│          0       0
   1       2 ███████   │           2 ███████               1 ███▌      │          0       0
   2       3 ██████████│           3 ██████████▌           2 ███████   │          0       0
 max       4                       4                       3
mean     3.0                     3.0                     2.0
 min       2                       2                       1
│ limit   ! above it

Replicas: 0 with dropping, 1 without (same limits, retention 1.0)
Copies of each expert: 2 1 1 without dropping, 1 1 1 with
Slots used: 0 on 3 ranks
Copies pushed by the rank that pushes most: 0

Kept share: 0.6667 (6 of 9 rows)
Proven: every rank is within the limits, without any replica.
                             reached   lower bound         limit
forward rows of a rank             4             3          none
backward rows of a rank            3             2             3
replicas                           0             0
"""


def written(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def tiny(tmp_path: Path, **flags) -> PlanReport:
    """Report on loads 4, 2 and 3 of three experts, each on a rank of its own."""
    return make_report(Request(file=written(tmp_path / "loads.csv", "4,2,3\n"), ranks=3, **flags))


def zipf(**flags) -> PlanReport:
    """Report on a workload that needs replicas."""
    return make_report(Request(**{"workload": "zipf", "experts": 32, "ranks": 8, "tokens": 300, **flags}))


def test_text_of_a_tiny_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "loads.csv", "4,2,3\n")
    command = ["plan", "loads.csv", "--ranks", "3", "--retention", "0.8", "--backward-limit", "3"]
    assert cli.main(command) == 0
    assert capsys.readouterr().out == TINY


def test_text_lists_replicas_slots_and_pushes(tmp_path):
    lines = text(tiny(tmp_path, retention="0.8", forward_limit="3", backward_limit="3")).splitlines()
    assert "forward limit 3; backward limit 3" in lines
    assert "Replicas: 1 with dropping, 1 without (same limits, retention 1.0)" in lines
    # The replica takes a row of expert 0, of which rank 0 may keep 3 of the 3 rows in its quota.
    assert "       0      0      1             1           0  forward only" in lines
    assert "Slots used: 1 on 1 rank, 0 on 2 ranks" in lines
    assert "Copies pushed by the rank that pushes most: 1 (rank 0)" in lines
    assert "│ limit (before: the lower one)   ! above it" in lines


def test_text_says_that_nothing_is_dropped(tmp_path):
    assert "Replicas: 1; nothing is dropped" in text(tiny(tmp_path, backward_limit="3")).splitlines()


@pytest.mark.parametrize("flags", [{}, {"forward_limit": "1.1x"}, {"policy": "eplb"}, {"quota": "joint"}])
def test_text_of_many_ranks_shows_the_extremes_in_100_columns(flags):
    report = zipf(experts=128, ranks=64, retention="0.8", **flags)
    lines = text(report).splitlines()
    assert max(map(len, lines)) <= 100
    before = lines.index("8 busiest and 4 idlest ranks before")
    after = lines.index("8 busiest and 4 idlest ranks after")
    for start, value_R in ((before, report.rank_rows.before_R), (after, report.rank_rows.backward_R)):
        shown = [int(line.split()[0]) for line in lines[start + 2 : start + 14]]
        assert lines[start + 14] == ""
        assert value_R[shown].tolist() == (order := sorted(value_R.tolist(), reverse=True))[:8] + order[-4:]


def test_text_of_32_ranks_has_a_line_for_each():
    lines = text(zipf(ranks=32, experts=32)).splitlines()
    assert [line.split()[0] for line in lines if re.match(" *[0-9]+ +[0-9]+[! ]", line)][:32] == [*map(str, range(32))]


def test_bars_are_in_proportion_and_marks_are_at_the_limit(tmp_path):
    # 14 cells are 8 rows; 6 and the limit of 4 are 10.5 and 7 of them.
    file = written(tmp_path / "loads.csv", "8,6,0\n")
    lines = text(make_report(Request(file=file, ranks=3, backward_limit="4", slots=0))).splitlines()
    bars = [line[6:29].rstrip() for line in lines if re.match(" +[0-2] ", line)]
    assert bars == ["     8!███████│██████", "     6!███████│██▌", "     0        │"]


def test_a_plan_above_its_limit_is_shown_and_says_so(tmp_path, capsys):
    file = written(tmp_path / "loads.csv", "4,2,3\n")
    assert cli.main(["plan", str(file), "--ranks", "3", "--backward-limit", "2"]) == 0
    out = capsys.readouterr().out
    assert "Impossible: ABOVE A LIMIT (3 backward rows, limit 2)." in out
    assert cli.main(["plan", str(file), "--ranks", "3", "--slots", "0", "--backward-limit", "3"]) == 0
    assert "Not found: ABOVE A LIMIT (4 backward rows, limit 3)." in capsys.readouterr().out


def test_verdicts(tmp_path):
    assert verdict(tiny(tmp_path, backward_limit="none")) == "No limits were given: no replica is needed."
    assert verdict(tiny(tmp_path, backward_limit="none", policy="eplb")) == "No limits were given."
    within = "every rank is within the limits"
    assert verdict(tiny(tmp_path, backward_limit="3")) == (
        f"Proven: {within}, and no plan within them has fewer replicas than 1."
    )
    finest = verdict(tiny(tmp_path, backward_limit="finest"))
    assert finest.startswith(f"Proven: {within}, 'finest' being the smallest that the search reached, and no plan")
    assert verdict(tiny(tmp_path, backward_limit="9", policy="echo")) == (
        f"Found: {within}. The policy echo proves nothing about the number of replicas."
    )
    open_ = make_report(Request(workload="zipf", experts=256, ranks=64, tokens=4096, retention="0.8"))
    bound, reached = open_.plan.certificate.replica_bound, open_.plan.replicas
    assert 1 < bound < reached
    assert verdict(open_) == (
        f"Found: {within}. No plan within them has fewer than {bound} replicas. Whether fewer than {reached} "
        "can do is open."
    )


def test_bars_become_ascii_where_the_output_has_no_blocks():
    assert encodable("ab █▌│", "utf-8") == encodable("ab █▌│", None) == "ab █▌│"
    assert encodable("ab █▌│ ä", "ascii") == "ab #-| ?"
    assert encodable("ab █▌│ ä", "latin-1") == "ab #-| ä"


def test_json_is_the_plan_and_nothing_else_is_printed(tmp_path, capsys):
    shape = Shape(experts=32, ranks=8, tokens=300, top_k=8)
    loads_SE = WORKLOADS["zipf"](shape, seed=3)
    limit = -(-int(loads_SE.sum()) * 101 // 800)
    quota_E = np.maximum(loads_SE.sum(axis=0) * 4 // 5, 1)
    expected = {
        "plan": plan(loads_SE, quota_E, shape.owner_E, 2, Limits(backward=limit)),
        "without_dropping": plan(loads_SE, None, shape.owner_E, 2, Limits(backward=limit)),
    }
    sizes = ["--experts", "32", "--ranks", "8", "--tokens", "300", "--seed", "3", "--slots", "2"]
    assert cli.main(["plan", "--workload", "zipf", *sizes, "--retention", "0.8", "--json"]) == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)
    assert err == ""
    assert figures["settings"]["backward_limit"] == limit and figures["settings"]["forward_limit"] is None
    assert figures["settings"]["retention"] == "4/5" and figures["settings"]["min_retention"] == "1/2"
    assert figures["quota"] == quota_E.tolist() and figures["kept"] == quota_E.sum()
    assert figures["input"]["loads"] == loads_SE.tolist() and figures["input"]["routed"] == 8 * 300 * 8
    assert Fraction(figures["input"]["max_over_mean"]) == Fraction(figures["input"]["busiest_rank_rows"], 2400)
    assert expected["without_dropping"].replicas > expected["plan"].replicas > 0
    for name, made in expected.items():
        found = figures[name]
        assert [i["expert"] for i in found["instances"]] == made.expert_I.tolist()
        assert [i["rank"] for i in found["instances"]] == made.rank_I.tolist()
        assert [i["kept"] for i in found["instances"]] == made.kept_I.tolist()
        assert np.array([i["rows_by_source"] for i in found["instances"]]).T.tolist() == made.rows_SI.tolist()
        assert [i["rows"] for i in found["instances"]] == made.rows_I.tolist()
        assert [i["master"] for i in found["instances"]] == [True] * 32 + [False] * made.replicas
        assert [i["forward_only"] for i in found["instances"]] == made.forward_only_I.tolist()
        assert [r["forward_rows"] for r in found["ranks"]] == made.rows_R.tolist()
        assert [r["backward_rows"] for r in found["ranks"]] == made.kept_R.tolist()
        assert [r["replicas"] for r in found["ranks"]] == made.slots_R.tolist()
        assert [r["pushes"] for r in found["ranks"]] == made.pushes_R.tolist()
        assert found["certificate"]["status"] == made.certificate.status
        assert found["certificate"]["within_limits"] is True


def numbers(value) -> list:
    """Every number in a JSON value."""
    if isinstance(value, dict):
        return numbers([*value.values()])
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


@pytest.mark.parametrize("policy", policies())
def test_every_policy_makes_a_report_and_json_conserves_rows(policy):
    report = zipf(policy=policy, retention="0.8", ranks=4, experts=16, tokens=128, top_k=2)
    figures = json.loads(json.dumps(as_json(report)))
    assert {type(number) for number in numbers(figures)} == {int}
    for name, quota in (("plan", figures["quota"]), ("without_dropping", np.sum(figures["input"]["loads"], axis=0))):
        rows_SE, kept_E = np.zeros((4, 16), int), np.zeros(16, int)
        for instance in figures[name]["instances"]:
            rows_SE[:, instance["expert"]] += instance["rows_by_source"]
            kept_E[instance["expert"]] += instance["kept"]
            assert instance["kept"] <= instance["rows"] == sum(instance["rows_by_source"])
        assert rows_SE.tolist() == figures["input"]["loads"]
        assert kept_E.tolist() == list(quota)
    assert report.plan.certificate.replicas == figures["plan"]["replicas"]
    assert f"policy {policy}," in text(report)


def test_the_plot_is_a_png(tmp_path, capsys):
    target = tmp_path / "plan.png"
    sizes = ["--experts", "8", "--ranks", "4", "--tokens", "64", "--top-k", "2"]
    assert cli.main(["plan", "--workload", "hot_rank", *sizes, "--retention", "0.8", "--plot", str(target)]) == 0
    assert capsys.readouterr().out.startswith("workload hot_rank, 64 tokens a source, top-2, seed 0\n")
    assert target.read_bytes().startswith(b"\x89PNG\r\n")
    assert [*tmp_path.iterdir()] == [target]


def test_the_plot_has_the_ranks_rows_and_limits(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: (drawn.append(self), path.touch()))
    report = zipf(retention="0.8", forward_limit="1.1x", slots=2)
    plan_plot.write_plot(tmp_path / "plan.png", report)
    before, after = drawn[0].axes
    heights = [[bar.get_height() for bar in bars] for bars in (*before.containers, *after.containers)]
    rows = report.rank_rows
    assert heights[0] == rows.before_R.tolist()
    assert np.add(heights[1], heights[2]).tolist() == rows.backward_R.tolist()
    assert np.add(rows.backward_R, heights[3]).tolist() == rows.forward_R.tolist()
    replica_rows = sum(report.plan.kept_I[report.plan.num_experts :])
    assert sum(heights[2]) == replica_rows > 0
    assert [line.get_ydata()[0] for line in after.lines] == [report.limits.forward, report.limits.backward]


def test_a_plot_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=re.escape("pip install 'megatron-lrmoe[report]'")):
        plan_plot.write_plot(tmp_path / "plan.png", tiny(tmp_path))


def test_a_plot_that_cannot_be_written_is_bad_input(tmp_path, capsys):
    file = written(tmp_path / "loads.csv", "4,2,3\n")
    target = tmp_path / "missing" / "plan.png"
    assert cli.main(["plan", str(file), "--ranks", "3", "--plot", str(target)]) == 2
    assert capsys.readouterr() == ("", f"megatron-lrmoe: error: --plot {target}: No such file or directory\n")
    (tmp_path / "folder").mkdir()
    assert cli.main(["plan", str(file), "--ranks", "3", "--plot", str(tmp_path / "folder")]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "loads.csv"]


def test_limits_are_multiples_of_the_routed_rows(tmp_path):
    assert tiny(tmp_path, retention="0.8").limits == (None, 4)  # 1.01 x 3 rows, rounded up
    assert tiny(tmp_path, retention="0.5", forward_limit="1x", backward_limit="2/3x").limits == (3, 2)
    assert tiny(tmp_path, forward_limit="finest", backward_limit="none").limits == ("finest", None)


def test_tiles_and_groups_count_in_limits_and_on_ranks(tmp_path):
    report = tiny(tmp_path, tile_rows=4, group_rows=1, backward_limit="1x", retention="0.8")
    # Each rank has one group of at most a tile: 4 + 1.
    assert report.limits.backward == 5
    assert [r.tolist() for r in report.rank_rows] == [[5, 5, 5]] * 3
    ranks = as_json(report)["plan"]["ranks"]
    assert [(r["backward_rows"], r["backward_cost"]) for r in ranks] == [(3, 5), (1, 5), (2, 5)]
    assert "rows on ranks and limits count whole tiles of 4, and 1 for each expert's group" in text(report)


def test_a_byte_budget_sets_both_limits():
    report = zipf(budget_gib="0.01", hidden=64, ffn=32, retention="0.8")
    # A row saves (D + 2F) x 2 + 32 bytes; a kept one needs 4 D + 8 F + 32 and, for the activation,
    # (2 x 2F + 6F) x 4 + 3F x 2 bytes more; a slot holds 3 D F numbers of 2 and 4 bytes.
    saved, work, slot = 128 * 2 + 32, 4 * 64 + 10 * 32 * 4 + 3 * 32 * 2 + 40, 3 * 64 * 32 * 6
    forward, backward = report.limits
    left = int(Fraction("0.01") * 2**30) - slot
    assert left - saved - work < forward * saved + backward * work <= left
    assert forward * int(report.quota_E.sum()) == pytest.approx(backward * int(report.load_E.sum()), rel=0.01)
    assert f"forward limit {forward} (0.01 GiB); backward limit {backward} (0.01 GiB)" in text(report)


def test_quotas_and_domains_are_passed_on():
    kept = {name: zipf(retention="0.8", quota=name) for name in ("proportional", "balanced", "joint")}
    assert kept["joint"].plan.replicas <= min(kept["balanced"].plan.replicas, kept["proportional"].plan.replicas)
    assert kept["balanced"].quota_E.sum() == kept["proportional"].quota_E.sum() <= kept["joint"].quota_E.sum()
    least = zipf(retention="0.8", quota="balanced", min_retention="0.75")
    assert (least.quota_E * 4 >= least.load_E * 3).all() and (kept["balanced"].quota_E * 4 < least.load_E * 3).any()
    report = zipf(domain=2, slots=4)
    first = report.plan.num_experts
    assert report.plan.replicas > 0
    assert (report.plan.rank_I[first:] // 2 == report.plan.owner_E[report.plan.expert_I[first:]] // 2).all()
    assert "policy lrm, quota proportional, retention 1.0, strong search" in text(zipf(strong=True)).splitlines()


def test_retention_is_the_decimal_that_was_written(tmp_path):
    file = written(tmp_path / "loads.csv", "90")
    assert make_report(Request(file=file, ranks=1, retention="0.7")).quota_E.tolist() == [63]
    assert Request(ranks=1, retention="0.3").least == Fraction(3, 10)
    assert Request(ranks=1, retention="2/3").least == Fraction(1, 2)


@given(st.lists(st.lists(st.integers(0, 30), min_size=4, max_size=4), min_size=2, max_size=2), st.integers(0, 2))
@cases(100, 20)
def test_plans_are_valid(tmp_path_factory, rows, slots):
    file = tmp_path_factory.getbasetemp() / "loads.csv"
    file.write_text("\n".join(",".join(map(str, row)) for row in rows))
    report = make_report(Request(file=file, ranks=2, slots=slots, retention="0.8", backend="readable"))
    limits = Limits(backward=report.limits.backward)
    for made, quota_E in ((report.plan, report.quota_E), (report.without, report.load_E)):
        assert problems_of(made, np.array(rows), quota_E, np.array([0, 0, 1, 1]), slots, limits) == []


def test_plan_imports_neither_torch_nor_megatron(tmp_path):
    program = (
        "import sys\n"
        "from megatron_lrmoe import cli\n"
        "status = cli.main(['plan', '--workload', 'burst', '--experts', '8', '--ranks', '4', '--json'])\n"
        "print(status, [m for m in ('torch', 'megatron', 'matplotlib', 'pyarrow') if m in sys.modules])\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "0 []"
