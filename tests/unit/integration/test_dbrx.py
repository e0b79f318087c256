# SPDX-License-Identifier: Apache-2.0
"""The name mapping of the DBRX patch; that the patched loader works is tests/integration/test_stock_oracles.py."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from vllm_moe_lightning.integration import dbrx


@pytest.mark.parametrize("part", ["w1", "v1", "w2", "w1_weight", "w2_weight_scale"])
def test_expert_names_get_the_missing_step(part):
    mapped = dbrx.map_expert_name(f"blocks.12.ffn.experts.mlp.{part}")
    assert mapped == f"blocks.12.ffn.experts.routed_experts.mlp.{part}"


@pytest.mark.parametrize("name", ["wte.weight", "blocks.0.ffn.router.layer.weight", "norm_f.weight"])
def test_other_names_stay(name):
    assert dbrx.map_expert_name(name) == name


def test_mapping_twice_is_mapping_once():
    name = "blocks.0.ffn.experts.mlp.w1"
    assert dbrx.map_expert_name(dbrx.map_expert_name(name)) == dbrx.map_expert_name(name)


class _DbrxModelAsInVllm032:
    def load_weights(self, weights):
        mapping = [f"mlp.{weight_name}" for weight_name in ["w1", "v1", "w2"]]
        return {name for name, _ in weights if any(part in name for part in mapping)}


class _DbrxModelMended:
    def load_weights(self, weights):
        return {name for name, _ in weights if "routed_experts" not in name}


class _DbrxModelUnknown:
    def load_weights(self, weights, *, strict):
        return strict


@pytest.fixture
def fake_vllm(monkeypatch):
    """Puts a module with the given DbrxModel where vLLM's would be."""

    def install(model_class):
        module = ModuleType("vllm.model_executor.models.dbrx")
        # A class of its own for each test, since the patch stays on it; the source must be readable.
        module.DbrxModel = type("DbrxModel", (), {"load_weights": model_class.load_weights})
        for name in ("vllm", "vllm.model_executor", "vllm.model_executor.models"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return module.DbrxModel

    return install


def test_patched_loader_sees_mapped_names_and_a_second_call_does_nothing(fake_vllm):
    model_class = fake_vllm(_DbrxModelAsInVllm032)
    dbrx.apply()
    patched = model_class.load_weights
    dbrx.apply()
    assert model_class.load_weights is patched
    loaded = model_class().load_weights([("blocks.0.ffn.experts.mlp.w1", None), ("wte.weight", None)])
    assert loaded == {"blocks.0.ffn.experts.routed_experts.mlp.w1"}


def test_a_mended_vllm_is_left_alone(fake_vllm):
    model_class = fake_vllm(_DbrxModelMended)
    dbrx.apply()
    assert model_class.load_weights is _DbrxModelMended.load_weights


def test_an_unknown_loader_is_refused_with_a_sentence(fake_vllm):
    fake_vllm(_DbrxModelUnknown)
    with pytest.raises(RuntimeError, match=r"cannot patch DBRX.*vLLM 0\.32"):
        dbrx.apply()


def test_a_vllm_without_dbrx_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.dbrx", None)
    with pytest.raises(RuntimeError, match="cannot patch DBRX"):
        dbrx.apply()
