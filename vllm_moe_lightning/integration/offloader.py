"""Follows a model while vLLM builds and loads it: which modules are its decoder layers, and when the experts are there.

vLLM's offloader interface, used for its moments only; moving weights is the store's and the ring's work.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.offloader.base import BaseOffloader

from vllm_moe_lightning.errors import UnsupportedError
from vllm_moe_lightning.integration.experts import PagedExperts
from vllm_moe_lightning.weights.store import ExpertLayer

# Small tensors (biases, scales that kernels derive) stay on the device: they cost little, and methods keep copies.
SMALL_TENSOR_BYTES = 1 << 20
SMALL_TENSOR_SHARE = 1 / 64  # of the layer's experts; a tensor must be small in both senses to stay
LEAST_SHARE_KEPT = 0.5  # of an expert container's bytes as built: no kernel's packing makes them smaller
ALIAS_SEARCH_DEPTH = 4


class PagingOffloader(BaseOffloader):
    """Installed between the runner's construction and the loading of the model. `on_loaded(layers)` runs once the
    weights are loaded and packed."""

    def __init__(self, on_loaded: Callable[[list[torch.nn.Module]], None]) -> None:
        self._on_loaded = on_loaded
        self._decoder_layers: list[torch.nn.Module] = []
        self.other_bytes_in_layers = 0
        """Weights of the decoder layers that are not experts, as built: the CPU build packs them away from sight."""
        self._is_done = False

    def wrap_modules(
        self, modules_generator: Generator[torch.nn.Module, None, None], prefix: str = ""
    ) -> list[torch.nn.Module]:
        if self._decoder_layers:
            raise UnsupportedError("moe_lightning supports models with one stack of decoder layers only")
        self._decoder_layers = list(modules_generator)
        self.other_bytes_in_layers = sum(_other_bytes(layer) for layer in self._decoder_layers)
        return self._decoder_layers

    def post_init(self) -> None:
        """Called by the runner at the end of loading, and by our worker (the CPU build's V1 runner leaves it out)."""
        if self._is_done:
            return
        self._is_done = True
        if not self._decoder_layers:
            raise UnsupportedError(
                "this model does not build its layers with vLLM's make_layers, so its experts cannot be paged; "
                "run it without --worker-cls"
            )
        self._on_loaded(self._decoder_layers)


def expert_layers(decoder_layers: list[torch.nn.Module]) -> list[ExpertLayer]:
    """The pageable parameters of each decoder layer that has experts.

    Raises UnsupportedError for an expert container that is not ours, or tensors that something else holds too.
    """
    layers = []
    for index, decoder_layer in enumerate(decoder_layers):
        parameters: dict[str, torch.nn.Parameter] = {}
        names = []
        for name, module in decoder_layer.named_modules():
            if not isinstance(module, RoutedExperts):
                continue
            if PagedExperts not in type(module).__mro__:
                raise UnsupportedError(
                    f"experts of class {type(module).__qualname__} in {module.layer_name} are not paged; "
                    "run this model without --worker-cls"
                )
            large = _large_parameters(module)
            _refuse_vanished_weights(module, large)
            _refuse_hidden_aliases(module, large)
            parameters.update({f"{name}.{key}": value for key, value in large.items()})
            names.append(module.layer_name)
        if parameters:
            layers.append(ExpertLayer(index, ", ".join(names), parameters))
    return layers


def expert_parameters(decoder_layer: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Of all sizes, the small ones that stay included."""
    modules = (module for module in decoder_layer.modules() if isinstance(module, RoutedExperts))
    return [parameter for module in modules for parameter in module.parameters()]


def expert_buffers(decoder_layer: torch.nn.Module) -> list[torch.Tensor]:
    modules = (module for module in decoder_layer.modules() if isinstance(module, RoutedExperts))
    return [buffer for module in modules for buffer in module.buffers()]


def _other_bytes(decoder_layer: torch.nn.Module) -> int:
    of_experts = {id(p) for p in expert_parameters(decoder_layer)}
    return sum(p.nbytes for p in decoder_layer.parameters() if id(p) not in of_experts)


def paged_modules(decoder_layer: torch.nn.Module) -> Iterator[PagedExperts]:
    return (module for module in decoder_layer.modules() if isinstance(module, PagedExperts))


def _large_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    all_parameters = dict(module.named_parameters())
    total = sum(p.nbytes for p in all_parameters.values())
    return {
        name: p
        for name, p in all_parameters.items()
        if p.nbytes >= SMALL_TENSOR_BYTES or p.nbytes >= total * SMALL_TENSOR_SHARE
    }


def _refuse_vanished_weights(module: Any, parameters: dict[str, torch.nn.Parameter]) -> None:
    """A method that packs the weights into objects of its own would leave them all on the device, and us the rest."""
    num_bytes = sum(p.nbytes for p in parameters.values())
    if num_bytes < LEAST_SHARE_KEPT * module.built_bytes:
        raise UnsupportedError(
            f"{module.layer_name} cannot be paged: it was built with {module.built_bytes} bytes, of which "
            f"{type(module.quant_method).__name__} left {num_bytes} in parameters; run this model without --worker-cls"
        )


def _refuse_hidden_aliases(module: torch.nn.Module, parameters: dict[str, torch.nn.Parameter]) -> None:
    """A tensor derived at load time that shares a paged parameter's memory would read another layer's experts."""
    storages = {p.untyped_storage().data_ptr(): name for name, p in parameters.items()}
    own = {id(p) for p in parameters.values()}
    for path, tensor in _reachable_tensors(module, type(module).__name__, ALIAS_SEARCH_DEPTH, set()):
        if id(tensor) not in own and tensor.untyped_storage().data_ptr() in storages:
            name = storages[tensor.untyped_storage().data_ptr()]
            raise UnsupportedError(
                f"{module.layer_name}.{name} cannot be paged: {path} keeps a view of it; "
                "run this model without --worker-cls"
            )


def _reachable_tensors(value: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if id(value) in seen or depth < 0:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if value.device.type != "meta" and value.layout is torch.strided:
            yield path, value
        return
    if isinstance(value, dict):
        children = [(str(key), child) for key, child in value.items()]
    elif isinstance(value, list | tuple):
        children = [(str(index), child) for index, child in enumerate(value)]
    elif type(value).__module__.startswith("vllm"):
        children = list(vars(value).items()) if hasattr(value, "__dict__") else []
    else:
        return
    for name, child in children:
        yield from _reachable_tensors(child, f"{path}.{name}", depth - 1, seen)
