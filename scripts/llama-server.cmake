# Included by llama.cpp's build (CMAKE_PROJECT_INCLUDE, see scripts/llama-server) to build less, faster.
# llama-server alone takes 704 s of CPU time with -O3, and 464 s with -O1 (build b11434, on a busy machine).
# ggml keeps -O3: it does the arithmetic that the tests wait for.

# The worker of one model over several machines (docs/rpc.md) is built too: it takes a few seconds more.

function(build_only_servers folder)
  get_property(subfolders DIRECTORY ${folder} PROPERTY SUBDIRECTORIES)
  foreach(subfolder ${subfolders})
    build_only_servers(${subfolder})
  endforeach()
  get_property(targets DIRECTORY ${folder} PROPERTY BUILDSYSTEM_TARGETS)
  foreach(target ${targets})
    if(NOT target MATCHES "^(llama-server|ggml-rpc-server|rpc-server)$")
      set_property(TARGET ${target} PROPERTY EXCLUDE_FROM_ALL ON)
    endif()
    if(target MATCHES "^(llama|llama-common|mtmd|server-context|llama-server-impl|cpp-httplib)$")
      target_compile_options(${target} PRIVATE -O1)
    endif()
  endforeach()
endfunction()

cmake_language(DEFER DIRECTORY ${CMAKE_SOURCE_DIR} CALL build_only_servers ${CMAKE_SOURCE_DIR})
