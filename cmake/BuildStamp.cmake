# build_stamp.h: commit, dirty flag and tree ids of templates/, runtime/ and gen/, looked up at each build, rewritten when changed.
set(_stamp ${CMAKE_BINARY_DIR}/stamp/build_stamp.h)
add_custom_target(moeflow_stamp_run ALL
  COMMAND ${CMAKE_COMMAND} -DSOURCE=${CMAKE_SOURCE_DIR} -DOUT=${_stamp} -P ${CMAKE_SOURCE_DIR}/cmake/stamp.cmake
  BYPRODUCTS ${_stamp} VERBATIM)
add_library(moeflow_stamp INTERFACE)
target_include_directories(moeflow_stamp INTERFACE ${CMAKE_BINARY_DIR}/stamp)
add_dependencies(moeflow_stamp moeflow_stamp_run)
