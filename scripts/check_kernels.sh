#!/usr/bin/env bash
# Runs csrc/check.cpp with AddressSanitizer and UBSan on every instruction set of this machine and, where the cross compiler
# and qemu-user are installed (Debian: g++-aarch64-linux-gnu, qemu-user), as NEON code under emulation. All must print the same hash.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mktemp -d); trap 'rm -rf "$out"' EXIT
# -g1: lines for the reports of the sanitizers; to keep track of variables too takes as long as all the rest.
common="-std=c++17 -O1 -g1 -Wall -Wextra -ffp-contract=off -pthread"
x86="-mavx2 -mfma -mf16c"
vnni="$x86 -mavx512f -mavx512vl -mavx512bw -mavx512dq -mavx512vnni -Wno-maybe-uninitialized"
hashes=()

note() { hashes+=("$(tail -1 "$1")"); echo "$2: $(tail -1 "$1")"; }

if [ "$(uname -m)" = x86_64 ]; then
  san="-fsanitize=address,undefined -fno-sanitize-recover=all"
  # What this machine cannot run is compiled for its warnings alone: with sanitizers that takes minutes.
  if grep -q avx512_vnni /proc/cpuinfo; then checked=$san; else checked=-O0; fi
  g++ $common $vnni $checked -c csrc/isa_avx512vnni.cpp -o "$out/vnni.o" & slowest=$!
  for f in api pack pool check; do g++ $common $san -DLAMPEJO_X86 -c csrc/$f.cpp -o "$out/$f.o"; done
  g++ $common $san $x86 -c csrc/isa_avx2.cpp -o "$out/avx2.o"
  wait $slowest
  g++ $common $san "$out"/*.o -o "$out/check"
  for isa in avx2 avx512vnni; do
    if "$out/check" $isa > "$out/$isa.txt"; then note "$out/$isa.txt" "$isa with sanitizers"; else
      [ $? = 2 ] && echo "$isa: not on this machine" || { cat "$out/$isa.txt"; exit 1; }
    fi
  done
fi
if command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null; then
  for f in api pack pool check isa_neon; do
    aarch64-linux-gnu-g++ $common -DLAMPEJO_NEON -c csrc/$f.cpp -o "$out/arm-$f.o"
  done
  aarch64-linux-gnu-g++ $common -march=armv8.2-a+dotprod -c csrc/isa_neondot.cpp -o "$out/arm-dot.o"
  aarch64-linux-gnu-g++ $common -static "$out"/arm-*.o -o "$out/neon"
  for isa in neon neondot; do
    qemu-aarch64 "$out/neon" $isa > "$out/neon.txt"
    note "$out/neon.txt" "$isa, emulated"
  done
else
  echo "neon: not checked (no cross compiler or no qemu-user here)"
fi
[ "$(printf '%s\n' "${hashes[@]}" | sort -u | wc -l)" = 1 ] || { echo "the results differ"; exit 1; }
echo "all results are equal"
