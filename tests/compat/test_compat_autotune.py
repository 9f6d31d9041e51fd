"""`SparseAttentionMeansim`: its values per head, its files, and where tuning comes in."""

from __future__ import annotations

import math
import os
import pickle
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import oracle
import sparge
from sparge import KeepMass, Recipe
from sparge.compat.spas_sage_attn import autotune, spas_sage2_attn_meansim_cuda
from sparge.compat.spas_sage_attn.autotune import (
    SparseAttentionMeansim,
    extract_sparse_attention_state_dict,
    load_sparse_attention_state_dict,
)

FIELDS = ("is_sparse", "cdfthreshd", "simthreshd1", "simthreshd2", "pvthreshd")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv("TUNE_MODE", raising=False)
    monkeypatch.setenv("SPARGE_BACKEND", "reference")


def values(heads=2, shift=0.0):
    """As a tuned file holds them; head 0 is not sparse."""
    return {
        "is_sparse": torch.arange(heads) > 0,
        "cdfthreshd": torch.tensor([1.0, *[0.8 + shift] * (heads - 1)]),
        "simthreshd1": torch.tensor([1.0, *[-0.9375] * (heads - 1)]),
        "simthreshd2": torch.zeros(heads),
        "pvthreshd": torch.tensor([20.0, *[10.0 + shift] * (heads - 1)]),
    }


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.Module()
        self.attn.inner_attention = SparseAttentionMeansim()


class Model(nn.Module):
    """Named so that one list's names contain the other's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.transformer_blocks = nn.ModuleList(Block() for _ in range(2))
        self.single_transformer_blocks = nn.ModuleList(Block() for _ in range(2))


def saved():
    return {
        f"{blocks}.{i}.attn.inner_attention.{name}": value
        for b, blocks in enumerate(("transformer_blocks", "single_transformer_blocks"))
        for i in range(2)
        for name, value in values(shift=0.01 * (2 * b + i)).items()
    }


def modules(model):
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    return [block.attn.inner_attention for block in blocks]


def tuned(**changes):
    module = SparseAttentionMeansim()
    module.set_values({**values(), **changes})
    return module


# --- inference --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_each_head_has_its_own_settings(is_causal, layout):
    q, k, v = oracle.clustered_qkv(L=500)
    recipe = Recipe(
        KeepMass((1.0, torch.tensor(0.8).item())),
        "mean",
        min_similarity=(1.0, None),
        pv_skip=(None, 10 * math.log(2)),
        sink_blocks=1,
        local_blocks=0,
    )
    expected = sparge.attention(q, k, v, is_causal=is_causal, recipe=recipe)
    given = (q, k, v) if layout == "HND" else [x.transpose(1, 2) for x in (q, k, v)]
    with sparge.record() as runs:
        out, sparsity = tuned()(
            *given, is_causal=is_causal, tensor_layout=layout, return_sparsity=True
        )
    assert torch.equal(out if layout == "HND" else out.transpose(1, 2), expected)
    assert sparsity == runs[0].sparsity > 0
    assert torch.equal(tuned()(*given, None, is_causal, None, layout), out)


def test_a_head_that_is_not_sparse_computes_every_block():
    """Also where a mass of 1.0 would drop blocks that the prediction rounds to nothing."""
    q, k, _ = oracle.clustered_qkv(L=640)
    q = q * 20
    with sparge.record() as runs:
        spas_sage2_attn_meansim_cuda(
            q, k, k, cdfthreshd=torch.tensor([1.0, 0.8]), simthreshd1=torch.tensor([1.0, -1.0])
        )
        tuned(cdfthreshd=torch.tensor([0.3, 0.8]), simthreshd1=torch.tensor([-1.0, -1.0]))(q, k, k)
    for run in runs:
        plan = sparge.make_plan(q, k, recipe=run.recipe)
        assert plan.head_density()[0, 0] == 1.0
        assert plan.head_density()[0, 1] < 1.0
    assert runs[1].recipe.pv_skip[0] is None


def test_dense_values_give_dense_attention():
    q, k, v = oracle.make_qkv(Lq=300)
    module = tuned(is_sparse=torch.tensor([False, False]))
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        out = module(*(x.to(dtype) for x in (q, k, v)), is_causal=True, scale=0.3, smooth_k=False)
        assert out.dtype == dtype
        truth = oracle.dense(q, k, v, is_causal=True, scale=0.3)[0]
        assert oracle.relative_l1(out, truth) < bound


def test_refusals(no_work):
    q, k, v = oracle.make_qkv(Lq=140)
    for call, error, words in (
        (lambda: SparseAttentionMeansim()(q, k, v), ValueError, "no values yet.*tune_mode=True"),
        (lambda: tuned()(q, k, v, mask=q), sparge.Unsupported, "mask must be None"),
        (lambda: tuned()(q, k, v, tensor_layout="NHD"), ValueError, "values for 2 heads and q has"),
        (lambda: tuned()(q, k, v, smooth_k=2), TypeError, "smooth_k must be True or False"),
        (lambda: tuned()(q, k, v, tune_mode=1), TypeError, "tune_mode must be True or False"),
        (lambda: SparseAttentionMeansim("l2"), ValueError, "sim_rule must be one of l1, cosine"),
        (lambda: SparseAttentionMeansim(l1=0.1), ValueError, "0 <= l1 < pv_l1.*l1=0.1"),
        (lambda: SparseAttentionMeansim(cos_sim=2), ValueError, "cos_sim <= 1"),
        (
            lambda: SparseAttentionMeansim(rearrange_kwargs={"a": 1}),
            sparge.Unsupported,
            "rearrange_kwargs must be empty",
        ),
    ):
        with pytest.raises(error, match=words):
            call()


# --- values and files -------------------------------------------------------------------------


def test_values_go_out_and_come_back(tmp_path):
    model = load_sparse_attention_state_dict(Model(), saved())
    out = extract_sparse_attention_state_dict(model)
    assert list(out) == list(saved())
    assert all(torch.equal(out[name], value) for name, value in saved().items())
    torch.save(out, tmp_path / "tuned.pt")
    again = load_sparse_attention_state_dict(Model(), tmp_path / "tuned.pt")
    assert all(map(torch.equal, extract_sparse_attention_state_dict(again).values(), out.values()))


def test_names_that_contain_others_keep_their_own_values():
    """The original gives both lists the values of one."""
    model = load_sparse_attention_state_dict(Model(), saved())
    masses = [module.cdfthreshd[1].item() for module in modules(model)]
    assert masses == pytest.approx([0.80, 0.81, 0.82, 0.83])


def test_a_file_of_the_original_is_read(tmp_path, capsys):
    """Parameters, no simthreshd2, is_sparse as numbers, half precision: all of it occurs."""
    changed = {
        name: nn.Parameter(value.to(torch.bfloat16), requires_grad=False)
        for name, value in saved().items()
        if not name.endswith("simthreshd2")
    }
    torch.save(changed, tmp_path / "tuned.pt")
    model = Model()
    returned = load_sparse_attention_state_dict(
        model, str(tmp_path / "tuned.pt"), multigpu=True, verbose=True
    )
    assert returned is model
    assert capsys.readouterr().out.count("2 heads loaded") == 4
    for module in modules(model):
        assert module.is_sparse.tolist() == [False, True]
        assert module.simthreshd2.tolist() == [0, 0]
        assert module.cdfthreshd.dtype == torch.float32


def test_saved_values_stay_those_of_the_caller():
    mine = saved()
    model = load_sparse_attention_state_dict(Model(), mine)
    next(iter(mine.values())).fill_(True)
    mine["transformer_blocks.0.attn.inner_attention.cdfthreshd"].fill_(0.1)
    assert modules(model)[0].cdfthreshd.tolist() == pytest.approx([1.0, 0.8])
    assert modules(model)[0].is_sparse.tolist() == [False, True]


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("went_off",)


def test_a_file_that_would_run_code_is_refused_unread(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({**saved(), "extra": Bomb()}, "bomb.pt")
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(Bomb(), protocol=2))
    (tmp_path / "noise.pt").write_bytes(b"no tensors here")
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save([1, 2], "list.pt")
    torch.save({**saved(), "extra": 1}, "extra.pt")
    for name, error, words in (
        ("bomb.pt", ValueError, "bomb.pt holds more than tensors, .*could run its code.*trust"),
        ("plain.pkl", ValueError, "holds more than tensors"),
        ("noise.pt", ValueError, "noise.pt"),
        ("empty.pt", ValueError, "empty.pt is damaged"),
        ("list.pt", TypeError, "must hold a dict .*got list"),
        ("extra.pt", TypeError, "names to tensors, got 'extra': int"),
        ("absent.pt", FileNotFoundError, "absent.pt"),
    ):
        with pytest.raises(error, match=words):
            load_sparse_attention_state_dict(Model(), name)
    assert not (tmp_path / "went_off").exists()
    pickle.loads((tmp_path / "plain.pkl").read_bytes())
    assert (tmp_path / "went_off").exists()  # it is a real one


KEY = "transformer_blocks.1.attn.inner_attention."


@pytest.mark.parametrize(
    "change, words",
    [
        ({"other.cdfthreshd": torch.ones(2)}, "values without a module: other.cdfthreshd"),
        ({KEY + "pvthreshd": torch.ones(3)}, "1-D values.*pvthreshd \\[3\\]"),
        ({KEY + "pvthreshd": torch.tensor(1.0)}, "1-D values"),
        ({KEY + "cdfthreshd": torch.tensor([1.0, 1.2])}, "blocks.1.*in \\(0, 1\\], got 1.2"),
        ({KEY + "cdfthreshd": torch.tensor([1.0, math.nan])}, "blocks.1.*got nan"),
        ({KEY + "pvthreshd": torch.tensor([1.0, 0.0])}, "blocks.1.*greater than 0, got 0.0"),
        ({KEY + "simthreshd1": None}, "inner_attention has no simthreshd1"),
        (dict.fromkeys([KEY + n for n in FIELDS]), "modules without values: transformer_blocks.1"),
    ],
)
def test_wrong_values_are_refused_and_nothing_changes(change, words):
    wrong = {k: v for k, v in {**saved(), **change}.items() if v is not None}
    model = Model()
    with pytest.raises(ValueError, match=words):
        load_sparse_attention_state_dict(model, wrong)
    assert extract_sparse_attention_state_dict(model) == {}


def test_the_models_dtype_leaves_the_values_alone():
    model = load_sparse_attention_state_dict(Model(), saved())
    model.to(torch.bfloat16).half().to("meta")
    assert model.weight.is_meta
    out = extract_sparse_attention_state_dict(model)
    assert all(torch.equal(out[name], value) for name, value in saved().items())


def test_an_ordinary_state_dict_carries_them():
    whole = load_sparse_attention_state_dict(Model(), saved()).state_dict()
    assert set(whole) == {"weight", *saved()}
    model = Model()
    model.load_state_dict(whole)
    assert modules(model)[3].cdfthreshd[1].item() == pytest.approx(0.83)
    Model().load_state_dict({"weight": whole["weight"]})
    with pytest.raises(RuntimeError, match=r"Missing key.*cdfthreshd"):
        model.load_state_dict({"weight": whole["weight"]})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*inner_attention.more"):
        model.load_state_dict({**whole, KEY + "more": torch.ones(1)})
    with pytest.raises(RuntimeError, match="greater than 0"):
        model.load_state_dict({**whole, KEY + "pvthreshd": -torch.ones(2)})


def test_values_set_as_the_original_sets_them():
    q, k, v = oracle.clustered_qkv(L=400)
    module = SparseAttentionMeansim()
    module.cdfthreshd = nn.Parameter(torch.tensor([1.0, 0.8]), requires_grad=False)
    with pytest.raises(ValueError, match="has no is_sparse, simthreshd1, pvthreshd"):
        module(q, k, v)
    for name, value in values().items():
        setattr(module, name, nn.Parameter(value, requires_grad=False))
    assert torch.equal(module(q, k, v), tuned()(q, k, v))
    assert set(extract_sparse_attention_state_dict(module)) == set(FIELDS)


# --- tuning -----------------------------------------------------------------------------------


@pytest.fixture
def tuner(monkeypatch, tmp_path):
    """An installed tuner that answers from a list, and keeps what it was asked."""
    module = ModuleType("a_tuner")
    module.asked, module.answers = [], []

    def tune_head_settings(query, key, value, *, is_causal, scale, l1, l2):
        module.asked.append((tuple(query.shape), is_causal, scale, l1, l2))
        return module.answers.pop(0)

    module.tune_head_settings = tune_head_settings
    monkeypatch.setitem(sys.modules, "a_tuner", module)
    metadata = tmp_path / "a_tuner-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: a-tuner\nVersion: 1\n")
    entry = "[sparge.tuner]\ntune_head_settings = a_tuner:tune_head_settings\n"
    (metadata / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(tmp_path)
    return module


def test_without_a_tuner_tuning_is_refused(monkeypatch):
    monkeypatch.setattr(autotune, "TUNER", "sparge.no_such_group")
    q, k, v = oracle.make_qkv(Lq=140)
    why = r'has the tuner(?s:.*)pip install "sparge\[tools\]"(?s:.*)load_sparse'
    with pytest.raises(sparge.Unsupported, match=why):
        SparseAttentionMeansim()(q, k, v, tune_mode=True)


def test_tuning_finds_values_and_returns_exact_attention(tuner, monkeypatch):
    q, k, v = oracle.make_qkv(Lq=300)
    truth = oracle.dense(q, k, v, is_causal=True, scale=0.3)[0]
    first = Recipe(KeepMass((0.9, 0.7)), "mean", (None, 0.25), (3.0, None))
    second = Recipe(KeepMass((1.0, 0.8)), "mean", (None, 0.125), (2.0, 1.0))
    tuner.answers += [first, second]
    module = SparseAttentionMeansim(l1=0.05, pv_l1=0.06)
    nhd = [x.transpose(1, 2) for x in (q, k, v)]
    out = module(*nhd, is_causal=True, scale=0.3, tensor_layout="NHD", tune_mode=True)
    assert oracle.relative_l1(out.transpose(1, 2), truth) < 1e-5
    assert tuner.asked == [((1, 2, 300, 32), True, 0.3, 0.05, 0.06)]
    assert module.cdfthreshd.tolist() == pytest.approx([0.9, 0.7])
    assert module.pvthreshd.tolist() == pytest.approx([3 / math.log(2), math.inf])
    recipe = module._recipe(2, "int8")
    assert recipe.keep.mass == pytest.approx((0.9, 0.7))
    assert recipe.min_similarity == (None, 0.25)
    assert recipe.pv_skip == (pytest.approx(3.0), None)

    monkeypatch.setenv("TUNE_MODE", "1")
    out, sparsity = module(q, k, v, is_causal=True, scale=0.3, return_sparsity=True)
    assert oracle.relative_l1(out, truth) < 1e-5
    assert sparsity == 0.0
    assert module.num_data_passed == 2
    assert module.is_sparse.tolist() == [False, True]
    assert module.cdfthreshd.tolist() == pytest.approx([1.0, 0.8])
    assert module.simthreshd1.tolist() == [1.0, 0.25]
    assert module.pvthreshd[1].item() == math.inf


def test_tuning_of_the_second_filter_can_be_left_out(tuner):
    q, k, v = oracle.make_qkv(Lq=140)
    tuner.answers.append(Recipe(sparge.KeepAll()))
    module = SparseAttentionMeansim(tune_pv=False)
    module(q, k, v, tune_mode=True)
    assert tuner.asked[0][-1] is None
    assert module.is_sparse.tolist() == [False, False]
    with pytest.raises(sparge.Unsupported, match=r"sim_rule='cosine'\n.*l1"):
        SparseAttentionMeansim("cosine")(q, k, v, tune_mode=True)
