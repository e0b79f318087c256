"""The Triton kernels of paged_fused_moe: gate and up projection, down projection, sum over a token's choices.

An expert's rows are found through a page table of device addresses. A row lies in one page, so the table is asked once
per row of an N-tile, before the loop over K; inside the loop a weight's address is as plain as in any GEMM, and loads
stay 16 bytes wide. Nothing is decided here: sizes, tiles and checks come from kernels/paged_moe_launch.py.

Both GEMMs are bound by reading weights from device memory until an expert has about 100 tokens. Letters in shapes: T
tokens, K choices of each (top_k), C = T K choices, E experts, H hidden size, I intermediate size.
"""

import torch
import triton
import triton.language as tl

# As what the kernels load the weights; float8 as bytes, which every chip can.
WEIGHT_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float8_e4m3fn: tl.uint8}


@triton.jit
def _tile_and_column(num_columns, GROUP_M: tl.constexpr):
    """Which M-tile and which N-tile this program has: GROUP_M tiles share an N-tile's weights in the L2 cache."""
    program = tl.program_id(0)
    num_tiles = tl.num_programs(0) // num_columns
    group = program // (GROUP_M * num_columns)
    first_tile = group * GROUP_M
    group_size = tl.minimum(num_tiles - first_tile, GROUP_M)
    place = program % (GROUP_M * num_columns)
    return first_tile + place % group_size, place // group_size


@triton.jit
def _weight_pointers(pages, first_row, rows, rows_per_page, row_bytes, k, WEIGHT: tl.constexpr):
    """Pointers [k, rows]. int64 from here on, since a row's address is one."""
    position = first_row + rows
    page = position // rows_per_page
    address = tl.load(pages + page) + (position - page * rows_per_page).to(tl.int64) * row_bytes
    pointers = address.to(tl.pointer_type(WEIGHT))[None, :] + k[:, None]
    # The compiler knows nothing of an address that was loaded; the page table's checks make this true.
    return tl.multiple_of(pointers, [16, 1])


@triton.jit
def _as_operand(weights, OPERAND: tl.constexpr, FP8: tl.constexpr):
    """FP8: "no", "bits" (chips before sm_89 can't convert) or "native"; exact in each case."""
    if FP8 == "bits":
        # e4m3 has float16's layout but for the exponent's bias, 7 instead of 15: hence the 2**8.
        magnitude = (weights & 0x7F).to(tl.uint16)
        bits = ((weights & 0x80).to(tl.uint16) << 8) | (magnitude << 7)
        value = bits.to(tl.float16, bitcast=True) * 256.0
        return tl.where(magnitude == 0x7F, float("nan"), value).to(OPERAND)
    elif FP8 == "native":
        return weights.to(tl.float8e4nv, bitcast=True).to(OPERAND)
    else:
        return weights


@triton.jit
def _dot(a, weights, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # Triton 3.9's interpreter multiplies the bits of bfloat16 as if they were integers
        return tl.dot(a.to(tl.float32), weights.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, weights)


@triton.jit(do_not_specialize=["num_choices", "top_k"])
def gate_up_kernel(
    hidden,  # [T, H]
    inner,  # [C, I], written: silu(gate) * up
    choices,  # [num_tiles * BLOCK_M] int32: the choices of each tile, num_choices where there is none
    tile_experts,  # [num_tiles] int32; negative: nothing to do
    num_tiles,  # [1] int32: tiles that are in use, of those that the grid has
    pages,  # [num_pages] int64: addresses of w13's pages
    first_rows,  # [E] int32: an expert's first row, counted over all pages
    scales,  # [E, row groups, column groups] float32, or None
    hidden_stride,
    num_choices,
    top_k,
    hidden_size,
    intermediate_size,
    rows_per_page,
    row_bytes,
    scale_expert_stride,
    scale_row_stride,
    rows_per_scale,
    columns_per_scale,
    WEIGHT: tl.constexpr,
    FP8: tl.constexpr,
    SCALED: tl.constexpr,
    SCALED_BY_COLUMN: tl.constexpr,
    ONE_PER_TILE: tl.constexpr,  # tile i has choice i alone, so nothing was sorted
    INTERPRETED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tile, column = _tile_and_column(tl.cdiv(intermediate_size, BLOCK_N), GROUP_M)
    if ONE_PER_TILE:
        choice = tl.where(tl.arange(0, BLOCK_M) == 0, tile, num_choices)
    else:
        if tile >= tl.load(num_tiles):
            return
        choice = tl.load(choices + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    expert = tl.load(tile_experts + tile)
    if expert < 0:
        return
    is_choice = choice < num_choices
    k = tl.arange(0, BLOCK_K)
    token = (choice // top_k).to(tl.int64)
    hidden_pointers = hidden + token[:, None] * hidden_stride + k[None, :]

    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    gate_rows = tl.minimum(n, intermediate_size - 1)  # past the end: the last row once more, which nobody stores
    up_rows = gate_rows + intermediate_size
    first_row = tl.load(first_rows + expert)
    gate_pointers = _weight_pointers(pages, first_row, gate_rows, rows_per_page, row_bytes, k, WEIGHT)
    up_pointers = _weight_pointers(pages, first_row, up_rows, rows_per_page, row_bytes, k, WEIGHT)
    if SCALED:
        expert_scales = scales + expert.to(tl.int64) * scale_expert_stride
        gate_scales = expert_scales + (gate_rows // rows_per_scale) * scale_row_stride
        up_scales = expert_scales + (up_rows // rows_per_scale) * scale_row_stride

    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k_begin in range(0, hidden_size, BLOCK_K):
        if EVEN_K:
            a = tl.load(hidden_pointers + k_begin, mask=is_choice[:, None], other=0.0)
            gate_weights = tl.load(gate_pointers + k_begin)
            up_weights = tl.load(up_pointers + k_begin)
        else:
            is_inside = k < hidden_size - k_begin
            a = tl.load(hidden_pointers + k_begin, mask=is_choice[:, None] & is_inside[None, :], other=0.0)
            gate_weights = tl.load(gate_pointers + k_begin, mask=is_inside[:, None], other=0)
            up_weights = tl.load(up_pointers + k_begin, mask=is_inside[:, None], other=0)
        gate_part = _dot(a, _as_operand(gate_weights, hidden.dtype.element_ty, FP8), INTERPRETED)
        up_part = _dot(a, _as_operand(up_weights, hidden.dtype.element_ty, FP8), INTERPRETED)
        if SCALED_BY_COLUMN:
            scale_column = k_begin // columns_per_scale
            gate += gate_part * tl.load(gate_scales + scale_column)[None, :]
            up += up_part * tl.load(up_scales + scale_column)[None, :]
        else:
            gate += gate_part
            up += up_part
    if SCALED and not SCALED_BY_COLUMN:
        gate *= tl.load(gate_scales)[None, :]
        up *= tl.load(up_scales)[None, :]

    activated = gate * tl.sigmoid(gate) * up
    inner_pointers = inner + choice.to(tl.int64)[:, None] * intermediate_size + n[None, :]
    is_stored = is_choice[:, None] & (n < intermediate_size)[None, :]
    tl.store(inner_pointers, activated.to(inner.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=["num_choices"])
def down_kernel(
    inner,  # [C, I]
    choice_outputs,  # [C, H] float32, written: the weighted output of each choice
    topk_weights,  # [C] float32
    choices,  # as in gate_up_kernel, as are those that follow
    tile_experts,
    num_tiles,
    pages,  # of w2
    first_rows,
    scales,
    num_choices,
    hidden_size,
    intermediate_size,
    rows_per_page,
    row_bytes,
    scale_expert_stride,
    scale_row_stride,
    rows_per_scale,
    columns_per_scale,
    WEIGHT: tl.constexpr,
    FP8: tl.constexpr,
    SCALED: tl.constexpr,
    SCALED_BY_COLUMN: tl.constexpr,
    ONE_PER_TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tile, column = _tile_and_column(tl.cdiv(hidden_size, BLOCK_N), GROUP_M)
    if ONE_PER_TILE:
        choice = tl.where(tl.arange(0, BLOCK_M) == 0, tile, num_choices)
    else:
        if tile >= tl.load(num_tiles):
            return
        choice = tl.load(choices + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    expert = tl.load(tile_experts + tile)
    if expert < 0:
        return
    is_choice = choice < num_choices
    k = tl.arange(0, BLOCK_K)
    inner_pointers = inner + choice.to(tl.int64)[:, None] * intermediate_size + k[None, :]

    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, hidden_size - 1)
    pointers = _weight_pointers(pages, tl.load(first_rows + expert), rows, rows_per_page, row_bytes, k, WEIGHT)
    if SCALED:
        row_scales = scales + expert.to(tl.int64) * scale_expert_stride + (rows // rows_per_scale) * scale_row_stride

    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k_begin in range(0, intermediate_size, BLOCK_K):
        if EVEN_K:
            a = tl.load(inner_pointers + k_begin, mask=is_choice[:, None], other=0.0)
            weights = tl.load(pointers + k_begin)
        else:
            is_inside = k < intermediate_size - k_begin
            a = tl.load(inner_pointers + k_begin, mask=is_choice[:, None] & is_inside[None, :], other=0.0)
            weights = tl.load(pointers + k_begin, mask=is_inside[:, None], other=0)
        part = _dot(a, _as_operand(weights, inner.dtype.element_ty, FP8), INTERPRETED)
        if SCALED_BY_COLUMN:
            total += part * tl.load(row_scales + k_begin // columns_per_scale)[None, :]
        else:
            total += part
    if SCALED and not SCALED_BY_COLUMN:
        total *= tl.load(row_scales)[None, :]

    total *= tl.load(topk_weights + choice, mask=is_choice, other=0.0)[:, None]
    output_pointers = choice_outputs + choice.to(tl.int64)[:, None] * hidden_size + n[None, :]
    tl.store(output_pointers, total, mask=is_choice[:, None] & (n < hidden_size)[None, :])


@triton.jit
def sum_choices_kernel(
    choice_outputs,  # [C, H] float32
    topk_ids,  # [T, K] int32; the outputs of negative ones were never written and are not read
    output,  # [T, H], written
    output_stride,
    hidden_size,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Always in the order of the choices, so that a result does not depend on which tile was done first."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for index in tl.static_range(TOP_K):
        choice = token * TOP_K + index
        end = tl.where(tl.load(topk_ids + choice) >= 0, hidden_size, 0)
        total += tl.load(choice_outputs + choice * hidden_size + n, mask=n < end, other=0.0)
    tl.store(output + token * output_stride + n, total.to(output.dtype.element_ty), mask=n < hidden_size)
