"""paged_fused_moe: the routed experts of a layer on a GPU, their weights wherever the page table says.

Checks what the kernels take on trust, sorts tokens into tiles, picks the tile sizes of the chip. Imports without
triton; only a call needs it. Letters in shapes: T tokens, K choices of each (top_k), C = T K, E experts, H hidden
size, I intermediate size.

Accuracy, relative RMS against float32 over the same weights: float16 0.0005, bfloat16 0.004 (silu(gate) * up and the
output are rounded to the dtype of `hidden`; sums are float32, the sum over choices too).
"""

from __future__ import annotations

from collections.abc import Collection
from types import ModuleType
from typing import Any

import torch

from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.kernels.page_table import (
    ROW_ALIGNMENT_BYTES,
    ExpertScales,
    ExpertShape,
    Matrix,
    PageTable,
)
from vllm_moe_lightning.kernels.tile_configs import TileConfig, config_for
from vllm_moe_lightning.kernels.token_tiles import TokenTiles, tiles_of

FIRST_WITH_BFLOAT16 = 80  # compute capabilities
FIRST_WITH_FLOAT8 = 89
INTERPRETED_CAPABILITY = 80  # whose tiles are taken where Triton's interpreter stands in for a GPU
MAX_CHOICES = 1 << 30  # counted in int32, with the places of tiles that are not full
SUM_BLOCK = 1024  # columns that a program of the sum over choices has


def paged_fused_moe(
    hidden: torch.Tensor,  # [T, H] float16 or bfloat16; any stride between tokens that keeps rows aligned
    topk_weights: torch.Tensor,  # [T, K]
    topk_ids: torch.Tensor,  # [T, K] integers; negative: computed elsewhere
    page_table: PageTable,
    *,
    output: torch.Tensor | None = None,  # [T, H], of hidden's dtype; made if not given
    config: TileConfig | None = None,  # None: by chip and batch
) -> torch.Tensor:
    """sum over k of topk_weights * w2 (silu(w1 x) * (w3 x)), in float32, rounded to hidden's dtype. Returns the output.

    Launches on the current stream and asks the device for nothing, so the host never waits. Takes C (4 H + 2 I) bytes
    of device memory while it runs. Every expert that an id
    names must be in the pages by the time that the stream gets there; the ids themselves are not checked, as that would
    wait. Experts without tokens cost nothing, whatever their addresses are.

    Raises ValueError for tensors that do not fit together, UnsupportedError where this device can't run it: no triton,
    bfloat16 before sm_80 (see weights/float16_cast.py), a chip older than sm_75.

    The tiles are those of vLLM's fused_moe (sorted token ids, padded per expert); the page table is ours.
    """
    step = PagedMoeStep(hidden, topk_weights, topk_ids, page_table.shape, config=config)
    step.add(page_table)
    return step.finish(output)


class PagedMoeStep:
    """One call in parts, for experts that are not all on the device at once: `add` for each part, then `finish`.

    Each choice has its own row of intermediate results and all are summed at the end in one order, so the output has
    the same bits however the experts were divided.
    """

    def __init__(
        self,
        hidden: torch.Tensor,  # [T, H]
        topk_weights: torch.Tensor,  # [T, K]
        topk_ids: torch.Tensor,  # [T, K]
        shape: ExpertShape,
        *,
        config: TileConfig | None = None,
    ) -> None:
        check_inputs(hidden, topk_weights, topk_ids, shape)
        check_weights(shape.dtype)
        self._kernels = _triton_kernels()
        self._interpreted = _is_interpreted()
        self._capability = _capability_of(hidden.device, self._interpreted)
        check_dtype(hidden.dtype, self._capability)
        self._hidden, self._shape, self._config = hidden, shape, config
        num_choices = topk_ids.numel()
        self._topk_weights, self._topk_ids = topk_weights.float().contiguous(), topk_ids.int().contiguous()
        self._inner = hidden.new_empty(num_choices, shape.intermediate_size)
        self._choice_outputs = hidden.new_empty(num_choices, shape.hidden_size, dtype=torch.float32)

    def add(self, table: PageTable, experts: Collection[int] | None = None) -> None:
        """Compute the choices of these experts; None: of all. Over all calls each expert that has tokens comes once."""
        if table.shape != self._shape or table.device != self._hidden.device:
            raise ValueError(
                f"the page table is of {table.shape} on {table.device}, not of {self._shape} on {self._hidden.device}"
            )
        if not self._topk_ids.numel():
            return
        ids = self._topk_ids if experts is None else _only(experts, self._topk_ids, self._shape.num_experts)
        config = self._config or self._pick_config(table)
        tiles = tiles_of(ids, self._shape.num_experts, config.block_m)
        self._launch_gate_up(table, tiles, config)
        self._launch_down(table, tiles, config)

    def finish(self, output: torch.Tensor | None = None) -> torch.Tensor:
        """Sum over each token's choices. output: [T, H], of hidden's dtype; made if not given."""
        if output is None:
            output = torch.empty_like(self._hidden, memory_format=torch.contiguous_format)
        is_right = output.shape == self._hidden.shape and output.dtype == self._hidden.dtype
        if not is_right or output.device != self._hidden.device or output.stride(1) != 1:
            raise ValueError(f"output must be like hidden, {_show(self._hidden)}, got {_show(output)}")
        num_tokens, hidden_size = output.shape
        if num_tokens:
            self._kernels.sum_choices_kernel[(num_tokens, -(-hidden_size // SUM_BLOCK))](
                self._choice_outputs,
                self._topk_ids,
                output,
                output.stride(0),
                hidden_size,
                TOP_K=self._topk_ids.shape[1],
                BLOCK=SUM_BLOCK,
            )
        return output

    def _pick_config(self, table: PageTable) -> TileConfig:
        groups = [
            scales.columns_per_scale
            for scales in (table.w13_scales, table.w2_scales)
            if scales is not None and scales.values.shape[2] > 1
        ]
        num_tokens, top_k = self._topk_ids.shape
        return config_for(
            self._capability,
            self._shape.dtype.itemsize,
            num_tokens=num_tokens,
            top_k=top_k,
            num_experts=self._shape.num_experts,
            columns_per_scale=min(groups, default=0),
        )

    def _launch_gate_up(self, table: PageTable, tiles: TokenTiles, config: TileConfig) -> None:
        shape = self._shape
        num_columns = -(-shape.intermediate_size // config.block_n)
        self._kernels.gate_up_kernel[(tiles.num_tiles_bound * num_columns,)](
            self._hidden,
            self._inner,
            tiles.choices,
            tiles.tile_experts,
            tiles.num_tiles,
            table.w13.addresses,
            table.w13.first_rows,
            None if table.w13_scales is None else table.w13_scales.values,
            self._hidden.stride(0),
            self._topk_ids.numel(),
            self._topk_ids.shape[1],
            shape.hidden_size,
            shape.intermediate_size,
            table.w13.rows_per_page,
            shape.row_bytes("w13"),
            **self._constants(table.w13_scales, "w13", tiles, config, config.block_n),
        )

    def _launch_down(self, table: PageTable, tiles: TokenTiles, config: TileConfig) -> None:
        shape, block_n = self._shape, 2 * config.block_n
        num_columns = -(-shape.hidden_size // block_n)
        self._kernels.down_kernel[(tiles.num_tiles_bound * num_columns,)](
            self._inner,
            self._choice_outputs,
            self._topk_weights,
            tiles.choices,
            tiles.tile_experts,
            tiles.num_tiles,
            table.w2.addresses,
            table.w2.first_rows,
            None if table.w2_scales is None else table.w2_scales.values,
            self._topk_ids.numel(),
            shape.hidden_size,
            shape.intermediate_size,
            table.w2.rows_per_page,
            shape.row_bytes("w2"),
            **self._constants(table.w2_scales, "w2", tiles, config, block_n),
        )

    def _constants(
        self, scales: ExpertScales | None, matrix: Matrix, tiles: TokenTiles, config: TileConfig, block_n: int
    ) -> dict[str, Any]:
        """The arguments that both GEMMs share, by name."""
        num_columns = self._shape.num_columns(matrix)
        by_column = scales is not None and scales.values.shape[2] > 1
        if scales is not None and by_column and scales.columns_per_scale % config.block_k:
            raise ValueError(
                f"{matrix}_scales: groups of {scales.columns_per_scale} columns are not whole steps of "
                f"{config.block_k}; give a config whose block_k divides both matrices' groups"
            )
        return {
            "scale_expert_stride": 0 if scales is None else scales.values.stride(0),
            "scale_row_stride": 0 if scales is None else scales.values.stride(1),
            "rows_per_scale": 1 if scales is None else scales.rows_per_scale,
            "columns_per_scale": 1 if scales is None else scales.columns_per_scale,
            "WEIGHT": self._kernels.WEIGHT_TYPES[self._shape.dtype],
            "FP8": fp8_conversion(self._shape.dtype, self._capability),
            "SCALED": scales is not None,
            "SCALED_BY_COLUMN": by_column,
            "ONE_PER_TILE": tiles.one_per_tile,
            "INTERPRETED": self._interpreted,
            "EVEN_K": num_columns % config.block_k == 0,
            "BLOCK_M": config.block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": config.block_k,
            "GROUP_M": config.group_m,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "enable_fp_fusion": True,  # the default of Triton to 3.9, no longer of 3.10
        }


def fp8_conversion(dtype: torch.dtype, capability: int) -> str:
    """How the kernel makes 16-bit operands of the weights: "no", "bits" or "native"."""
    if dtype != torch.float8_e4m3fn:
        return "no"
    return "native" if capability >= FIRST_WITH_FLOAT8 else "bits"


def check_weights(dtype: torch.dtype) -> None:
    """Raises UnsupportedError for weights that the kernel cannot multiply."""
    if dtype == torch.float32:
        raise UnsupportedError(
            "paged_fused_moe has no float32 experts; run with dtype float16 or bfloat16 (the reference in plain torch, "
            "kernels/reference_paged_moe.py, has them)"
        )


def check_dtype(dtype: torch.dtype, capability: int) -> None:
    """Raises UnsupportedError for bfloat16 on a chip that can't multiply it."""
    if dtype == torch.bfloat16 and capability < FIRST_WITH_BFLOAT16:
        raise UnsupportedError(
            f"paged_fused_moe has no bfloat16 on sm_{capability}; run with dtype float16 "
            "(weights/float16_cast.py refuses those that overflow)"
        )


def check_inputs(hidden: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, shape: ExpertShape) -> None:
    """Raises ValueError for tensors that do not fit together or the experts."""
    if hidden.dim() != 2 or hidden.shape[1] != shape.hidden_size:
        raise ValueError(f"hidden must be [tokens, {shape.hidden_size}], got {_show(hidden)}")
    dtypes = (torch.float16, torch.bfloat16) if shape.dtype == torch.float8_e4m3fn else (shape.dtype,)
    if hidden.dtype not in dtypes:
        allowed = " or ".join(map(str, dtypes))
        raise ValueError(f"hidden must be {allowed} for {shape.dtype} experts, not {hidden.dtype}")
    row_step_bytes = hidden.stride(0) * hidden.element_size() if hidden.shape[0] > 1 else 0
    is_aligned = row_step_bytes % ROW_ALIGNMENT_BYTES == 0 and hidden.data_ptr() % ROW_ALIGNMENT_BYTES == 0
    if hidden.numel() and not (hidden.stride(1) == 1 and is_aligned):
        raise ValueError(
            f"hidden: a token's elements must be adjacent and begin at {ROW_ALIGNMENT_BYTES} bytes, got {_show(hidden)}"
        )
    num_tokens = hidden.shape[0]
    if topk_ids.dim() != 2 or topk_ids.shape[0] != num_tokens or topk_ids.shape[1] < 1 or topk_ids.is_floating_point():
        raise ValueError(f"topk_ids must be integers [{num_tokens}, top_k], got {_show(topk_ids)}")
    if topk_ids.numel() > MAX_CHOICES:
        raise ValueError(f"topk_ids: {topk_ids.numel()} choices are over {MAX_CHOICES} in one call; divide the tokens")
    if topk_weights.shape != topk_ids.shape:
        raise ValueError(f"topk_weights must be {list(topk_ids.shape)}, got {_show(topk_weights)}")
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if tensor.device != hidden.device:
            raise ValueError(f"{name} are on {tensor.device}, hidden is on {hidden.device}")


def _only(experts: Collection[int], topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """topk_ids with -1 for all other experts."""
    is_wanted = torch.zeros(num_experts, dtype=torch.bool)
    is_wanted[list(experts)] = True
    # From pageable memory on purpose: the copy has read it when it returns, and nothing waits for the device.
    is_wanted = is_wanted.to(topk_ids.device, non_blocking=True)
    return torch.where(is_wanted[topk_ids.clamp(min=0).long()] & (topk_ids >= 0), topk_ids, -1)


def _triton_kernels() -> ModuleType:
    try:
        from vllm_moe_lightning.kernels import paged_moe
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise UnsupportedError(
            "paged_fused_moe needs triton, which comes with a CUDA build of torch: install vllm-moe-lightning[cuda], "
            "or vllm-moe-lightning[triton] beside the torch that you have"
        ) from error
    return paged_moe


def _is_interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def _capability_of(device: torch.device, interpreted: bool) -> int:
    if interpreted:
        return INTERPRETED_CAPABILITY
    if device.type != "cuda":
        raise UnsupportedError(
            f"paged_fused_moe runs on a CUDA device, not on {device}; kernels/reference_paged_moe.py does the same in "
            "plain torch"
        )
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _show(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}, strides {list(tensor.stride())}"
