# templates/* as one C file: `const struct embedded_file embedded_files[]` (gen/embed.h), so that moeflow-gen needs no source tree.
set(MOEFLOW_TEMPLATES
  abi.h combine.cuh combine_ring.cuh dispatch.cuh down.cuh epilogue.cuh exchange.cuh expert_index.cuh expert_prepare.cuh
  experts.cuh experts_arrival.cuh experts_ring.cuh experts_rows.cuh experts_schedule.cuh experts_stream.cuh
  experts_stream_ring.cuh experts_sums.cuh fill.cuh gate_up.cuh grouped_gemm.cuh header.cuh identity.cuh lane.cuh numeric.cuh
  operand_bf16.cuh owner_reduce.cuh pack.cuh pack_weights.cuh peers.cuh ptx.cuh ptx_hopper.cuh random.h read_memory.cuh
  read_memory.h return_combine.cuh router.cuh row.cuh row_wait.cuh scan.cuh)
list(TRANSFORM MOEFLOW_TEMPLATES PREPEND ${CMAKE_SOURCE_DIR}/templates/)
set(_out ${CMAKE_BINARY_DIR}/embedded_templates.c)
add_custom_command(OUTPUT ${_out}
  COMMAND ${CMAKE_COMMAND} -DOUT=${_out} "-DFILES=${MOEFLOW_TEMPLATES}" -P ${CMAKE_SOURCE_DIR}/cmake/embed.cmake
  DEPENDS ${MOEFLOW_TEMPLATES} ${CMAKE_SOURCE_DIR}/cmake/embed.cmake VERBATIM)
add_library(moeflow_templates STATIC ${_out})
target_include_directories(moeflow_templates PUBLIC ${CMAKE_SOURCE_DIR}/gen)
