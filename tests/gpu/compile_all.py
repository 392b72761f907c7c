"""Compile every kernel for every supported GPU, without one: catches what the interpreter cannot. Prints one line a kernel."""

import itertools
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashspec.kernels import forward, narrow, thresholds, verify
from flashspec.models.fused import LARGE, MEDIUM, NARROW_WIDTH, SMALL, Cut

FLOAT, INT, LONG = "*fp32", "*i32", "*i64"
WIDE = (
    "target_ptr", "draft_ptr", "V", "target_batch", "target_row", "draft_batch", "draft_row", "logits_ptr", "batch_stride", "row_stride",
    "x_ptr", "partial_ptr", "state_ptr", "gain_ptr", "weight_ptr", "table_ptr", "q_ptr", "keys_ptr", "values_ptr", "hidden_ptr", "attended_ptr", "qkv_ptr", "projection_ptr", "gate_up_ptr", "down_ptr", "middle_ptr", "slices_ptr", "parts_ptr", "D", "F", "C",
)  # fmt: skip
NAMES = {
    "ids_ptr": LONG, "num_draft_ptr": INT, "seed_ptr": LONG, "position_ptr": LONG, "key_ptr": LONG, "count_ptr": INT, "tokens_ptr": LONG, "tau_ptr": INT,
    "status_ptr": INT, "top_k_ptr": INT, "accepted_ptr": "*i1", "first_ptr": INT, "text_ptr": LONG, "drafted_ptr": LONG, "start_ptr": LONG,
    "length_ptr": LONG, "active_ptr": INT, "out_ptr": LONG, "epsilon": "fp32",
}  # fmt: skip
WEIGHTS = (
    "gain_ptr",
    "weight_ptr",
    "table_ptr",
    "q_ptr",
    "keys_ptr",
    "values_ptr",
    "hidden_ptr",
    "attended_ptr",
    "qkv_ptr",
    "projection_ptr",
    "gate_up_ptr",
    "down_ptr",
)  # of the model's type
SHARED = {75: 65_536, 80: 166_912, 90: 232_448}  # bytes that a program may have


def compile_for(capability, kernel, constants, logits, num_warps, num_stages=3, weights=FLOAT):
    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            kind = "constexpr"
        elif name in ("target_ptr", "draft_ptr", "logits_ptr"):
            kind = FLOAT if name == "draft_ptr" and constants.get("DRAFT") == 3 else logits
        elif name in WEIGHTS:
            kind = weights
        else:
            kind = NAMES.get(name, FLOAT if name.endswith("_ptr") else "i32")
        signature[name] = kind
        if name in WIDE and kind != "constexpr":
            aligned[(index,)] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps, "num_stages": num_stages}
    )
    if compiled.metadata.shared > SHARED[capability]:
        raise RuntimeError(f"{kernel.fn.__name__} {constants} wants {compiled.metadata.shared} bytes of shared memory")
    return compiled


def compile_forward(capability, weights):
    """At the two widths of heads, with the tiles that `models/fused.py` takes for small and for large models."""
    pdl = capability >= 90
    for width, tiles in ((64, SMALL), (64, MEDIUM), (128, LARGE)):

        def blocks(tile, pdl=pdl):
            return {"BLOCK_M": 16, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "LINES": tile.lines if pdl else 0, "PDL": pdl}

        attention = {"W": width, "SHARED": 4, "BLOCK_N": 64, "PDL": pdl}
        for kernel, constants, tile in (
            (forward.embed_kernel, {"BLOCK": 1024, "TILES": 64, "PDL": pdl}, None),
            (forward.qkv_kernel, {"W": width, "TILES": 64, **blocks(tiles.qkv)}, tiles.qkv),
            (forward.attention_kernel, {**attention, "SHARES": 4, "BLOCK_Q": 16}, None),
            (forward.attention_kernel, {**attention, "SHARES": 1, "BLOCK_Q": 64}, None),
            (forward.add_kernel, blocks(tiles.out), tiles.out),
            (forward.gate_up_kernel, {"TILES": 64, **blocks(tiles.gate_up)}, tiles.gate_up),
            (forward.add_kernel, blocks(tiles.down), tiles.down),
            (forward.head_kernel, {"TILES": 64, **blocks(tiles.head)}, tiles.head),
            (forward.draw_kernel, {"TILES": 1, "SHARES": 64, "TRUNCATE": True, "PDL": pdl}, None),
            (forward.commit_kernel, {"BLOCK": 32}, None),
        ):
            how = {"num_warps": tile.warps, "num_stages": tile.stages} if tile else {"num_warps": 4}
            compile_for(capability, kernel, constants, FLOAT, weights=weights, **how)
    print(f"sm_{capability} forward")


def compile_narrow(capability, weights):
    """At the largest width there is, with many heads of few keys each."""
    cut, common = Cut(), {"BLOCK_D": NARROW_WIDTH, "PDL": capability >= 90}
    for first in (True, False):
        constants = {
            **common,
            "W": 32,
            "SLICES": 32,
            "SHARED": 2,
            "SHARES": cut.shares,
            "BLOCK_N": cut.keys,
            "FIRST": first,
        }
        compile_for(capability, narrow.attention_kernel, constants, FLOAT, cut.attention_warps, weights=weights)
    constants = {**common, "BLOCK_F": cut.inner, "HEADS": 8, "SHARES": cut.shares}
    compile_for(capability, narrow.mlp_kernel, constants, FLOAT, cut.mlp_warps, weights=weights)
    constants = {**common, "BLOCK_V": cut.vocabulary, "SLICES": 32}
    compile_for(capability, narrow.head_kernel, constants, FLOAT, cut.head_warps, weights=weights)
    print(f"sm_{capability} narrow")


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
        compile_forward(capability, logits)
        compile_narrow(capability, logits)


if __name__ == "__main__":
    main()
