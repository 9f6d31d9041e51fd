"""The functions of `spas_sage_attn`, on every backend, against fp64 attention by the formula."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

import oracle
import sparge
from sparge import KeepFraction, KeepMass, Recipe
from sparge.compat import spas_sage_attn as compat
from sparge.compat.spas_sage_attn import (
    block_sparse_sage2_attn_cuda,
    spas_sage2_attn_meansim_cuda,
    spas_sage2_attn_meansim_topk_cuda,
)

LN2 = math.log(2)
CDF, TOPK = spas_sage2_attn_meansim_cuda, spas_sage2_attn_meansim_topk_cuda
NAMES = ["spas_sage2_attn_meansim_cuda", "spas_sage2_attn_meansim_topk_cuda"]


def everything(name):
    """The function of that name, set to leave nothing out."""
    function = getattr(compat, name)
    full = {"topk": 1.0} if "topk" in name else {"cdfthreshd": 1.0, "simthreshd1": 1.0}
    return lambda *tensors, **options: function(*tensors, **{**full, **options})


@pytest.fixture
def forced(backend, monkeypatch):
    """A backend that runs whatever the size of the call."""
    monkeypatch.setenv("SPARGE_BACKEND", backend)
    return backend


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.setenv("SPARGE_BACKEND", "reference")


def test_names_order_and_defaults_are_the_originals():
    after = {
        "pvthreshd": 50,
        "attention_sink": False,
        "tensor_layout": "HND",
        "output_dtype": torch.float16,
        "return_sparsity": False,
    }
    before = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
    before["smooth_k"] = True
    cdf = {**before, "simthreshd1": 0.6, "cdfthreshd": 0.98, **after}
    topk = {**before, "simthreshd1": -0.1, "cdfthreshd": None, "topk": 0.5, **after}
    mask = {"mask_id": None, "dropout_p": 0.0, "scale": None, "smooth_k": True, **after}
    expected = {CDF: cdf, TOPK: topk}
    for function, defaults in {**expected, block_sparse_sage2_attn_cuda: mask}.items():
        parameters = inspect.signature(function).parameters
        assert list(parameters) == ["q", "k", "v", *defaults]
        assert {n: p.default for n, p in parameters.items() if n in defaults} == defaults
    # The first generation differs in its engine alone, and there is one engine here.
    assert compat.spas_sage_attn_meansim_cuda is CDF
    assert compat.spas_sage_attn_meansim_topk_cuda is TOPK


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_left_out_is_dense_attention(name, is_causal, layout, forced):
    q, k, v = oracle.make_qkv(B=2, Lq=300, Lk=330)
    truth, _ = oracle.dense(q, k, v, is_causal=is_causal)
    given = (q, k, v) if layout == "HND" else [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    options = {"is_causal": is_causal, "tensor_layout": layout}
    for smooth_k, bound in ((True, 0.03), (False, 1e-5)):
        out = everything(name)(*given, smooth_k=smooth_k, **options)
        out = out if layout == "HND" else out.transpose(1, 2)
        assert oracle.relative_l1(out, truth) < bound


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_a_block_mask_runs_exactly_its_blocks(layout, forced):
    q, k, v = oracle.make_qkv(B=2, Lq=300, Lk=330)
    mask = torch.rand(2, 2, 3, 6, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[0, 1, 2] = False
    truth, _ = oracle.dense(q, k, v, kept=mask)
    given = (q, k, v) if layout == "HND" else [x.transpose(1, 2) for x in (q, k, v)]
    for smooth_k, bound in ((True, 0.03), (False, 1e-5)):
        for mask_id in (mask, mask.to(torch.int32), mask.float() * 3):
            out, sparsity = block_sparse_sage2_attn_cuda(
                *given,
                mask_id,
                smooth_k=smooth_k,
                pvthreshd=math.inf,
                tensor_layout=layout,
                return_sparsity=True,
            )
            out = out if layout == "HND" else out.transpose(1, 2)
            assert oracle.relative_l1(out, truth) < bound
            assert (out[0, 1, 256:] == 0).all()
            assert sparsity == pytest.approx(1 - mask.double().mean().item())


def test_the_sink_of_a_block_mask_is_added(reference):
    q, k, v = oracle.make_qkv(Lq=300)
    mask = torch.zeros(1, 2, 3, 5, dtype=torch.bool)
    mask[..., 2] = True
    before = mask.clone()
    out = block_sparse_sage2_attn_cuda(q, k, v, mask, smooth_k=False, attention_sink=True)
    assert torch.equal(mask, before)
    mask[..., 0] = True
    assert oracle.relative_l1(out, oracle.dense(q, k, v, kept=mask)[0]) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_no_row_sees_the_future(name, forced):
    """Cut within a block: 300 is neither a query block's end nor a key block's."""
    q, k, v = oracle.make_qkv(Lq=512)
    g, changed = torch.Generator().manual_seed(1), [x.clone() for x in (k, v)]
    for x in changed:
        x[:, :, 301:] = 7 * torch.randn(x[:, :, 301:].shape, generator=g)
    call = everything(name)
    options = {"is_causal": True, "smooth_k": False}
    before, after = call(q, k, v, **options), call(q, *changed, **options)
    # Rows that share a group round together: a neighbour that sees the change may move a last bit.
    same = {"rtol": 0, "atol": 0 if forced == "reference" else 1e-6}
    torch.testing.assert_close(before[:, :, :301], after[:, :, :301], **same)
    assert not torch.equal(before[:, :, 301:], after[:, :, 301:])
    # Sparse and quantized too: what later tokens hold cannot be seen, whatever blocks were kept.
    function = getattr(compat, name)
    sparse, other = (function(q, k, x, is_causal=True) for x in (v, changed[1]))
    assert torch.equal(sparse[:, :, :301], other[:, :, :301])


@pytest.mark.parametrize("Lq, Lk", [(140, 300), (300, 140)])
def test_the_diagonal_is_top_left(Lq, Lk, forced):
    q, k, v = oracle.make_qkv(Lq=Lq, Lk=Lk)
    truth, _ = oracle.dense(q, k, v, is_causal=True, causal_align="top_left")
    for name in NAMES:
        out = everything(name)(q, k, v, is_causal=True, smooth_k=False)
        assert oracle.relative_l1(out, truth) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*NAMES, "block_sparse_sage2_attn_cuda"])
def test_the_dtype_that_came_goes(name, dtype):
    q, k, v = oracle.make_qkv(Lq=200, dtype=dtype)
    blocks = (torch.ones(1, 2, 2, 4, dtype=torch.bool),) if name.startswith("block") else ()
    for smooth_k in (True, False):
        assert getattr(compat, name)(q, k, v, *blocks, smooth_k=smooth_k).dtype == dtype
    for asked, got in ((torch.float16, dtype), (None, dtype), (torch.float32, torch.float32)):
        assert getattr(compat, name)(q, k, v, *blocks, output_dtype=asked).dtype == got


def test_float64_stays_exact(reference):
    q, k, v = oracle.make_qkv(Lq=200, dtype=torch.float64)
    for name in NAMES:
        out = everything(name)(q, k, v, smooth_k=False, is_causal=True, scale=0.3)
        truth, _ = oracle.dense(q, k, v, is_causal=True, scale=0.3)
        assert oracle.relative_l1(out, truth) < 1e-12


HALVES = torch.tensor([0.25, 0.75])
TRANSLATED = [
    (TOPK, {}, Recipe(KeepFraction(0.5), "mean", None, 50 * LN2, sink_blocks=0, local_blocks=0)),
    (CDF, {}, Recipe(KeepMass(0.98), "mean", 0.6, 50 * LN2, sink_blocks=0, local_blocks=0)),
    (
        TOPK,
        {"topk": None, "cdfthreshd": 0.9, "attention_sink": True},
        Recipe(KeepMass(0.9), "mean", None, 50 * LN2, sink_blocks=1, local_blocks=0),
    ),
    (
        CDF,
        {"pvthreshd": 3, "simthreshd1": 0, "cdfthreshd": torch.tensor(0.5)},
        Recipe(KeepMass(0.5), "mean", 0.0, 3 * LN2, sink_blocks=0, local_blocks=0),
    ),
    (
        CDF,
        {"cdfthreshd": HALVES, "simthreshd1": torch.tensor([-1.0, 1.0]), "pvthreshd": math.inf},
        Recipe(
            KeepMass((0.25, 1.0)), "mean", (None, 1.0), (None, None), sink_blocks=0, local_blocks=0
        ),
    ),
    (
        TOPK,
        {"topk": HALVES, "pvthreshd": torch.tensor([1.0, 2.0]), "simthreshd1": [0.25, 2.0]},
        Recipe(
            KeepFraction((0.25, 1.0)),
            "mean",
            (0.25, 1.0),
            (LN2, 2 * LN2),
            sink_blocks=0,
            local_blocks=0,
        ),
    ),
]


@pytest.mark.parametrize("function, options, recipe", TRANSLATED)
def test_thresholds_become_the_recipe_that_means_the_same(function, options, recipe, forced):
    q, k, v = oracle.clustered_qkv(L=400)
    asked = {"is_causal": True, "scale": 0.4}
    with sparge.record() as runs:
        expected = sparge.attention(q, k, v, recipe=recipe, **asked)
    out, sparsity = function(q, k, v, return_sparsity=True, **asked, **options)
    assert torch.equal(out, expected)
    assert sparsity == runs[0].sparsity


def test_the_sparsity_is_counted_over_what_may_be_attended(forced):
    """4 x 8 blocks, of which a causal map may attend 2 + 4 + 6 + 8."""
    q, k, v = oracle.make_qkv(Lq=512)
    sparsities = {}
    for is_causal in (False, True):
        options = {"is_causal": is_causal, "pvthreshd": math.inf, "return_sparsity": True}
        out, sparsities[is_causal] = TOPK(q, k, v, topk=0.25, **options)
        assert isinstance(sparsities[is_causal], float)
        assert out.shape == q.shape
    assert sparsities[False] == 0.75
    plan = sparge.make_plan(
        q,
        k,
        is_causal=True,
        recipe=Recipe(KeepFraction(0.25), "mean", sink_blocks=0, local_blocks=0),
    )
    assert int(plan.allowed.sum()) == 2 * 20
    assert sparsities[True] == pytest.approx(1 - plan.density)
    assert sparsities[True] > 0.2


def test_pv_products_skipped_are_counted(forced):
    q, k, v = oracle.clustered_qkv(L=384, noise=0.1)
    options = {"topk": 1.0, "return_sparsity": True}
    with sparge.record() as runs:
        _, off = TOPK(q, k, v, pvthreshd=math.inf, **options)
        _, on = TOPK(q, k, v, pvthreshd=1.0, **options)
    assert off == 0.0
    assert on == pytest.approx(runs[1].pv_skipped / 2)
    assert on > 0.1


def test_what_runs_dense_says_so():
    """Too short to gain: dense attention runs, and nothing was left out."""
    q, k, v = oracle.make_qkv(Lq=140)
    out, sparsity = TOPK(q, k, v, topk=0.25, return_sparsity=True)
    assert sparsity == 0.0
    assert oracle.relative_l1(out, oracle.dense(q, k, v)[0]) < 1e-5


@pytest.mark.parametrize("Lq, Lk, D, Hk", [(1, 70, 8, 4), (127, 1, 80, 2), (150, 150, 256, 1)])
def test_sizes_the_original_refuses(Lq, Lk, D, Hk, forced):
    q, k, v = oracle.make_qkv(Hq=4, Hk=Hk, Lq=Lq, Lk=Lk, D=D)
    truth, _ = oracle.dense(q, k, v)
    for name in NAMES:
        assert oracle.relative_l1(everything(name)(q, k, v, smooth_k=False), truth) < 1e-5


def test_a_compiled_program_gets_the_same(reference):
    q, k, v = oracle.make_qkv(Lq=256)

    def program(q, k, v):
        return TOPK(q * 2, k, v, topk=0.5, is_causal=True) + 1

    compiled = torch.compile(program, backend="eager")
    assert torch.equal(compiled(q, k, v), program(q, k, v))
