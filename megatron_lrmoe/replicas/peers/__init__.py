"""Rival policies of replica placement, written from their published descriptions, behind our planner's signature.

    plan = POLICIES["ultraep"](loads_SE, quota_E, owner_E, slots=2, limits=Limits())

Each module's docstring says what it is faithful to, what is simplified, and what could not be checked. For other
options than the defaults: ``as_policy(partial(llep.place, options=LlepOptions(min_rows=1)))``.
"""

from megatron_lrmoe.replicas.peers import (
    echo,
    eplb,
    fastermoe,
    fixed,
    flexmoe,
    laer,
    llep,
    moonep,
    smartmoe,
    symi,
    ultraep,
)
from megatron_lrmoe.replicas.peers.finish import Policy, as_policy

__all__ = ["POLICIES", "Policy", "as_policy"]

POLICIES: dict[str, Policy] = {
    "fixed": as_policy(fixed.place),
    "symi": as_policy(symi.place),
    "ultraep": as_policy(ultraep.place),
    "moonep": as_policy(moonep.place),
    "eplb": as_policy(eplb.place),
    "echo": as_policy(echo.place),
    "llep": as_policy(llep.place),
    "laer": as_policy(laer.place),
    "flexmoe": as_policy(flexmoe.place),
    "smartmoe": as_policy(smartmoe.place),
    "fastermoe": as_policy(fastermoe.place),
}
"""Planners by name."""
