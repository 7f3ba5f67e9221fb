"""Which machine or NVLink fabric a rank is on, as `nvidia-smi -q` tells it."""

from __future__ import annotations

from reshard_cli.plan.topology import Topology
from reshard_cli.refit.environment import fabric_of

FABRIC = """\
    Fabric
        State                             : Completed
        Status                            : Success
        CliqueId                          : 7
        ClusterUUID                       : 5a0b2c1d-0000-4000-8000-000000000001
"""


def test_gpus_of_one_fabric_share_a_place_whatever_their_host():
    assert fabric_of(FABRIC) == "fabric 5a0b2c1d-0000-4000-8000-000000000001/7"


def test_a_gpu_without_a_fabric_has_none():
    assert fabric_of("        CliqueId : N/A\n        ClusterUUID : N/A\n") is None
    assert fabric_of("        ClusterUUID : 00000000-0000-0000-0000-000000000000\n") is None
    assert fabric_of("") is None


def test_ranks_at_one_place_are_one_domain_in_the_order_of_their_first_rank():
    topology = Topology.of_machine(2, 3, ["b", "a", "a", "c", "b"], colocated=False)
    assert topology.domain.tolist() == [0, 1, 1, 2, 0]
    assert topology.rails().tolist() == [0, 0, 1, 0, 1]
