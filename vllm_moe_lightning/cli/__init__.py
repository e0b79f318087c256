"""The command line: `vllm-moe-lightning`."""
