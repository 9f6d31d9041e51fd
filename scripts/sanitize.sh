#!/usr/bin/env bash
# The native core under AddressSanitizer and UndefinedBehaviorSanitizer: `make sanitize`.
#
# Finds reads and writes outside of torch's tensors and of the kernels' scratch: with ASan preloaded
# both come from its allocator. The script first proves this on a build with a planted fault. Not
# covered: masked and tile loads, which compilers do not instrument; the `portable` and `tiles`
# builds run the same schedules without them.
#
# No ThreadSanitizer here: libgomp, libtorch and Python are not built for it, so it sees neither their
# locks nor the start of a parallel region, and reports every hand-over between threads as a race.
# The driver that hands out tasks knows none of them and is tested with it (csrc/tests). And tests/backends/cpu/test_native_threads.py runs here: many concurrent callers, each result compared bit
# for bit with the same call alone. The core keeps no state between calls except the processor's
# features, in a C++ static; tasks of a call write to disjoint memory.
#
# SANITIZE_TESTS="tests/api/test_edges.py -k cpu-avx2" selects other tests.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/sanitize
# In files, because the output of a crashed pytest worker is lost.
reports=$PWD/$build/reports
python=$(command -v python)

make_library() {  # source folder, build folder, options …
  cmake -S "$1" -B "$2" "${@:3}" -G Ninja -DPython_EXECUTABLE="$python" \
    -DSPARGE_SANITIZE=address,undefined,float-cast-overflow > /dev/null
  cmake --build "$2"
}
sanitized() {  # library, command …
  local library=$1
  shift
  # No leak check: Python and torch leak on purpose at exit.
  env LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \
    ASAN_OPTIONS="detect_leaks=0:log_path=$reports/asan" \
    UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1:log_path=$reports/ubsan" \
    SPARGE_LIBRARY="$library" OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive "$@"
}

make_library . "$build"
rm -rf "$reports"
mkdir -p "$reports"
library=$PWD/$build/_cpu.so
sanitized "$library" python -c "
from sparge.backends.cpu import library as native
assert native.why_missing() is None, native.why_missing()
print('sanitized:', ', '.join(native.available()))"

# The planted fault: a kernel reads 16 numbers where fewer are left, past the end of a tensor.
broken=build/sanitize-broken
rm -rf "$broken/source"
mkdir -p "$broken/source"
cp -r CMakeLists.txt csrc "$broken/source"
sed -i 's/for (; i + kLanes <= n; i += kLanes) store(out/for (; i < n; i += kLanes) store(out/' \
  "$broken/source/csrc/read_rows.h"
if cmp -s csrc/read_rows.h "$broken/source/csrc/read_rows.h"; then
  echo "sanitize: no fault could be planted; csrc/read_rows.h has changed" >&2
  exit 1
fi
# The portable kernels are enough, and compile in seconds.
make_library "$broken/source" "$broken/build" -DSPARGE_X86=OFF > /dev/null
if sanitized "$PWD/$broken/build/_cpu.so" env SPARGE_ISA=portable python -c "
import torch, sparge
x = torch.randn(1, 1, 5, 10)
sparge.attention(x, x, x, backend='cpu', recipe=sparge.Recipe(precision='exact'))" \
  2> /dev/null; then
  echo "sanitize: a read past the end of a tensor was not found" >&2
  exit 1
fi
grep -q "heap-buffer-overflow" "$reports"/asan.*
rm "$reports"/*
echo "sanitize: a planted read past the end of a tensor is found"

kernels=(attend plan statistics quantize masks edges nonfinite second_filter varlen properties grad
  invariance protect native_threads native_arguments native_whole_call native_whole_arguments
  native_varlen keep_error pool)
shopt -s nullglob
# native_* call the ops themselves, once and not for each backend.
tests=(-k "cpu- or native_arguments or native_whole or native_varlen")
for name in "${kernels[@]}"; do tests+=(tests/*/"test_$name.py" tests/*/*/"test_$name.py"); done
[[ -z "${SANITIZE_TESTS:-}" ]] || read -ra tests <<< "$SANITIZE_TESTS"
code=0
sanitized "$library" python -m pytest -q --tb=short -n "${SANITIZE_WORKERS:-2}" -p no:cacheprovider \
  "${tests[@]}" || code=$?
if compgen -G "$reports/*" > /dev/null; then
  cat "$reports"/*
  exit 1
fi
exit "$code"
