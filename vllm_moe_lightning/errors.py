"""The errors of the package: what cannot run here, each with its cure in the message.

Wrong input is ValueError or TypeError; a bug of ours is an assert.
"""


class MoeLightningError(RuntimeError):
    """Something cannot run here; the message names the cure."""


class DeviceMemoryError(MoeLightningError):
    """An allocation does not fit the device's memory budget."""


class PinningError(MoeLightningError):
    """Host memory cannot be pinned; the message names the limits."""


class DeviceTaskError(MoeLightningError):
    """A host task (CPU attention) returned an error code; its outputs are not valid."""


class DeviceStalledError(MoeLightningError):
    """A stream makes no progress any more, or its thread has ended; the engine cannot go on."""


class HazardError(MoeLightningError):
    """Two operations touch one buffer and no event orders them."""


class PolicyInfeasibleError(MoeLightningError):
    """No policy fits this model on this hardware; the message is the table of what is short."""


class UnsupportedError(MoeLightningError):
    """A model or a vLLM feature that we refuse; the message names the flag to drop."""


class CheckpointError(MoeLightningError):
    """A checkpoint is incomplete, damaged, or of another model."""
