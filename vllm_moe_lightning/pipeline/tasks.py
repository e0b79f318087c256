"""The vocabulary of a sweep: tasks, and the keys by which they wait for each other.

The schedule lists tasks, the simulator times them, the executor launches them, the tracer prints them: all under
these names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vllm_moe_lightning.resources import Resource


class TaskName(StrEnum):
    SWEEP_START = "sweep_start"  # a mark on the GPU: everything of earlier sweeps is before it
    PRE_ATTENTION = "pre_attention"  # norm, QKV projection, rotary embedding (for layer 0: embedding too)
    QKV_OFFLOAD = "qkv_offload"
    ATTENTION = "attention"
    HIDDEN_LOAD = "hidden_load"  # the attention output comes back to the device
    POST_ATTENTION = "post_attention"  # output projection, norm, router, MoE (after the last layer: final norm too)
    EXPERTS_OFFLOAD = "experts_offload"  # hidden states and routing, where the CPU computes a layer's experts
    EXPERTS = "experts"  # on the CPU
    EXPERTS_LOAD = "experts_load"
    ROUTING_OFFLOAD = "routing_offload"  # which experts the tokens ask for, where a layer's experts are fetched
    EXPERTS_FETCH = "experts_fetch"  # those that are not on the device
    POST_EXPERTS = "post_experts"  # what follows the experts (fetched: with them); post_attention ends with the router
    WEIGHT_PAGE = "weight_page"
    KV_LOAD = "kv_load"  # S4, and prompts with context: the micro-batch's context comes to the device
    DEVICE_ATTENTION = "device_attention"  # S4 only
    KV_APPEND = "kv_append"  # S4 only: new keys and values enter the host cache


@dataclass(frozen=True, slots=True)
class TaskKey:
    """Names one task of a sweep. `index` is the micro-batch, or the page for weight_page."""

    name: TaskName
    layer: int
    index: int

    def __str__(self) -> str:
        return f"{self.name.value}({self.layer},{self.index})"


@dataclass(frozen=True, slots=True)
class Task:
    """One entry of a schedule. `after` are the tasks of *other* resources it waits for: order within a resource
    is the order of the schedule. A key that is not in this sweep was completed or launched in an earlier one."""

    resource: Resource
    key: TaskKey
    after: tuple[TaskKey, ...] = ()
    launched_after: tuple[TaskKey, ...] = ()
    """Tasks that must have been launched by then, whether or not they are done."""


def wait_name(waiter: TaskKey, awaited: TaskKey) -> str:
    """How a kind of wait is named in options, tests and messages: `hidden_load<-attention`."""
    return f"{waiter.name.value}<-{awaited.name.value}"
