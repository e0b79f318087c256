"""Many prompts, many machines: one engine on each, prompts dealt out by Ray Data, answers in one JSONL file.

    .venv/bin/python examples/ray_data_bulk.py --output answers.jsonl            # one engine, on this machine
    python examples/ray_data_bulk.py --ray-address auto --num-engines 8 --gpus-per-engine 1 \\
        --model MODEL --prompts prompts.jsonl --output answers.jsonl

Run again after an interruption, it answers what is not yet in the file. Engines do not talk to each other, so this
scales as far as there are machines; a model that needs several GPUs at once is ray_tensor_parallel.py's case. Meant for
one engine on each machine. Engines that share one share its cores and memory: tell each its part, for example
--cpus-per-engine 16 --options '{"attention_threads": 16, "kv_cache_gib": 100}'.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import ray

from vllm_moe_lightning.integration.bulk_run import read_prompts

EXAMPLES = Path(__file__).resolve().parent
MODEL = EXAMPLES / "tiny-shakespeare-moe"


class Engine:
    """An actor of Ray Data: vLLM with our worker, asked one batch at a time."""

    def __init__(self, model: str, dtype: str, options: dict[str, Any], max_tokens: int) -> None:
        from vllm import LLM, SamplingParams

        self._llm = LLM(
            model=model,
            dtype=dtype,
            worker_cls="vllm_moe_lightning.worker.MoELightningWorker",
            additional_config={"moe_lightning": options},
        )
        self._sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        outputs = self._llm.generate(list(batch["prompt"]), self._sampling, use_tqdm=False)
        return {
            "index": list(batch["index"]),
            "prompt": [output.prompt for output in outputs],
            "text": [output.outputs[0].text for output in outputs],
            "finish_reason": [output.outputs[0].finish_reason for output in outputs],
        }


def answered(output: Path, prompts: list[str]) -> set[int]:
    """Numbers of the prompts whose answers are in the file. Cuts off a line that was not written to its end.

    Raises ValueError if the file answers other prompts.
    """
    if not output.exists():
        return set()
    whole, _, rest = output.read_text(encoding="utf-8").rpartition("\n")
    if rest:
        output.write_text(whole + "\n" if whole else "", encoding="utf-8")
    rows = [json.loads(line) for line in whole.split("\n") if line]
    for row in rows:
        if row["index"] >= len(prompts) or row["prompt"] != prompts[row["index"]]:
            raise ValueError(f"{output} answers another prompt at index {row['index']}; give another --output")
    return {row["index"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    prompts_file = EXAMPLES / "prompts.txt"
    parser.add_argument("--prompts", type=Path, default=prompts_file, help='a line each, or JSONL with "prompt"')
    parser.add_argument("--output", type=Path, required=True, help="JSONL: index, prompt, text, finish_reason")
    parser.add_argument("--model", default=str(MODEL), help="a checkpoint folder, on every machine (the tiny model)")
    parser.add_argument("--dtype", default="auto", help="as for vllm serve (auto)")
    parser.add_argument("--max-tokens", type=int, default=48, help="for each prompt (48)")
    parser.add_argument("--num-engines", type=int, default=1, help="one for each machine (1)")
    parser.add_argument("--gpus-per-engine", type=float, default=0, help="1 with GPUs, 0 without (0)")
    parser.add_argument("--cpus-per-engine", type=float, default=1, help="what Ray keeps free for each engine (1)")
    parser.add_argument("--batch-size", type=int, default=1024, help="prompts an engine takes at once (1024)")
    parser.add_argument("--ray-address", help="of a running cluster: auto, or HOST:6379 (a Ray of its own)")
    parser.add_argument("--options", type=json.loads, help="of moe_lightning, as JSON; tiny model: a small device")
    arguments = parser.parse_args()
    options = arguments.options or ({"device_memory_mib": 6} if arguments.model == str(MODEL) else {})

    prompts = read_prompts(arguments.prompts)
    done = answered(arguments.output, prompts)
    left = [{"index": i, "prompt": prompt} for i, prompt in enumerate(prompts) if i not in done]
    print(f"{len(done)} of {len(prompts)} prompts are answered in {arguments.output}, {len(left)} are left")
    if not left:
        return

    ray.init(arguments.ray_address or "local")
    batch_size = max(1, min(arguments.batch_size, -(-len(left) // arguments.num_engines)))
    answers = ray.data.from_items(left, override_num_blocks=-(-len(left) // batch_size)).map_batches(
        Engine,
        fn_constructor_args=(arguments.model, arguments.dtype, options, arguments.max_tokens),
        batch_size=batch_size,
        concurrency=arguments.num_engines,
        num_gpus=arguments.gpus_per_engine,
        num_cpus=arguments.cpus_per_engine,
        scheduling_strategy="SPREAD",
    )
    with arguments.output.open("a", encoding="utf-8") as file:
        for row in answers.iter_rows():  # as engines finish them
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
    print(f"all {len(prompts)} prompts are answered in {arguments.output}")


if __name__ == "__main__":
    main()
