import ctypes
import mmap
import os
import platform
from pathlib import Path

import pytest

from vllm_moe_lightning.numa import interleave, node_of_pci_device, nodes_of, parse_list


def test_kernel_lists_are_read() -> None:
    assert parse_list("0-3,8\n") == [0, 1, 2, 3, 8]
    assert parse_list("\n") == []


def test_cpus_are_found_at_their_nodes(tmp_path: Path) -> None:
    for node, cpus in enumerate(("0-1,4", "2-3")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    assert nodes_of([0, 3, 4, 9], tmp_path) == {0: 0, 3: 1, 4: 0, 9: 0}
    assert nodes_of([5], tmp_path / "nowhere") == {5: 0}


@pytest.mark.parametrize(("said", "num_nodes", "expected"), [("1\n", 2, 1), ("-1\n", 2, None), ("0\n", 1, None)])
def test_a_pci_device_s_node_is_the_kernel_s_word_where_there_is_a_choice(
    tmp_path: Path, said: str, num_nodes: int, expected: int | None
) -> None:
    for node in range(num_nodes):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    folder = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(said)
    assert node_of_pci_device("0000:3B:00.0", tmp_path) == expected
    assert node_of_pci_device("0000:99:00.0", tmp_path) is None


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no mbind known here")
def test_pages_take_the_policy_and_keep_their_contents() -> None:
    size = 8 * mmap.PAGESIZE
    with mmap.mmap(-1, size) as memory:
        memory[:] = b"\x5a" * size
        view = (ctypes.c_char * size).from_buffer(memory)
        address = ctypes.addressof(view)
        node = nodes_of(os.sched_getaffinity(0)).popitem()[1]
        interleave(address + 1, size - 1, [node])  # the first page is not wholly in the range
        policies = (
            {
                int(line.split()[0], 16): line.split()[1]
                for line in Path("/proc/self/numa_maps").read_text().splitlines()
            }
            if Path("/proc/self/numa_maps").exists()
            else {}
        )
        if policies:
            assert policies[address + mmap.PAGESIZE] == f"interleave:{node}"
        assert bytes(view) == b"\x5a" * size
        del view


def test_an_unknown_node_is_refused() -> None:
    with mmap.mmap(-1, 4 * mmap.PAGESIZE) as memory:
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        with pytest.raises(OSError, match="mbind over nodes"):
            interleave(ctypes.addressof(view), len(memory), [777])
        del view
    with pytest.raises(ValueError, match=r"nodes must be some of 0\.\.1023"):
        interleave(0, 4096, [])
