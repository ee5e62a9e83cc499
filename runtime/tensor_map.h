/* Tensor maps of a layer's weights, in backend memory: how the experts kernel's bulk copies find gate_up and down of each
 * local expert. Made when weights are bound. */
#ifndef MOEFLOW_TENSOR_MAP_H
#define MOEFLOW_TENSOR_MAP_H

#include "internal.h"

/* Makes the maps of these weights, in front of older ones that graphs may still use. Nothing on a backend without maps, for
 * a plan without experts, or for a layer without local experts. The caller has entered the context. */
moeflow_status tensor_maps_make(struct moeflow_layer *layer, const struct layer_weights *weights);

/* Gives back all of them. */
void tensor_maps_release(struct moeflow_layer *layer);
#endif
