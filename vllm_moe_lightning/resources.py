"""What can be busy: the names of the resources, for plans, traces, metrics and logs alike.

JSON, metrics and options have the values (`h2d`), people read the labels (`H2D link`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Resource(StrEnum):
    """What a task keeps busy. One task at a time on each; tasks of one resource run in the order of the schedule."""

    GPU = "gpu"
    CPU = "cpu"
    D2H = "d2h"
    H2D = "h2d"


class HrmResource(StrEnum):
    """What can bound a sweep in the cost model: what tasks run on, and what they share."""

    GPU = "gpu"
    CPU = "cpu"
    H2D = "h2d"
    D2H = "d2h"
    HOST_MEMORY = "host_memory"
    """The bus that CPU attention and both directions of the link share."""
    DISK = "disk"


LABELS: Mapping[str, str] = MappingProxyType(
    {
        HrmResource.GPU: "device compute",
        HrmResource.CPU: "CPU attention",
        HrmResource.H2D: "H2D link",
        HrmResource.D2H: "D2H link",
        HrmResource.HOST_MEMORY: "host memory",
        HrmResource.DISK: "disk",
    }
)
"""By the value of a Resource or HrmResource."""

EXPERTS_ON_CPU_LABEL = "CPU attention and experts"


def label_of(resource: Resource | HrmResource, *, experts_on_cpu: bool = False) -> str:
    """For people; `experts_on_cpu`: where the CPU computes experts too."""
    return EXPERTS_ON_CPU_LABEL if experts_on_cpu and resource == Resource.CPU else LABELS[resource]


STREAM_OF: Mapping[Resource, str] = MappingProxyType(
    {Resource.GPU: "compute", Resource.CPU: "cpu", Resource.H2D: "h2d", Resource.D2H: "d2h"}
)
"""The device's stream on which a resource's tasks run."""
RESOURCE_OF: Mapping[str, Resource] = MappingProxyType({stream: resource for resource, stream in STREAM_OF.items()})
