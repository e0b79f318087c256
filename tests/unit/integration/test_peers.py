# SPDX-License-Identifier: Apache-2.0
"""A rank ends when another one is gone, unless it is leaving itself."""

import os
import subprocess
import sys

import pytest

from vllm_moe_lightning.integration.peers import NodeRanks, node_identity, ranks_beside, watch_peers

CODE = """
import subprocess, sys, time
from vllm_moe_lightning.integration import peers
peers.GRACE_S = 0.2
peer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
watch = peers.PeerWatch([peer.pid])
{then}
peer.kill()
time.sleep({seconds})
print("still here")
"""


@pytest.mark.parametrize(("then", "seconds", "returncode"), [("", 60, 1), ("watch.close()", 1, 0)])
def test_a_rank_outlives_another_only_if_it_is_leaving_itself(then: str, seconds: int, returncode: int) -> None:
    code = CODE.format(then=then, seconds=seconds)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == returncode, result.stderr
    assert ("still here" in result.stdout) == (returncode == 0)
    assert ("has ended; this rank cannot go on without it" in result.stdout + result.stderr) == (returncode == 1)


def test_ranks_of_other_machines_are_neither_counted_nor_watched() -> None:
    """Process ids mean something on their own machine only."""
    processes = [("a", 10, 0), ("a", 11, 1), ("b", 10, None), ("b", 12, 1)]
    assert [ranks_beside(own, processes) for own in processes] == [
        NodeRanks(0, (10, 11), (0, 1)),
        NodeRanks(1, (10, 11), (0, 1)),
        NodeRanks(0, (10, 12), (None, 1)),
        NodeRanks(1, (10, 12), (None, 1)),
    ]
    assert watch_peers(NodeRanks(0, (os.getpid(),), (None,))) is None


def test_processes_of_one_machine_have_one_identity() -> None:
    code = "from vllm_moe_lightning.integration.peers import node_identity; print(node_identity())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == node_identity()
