"""Compile every kernel for every supported GPU, without one: catches what the interpreter cannot. Prints one line a kernel."""

import itertools
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashspec.kernels import thresholds, verify

FLOAT, INT, LONG = "*fp32", "*i32", "*i64"
WIDE = (
    "target_ptr",
    "draft_ptr",
    "V",
    "target_batch",
    "target_row",
    "draft_batch",
    "draft_row",
    "logits_ptr",
    "batch_stride",
    "row_stride",
)
NAMES = {
    "ids_ptr": LONG, "num_draft_ptr": INT, "seed_ptr": LONG, "position_ptr": LONG, "key_ptr": LONG, "count_ptr": INT, "tokens_ptr": LONG, "tau_ptr": INT,
    "status_ptr": INT, "top_k_ptr": INT, "accepted_ptr": "*i1", "first_ptr": INT,
}  # fmt: skip


def compile_for(capability, kernel, constants, logits, warps):
    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            kind = "constexpr"
        elif name in ("target_ptr", "draft_ptr", "logits_ptr"):
            kind = FLOAT if name == "draft_ptr" and constants.get("DRAFT") == 3 else logits
        else:
            kind = NAMES.get(name, FLOAT if name.endswith("_ptr") else "i32")
        signature[name] = kind
        if name in WIDE and kind != "constexpr":
            aligned[(index,)] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


def main() -> None:
    for capability in map(int, sys.argv[1:]):
        logits = "*bf16" if capability >= 80 else "*fp16"
        shape = {"BLOCK": 2048, "VEC": 8, "TILES": 2, "GP": 4, "SP": 32, "PP": 512}
        for (draft, block_rule, truncate), stage in itertools.product(
            ((1, False, False), (3, True, True), (0, True, False)), (0, 1, 2, 3)
        ):
            constants = {
                **shape,
                "DRAFT": draft,
                "BLOCK_RULE": block_rule,
                "TRUNCATE": truncate,
                "STAGE": stage,
                "TICKET": stage == 0,
            }
            compile_for(capability, verify.verify_kernel, constants, logits, 4)
            print(f"sm_{capability} verify {constants}")
        compile_for(capability, verify.choose_kernel, {"TILES": 4, "RP": 8, "SP": 32, "TRUNCATE": True}, logits, 8)
        compile_for(capability, verify.accept_kernel, {"GP": 4}, FLOAT, 1)
        constants = {"BITS": 16, "BLOCK": 4096, "TOP_K": True, "TOP_P": True, "MIN_P": True}
        compile_for(capability, thresholds.threshold_kernel, constants, logits, 16)
        print(f"sm_{capability} choose, accept, thresholds")


if __name__ == "__main__":
    main()
