"""The policies that the paper's search chose, and what our paper mode makes of the same inputs.

A run's free host memory is not recorded in the paper, only that of one README example; where another value is needed
to reach the run's policy, it is named here, so that a reader can judge how plausible it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_moe_lightning.paper_model import (
    DBRX,
    MIXTRAL_8X7B,
    MIXTRAL_8X22B,
    PaperHardware,
    PaperModel,
    artifact_l4,
    artifact_t4,
    best_paper_plan,
)


@dataclass(frozen=True)
class PolicyCheck:
    setting: str
    model: PaperModel
    hardware: PaperHardware
    prompt_len: int
    gen_len: int
    expected: tuple[int, int]
    """(micro-batch size, number of micro-batches) of the paper's run."""
    deviation: str = ""
    """Why the standard inputs don't give it; empty where they do."""

    def planned(self) -> tuple[int, int] | None:
        plan = best_paper_plan(self.model, self.hardware, self.prompt_len, self.gen_len)
        return (plan.micro_batch_size, plan.num_micro_batches) if plan else None


_GENS = (32, 64, 128, 256)
_LARGE_HOST_GIB = 400


def _each(
    setting: str,
    model: PaperModel,
    hardware: PaperHardware,
    prompt_len: int,
    expected: tuple[tuple[int, int], ...],
    gens: tuple[int, ...] = _GENS,
) -> list[PolicyCheck]:
    return [
        PolicyCheck(setting, model, hardware, prompt_len, gen, policy)
        for gen, policy in zip(gens, expected, strict=True)
    ]


_TWO_T4 = artifact_t4(_LARGE_HOST_GIB, tp_size=2)
_FOUR_T4 = artifact_t4(_LARGE_HOST_GIB, tp_size=4)

REPRODUCED = [
    *_each("S1 padded", MIXTRAL_8X7B, artifact_t4(), 418, ((36, 14),) * 4),
    *_each("S1", MIXTRAL_8X7B, artifact_t4(), 77, ((164, 19), (164, 14)), (64, 128)),
    *_each("S2 padded", MIXTRAL_8X7B, artifact_l4(padded=True), 418, ((68, 16), (68, 15), (68, 13), (68, 11))),
    *_each("S2", MIXTRAL_8X7B, artifact_l4(), 77, ((324, 14), (228, 16), (164, 16)), (32, 64, 128)),
    *_each("S2 synthetic", MIXTRAL_8X7B, artifact_l4(), 256, ((100, 15),), (50,)),
    *_each("S1 summarization", MIXTRAL_8X7B, artifact_t4(), 1984, ((4, 19),), (64,)),
    *_each("S6", MIXTRAL_8X22B, _TWO_T4, 417, ((36, 7),) * 4),
    *_each("S7", MIXTRAL_8X22B, _FOUR_T4, 417, ((36, 18), (36, 17), (36, 15), (36, 13))),
    *_each("S8", DBRX, _TWO_T4, 77, ((68, 39),), (32,)),
    *_each("S9", DBRX, _FOUR_T4, 77, ((68, 64), (68, 53)), (32, 64)),
]
"""With one free host memory for all runs of a machine: 184.29 GiB, which a printed limit implies, and 400 GiB."""

EXPLAINED = [
    PolicyCheck("S1", MIXTRAL_8X7B, artifact_t4(167), 77, 32, (164, 19), "would need 166-168 GiB free, not 184.29"),
    PolicyCheck("S1", MIXTRAL_8X7B, artifact_t4(188), 77, 256, (100, 15), "would need 186-190 GiB free, not 184.29"),
    PolicyCheck("S2", MIXTRAL_8X7B, artifact_l4(182), 77, 256, (132, 12), "would need 180-183 GiB free, not 184.29"),
    PolicyCheck("S8", DBRX, artifact_t4(403, tp_size=2), 77, 128, (68, 33), "would need 402-404 GiB free, not 400"),
    PolicyCheck(
        "S8", DBRX, _TWO_T4, 77, 256, (68, 20), "1360 = 68 x 20 planned; the log counts 1344 completed requests"
    ),
    PolicyCheck(
        "S9", DBRX, artifact_t4(389, tp_size=4), 77, 128, (68, 36),
        "would need 388-390 GiB free, not 400; the log counts 2440 completed of 2448 planned",
    ),
    PolicyCheck("S9", DBRX, artifact_t4(402, tp_size=4), 77, 256, (36, 51), "would need 402 GiB free, not 400"),
]  # fmt: skip
"""Reached only with a free host memory scanned for, run by run, until the policy came out (or, for S8 at 256, up to the
requests that the log misses): possible, since the artifact takes what is free at its start, but not evidence."""

FLAT_OPTIMUM = [
    PolicyCheck(
        "S8", DBRX, _TWO_T4, 77, 64, (68, 39),
        "the GPU bounds from 38 micro-batches on, so 38 and 39 are equally fast and the solver's last digit chooses",
    ),
    PolicyCheck(
        "S1 synthetic", MIXTRAL_8X7B, artifact_t4(), 256, 50, (36, 26),
        "the GPU bounds from 19 micro-batches on, so all larger counts are equally fast up to the memory's end",
    ),
]  # fmt: skip
"""The run's policy is as fast as ours to the last digits, in the artifact's own model."""

UNEXPLAINED = [
    PolicyCheck(
        "S2 summarization", MIXTRAL_8X7B, artifact_l4(), 1984, 64, (8, 36),
        "8 is not on the artifact's grid of micro-batch sizes: a line of its code sets it by hand, commented out",
    )
]  # fmt: skip
