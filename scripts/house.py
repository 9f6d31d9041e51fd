"""Size of the house: `make house`, or `python scripts/house.py` in an environment that has it.

Lines and files of Python, files of ours whose functions one new `sparge.attention` on the CPU runs,
seconds that `import sparge` takes beyond torch (best of five), and bytes of the wheels in `dist/`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("src/sparge", "tools", "tests")

FILES_OF_A_CALL = """
import sys
from pathlib import Path
import sparge
from sparge.synthetic import structured_qkv
package, seen = Path(sparge.__file__).parent, set()
def see(frame, event, _):
    file = Path(frame.f_code.co_filename)
    if package in file.parents:
        seen.add(file.relative_to(package).as_posix())
sparge.attention(*structured_qkv(Hq=2, Hk=2, L=1024), backend="cpu")  # imports what it needs
qkv = structured_qkv(Hq=2, Hk=2, L=2048)
sys.setprofile(see)
sparge.attention(*qkv, is_causal=True, backend="cpu")
sys.setprofile(None)
print(len(seen), *sorted(seen))
"""
IMPORT_SECONDS = """
import time, torch
start = time.process_time()
import sparge
print(time.process_time() - start)
"""


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    for folder in FOLDERS:
        files = [*(ROOT / folder).rglob("*.py")]
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        print(f"{folder:12} {lines:6} lines in {len(files)} files")
    number, *names = run(FILES_OF_A_CALL).split()
    print(f"a call on the CPU passes through {number} files: {', '.join(names)}")
    print(f"import sparge: {min(float(run(IMPORT_SECONDS)) for _ in range(5)):.3f} s beyond torch")
    for wheel in sorted((ROOT / "dist").glob("*.whl")):
        print(f"{wheel.name}: {wheel.stat().st_size} bytes")


if __name__ == "__main__":
    main()
