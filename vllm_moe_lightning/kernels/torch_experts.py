"""The routed experts of a layer by torch's matrix products, expert by expert: cuBLAS on a GPU.

For chips before sm_80: Triton has had no tensor-core code for them since its version 3.3 (its pull request 5066), so
that every fused kernel written in it multiplies at a tenth of the chip's speed there. Costs what they save: the
launching thread has to know how many tokens each expert has, and waits for the device once a call.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


def torch_experts(
    hidden: torch.Tensor,  # [T, H]
    topk_weights: torch.Tensor,  # [T, K]
    topk_ids: torch.Tensor,  # [T, K]
    w13: torch.Tensor,  # [E, 2 I, H]: w1's rows (gate), then w3's (up)
    w2: torch.Tensor,  # [E, H, I]
) -> torch.Tensor:
    """sum over k of topk_weights * w2 (silu(w1 x) * (w3 x)), [T, H], in hidden's dtype: products rounded to it, and
    summed in float32. Takes T K (2 H + I) elements of memory while it runs, and 2 I more for each token of the expert
    with most. Letters: T tokens, K choices of each, E experts, H hidden size, I intermediate size."""
    num_tokens, top_k = topk_ids.shape
    order = topk_ids.flatten().argsort(stable=True)  # choices by expert
    ends = torch.searchsorted(topk_ids.flatten()[order].long(), torch.arange(1, len(w13) + 1, device=hidden.device))
    rows, scales = hidden[order // top_k], topk_weights.flatten()[order, None]
    begin = 0
    for expert, end in enumerate(ends.tolist()):  # where the launching thread waits
        if begin < end:
            part = rows[begin:end]
            gate, up = (part @ w13[expert].T).chunk(2, dim=1)
            torch.mm(F.silu(gate).mul_(up), w2[expert].T, out=part)  # the input is not needed any more
            part.mul_(scales[begin:end])
        begin = end
    by_choice = torch.empty_like(rows)
    by_choice[order] = rows
    return by_choice.view(num_tokens, top_k, -1).sum(dim=1)
