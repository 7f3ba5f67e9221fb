"""Which machine or NVLink fabric a rank is on, as `nvidia-smi -q` tells it, and which of the GPUs that it sees is its own."""

from __future__ import annotations

import pytest
import torch

from reshard_cli.plan.topology import Topology
from reshard_cli.refit.environment import fabric_of, own_device
from reshard_cli.refit.library import place_in_job

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


@pytest.mark.parametrize(("local_rank", "seen", "own"), [(3, 8, 3), (3, 1, 0), (5, 4, 1)])
def test_a_rank_that_sees_fewer_gpus_than_its_host_has_takes_one_that_it_sees(
    monkeypatch, local_rank, seen, own
):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert own_device({"backend": "nccl", "local_rank": local_rank}) == torch.device("cuda", own)
    assert chosen == [torch.device("cuda", own)]
    assert own_device({"backend": "gloo", "local_rank": local_rank}) == torch.device("cpu")
    assert len(chosen) == 1


def test_a_program_that_has_chosen_its_gpu_keeps_it(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert place_in_job(3, 8) == (3, 8, 3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    assert place_in_job(3, 8) == (3, 8, 5)
