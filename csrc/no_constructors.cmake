# Fails if one of some object files runs code when it is loaded: cmake -DOBJDUMP=objdump -P no_constructors.cmake FILE…
#
# Such code would be compiled for an instruction set, and stop an import on every machine that lacks it.
set(files "")
foreach(i RANGE ${CMAKE_ARGC})
  if("${CMAKE_ARGV${i}}" MATCHES "\\.(o|obj)$")
    list(APPEND files "${CMAKE_ARGV${i}}")
  endif()
endforeach()
if(NOT files)
  message(FATAL_ERROR "no object files were given")
endif()
foreach(file IN LISTS files)
  execute_process(COMMAND "${OBJDUMP}" -h "${file}" OUTPUT_VARIABLE sections COMMAND_ERROR_IS_FATAL ANY)
  if(sections MATCHES "\\.init_array|\\.ctors|__mod_init_func")
    message(FATAL_ERROR "${file} has a static constructor, which would run on machines without its instruction set")
  endif()
endforeach()
