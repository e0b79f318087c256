"""What the CPU attention refuses: by name in Python, and once more, before the first write, in C."""

from collections.abc import Callable

import pytest
import torch

from tests.helpers.attention_batch import Batch, Case, bits
from vllm_moe_lightning.errors import MoeLightningError, UnsupportedError
from vllm_moe_lightning.kernels import attention, native
from vllm_moe_lightning.kernels.attention import AttentionPool, AttentionTask


def small_arguments() -> dict[str, object]:
    batch = Batch(Case(seq_lens=(20, 5), query_lens=(2, 5), num_heads=4, head_dim=16))
    names = ["kv_cache", "query", "block_table", "query_start", "seq_lens", "key", "value", "slot_mapping"]
    return {name: getattr(batch, name) for name in names} | {"output": torch.empty_like(batch.query)}


def changed(index: int, value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[index] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("kv_cache", lambda t: t.double(), "kv_cache must be one of"),
        ("kv_cache", lambda t: t[:, :, 0], "kv_cache must be"),
        ("kv_cache", lambda t: t.transpose(1, 3)[:, :, :, :2].transpose(2, 3), "kv_cache must be"),
        ("kv_cache", lambda t: t[..., :12].contiguous(), "head_dim must be a multiple of 8"),
        ("kv_cache", lambda t: t.repeat(1, 1, 1, 1, 17), "up to 256, got 272"),
        ("kv_cache", lambda t: t.to("meta"), "host memory"),
        ("query", lambda t: t.float(), "query must be"),
        ("query", lambda t: t[:, :3], "multiple of the cache's 2"),
        ("query", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "must be packed"),
        ("output", lambda t: t[:1].expand(7, -1, -1), "must not overlap"),
        ("output", lambda t: t[:3], "output must be"),
        ("output", lambda t: None, "to attend, give"),
        ("key", lambda t: None, "to append, give"),
        ("key", lambda t: t[:, :, :8], "key must be"),
        ("value", lambda t: t[:3], "value must be"),
        ("slot_mapping", lambda t: t.int(), "slot_mapping must be"),
        ("slot_mapping", changed(3, 10**6), "names slot 1000000"),
        ("block_table", changed(0, -1), "names blocks outside"),
        ("block_table", changed(1, 10**6), "names blocks outside"),
        ("block_table", lambda t: t[:, :1].contiguous(), "the longest sequence needs 2"),
        ("block_table", lambda t: t.long(), "block_table must be int32"),
        ("block_table", lambda t: t[:1], "with 2 rows"),
        ("query_start", changed(1, 9), "query_start must rise"),
        ("query_start", changed(0, -1), "query_start must rise"),
        ("query_start", changed(2, 8), "query_start must rise"),
        ("query_start", lambda t: t[:2], "query_start must be"),
        ("seq_lens", changed(1, 4), "seq_lens count the query tokens too"),
        ("seq_lens", changed(1, -4), "seq_lens count the query tokens too"),
        ("sliding_window", lambda _: -1, "sliding_window must be"),
        ("soft_cap", lambda _: -1.0, "soft_cap >= 0"),
        ("scale", lambda _: float("nan"), "must be finite"),
        ("sinks", lambda _: torch.zeros(3), "sinks must be"),
        ("isa", lambda _: "sse", "isa must be one of"),
    ],
)
def test_a_bad_argument_is_refused_by_name(name: str, change: Callable[..., object], message: str) -> None:
    arguments = small_arguments()
    arguments[name] = change(arguments.get(name))
    with pytest.raises(ValueError, match=message):
        AttentionTask(**arguments)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_cache", None),
        ("num_blocks", 1),
        ("block_size", 0),
        ("head_dim", 12),
        ("head_dim", 264),
        ("num_heads", 3),
        ("num_kv_heads", 0),
        ("dtype", 3),
        ("isa", 9),
        ("query", None),
        ("output", None),
        ("key", None),
        ("slot_mapping", None),
        ("seq_lens", None),
        ("num_tokens", 3),
        ("num_tokens", -1),
        ("query_token_stride", 1),
        ("output_token_stride", 1),
        ("key_token_stride", 1),
        ("block_table_stride", 1),
        ("sliding_window", -1),
        ("soft_cap", float("inf")),
    ],
)
def test_the_c_side_refuses_what_the_wrapper_would(field: str, value: object) -> None:
    arguments = small_arguments()
    task = AttentionTask(**arguments)
    setattr(task.argument, field, value)
    cache_before = arguments["kv_cache"].clone()
    with pytest.raises(MoeLightningError, match="bad argument"):
        task.run()
    assert torch.equal(bits(arguments["kv_cache"]), bits(cache_before)), "a refused task must write nothing"


def test_a_task_with_nothing_to_do_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to do"):
        AttentionTask(torch.zeros(1, 1, 2, 16, 16))


def test_auto_never_means_scalar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "available_isas", lambda: ("scalar",))
    assert attention.resolve_isa("scalar") == "scalar"
    for isa in ("auto", "avx2"):
        with pytest.raises(UnsupportedError, match="scalar"):
            attention.resolve_isa(isa)


def test_without_the_native_library_auto_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MoeLightningError("the native library is not there")

    monkeypatch.setattr(native, "library", missing)
    with pytest.raises(MoeLightningError, match="not there"):
        attention.resolve_isa("auto")


def test_a_pool_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        AttentionPool(0)
    with pytest.raises(MoeLightningError, match="cannot start 1 attention threads on CPUs"):
        AttentionPool(2, cpus=[1023])
    pool = AttentionPool(2)
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        AttentionTask(**small_arguments(), pool=pool)


def test_supported_head_dims_are_the_multiples_of_8_up_to_256() -> None:
    assert attention.supported_head_dims() == tuple(range(8, 257, 8))
