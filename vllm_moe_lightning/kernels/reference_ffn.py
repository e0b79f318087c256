"""The routed experts in plain torch, without tricks: what the kernels are compared with, no more.

Letters in shapes: T tokens, K choices of each (top_k), E experts, H hidden size, I intermediate size.
"""

import math

import torch


def expert_ffn(
    hidden: torch.Tensor,  # [T, H]
    w13: torch.Tensor,  # [E, 2 I, H]: w1's rows (gate), then w3's (up)
    w2: torch.Tensor,  # [E, H, I]
    topk_ids: torch.Tensor,  # [T, K]; negative: left out
    topk_weights: torch.Tensor,  # [T, K]
    *,
    w13_bias: torch.Tensor | None = None,  # [E, 2 I]
    w2_bias: torch.Tensor | None = None,  # [E, H]
    gate_alpha: float = 1.0,
    clamp_limit: float = math.inf,
    up_offset: float = 0.0,
    interleaved: bool = False,  # w13's rows are gate, up, gate, up, ...
    dtype: torch.dtype = torch.float32,  # of the arithmetic
) -> torch.Tensor:
    """The output [T, H] in `dtype`: sum over k of topk_weights * w2 (act(w1 x) * (w3 x))."""
    output = torch.zeros(hidden.shape, dtype=dtype)
    for expert in topk_ids.unique().tolist():
        if expert < 0:
            continue
        tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
        product = hidden[tokens].to(dtype) @ w13[expert].to(dtype).T
        if w13_bias is not None:
            product += w13_bias[expert].to(dtype)
        if interleaved:
            gate, up = product[:, 0::2], product[:, 1::2]
        else:
            gate, up = product.chunk(2, dim=1)
        gate, up = gate.clamp(max=clamp_limit), up.clamp(-clamp_limit, clamp_limit)
        inner = gate * torch.sigmoid(gate_alpha * gate) * (up + up_offset)
        result = inner @ w2[expert].to(dtype).T
        if w2_bias is not None:
            result += w2_bias[expert].to(dtype)
        output.index_add_(0, tokens, result * topk_weights[tokens, choices].to(dtype)[:, None])
    return output
