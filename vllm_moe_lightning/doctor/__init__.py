"""`vllm-moe-lightning doctor`: whether a run will work on this machine, asked before any weight is read."""
