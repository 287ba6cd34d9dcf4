"""The PTX that dequantizes weights for `quads_kernels.gemm_sums`, run by hand: Triton's interpreter cannot.

Each instruction is computed as NVIDIA's PTX ISA defines it, on all words at once. That the text assembles is shown by
`benchmarks/compile_report.py`.
"""

import re

import numpy as np
import torch

from quads_kernels.gemm_sums_tile import EIGHT_VALUES
from quads_ops import nvfp4

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy().astype(np.float16)


def halves(word: np.ndarray) -> np.ndarray:
    """uint32 [n] -> FP16 [n, 2], low half first."""
    return np.ascontiguousarray(word.astype(np.uint32)).view(np.float16).reshape(-1, 2)


def word_of(pair: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(pair.astype(np.float16)).view(np.uint32).reshape(-1)


def prmt(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
    """Bytes 0 to 3 are those of a, 4 to 7 those of b; no selector here has the bit that copies a sign."""
    chosen = [selector >> 4 * i & 0xF for i in range(4)]
    assert all(index < 8 for index in chosen)
    source = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    parts = [(source >> np.uint64(8 * index) & np.uint64(0xFF)) << np.uint64(8 * i) for i, index in enumerate(chosen)]
    return sum(parts).astype(np.uint32)


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """Bit by bit the function whose value is at place 4 a + 2 b + c of the table."""
    out = np.zeros_like(a)
    for place in range(8):
        if table >> place & 1:
            bits = [x if place >> shift & 1 else ~x for x, shift in ((a, 2), (b, 1), (c, 0))]
            out |= bits[0] & bits[1] & bits[2]
    return out


def run(text: str, word: np.ndarray, scale: np.ndarray) -> list[np.ndarray]:
    """The outputs $0 to $7, as uint16, for words (uint32) and the bytes of their scales (uint16)."""
    registers = {"$8": word.astype(np.uint32), "$9": scale.astype(np.uint16)}

    def value(name: str) -> np.ndarray:
        return np.full_like(word, int(name, 0)) if name[0].isdigit() else registers[name]

    for statement in filter(None, (part.strip() for part in text.strip().strip("{}").split(";"))):
        name, rest = statement.split(None, 1)
        operands = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        if name == ".reg":
            continue
        if name == "mov.b32" and operands[0].startswith("{"):
            low, high = re.findall(r"[^{},\s]+", operands[0])
            whole = value(operands[1])
            registers[low], registers[high] = (whole & 0xFFFF).astype(np.uint16), (whole >> 16).astype(np.uint16)
            continue
        if name == "mov.b32":
            low, high = (value(part).astype(np.uint32) for part in re.findall(r"[^{},\s]+", operands[1]))
            registers[operands[0]] = low | high << 16
            continue
        given = [value(operand) for operand in operands[1:]]
        registers[operands[0]] = {
            "shl.b32": lambda a, n: a << n,
            "shr.b32": lambda a, n: a >> n,
            "and.b32": lambda a, b: a & b,
            "lop3.b32": lambda a, b, c, table: lop3(a, b, c, int(table[0])),
            "prmt.b32": lambda a, b, selector: prmt(a, b, int(selector[0])),
            "cvt.rn.f16x2.e4m3x2": lambda a: word_of(np.stack([E4M3[a & 0xFF], E4M3[a >> 8]], 1)),
            "mul.rn.f16x2": lambda a, b: word_of(halves(a) * halves(b)),
        }[name](*given)
    return [registers[f"${i}"] for i in range(8)]


def test_the_ptx_decodes_every_code_under_every_scale():
    """A word of eight equal codes, and random ones; all 127 scales; NaN under the byte 0x7F."""
    equal = np.arange(16, dtype=np.uint32) * np.uint32(0x11111111)
    some = torch.randint(0, 2**32, (400,), dtype=torch.int64).numpy().astype(np.uint32)
    words, scales = np.meshgrid(np.concatenate([equal, some]), np.arange(128, dtype=np.uint16))
    words, scales = words.ravel(), scales.ravel()
    found = np.stack([out.view(np.float16) for out in run(EIGHT_VALUES.value, words, scales)], 1)
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    codes = np.stack([words >> 4 * nibble & 0xF for nibble in order], 1).astype(np.uint8)
    # As blocks of 16: each word twice.
    blocks = torch.from_numpy(np.concatenate([codes, codes], 1))
    expected = nvfp4.unscaled(blocks, torch.from_numpy(scales.astype(np.uint8))[:, None])[:, :8].numpy()
    assert np.isnan(expected).all(1).tolist() == (scales == 0x7F).tolist()
    assert np.array_equal(found.astype(np.float64) * 2**14, expected.astype(np.float64), equal_nan=True)
