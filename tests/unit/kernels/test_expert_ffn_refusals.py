"""What the CPU experts refuse: by name in Python, and once more, before the first write, in C."""

import ctypes
import math
from collections.abc import Callable

import pytest
import torch

from tests.helpers.attention_batch import SENTINEL
from tests.helpers.expert_layer import Case, Layer
from vllm_moe_lightning.errors import DeviceTaskError, UnsupportedError
from vllm_moe_lightning.kernels import native
from vllm_moe_lightning.kernels.attention import resolve_isa
from vllm_moe_lightning.kernels.expert_ffn import ExpertFfn, ExpertFfnTask, GatedActivation, check_weights

Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("w13", lambda t: t[:, :-1].contiguous(), "w13 must be"),
        ("w13", lambda t: t.double(), "must both be one of"),
        ("w2", lambda t: t.float(), "must both be one of"),
        ("w2", lambda t: t[0], "w13 must be"),
        ("w13", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "w13 must be contiguous host memory"),
        ("w2", lambda t: t.to("meta"), "w2 must be contiguous host memory"),
    ],
)
def test_weights_of_another_form_are_refused(name: str, change: Change, message: str) -> None:
    layer = Layer(Case())
    weights = {"w13": layer.w13, "w2": layer.w2}
    weights[name] = change(weights[name])
    with pytest.raises(ValueError, match=message):
        check_weights(**weights)


@pytest.mark.parametrize(("hidden", "intermediate"), [(12, 8), (8, 12), (4, 8)])
def test_sizes_that_are_no_multiple_of_8_are_refused_with_the_cure(hidden: int, intermediate: int) -> None:
    w13, w2 = torch.zeros(2, 2 * intermediate, hidden), torch.zeros(2, hidden, intermediate)
    with pytest.raises(UnsupportedError, match=r"multiples of 8.*keep this model's experts on the device"):
        check_weights(w13, w2)


def test_an_activation_that_we_lack_is_refused_by_name() -> None:
    layer = Layer(Case())
    with pytest.raises(UnsupportedError, match="no activation 'gelu_tanh', only silu, swigluoai"):
        ExpertFfn(layer.w13, layer.w2, activation="gelu_tanh")
    with pytest.raises(ValueError, match="clamp_limit positive"):
        ExpertFfn(layer.w13, layer.w2, activation=GatedActivation(clamp_limit=0.0))
    with pytest.raises(ValueError, match="must be finite"):
        ExpertFfn(layer.w13, layer.w2, activation=GatedActivation(gate_alpha=math.nan))


def test_wrong_options_are_refused() -> None:
    layer = Layer(Case())
    with pytest.raises(ValueError, match="max_streamed_tokens must be at least 1, got 0"):
        ExpertFfn(layer.w13, layer.w2, max_streamed_tokens=0)
    with pytest.raises(ValueError, match="w13_bias must be"):
        ExpertFfn(layer.w13, layer.w2, w13_bias=torch.zeros(4, 96))
    with pytest.raises(ValueError, match="w2_bias must be"):
        ExpertFfn(layer.w13, layer.w2, w2_bias=torch.zeros(4, 64, dtype=torch.int32))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("hidden", lambda t: t.float(), "hidden must be"),
        ("hidden", lambda t: t[:, :32], "hidden must be"),
        ("hidden", lambda t: t[None], "hidden must be"),
        ("hidden", lambda t: t.t().contiguous().t(), "must be adjacent"),
        ("hidden", lambda t: t[:1].expand(4, -1), "must not overlap"),
        ("output", lambda t: t[:3], "output must be"),
        ("topk_ids", lambda t: t.long(), "topk_ids must be contiguous torch.int32"),
        ("topk_ids", lambda t: t[:, 0], "topk_ids must be"),
        ("topk_ids", lambda t: t[:, :0], "topk_ids must be"),
        ("topk_ids", lambda t: t[:3], "topk_ids must be"),
        ("topk_weights", lambda t: t.bfloat16(), "topk_weights must be"),
        ("topk_weights", lambda t: t[:, :1].contiguous(), "topk_weights must be"),
    ],
)
def test_tensors_of_another_form_are_refused(name: str, change: Change, message: str) -> None:
    layer = Layer(Case())
    tensors = {name: getattr(layer, name) for name in ("hidden", "topk_ids", "topk_weights")}
    tensors["output"] = torch.empty(layer.hidden.shape, dtype=layer.hidden.dtype)
    tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match=message):
        ExpertFfnTask(layer.experts(), **tensors)


def test_an_output_on_top_of_the_tokens_is_refused() -> None:
    layer = Layer(Case())
    with pytest.raises(ValueError, match="output must not be hidden itself"):
        ExpertFfnTask(layer.experts(), layer.hidden, layer.topk_ids, layer.topk_weights, layer.hidden)


def test_an_expert_that_does_not_exist_is_refused_when_the_task_runs_before_anything_is_written() -> None:
    layer = Layer(Case())
    output = torch.full(layer.hidden.shape, SENTINEL, dtype=layer.hidden.dtype)
    task = ExpertFfnTask(layer.experts(), layer.hidden, layer.topk_ids, layer.topk_weights, output)
    layer.topk_ids[3, 1] = layer.case.num_experts
    with pytest.raises(DeviceTaskError, match="bad argument"):
        task.run()
    assert (output == SENTINEL).all()
    with pytest.raises(ValueError, match="topk_ids names expert 4 of 4"):
        layer.experts().run(layer.hidden, layer.topk_ids, layer.topk_weights)


def test_the_c_side_refuses_an_instruction_set_that_is_not_there() -> None:
    layer = Layer(Case())
    output = torch.empty(layer.hidden.shape, dtype=layer.hidden.dtype)
    task = ExpertFfnTask(layer.experts(), layer.hidden, layer.topk_ids, layer.topk_weights, output)
    task.argument.isa = 77
    assert task.function(ctypes.byref(task.argument)) == native.ERROR_BAD_ARGUMENT


def test_auto_is_never_the_scalar_kernel() -> None:
    if resolve_isa("auto") == "scalar":
        pytest.fail("auto chose the scalar kernel")
    assert Layer(Case()).experts().isa == resolve_isa("auto", torch.bfloat16)
