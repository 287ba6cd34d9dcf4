"""Try all mantissas: does the quantizer's division by reciprocal and two FMAs always give the right E2M1 code?

    python benchmarks/division_proof.py        about half a minute on one core; needs a C++ compiler (CXX, or c++)

`quads_kernels.rounding.scaled_magnitude` divides |x| by the scale d of its block as

    inverse = 1 / d                 once a block, correctly rounded
    y       = |x| * inverse
    y       = fma(fma(-y, d, |x|), inverse, y)

and must give the E2M1 code of the correctly rounded |x| / d. A code depends on comparisons of y with 7 thresholds, and
y errs by less than 2 units before the correction, so only x within 4 units of threshold * d matter. Scaling x or d by
a power of two changes no mantissa (the kernel lifts small ones out of the subnormals' way). So all mantissas of d, all
thresholds and 9 neighbours are all cases there are. The plain product with the reciprocal is counted beside it.
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
static int code(float y) {
    return (y > .25f) + (y >= .75f) + (y > 1.25f) + (y >= 1.75f) + (y > 2.5f) + (y >= 3.5f) + (y > 5.f);
}

int main() {
    const float thresholds[] = {.25f, .75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.f};
    long tried = 0, wrong_code = 0, wrong_quotient = 0, wrong_product = 0;
    for (uint32_t mantissa = 0; mantissa < (1u << 23); mantissa++) {
        const float d = from_bits(0x3F800000u | mantissa), inverse = 1.0f / d;
        for (float threshold : thresholds) {
            const uint32_t centre = bits_of(threshold * d);
            for (int step = -4; step <= 4; step++) {
                const float x = from_bits(centre + step), exact = x / d, product = x * inverse;
                const float y = std::fma(std::fma(-product, d, x), inverse, product);
                tried++;
                wrong_code += code(y) != code(exact);
                wrong_quotient += y != exact;
                wrong_product += code(product) != code(exact);
            }
        }
    }
    std::printf("%ld %ld %ld %ld\n", tried, wrong_code, wrong_quotient, wrong_product);
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
    tried, wrong_code, wrong_quotient, wrong_product = map(int, output.split())
    print(f"cases tried                               {tried:>12,}")
    print(f"wrong codes, reciprocal and two FMAs      {wrong_code:>12,}")
    print(f"wrong quotients, reciprocal and two FMAs  {wrong_quotient:>12,}")
    print(f"wrong codes, product with the reciprocal  {wrong_product:>12,}")
    return 1 if wrong_code else 0


if __name__ == "__main__":
    sys.exit(main())
