"""Try all mantissas: does the quantizers' division by a reciprocal always give the right E2M1 code and E4M3 scale?

    python benchmarks/division_proof.py        about a minute on one core; needs a C++ compiler (CXX, or c++)

`quads_kernels.rounding` divides x by d, the scale of a block or six times that of a row, as

    r = an estimate of 1 / d            once a block, within 3 units
    r = fma(fma(-d, r, 1), r, r)
    c = fma(-d, r, 1)
    c = fma(1.5 * c, c, c)
    y = fma(x, r, (x * r) * c)          once an element

and must be on the same side of every rounding threshold as the correctly rounded x / d: of the 7 between E2M1 codes,
and of those between E4M3 numbers, whose mantissas are odd multiples of 1/16 (normal) or of 1/8, 1/4, 1/2 and 1
(subnormal). y errs by less than 2 units, so only x within 3 units of threshold * d matter. Scaling x or d by a power of
two changes no mantissa. So all mantissas of d, all estimates of its reciprocal, all thresholds and 7 neighbours are all
cases there are. The plain product with the correctly rounded reciprocal is counted beside it.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

static float from_bits(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static uint32_t bits_of(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }
static int side(float y, float threshold) { return (y > threshold) - (y < threshold); }

int main() {
    const double thresholds[] = {.25,   .75,    1.25,   1.75,   2.5,    3.5,    5.,    1.,    1.5,   1.125, 1.375,
                                 1.625, 1.875, 1.0625, 1.1875, 1.3125, 1.4375, 1.5625, 1.6875, 1.8125, 1.9375};
    long tried = 0, wrong = 0, several = 0, wrong_product = 0;
    for (uint32_t mantissa = 0; mantissa < (1u << 23); mantissa++) {
        const float d = from_bits(0x3F800000u | mantissa), nearest = 1.0f / d;
        float found[7];
        int count = 0;
        for (int off = -3; off <= 3; off++) {
            float r = from_bits(bits_of(nearest) + off);
            r = std::fma(std::fma(-d, r, 1.0f), r, r);
            bool known = false;
            for (int i = 0; i < count; i++) known |= found[i] == r;
            if (!known) found[count++] = r;
        }
        several += count > 1;
        for (int i = 0; i < count; i++) {
            const float r = found[i], lack = std::fma(-d, r, 1.0f), c = std::fma(1.5f * lack, lack, lack);
            for (double threshold : thresholds) {
                const float t = (float)threshold;
                const uint32_t centre = bits_of((float)(threshold * (double)d));
                for (int step = -3; step <= 3; step++) {
                    const float x = from_bits(centre + step), exact = x / d;
                    tried++;
                    wrong += side(std::fma(x, r, (x * r) * c), t) != side(exact, t);
                    wrong_product += side(x * nearest, t) != side(exact, t);
                }
            }
        }
    }
    std::printf("%ld %ld %ld %ld\n", tried, several, wrong, wrong_product);
}
"""


def main() -> int:
    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "proof.cpp"), Path(folder, "proof")
        source.write_text(SOURCE)
        # No contraction: every FMA is one that the source says.
        subprocess.run([compiler, "-O2", "-march=native", "-ffp-contract=off", source, "-o", program], check=True)
        output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    tried, several, wrong, wrong_product = map(int, output.split())
    print(f"cases tried                                  {tried:>14,}")
    print(f"divisors whose estimates end in several r    {several:>14,}")
    print(f"wrong sides, two products and an FMA         {wrong:>14,}")
    print(f"wrong sides, product with the reciprocal     {wrong_product:>14,}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
