# SPDX-License-Identifier: Apache-2.0
"""What `check` asks of the two engines: a size that fits, the same settings for both, and reasons for failures."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checkpoints import write_checkpoint
from vllm_moe_lightning.checkpoint_view import StoredModel
from vllm_moe_lightning.errors import MoeLightningError, UnsupportedError
from vllm_moe_lightning.integration import parity_run
from vllm_moe_lightning.integration.parity_run import (
    GIB,
    PROCESS_BYTES,
    WEIGHTS_FACTOR,
    CheckRequest,
    EngineJob,
    check,
    layers_that_fit,
    streaming_of,
)
from vllm_moe_lightning.parity import EngineAnswers, Streaming


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("mixtral"), "mixtral", num_layers=3, dtype=torch.bfloat16)


def jobs_of(request: CheckRequest, scratch: Path) -> list[EngineJob]:
    """With engines that fail, as stock vLLM's comes first: both engines' jobs cannot be seen then."""
    jobs: list[EngineJob] = []

    def run(job: EngineJob) -> EngineAnswers:
        jobs.append(job)
        stats = {"sweeps": 0} if job.is_ours else None
        return EngineAnswers(error="seen" if job.is_ours else None, stats=stats)

    report = check(request, scratch, run=run)
    assert report.parity.verdict() == "FAIL: our engine: seen"
    return jobs


def test_both_engines_are_asked_the_same_with_the_same_settings(model: Path, tmp_path: Path) -> None:
    stock, ours = jobs_of(CheckRequest(model, max_tokens=5), tmp_path)
    assert not stock.is_ours
    assert ours.is_ours
    assert stock.prompts == ours.prompts
    more: dict[str, Any] = {key: value for key, value in ours.engine_args.items() if key not in stock.engine_args}
    assert set(more) == {"worker_cls", "additional_config"}
    assert {key: ours.engine_args[key] for key in stock.engine_args} == stock.engine_args
    assert stock.engine_args["dtype"] == "float32"
    assert stock.engine_args["enable_prefix_caching"] is False
    options = more["additional_config"]["moe_lightning"]
    assert options["debug"] == {"copy_timing": "lazy", "poison": True, "check_hazards": True}
    # Eight pages of a layer's experts in float32, which the files hold in two bytes.
    assert options["page_mib"] * 2**20 * 8 == pytest.approx(8 * 3 * 96 * 128 * 4)


@pytest.mark.parametrize(
    ("plant", "option"),
    [("zero_page", {"zero_page": [2, 0]}), ("hidden_load<-attention", {"remove_wait": "hidden_load<-attention"})],
)
def test_a_planted_fault_is_an_option_of_our_engine(
    model: Path, tmp_path: Path, plant: str, option: dict[str, Any]
) -> None:
    stock, ours = jobs_of(CheckRequest(model, plant=plant), tmp_path)
    assert "additional_config" not in stock.engine_args
    assert option.items() <= ours.engine_args["additional_config"]["moe_lightning"]["debug"].items()


def test_further_options_are_our_engine_s_and_those_of_the_check_stay(model: Path, tmp_path: Path) -> None:
    more = {"experts": "fetched", "expert_slots": 4}
    stock, ours = jobs_of(CheckRequest(model, options=more), tmp_path)
    assert "additional_config" not in stock.engine_args
    assert more.items() <= ours.engine_args["additional_config"]["moe_lightning"].items()
    with pytest.raises(ValueError, match="--option: debug, planner is set by check itself"):
        jobs_of(CheckRequest(model, options={"debug": {}, "planner": "auto"}), tmp_path)
    with pytest.raises(ValueError, match="expert_slots"):
        jobs_of(CheckRequest(model, options={"expert_slots": 4}), tmp_path)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Streaming()),
        ({"num_resident_layers": 1}, Streaming(is_whole=False)),
        ({"experts": "cpu"}, Streaming(is_whole=False, is_idle=True, is_packed=False)),
        ({"experts": "fetched"}, Streaming(is_whole=False, is_packed=False)),
        ({"expert_kernel": "torch"}, Streaming(is_packed=False)),
    ],
    ids=str,
)
def test_what_is_to_be_seen_follows_from_the_options(options: dict[str, Any], expected: Streaming) -> None:
    assert streaming_of(options) == expected


def test_fewer_layers_are_a_checkpoint_of_their_own(model: Path, tmp_path: Path) -> None:
    for job in jobs_of(CheckRequest(model, num_layers=2), tmp_path):
        assert StoredModel(Path(job.engine_args["model"])).num_layers == 2


def test_prompts_are_cut_to_what_the_model_can_take(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("x" * 2000 + "\n" + "y\n" * 30)
    stock, _ = jobs_of(CheckRequest(model, prompts_file=file, max_tokens=300), tmp_path)
    assert [len(prompt) for prompt in stock.prompts] == [512 - 300 - 1] + [1] * 15
    with pytest.raises(ValueError, match="--tokens 512 leaves no room"):
        check(CheckRequest(model, max_tokens=512), tmp_path)


def test_as_many_layers_are_taken_as_fit_in_memory(model: Path) -> None:
    stored = StoredModel(model)
    enough = PROCESS_BYTES + WEIGHTS_FACTOR * 2 * stored.num_bytes(2)
    assert layers_that_fit(stored, 2, int(enough) + 1) == 2
    assert layers_that_fit(stored, 2, 100 * GIB) == 3
    with pytest.raises(MoeLightningError, match=r"one layer of .* takes 2\.0 GiB to check, and 1\.0 GiB"):
        layers_that_fit(stored, 2, GIB)


def test_a_quantised_checkpoint_is_refused(model: Path, tmp_path: Path) -> None:
    config = (model / "config.json").read_text().replace("{", '{"quantization_config": {"quant_method": "fp8"},', 1)
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UnsupportedError, match="is quantised"):
        check(CheckRequest(tmp_path), tmp_path / "scratch")


@pytest.mark.parametrize(
    ("engine", "error"),
    [
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9 (9: out of memory"),
        ("raise SystemExit('some last\\nwords')", "ended with code 1: some last words"),
        (
            "import vllm_moe_lightning.integration.parity_engine as e; e.main(*sys.argv[1:])",
            "ValueError: no such model",
        ),
    ],
)
def test_the_reason_of_an_engines_end_is_its_answer(
    engine: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text("class LLM:\n    def __init__(self): raise ValueError('no such\\nmodel')\n")
    (tmp_path / "stand_in.py").write_text(f"import sys\n{engine}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(parity_run, "ENGINE_MODULE", "stand_in")
    job = EngineJob({}, is_ours=True, prompts=[], max_tokens=1, with_checksums=False, is_dbrx=False)
    assert str(parity_run.run_in_process(job).error).startswith(error)
