"""Layers are bound to their settings when a worker starts: vLLM's state is read here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .refusals import LEFT_DENSE, why_layer_not_served
from .routing import OwnCost, Shape, calibrate_backend
from .served import WORKER, ServedLayer
from .serving import ServingImpl
from .settings import asked_for, read_settings

Measure = Callable[[Any, Shape], OwnCost | None]


def bind_layers(layer_names: list[str], config: Any, *, measure: Measure) -> None:
    """Give the layers of a cache group their recipes. ValueError or `Unsupported` ends the start:
    a setting is wrong, or does not fit this model."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )
    from vllm.logger import init_logger
    from vllm.model_executor.layers.attention import Attention

    logger = init_logger("vllm.sparge")
    asked_for()
    WORKER.settings = settings = read_settings(config.additional_config)
    WORKER.rank = get_tensor_model_parallel_rank()
    WORKER.ranks = get_tensor_model_parallel_world_size()
    for name, layer in get_layers_from_vllm_config(config, Attention, layer_names).items():
        impl = layer.impl
        if not isinstance(impl, ServingImpl):
            continue
        served = _served(name, impl, config, measure)
        impl.served = WORKER.layers[name] = served
    bound = [WORKER.layers[name] for name in layer_names if name in WORKER.layers]
    left = {layer.why for layer in bound if layer.why}
    logger.info(
        "sparge serves %d of %d layers with %s%s",
        sum(not layer.why for layer in bound),
        len(bound),
        settings.origin,
        f"; left to vLLM: {', '.join(sorted(left))}" if left else "",
    )
    WORKER.start_log(logger.info)


def _served(name: str, impl: Any, config: Any, measure: Measure) -> ServedLayer:
    settings = WORKER.settings
    if why := why_layer_not_served(impl):
        return ServedLayer(name, None, settings.backend, why)
    if config.parallel_config.decode_context_parallel_size > 1:
        return ServedLayer(name, None, settings.backend, "decode context parallelism")
    heads = impl.num_heads
    recipe = settings.recipe_of(
        name, first=WORKER.rank * heads, heads=heads, all_heads=WORKER.ranks * heads
    )
    if recipe is None:
        return ServedLayer(name, None, settings.backend, LEFT_DENSE)
    on_card = config.device_config.device_type != "cpu"
    shape = Shape(
        Hq=heads,
        Hk=impl.num_kv_heads,
        D=impl.head_size,
        dtype=config.model_config.dtype,
        device=config.device_config.device_type,
        scale=impl.scale,
        recipe=recipe,
        # A worker's own card is the current one.
        index=max(torch.accelerator.current_device_index(), 0) if on_card else 0,
    )
    calibrate_backend(shape, settings.backend)
    return ServedLayer(name, shape, settings.backend, own=measure(impl, shape))
