"""`sparge bench --static`: the readers of machine code, and what is compiled."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from sparge.support.errors import Unsupported
from sparge_tools.static import assembly, compile, ir, resources, suite
from sparge_tools.static.targets import NVIDIA, TARGETS
from sparge_tools.static.variants import default_variants, full_variants
from static_runs import a_loop, needs_triton, run_alone

SASS = """
kernel:
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_9) ;
.L_x_1:
        /*0020*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0030*/                   IMMA.16832.S8.S8.SAT R8, R4.ROW, R6.COL, R8 ;
        /*0040*/              @!P1 BRA `(.L_x_5) ;
.L_x_2:
        /*0050*/                   MUFU.EX2 R9, R8 ;
        /*0060*/                   HMMA.16816.F32.BF16 R12, R8, R6, R12 ;
        /*0070*/                   BRA.U UP0, `(.L_x_1) ;
.L_x_9:
        /*0080*/                   STL.64 [R1], R2 ;
        /*0090*/                   LDL R3, [R1] ;
.L_x_3:
        /*00a0*/                   IMMA.16832.S8.S8 R8, R4.ROW, R6.COL, R8 ;
        /*00b0*/              @!P0 CALL.REL.NOINC `(.L_x_4) ;
        /*00c0*/                   BRA `(.L_x_3) ;
.L_x_4:
        /*00d0*/                   EXIT ;
.L_x_5:
        /*00e0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R2], R3 ;
        /*00f0*/              @!P1 BRA `(.L_x_5) ;
        /*0100*/                   BRA `(.L_x_2) ;
.L_x_6:
        /*0110*/                   BRA `(.L_x_6);
"""
AMDGCN = """
kernel:                                 ; @kernel
\ts_load_dwordx2 s[0:1], s[0:1], 0x0
.LBB0_1:                                ; =>This Inner Loop
\t.loc\t1 36 9 is_stmt 0                ; kernel.py:36:9
\tv_mfma_i32_32x32x16_i8 a[0:15], v[0:1], v[2:3], a[0:15]
\tv_exp_f32_e32 v1, v2
                                        ; implicit-def: $vgpr255
\tv_mfma_f32_32x32x8_f16 a[16:31], v[0:1], v[2:3], a[16:31]
\ts_cbranch_scc1 .LBB0_1
; %bb.2:
\ts_endpgm
\t.section\t.rodata,"a",@progbits
\t.amdhsa_kernel kernel
  - .agpr_count:     17
    .private_segment_fixed_size: 8
    .sgpr_spill_count: 13
    .vgpr_count:     273
    .vgpr_spill_count: 2
"""
TTIR = """
module {
  tt.func public @kernel() {
    %a = scf.for %i = %c0 to %n step %c1 iter_args(%x = %y) -> (f32)  : i32 {
      %z = scf.for %j = %c0 to %n step %c1 iter_args(%x = %y) -> (f32)  : i32 {
        %s = tt.dot %q, %k, %c, inputPrecision = tf32 : tensor<128x64xi8> * tensor<64x32xi8> -> tensor<128x32xi32> loc(#loc1)
        %m = "tt.reduce"(%s) <{axis = 1 : i32}> ({
        ^bb0(%l: f32, %r: f32):
        }) : (tensor<128x32xf32>) -> tensor<128xf32> loc(#loc2)
        %o = tt.dot %p, %v, %a, inputPrecision = tf32 : tensor<128x32xbf16> * tensor<32x64xbf16> -> tensor<128x64xf32> loc(#loc1)
      } loc(#loc3)
    } loc(#loc4)
    scf.for %i = %c0 to %n step %c1 {
      %p = tt.load %q : tensor<64x!tt.ptr<f32>>
    }
    %b = scf.while (%x = %y) : (f32) -> f32 {
      %o = tt.dot %p, %v, %a : tensor<64x32xf8E4M3FN> * tensor<32x64xf8E4M3FN> -> tensor<64x64xf32> loc(#loc1)
    }
  }
}
"""  # noqa: E501 - as MLIR prints it
TTGIR = """
    %k = ttg.local_alloc : () -> !ttg.memdesc<3x128x64xi8, #shared1, #smem, mutable> loc(#loc1)
    %v = ttg.local_alloc : () -> !ttg.memdesc<2x64x128xbf16, #shared2, #smem, mutable> loc(#loc1)
    %s = ttg.local_alloc : () -> !ttg.memdesc<2x1xf32, #shared3, #smem, mutable> loc(#loc1)
    %q = ttg.local_alloc %q_5 : (tensor<128x128xi8, #blocked>) -> !ttg.memdesc<128x128xi8, #shared>
    %a = scf.for %i = %c0 to %n step %c1 iter_args(%x = %y) -> (f32)  : i32 {
      %k1 = ttg.memdesc_index %k[%i] : !ttg.memdesc<3x128x64xi8, #s> -> !ttg.memdesc<128x64xi8>
      %s1 = ttg.memdesc_index %s[%i] : !ttg.memdesc<2x1xf32, #shared1> -> !ttg.memdesc<1xf32>
      %d = ttng.warp_group_dot %q, %k1, %c {isAsync = true} : !ttg.memdesc<128x128xi8>
      %v1 = ttg.memdesc_index %v[%i] : !ttg.memdesc<2x64x128xbf16> -> !ttg.memdesc<64x128xbf16>
    } loc(#loc3)
    %b = scf.for %i = %c0 to %n step %c1 iter_args(%x = %y) -> (f32)  : i32 {
      ttng.tc_gen5_mma %q, %k, %s, %false, %kb : !ttg.memdesc<128x128xi8>
    } loc(#loc3)
"""


# Readers


def test_loops_of_sass_and_their_parts_elsewhere():
    """A wait that ptxas put behind EXIT belongs to its loop; a call without return ends one."""
    code = assembly.read_sass(SASS)
    first, second = assembly.innermost_loops(code, lambda x: x.is_matrix)
    assert [x.name for x in first.instructions] == [
        *("LDSM", "IMMA", "BRA", "MUFU", "HMMA", "BRA"),
        *("SYNCS", "BRA", "BRA"),
    ]
    assert [x.name for x in second.instructions] == ["IMMA", "CALL", "BRA"]
    assert first.count(lambda x: x.is_matrix) == {
        "IMMA.16832.S8.S8.SAT": 1,
        "HMMA.16816.F32.BF16": 1,
    }
    assert sum(code.count().values()) == len(code.instructions) == 18


def test_spilled_bytes_as_ptxas_counts_them():
    assert resources.spilled_bytes(assembly.read_sass(SASS)) == 8 + 4


def test_loops_and_resources_of_amdgcn():
    code = assembly.read_amdgcn(AMDGCN)
    (body,) = assembly.innermost_loops(code, lambda x: x.is_matrix)
    assert [x.opcode for x in body.instructions] == [
        "v_mfma_i32_32x32x16_i8",
        "v_exp_f32_e32",
        "v_mfma_f32_32x32x8_f16",
        "s_cbranch_scc1",
    ]
    assert resources.amd_resources(AMDGCN) == {
        "registers": 273,
        "stack": 8,
        "spills": 2,
        "scalar_spills": 13,
    }
    with pytest.raises(ValueError, match=r"no \.vgpr_count"):
        resources.amd_resources("nothing")


@pytest.mark.parametrize(
    ("opcode", "kind", "macs"),
    [
        ("IMMA.16832.S8.S8.SAT", "int8", (4096, 1)),
        ("HMMA.16816.F32.BF16", "half", (2048, 1)),
        ("HMMA.1688.F32.TF32", "single", (1024, 1)),
        ("QMMA.16832.F32.E4M3.E4M3", "fp8", (4096, 1)),
        ("IGMMA.64x64x32.S8.S8", "int8", (64 * 64 * 32, 4)),
        ("HGMMA.64x128x16.F32.BF16", "half", (64 * 128 * 16, 4)),
        ("QGMMA.64x128x32.F32.E4M3.E4M3", "fp8", (64 * 128 * 32, 4)),
        ("UTCIMMA", "int8", None),
        ("UTCHMMA", "half", None),
        ("UTCQMMA", "fp8", None),
        ("v_mfma_i32_32x32x16_i8", "int8", (32 * 32 * 16, 1)),
        ("v_mfma_f32_32x32x8_bf16", "half", (32 * 32 * 8, 1)),
        ("v_mfma_f32_32x32x8_bf16_1k", "half", (32 * 32 * 8, 1)),
        ("v_mfma_f32_32x32x16_fp8_fp8", "fp8", (32 * 32 * 16, 1)),
        ("v_mfma_f32_32x32x2_f32", "single", (32 * 32 * 2, 1)),
        ("v_wmma_i32_16x16x16_iu8", "int8", (16**3, 1)),
        ("v_wmma_f32_16x16x16_f16", "half", (16**3, 1)),
    ],
)
def test_matrix_instructions(opcode, kind, macs):
    assert assembly.Instruction(opcode).is_matrix
    assert compile.kind_of(opcode) == kind
    assert assembly.macs(opcode) == macs


@pytest.mark.parametrize("opcode", ["FFMA", "UTCBAR", "UTCATOMSWS.AND", "LDSM.16", "v_fma_f32"])
def test_what_is_no_matrix_instruction(opcode):
    assert not assembly.Instruction(opcode).is_matrix


def test_products_of_innermost_loops():
    one, two = ir.products_of_loops(TTIR)
    assert one == (ir.Product("int8", 128, 32, 64), ir.Product("half", 128, 64, 32))
    assert two == (ir.Product("fp8", 64, 64, 32),)


def test_buffers_that_loads_run_through():
    one, two = ir.buffers_of_loops(TTGIR)
    assert one == (ir.Buffer(3, (128, 64), "i8"), ir.Buffer(2, (64, 128), "bf16"))
    assert two == ()  # what it multiplies is not pipelined
    assert a_loop(buffers=one).depth == 2
    assert a_loop(buffers=one[:1]).depth == 0  # V is not pipelined
    assert a_loop(buffers=()).depth == 0


def test_tiles_are_told_by_matrix_instructions():
    def tiles(opcode, n, warps=8):
        made = [assembly.Instruction(opcode)] * n
        product = ir.Product("int8", 128, 64, 128)
        return compile.tiles_of(assembly.Code(tuple(made)), (product,), warps)

    assert tiles("IMMA.16832.S8.S8", 32) == 1
    assert tiles("IMMA.16832.S8.S8", 64) == 2  # unrolled
    assert tiles("IGMMA.64x64x32.S8.S8", 4) == 1
    assert tiles("UTCIMMA", 8) == 2
    assert tiles("v_mfma_i32_32x32x16_i8", 16, warps=4) == 1
    assert tiles("FFMA", 64) is None


def test_tiles_where_two_products_use_one_opcode_or_one_is_done_twice():
    def tiles(products, warps, **count):
        made = [assembly.Instruction(opcode) for opcode, n in count.items() for _ in range(n)]
        return compile.tiles_of(assembly.Code(tuple(made)), products, warps)

    half = (ir.Product("half", 128, 64, 128), ir.Product("half", 128, 128, 64))
    assert tiles(half, 8, UTCHMMA=12) == 1
    both = (ir.Product("int8", 64, 64, 64), ir.Product("half", 64, 64, 64))
    assert tiles(both, 4, v_mfma_i32_32x32x16_i8=8, v_mfma_f32_32x32x8_f16=8) == 1


def test_targets_and_variants():
    assert [name[3:] for name in NVIDIA] == ["80", "86", "89", "90", "100", "103", "110", "120"]
    assert set(TARGETS) - set(NVIDIA) == {"gfx942", "gfx1100"}
    assert all(target.source for target in TARGETS.values())
    for variants in (default_variants(), full_variants()):
        names = [variant.name for variant in variants]
        assert len(set(names)) == len(names)
    assert {x.name for x in default_variants()} <= {x.name for x in full_variants()}
    tasks = suite.tasks_of(default_variants(), TARGETS)
    assert all(name in variant.targets for variant, name in tasks)
    assert len(tasks) == len(set(tasks))


# Compiling, in processes of its own


PLANTED = ("spills", "shared", "depth", "matrix", "loops", "loop length")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("triton"))
    names = ("good", "good on amd", *PLANTED)
    return run_alone("static_kernels.py", *names, TRITON_CACHE_DIR=cache)


@needs_triton
@pytest.mark.parametrize(
    ("name", "opcodes"),
    [
        ("good", {"IMMA.16832.S8.S8.SAT": 16, "HMMA.16816.F32": 32}),
        ("good on amd", {"v_mfma_i32_32x32x16_i8": 8, "v_mfma_f32_32x32x8_f16": 8}),
    ],
)
def test_a_compiled_kernel(compiled, name, opcodes):
    found = compiled[name]
    assert found["red"] == []
    (loop,) = found["compiled"]["loops"]
    assert loop["matrix"] == opcodes
    assert loop["tiles"] == 1
    assert sum(loop["mix"].values()) == loop["instructions"] < found["compiled"]["instructions"]
    assert [buffer["depth"] for buffer in loop["buffers"]] == [2, 2]
    assert 30 < found["compiled"]["registers"] <= 255


@needs_triton
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_red(compiled, name):
    assert {"shared": "shared memory"}.get(name, name) in compiled[name]["red"]


@needs_triton
def test_what_compiles_a_kernel_again(compiled):
    """Not a length; a stride that is not divisible by 16, and other options, do."""
    assert compiled["keys"] == {"n": 1, "stride": 2, "num_warps": 2}


def test_where_nothing_can_be_compiled(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if find_spec("triton") is not None:
        assert "TRITON_INTERPRET is set" in compile.why_not()
    monkeypatch.setattr(compile, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match="pip install triton"):
        compile.need_compiler()
