"""Writes our random Mixtral-shaped checkpoint as a GGUF file for llama.cpp: same weights, bfloat16, no tokenizer.

Mixtral is llama.cpp's architecture `llama` with experts. Its rotary embedding pairs neighbouring rows, transformers'
the two halves of a head, hence the permutation of Q and K.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.job_checkpoint import CheckpointShape

NORM_EPSILON, ROPE_BASE = 1e-5, 10_000.0  # as in CheckpointShape.config


def permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """weight: [num_heads * head_dim, hidden], rows of a head as (half, position) -> as (position, half)."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def write_gguf(checkpoint: Path, shape: CheckpointShape, path: Path, max_positions: int) -> None:
    """Needs the package `gguf`, from wherever the process finds it."""
    import gguf

    tensors = load_file(checkpoint / "model.safetensors")
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(max_positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(NORM_EPSILON)
    writer.add_expert_count(shape.num_experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")

    def add(name: str, tensor: torch.Tensor) -> None:
        if tensor.dim() == 1:  # llama.cpp keeps norms in float32
            writer.add_tensor(name, tensor.float().numpy())
            return
        raw = tensor.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, np.ascontiguousarray(raw), raw_dtype=gguf.GGMLQuantizationType.BF16)

    add("token_embd.weight", tensors["model.embed_tokens.weight"])
    add("output_norm.weight", tensors["model.norm.weight"])
    add("output.weight", tensors["lm_head.weight"])
    for layer in range(shape.num_layers):
        theirs, ours = f"blk.{layer}", f"model.layers.{layer}"
        attention, moe = f"{ours}.self_attn", f"{ours}.block_sparse_moe"
        add(f"{theirs}.attn_norm.weight", tensors[f"{ours}.input_layernorm.weight"])
        add(f"{theirs}.ffn_norm.weight", tensors[f"{ours}.post_attention_layernorm.weight"])
        add(f"{theirs}.attn_q.weight", permuted(tensors[f"{attention}.q_proj.weight"], shape.num_heads))
        add(f"{theirs}.attn_k.weight", permuted(tensors[f"{attention}.k_proj.weight"], shape.num_kv_heads))
        add(f"{theirs}.attn_v.weight", tensors[f"{attention}.v_proj.weight"])
        add(f"{theirs}.attn_output.weight", tensors[f"{attention}.o_proj.weight"])
        writer.add_tensor(f"{theirs}.ffn_gate_inp.weight", tensors[f"{moe}.gate.weight"].float().numpy())
        for name, part in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
            experts = [tensors[f"{moe}.experts.{expert}.{part}.weight"] for expert in range(shape.num_experts)]
            add(f"{theirs}.ffn_{name}_exps.weight", torch.stack(experts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
