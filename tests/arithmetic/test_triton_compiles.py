"""The Triton kernels compile for a GPU, in every variant; without one, and without the interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from retrograde.arithmetic import cuda

RATIO = ["i64", "i32", "i32", "u32", "i32", "u32", "i32", "i32", "i32", "fp32", "fp32", "i32"]  # size, n, d, ..., over, scale, ...


def compiled(kernel, types, **constants):
    names = [p.name for p in kernel.params]
    signature = dict(zip(names, types)) | {name: "constexpr" for name in constants}
    assert list(signature) == names, (list(signature), names)
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": False})
    assert ".entry" in made.asm["ptx"] and ".f64" not in made.asm["ptx"], kernel


for x in ("*i32", "*i16"):
    for y, seen in (("*fp32", tl.float32), ("*bf16", tl.bfloat16), ("*bf16", tl.float32)):
        out = "*fp32" if seen == tl.float32 else "*bf16"
        for form in range(3):
            for kind in (0, 2, 3) if form else (0, 2, 3, 4, 5):
                of = {"KIND": kind, "OVER": kind >= 4, "FORM": form, "SEEN": seen}
                types = [x, x, "*u8", y, out, "*fp32", "*u8", "*u8", *RATIO]
                compiled(cuda._advance, types, **of, MASK=form == 2, BLOCK=1024)
                compiled(cuda._retreat, [x, x, "*u8", y, out, "*u8", *RATIO], **of, PULL=kind == 2, BLOCK=1024)
            types = ["*fp32", "*fp32", y, "*fp32", "*fp32", y, "*u8", "*u8", "i64", "fp32", "fp32", "fp32", "fp32"]
            cast = y != "*fp32" or form == 2
            for after in (False, True):
                compiled(cuda._carry, types, P=not after, H=True, OUT=True, CAST=cast, AFTER=after, FORM=form, BLOCK=1024)
        compiled(cuda._encode, [y, x, "*fp32", "i64", "fp32"], COLUMN=1, BLOCK=1024)
    compiled(cuda._pull, [x, x, "*fp32", "i64", "fp32", "i32"], BLOCK=1024)
    for out in ("*fp32", "*bf16"):
        compiled(cuda._decode, [x, out, "i64", "fp32"], BLOCK=1024)
for times in (1, 8):
    compiled(cuda._digest, ["*i32", "*i64", "i64", "i32", "i32"], TIMES=times, BLOCK=1024)
print("compiled")
"""


def test_every_kernel_compiles_for_a_gpu(tmp_path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    (tmp_path / "kernels.py").write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, str(tmp_path / "kernels.py")], capture_output=True, text=True, env=environment, timeout=600
    )
    assert run.stdout.endswith("compiled\n"), run.stderr[-3_000:]
