#!/usr/bin/env bash
# An OpenAI-compatible server with the experts paged: the device is told to be smaller than the model, which otherwise
# would run as stock vLLM. Everything else is planned. Ask it, for example, with
#   curl http://localhost:8000/v1/completions -H 'Content-Type: application/json' \
#     -d '{"model": "shakespeare", "prompt": "ROMEO:\n", "max_tokens": 40}'
# Further arguments go to `vllm serve`, for example --port 8123.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH"

exec vllm serve examples/tiny-shakespeare-moe \
  --worker-cls vllm_moe_lightning.worker.MoELightningWorker \
  --served-model-name shakespeare \
  --additional-config '{"moe_lightning": {"device_memory_mib": 6}}' \
  "$@"
