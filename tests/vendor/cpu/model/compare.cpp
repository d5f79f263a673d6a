// Every intrinsic that csrc/model models, called once, by the model or by the processor: as the compiler's flags say.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(__AMX_TILE__) && !defined(DLINFER_MODEL)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace dlinfer {
namespace {

struct Operands {
  unsigned char bytes[4][64];

  template <class T>
  T get(int which) const {
    T one;
    std::memcpy(&one, bytes[which], sizeof one);
    return one;
  }
  __m512 f(int which) const { return get<__m512>(which); }
  __m512d d(int which) const { return get<__m512d>(which); }
  __m512i i(int which) const { return get<__m512i>(which); }
  __m512bh h(int which) const { return get<__m512bh>(which); }
  uint64_t mask() const { return get<uint64_t>(3); }
};

template <class T>
void put(unsigned char* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

struct Case {
  const char* name;
  void (*run)(const Operands&, unsigned char*);
};

#define CASE(name, ...) {#name, [](const Operands& x, unsigned char* to) { put(to, __VA_ARGS__); }}
#define STORE(name, ...) {#name, [](const Operands& x, unsigned char* to) { __VA_ARGS__; }}

const Case kCases[] = {
    CASE(set1_ps, _mm512_set1_ps(x.get<float>(0))),
    CASE(set1_epi32, _mm512_set1_epi32(x.get<int>(0))),
    CASE(set1_epi8, _mm512_set1_epi8(x.get<char>(0))),
    CASE(setr_ps, _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 0.5)),
    CASE(setr_epi32, _mm512_setr_epi32(0, 4, 1, 5, 8, 12, 9, 13, 16, 20, 17, 21, 24, 28, 25, 29)),
    CASE(setr_epi64, _mm512_setr_epi64(0, 4, 8, 12, 1, 5, 9, 13)),
    CASE(set_epi16, _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                     20, 4, 19, 3, 18, 2, 17, 1, 16, 0)),
    CASE(set4_epi32, _mm512_set4_epi32(24, 16, 8, 0)),
    CASE(loadu_si512, _mm512_loadu_si512(x.bytes[0] + 3)),
    CASE(load_si512, _mm512_load_si512(x.bytes[1])),
    CASE(loadu_pd, _mm512_loadu_pd(x.bytes[0] + 3)),
    STORE(storeu_ps, _mm512_storeu_ps(to + 3, x.f(0))),
    STORE(store_ps, _mm512_store_ps(to, x.f(0))),
    STORE(storeu_pd, _mm512_storeu_pd(to + 3, x.d(0))),
    CASE(maskz_loadu_epi8, _mm512_maskz_loadu_epi8(x.mask(), x.bytes[0] + 3)),
    CASE(maskz_loadu_epi16, _mm512_maskz_loadu_epi16(__mmask32(x.mask()), x.bytes[0] + 3)),
    CASE(maskz_loadu_epi32, _mm512_maskz_loadu_epi32(__mmask16(x.mask()), x.bytes[0] + 3)),
    STORE(mask_storeu_epi16, _mm512_mask_storeu_epi16(to + 3, __mmask32(x.mask()), x.i(0))),
    CASE(maskz_compress_ps, _mm512_maskz_compress_ps(__mmask16(x.mask()), x.f(0))),
    CASE(add_epi32, _mm512_add_epi32(x.i(0), x.i(1))),
    CASE(sub_epi32, _mm512_sub_epi32(x.i(0), x.i(1))),
    CASE(and_si512, _mm512_and_si512(x.i(0), x.i(1))),
    CASE(xor_si512, _mm512_xor_si512(x.i(0), x.i(1))),
    CASE(max_epu32, _mm512_max_epu32(x.i(0), x.i(1))),
    CASE(srl_epi16, _mm512_srl_epi16(x.i(0), _mm_cvtsi32_si128(x.get<uint8_t>(1) % 20))),
    CASE(srli_epi16, _mm512_srli_epi16(x.i(0), 4)),
    CASE(srli_epi32, _mm512_srli_epi32(x.i(0), 12)),
    CASE(srai_epi32, _mm512_srai_epi32(x.i(0), 28)),
    CASE(srlv_epi32, _mm512_srlv_epi32(x.i(0), _mm512_and_si512(x.i(1), _mm512_set1_epi32(63)))),
    CASE(reduce_add_epi32, _mm512_reduce_add_epi32(x.i(0))),
    CASE(reduce_max_epu32, _mm512_reduce_max_epu32(x.i(0))),
    CASE(test_epi32_mask, _mm512_test_epi32_mask(x.i(0), x.i(1))),
    CASE(fmadd_ps, _mm512_fmadd_ps(x.f(0), x.f(1), x.f(2))),
    CASE(max_ps, _mm512_max_ps(x.f(0), x.f(1))),
    CASE(roundscale_ps, _mm512_roundscale_ps(x.f(0), 0)),
    CASE(reduce_ps, _mm512_reduce_ps(x.f(0), _MM_FROUND_TO_NEG_INF)),
    CASE(scalef_ps, _mm512_scalef_ps(x.f(0), x.f(1))),
    CASE(cvtepi32_ps, _mm512_cvtepi32_ps(x.i(0))),
    CASE(cvtps_epi32, _mm512_cvtps_epi32(x.f(0))),
    CASE(cvtph_ps, _mm512_cvtph_ps(x.get<__m256i>(0))),
    CASE(cvtps_ph, _mm512_cvtps_ph(x.f(0), _MM_FROUND_TO_NEAREST_INT)),
    CASE(cvtepu16_epi32, _mm512_cvtepu16_epi32(x.get<__m256i>(0))),
    CASE(cvtepu8_epi32, _mm512_cvtepu8_epi32(x.get<__m128i>(0))),
    CASE(cvtepu8_epi16, _mm512_cvtepu8_epi16(x.get<__m256i>(0))),
    CASE(cvtepi8_epi32, _mm512_cvtepi8_epi32(x.get<__m128i>(0))),
    CASE(cvtepi32_epi16, _mm512_cvtepi32_epi16(x.i(0))),
    CASE(cvtsepi32_epi8, _mm512_cvtsepi32_epi8(x.i(0))),
    CASE(castps256_ps512, _mm512_castps512_ps256(_mm512_castps256_ps512(x.get<__m256>(0)))),
    CASE(castps512_ps256, _mm512_castps512_ps256(x.f(0))),
    CASE(zextsi256_si512, _mm512_zextsi256_si512(x.get<__m256i>(0))),
    CASE(extractf32x8_ps, _mm512_extractf32x8_ps(x.f(0), 1)),
    CASE(insertf32x8, _mm512_insertf32x8(x.f(0), x.get<__m256>(1), 1)),
    CASE(unpacklo_epi8, _mm512_unpacklo_epi8(x.i(0), x.i(1))),
    CASE(unpackhi_epi8, _mm512_unpackhi_epi8(x.i(0), x.i(1))),
    CASE(unpacklo_epi16, _mm512_unpacklo_epi16(x.i(0), x.i(1))),
    CASE(unpackhi_epi16, _mm512_unpackhi_epi16(x.i(0), x.i(1))),
    CASE(permutexvar_epi16, _mm512_permutexvar_epi16(x.i(0), x.i(1))),
    CASE(permutexvar_ps, _mm512_permutexvar_ps(x.i(0), x.f(1))),
    CASE(permutex2var_ps, _mm512_permutex2var_ps(x.f(0), x.i(1), x.f(2))),
    CASE(permutex2var_pd, _mm512_permutex2var_pd(x.d(0), x.i(1), x.d(2))),
    CASE(shuffle_epi32, _mm512_shuffle_epi32(x.i(0), _MM_PERM_CCCC)),
    CASE(shuffle_f64x2, _mm512_shuffle_f64x2(x.d(0), x.d(1), 0x9c)),
#if defined(__AVX512BF16__)
    CASE(dpbf16_ps, _mm512_dpbf16_ps(x.f(0), x.h(1), x.h(2))),
    CASE(cvtne2ps_pbh, _mm512_cvtne2ps_pbh(x.f(0), x.f(1))),
    CASE(dpbusd_epi32, _mm512_dpbusd_epi32(x.i(0), x.i(1), x.i(2))),
#endif
};

#if defined(__AMX_TILE__)

struct alignas(64) Shapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

// out: [rows, columns] of 32 bits. left: [rows, words], right: [words, columns] words.
void multiply_tiles(int kind, int rows, int columns, int words, const void* left, const void* right, void* out) {
  const uint16_t wide = uint16_t(4 * columns), deep = uint16_t(4 * words);
  const Shapes shapes{1, 0, {}, {wide, deep, wide}, {uint8_t(rows), uint8_t(rows), uint8_t(words)}};
  _tile_loadconfig(&shapes);
  _tile_loadd(0, out, wide);
  _tile_loadd(1, left, deep);
  _tile_stream_loadd(2, right, wide);
  if (kind == 0) _tile_dpbf16ps(0, 1, 2);
  if (kind == 1) _tile_dpbssd(0, 1, 2);
  if (kind == 2) _tile_dpbsud(0, 1, 2);
  if (kind == 3) _tile_dpbusd(0, 1, 2);
  if (kind == 4) _tile_dpbuud(0, 1, 2);
  if (kind == 5) _tile_zero(0);
  _tile_stored(0, out, wide);
  _tile_release();
}

#endif

}  // namespace
}  // namespace dlinfer

extern "C" {

int case_count() { return sizeof dlinfer::kCases / sizeof *dlinfer::kCases; }
const char* case_name(int which) { return dlinfer::kCases[which].name; }
// operands: 4 x 64 bytes on a cache line. result: 128 bytes, likewise.
void run_case(int which, const void* operands, void* result) {
  dlinfer::kCases[which].run(*static_cast<const dlinfer::Operands*>(operands), static_cast<unsigned char*>(result));
}

#if defined(__AMX_TILE__)
bool tiles_granted() {
#if defined(DLINFER_MODEL)
  return true;
#else
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#endif
}
void multiply_tiles(int kind, int rows, int columns, int words, const void* left, const void* right, void* out) {
  dlinfer::multiply_tiles(kind, rows, columns, words, left, right, out);
}
#if defined(DLINFER_MODEL)
void load_configuration(const void* shapes) { dlinfer::_tile_loadconfig(shapes); }
void zero(int tile) { dlinfer::_tile_zero(tile); }
void multiply(int to, int a, int b) { dlinfer::_tile_dpbf16ps(to, a, b); }
#endif
#endif
}
