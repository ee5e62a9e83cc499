/* Row-wait policies: what a GEMM block does before it reads the rows of its tile. */
#ifndef MOEFLOW_ROW_WAIT_CUH
#define MOEFLOW_ROW_WAIT_CUH

#include "abi.h"

namespace moeflow {

struct RowsPresent { /* earlier kernels of the stream have seen to it */
  __device__ __forceinline__ void before(const moeflow_tile &) const {}
};

}  // namespace moeflow
#endif
