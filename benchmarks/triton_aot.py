"""Compiles paged_fused_moe's kernels for every chip that they are meant for, with none at hand, and says what they use.

    python benchmarks/triton_aot.py --json benchmarks/results/triton_aot.json

For each chip, tile size and weight type: shared memory, tensor memory, registers per thread, spilled bytes and how wide
the loads are, against what the chip has. Ends with 1 if something does not fit. Says nothing of speed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

KIB = 1024
# What one block may ask for: CUDA programming guide, "maximum amount of shared memory per thread block".
SHARED_LIMIT_BYTES = {
    75: 64 * KIB,
    80: 163 * KIB,
    86: 99 * KIB,
    89: 99 * KIB,
    90: 227 * KIB,
    100: 227 * KIB,
    120: 99 * KIB,
}
MAX_REGISTERS = 255  # of a thread, on all of these
REGISTERS_PER_MULTIPROCESSOR = 65536
TENSOR_MEMORY_COLUMNS = 512  # sm_100 alone
SIZE_DIVISIBILITY = 16  # of hidden and intermediate sizes, as of every model's

SIZES = ("small", "medium", "large")
KERNELS = ("gate_up_kernel", "down_kernel")
VARIANTS = ("sorted tokens", "one token", "sizes with a rest")
WEIGHTS = ("float16", "bfloat16", "float8 per tensor", "float8 by blocks of 128")


@dataclass(frozen=True)
class Build:
    """One kernel for one chip."""

    capability: int
    kernel: str
    weights: str
    size: str
    variant: str
    tiles: dict[str, int]
    shared_bytes: int
    shared_limit_bytes: int
    tensor_memory_columns: int
    registers: int
    spilled_bytes: int
    matrix_instruction: str
    """"mma.sync", "wgmma", "tcgen05", or "none": then each product is a multiplication of its own."""
    num_warps: int
    load_bytes: int
    """Of weights and tokens, by one thread at a time; 16 is the most there is."""
    compile_s: float

    @property
    def name(self) -> str:
        return f"sm_{self.capability}, {self.kernel}, {self.weights}, {self.size}, {self.variant}"

    def line(self) -> str:
        return (
            f"{self.name:<80}{self.shared_bytes / KIB:6.1f} of {self.shared_limit_bytes / KIB:3.0f} KiB shared  "
            f"{self.registers:3d} registers  {self.spilled_bytes:4d} B spilled  {self.matrix_instruction:<8}  "
            f"{self.load_bytes:2d} B loads  {self.compile_s:5.2f} s  {'; '.join(self.faults())}"
        )

    def faults(self) -> list[str]:
        found = []
        if self.shared_bytes > self.shared_limit_bytes:
            found.append(f"{self.shared_bytes} bytes of shared memory, the chip has {self.shared_limit_bytes}")
        if self.registers > MAX_REGISTERS:
            found.append(f"{self.registers} registers of {MAX_REGISTERS}")
        if self.registers * 32 * self.num_warps > REGISTERS_PER_MULTIPROCESSOR:
            found.append(f"{self.num_warps} warps of {self.registers} registers are more than a multiprocessor has")
        if self.tensor_memory_columns > TENSOR_MEMORY_COLUMNS:
            found.append(f"{self.tensor_memory_columns} columns of tensor memory of {TENSOR_MEMORY_COLUMNS}")
        if self.spilled_bytes:
            found.append(f"{self.spilled_bytes} bytes of spilled registers")
        return found


def weights_of(capability: int) -> list[str]:
    return [name for name in WEIGHTS if capability >= 80 or name != "bfloat16"]


def compile_kernel(capability: int, kernel: str, weights: str, size: str, variant: str) -> Build:
    """Arguments: a chip of SHARED_LIMIT_BYTES, and one of KERNELS, WEIGHTS, SIZES and VARIANTS."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vllm_moe_lightning.kernels import paged_moe
    from vllm_moe_lightning.kernels.paged_moe_launch import fp8_conversion
    from vllm_moe_lightning.kernels.tile_configs import configs_of

    is_fp8 = weights.startswith("float8")
    weight_type = torch.float8_e4m3fn if is_fp8 else getattr(torch, weights)
    config = getattr(configs_of(capability, weight_type.itemsize), size)
    operand = "fp16" if weights == "float16" or capability < 80 else "bf16"
    function = getattr(paged_moe, kernel)
    constants: dict[str, Any] = {
        "WEIGHT": paged_moe.WEIGHT_TYPES[weight_type],
        "FP8": fp8_conversion(weight_type, capability),
        "SCALED": is_fp8,
        "SCALED_BY_COLUMN": weights.endswith("of 128"),
        "ONE_PER_TILE": variant == "one token",
        "INTERPRETED": False,
        "EVEN_K": variant != "sizes with a rest",
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n * (2 if kernel == "down_kernel" else 1),
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
    }
    if not is_fp8:  # as the launcher passes them, and Triton makes constants of None and 1
        constants |= {"scales": None, "rows_per_scale": 1, "columns_per_scale": 1}
    types = {
        "hidden": f"*{operand}",
        "inner": f"*{operand}",
        "choice_outputs": "*fp32",
        "topk_weights": "*fp32",
        "choices": "*i32",
        "tile_experts": "*i32",
        "num_tiles": "*i32",
        "pages": "*i64",
        "first_rows": "*i32",
        "scales": "*fp32",
    }
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in function.arg_names}
    sizes = ("hidden_stride", "hidden_size", "intermediate_size", "row_bytes", "rows_per_scale", "columns_per_scale")
    attributes = {
        (index,): [["tt.divisibility", SIZE_DIVISIBILITY]]
        for index, name in enumerate(function.arg_names)
        if signature[name] != "constexpr" and (signature[name].startswith("*") or name in sizes)
    }
    source = ASTSource(function, signature, constants, attributes)
    log = io.StringIO()
    start_s = time.monotonic()
    with contextlib.redirect_stdout(log), triton.knobs.nvidia.scope():
        triton.knobs.nvidia.dump_ptxas_log = True
        built = triton.compile(
            source,
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True},
        )
    compile_s = time.monotonic() - start_s
    registers = int(_last(r"Used (\d+) registers", log.getvalue()))
    spilled = int(_last(r"(\d+) bytes spill stores", log.getvalue()))
    return Build(
        capability,
        kernel,
        weights,
        size,
        variant,
        asdict(config),
        built.metadata.shared,
        SHARED_LIMIT_BYTES[capability],
        getattr(built.metadata, "tmem_size", None) or 0,
        registers,
        spilled,
        _matrix_instruction(built.asm["ptx"]),
        built.metadata.num_warps,
        _load_bytes(built.asm["ptx"]),
        round(compile_s, 2),
    )


def _last(pattern: str, log: str) -> str:
    found = re.findall(pattern, log)
    if not found:
        raise RuntimeError(f"ptxas said nothing of {pattern!r}; was the kernel in the cache? Its log: {log}")
    return found[-1]


def _matrix_instruction(ptx: str) -> str:
    names = {"tcgen05.mma": "tcgen05", "wgmma.mma_async": "wgmma", "mma.sync": "mma.sync"}
    return next((name for instruction, name in names.items() if instruction in ptx), "none")


def _load_bytes(ptx: str) -> int:
    """What one thread brings of weights and tokens at a time: the narrowest asynchronous copy; on a chip that has none,
    the widest load, as others are of addresses and scales."""
    copies = [int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?,\s*(0x[0-9a-f]+|\d+)", ptx)]
    loads = re.findall(r"ld\.global[.a-z0-9_:]*?(?:\.v(\d))?\.b(\d+)", ptx)
    return min(copies, default=0) or max(int(count or 1) * int(bits) // 8 for count, bits in loads)


def jobs(options: argparse.Namespace) -> Iterator[tuple[int, str, str, str, str]]:
    """Variants other than the first are for the smallest tiles alone: they hardly change what a kernel uses."""
    for capability, kernel in product(options.sm, options.kernel):
        names = [name for name in weights_of(capability) if name in options.weights]
        for name, size, variant in product(names, options.size, options.variant):
            if variant == VARIANTS[0] or size == "small":
                yield capability, kernel, name, size, variant


def report(builds: list[Build], commit: str) -> dict[str, Any]:
    import torch
    import triton

    return {
        "what": "ahead-of-time compilation, no GPU: resources, not speed",
        "triton": triton.__version__,
        "torch": torch.__version__,
        "commit": commit,
        "command": "python benchmarks/triton_aot.py --json benchmarks/results/triton_aot.json",
        "num_builds": len(builds),
        "faults": {build.name: build.faults() for build in builds if build.faults()},
        # Without the compilation's time, which says more of the machine than of the kernel.
        "builds": [{key: value for key, value in asdict(build).items() if key != "compile_s"} for build in builds],
    }


def as_text(result: dict[str, Any]) -> str:
    """JSON with a line per build."""
    head = json.dumps({**result, "builds": []}, indent=1)
    lines = ",\n  ".join(json.dumps(build) for build in result["builds"])
    return head.replace('"builds": []', f'"builds": [\n  {lines}\n ]') + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the figures go")
    chips = sorted(SHARED_LIMIT_BYTES)
    parser.add_argument("--sm", type=int, nargs="+", default=chips, choices=chips)
    parser.add_argument("--size", nargs="+", default=SIZES, choices=SIZES)
    parser.add_argument("--kernel", nargs="+", default=KERNELS, choices=KERNELS)
    parser.add_argument("--variant", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--weights", nargs="+", default=WEIGHTS, choices=WEIGHTS, help="bfloat16: from sm_80 on")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set: nothing would be compiled; unset it")
    from benchmarks.machine import commit

    builds, started_at = [], commit()
    with tempfile.TemporaryDirectory(prefix="triton-aot-") as cache:
        # Before triton is imported: each build is a real one, and leaves nothing behind.
        os.environ["TRITON_CACHE_DIR"] = cache
        for job in jobs(options):
            build = compile_kernel(*job)
            builds.append(build)
            print(build.line(), flush=True)
    result = report(builds, started_at)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(as_text(result))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
