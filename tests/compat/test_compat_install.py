"""`sparge.compat.install()`: under the name of `spas_sage_attn`, and away again; its helpers."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType

import pytest
import torch

import oracle
import sparge
import sparge.compat
from sparge.compat.spas_sage_attn import utils

NAME = "spas_sage_attn"


def theirs():
    return {n: m for n, m in sys.modules.items() if n == NAME or n.startswith(NAME + ".")}


@pytest.fixture(autouse=True)
def put_back(monkeypatch):
    """Whatever a test does to the name, the next one finds it free."""
    before = theirs()
    yield
    sparge.compat.uninstall()
    monkeypatch.undo()
    assert theirs() == before


PROGRAM = """
import sys
import sparge.compat

assert "spas_sage_attn" not in sys.modules
assert "sparge.compat.spas_sage_attn" not in sys.modules
sparge.compat.install()

import torch
import spas_sage_attn
from spas_sage_attn import spas_sage2_attn_meansim_topk_cuda
from spas_sage_attn.core import block_sparse_sage2_attn_cuda
from spas_sage_attn.autotune import (
    SparseAttentionMeansim,
    extract_sparse_attention_state_dict,
    load_sparse_attention_state_dict,
)
import spas_sage_attn.utils as utils
import importlib.util

assert importlib.util.find_spec("spas_sage_attn") is not None
q = k = v = torch.randn(1, 2, 256, 64, dtype=torch.bfloat16)
out = spas_sage2_attn_meansim_topk_cuda(q, k, v, simthreshd1=-0.1, topk=0.5, is_causal=True)
print(out.shape == q.shape, out.dtype, spas_sage_attn.autotune.__name__)
try:
    import spas_sage_attn._qattn
except ModuleNotFoundError as error:
    print(error)
"""


def test_a_program_for_the_original_runs():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "True torch.bfloat16 sparge.compat.spas_sage_attn.autotune",
        "No module named 'spas_sage_attn._qattn'",
    ]


def test_uninstall_leaves_everything_as_it_was():
    assert theirs() == {}
    for _ in range(2):
        module = sparge.compat.install()
        assert module is sparge.compat.install() is sys.modules[NAME]
        assert set(theirs()) == {NAME, f"{NAME}.core", f"{NAME}.utils", f"{NAME}.autotune"}
        sparge.compat.uninstall()
        assert theirs() == {}
    sparge.compat.uninstall()
    assert theirs() == {}


def test_the_real_one_is_not_hidden_by_surprise(monkeypatch):
    real = {NAME: ModuleType(NAME), f"{NAME}._qattn": ModuleType(f"{NAME}._qattn")}
    for name, module in real.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ImportError, match=r"imported already.*force=True"):
        sparge.compat.install()
    assert theirs() == real
    assert sparge.compat.install(force=True) is sys.modules[NAME]
    assert f"{NAME}._qattn" not in sys.modules
    sparge.compat.uninstall()
    assert theirs() == real


def test_one_that_could_be_imported_is_not_hidden_either(monkeypatch, tmp_path):
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "__init__.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=f"installed, at .*{NAME}.*force=True"):
        sparge.compat.install()
    assert theirs() == {}
    sparge.compat.install(force=True)
    assert not hasattr(importlib.import_module(NAME), "real")
    sparge.compat.uninstall()
    assert importlib.import_module(NAME).real
    del sys.modules[NAME]


def test_what_another_puts_there_meanwhile_stays(monkeypatch):
    sparge.compat.install()
    other = ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, other)
    sparge.compat.uninstall()
    assert theirs() == {NAME: other}
    del sys.modules[NAME]
    sparge.compat.install()
    monkeypatch.setitem(sys.modules, NAME, other)
    with pytest.raises(ImportError, match="imported already"):
        sparge.compat.install()
    sparge.compat.install(force=True)
    sparge.compat.uninstall()
    assert theirs() == {NAME: other}
    monkeypatch.undo()
    sys.modules.pop(NAME)  # ours of before, which monkeypatch put back


# --- utils ------------------------------------------------------------------------------------


def test_errors_are_measured_as_the_original_measures_them(capsys):
    truth = torch.tensor([[3.0, -4.0], [0.0, 0.0]])
    out = truth + torch.tensor([[0.0, 0.0], [0.7, 0.0]])
    found = utils.precision_metric(out, truth)
    assert found == {"Cossim": round(25 / (5 * (25 + 0.49) ** 0.5), 4), "L1": 0.1, "RMSE": 0.35}
    assert "L1 0.1" in capsys.readouterr().out
    assert utils.precision_metric(out, truth, verbose=False, round_num=2)["Cossim"] == 0.99
    assert capsys.readouterr().out == ""


def test_a_threshold_becomes_one_number_per_head():
    for hyper in (0.5, torch.tensor(0.5), torch.tensor([0.5, 0.5, 0.5], dtype=torch.float64)):
        vector = utils.hyperparameter_check(hyper, 3, "cpu")
        assert vector.dtype == torch.float32
        assert vector.tolist() == [0.5] * 3
    with pytest.raises(ValueError, match="2 numbers for 3"):
        utils.hyperparameter_check(torch.ones(2), 3, "cpu")


def test_the_map_is_the_one_attention_uses():
    q, k, _ = oracle.clustered_qkv(L=500)
    topk = torch.tensor([0.2, 0.8])
    options = {"simthreshd1": -1, "cdfthreshd": None, "topk": topk}
    kept = utils.get_block_map_meansim(q, k, **options)
    assert kept.sum(-1).tolist() == [[[2] * 4, [7] * 4]]  # of 8, rounded up
    sink = utils.get_block_map_meansim(q, k, attention_sink=True, **options)
    assert sink[..., 0].all()
    recipe = sparge.Recipe(sparge.KeepMass(0.9), "mean", 0.1, sink_blocks=0, local_blocks=0)
    plan = sparge.make_plan(q, k, is_causal=True, recipe=recipe)
    assert torch.equal(utils.get_block_map_meansim(q, k, True), plan.to_mask())
    lut, counts = utils.get_block_map_meansim(q, k, True, return_lut=True)
    assert torch.equal(counts, plan.counts)
    used = plan.indices >= 0
    assert torch.equal(lut.cumsum(-1)[used].int(), plan.indices[used])
    assert (lut[~used] == 0).all()


def test_maps_become_lists_and_tokens():
    kept = torch.tensor([[[[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]]])
    for function in (utils.block_map_lut, utils.block_map_lut_triton):
        lut, counts = function(kept)
        assert lut.tolist() == [[[[1, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]]]
        assert counts.tolist() == [[[2, 1, 0]]]
        assert lut.dtype == counts.dtype == torch.int32
    mask = utils.block_map_to_mask(kept)
    assert torch.equal(mask, oracle.over_tokens(kept.bool(), 3 * 128, 4 * 64))


def test_what_feeds_their_kernels_is_refused():
    q, k, _ = oracle.make_qkv()
    with pytest.raises(sparge.Unsupported, match=r"128 queries x 64 keys.*BLKQ=64"):
        utils.get_block_map_meansim(q, k, BLKQ=64, BLKK=128)
    for name in ("get_vanilla_qk_quant", "get_quant", "get_block_map_meansim_fuse_quant"):
        with pytest.raises(sparge.Unsupported, match=f"{name} feeds .*\n.*sparge.attention"):
            getattr(utils, name)(q, k)
