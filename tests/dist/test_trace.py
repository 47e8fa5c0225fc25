"""``--moe-lrm-trace``: what a layer's calls leave in the folder is what was routed, kept and placed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_lrmoe.replicas.traces import read_trace
from tests import layers
from tests.gloo import Pool
from tests.layers import Case

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.dist

STEPS = 4


def traced(case: Case) -> list[list[list[int]]]:
    """Loads (source, expert) of each traced step, by the routing itself."""
    from megatron_lrmoe.mcore import trace

    layer = layers.build(case)
    loads = []
    for step in range(STEPS):
        layers.at_iteration(step)
        layers.forward_backward(layer, replace(case, seed=step))
        if step % case.lrm.get("trace_interval", 1) == 0:
            parts = [layers.settle(replace(case, seed=step), rank) for rank in range(2)]
            loads.append([part["map_TE"].sum(0).tolist() for part in parts])
    trace.close()
    return loads


@pytest.mark.parametrize("scope", ["expert", "source"])
@pytest.mark.parametrize(
    "lrm",
    [{}, {"trace_interval": 3}, {"replica_policy": "lrm", "replica_min_rows": 0}],
    ids=["", "interval", "replicas"],
)
def test_the_folder_holds_the_loads_of_every_traced_call(gloo2: Pool, tmp_path: Path, scope: str, lrm: dict) -> None:
    case = Case(lrm={"trace": str(tmp_path), "scope": scope, **lrm})
    expected = gloo2(traced, case)[0]
    calls = read_trace(tmp_path / "group0", sources=2, experts=case.num_experts)
    assert [call.routed_SE.tolist() for call in calls] == expected
    assert [call.iteration for call in calls] == list(range(0, STEPS, lrm.get("trace_interval", 1)))
    for call in calls:
        load_E, kept_E = call.routed_SE.sum(0), call.retained_SE.sum(0)
        assert kept_E.tolist() == np.maximum(load_E // 2, load_E > 0).tolist()
    names = sorted(path.name.partition("-")[0] for path in (tmp_path / "group0").iterdir())
    assert names == ["loads"] * len(calls) + ["placed"] * len(calls)
