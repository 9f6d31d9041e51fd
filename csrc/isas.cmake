# How each instruction set of isa.h is compiled: instruction_set(name, header in arch/, flags…), which the includer
# defines.
string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" processor)
if(processor MATCHES "^(x86_64|amd64)$")
  set(is_x86 ON)
endif()
option(SPARGE_X86 "the instruction sets of x86-64" ${is_x86})

instruction_set(portable portable)
instruction_set(tiles tiles)
if(SPARGE_X86)
  set(avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mfma -mf16c -mprefer-vector-width=512)
  set(amx -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16)
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag("${amx}" SPARGE_COMPILER_KNOWS_AMX)
  if(NOT SPARGE_COMPILER_KNOWS_AMX)
    message(FATAL_ERROR "the compiler must know AMX and AVX-512 BF16: gcc >= 11 or clang >= 12; "
                        "got ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
  endif()
  instruction_set(avx2 avx2 -mavx2 -mfma -mf16c)
  instruction_set(avx512 avx512 ${avx512})
  instruction_set(avx512_bf16 avx512 ${avx512} -mavx512bf16)
  instruction_set(amx amx ${avx512} ${amx})
endif()
