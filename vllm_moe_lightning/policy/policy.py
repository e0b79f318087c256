"""The policy in force: how a step is split, what stays on the device, how large a page is.

Turns the values of the configuration, the user's or the planner's, into numbers that fit the model at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from vllm_moe_lightning.config import MoeLightningConfig, ScheduleName

MIB = 1 << 20
MIN_AUTO_PAGE_BYTES = 1 * MIB  # below this the fixed cost of a transfer shows
MAX_AUTO_PAGE_BYTES = 64 * MIB  # above this a hidden state waits too long behind a page
DEFAULT_NUM_MICRO_BATCHES = 4  # where neither the user nor the planner says
NUM_SLOTS = 2  # a double buffer: one layer computes while the next arrives


@dataclass(frozen=True)
class Policy:
    """Everything the engine needs to know about the plan."""

    schedule: ScheduleName
    num_micro_batches: int
    lookahead: int
    resident_layers: tuple[int, ...]
    """Indices of the MoE layers (counted among MoE layers) whose experts stay on the device."""
    streamed_layers: tuple[int, ...]
    page_bytes: int
    num_slots: int = NUM_SLOTS
    attention_on_device: bool = False
    """By vLLM's own backend, inside of the model's forward: no tasks of ours, one micro-batch."""

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def fixed_policy(config: MoeLightningConfig, layer_bytes: Sequence[int]) -> Policy:
    """Policy from configured values. `layer_bytes`: pageable expert bytes of each MoE layer, in execution order.

    Raises ValueError where a value does not fit the model.
    """
    num_layers = len(layer_bytes)
    num_resident = config.num_resident_layers or 0
    if num_resident > num_layers:
        raise ValueError(
            f"moe_lightning.num_resident_layers: {num_resident} is more than the model's "
            f"{num_layers} MoE layers; give 0..{num_layers}"
        )
    on_device = config.attention == "device"
    resident = evenly_spread(num_resident, num_layers)
    streamed = tuple(layer for layer in range(num_layers) if layer not in resident)
    return Policy(
        schedule=config.schedule,
        num_micro_batches=1 if on_device else config.num_micro_batches or DEFAULT_NUM_MICRO_BATCHES,
        lookahead=config.lookahead,
        resident_layers=resident,
        streamed_layers=streamed,
        page_bytes=page_bytes_for(config, max((layer_bytes[layer] for layer in streamed), default=0)),
        attention_on_device=on_device,
    )


def evenly_spread(count: int, num_layers: int) -> tuple[int, ...]:
    """`count` layer indices as far apart as they go, so that the link's pauses are short and regular."""
    return tuple((2 * k + 1) * num_layers // (2 * count) for k in range(count))


def page_bytes_for(config: MoeLightningConfig, largest_layer_bytes: int) -> int:
    """Bytes of one page, a multiple of 4 KiB so that page boundaries fit direct I/O and registration."""
    if config.page_mib is not None:
        wanted = int(config.page_mib * MIB)
    else:
        wanted = -(-largest_layer_bytes // (config.num_micro_batches or DEFAULT_NUM_MICRO_BATCHES))
        wanted = min(max(wanted, MIN_AUTO_PAGE_BYTES), MAX_AUTO_PAGE_BYTES)
    return max(4096, -(-wanted // 4096) * 4096)
