"""`plan` and `explain` from a folder that holds only config.json."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from msgspec.structs import replace
from typer.testing import CliRunner

from vllm_moe_lightning.cli import plan as plan_cli
from vllm_moe_lightning.hardware import EMULATED_GPU_NAME, write_profile
from vllm_moe_lightning.hardware_presets import preset_profile

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
APP = typer.Typer()
APP.command()(plan_cli.plan)
APP.command()(plan_cli.explain)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "Mixtral-8x7B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MIXTRAL))
    return folder


@pytest.fixture
def run(model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a command on the model; rich gets a terminal wide enough not to break words."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def call(command: str, *arguments: str) -> Any:
        return CliRunner().invoke(APP, [command, "--model", str(model), *arguments])

    return call


PROMPTS_ON_CPU = ("--prompt-attention", "cpu")
SIZES = ("--prompt-len", "77", "--gen-len", "128")


def test_json_has_the_fields_that_scripts_read(run: Callable[..., Any]) -> None:
    result = run("plan", "--gpu", "t4", *SIZES, "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["policy"]["batch_size"] >= 1
    assert plan["predicted"]["tokens_per_s"] > 0
    assert plan["bottleneck"] in {"gpu", "cpu", "h2d", "d2h", "host_memory", "disk"}
    for memory in plan["memory"].values():
        assert memory["fits"]
        assert memory["need_bytes"] <= memory["have_bytes"]
        assert sum(memory["items_bytes"].values()) == pytest.approx(memory["need_bytes"], abs=64)
    assert 0 < plan["solve_time_s"] < 60
    assert plan["warnings"] == []
    assert set(plan["memory"]) == {"gpu", "host"}
    assert plan["marginal_values"]["+10 % link"]["gain"] >= 0


@pytest.mark.parametrize(("attention", "place"), [("cpu", "host"), ("gpu", "gpu")])
def test_an_eight_bit_kv_cache_takes_less_memory_and_goes_down_the_link_as_before(
    run: Callable[..., Any], attention: str, place: str
) -> None:
    policy = ("--micro-batch-size", "16", "--num-micro-batches", "4", "--attention", attention)

    def explained(kv_cache_dtype: str) -> Any:
        result = run("explain", "--gpu", "t4", *SIZES, *policy, "--kv-cache-dtype", kv_cache_dtype, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    full, quantised = explained("auto"), explained("int8_per_token_head")
    assert full["kv_bytes_per_token"] == 131072
    assert quantised["kv_bytes_per_token"] == 32 * 2 * 8 * (128 + 4)
    item = {"host": "KV cache", "gpu": "KV frames"}[place]
    need, less = (plan["memory"][place]["items_bytes"] for plan in (full, quantised))
    assert less[item] == pytest.approx(need[item] * 132 / 256, abs=1)
    assert less["staging"] == need["staging"]
    assert quantised["predicted"]["tokens_per_s"] >= full["predicted"]["tokens_per_s"]


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_a_sweep_of_the_plan_is_simulated_drawn_and_traced(
    run: Callable[..., Any], tmp_path: Path, batching: str
) -> None:
    gantt, trace = tmp_path / "gantt.png", tmp_path / "trace.json"
    files = ("--gantt", str(gantt), "--trace", str(trace))
    result = run("plan", "--gpu", "t4", *SIZES, "--batching", batching, *files, "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert gantt.read_bytes().startswith(b"\x89PNG")
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    pages = [event for event in spans if event["name"].startswith("weight_page")]
    policy = plan["policy"]
    assert len({event["name"].split(",")[0] for event in pages}) == 32 - policy["num_resident_layers"]
    end_s = max(event["ts"] + event["dur"] for event in spans) / 1e6
    begin_s = min(event["ts"] for event in spans) / 1e6
    assert plan["simulated_sweep_s"] == pytest.approx(end_s - begin_s, rel=0.2)


def test_the_report_names_policy_time_bottleneck_and_what_would_raise_it(run: Callable[..., Any]) -> None:
    result = run("plan", "--gpu", "t4", "--host", "gcp-t4-24", *SIZES)
    assert result.exit_code == 0, result.output
    for words in (
        "tokens/s",
        "micro-batches of",
        "resident",
        "█",
        "bottleneck: H2D link",
        "+10 % link",
        "streamed experts",
    ):
        assert words in result.stdout


def test_machines_are_compared_in_one_table(run: Callable[..., Any]) -> None:
    result = run("plan", "--compare", "t4,l4,rtx4090,a100-80", *SIZES)
    assert result.exit_code == 0, result.output
    for name in ("t4", "l4", "rtx4090", "a100-80"):
        assert name in result.stdout


def test_a_machine_that_nothing_fits_does_not_spoil_the_comparison(run: Callable[..., Any]) -> None:
    result = run("plan", "--compare", "t4,h200", "--host-memory-gb", "20", *SIZES, "--json")
    assert result.exit_code == 0, result.output
    plans = json.loads(result.stdout)["plans"]
    assert "smallest change that fits" in plans["t4"]["error"]
    assert plans["h200"]["predicted"]["tokens_per_s"] > 0


def test_no_plan_is_exit_status_1_with_the_table_on_stderr(run: Callable[..., Any]) -> None:
    result = run("plan", "--gpu", "t4", "--host-memory-gb", "20", *SIZES, "--json")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "smallest change that fits" in result.stderr


def test_a_profile_file_stands_for_presets(run: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    write_profile(preset_profile("l4"), path)
    by_file = run("plan", "--hardware", str(path), *SIZES, "--json")
    by_name = run("plan", "--gpu", "l4", *SIZES, "--json")
    assert by_file.exit_code == 0, by_file.output
    speeds = [json.loads(r.stdout)["predicted"]["tokens_per_s"] for r in (by_file, by_name)]
    assert speeds[0] == speeds[1]


def test_explaining_the_plan_gives_its_figures(run: Callable[..., Any]) -> None:
    plan = json.loads(run("plan", "--gpu", "l4", *SIZES, "--json").stdout)
    policy = plan["policy"]
    arguments = ["--gpu", "l4", *SIZES, "--json"]
    for name in ("micro_batch_size", "num_micro_batches", "num_resident_layers", "kv_gpu_ratio"):
        arguments += [f"--{name.replace('_', '-')}", str(policy[name])]
    arguments += ["--attention", "gpu" if policy["attention_on_gpu"] else "cpu"]
    explained = json.loads(run("explain", *arguments).stdout)
    assert explained["predicted"] == plan["predicted"]
    assert explained["memory"] == plan["memory"]
    assert explained["found_by"] == "given"


LONG_PROMPTS = ("--prompt-len", "2000", "--gen-len", "64", "--micro-batch-size", "8", "--num-micro-batches", "4")


def test_prompts_are_attended_to_where_the_engine_would_or_where_one_says(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    t4 = preset_profile("t4")
    emulated = replace(t4, gpu=replace(t4.gpu, name=EMULATED_GPU_NAME))
    write_profile(emulated, tmp_path / "emulated.json")

    def explained(*arguments: str) -> Any:
        result = run("explain", *LONG_PROMPTS, *arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    profile = ("--hardware", str(tmp_path / "emulated.json"))
    auto, cpu, gpu = (explained(*profile, *given) for given in ((), PROMPTS_ON_CPU, ("--prompt-attention", "gpu")))
    assert auto == cpu
    assert (auto["policy"]["prompts_on_gpu"], gpu["policy"]["prompts_on_gpu"]) == (False, True)
    busy, busy_of_gpu = (plan["predicted"]["sweep"]["busy_s"] for plan in (auto, gpu))
    assert busy["cpu"] > busy_of_gpu["cpu"]
    assert explained("--gpu", "t4")["policy"]["prompts_on_gpu"]
    report = run("explain", *LONG_PROMPTS, *profile, "--prompt-attention", "gpu")
    assert "attended to on the GPU, later chunks of" not in report.stdout
    assert "attended to on the CPU" in run("explain", *LONG_PROMPTS, *profile).stdout


def test_a_plan_is_made_with_prompts_where_one_says(run: Callable[..., Any]) -> None:
    policies = [
        json.loads(run("plan", "--gpu", "t4", *SIZES, *given, "--json").stdout)["policy"]
        for given in ((), PROMPTS_ON_CPU)
    ]
    assert [policy["prompts_on_gpu"] for policy in policies] == [True, False]
    compared = json.loads(run("plan", "--compare", "t4,l4", *SIZES, *PROMPTS_ON_CPU, "--json").stdout)["plans"]
    assert {plan["policy"]["prompts_on_gpu"] for plan in compared.values()} == {False}


def test_prompts_on_the_cpu_beside_decode_tokens_on_the_gpu_are_refused(run: Callable[..., Any]) -> None:
    result = run("explain", "--gpu", "t4", *LONG_PROMPTS, "--attention", "gpu", *PROMPTS_ON_CPU)
    assert result.exit_code == 2
    assert "prompts_on_gpu" in result.stderr


def test_a_policy_that_does_not_fit_is_explained_too(run: Callable[..., Any]) -> None:
    result = run("explain", "--gpu", "t4", "--micro-batch-size", "9000", "--num-micro-batches", "60", *SIZES)
    assert result.exit_code == 0, result.output
    assert "does not fit" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name a GPU"),
        (("--gpu", "t5"), "t5"),
        (("--gpu", "t4", "--host", "nowhere"), "nowhere"),
        (("--gpu", "t4", "--hardware", "x.json"), "drop --gpu"),
        (("--hardware", "nothing.json"), "nothing.json"),
        (("--gpu", "t4", "--gen-len", "40000"), "32768"),
        (("--gpu", "t4", "--compare", "l4"), "drop --gpu"),
        (("--compare", "l4,t5"), "t5"),
        (("--gpu", "t4", "--max-num-seqs", "0"), "--max-num-seqs"),
        (("--gpu", "t4", "--host-memory-gb", "1e12"), "cpu.memory_bytes"),
    ],
)
def test_wrong_input_is_a_usage_error_that_names_it(
    run: Callable[..., Any], arguments: tuple[str, ...], words: str
) -> None:
    result = run("plan", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_config_without_a_figure_is_refused_by_name(run: Callable[..., Any], model: Path) -> None:
    (model / "config.json").write_text(json.dumps({k: v for k, v in MIXTRAL.items() if k != "num_local_experts"}))
    result = run("plan", "--gpu", "t4")
    assert result.exit_code == 2
    assert "num_local_experts" in result.stderr


def test_the_roofline_is_drawn(run: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "hrm.png"
    result = run("plan", "--gpu", "t4", *SIZES, "--plot", str(path), "--json")
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_module_imports_nothing_but_typer(model: Path) -> None:
    code = "import sys; import vllm_moe_lightning.cli.plan; "
    code += "assert not {'numpy', 'cvxpy', 'torch', 'vllm', 'matplotlib', 'msgspec'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_plan_needs_no_torch_and_no_vllm(model: Path) -> None:
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "vllm", "transformers"}:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
from tests.unit.cli.test_plan import APP
APP()
"""
    arguments = ["plan", "--model", str(model), "--gpu", "t4", *SIZES, "--json"]
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["predicted"]["tokens_per_s"] > 0
