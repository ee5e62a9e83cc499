/* Epilogue policies: what becomes of a grouped GEMM's FP32 sums. An epilogue turns one element's sums, one per weight
 * matrix, into a value, and stores two values of adjacent weight rows at one position. */
#ifndef MOEFLOW_EPILOGUE_CUH
#define MOEFLOW_EPILOGUE_CUH

#include "numeric.cuh"

namespace moeflow {

/* The numbers of the spec's enum. */
enum { activation_swiglu = 0, activation_swiglu_clamp = 1 };

__device__ __forceinline__ float swiglu(float gate, float up) {
  return gate / (1.0f + expf(-gate)) * up;
}

template <class Model>
struct SwiGlu {
  static __device__ __forceinline__ float of(float gate, float up) {
    return swiglu(gate, up);
  }
};

/* Gate bounded from above, up from both sides. A NaN passes: fminf would turn it into the limit. */
template <class Model>
struct ClampedSwiGlu {
  static __device__ __forceinline__ float of(float gate, float up) {
    constexpr float limit = Model::activation_limit;
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
    return swiglu(gate, up);
  }
};

template <class Model, int activation = Model::activation>
struct Activation;
template <class Model>
struct Activation<Model, activation_swiglu> : SwiGlu<Model> {};
template <class Model>
struct Activation<Model, activation_swiglu_clamp> : ClampedSwiGlu<Model> {};

/* Gate and up sums to activations, rounded to bf16. */
template <class Model>
struct StoreActivated {
  static constexpr int matrices = 2;
  uint16_t *out; /* [positions, columns] */
  int columns;

  __device__ __forceinline__ void store(int position, int column, const Eight (&sums)[matrices]) const {
    Eight values;
    for (int i = 0; i < 8; i++) values.value[i] = Activation<Model>::of(sums[0].value[i], sums[1].value[i]);
    store_eight_bf16(out + static_cast<int64_t>(position) * columns + column, values);
  }
};

/* Sums as they are, FP32. */
struct StoreFloat {
  static constexpr int matrices = 1;
  float *out; /* [positions, columns] */
  int columns;

  __device__ __forceinline__ void store(int position, int column, const Eight (&sums)[matrices]) const {
    store_eight_float(out + static_cast<int64_t>(position) * columns + column, sums[0]);
  }
};

}  // namespace moeflow
#endif
