/* The host poisons a lane while a kernel's threads are about to look: the threads of a block go one way together. With two
 * answers some would go on with shared memory that the others never filled; the emulator sees that at the next barrier. */
#include "combine_ring.cuh"
#include "down.cuh"
#include "emulated.h"
#include "exchange.cuh"
#include "expert_index.cuh"
#include "expert_prepare.cuh"
#include "gate_up.cuh"
#include "owner_reduce.cuh"
#include "pack.cuh"
#include "router.cuh"

namespace {

struct Model {
  static constexpr int hidden = 64;
  static constexpr int intermediate = 64;
  static constexpr int experts = 4;
  static constexpr int top_k = 2;
  static constexpr int score = 1;
  static constexpr bool correction_bias = false;
  static constexpr int groups = 1;
  static constexpr int top_groups = 1;
  static constexpr int group_score = 0;
  static constexpr int renormalize = 0;
  static constexpr float scale = 1.0f;
  static constexpr int activation = 0;
  static constexpr float activation_limit = 0;
  static constexpr int return_fp32 = 0;
  static constexpr int reduce_choices = 0;
  static constexpr float output_scale = 1.0f;
};
struct Router {
  static constexpr int threads = 128;
};
struct Rows {
  static constexpr int threads = 256;
};
struct Gemm {
  static constexpr int threads = 128;
  static constexpr int tile_tokens = 8;
  static constexpr int tile_rows = 64;
  static constexpr int tile_depth = 64;
  static constexpr int stages = 2;
};

constexpr int H = Model::hidden, I = Model::intermediate, E = Model::experts, K = Model::top_k, tokens = 2;
const Layout layout = {H, K};

/* One rank that sends itself two tokens; memory as a finished step leaves it. */
struct World {
  moeflow_lane lane = lane_at(1);
  moeflow_record record = {};
  Buffer<uint16_t> hidden{tokens * H}, out{tokens * H}, gate_up{E * 2 * I * H}, down{E * H * I}, activations{tokens * K * I};
  Buffer<float> logits{tokens * E}, weights{tokens * K}, token_weights{tokens * K}, outputs{tokens * K * H};
  Buffer<int32_t> ids{tokens * K}, places{E}, token_places{tokens * K}, counts{E}, offsets{E + 1}, entries{tokens * K};
  Buffer<int32_t> positions{tokens * K}, tile_count{1};
  Buffer<moeflow_tile> tiles{static_cast<size_t>(moeflow_tiles_max(tokens * K, E, 8))};
  Buffer<uint8_t> received{static_cast<size_t>(tokens * layout.bytes())};
  Buffer<uint8_t> returned{static_cast<size_t>(tokens * layout.return_bytes(false))};
  Buffer<uint8_t *> targets{1}, return_targets{1};
  Buffer<uint32_t> flags{3};
  Buffer<uint32_t *> peer_flags{1};
  uint32_t abort = 0;

  World() {
    for (size_t i = 0; i < ids.size(); i++) ids[i] = static_cast<int32_t>(i % E), weights[i] = 0.5f;
    for (int e = 0; e < E; e++) places[static_cast<size_t>(e)] = e;
    for (size_t i = 0; i < logits.size(); i++) logits[i] = static_cast<float>(i);
    hidden.fill(0), gate_up.fill(0), down.fill(0), flags.fill(0);
    targets[0] = received.data(), return_targets[0] = returned.data(), peer_flags[0] = flags.data();
    for (int number = 0; number < kernels; number++) launch(number);
    EXPECT_EQUAL(lane.epoch, 2u);
    lane = lane_at(1);
    flags.fill(0);
  }

  moeflow_rows_in in() {
    return {received.data(), tokens * layout.bytes(), tokens, 1, 0, tokens};
  }

  static constexpr int kernels = 9;
  void launch(int number) {
    const moeflow_rows_out out_rows = {targets.data(), tokens * layout.bytes()};
    const moeflow_rows_out home_rows = {return_targets.data(), tokens * layout.return_bytes(false)};
    const moeflow_matrix up_matrix = {reinterpret_cast<uint8_t *>(gate_up.data()), nullptr, 4 * I * H, 2 * H};
    const moeflow_matrix down_matrix = {reinterpret_cast<uint8_t *>(down.data()), nullptr, 2 * H * I, 2 * I};
    const uint8_t *from = reinterpret_cast<const uint8_t *>(hidden.data());
    const unsigned tile_blocks = static_cast<unsigned>(moeflow_tiles_max(tokens * K, E, 8));
    const moeflow_router_params router = {&lane, logits.data(), nullptr, ids.data(), weights.data(), tokens, 0};
    const moeflow_pack_params pack = {&lane,
                                      &record,
                                      from,
                                      ids.data(),
                                      weights.data(),
                                      places.data(),
                                      token_places.data(),
                                      token_weights.data(),
                                      out_rows,
                                      tokens,
                                      tokens,
                                      0,
                                      1,
                                      1,
                                      0,
                                      0,
                                      0};
    const moeflow_exchange_params exchange = {
        &lane, &record, {peer_flags.data(), flags.data(), &abort, 1000000000u, 1, 0, 1, 0}, MOEFLOW_PHASE_DISPATCH, 0};
    const moeflow_expert_index_params index = {&lane, &record, in(), counts.data(), E, 0};
    const moeflow_expert_prepare_params prepare = {&lane,
                                                   in(),
                                                   counts.data(),
                                                   offsets.data(),
                                                   entries.data(),
                                                   positions.data(),
                                                   tiles.data(),
                                                   tile_count.data(),
                                                   nullptr,
                                                   E,
                                                   8};
    const moeflow_gate_up_params up = {&lane, in(), entries.data(),    tiles.data(), tile_count.data(), up_matrix, 0, I,
                                       1,     0,    activations.data()};
    const moeflow_down_params low = {&lane,       activations.data(), tiles.data(), tile_count.data(),
                                     down_matrix, outputs.data()};
    const moeflow_owner_reduce_params reduce = {&lane, in(), positions.data(), outputs.data(), 0, home_rows, 1, 0};
    const moeflow_combine_params combine = {&lane,
                                            &record,
                                            token_places.data(),
                                            token_weights.data(),
                                            returned.data(),
                                            tokens * layout.return_bytes(false),
                                            reinterpret_cast<uint8_t *>(out.data()),
                                            tokens,
                                            0,
                                            1,
                                            1,
                                            0,
                                            0};
    const size_t up_bytes = static_cast<size_t>(moeflow_gemm_shared_bytes(2, 8, 64, 64, 2));
    const size_t low_bytes = static_cast<size_t>(moeflow_gemm_shared_bytes(1, 8, 64, 64, 2));
    switch (number) {
      case 0:
        return emulator::launch(1, 128, 0, [&] { moeflow::router<Model, Router>(router); });
      case 1:
        return emulator::launch(tokens, 256, 0, [&] { moeflow::pack<Model, Rows>(pack); });
      case 2:
        return emulator::launch(1, 128, 0, [&] { moeflow::exchange<Model, Router>(exchange); });
      case 3:
        return emulator::launch(1, 256, 0, [&] { moeflow::expert_index<Model, Rows>(index); });
      case 4:
        return emulator::launch(1, 256, 0, [&] { moeflow::expert_prepare<Model, Rows>(prepare); });
      case 5:
        return emulator::launch(tile_blocks, 128, up_bytes, [&] { moeflow::gate_up<Model, Gemm>(up); });
      case 6:
        return emulator::launch(tile_blocks, 128, low_bytes, [&] { moeflow::down<Model, Gemm>(low); });
      case 7:
        return emulator::launch(tokens, 256, 0, [&] { moeflow::owner_reduce<Model, Rows>(reduce); });
      case 8:
        return emulator::launch(tokens, 256, 0, [&] { moeflow::combine<Model, Rows>(combine); });
    }
  }
};

/* Poisoned before thread `from` of the first block has looked. */
void poison_during(int number, unsigned from) {
  World world;
  emulator::before_thread = [&](unsigned thread) {
    if (thread == from) world.lane.poison = MOEFLOW_POISON_ABORT;
  };
  world.launch(number);
  emulator::before_thread = nullptr;
  EXPECT_EQUAL(world.lane.poison, static_cast<uint32_t>(MOEFLOW_POISON_ABORT));
  if (number != 8) return;
  for (size_t i = 0; i < world.out.size(); i++) EXPECT_EQUAL(world.out[i], 0x7fc0);
  EXPECT_EQUAL(world.lane.epoch, 2u);
}

}  // namespace

int main() {
  for (int number = 0; number < World::kernels; number++) {
    for (unsigned from : {1u, 33u, 127u}) poison_during(number, from);
  }
  TEST_END;
}
