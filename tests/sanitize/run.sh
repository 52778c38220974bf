#!/bin/sh
# fuzz.py, then the tests, with the CPU library built under AddressSanitizer and UBSan. Fresh memory is filled
# with NaN. Arguments go to pytest. PYTHON, CXX and SANITIZE_BUILD (a folder) may be set.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
cxx=${CXX:-g++}
build=$(mkdir -p "${SANITIZE_BUILD:=build/sanitize}" && cd "$SANITIZE_BUILD" && pwd)

# A compiler that appends its flags: so they win over those of setup.py. Overflow is an error, so no -fwrapv.
cat > "$build/cxx" <<END
#!/bin/sh
unset LD_PRELOAD
exec $cxx "\$@" -O1 -g1 -fno-omit-frame-pointer -fno-wrapv \\
  -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all
END
chmod +x "$build/cxx"
rm -rf "$build/lib"
CXX="$build/cxx" CC="$build/cxx" FLASHSOFTMAX_CUDA=0 \
  "$python" setup.py -q build_ext --build-lib "$build/lib" --build-temp "$build/temp"

FLASHSOFTMAX_LIBRARY=$(echo "$build"/lib/flashsoftmax/_C*.so)
export FLASHSOFTMAX_LIBRARY PYTHONPATH="$PWD:$build/lib"
export ASAN_OPTIONS=detect_leaks=0:max_malloc_fill_size=1073741824:malloc_fill_byte=255:quarantine_size_mb=64
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export OMP_WAIT_POLICY=passive  # threads that wait do not spin
# libstdc++ comes second, so that exceptions are seen through AddressSanitizer.
LD_PRELOAD="$("$cxx" -print-file-name=libasan.so) $("$cxx" -print-file-name=libstdc++.so)"
export LD_PRELOAD CXX="$build/cxx"
"$python" tests/sanitize/fuzz.py
"$python" -m pytest -p no:cacheprovider --capture=sys "$@"
