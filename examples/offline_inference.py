"""Generate with the experts of a mixture-of-experts model paged: the shortest way in.

    .venv/bin/python examples/offline_inference.py

The one line that matters is `worker_cls`. From here: vllm_moe_lightning/integration/worker.py (what it puts into vLLM),
pipeline/executor.py (the main loop).
"""

from pathlib import Path

from vllm import LLM, SamplingParams

MODEL = Path(__file__).parent / "tiny-shakespeare-moe"


def main() -> None:
    llm = LLM(
        model=str(MODEL),
        worker_cls="vllm_moe_lightning.worker.MoELightningWorker",
        # Optional. Here the device is told to be smaller than the model, which otherwise would run as stock vLLM.
        additional_config={"moe_lightning": {"device_memory_mib": 6}},
    )
    prompts = ["ROMEO:\nO, she doth", "First Citizen:\nWe are", "KING HENRY V:\nOnce more"]
    for output in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=48)):
        print(output.prompt + output.outputs[0].text, end="\n\n")

    (stats,) = llm.collective_rpc("moe_lightning_stats")
    print(f"{stats['pages_moved']} pages, {stats['bytes_paged'] / 2**20:.0f} MiB moved in {stats['sweeps']} sweeps")


if __name__ == "__main__":
    main()
