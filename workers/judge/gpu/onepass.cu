// The error measures of two tensors in one pass: see onepass.py, which compiles this for one KIND of values.

#if KIND == 0
typedef float stored;
typedef float number;
__device__ number value_of(stored bits) { return bits; }
#elif KIND == 1
typedef double stored;
typedef double number;
__device__ number value_of(stored bits) { return bits; }
#elif KIND == 2
typedef unsigned short stored;  // bits of an fp16 value
typedef float number;
__device__ number value_of(stored bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
#else
typedef unsigned short stored;  // bits of a bf16 value
typedef float number;
__device__ number value_of(stored bits) { return __uint_as_float(unsigned(bits) << 16); }
#endif

const number MOST = sizeof(number) == 8 ? number(1.7976931348623157e308) : number(3.4028234663852886e38f);
const int VECTOR_LENGTH = 16 / sizeof(stored);
const int SUMS = 11;
const int MEASURES = 13;

struct __align__(16) Vector {
    stored values[VECTOR_LENGTH];
};

struct Bounds {
    number atol, rtol, loose_atol, loose_rtol, far;
};

struct Measures {
    unsigned strays = 0, wrong = 0, unlike = 0, far_off = 0, finite = 0;
    double total = 0, distance2 = 0, size2 = 0, astray2 = 0, own2 = 0, truth2 = 0;
    number max_abs = 0, max_rel = 0;

    template <bool HAS_EXACT>
    __device__ void add(number out, number ref, double exact, const Bounds &bounds) {
        bool same = out == ref, is_finite = isfinite(ref), is_stray = is_finite && !isfinite(out);
        number size = fabs(ref), error = fabs(out - ref);
        strays += is_stray;
        finite += is_finite;
        // If the reference is infinite, only the same infinity is correct.
        wrong += !(same || (is_finite && error <= bounds.rtol * size + bounds.atol));
        unlike += !(same || (is_finite && error <= bounds.loose_rtol * size + bounds.loose_atol));
        if (is_finite) {
            total += ref;
            size2 += double(ref) * ref;
        }
        if (!is_finite || is_stray)
            return;
        error = fmin(error, MOST);
        distance2 += double(error) * error;
        max_abs = fmax(max_abs, error);
        far_off += size > 0 && error > bounds.far * size;
        if (size > 0)
            max_rel = fmax(max_rel, fmin(error / size, MOST));
        if (HAS_EXACT && isfinite(exact)) {
            double astray = out - exact, own = ref - exact;
            astray2 += astray * astray;
            own2 += own * own;
            truth2 += exact * exact;
        }
    }

    __device__ void reduce(double *partial) const {
        const double all[MEASURES] = {double(strays), double(wrong), double(unlike), double(far_off), double(finite),
                                   total, distance2, size2, astray2, own2, truth2, double(max_abs), double(max_rel)};
        __shared__ double parts[32][MEASURES];
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        for (int i = 0; i < MEASURES; i++) {
            double one = all[i];
            for (int far = 16; far; far /= 2) {
                double other = __shfl_down_sync(0xffffffff, one, far);
                one = i < SUMS ? one + other : fmax(one, other);
            }
            if (lane == 0)
                parts[warp][i] = one;
        }
        __syncthreads();
        if (threadIdx.x >= MEASURES)
            return;
        double one = 0;
        for (int i = 0; i < blockDim.x / 32; i++)
            one = threadIdx.x < SUMS ? one + parts[i][threadIdx.x] : fmax(one, parts[i][threadIdx.x]);
        partial[blockIdx.x * MEASURES + threadIdx.x] = one;
    }
};

template <bool HAS_EXACT>
__device__ void measure_all(const stored *out, const stored *ref, const double *exact, long long count, Bounds bounds,
                            bool aligned, double *partial) {
    Measures measures;
    const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    const long long step = gridDim.x * (long long)blockDim.x;
    const long long whole = aligned ? count / VECTOR_LENGTH : 0;
    for (long long i = first; i < whole; i += step) {
        const Vector a = ((const Vector *)out)[i], b = ((const Vector *)ref)[i];
#pragma unroll
        for (int j = 0; j < VECTOR_LENGTH; j++)
            measures.add<HAS_EXACT>(value_of(a.values[j]), value_of(b.values[j]),
                                   HAS_EXACT ? exact[i * VECTOR_LENGTH + j] : 0.0, bounds);
    }
    for (long long i = whole * VECTOR_LENGTH + first; i < count; i += step)
        measures.add<HAS_EXACT>(value_of(out[i]), value_of(ref[i]), HAS_EXACT ? exact[i] : 0.0, bounds);
    measures.reduce(partial);
}

extern "C" __global__ void measure(const stored *out, const stored *ref, const double *exact, long long count,
                                   double atol, double rtol, double loose_atol, double loose_rtol, double far,
                                   int aligned, double *partial) {
    const Bounds bounds = {number(atol), number(rtol), number(loose_atol), number(loose_rtol), number(far)};
    if (exact)
        measure_all<true>(out, ref, exact, count, bounds, aligned, partial);
    else
        measure_all<false>(out, ref, exact, count, bounds, aligned, partial);
}
