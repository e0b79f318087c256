"""Our CPU kernels against float64, on this machine's instruction sets: rows for the head of a benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vllm_moe_lightning.kernels import reference_ffn
from vllm_moe_lightning.kernels.attention import AttentionPool, AttentionTask, available_isas, resolve_isa
from vllm_moe_lightning.kernels.expert_ffn import ExpertFfn

# Relative RMS. Outputs are rounded to their type, and the experts' inner products too.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
NUM_SEQS, CONTEXT_LEN, BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 5, 150, 16, 8, 2, 128
NUM_EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, NUM_TOKENS = 8, 256, 448, 2, 37


def kernel_checks() -> list[dict[str, Any]]:
    """Each kernel, element type and instruction set once."""
    with AttentionPool(2) as pool:
        return [*_attention_rows(pool), *_expert_rows(pool)]


def _attention_rows(pool: AttentionPool) -> Iterator[dict[str, Any]]:
    for dtype in TOLERANCE:
        for isa in _isas(dtype):
            error = _attention_error(dtype, isa, pool)
            yield _row("CPU attention", dtype, isa, error)


def _expert_rows(pool: AttentionPool) -> Iterator[dict[str, Any]]:
    for dtype in TOLERANCE:
        for isa in _isas(dtype):
            yield _row("CPU experts", dtype, isa, _expert_error(dtype, isa, pool))


def _isas(dtype: torch.dtype) -> list[str]:
    """Those that differ for this type."""
    return [isa for isa in available_isas() if resolve_isa(isa, dtype) == isa]


def _row(kernel: str, dtype: torch.dtype, isa: str, error: float) -> dict[str, Any]:
    limit = TOLERANCE[dtype]
    return {"check": f"{kernel} {dtype} {isa}", "error": error, "limit": limit, "ok": error <= limit}


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the difference over that of what was expected."""
    expected = expected.double()
    return float((got.double() - expected).norm() / expected.norm())


def token_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative RMS of a token's hidden states [T, H]: in float32 of the worst token, in 16 bits of the one at three
    quarters. Rounding to 16 bits moves some tokens from one expert to another, and says nothing about the others."""
    expected = expected.double()
    errors = (got.double() - expected).norm(dim=1) / expected.norm(dim=1)
    return float(errors.max() if got.dtype == torch.float32 else errors.quantile(0.75))


def _attention_error(dtype: torch.dtype, isa: str, pool: AttentionPool) -> float:
    rng = torch.Generator().manual_seed(3)
    blocks_per_seq = -(-CONTEXT_LEN // BLOCK_SIZE)
    num_blocks = NUM_SEQS * blocks_per_seq
    blocks = torch.randn(num_blocks, NUM_KV_HEADS, 2, BLOCK_SIZE, HEAD_DIM, generator=rng).to(dtype)
    table = torch.randperm(num_blocks, generator=rng).to(torch.int32).view(NUM_SEQS, blocks_per_seq)
    seq_lens = torch.tensor([1, 17, 64, 149, CONTEXT_LEN], dtype=torch.int32)
    query = torch.randn(NUM_SEQS, NUM_HEADS, HEAD_DIM, generator=rng).to(dtype)
    key, value = torch.randn(2, NUM_SEQS, NUM_KV_HEADS, HEAD_DIM, generator=rng).to(dtype).unbind()
    last = seq_lens.long() - 1
    slots = table[torch.arange(NUM_SEQS), last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE
    output = torch.empty_like(query)
    AttentionTask(
        blocks,
        query=query,
        output=output,
        block_table=table,
        query_start=torch.arange(NUM_SEQS + 1, dtype=torch.int32),
        seq_lens=seq_lens,
        key=key,
        value=value,
        slot_mapping=slots,
        scale=HEAD_DIM**-0.5,
        isa=isa,
        pool=pool,
    ).run()
    return relative_error(output, attention_float64(query, blocks, table, seq_lens))


def attention_float64(
    query: torch.Tensor,  # [S, Hq, D], one token of each sequence
    blocks: torch.Tensor,  # [N, Hk, 2 (K, V), B, D], the new tokens included
    table: torch.Tensor,  # [S, blocks]
    seq_lens: torch.Tensor,  # [S]
) -> torch.Tensor:
    """[S, Hq, D] in float64."""
    group, outputs = query.shape[1] // blocks.shape[1], []
    for row, length in enumerate(seq_lens.tolist()):
        context = blocks[table[row].long()].double().transpose(0, 1)  # [Hk, blocks, 2, B, D]
        key, value = (context[:, :, half].flatten(1, 2)[:, :length].repeat_interleave(group, 0) for half in (0, 1))
        weights = torch.softmax(torch.einsum("hd,hkd->hk", query[row].double(), key) * query.shape[2] ** -0.5, dim=-1)
        outputs.append(torch.einsum("hk,hkd->hd", weights, value))
    return torch.stack(outputs)


def _expert_error(dtype: torch.dtype, isa: str, pool: AttentionPool) -> float:
    rng = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).mul_(shape[-1] ** -0.5).to(dtype)

    w13, w2 = draw(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN), draw(NUM_EXPERTS, HIDDEN, INTERMEDIATE)
    hidden = draw(NUM_TOKENS, HIDDEN) * HIDDEN**0.5
    ids = torch.stack([torch.randperm(NUM_EXPERTS, generator=rng)[:TOP_K] for _ in range(NUM_TOKENS)])
    weights = torch.rand(NUM_TOKENS, TOP_K, generator=rng)
    output = ExpertFfn(w13, w2, isa=isa, max_streamed_tokens=NUM_TOKENS).run(hidden, ids, weights, pool=pool)
    return relative_error(output, reference_ffn.expert_ffn(hidden, w13, w2, ids, weights, dtype=torch.float64))
