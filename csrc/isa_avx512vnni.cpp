// Compiled with the flags of its instruction set (CMakeLists.txt).
#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "simd_x86.h"

namespace avx512vnni {
constexpr int MAX_TILE = 8;  // tokens that share the unpacking of weights: as many as fit the registers
#include "kernels.inl"
}  // namespace avx512vnni
