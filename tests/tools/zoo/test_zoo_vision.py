"""Plain modules of the zoo: packages of npm, several packages for one model, and loading."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import shutil
import threading
from dataclasses import replace

import pytest
import torch

from sparge import Unsupported
from sparge_tools import optional_libraries, zoo
from sparge_tools.zoo import downloads, kinds, model_files
from sparge_tools.zoo.catalogue import ZooModel
from sparge_tools.zoo.convert import convert
from sparge_tools.zoo.vision import weights
from sparge_tools.zoo.vision.terrain import Terrain, TerrainConfig
from tiny_wheels import write_npm_package, write_wheel
from tiny_zoo_modules import onnx_of

NET = TerrainConfig(
    channels=8, multipliers=(1, 2), blocks=1, attention_levels=(1,), head_dim=4, groups=4
)
FILES = {"package/dist/net.onnx": b"net" * 1000, "package/dist/more.bin": b"more"}


@pytest.fixture
def package(tmp_path):
    return write_npm_package(tmp_path, "@tiny/net", FILES)


@pytest.fixture
def model(package, tmp_path, monkeypatch):
    """In the catalogue: made from a package of npm and from a wheel, both put there by hand."""
    wheel = write_wheel(tmp_path, "tiny-piece", {"a/piece.mid": b"MThd"}, needed=("a/piece.mid",))
    model = ZooModel("tiny", "a tiny net", "none", "terrain", (package, wheel), 9)
    monkeypatch.setitem(zoo.MODELS, "tiny", model)
    model_files.downloads().mkdir(parents=True)
    for carrier in model.carriers:
        shutil.copy(tmp_path / carrier.file, model_files.downloads())
    monkeypatch.setattr(downloads, "download", refuse)
    return model


def refuse(*args, **kwargs):
    raise AssertionError("nothing is to be downloaded")


def convert_tiny(arguments, *, log, **rest):
    """Where reading the real file is not what is tested."""
    kind, files = arguments[1], arguments[3:]
    assert kind == "terrain"
    assert [file.rpartition("/")[2] for file in files] == ["net.onnx", "more.bin", "piece.mid"]
    torch.manual_seed(0)
    kinds._write_module(log.parent / "tiny", kind, Terrain(NET).state_dict(), NET)
    return 0, ""


def test_a_model_of_two_packages_is_made_and_loaded(model, monkeypatch, capfd):
    monkeypatch.setattr(model_files, "run_module", convert_tiny)
    loaded = zoo.load_module("tiny")
    assert capfd.readouterr().err.splitlines() == [
        "extracting net.onnx",
        "extracting more.bin",
        "extracting piece.mid",
        "converting net.onnx to safetensors, once",
    ]
    facts = json.loads((model_files.root() / "tiny" / "provenance.json").read_text())
    assert [carrier["registry"] for carrier in facts["carriers"]] == ["npm", "pypi"]
    assert list(facts["carriers"][0]["members"]) == list(FILES)
    assert not list(model_files.downloads().iterdir())
    monkeypatch.setattr(model_files, "make", refuse)
    again = zoo.load_module("tiny")
    torch.manual_seed(0)
    exact = Terrain(NET).state_dict()
    for found in (loaded, again):
        assert found.name == "tiny"
        assert found.model.config == NET
        assert not found.model.training
        assert found.grids(64) == (1, 8, 8)
        assert found.grids(65) is None
        state = found.model.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in exact.items())
    task = replace(loaded.task, size=16)
    given = task.inputs(1)[0]
    assert torch.equal(task.run(loaded.model, given), task.run(again.model, given))


def test_the_conversion_writes_what_is_loaded(tmp_path, monkeypatch):
    """With small sizes in the place of the real ones."""
    pytest.importorskip("onnx")
    net = Terrain(NET).state_dict()
    (tmp_path / "net.onnx").write_bytes(onnx_of(net, NET).SerializeToString())
    with monkeypatch.context() as patch:
        for module in (kinds, weights):
            patch.setattr(module, "TerrainConfig", lambda: NET)
        convert("terrain", tmp_path / "net", [tmp_path / "net.onnx"])
    found = zoo.load_module(tmp_path / "net").model.state_dict()
    assert found.keys() == net.keys()
    assert all(torch.allclose(found[key], net[key], atol=1e-6) for key in net)


def test_an_interrupted_fetch_keeps_what_is_checked(model, monkeypatch):
    (model_files.downloads() / model.carriers[1].file).write_bytes(b"damaged")
    monkeypatch.setattr(model_files, "run_module", convert_tiny)
    with pytest.raises(OSError, match="is damaged or not tiny-piece"):
        zoo.fetch("tiny", quiet=True)
    left = {file.name for file in model_files.downloads().iterdir()}
    assert left == {"net.onnx", "more.bin"}


def test_a_member_that_is_not_there_is_said(package, tmp_path):
    other = replace(package.members[0], path="package/other.onnx")
    with pytest.raises(OSError, match=r"has no package/other\.onnx"):
        downloads.extract(tmp_path / package.file, [other], tmp_path, tmp_path, quiet=True)


def test_any_dtype(model, monkeypatch):
    monkeypatch.setattr(model_files, "run_module", convert_tiny)
    loaded = zoo.load_module("tiny", dtype=torch.bfloat16, quiet=True)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match=r"dtype must be a floating-point dtype, got torch\.int8"):
        zoo.load_module("tiny", dtype=torch.int8)


def test_a_directory_is_loaded_too(tmp_path):
    directory = tmp_path / "net"
    kinds._write_module(directory, "terrain", Terrain(NET).state_dict(), NET)
    loaded = zoo.load_module(directory)
    assert loaded.grids(64) == (1, 8, 8)
    task = replace(loaded.task, size=16)
    result = task.run(loaded.model, task.inputs(1)[0])
    assert task.compare(result, result)["relative_l2"] == 0


def test_each_loader_names_the_other(tmp_path):
    with pytest.raises(ValueError, match=r"is a language model; load it with zoo\.load\("):
        zoo.load_module("smollm2-135m-instruct")
    with pytest.raises(ValueError, match=r"is no language model; load it with zoo\.load_module\("):
        zoo.directory_of("sam2-hiera-tiny")
    with pytest.raises(ValueError, match=r"is no directory; .*zoo\.fetch.*: sam2-hiera"):
        zoo.load_module("unet")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"names no kind of it \('kind'\); language models are"):
        zoo.load_module(tmp_path)
    assert not model_files.root().exists()


@pytest.mark.parametrize("missing", ["onnx", "flatbuffers", "filelock"])
def test_a_missing_library_is_named_before_the_download(monkeypatch, missing):
    find = optional_libraries.find_spec
    monkeypatch.setattr(
        optional_libraries, "find_spec", lambda name: None if name == missing else find(name)
    )
    with pytest.raises(Unsupported, match=rf"{missing}: not installed"):
        zoo.load_module("sam2-hiera-tiny")
    assert not model_files.root().exists()


@pytest.fixture
def registry(package, tmp_path, monkeypatch):
    """A registry of npm on this machine, with one package."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    data = (tmp_path / package.file).read_bytes()

    class Registry(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name, version = package.package, package.version
            url = f"http://127.0.0.1:{self.server.server_port}/{package.file}"
            digest = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
            facts = {"name": name, "version": version, "dist": {"tarball": url}}
            facts["dist"]["integrity"] = digest
            about = {"name": name, "dist-tags": {"latest": version}, "versions": {version: facts}}
            found = {f"/{package.file}": data, "/@tiny%2fnet": json.dumps(about).encode()}
            body = found.get(self.path.replace("%2F", "%2f"))
            self.send_response(200 if body else 404)
            self.end_headers()
            self.wfile.write(body or b"{}")

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    use_registry(monkeypatch, tmp_path, server.server_port)
    yield
    server.shutdown()
    server.server_close()


def use_registry(monkeypatch, tmp_path, port):
    settings = {"registry": f"http://127.0.0.1:{port}/", "fetch_retries": "0"}
    settings |= {"userconfig": str(tmp_path / "npmrc"), "update_notifier": "false"}
    for name, value in settings.items():
        monkeypatch.setenv(f"npm_config_{name}", value)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_a_package_by_npm(registry, package, tmp_path, capfd):
    where, scratch = tmp_path / "downloads", tmp_path / "scratch"
    where.mkdir()
    scratch.mkdir()
    archive = downloads.get_archive(package, where, scratch, quiet=False)
    assert capfd.readouterr() == ("", "downloading @tiny/net@1.0.0 (0 kB)\n")
    downloads.extract(archive, package.members, where, scratch, quiet=True)
    for path, data in FILES.items():
        assert (where / path.rpartition("/")[2]).read_bytes() == data
    assert {file.name for file in where.iterdir()} == {package.file, "net.onnx", "more.bin"}


def test_a_package_that_npm_has_not(registry, package, tmp_path):
    other = replace(package, package="@tiny/other")
    with pytest.raises(Unsupported, match=r"@tiny/other@1\.0\.0 was not downloaded") as caught:
        downloads.download(other, tmp_path, tmp_path, quiet=True)
    assert "404" in caught.value.reasons["npm"]
    assert f"put {package.file} into {tmp_path} by hand" in caught.value.way_out
    assert "npm pack @tiny/other@1.0.0" in caught.value.way_out


def test_no_network_for_npm_is_said(package, tmp_path, monkeypatch):
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    use_registry(monkeypatch, tmp_path, 9)  # nothing listens there
    with pytest.raises(Unsupported, match="was not downloaded") as caught:
        downloads.download(package, tmp_path / "downloads", tmp_path, quiet=True)
    assert "ECONNREFUSED" in caught.value.reasons["npm"]


def test_no_npm_is_said_with_the_way_out(package, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads.shutil, "which", lambda name: None)
    with pytest.raises(Unsupported, match=r"npm: not found; it comes with Node\.js") as caught:
        downloads.download(package, tmp_path / "there", tmp_path, quiet=True)
    assert f"put {package.file} into {tmp_path / 'there'} by hand" in str(caught.value)


def test_what_npm_says_of_a_failure():
    output = "npm error code E404\nnpm error 404 Not Found - GET x\nnpm error A complete log of\n"
    assert downloads._npm_error(output) == "404 Not Found - GET x"
    assert downloads._npm_error("npm ERR! code X\nnpm ERR! network down\n") == "network down"
    assert downloads._npm_error("killed\n") == "killed"
