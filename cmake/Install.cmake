# What `cmake --install` lays down: library, public header, tools, pkg-config file, CMake package. All of it may be moved as a whole.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS moeflow EXPORT moeflow-targets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${CMAKE_SOURCE_DIR}/runtime/moeflow.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS moeflow-gen moeflow-run moeflow-bench RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY ${CMAKE_SOURCE_DIR}/models/ DESTINATION ${CMAKE_INSTALL_DATADIR}/moeflow/models FILES_MATCHING PATTERN "*.yaml"
        PATTERN "*.tune")
install(FILES ${CMAKE_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

set(_package ${CMAKE_INSTALL_LIBDIR}/cmake/MoeFlow)
install(EXPORT moeflow-targets NAMESPACE MoeFlow:: DESTINATION ${_package} FILE MoeFlowTargets.cmake)
configure_package_config_file(${CMAKE_SOURCE_DIR}/cmake/MoeFlowConfig.cmake.in ${CMAKE_BINARY_DIR}/MoeFlowConfig.cmake
                              INSTALL_DESTINATION ${_package} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/MoeFlowConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/MoeFlowConfig.cmake ${CMAKE_BINARY_DIR}/MoeFlowConfigVersion.cmake DESTINATION ${_package})

file(RELATIVE_PATH MOEFLOW_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)  # from the .pc file up to the prefix: ../..
string(REGEX REPLACE "/$" "" MOEFLOW_PC_PREFIX "${MOEFLOW_PC_PREFIX}")
configure_file(${CMAKE_SOURCE_DIR}/cmake/moeflow.pc.in ${CMAKE_BINARY_DIR}/moeflow.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/moeflow.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
