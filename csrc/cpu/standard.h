// The standard headers that the kernels use. isa_*.cpp includes this before it chooses a target: the linker shares the
// inline functions of these headers between all translation units, so they must run on every processor.
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
