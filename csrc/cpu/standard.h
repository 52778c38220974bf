// All that the kernels use of the standard library. isa_*.cpp includes it before it chooses a target: the linker keeps
// one copy of each of these functions for all units, which must run on every processor.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <new>
#include <thread>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
