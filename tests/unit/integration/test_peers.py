# SPDX-License-Identifier: Apache-2.0
"""A rank ends when another one is gone, unless it is leaving itself."""

import subprocess
import sys

import pytest

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
