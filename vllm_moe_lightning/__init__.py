"""What `import vllm_moe_lightning` offers: the version, and the hook that vLLM calls in each process.

vLLM loads this module in every process it starts, whether or not the plugin is in use: so it imports nothing.
"""

__version__ = "0.1.0"


def register() -> None:
    """Entry point of vLLM's group `vllm.general_plugins`; may be called any number of times."""
    from vllm_moe_lightning.integration.register import register as register_with_vllm

    register_with_vllm()
