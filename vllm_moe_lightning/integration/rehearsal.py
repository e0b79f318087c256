"""Rehearses the start of an engine up to its plan, for `doctor`: builds vLLM's configuration, and reads no weight.

Runs in a process of its own (doctor/rehearsal.py): what breaks on the way ends it, and what was found by then counts.
Each check is the one that the start itself makes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec

from vllm_moe_lightning.doctor.finding import Finding, findings_of, ok, refusal, will_fail
from vllm_moe_lightning.doctor.question import Question, StartFacts
from vllm_moe_lightning.doctor.rehearsal import LAST_STEP, Line
from vllm_moe_lightning.errors import PolicyInfeasibleError, UnsupportedError
from vllm_moe_lightning.resources import HrmResource, label_of

PLUGIN_GROUP, OURS = "vllm.general_plugins", "moe_lightning"
SMALLEST_CHANGE = "smallest change that fits: "
MODERN_ISAS = frozenset({"avx512", "avx512bf16", "avx512vnni"})


def rehearse(question: Question) -> Iterator[Line]:
    """Lines as they are found. May raise whatever torch, vLLM and what they import do."""
    yield Line(step="import torch")
    import torch

    is_cuda_build = torch.version.cuda is not None
    facts = StartFacts(is_cuda_build=is_cuda_build)
    yield Line(facts=facts)
    yield from map(_line, findings_of("torch", _torch_build))
    yield Line(step="load the kernels")
    yield from map(_line, findings_of("CPU attention", _attention_kernel))
    yield Line(step="import vLLM")
    _leave_our_plugin_out()
    yield from map(_line, findings_of("vLLM's version", _version))
    yield Line(step="look for vLLM's names that we touch")
    yield from map(_line, findings_of("vLLM's names", _ledger))
    yield Line(step="build vLLM's configuration")
    try:
        configuration = _configuration(question)
    except (ValueError, OSError) as error:
        yield _line(will_fail("vLLM's configuration", _first_reason(error), "change what it names"))
    else:
        model = configuration.model_config
        dtype = str(model.dtype).removeprefix("torch.")
        facts = msgspec.structs.replace(facts, dtype=dtype, max_model_len=model.max_model_len)
        yield Line(facts=facts)
        found = f"{model.architecture}, computed in {dtype}, max_model_len {model.max_model_len}"
        yield _line(ok("vLLM's configuration", found))
        yield from map(_line, _refusals(configuration, question))
        yield Line(step="plan")
        yield from map(_line, findings_of("plan", lambda: _plan(configuration)))
        yield Line(facts=msgspec.structs.replace(facts, kv_bytes_per_rank=_planned_kv_bytes(configuration)))
    yield Line(step=LAST_STEP)


def _line(finding: Finding) -> Line:
    return Line(finding=finding)


def _torch_build() -> Finding:
    import torch

    name = f"torch {torch.__version__}"
    if torch.version.cuda is None:
        return ok("torch", f"{name}, a CPU build: the device is emulated")
    if not torch.cuda.is_available():
        cure = "install a driver for that CUDA (docker run --gpus all), or vLLM's CPU build"
        return will_fail("torch", f"{name} is built for CUDA {torch.version.cuda} and sees no GPU", cure)
    return ok("torch", f"{name}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs")


def _attention_kernel() -> Finding:
    """Raises UnsupportedError for a CPU without AVX2."""
    from vllm_moe_lightning.kernels.attention import resolve_isa

    isa = resolve_isa("auto")
    if isa in MODERN_ISAS:
        return ok("CPU attention", isa)
    return ok("CPU attention", f"{isa}, the slower of two: this CPU has no AVX-512")


def _leave_our_plugin_out() -> None:
    """The plugin would refuse the first thing that it does not like, and here all are asked for. Others stay: a model
    may be theirs."""
    allowed = os.environ.get("VLLM_PLUGINS")
    names = [point.name for point in entry_points(group=PLUGIN_GROUP)] if allowed is None else allowed.split(",")
    os.environ["VLLM_PLUGINS"] = ",".join(name for name in names if name != OURS)


def _version() -> Finding:
    from vllm_moe_lightning.integration.compat import CHECKED_VERSIONS, require_supported_version

    require_supported_version()
    import vllm

    return ok("vLLM's version", str(vllm.__version__), f"checked with {CHECKED_VERSIONS}")


def _ledger() -> Finding:
    from vllm_moe_lightning.integration.compat import missing_names
    from vllm_moe_lightning.integration.ledger import LEDGER

    if missing := missing_names():
        cure = "install a vLLM that this package names, or upgrade vllm-moe-lightning"
        return will_fail("vLLM's names", f"moved or changed: {', '.join(missing)}", cure)
    return ok("vLLM's names", f"all {len(LEDGER)} that we touch are there")


def _configuration(question: Question) -> Any:
    """As `vllm serve` would build it. Raises ValueError or OSError for what vLLM or transformers do not take."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_moe_lightning.integration.given_limits import note_given_limits

    arguments = EngineArgs(
        model=question.model,
        dtype=question.dtype,
        max_model_len=question.max_model_len,
        tensor_parallel_size=question.tensor_parallel_size,
        additional_config={OURS: question.options},
    )
    note_given_limits(arguments)
    return arguments.create_engine_config()


def _first_reason(error: Exception) -> str:
    """pydantic's errors have the reason in their third line, between its words."""
    reasons = [line.strip() for line in str(error).splitlines() if line.strip().startswith("Value error, ")]
    text = reasons[0].removeprefix("Value error, ").partition(" [type=")[0] if reasons else str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _refusals(configuration: Any, question: Question) -> list[Finding]:
    from vllm_moe_lightning.integration.configure import (
        conflicts,
        options_of,
        refuse_device,
        refuse_uneven_ranks,
    )

    options = options_of(configuration)
    findings = [will_fail("features", what, cure) for what, cure in conflicts(configuration, options)]
    for name, refuse in (
        ("device", lambda: refuse_device(options)),
        ("tensor parallel", lambda: refuse_uneven_ranks(configuration)),
    ):
        try:
            refuse()
        except (UnsupportedError, ValueError) as error:
            findings.append(refusal(name, error))
    return findings or [ok("features", "nothing that we refuse")]


def _plan(configuration: Any) -> Finding:
    from vllm_moe_lightning.engine_plan import plan_of
    from vllm_moe_lightning.integration.configure import options_of
    from vllm_moe_lightning.integration.planning import plan
    from vllm_moe_lightning.integration.register import STEPPED_ASIDE_KEY
    from vllm_moe_lightning.policy.milp import load_solver

    load_solver()  # before a machine that is not known is measured
    try:
        is_planned = plan(configuration, options_of(configuration))
    except (UnsupportedError, ValueError) as error:  # what is given does not go together, or does not fit
        return refusal("plan", error)
    except PolicyInfeasibleError as error:
        short, _, rest = str(error).partition(SMALLEST_CHANGE)
        return will_fail("plan", short.strip().removesuffix(":"), rest.splitlines()[0] if rest else "")
    if not is_planned:
        return ok("plan", f"{configuration.additional_config[STEPPED_ASIDE_KEY]}: stock vLLM runs and pages nothing")
    chosen = plan_of(configuration)
    assert chosen is not None, "plan() wrote none down"
    bound = label_of(HrmResource(chosen.predicted.bottleneck))
    return ok(
        "plan",
        f"{chosen.max_num_seqs} sequences in {chosen.num_micro_batches} micro-batches, {chosen.num_resident_layers} "
        f"layers resident, {chosen.kv_bytes / 2**30:.3g} GiB of KV cache a rank; predicted "
        f"{chosen.predicted.generated_tokens_per_s:.3g} tokens/s, bound by {bound}",
    )


def _planned_kv_bytes(configuration: Any) -> int | None:
    from vllm_moe_lightning.engine_plan import plan_of

    chosen = plan_of(configuration)
    return None if chosen is None else chosen.kv_bytes


def main(question_file: str, answer_file: str) -> None:
    question = msgspec.json.decode(Path(question_file).read_bytes(), type=Question)
    with open(answer_file, "wb", buffering=0) as answer:
        for line in rehearse(question):
            answer.write(msgspec.json.encode(line) + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
