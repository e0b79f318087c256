"""What the MoE-Lightning paper and the logs of its artifact measured: throughputs of whole jobs, with their policies.

Figures only; benchmarks/hrm_vs_paper.py says what the model makes of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MachineType = Literal["1xT4", "1xL4", "2xT4", "4xT4"]
System = Literal["moe-lightning", "flexgen", "flexgen-c"]


@dataclass(frozen=True)
class Measurement:
    """One job: prompts of a static batch and all their tokens."""

    setting: str
    machine: MachineType
    model: str
    prompt_len: int
    gen_len: int
    micro_batch_size: int
    num_micro_batches: int
    tokens_per_s: float
    source: str
    system: System = "moe-lightning"
    weights_gpu_ratio: float = 0.0

    @property
    def batch_size(self) -> int:
        return self.micro_batch_size * self.num_micro_batches


_GENS = (32, 64, 128, 256)
# Share of the weights on the GPU, as FlexGen's own search chose it; for 2xT4 not known.
_FLEXGEN_T4 = (0.070, 0.081, 0.086, 0.086)
_FLEXGEN_L4 = (0.128, 0.128, 0.128, 0.149)


def _series(
    setting: str,
    machine: MachineType,
    model: str,
    prompt_len: int,
    policies: tuple[tuple[int, int], ...],
    tokens_per_s: tuple[float, ...],
    source: str,
    system: System = "moe-lightning",
    weights_gpu_ratios: tuple[float, ...] = (0.0,) * 4,
) -> list[Measurement]:
    """One row per generation length 32, 64, 128, 256."""
    columns = zip(_GENS, policies, tokens_per_s, weights_gpu_ratios, strict=True)
    return [
        Measurement(setting, machine, model, prompt_len, gen, mu, n, measured, source, system, ratio)
        for gen, (mu, n), measured, ratio in columns
    ]


_LIGHTNING_SERIES = [
    *_series("S1 padded", "1xT4", "mixtral-8x7b", 418, ((36, 14),) * 4, (15.6, 24.0, 30.1, 33.9), "Fig. 7"),
    *_series(
        "S1", "1xT4", "mixtral-8x7b", 77, ((164, 19), (164, 19), (164, 14), (100, 15)),
        (63.0, 101.3, 97.73, 96.87), "Fig. 7",
    ),
    *_series(
        "S2 padded", "1xL4", "mixtral-8x7b", 418, ((68, 16), (68, 15), (68, 13), (68, 11)),
        (53.7, 67.4, 79.0, 78.6), "Fig. 7",
    ),
    *_series(
        "S2", "1xL4", "mixtral-8x7b", 77, ((324, 14), (228, 16), (164, 16), (132, 12)),
        (203.0, 294.5, 217.5, 167.9), "Fig. 7",
    ),
    *_series(
        "S2", "1xL4", "mixtral-8x7b", 77, ((324, 14), (228, 16), (164, 16), (132, 12)),
        (203.7, 289.0, 286.0, 181.6), "artifact, second log",
    ),
    *_series("S6", "2xT4", "mixtral-8x22b", 417, ((36, 7),) * 4, (5.38, 7.33, 7.75, 9.13), "Fig. 7"),
    *_series(
        "S7", "4xT4", "mixtral-8x22b", 417, ((36, 18), (36, 17), (36, 15), (36, 13)),
        (14.9, 22.4, 26.2, 25.8), "Fig. 7",
    ),
    *_series(
        "S8", "2xT4", "dbrx", 77, ((68, 39), (68, 39), (68, 33), (68, 20)),
        (34.04, 36.24, 29.67, 25.86), "Fig. 8",
    ),
    *_series(
        "S9", "4xT4", "dbrx", 77, ((68, 64), (68, 53), (68, 36), (36, 51)),
        (71.54, 83.58, 82.98, 59.45), "Fig. 8",
    ),
]  # fmt: skip
LIGHTNING = [
    *_LIGHTNING_SERIES,
    Measurement("S1", "1xT4", "mixtral-8x7b", 77, 128, 164, 14, 108.62, "artifact, older plot"),
    Measurement("S1 synthetic", "1xT4", "mixtral-8x7b", 256, 50, 36, 26, 26.349, "Table 4"),
    Measurement("S2 synthetic", "1xL4", "mixtral-8x7b", 256, 50, 100, 15, 105.29, "Table 4"),
    Measurement("S1 summarization", "1xT4", "mixtral-8x7b", 1984, 64, 4, 19, 4.52, "Table 4"),
    Measurement("S2 summarization", "1xL4", "mixtral-8x7b", 1984, 64, 8, 36, 12.393, "Table 4"),
]


def _flexgen(system: System, column: int) -> list[Measurement]:
    """FlexGen pads all prompts. Its policies are known for Mixtral-8x7B and, in part, for 2xT4."""
    series: list[tuple[str, MachineType, str, int, tuple[tuple[int, int], ...], tuple[float, ...], tuple[float, ...]]]
    series = [
        ("S1 padded", "1xT4", "mixtral-8x7b", 418, ((32, 40), (16, 78), (8, 139), (8, 113)),
         ((12.14, 12.32, 9.50, 9.63), (9.8, 9.4, 7.2, 6.8))[column], _FLEXGEN_T4),
        ("S2 padded", "1xL4", "mixtral-8x7b", 418, ((64, 21), (64, 20), (64, 18), (32, 30)),
         ((29.2, 34.9, 37.2, 28.8), (17.5, 18.9, 20.0, 15.9))[column], _FLEXGEN_L4),
        ("S6", "2xT4", "mixtral-8x22b", 417, ((16, 46), (4, 182), (8, 80), (2, 261)),
         ((4.25, 4.40, 4.77, 3.66), (2.70, 2.86, 3.44, 3.09))[column], (0.0,) * 4),
    ]  # fmt: skip
    rows = [
        row
        for setting, machine, model, prompt, policies, measured, ratios in series
        for row in _series(setting, machine, model, prompt, policies, measured, "Fig. 7", system, ratios)
    ]
    table_4: tuple[tuple[str, MachineType, int, int, int, int, tuple[float, float]], ...] = (
        ("S1 synthetic", "1xT4", 256, 50, 32, 61, (22.691, 16.903)),
        ("S2 synthetic", "1xL4", 256, 50, 64, 33, (50.138, 20.015)),
        ("S1 summarization", "1xT4", 1984, 64, 3, 92, (3.868, 2.614)),
        ("S2 summarization", "1xL4", 1984, 64, 8, 36, (7.14, 4.307)),
    )
    for setting, machine, prompt, gen, mu, n, both in table_4:
        rows.append(Measurement(setting, machine, "mixtral-8x7b", prompt, gen, mu, n, both[column], "Table 4", system))
    return rows


FLEXGEN = [
    *_flexgen("flexgen", 0),
    *_flexgen("flexgen-c", 1),
    Measurement("S1 padded", "1xT4", "mixtral-8x7b", 418, 128, 36, 14, 16.816, "Table 5", "flexgen"),
    Measurement("S1 padded", "1xT4", "mixtral-8x7b", 418, 128, 36, 31, 20.654, "Table 5", "flexgen"),
]
FLEXGEN_PROFILED_H2D_BYTES_PER_S: dict[MachineType, float] = {"1xT4": 5.43e9, "1xL4": 5.44e9, "2xT4": 4.78e9}
"""The link speed that FlexGen's own profiler found, in the artifact's logs."""
