"""The seams into vLLM. The only room that imports it."""
