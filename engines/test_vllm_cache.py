"""vLLM's packed cache is read back as it was written, for each of its instruction sets."""

from __future__ import annotations

import pytest
import torch

from sparge.serving.vllm.cache_layout import Order

cpu = pytest.importorskip("sparge.serving.vllm.cpu")


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    from vllm.platforms import current_platform

    current_platform.import_kernels()


@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("block, D", [(128, 64), (32, 128), (96, 64), (128, 256)])
def test_keys_and_values_come_back(isa, dtype, block, D):
    from vllm import _custom_ops as ops

    torch.manual_seed(0)
    layout = cpu.layout_of(isa, dtype, block, D)
    assert layout is not None
    Hk, tokens, blocks = 2, 3 * block - 5, 7
    cache = torch.zeros(blocks, Hk, block, 2 * D, dtype=dtype)
    key, value = (torch.randn(tokens, Hk, D).to(dtype) for _ in range(2))
    table = torch.randperm(blocks)[:3].to(torch.int32)
    slots = (table[:, None] * block + torch.arange(block)).flatten()[:tokens]
    halves = cache.view(blocks, Hk, 2 * block, D).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, *halves, slots.long(), isa)
    read = [torch.full_like(key, float("nan")) for _ in range(2)]
    layout.read(cache, table, *read)
    assert torch.equal(read[0], key)
    assert torch.equal(read[1], value)


def test_the_orders_of_the_instruction_sets():
    """What vLLM 0.32 does; a change here is worth a look, though not an error by itself."""
    vec, amx = (cpu.layout_of(isa, torch.bfloat16, 128, 64) for isa in ("vec", "amx"))
    assert (vec.keys, vec.values) == (Order("tokens", 128, 1), Order("channels", 64, 1))
    assert (amx.keys, amx.values) == (Order("tokens", 16, 2), Order("channels", 16, 2))


def test_a_cache_that_vllm_refuses_has_no_layout():
    assert cpu.layout_of("amx", torch.bfloat16, 16, 64) is None


def test_its_kernel_is_timed():
    cost = cpu.own_cost(128, "vec", 2, 1, 64, torch.bfloat16, 1)
    assert 0 < cost.pair < 1e-6
    assert 0 < cost.key < 1e-3
