"""A model's ranks as Ray actors, on one machine or several, each paging its slice of the experts.

    .venv/bin/python examples/ray_tensor_parallel.py                # a Ray of its own, two ranks on this machine

On a cluster with this package and the model at the same paths everywhere (`ray start --head` on one machine,
`ray start --address=HEAD:6379` on the others):

    python examples/ray_tensor_parallel.py --ray-address auto --model MODEL --tensor-parallel-size 8

Two things differ from offline_inference.py: `distributed_executor_backend`, and RAY_ADDRESS. Ranks of one machine share
its cores and memory; plan and KV cache are the same for all, made for the machine that this script runs on, so start it
on one like the others. From here: vllm_moe_lightning/integration/peers.py (who shares a machine) and ray_on_cpu.py.
"""

import argparse
import json
import os
from pathlib import Path

import ray
from vllm import LLM, SamplingParams

MODEL = Path(__file__).parent / "tiny-shakespeare-moe"
PROMPTS = ["ROMEO:\nO, she doth", "First Citizen:\nWe are", "KING HENRY V:\nOnce more"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL), help="a checkpoint folder (the shipped tiny model)")
    parser.add_argument("--tensor-parallel-size", type=int, default=2, help="ranks, one for each GPU (2)")
    parser.add_argument("--ray-address", help="of a running cluster: auto, or HOST:6379 (a Ray of its own)")
    parser.add_argument("--dtype", default="auto", help="as for vllm serve (auto)")
    parser.add_argument("--max-tokens", type=int, default=48, help="for each prompt (48)")
    parser.add_argument(
        "--options", type=json.loads, help="of moe_lightning, as JSON; for the tiny model: a device smaller than it"
    )
    parser.add_argument("--json", type=Path, help="write tokens and what each rank moved to this file")
    arguments = parser.parse_args()
    options = arguments.options or ({"device_memory_mib": 4} if arguments.model == str(MODEL) else {})

    # The engine core, a process of its own, finds the cluster by the variable.
    ray.init(arguments.ray_address or "local", **({} if arguments.ray_address else {"num_cpus": os.cpu_count()}))
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    llm = LLM(
        model=arguments.model,
        worker_cls="vllm_moe_lightning.worker.MoELightningWorker",
        additional_config={"moe_lightning": options},
        distributed_executor_backend="ray",
        tensor_parallel_size=arguments.tensor_parallel_size,
        dtype=arguments.dtype,
    )
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens))
    for output in outputs:
        print(output.prompt + output.outputs[0].text, end="\n\n")
    if llm.llm_engine.vllm_config.additional_config.get("moe_lightning_stepped_aside"):
        ranks = []  # the model fits, and stock vLLM has run it
    else:
        ranks = llm.collective_rpc("moe_lightning_stats")
    for rank, stats in enumerate(ranks):
        print(f"rank {rank}: {stats['pages_moved']} pages, {stats['bytes_paged'] / 2**20:.0f} MiB moved")
    if arguments.json:
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        arguments.json.write_text(json.dumps({"token_ids": tokens, "ranks": ranks}))


if __name__ == "__main__":  # the engine core is spawned, and imports this file
    main()
