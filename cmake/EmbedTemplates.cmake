# templates/* as one C file: `const struct embedded_file embedded_files[]` (gen/embed.h), so that moeflow-gen needs no source tree.
file(GLOB MOEFLOW_TEMPLATES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/templates/*.h ${CMAKE_SOURCE_DIR}/templates/*.cuh)
set(_out ${CMAKE_BINARY_DIR}/embedded_templates.c)
add_custom_command(OUTPUT ${_out}
  COMMAND ${CMAKE_COMMAND} -DOUT=${_out} "-DFILES=${MOEFLOW_TEMPLATES}" -P ${CMAKE_SOURCE_DIR}/cmake/embed.cmake
  DEPENDS ${MOEFLOW_TEMPLATES} ${CMAKE_SOURCE_DIR}/cmake/embed.cmake VERBATIM)
add_library(moeflow_templates STATIC ${_out})
target_include_directories(moeflow_templates PUBLIC ${CMAKE_SOURCE_DIR}/gen)
