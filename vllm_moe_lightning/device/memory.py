"""Device memory against a budget: what is in use, under which name, and the error when it does not fit."""

from vllm_moe_lightning.errors import DeviceMemoryError

CURE = "keep fewer layers resident, allow fewer tokens in a step (--max-num-batched-tokens), or raise the budget"


POISON_BYTE = 0xFF  # 0xFFFF and 0xFFFFFFFF are NaN in bfloat16, float16 and float32


class MemoryBudget:
    """Counts named allocations; never allocates itself."""

    def __init__(self, budget_bytes: int | None) -> None:
        if budget_bytes is not None and budget_bytes < 0:
            raise ValueError(f"memory budget must not be negative, got {budget_bytes} bytes")
        self.budget_bytes = budget_bytes
        self._allocations: dict[str, int] = {}

    @property
    def used_bytes(self) -> int:
        return sum(self._allocations.values())

    def take(self, num_bytes: int, name: str) -> None:
        """Counts num_bytes under a new name. Raises DeviceMemoryError when over budget."""
        if num_bytes < 0:
            raise ValueError(f"{name}: cannot allocate {num_bytes} bytes")
        if name in self._allocations:
            raise ValueError(f"{name}: the name is in use by an allocation of {self._allocations[name]} bytes")
        if self.budget_bytes is not None and self.used_bytes + num_bytes > self.budget_bytes:
            raise DeviceMemoryError(
                f"{name}: {readable(num_bytes)} do not fit: {readable(self.used_bytes)} of "
                f"{readable(self.budget_bytes)} are in use; {CURE}\n{self.report()}"
            )
        self._allocations[name] = num_bytes

    def give_back(self, name: str) -> None:
        """Forgets an allocation. Raises ValueError for a name that is not in use."""
        if name not in self._allocations:
            raise ValueError(f"{name}: no device allocation has this name")
        del self._allocations[name]

    def report(self) -> str:
        """A table: name, size and bytes, largest first, then the total and the budget."""
        rows = sorted(self._allocations.items(), key=lambda item: (-item[1], item[0]))
        rows.append(("in use", self.used_bytes))
        if self.budget_bytes is not None:
            rows.append(("budget", self.budget_bytes))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {readable(size):>12}  {size:>16,} bytes" for name, size in rows)


def readable(num_bytes: int) -> str:
    """In the largest unit that it reaches, for messages."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} bytes"
